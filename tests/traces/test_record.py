"""What a recording keeps, and what it costs: nothing of a step is changed by it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from moe_dispatch import Routing, build_dispatcher
from moe_dispatch.errors import TraceError
from moe_dispatch.permutation import merge_slots
from moe_dispatch_testing import refuse_host_syncs
from moe_dispatch_tools.traces import Part, Trace
from tests.dispatchers.layer import Group, on_ranks, outcomes, random_routing, random_rows, small_config
from tests.ranks import run_ranks
from tests.traces.recorded import Given, batches, record_batches, run

CONFIGS = {1: small_config("local"), 2: small_config("alltoall"), 4: small_config("allgather", pad_multiple=4)}


def same_part(part: Part, given: Given) -> None:
    x, routing, layout = given
    assert part.routing.topk_ids.dtype == torch.int64
    assert torch.equal(part.routing.topk_ids, routing.topk_ids)
    assert part.routing.topk_weights.dtype == routing.topk_weights.dtype
    assert torch.equal(part.routing.topk_weights, routing.topk_weights)
    assert (part.shape, part.dtype, str(part.layout)) == (x.shape, x.dtype, str(layout))
    recorded, real = (each.valid_T(part.num_rows) for each in (part.layout, layout))
    assert (recorded is None) == (real is None)
    assert recorded is None or real is None or torch.equal(recorded, real)
    assert part.on_host


def check_batches(path: Path, size: int) -> Trace:
    trace = Trace.load(path)
    assert (trace.ep_size, trace.ranks, trace.layers) == (size, tuple(range(size)), ("layers.0", "dispatcher 1"))
    assert [(call.step, call.layer) for call in trace.calls] == [(step, layer) for step in range(7) for layer in (0, 1)]
    for call in trace.calls:
        for rank, part in enumerate(call.parts):
            same_part(part, batches(rank)[call.step])
    return trace


@pytest.mark.parametrize("size", CONFIGS)
def test_everything_comes_back(tmp_path: Path, size: int) -> None:
    path = tmp_path / "made" / "run.safetensors"
    on_ranks(lambda group: record_batches(group, path, CONFIGS[size]), size)
    trace = check_batches(path, size)
    assert trace.config == CONFIGS[size]
    assert trace.backend_name == CONFIGS[size].backend
    assert trace.needs.equal_rows == (size == 4)
    assert list(tmp_path.rglob("*.*")) == [path], "nothing else is left"
    assert path.stat().st_mode & 0o077 == (tmp_path / "made").stat().st_mode & 0o066, "others may read it"


def test_tokens_are_those_that_experts_saw_and_results_are_those_without_a_recording(tmp_path: Path) -> None:
    """Not rows that are no tokens, nor slots of -1, nor an expert's second slot of one row."""

    def body(group: Group) -> Tensor:
        dispatcher, given = build_dispatcher(CONFIGS[2], group), batches(group.rank())
        plain = [run(dispatcher, each) for each in given]
        seen = []
        with Trace.record(dispatcher, tmp_path / "run.safetensors"):
            for (x, routing, layout), expected in zip(given, plain, strict=True):
                sent = dispatcher.dispatch(x, routing, layout)
                seen.append(sent.real_tokens_per_expert)
                assert torch.equal(dispatcher.combine(sent.rows, sent), expected)
        return torch.stack(seen)

    seen = torch.cat(run_ranks(body, 2), 1)
    assert torch.equal(Trace.load(tmp_path / "run.safetensors").tokens_per_expert(), seen)
    assert seen.sum() > 20


def test_part_says_what_is_sent() -> None:
    x, routing, layout = batches(0)[0]
    part = Part(routing=routing, layout=layout, on_host=True, shape=x.shape, dtype=x.dtype)
    real = [0, 1, 4, 5, 6]
    expected = merge_slots(routing.topk_ids[real], routing.topk_weights[real], asks=True)[0]
    assert (expected != routing.topk_ids[real]).any(), "a duplicate among them"
    assert torch.equal(part.sent_ids(cut=True), expected)
    whole = part.sent_ids(cut=False)
    assert torch.equal(whole[real], expected)
    assert (whole[[2, 3]] == -1).all()


def test_steps_are_bounded_for_each_dispatcher(tmp_path: Path) -> None:
    """A call that one rank does not record is not in the trace: a block may be left early by a ``break``."""
    path = tmp_path / "run.safetensors"
    run_ranks(lambda group: record_batches(group, path, CONFIGS[2], steps=3 - group.rank()), 2)
    trace = Trace.load(path)
    assert [(call.layer, call.step) for call in trace.calls] == [(0, 0), (1, 0), (0, 1), (1, 1)]
    assert (trace.steps, trace.max_rows) == (2, 10)
    same_part(trace.calls[3].parts[1], batches(1)[1])


def test_what_is_changed_afterwards_is_recorded_as_it_was(tmp_path: Path) -> None:
    dispatcher, (x, routing, layout) = build_dispatcher(CONFIGS[1]), batches(0)[0]
    with Trace.record(dispatcher, tmp_path / "run.safetensors"):
        dispatcher.dispatch(x, routing, layout)
        for tensor in (routing.topk_ids, routing.topk_weights, *layout.metadata):
            tensor.zero_()
        dispatcher.close()  # the demo's model does so before its training returns
    same_part(Trace.load(tmp_path / "run.safetensors").calls[0].parts[0], batches(0)[0])


def test_asynchronous_dispatches_are_recorded(tmp_path: Path) -> None:
    def body(group: Group) -> None:
        dispatcher = build_dispatcher(CONFIGS[2], group)
        with Trace.record(dispatcher, tmp_path / "run.safetensors"):
            sent = [dispatcher.dispatch(random_rows(3), random_routing(3, seed), async_op=True) for seed in (1, 2)]
            for each in reversed(sent):
                each.wait()

    on_ranks(body, 2)
    ids = [call.parts[1].routing.topk_ids for call in Trace.load(tmp_path / "run.safetensors").calls]
    assert torch.equal(torch.stack(ids), torch.stack([random_routing(3, seed).topk_ids for seed in (1, 2)]))


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_recomputation_is_not_recorded_again(tmp_path: Path, use_reentrant: bool) -> None:
    dispatcher, x = build_dispatcher(CONFIGS[1]), random_rows(4).requires_grad_()
    calls = []

    def layer(x: Tensor) -> Tensor:
        calls.append(1)
        return run(dispatcher, (x, random_routing(4), dispatcher.layout_of(x)))

    with Trace.record(dispatcher, tmp_path / "run.safetensors"):
        for _ in range(2):
            checkpoint(layer, x, use_reentrant=use_reentrant).sum().backward()
    assert len(calls) == 4
    assert [call.step for call in Trace.load(tmp_path / "run.safetensors").calls] == [0, 1]


def test_graph_safe_steps_stay_without_host_syncs(tmp_path: Path) -> None:
    config = small_config("local", graph_safe=True, max_tokens_per_rank=20)
    dispatcher, (x, routing, layout) = build_dispatcher(config), batches(0)[0]
    plan = dispatcher.plan(layout, like=x)  # lengths on the host are read here
    with Trace.record(dispatcher, tmp_path / "run.safetensors"), refuse_host_syncs() as found:
        dispatcher.dispatch(x, routing, plan)
    assert found == []
    trace = Trace.load(tmp_path / "run.safetensors")
    same_part(trace.calls[0].parts[0], batches(0)[0])
    assert not trace.cuts(trace.calls[0].parts[0]), "graph-safe rows are masked"


def test_call_that_a_rank_refused_is_on_no_rank(tmp_path: Path) -> None:
    """Counted on one rank only, it would shift all later calls of that rank against its peers'."""

    def body(group: dist.ProcessGroup) -> None:
        dispatcher = build_dispatcher(CONFIGS[2], group)
        with Trace.record(dispatcher, tmp_path / "run.safetensors"):
            with pytest.raises(Exception, match=r"hidden size 8|rank 1 refused"):
                dispatcher.dispatch(random_rows(3, 16 if group.rank() == 0 else 8), random_routing(3, 1))
            dispatcher.dispatch(random_rows(3), random_routing(3, 2))

    run_ranks(body, 2)
    (call,) = Trace.load(tmp_path / "run.safetensors").calls
    for part in call.parts:
        assert torch.equal(part.routing.topk_ids, random_routing(3, 2).topk_ids)


def test_error_leaves_what_each_rank_has(tmp_path: Path) -> None:
    path = tmp_path / "run.safetensors"

    def body(group: dist.ProcessGroup) -> None:
        dispatcher = build_dispatcher(CONFIGS[2], group)
        with Trace.record(dispatcher, path):
            run(dispatcher, batches(group.rank())[0])
            if group.rank() == 1:
                raise ArithmeticError("loss is NaN")

    peer, failed = outcomes(body, 2, seconds=0.5)
    assert isinstance(failed, ArithmeticError)
    for rank, error in enumerate((peer, failed)):
        own = tmp_path / f"run.rank{rank}.safetensors"
        assert f"The part of this rank is in {own}." in error.__notes__
        trace = Trace.load(own)
        assert (trace.ranks, trace.ep_size) == ((rank,), 2)
        same_part(trace.calls[0].parts[0], batches(rank)[0])
        with pytest.raises(TraceError, match=rf"here: \S+ must hold all 2 ranks, got rank {rank}\. Record a run"):
            Trace.load_whole(own, "here")
    assert not path.exists()


def test_nothing_recorded(tmp_path: Path) -> None:
    dispatcher = build_dispatcher(CONFIGS[1])
    with Trace.record(dispatcher, tmp_path / "run.safetensors"):
        dispatcher.dispatch(random_rows(3), random_routing(3), again=None)
        sent = dispatcher.dispatch(random_rows(0), Routing(torch.empty(0, 2, dtype=torch.int64), torch.empty(0, 2)))
        dispatcher.dispatch(random_rows(0), again=sent)
    trace = Trace.load(tmp_path / "run.safetensors")
    assert [call.parts[0].num_rows for call in trace.calls] == [3, 0], "not again=sent, which has no routing of its own"
    with Trace.record(dispatcher, tmp_path / "empty.safetensors"):
        pass
    empty = Trace.load(tmp_path / "empty.safetensors")
    assert (empty.calls, empty.steps, empty.max_rows, empty.layers) == ((), 0, 0, ())
