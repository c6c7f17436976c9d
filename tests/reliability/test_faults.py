"""Real processes that die, stop, stay away or go astray: the others name them. `make faults` runs every case."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from moe_dispatch import Dispatched
from moe_dispatch_testing import run_processes
from tests.reliability.faults import SELECTION, SIZE, Case, Ending, verdict
from tests.reliability.soak import Count, Leak, growth, soak

SCRIPT = Path(__file__).with_name("faults.py")
LIMIT = 2.0


def run_script(folder: Path, *arguments: str) -> dict[str, Any]:
    endings = folder / "endings.json"
    command = [sys.executable, str(SCRIPT), f"--watchdog={LIMIT:g}", f"--json={endings}", *arguments]
    job = subprocess.run(command, capture_output=True, text=True, timeout=110, check=False)
    assert endings.exists(), job.stdout + job.stderr
    told: dict[str, Any] = json.loads(endings.read_text())
    return told


@pytest.fixture(scope="module")
def selection(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return run_script(tmp_path_factory.mktemp("faults"))


@pytest.mark.slow
def test_survivors_name_the_rank_that_is_missing(selection: dict[str, Any]) -> None:
    assert sorted(selection) == sorted(case.name for case in SELECTION)
    assert {name: told["problem"] for name, told in selection.items() if told["problem"]} == {}


@pytest.mark.slow
def test_no_alarm_where_one_rank_is_slow_but_alive(tmp_path: Path) -> None:
    (told,) = run_script(tmp_path, "--slow-steps=300").values()
    assert told["problem"] == ""
    assert [ending["status"] for ending in told["endings"]] == [0] * SIZE


KILLED = Case("alltoall", "counts", "kill")
GOOD = Ending(
    error="LostPeerError",
    text="counts of 'layers.1' (call 20) [...] Look at rank 1 first.",
    seconds=3.0,
    status=3,
    exit_seconds=0.5,
    log="",
)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({}, ""),
        ({"error": "RuntimeError", "log": "Timed out"}, "RuntimeError Timed out"),
        ({"text": "counts of 'layers.1'. Look at rank 3 first."}, "Look at rank 3 first"),
        ({"text": "Look at rank 1 first."}, "names no layer"),
        ({"text": "refusal of 'layers.1'. Look at rank 1 first."}, "went on to another collective"),
        ({"seconds": 20.0}, "only after 20.0 s"),
        ({"exit_seconds": 20.0}, "took 20.0 s to exit"),
        ({"error": "", "status": None}, "status None, no error"),
    ],
)
def test_what_counts_as_a_failure(changes: dict[str, Any], problem: str) -> None:
    told = verdict(KILLED, [GOOD, GOOD, dataclasses.replace(GOOD, **changes), GOOD], LIMIT)
    assert bool(told) == bool(problem)
    assert problem in told


def test_an_alarm_in_a_clean_run_counts_as_a_failure() -> None:
    clean = dataclasses.replace(GOOD, error="", status=0)
    assert verdict(Case("alltoall"), [clean] * SIZE, LIMIT) == ""
    assert "LostPeerError" in verdict(Case("alltoall"), [GOOD] * SIZE, LIMIT)


KEPT: list[Any] = []


def leak_everything(all_sent: list[Dispatched]) -> None:
    KEPT.extend((all_sent[0].rows, torch.ones(2**19)))  # of 2 MiB
    KEPT.append(Path("/proc/self/statm").open())  # noqa: SIM115
    threading.Thread(target=threading.Event().wait, daemon=True).start()


def grown(leak: Leak) -> list[str]:
    counts: list[list[Count]] = run_processes(soak, 2, 0.0, 512, leak)
    return [sentence for of_rank in counts for sentence in growth(of_rank)]


@pytest.mark.slow
def test_nothing_grows() -> None:
    assert grown(len) == []


@pytest.mark.slow
def test_leaks_are_seen() -> None:
    told = grown(leak_everything)
    for name in ("memory_mib", "tensors", "threads", "files"):
        assert any(sentence.startswith(f"{name} grew from") for sentence in told)
