"""CUDA graphs of graph-safe layers, and that nothing in them waits for the host. One rank, with and without NCCL."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from moe_dispatch import BSHD, Dispatcher, DispatcherConfig, Routing, build_dispatcher, capture
from moe_dispatch.balance import ExpertPlacement
from moe_dispatch.errors import InputError, StateError
from tests.gpu.syncs import refused_syncs

pytestmark = pytest.mark.gpu

EXPERTS, TOP_K, HIDDEN, TOKENS = 8, 2, 256, 96
BACKENDS = ("local", "alltoall", "allgather")


def dispatcher_of(backend: str, group: dist.ProcessGroup, **changes: Any) -> Dispatcher:
    fields: dict[str, Any] = {"num_experts": EXPERTS, "top_k": TOP_K, "hidden_size": HIDDEN, "pad_multiple": 16}
    graph_safe = {"graph_safe": True, "max_tokens_per_rank": 128}
    config = DispatcherConfig(**{**fields, **graph_safe, "backend": backend, **changes})
    return build_dispatcher(config, None if backend == "local" else group)


class Step:
    """Forward and backward of a layer with grouped experts; its leaves stay where they are, as a graph needs."""

    def __init__(self, dispatcher: Dispatcher) -> None:
        self.dispatcher = dispatcher
        generator = torch.Generator("cuda").manual_seed(1)
        matrices = torch.randn(EXPERTS, HIDDEN, HIDDEN, generator=generator, device="cuda") * HIDDEN**-0.5
        self.matrices = matrices.bfloat16().requires_grad_()

    def __call__(self, x: Tensor, ids: Tensor, weights: Tensor) -> tuple[Tensor, ...]:
        sent = self.dispatcher.dispatch(x, Routing(ids, weights))
        rows = torch._grouped_mm(sent.rows, self.matrices, offs=sent.offs)
        y = self.dispatcher.combine(torch.nn.functional.silu(rows), sent)
        return (y.detach(), *torch.autograd.grad(y, (x, weights, self.matrices), torch.ones_like(y)))


def inputs_of(seed: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator("cuda").manual_seed(seed)
    scores = torch.rand(TOKENS, EXPERTS, generator=generator, device="cuda")
    weights, ids = scores.topk(TOP_K)
    x = torch.randn(TOKENS, HIDDEN, generator=generator, device="cuda").bfloat16()
    return x.requires_grad_(), ids, weights.requires_grad_()


@pytest.mark.parametrize("backend", BACKENDS)
def test_replay_equals_eager(backend: str, nccl: dist.ProcessGroup) -> None:
    step = Step(dispatcher_of(backend, nccl))
    graph = capture(step.dispatcher, step, *inputs_of(0))
    for seed in range(1, 6):
        inputs = inputs_of(seed)
        expected = step(*inputs)
        for got, wanted in zip(graph.replay(*inputs), expected, strict=True):
            torch.testing.assert_close(got, wanted, rtol=0, atol=0)


@pytest.mark.parametrize("backend", BACKENDS)
def test_nothing_waits_for_the_host(backend: str, nccl: dist.ProcessGroup) -> None:
    step, inputs = Step(dispatcher_of(backend, nccl)), inputs_of(0)
    step(*inputs)
    with refused_syncs():
        step(*inputs)


# torch warns of its own warm-up, in which a leaf is used on two streams.
@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream")
@pytest.mark.parametrize("backend", BACKENDS)
def test_graphed_callable(backend: str, nccl: dist.ProcessGroup) -> None:
    dispatcher = dispatcher_of(backend, nccl)

    def layer(x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        sent = dispatcher.dispatch(x, Routing(ids, weights))
        return dispatcher.combine(sent.rows * 2, sent)

    graphed: Any = torch.cuda.make_graphed_callables(layer, inputs_of(0))
    results = []
    runs: tuple[Any, ...] = (layer, graphed)
    for run in runs:
        x, ids, weights = inputs_of(7)
        y: Tensor = run(x, ids, weights)
        results.append((y.detach().clone(), *torch.autograd.grad(y, (x, weights), torch.ones_like(y))))
    for got, wanted in zip(*results, strict=True):
        torch.testing.assert_close(got, wanted, rtol=0, atol=0)


def test_overflow_in_a_replay_is_seen(nccl: dist.ProcessGroup) -> None:
    step = Step(dispatcher_of("alltoall", nccl, capacity_factor=0.5, on_overflow="drop"))
    x, _, weights = inputs_of(0)
    nowhere = torch.full((TOKENS, TOP_K), -1, device="cuda")
    graph = capture(step.dispatcher, step, x, nowhere, weights)
    assert not step.dispatcher.check().overflowed
    graph.replay(*inputs_of(1))
    assert step.dispatcher.check().overflowed
    step.dispatcher.grow()
    with pytest.raises(StateError, match="Capture again"):
        graph.replay(*inputs_of(1))


def test_an_invalid_id_in_a_replay_is_seen(nccl: dist.ProcessGroup) -> None:
    step = Step(dispatcher_of("alltoall", nccl))
    x, ids, weights = inputs_of(0)
    graph = capture(step.dispatcher, step, x, ids, weights)
    graph.replay(x, ids.index_fill(0, torch.tensor([3], device="cuda"), EXPERTS), weights)
    with pytest.raises(InputError, match="topk_ids must lie in"):
        step.dispatcher.check()
    graph.replay(x, ids, weights)
    assert step.dispatcher.check().invalid_ids == 0


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_invalid_id_is_found_without_another_wait(backend: str, nccl: dist.ProcessGroup) -> None:
    dispatcher = dispatcher_of(backend, nccl, graph_safe=False, max_tokens_per_rank=None)
    x, ids, weights = inputs_of(0)
    with pytest.raises(InputError, match="topk_ids must lie in"):
        dispatcher.dispatch(x, Routing(ids.index_fill(0, torch.tensor([3], device="cuda"), EXPERTS), weights))
    dispatcher.dispatch(x, Routing(ids, weights))


def test_the_first_call_cannot_be_captured(nccl: dist.ProcessGroup) -> None:
    """It makes the counters."""
    dispatcher = dispatcher_of("local", nccl, num_experts=32)
    x, ids, weights = inputs_of(0)
    with (
        pytest.raises(StateError, match="once before a CUDA graph captures it"),
        torch.cuda.graph(torch.cuda.CUDAGraph()),
    ):
        dispatcher.dispatch(x, Routing(ids, weights))


@pytest.mark.parametrize("called", [False, True])
def test_replays_count_the_rows_of_a_placement(nccl: dist.ProcessGroup, called: bool) -> None:
    """A placement makes the counters on its device, so that no call must come before the capture."""
    num_experts = 64 if called else 16
    dispatcher = dispatcher_of("local", nccl, num_experts=num_experts)
    x, ids, weights = inputs_of(0)
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
def test_lengths_on_the_host_cannot_be_captured_without_a_plan(backend: str, nccl: dist.ProcessGroup) -> None:
    """A replay would copy them from memory of the host that has been reused."""
    dispatcher, (x, ids, weights) = dispatcher_of(backend, nccl), inputs_of(0)
    x, layout = x.detach().view(2, -1, HIDDEN), BSHD(lengths=[7, 40])
    dispatcher.dispatch(x, Routing(ids, weights), layout)
    with (
        pytest.raises(StateError, match="the lengths of a layout are on the host, inside the capture"),
        torch.cuda.graph(torch.cuda.CUDAGraph()),
    ):
        dispatcher.dispatch(x * 2, Routing(ids, weights), layout)  # torch warns of a graph without a kernel
    plan = dispatcher.plan(layout, like=x)
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        dispatcher.dispatch(x, Routing(ids, weights), plan)
