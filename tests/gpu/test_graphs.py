"""CUDA graphs of graph-safe layers, and that nothing in them waits for the host. One rank, with and without NCCL."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from moe_dispatch import BSHD, Routing, capture
from moe_dispatch.balance import ExpertPlacement
from moe_dispatch.errors import InputError, StateError
from tests.gpu.first_hour.layer import Layer
from tests.gpu.syncs import refused_syncs

BACKENDS = ("local", "alltoall", "allgather")
pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("nccl")]


def layer_of(backend: str, **fields: Any) -> Layer:
    """A small layer, which is graph-safe; its leaves stay where they are, as a graph needs."""
    return Layer(backend, "cuda", small=True, **{"graph_safe": True, **fields})


def with_an_invalid_id(ids: Tensor) -> Tensor:
    return ids.index_fill(0, torch.tensor([3], device="cuda"), 8)


@pytest.mark.parametrize("backend", BACKENDS)
def test_replay_equals_eager(backend: str) -> None:
    layer = layer_of(backend)
    graph = capture(layer.dispatcher, layer.step, *layer.inputs(0))
    for seed in range(1, 6):
        inputs = layer.inputs(seed)
        expected = layer.step(*inputs)
        for got, wanted in zip(graph.replay(*inputs), expected, strict=True):
            torch.testing.assert_close(got, wanted, rtol=0, atol=0)


@pytest.mark.parametrize("backend", BACKENDS)
def test_nothing_waits_for_the_host(backend: str) -> None:
    layer = layer_of(backend)
    inputs = layer.inputs(0)
    layer.step(*inputs)
    with refused_syncs():
        layer.step(*inputs)


# torch warns of its own warm-up, in which a leaf is used on two streams.
@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream")
@pytest.mark.parametrize("backend", BACKENDS)
def test_graphed_callable(backend: str) -> None:
    layer = layer_of(backend)

    def doubled(x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        sent = layer.dispatcher.dispatch(x, Routing(ids, weights))
        return layer.dispatcher.combine(sent.rows * 2, sent)

    graphed: Any = torch.cuda.make_graphed_callables(doubled, layer.inputs(0))
    results = []
    runs: tuple[Any, ...] = (doubled, graphed)
    for run in runs:
        x, ids, weights = layer.inputs(7)
        y: Tensor = run(x, ids, weights)
        results.append((y.detach().clone(), *torch.autograd.grad(y, (x, weights), torch.ones_like(y))))
    for got, wanted in zip(*results, strict=True):
        torch.testing.assert_close(got, wanted, rtol=0, atol=0)


def test_overflow_in_a_replay_is_seen() -> None:
    layer = layer_of("alltoall", graph_safe={"capacity_factor": 0.5, "on_overflow": "drop"})
    x, ids, weights = layer.inputs(0)
    graph = capture(layer.dispatcher, layer.step, x, torch.full_like(ids, -1), weights)
    assert not layer.dispatcher.check().overflowed
    graph.replay(*layer.inputs(1))
    assert layer.dispatcher.check().overflowed
    layer.dispatcher.grow()
    with pytest.raises(StateError, match="Capture again"):
        graph.replay(*layer.inputs(1))


def test_an_invalid_id_in_a_replay_is_seen() -> None:
    layer = layer_of("alltoall")
    x, ids, weights = layer.inputs(0)
    graph = capture(layer.dispatcher, layer.step, x, ids, weights)
    graph.replay(x, with_an_invalid_id(ids), weights)
    with pytest.raises(InputError, match="topk_ids must lie in"):
        layer.dispatcher.check()
    graph.replay(x, ids, weights)
    assert layer.dispatcher.check().invalid_ids == 0


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_invalid_id_is_found_without_another_wait(backend: str) -> None:
    layer = layer_of(backend, graph_safe=False)
    x, ids, weights = layer.inputs(0)
    with pytest.raises(InputError, match="topk_ids must lie in"):
        layer.dispatcher.dispatch(x, Routing(with_an_invalid_id(ids), weights))
    layer.dispatcher.dispatch(x, Routing(ids, weights))


def test_the_first_call_cannot_be_captured() -> None:
    """It makes the counters."""
    layer = layer_of("local", num_experts=32)
    x, ids, weights = layer.inputs(0)
    with (
        pytest.raises(StateError, match="once before a CUDA graph captures it"),
        torch.cuda.graph(torch.cuda.CUDAGraph()),
    ):
        layer.dispatcher.dispatch(x, Routing(ids, weights))


@pytest.mark.parametrize("called", [False, True])
def test_replays_count_the_rows_of_a_placement(called: bool) -> None:
    """A placement makes the counters on its device, so that no call must come before the capture."""
    num_experts = 64 if called else 16
    layer = layer_of("local", num_experts=num_experts)
    dispatcher, (x, ids, weights) = layer.dispatcher, layer.inputs(0)
    if called:
        dispatcher.dispatch(x, Routing(ids, weights))
    dispatcher.place(ExpertPlacement(num_experts, (tuple(reversed(range(num_experts))),)), device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        dispatcher.dispatch(x, Routing(ids, weights))
    before = dispatcher.metrics().real_tokens_per_expert
    for _ in range(2):
        graph.replay()
    counted = dispatcher.metrics().real_tokens_per_expert - before
    assert torch.equal(counted, 2 * torch.bincount(ids.flatten().cpu(), minlength=num_experts))


@pytest.mark.parametrize("backend", BACKENDS)
def test_replays_count_what_they_train(backend: str) -> None:
    """Runs that warm up count nothing, and neither does a graph without a backward."""
    layer = layer_of(backend)
    x, ids, weights = layer.inputs(0)
    with torch.no_grad():
        layer.dispatcher.dispatch(x, Routing(ids, weights))
    evaluation = torch.cuda.CUDAGraph()
    with torch.cuda.graph(evaluation), torch.no_grad():
        sent = layer.dispatcher.dispatch(x, Routing(ids, weights))
        layer.dispatcher.combine(sent.rows, sent)
    graph = capture(layer.dispatcher, layer.step, x, ids, weights)
    expected = layer.dispatcher.expert_counts().cpu()
    assert expected.sum() in (0, ids.numel())  # a simulated device runs what it captures
    for seed in range(3):
        inputs = layer.inputs(seed)
        graph.replay(*inputs)
        evaluation.replay()
        expected += torch.bincount(inputs[1].flatten().cpu(), minlength=8)
    assert torch.equal(layer.dispatcher.expert_counts().cpu(), expected)


@pytest.mark.parametrize("backend", BACKENDS)
def test_lengths_on_the_host_cannot_be_captured_without_a_plan(backend: str) -> None:
    """A replay would copy them from memory of the host that has been reused."""
    layer = layer_of(backend)
    dispatcher, (x, ids, weights) = layer.dispatcher, layer.inputs(0)
    x, layout = x.detach().view(2, 32, -1), BSHD(lengths=[7, 30])
    dispatcher.dispatch(x, Routing(ids, weights), layout)
    with (
        pytest.raises(StateError, match="the lengths of a layout are on the host, inside the capture"),
        torch.cuda.graph(torch.cuda.CUDAGraph()),
    ):
        dispatcher.dispatch(x * 2, Routing(ids, weights), layout)  # torch warns of a graph without a kernel
    plan = dispatcher.plan(layout, like=x)
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        dispatcher.dispatch(x, Routing(ids, weights), plan)
