"""A whole layer under torch.compile(fullgraph=True): the results of eager calls, and when it compiles again."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from moe_dispatch import BSHD, SBHD, THD, Routing, Rows
from moe_dispatch.balance import ExpertPlacement
from moe_dispatch.config import ConstraintOverrides
from moe_dispatch.dispatchers import Dispatcher
from moe_dispatch.errors import StateError
from moe_dispatch.layouts import Layout
from moe_dispatch_testing import HostSyncError, refuse_host_syncs
from tests.compile.layer import (
    HIDDEN,
    NUM_EXPERTS,
    TOP_K,
    Layer,
    apply_experts,
    dispatcher_for,
    expect_same,
    graphs,
    needs_compiler,
    no_recompilation,
    step,
    tensors,
)
from tests.dispatchers.layer import by_operators

BACKENDS = ["local", "allgather", "alltoall"]
SAFE: dict[str, Any] = {"graph_safe": True, "max_tokens_per_rank": 16}
MODES = pytest.mark.parametrize("fields", [{}, SAFE], ids=["eager", "graph-safe"])
# Traced only, which counts graphs and checks shapes. "aot_eager" compiles the backward too, and takes twice as long.
traced = partial(torch.compile, fullgraph=True, backend="eager")
compiled_whole = partial(torch.compile, fullgraph=True, backend="aot_eager")


@pytest.mark.slow
@needs_compiler
@pytest.mark.parametrize(("backend", "fields"), [("local", {}), ("allgather", SAFE), ("alltoall", {})], ids=BACKENDS)
def test_inductor_gives_what_eager_gives_without_compiling_again(backend: str, fields: dict[str, Any]) -> None:
    layer = Layer(dispatcher_for(backend, pad_multiple=8, **fields), torch.bfloat16)
    compiled = torch.compile(layer, fullgraph=True)
    expect_same(compiled, layer, tensors(10, 0, torch.bfloat16))
    with no_recompilation():
        for seed in range(1, 20):
            expect_same(compiled, layer, tensors(10, seed, torch.bfloat16))
    assert graphs() == 1


@MODES
def test_a_new_placement_is_used_without_compiling_again(fields: dict[str, Any]) -> None:
    dispatcher = dispatcher_for("alltoall", balance="manual", **fields)
    layer = Layer(dispatcher, torch.float32)
    compiled = traced(layer)
    inputs = tensors(10, 0, torch.float32)
    results = []
    for slots in ((0, 1, 2, 3, 4, 5, 6, 7, -1), (7, -1, 5, 4, 3, 2, 1, 0, 6), (4, 3, 2, 1, 0, 5, -1, 7, 6)):
        dispatcher.place(ExpertPlacement(8, (slots,)))
        expect_same(compiled, layer, inputs)
        results.append(step(layer, layer, inputs)[0])
    assert not torch.equal(results[0], results[1])  # this layer has the matrices of slots, not of experts
    assert graphs() == 1


@pytest.mark.slow
@needs_compiler
@MODES
def test_unbacked_rows_never_compile_again(fields: dict[str, Any]) -> None:
    layer = Layer(dispatcher_for("alltoall", **fields), torch.float32)
    compiled = torch.compile(layer, fullgraph=True)
    for rows in (6, 1, 0, 2, 16, 0):
        expect_same(compiled, layer, tensors(rows, rows, torch.float32), unbacked=True)
    assert graphs() == 1


@pytest.mark.parametrize(
    ("backend", "fields"), [pytest.param("allgather", {}, marks=pytest.mark.slow), ("alltoall", SAFE)], ids=str
)
def test_changing_rows_compile_once_more_and_for_0_and_1(backend: str, fields: dict[str, Any]) -> None:
    layer = Layer(dispatcher_for(backend, **fields), torch.float32)
    compiled = traced(layer)
    for rows, so_far in ((6, 1), (8, 2), (16, 2), (0, 3), (1, 4), (7, 4), (0, 4)):
        expect_same(compiled, layer, tensors(rows, rows, torch.float32))
        assert graphs() == so_far, f"{rows} rows"


EXACT = {"name": "alltoall", "reduction": "exact"}
CONFIGS: dict[str, dict[str, Any]] = {
    "padded_wire": {"backend": "alltoall", "pad_multiple": 4, "wire": "bfloat16", "debug": True},
    "weighed_by_experts": {"backend": "allgather", "weights": "experts", "row_counts": "check"},
    "static": {"backend": "allgather", "row_counts": "static", "max_tokens_per_rank": 12},
    "exact_aligned": {"backend": EXACT, "constraints": ConstraintOverrides(row_multiple=8)},
}


@pytest.mark.parametrize("name", CONFIGS)
def test_every_config(name: str) -> None:
    dtype = torch.float64 if "exact" in name else torch.float32
    layer = Layer(dispatcher_for(**CONFIGS[name]), dtype)
    compiled = compiled_whole(layer)
    for seed in range(2):
        expect_same(compiled, layer, tensors(10, seed, dtype))


LAYOUTS: dict[str, tuple[Callable[[int], Layout], tuple[int, ...]]] = {
    "sbhd": (lambda turn: SBHD(), (5, 2)),
    "lengths": (lambda turn: BSHD([2 + turn, 4]), (2, 5)),
    "rows": (lambda turn: Rows(4 + turn), (10,)),
    "gaps": (lambda turn: THD([0, 2 + turn, 7 + turn], [0, 5, 10]), (10,)),
}


@pytest.mark.parametrize(
    ("name", "planned"), [("sbhd", False), ("lengths", False), ("lengths", True), ("rows", False), ("gaps", False)]
)
def test_layouts_and_plans_from_outside(name: str, planned: bool) -> None:
    make, shape = LAYOUTS[name]
    layer = Layer(dispatcher_for("allgather"), torch.float32)  # the one whose plans hold sizes
    compiled = traced(layer)
    for turn in range(3):
        inputs, layout = tensors(10, turn, torch.float32, shape), make(turn)
        expect_same(compiled, layer, inputs, layer.dispatcher.plan(layout, like=inputs[0]) if planned else layout)
    assert graphs() <= 2  # host integers of a layout become symbols once they change


def test_layout_made_inside() -> None:
    layer = Layer(dispatcher_for(), torch.float32)

    def run(x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        return layer.forward(x, ids, weights, THD(ends))

    inputs = tensors(10, 0, torch.float32)
    compiled: Any = traced(run)
    for ends in ([0, 4, 10], [0, 9, 10]):
        torch.testing.assert_close(compiled(*inputs, torch.tensor(ends)), layer(*inputs), rtol=0, atol=0)
    assert graphs() == 1


@pytest.mark.parametrize(("backend", "cut"), [("allgather", True), ("alltoall", False)])
def test_other_rows_the_same_way(backend: str, cut: bool) -> None:
    layer = Layer(dispatcher_for(backend, pad_multiple=4), torch.float32)
    dispatcher = layer.dispatcher

    def run(x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, plan: Any) -> torch.Tensor:
        sent = dispatcher.dispatch(x, Routing(ids, weights), plan)
        other = dispatcher.dispatch(x * 2, again=sent)
        return dispatcher.combine(apply_experts(sent.rows * other.rows, sent.offs, layer.matrices), other)

    compiled = traced(run)
    for seed in range(2):
        inputs = tensors(10, seed, torch.float32)
        plan = dispatcher.plan(Rows(7 - seed) if cut else None, like=inputs[0])
        got, wanted = step(compiled, layer, inputs, plan), step(run, layer, inputs, plan)
        assert all(map(torch.equal, got, wanted))


def test_compiled_dispatch_is_combined_in_eager_mode() -> None:
    dispatcher = dispatcher_for("alltoall")
    x, ids, weights = tensors(10, 0, torch.float32)
    sent = traced(lambda *args: dispatcher.dispatch(args[0], Routing(*args[1:])))(x, ids, weights)
    wanted = dispatcher.dispatch(x, Routing(ids, weights))
    assert (sent.host_counts, sent.tokens_per_expert_list) == (None, wanted.tokens_per_expert_list)
    assert torch.equal(dispatcher.combine(sent.rows, sent), dispatcher.combine(wanted.rows, wanted))


def test_compiled_calls_are_counted_like_eager_ones() -> None:
    inputs, found = tensors(10, 0, torch.float32), []
    for compiles in (True, False):
        # A channel of its own, because others may still be open here.
        layer = Layer(dispatcher_for("alltoall", pad_multiple=4, max_tokens_per_rank=20 + compiles), torch.float32)
        run = traced(layer) if compiles else layer
        for plan in (None, layer.dispatcher.plan(Rows(7), like=inputs[0])):
            step(run, layer, inputs, plan)
        found.append(layer.dispatcher.metrics())
    assert found[0].dispatches == found[1].dispatches == 2
    assert found[0].rows_skipped == found[1].rows_skipped == {"cut": 3, "masked": 0}
    assert torch.equal(found[0].real_tokens_per_expert, found[1].real_tokens_per_expert)
    assert found[0].rows_padded == found[1].rows_padded
    assert found[0].collectives == found[1].collectives
    compiled, eager = (metrics.tokens_by_layer for metrics in found)
    assert not compiled, "layers of one code share a graph"
    assert eager[""].equal(found[1].real_tokens_per_expert)


def test_rows_masked_on_the_way_are_counted_but_not_by_layer() -> None:
    layer = Layer(dispatcher_for("local", max_tokens_per_rank=99), torch.float32)
    traced(layer)(*tensors(10, 0, torch.float32), Rows(6))
    assert layer.dispatcher.metrics().rows_skipped == {"cut": 0, "masked": 4}
    with pytest.raises(StateError, match=r"ran in torch\.compile, where calls do not tell their layer\. Add up sent"):
        layer.dispatcher.expert_counts()


MAXIMUM = 12


def graph_safe(backend: Any, **fields: Any) -> Dispatcher:
    return dispatcher_for(backend, **{"graph_safe": True, "max_tokens_per_rank": MAXIMUM, **fields})


@pytest.mark.parametrize("backend", BACKENDS)
def test_shapes_do_not_depend_on_the_routing(backend: str) -> None:
    """Seen by the compiler: the experts' rows have a number for a size, not a symbol."""
    seen: list[torch.Size] = []
    layer = Layer(graph_safe(backend), torch.float32)

    def compiler(module: torch.fx.GraphModule, examples: Any) -> Any:
        sizes = [node.meta["example_value"] for node in module.graph.nodes if "dispatch" in str(node.target)]
        seen.extend(value.shape for values in sizes for value in values)
        return module

    torch.compile(layer, fullgraph=True, backend=compiler)(*tensors(6, 0, torch.float32))
    assert seen
    assert all(type(size) is int for shape in seen for size in shape)
    assert seen[0][1] == HIDDEN


def test_a_finite_capacity_drops_alike_and_growing_compiles_again() -> None:
    layer = Layer(graph_safe("allgather", graph_safe={"capacity_factor": 0.5, "on_overflow": "drop"}), torch.float32)
    compiled = compiled_whole(layer)
    inputs = tensors(MAXIMUM, 1, torch.float32)
    expect_same(compiled, layer, inputs)
    dropped = step(compiled, layer, inputs)[0]
    assert layer.dispatcher.grow().overflowed
    expect_same(compiled, layer, inputs)
    assert not torch.equal(step(compiled, layer, inputs)[0], dropped)
    assert graphs() == 2


@pytest.mark.parametrize("backend", BACKENDS)
def test_operators_do_not_wait_for_the_host(backend: str) -> None:
    """Dynamo does not run under a mode, so this is a selective checkpoint, which uses the same operators."""
    layer = Layer(graph_safe(backend, pad_multiple=8), torch.float32)
    x, ids, weights = tensors(7, 0, torch.float32)
    plan = layer.dispatcher.plan(Rows(num_real=torch.tensor([5])), like=x)
    with refuse_host_syncs():
        by_operators(lambda x: layer(x, ids, weights, plan), x).sum().backward()
    assert x.grad is not None


def test_operators_of_an_eager_dispatcher_do() -> None:
    layer, (x, *way) = Layer(dispatcher_for("local"), torch.float32), tensors(7, 0, torch.float32)
    with pytest.raises(HostSyncError, match=r"__int__ at .*index\.py"), refuse_host_syncs():
        by_operators(lambda x: layer(x, *way), x)


def test_growing_before_a_backward_that_recomputes() -> None:
    """The recomputation, part of the graph, has the room that was traced."""
    layer = Layer(graph_safe("alltoall", graph_safe={"capacity_factor": 0.5, "on_overflow": "drop"}), torch.float32)
    inputs = tensors(MAXIMUM, 1, torch.float32)
    wanted = step(layer, layer, inputs)

    def recomputing(*arguments: Any) -> Any:
        return checkpoint(layer, *arguments, use_reentrant=False)

    compiled = compiled_whole(recomputing)

    def run(*arguments: Any) -> Tensor:
        y: Tensor = compiled(*arguments)
        assert layer.dispatcher.grow().overflowed
        return y

    for one, other in zip(step(run, layer, inputs), wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)


def _mapped(x: Tensor, ids: Tensor, weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """x, and a map and dense probabilities that name the experts of ``ids``, none in the first row; leaves."""
    del weights
    ids[:1] = -1
    routing_map = torch.zeros(len(ids), NUM_EXPERTS + 1, dtype=torch.bool)
    routing_map.scatter_(1, ids + 1, True)
    probs = torch.rand(len(ids), NUM_EXPERTS, generator=torch.Generator().manual_seed(len(ids)))
    return x, routing_map[:, 1:].contiguous(), probs.requires_grad_()


class MapLayer(Layer):
    def forward(self, x: Tensor, ids: Tensor, weights: Tensor, plan: Any = None) -> Tensor:
        """``ids`` is the map, ``weights`` the dense probabilities."""
        routing = Routing.from_map(ids, weights, top_k=TOP_K)
        return super().forward(x, routing.topk_ids, routing.topk_weights, plan)


def test_routings_from_maps_and_other_row_counts_compile_nothing_again() -> None:
    layer = MapLayer(dispatcher_for("alltoall", pad_multiple=4), torch.float32)
    run = traced(layer, dynamic=True)
    inputs = _mapped(*tensors(10, 0, torch.float32))
    assert inputs[1].sum(1).unique().tolist() == [0, 1, 2], "rows with fewer slots than top_k"
    expect_same(run, layer, inputs, layer.dispatcher.plan(like=inputs[0]))
    expect_same(run, layer, inputs)
    with no_recompilation():
        for turn, rows in enumerate((7, 12, 10)):
            expect_same(run, layer, _mapped(*tensors(rows, turn, torch.float32)))


def test_a_map_that_cannot_fit_is_refused_while_it_is_traced() -> None:
    _, routing_map, probs = (tensor.detach() for tensor in _mapped(*tensors(10, 0, torch.float32)))
    for given, text in (((routing_map.int(), probs), "must be bool"), ((routing_map, probs[:5]), "the same shape")):
        torch._dynamo.reset()
        with pytest.raises(torch._dynamo.exc.Unsupported, match=text):
            traced(lambda *given: Routing.from_map(*given, top_k=TOP_K).topk_ids)(*given)
