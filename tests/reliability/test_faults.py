"""Real processes that die, stop, stay away or go astray: the others name them. `make faults` runs every case."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from moe_dispatch import Dispatched, DispatcherConfig, build_dispatcher
from moe_dispatch.capabilities.observers.watchdog import RankNote, WatchedCall, watch_group, watch_of
from moe_dispatch_testing import run_processes
from tests.pages import blocks, run_page
from tests.ranks import run_ranks
from tests.reliability.faults import SELECTION, SIZE, Case, Ending, verdict
from tests.reliability.soak import Count, Leak, growth, soak

SCRIPT = Path(__file__).with_name("faults.py")
LIMIT = 2.0


def run_script(*arguments: str) -> str:
    """The last line of what it prints."""
    command = [sys.executable, str(SCRIPT), f"--watchdog={LIMIT:g}", *arguments]
    job = subprocess.run(command, capture_output=True, text=True, timeout=110, check=False)
    assert job.returncode == 0, job.stdout + job.stderr
    return job.stdout.splitlines()[-1]


@pytest.mark.slow
def test_survivors_name_the_rank_that_is_missing() -> None:
    assert run_script() == f"{len(SELECTION)} cases, 0 failed"


@pytest.mark.slow
def test_no_alarm_where_one_rank_is_slow_but_alive() -> None:
    assert run_script("--slow-steps=300") == "1 cases, 0 failed"


KILLED = Case("alltoall", "counts", "kill")
GOOD = Ending(
    error="LostPeerError",
    text="counts of 'layers.1' (call 20) [...] Look at rank 1 first.",
    seconds=3.0,
    status=3,
    log="",
)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({}, ""),
        ({"error": "RuntimeError", "log": "Timed out"}, "Timed out"),
        ({"text": "counts of 'layers.1'. Look at rank 3 first."}, "Look at rank 3 first"),
        ({"text": "Look at rank 1 first."}, "names no layer"),
        ({"text": "refusal of 'layers.1'. Look at rank 1 first."}, "went on to another collective"),
        ({"seconds": 20.0}, "only after 20.0 s"),
        ({"status": None}, "status None, LostPeerError"),
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


def test_the_code_of_the_page() -> None:
    def body(group: dist.ProcessGroup) -> float | None:
        run_page("reliability.md", DispatcherConfig=DispatcherConfig, build_dispatcher=build_dispatcher, group=group)
        watch = watch_of(group)
        return None if watch is None else watch.seconds

    assert run_ranks(body, 2) == [60, 60]


def note(number: int, phase: str, *, alive: bool = True) -> RankNote:
    return RankNote(
        "vm", 9, False, number, phase.split()[0], "in", phase, 2.0, 19, "combine of 'layers.0' (call 19)", alive
    )


def test_the_error_of_the_page() -> None:
    (group,) = run_ranks(lambda group: group, 1)
    watch = watch_group(group, 2)
    watch.layer = "layers.1"
    here, lost = note(20, "counts of 'layers.1' (call 20)"), note(12, "combine of 'layers.0' (call 12)", alive=False)
    told = watch._text(WatchedCall(watch, 20, "counts", 72), [here, lost, here, here])
    assert told == blocks("docs/reliability.md", "text")[0].strip()
