"""``compare --trace``: the routing is the trace's, on every rank its own, and costs are those that a plan tells."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from moe_dispatch import DispatcherConfig, build_dispatcher
from moe_dispatch_tools.compare.command import make_workloads
from moe_dispatch_tools.compare.workload import MOST_STEPS, Workload, make_material, real_rows
from moe_dispatch_tools.traces import Trace
from tests.cli.compare.test_compare import asked, outcome, written
from tests.cli.conftest import Command
from tests.dispatchers.layer import random_routing, random_rows, small_config
from tests.ranks import run_ranks
from tests.traces.recorded import record_batches

# What the recorder's tests record: two layers, seven dispatches each, in layouts of every kind.
SIZES: dict[str, Any] = {"num_experts": 8, "top_k": 2, "hidden_size": 16, "pad_multiple": 4}
DISPATCHES, MOST_ROWS = 14, 10
EXACTLY = ("--dtype", "float32")
ROOM: dict[str, dict[str, Any]] = {"eager": {}, "graph-safe": {"graph_safe": True, "max_tokens_per_rank": MOST_ROWS}}


def record(path: Path, backend: str = "alltoall", **fields: Any) -> Path:
    run_ranks(lambda group: record_batches(group, path, small_config(backend, pad_multiple=4, **fields)), 2)
    return path


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return record(tmp_path_factory.mktemp("recorded") / "run.safetensors")


@pytest.fixture
def config(tmp_path: Path) -> str:
    return written(tmp_path, **SIZES)


@pytest.mark.parametrize(("backend", "mode"), [("alltoall", "graph-safe"), ("allgather", "eager")])
def test_results_agree_and_costs_are_those_of_a_plan(command: Command, tmp_path: Path, backend: str, mode: str) -> None:
    """Ids named twice, ids of -1, a rank without tokens, lengths that only a device knew."""
    path, config = record(tmp_path / "run.safetensors", backend, **ROOM[mode]), written(tmp_path, **SIZES)
    report = asked(command, "-b", backend, config, "--trace", path, "--mode", mode, "--rounds", "1", *EXACTLY)
    (case,) = report["cases"]
    assert case["agree"]
    assert case["trace"] == {"file": str(path), "dispatches": DISPATCHES}
    assert (case["routing"], report["ranks"], case["steps"]) == (None, 2, DISPATCHES)
    real = [[len(real_rows(part)) for part in call.parts] for call in Trace.load(path).calls]
    assert case["tokens"] == [max(of_rank) for of_rank in zip(*real, strict=True)]
    found = outcome(report, backend, mode)
    room = ["--set", "graph_safe=true", "--set", f"max_tokens_per_rank={MOST_ROWS}"] if ROOM[mode] else []
    planned = command("plan", config, "--routing", str(path), "-b", backend, "--dtype", "float32", "--json", *room)
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


def test_few_steps_are_taken_of_a_long_trace(command: Command, config: str, recorded: Path, tmp_path: Path) -> None:
    shape = ["--trace", str(recorded), "--mode", "eager", "--steps", "1", "--rounds", "1"]
    few = command("compare", "-b", "alltoall", config, *shape).out
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
    arguments: list[str], told: str, command: Command, config: str, recorded: Path
) -> None:
    answer = command("compare", "-b", "alltoall", config, "--trace", str(recorded), *arguments)
    assert (answer.status, answer.out) == (2, "")
    assert re.match(f"Error: {told}", answer.error), answer.error


def test_a_promise_of_equal_rows_is_not_taken_for_a_trace(command: Command, tmp_path: Path, recorded: Path) -> None:
    """Ranks have 4 and 0 rows in one dispatch, and an assumption that is wrong would hang."""
    config = written(tmp_path, **SIZES, row_counts="assume")
    report = asked(command, "-b", "allgather", config, "--trace", recorded, "--mode", "eager", "--steps", "4", *EXACTLY)
    assert report["cases"][0]["agree"]
