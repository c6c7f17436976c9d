"""A compiled layer of a graph-safe dispatcher: static sizes, nothing compiled again, and no host sync inside."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from moe_dispatch import Rows
from moe_dispatch.dispatchers import Dispatcher, operators
from moe_dispatch_testing import HostSyncError, refuse_host_syncs
from tests.compile.layer import HIDDEN, Layer, dispatcher_for, expect_same, graphs, step, tensors

BACKENDS = ["local", "allgather", "alltoall"]
MAXIMUM = 12


def graph_safe(backend: Any, **fields: Any) -> Dispatcher:
    return dispatcher_for(backend, graph_safe=True, max_tokens_per_rank=MAXIMUM, **fields)


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


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_finite_capacity_drops_alike_and_growing_compiles_again(backend: str) -> None:
    layer = Layer(graph_safe(backend, capacity_factor=0.5, on_overflow="drop"), torch.float32)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    inputs = tensors(MAXIMUM, 1, torch.float32)
    expect_same(compiled, layer, inputs)
    dropped = step(compiled, layer, inputs)[0]
    assert layer.dispatcher.grow().overflowed
    expect_same(compiled, layer, inputs)
    assert not torch.equal(step(compiled, layer, inputs)[0], dropped)
    assert graphs() == 2


@pytest.mark.parametrize("backend", BACKENDS)
def test_operators_do_not_wait_for_the_host(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Dynamo does not run under a mode, so the verbs are told to use operators, whose bodies the checker looks into."""
    monkeypatch.setattr(operators, "is_recorded", lambda lease: True)
    layer = Layer(graph_safe(backend, pad_multiple=8), torch.float32)
    x, ids, weights = tensors(7, 0, torch.float32)
    plan = layer.dispatcher.plan(Rows(num_real=torch.tensor([5])), like=x)
    with refuse_host_syncs():
        layer(x, ids, weights, plan).sum().backward()
    assert x.grad is not None


def test_operators_of_an_eager_dispatcher_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operators, "is_recorded", lambda lease: True)
    layer = Layer(dispatcher_for("local"), torch.float32)
    with pytest.raises(HostSyncError, match=r"__int__ at .*index\.py"), refuse_host_syncs():
        layer(*tensors(7, 0, torch.float32))


def test_growing_before_a_backward_that_recomputes() -> None:
    """The recomputation, part of the graph, has the room that was traced."""
    layer = Layer(graph_safe("alltoall", capacity_factor=0.5, on_overflow="drop"), torch.float32)
    inputs = tensors(MAXIMUM, 1, torch.float32)
    wanted = step(layer, layer, inputs)

    def recomputing(*arguments: Any) -> Any:
        return checkpoint(layer, *arguments, use_reentrant=False)

    compiled = torch.compile(recomputing, fullgraph=True, backend="aot_eager")

    def run(*arguments: Any) -> Tensor:
        y: Tensor = compiled(*arguments)
        assert layer.dispatcher.grow().overflowed
        return y

    for one, other in zip(step(run, layer, inputs), wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)
