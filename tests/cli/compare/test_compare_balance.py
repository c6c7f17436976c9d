"""``compare`` of a layer with and without balancing: the results agree, and loads are those that a plan predicts."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from moe_dispatch import DispatcherConfig, build_dispatcher
from moe_dispatch.dispatchers import SlotWeights
from moe_dispatch_tools.compare import contenders
from moe_dispatch_tools.compare.command import make_workloads
from moe_dispatch_tools.compare.workload import MOST_STEPS, WORKLOADS, Workload, make_material, real_rows, workload_ids
from moe_dispatch_tools.traces import Trace
from tests.cli.compare.test_compare import asked, outcome, written
from tests.cli.conftest import Command
from tests.cli.test_command import start
from tests.dispatchers.layer import random_routing, random_rows, small_config
from tests.ranks import run_ranks
from tests.traces.recorded import record_batches

BALANCED = "alltoall+balance=least_loaded"
EXACTLY = ("--mode", "eager", "--dtype", "float32")


@pytest.fixture
def config(tmp_path: Path) -> str:
    return written(tmp_path, balance="manual", hidden_size=16, pad_multiple=1)


def test_loads_are_measured(command: Command, config: str) -> None:
    shape = ["--ranks", "2", "--tokens", "64", "--steps", "2", "--rounds", "1", "--routing", "last_expert"]
    report = asked(command, "-b", f"alltoall,{BALANCED}", config, *shape, "--expert-width", "8", *EXACTLY)
    plain, balanced = outcome(report, "alltoall"), outcome(report, BALANCED)
    assert report["cases"][0]["agree"]
    # All 64 + 56 rows name an expert of rank 1. With a copy, each rank keeps its own rows.
    assert (plain["imbalance"], plain["peak_rows"]) == (2, 120)
    assert (balanced["imbalance"], balanced["peak_rows"]) == (pytest.approx(64 / 60), 64)
    # Both have the few bytes with which ranks compare their parameters once.
    moved = balanced["bytes_sent"]["experts"] - plain["bytes_sent"]["experts"]
    assert moved == 3 * 16 * 8 * 4, "the weights of one expert travel"
    assert plain["bytes_sent"]["experts"] < 100


def test_exact_balance_needs_no_other_field_and_tells_of_copies_it_left_out(command: Command, tmp_path: Path) -> None:
    """Without a field for it, a copy needs many rows: 1024 tokens have them, 64 do not."""
    shape = ["--ranks", "2", "--steps", "1", "--rounds", "1", "--routing", "last_expert", *EXACTLY]
    file = written(tmp_path, hidden_size=16, pad_multiple=1)
    report = asked(command, "-b", "alltoall,alltoall+balance=exact", file, *shape, "--tokens", "1024")
    plain, balanced = outcome(report, "alltoall"), outcome(report, "alltoall+balance=exact")
    assert report["cases"][0]["agree"]
    assert (plain["imbalance"], balanced["imbalance"]) == (2, 1)
    assert plain["bytes_sent"]["experts"] == 0 < balanced["bytes_sent"]["experts"], "weights travel"
    answer = command("compare", "-b", "alltoall+balance=exact", file, *shape, "--tokens", "64")
    assert "1 dispatch in 1 step left out copies of experts" in answer.out


BOUNDS = (1.0, 1.25)
SIDES = (
    "alltoall",
    "alltoall+balance=manual+balance.spare_experts_per_rank=4+place=eplb",
    *(f"alltoall+balance=exact+balance.bound={bound}+balance.min_rows=0" for bound in BOUNDS),
)
COMPARED = ("W2_hot_rank", "W4_source_ragged")


def test_workloads_of_megatron(command: Command, tmp_path: Path) -> None:
    """Exact plans keep their bound, and a placement of ``eplb`` is good for steps like the first one only."""
    shape = ["--ranks", "2", "--tokens", "64", "--steps", "2", "--rounds", "1", "--routing", ",".join(COMPARED)]
    file = written(tmp_path, hidden_size=16, pad_multiple=1)
    report = asked(command, "-b", ",".join(SIDES), file, *shape, "--expert-width", "8", *EXACTLY)
    assert [case["routing"] for case in report["cases"]] == list(COMPARED)
    for case in report["cases"]:
        assert case["agree"]
        assert case["tokens"] == ([32, 96] if case["routing"] == "W4_source_ragged" else [64, 64])
        plain, placed, *exact = case["outcomes"]
        moved = [one["bytes_sent"]["experts"] for one in case["outcomes"]]
        assert moved[0] == 0
        assert moved[2] >= moved[3]
        for one, bound in zip(exact, BOUNDS, strict=True):
            assert one["peak_rows"] <= math.ceil(bound * 2 * 64 * 2 / 2)
        assert (plain["peak_rows"] > 1.2 * 2 * 64) == (case["routing"] != "W4_source_ragged")
        assert exact[0]["imbalance"] == 1
        if case["routing"] == "W2_hot_rank":
            assert placed["imbalance"] < 1.2 < plain["imbalance"]


@pytest.mark.slow
def test_memory_has_the_weights_of_slots(config: str) -> None:
    """Four spare slots of each rank are filled, and their weights and gradients live beside few rows."""
    placed, width = "alltoall+balance=manual+balance.spare_experts_per_rank=4+place=eplb", 2048
    shape = ["--ranks", "2", "--tokens", "4", "--steps", "1", "--rounds", "1", "--expert-width", str(width)]
    process = start("compare", "-b", f"alltoall+balance=null,{placed}", config, *shape, *EXACTLY, "--json")
    out, error = process.communicate(timeout=300)
    assert (process.returncode, error) == (0, "")
    plain, with_copies = (one["peak_bytes"] for one in json.loads(out)["cases"][0]["outcomes"])
    assert with_copies - plain > 2 * 4 * 3 * 16 * width * 4


def test_workloads_do_not_depend_on_the_ranks() -> None:
    """Ranks share the same tokens, each token names different experts, and each workload is what its name says."""
    config = small_config()

    def shared(name: str, size: int) -> torch.Tensor:
        workload = Workload(tokens=192 // size, routing=name)
        of_ranks = [make_material(workload, config, rank=rank, ranks=size) for rank in range(size)]
        return torch.cat([material.steps[1].batch().ids_TK for material in of_ranks])

    for name in ("W2_hot_rank", "W4_source_ragged"):
        assert torch.equal(shared(name, 2), shared(name, 4))
    for name in WORKLOADS:
        for step in range(4):
            ids = workload_ids(name, 960, 2, 8, step)
            assert all(len(set(row)) == 2 for row in ids.tolist())
            rows = torch.bincount(ids.flatten(), minlength=8).float()
            hot = rows > 1.2 * rows.mean()
            wanted = {
                "W1_hot_expert_set": 2,
                "W2_hot_rank": 2,
                "W3_spread_hot_experts": 4,
                "W5_zero_expert_rank": 4,
                "W6_rotating_hotspot": 2,
                "W7_burst": 2 * (step == 3),
            }
            assert hot.sum() == wanted.get(name, 0), (name, step, rows)
            if name == "W6_rotating_hotspot":
                assert hot.nonzero()[0] == 2 * (step // 3)
            if name in ("W2_hot_rank", "W3_spread_hot_experts"):
                assert hot[0]
            assert (rows[:4].sum() == 0) == (name == "W5_zero_expert_rank")


def test_weights_in_wrong_slots_are_seen(command: Command, config: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: the weights of a rank's slots are in the opposite order."""

    class Wrong(SlotWeights):  # type: ignore[misc]
        def fetch(self, sent: Any, *stacked: Any) -> Any:
            landed, weights = super().fetch(sent, *stacked)
            return landed, tuple(weight.flip(0) for weight in weights)

    monkeypatch.setattr(contenders, "SlotWeights", Wrong)
    shape = ["--ranks", "2", "--tokens", "16", "--steps", "1", "--rounds", "1", "--expert-width", "8", *EXACTLY]
    assert not asked(command, "-b", BALANCED, config, *shape, status=1)["cases"][0]["agree"]


# What the recorder's tests record: two layers, seven dispatches each, in layouts of every kind.
SIZES: dict[str, Any] = {"num_experts": 8, "top_k": 2, "hidden_size": 16, "pad_multiple": 4}
DISPATCHES, MOST_ROWS = 14, 10
IN_FLOAT32 = ("--dtype", "float32")
ROOM: dict[str, dict[str, Any]] = {"eager": {}, "graph-safe": {"graph_safe": True, "max_tokens_per_rank": MOST_ROWS}}


def record(path: Path, backend: str = "alltoall", **fields: Any) -> Path:
    run_ranks(lambda group: record_batches(group, path, small_config(backend, pad_multiple=4, **fields)), 2)
    return path


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return record(tmp_path_factory.mktemp("recorded") / "run.safetensors")


@pytest.fixture
def file(tmp_path: Path) -> str:
    return written(tmp_path, **SIZES)


@pytest.mark.parametrize(("backend", "mode"), [("alltoall", "graph-safe"), ("allgather", "eager")])
def test_results_agree_and_costs_are_those_of_a_plan(command: Command, tmp_path: Path, backend: str, mode: str) -> None:
    """Ids named twice, ids of -1, a rank without tokens, lengths that only a device knew."""
    path, file = record(tmp_path / "run.safetensors", backend, **ROOM[mode]), written(tmp_path, **SIZES)
    report = asked(command, "-b", backend, file, "--trace", path, "--mode", mode, "--rounds", "1", *IN_FLOAT32)
    (case,) = report["cases"]
    assert case["agree"]
    assert case["trace"] == {"file": str(path), "dispatches": DISPATCHES}
    assert (case["routing"], report["ranks"], case["steps"]) == (None, 2, DISPATCHES)
    real = [[len(real_rows(part)) for part in call.parts] for call in Trace.load(path).calls]
    assert case["tokens"] == [max(of_rank) for of_rank in zip(*real, strict=True)]
    found = outcome(report, backend, mode)
    room = ["--set", "graph_safe=true", "--set", f"max_tokens_per_rank={MOST_ROWS}"] if ROOM[mode] else []
    planned = command("plan", file, "--routing", str(path), "-b", backend, "--dtype", "float32", "--json", *room)
    (plan,) = json.loads(planned.out)["backends"]
    assert 2 * (plan["forward"]["expected"] + plan["backward"]["expected"]) == pytest.approx(
        sum(found["bytes_sent"].values())
    )
    assert 2 * plan["rank_padding"]["expected"] == pytest.approx(found["rows_padded"]["rank"])


def test_every_rank_has_its_own_routing(recorded: Path) -> None:
    workload = Workload(dtype="float32", trace=recorded, steps=DISPATCHES)
    ranks = [make_material(workload, DispatcherConfig(**SIZES), rank=rank, ranks=2).steps for rank in range(2)]
    for step, call in enumerate(Trace.load(recorded).calls):
        for rank, part in enumerate(call.parts):
            batch, form = ranks[rank][step].batch(), ranks[rank][step].input_layout
            real_T = real_rows(part)
            chosen = batch.ids_TK >= 0
            assert torch.equal(batch.ids_TK, part.routing.topk_ids[real_T])
            assert torch.equal(batch.weights_TK[chosen], part.routing.topk_weights[real_T].double()[chosen])
            assert batch.weights_TK[~chosen].isnan().all()
            assert (*form.leading, 16) == tuple(part.shape)
            assert form.layout.on_host == part.on_host
    first, again, other = (ranks[0][step].batch().x_TD for step in (0, 0, 7))
    assert torch.equal(first, again)
    assert not torch.equal(first[:3], other[:3])


def test_few_steps_are_taken_of_a_long_trace(command: Command, file: str, recorded: Path, tmp_path: Path) -> None:
    shape = ["--trace", str(recorded), "--mode", "eager", "--steps", "1", "--rounds", "1"]
    few = command("compare", "-b", "alltoall", file, *shape).out
    assert f"routing of {recorded}, the first 1 of {DISPATCHES} dispatches" in few
    assert "2 ranks over gloo" in few
    dispatcher, path = build_dispatcher(small_config("local")), tmp_path / "long.safetensors"
    with Trace.record(dispatcher, path):
        for seed in range(MOST_STEPS + 1):
            dispatcher.dispatch(random_rows(2), random_routing(2, seed))
    (workload,), ranks = make_workloads(trace=path)
    assert (workload.steps, workload.recorded, ranks) == (MOST_STEPS, MOST_STEPS + 1, 1)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--tokens", "8"], "--tokens must not be given with --trace, .* got '8'"),
        (["--routing", "skewed"], "--routing must not be given with --trace, .* got 'skewed'"),
        (["--ranks", "4"], "Trace.check: ep_size must be 2, as in the trace, got 4"),
    ],
)
def test_what_does_not_fit_the_trace_is_refused(
    arguments: list[str], told: str, command: Command, file: str, recorded: Path
) -> None:
    answer = command("compare", "-b", "alltoall", file, "--trace", str(recorded), *arguments)
    assert (answer.status, answer.out) == (2, "")
    assert re.match(f"Error: {told}", answer.error), answer.error


def test_a_promise_of_equal_rows_is_not_taken_for_a_trace(command: Command, tmp_path: Path, recorded: Path) -> None:
    """Ranks have 4 and 0 rows in one dispatch, and an assumption that is wrong would hang."""
    file = written(tmp_path, **SIZES, row_counts="assume")
    report = asked(
        command, "-b", "allgather", file, "--trace", recorded, "--mode", "eager", "--steps", "4", *IN_FLOAT32
    )
    assert report["cases"][0]["agree"]
