"""Examples that are scripts: the converted block has the numbers of the plain one; what others print and draw."""

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
from torch import Tensor

import balance_layer
import convert_model
import profile_layer
import time_pipelines
from convert_model import ExpertParallelMoE, PlainMoE
from moe_dispatch_testing import run_processes

ROOT = Path(__file__).parents[2]
PNG_SIGNATURE = b"\x89PNG"


def finished(script: str, *arguments: str, launcher: tuple[str, ...] = ()) -> str:
    """What a script wrote, once it has ended with 0."""
    process = subprocess.run(
        [sys.executable, *launcher, str(ROOT / "examples" / script), *arguments],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=500,
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
    rows = rows_of(finished("convert_model.py"))
    assert {backend: row[0] for backend, row in rows.items()} == {"alltoall": 4, "allgather": 4, "local": 1}
    for backend, (_, *differences) in rows.items():
        assert max(differences) <= 1e-6, backend
    assert max(rows["alltoall"][1:]) > 0, "expert gradients are summed in another order"


@pytest.mark.slow
def test_torchrun_starts_the_ranks() -> None:
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    output = finished("convert_model.py", "--backend", "alltoall", launcher=launcher)
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


@pytest.mark.slow
def test_trace_and_picture(tmp_path: Path) -> None:
    finished("profile_layer.py", "--ranks", "2", "--out", str(tmp_path))
    events = sorted(profile_layer.ranges(tmp_path / "trace.json"), key=lambda event: float(event["ts"]))
    names = [event["name"].removeprefix("moe_dispatch::") for event in events]
    assert names == ["dispatch", "experts", "combine", "combine.backward", "dispatch.backward"]
    assert (tmp_path / "trace.png").read_bytes().startswith(PNG_SIGNATURE)


@pytest.mark.slow
def test_steps_in_chunks_are_timed_beside_one_dispatch() -> None:
    found, _ = run_processes(profile_layer.time_chunks, 2, "alltoall", 4, 1)
    chunks = ["chunks", "chunks without overlap", "chunks with recomputation"]
    checkpoints = ["checkpoint", "checkpoint on kept routes", "checkpoint, dispatch saved"]
    assert list(found) == ["one dispatch", *chunks, *checkpoints]
    assert found["one dispatch"][1] == 1


@pytest.mark.slow
def test_table(tmp_path: Path) -> None:
    sizes = "--ranks 2 --experts 8 --hidden 16 --inner 16 --tokens 64 --steps 2 --zipf 2 --min-rows 0"
    picture = tmp_path / "ratios.png"
    _, *lines = finished("balance_layer.py", *sizes.split(), "--picture", str(picture)).splitlines()
    table = (map(str.strip, line.split("|")) for line in lines[:3])
    tokens, sides, _, busiest, ratio, moved = zip(*table, strict=True)
    assert tokens == ("2.0,      32",) * 3
    assert sides == ("without", "with", "even")
    rows = [int(numbers.split(",")[1]) for numbers in busiest]
    assert rows[0] > 1.1 * max(rows[1:])
    assert float(ratio[0]) > 1.1 > max(map(float, ratio[1:]))
    assert (moved[0], moved[2]) == ("0.0", "0.0")
    clocks = [line.split("|")[1].split(":")[0].strip() for line in lines[3:]]
    assert clocks == [f"{clock} time without / {side}" for clock in ("wall", "cpu") for side in ("with", "even")]
    assert picture.read_bytes().startswith(PNG_SIGNATURE)


def test_ratio_is_that_of_the_fastest_quarters() -> None:
    assert balance_layer.ratio([9, 6, 8, 7, 100, 100, 100, 100], [3, 5, 50, 50, 50, 50, 50, 50]) == 6.5 / 4


def test_saved_bytes_are_those_that_are_still_there_after_the_forward() -> None:
    freed, kept, weight = (torch.ones(size, requires_grad=True) for size in (10, 20, 30))

    def forward() -> Tensor:
        copy = freed.clone()
        result = (copy * copy).sum() + (kept * kept).sum() + (weight * 2).sum()
        copy.untyped_storage().resize_(0)
        return result

    _, saved = balance_layer.with_saved_bytes(forward)
    assert saved == 20 * 4


def measured_pipelines(rank: int) -> list[time_pipelines.Line]:
    sizes = time_pipelines.Sizes(tokens=8, hidden=16, inner=8, micro_batches=4, steps=1)
    assert dist.group.WORLD is not None
    return time_pipelines.measure(dist.group.WORLD, torch.device("cpu"), sizes)


@pytest.mark.slow
def test_only_torchs_checkpoint_repeats_blocks_and_exchanges() -> None:
    for lines in run_processes(measured_pipelines, 4, timeout=timedelta(seconds=60)):
        found = {(line.experts, line.checkpoint): (line.runs, line.exchanges) for line in lines}
        runs, exchanges = found.pop(("plain", "torch's"))
        assert runs == 10  # 2, and 8 groups of weights
        assert exchanges > 0
        assert found == {line: (2 if line[1] == "ours" else 1, 0) for line in found}
        assert len(found) == 4
        assert max(line.far for line in lines) < 1e-5


def test_table_of_pipelines() -> None:
    line = time_pipelines.Line(experts="lean", checkpoint="ours", runs=2, exchanges=0, time_ratio=1.1, far=0)
    head, row = time_pipelines.table([line]).splitlines()
    assert row.split() == ["lean", "ours", "2.00", "0", "1.10"]
    assert len(row) == len(head)


@pytest.mark.parametrize(
    ("argument", "value", "text"),
    [
        ("--ranks", "3", "--ranks must be 4, got 3"),
        ("--micro-batches", "3", "--micro-batches must be even, got 3"),
        ("--steps", "0", "sizes must be 1 or more"),
    ],
)
def test_pipelines_of_other_sizes_are_refused(
    capsys: pytest.CaptureFixture[str], argument: str, value: str, text: str
) -> None:
    assert time_pipelines.main([argument, value]) == 1
    assert text in capsys.readouterr().err


def test_trainer_routes_as_the_rollout_did(tmp_path: Path) -> None:
    for package in ("ray", "transformers"):
        pytest.importorskip(package, reason="the packages of the ray-example extra are not installed")
    replayed, free = finished("ray_replay.py", "--samples", "4", "--out", str(tmp_path)).splitlines()[-2:]
    assert re.match(r"with replay: 0\.0 % of the slots differ .* by at most \d\.\de-1[3-6], ", replayed)
    drift = re.match(r"without replay: (\d+\.\d) % of the slots differ", free)
    assert drift is not None
    assert float(drift[1]) > 0.1
    assert (tmp_path / "replay.png").stat().st_size > 10_000
