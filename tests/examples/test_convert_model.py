"""The converted block: few lines changed, the numbers of the plain one, and a difference is seen."""

from __future__ import annotations

import inspect
import os
import re
import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import convert_model
from convert_model import ExpertParallelMoE, PlainMoE
from moe_dispatch_testing import run_processes

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "examples" / "convert_model.py"


def finished(*arguments: str, launcher: tuple[str, ...] = ()) -> str:
    """What the script wrote, once it has ended with 0."""
    process = subprocess.run(
        [sys.executable, *launcher, str(SCRIPT), *arguments],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert process.returncode == 0, process.stdout + process.stderr
    return process.stdout


def rows_of(output: str) -> dict[str, list[float]]:
    """Ranks and six differences by backend."""
    rows = re.findall(r"^(\w+) +(\d+(?: +\S+){6})  same$", output, re.MULTILINE)
    return {backend: [float(word) for word in numbers.split()] for backend, numbers in rows}


@pytest.mark.slow
def test_all_backends_give_the_numbers_of_the_plain_block() -> None:
    rows = rows_of(finished())
    assert {backend: row[0] for backend, row in rows.items()} == {"alltoall": 4, "allgather": 4, "local": 1}
    for backend, (_, *differences) in rows.items():
        assert max(differences) <= 1e-6, backend
    assert max(rows["alltoall"][1:]) > 0, "expert gradients are summed in another order"


@pytest.mark.slow
def test_torchrun_starts_the_ranks() -> None:
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    output = finished("--backend", "alltoall", launcher=launcher)
    assert output.count("alltoall") == 1, "one rank reports"
    assert rows_of(output)["alltoall"][0] == 2


def test_fewer_than_twenty_lines_change() -> None:
    changed = convert_model.changed_lines()
    assert 0 < len(changed) < 20
    before, after = (inspect.getsource(block).splitlines() for block in (PlainMoE, ExpertParallelMoE))
    removed, added = ([line[1:] for line in changed if line[0] == sign] for sign in "-+")
    assert len(before) - len(removed) + len(added) == len(after)
    assert set(removed) <= set(before)
    assert set(added) <= set(after)
    assert 15 <= len(before) <= 30


def test_blocks_have_the_same_state_dict_keys() -> None:
    plain, block = PlainMoE(4, 6, 8, 2), ExpertParallelMoE(4, 6, 8, 2, "local", None)
    assert list(block.state_dict()) == list(plain.state_dict())


def plant(monkeypatch: pytest.MonkeyPatch, *, expert: int, factor: float) -> None:
    """The converted block computes one of a rank's experts wrong."""
    right = ExpertParallelMoE.__init__

    def wrong(self: ExpertParallelMoE, *args: Any) -> None:
        right(self, *args)
        self.mlp.register_forward_hook(lambda _, given, rows: rows * (factor if given[0] == expert else 1))

    monkeypatch.setattr(ExpertParallelMoE, "__init__", wrong)


def right_and_wrong(rank: int) -> list[convert_model.Comparison]:
    """On the second rank one expert is computed wrong in the second comparison."""
    place = dist.group.WORLD, torch.device("cpu")
    right = convert_model.compare(*place, "alltoall")
    with pytest.MonkeyPatch.context() as monkeypatch:
        plant(monkeypatch, expert=2, factor=1.001 if rank == 1 else 1)
        return [right, convert_model.compare(*place, "alltoall")]


@pytest.mark.slow
def test_ranks_agree_on_what_differs_on_one_of_them() -> None:
    first, second = run_processes(right_and_wrong, 2, timeout=timedelta(seconds=60))
    for mine, its in zip(first, second, strict=True):
        assert mine.differences == its.differences
    assert first[0].same
    assert not first[1].same
    assert 1e-4 < first[1].differences["output"] < 1e-2


@pytest.mark.parametrize("factor", [1.001, float("nan")])
def test_a_difference_ends_with_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], factor: float
) -> None:
    plant(monkeypatch, expert=7, factor=factor)
    assert convert_model.main(["--backend", "local"]) == 1
    assert re.search(r"^local +1 .*  DIFFERENT$", capsys.readouterr().out, re.MULTILINE)


def test_no_difference_ends_with_0(capsys: pytest.CaptureFixture[str]) -> None:
    assert convert_model.main(["--backend", "local"]) == 0
    output = capsys.readouterr().out
    assert list(rows_of(output)) == ["local"]
    assert output.startswith(f"{len(convert_model.changed_lines())} lines changed; ")
