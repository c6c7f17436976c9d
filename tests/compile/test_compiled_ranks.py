"""A compiled layer on several ranks, which are processes: dynamo does not take ranks that are threads."""

from __future__ import annotations

import datetime
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from moe_dispatch import Routing
from moe_dispatch.dispatchers import even_rounds
from moe_dispatch_testing import run_processes
from tests.compile.layer import (
    Layer,
    apply_experts,
    dispatcher_for,
    expect_same,
    graphs,
    needs_compiler,
    no_recompilation,
    tensors,
)

RANKS = 2
TIMEOUT = datetime.timedelta(seconds=100)  # a rank that compiles keeps the others waiting


def _layer(rank: int, backend: str, **fields: Any) -> Layer:
    torch._inductor.config.compile_threads = 1
    dispatcher = dispatcher_for(backend, dist.group.WORLD, pad_multiple=4, **fields)
    return Layer(dispatcher, torch.bfloat16, rank=rank, size=RANKS)


def _train(rank: int, backend: str) -> int:
    """20 steps of changing routing, and of changing rows that differ between ranks, also 0 and 1 of them."""
    layer = _layer(rank, backend)
    compiled = torch.compile(layer, fullgraph=True)
    expect_same(compiled, layer, tensors(7 + rank, rank, torch.bfloat16), unbacked=True)
    with no_recompilation():
        for turn in range(20):
            rows = (turn * (3 + rank)) % 11
            expect_same(compiled, layer, tensors(rows, 2 * turn + rank, torch.bfloat16), unbacked=True)
    layer.dispatcher.close()
    return graphs()


@pytest.mark.slow
@needs_compiler
@pytest.mark.parametrize("backend", ["alltoall", "allgather"])
def test_ranks_train_as_in_eager_mode_and_compile_once(backend: str) -> None:
    assert run_processes(_train, RANKS, backend, timeout=TIMEOUT) == [1] * RANKS


def _differ(rank: int, backend: str, compiler: str, **fields: Any) -> list[list[Tensor | None]]:
    """One step, eager and compiled, in which rank 1 trains nothing. Experts detach rows that are sent again there.

    Not with inductor, which may run the backwards of two combines in another order on each rank.
    """
    layer = _layer(rank, backend, **fields)

    def call(x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        sent = layer.dispatcher.dispatch(x, Routing(ids, weights))
        y = torch.relu(apply_experts(sent.rows, sent.offs, layer.matrices))
        if compiler == "inductor":
            return layer.dispatcher.combine(y, sent)
        other = layer.dispatcher.dispatch(x * 2, again=sent)
        doubled = other.rows.detach() if rank else other.rows
        return layer.dispatcher.combine(y, sent) + layer.dispatcher.combine(doubled, other)

    def step(run: Callable[..., Tensor]) -> list[Tensor | None]:
        x, ids, weights = tensors(6, rank, torch.bfloat16)
        if rank:
            x, weights = x.detach(), weights.detach()
        layer.matrices.requires_grad_(not rank)
        layer.matrices.grad = None
        y = run(x, ids, weights)
        y.float().square().sum().backward()
        return [y.detach(), x.grad, weights.grad, layer.matrices.grad]

    found = [step(call), step(torch.compile(call, fullgraph=True, backend=compiler))]
    layer.dispatcher.close()
    return found


@pytest.mark.slow
@needs_compiler
@pytest.mark.parametrize(
    ("backend", "compiler", "fields"),
    [
        ("alltoall", "inductor", {}),
        ("alltoall", "aot_eager", {"weights": "experts"}),
        ("allgather", "inductor", {"graph_safe": True, "max_tokens_per_rank": 8}),
    ],
)
def test_a_rank_that_needs_no_gradient_takes_part(backend: str, compiler: str, fields: dict[str, Any]) -> None:
    """Otherwise the other rank waits for ever in a compiled backward."""
    body = partial(_differ, **fields)
    for eager, compiled in run_processes(body, RANKS, backend, compiler, timeout=TIMEOUT):
        for one, other in zip(eager, compiled, strict=True):
            assert (one is None) == (other is None)
            torch.testing.assert_close(one, other, rtol=0, atol=0)


def _in_rounds(rank: int, backend: str) -> tuple[Tensor | None, int]:
    """Train 0, 1, 3 or 5 compiled steps, and return the gradient of the experts and the number of rounds."""
    steps, rounds = (0, 1, 3, 5)[rank], 0
    layer = Layer(dispatcher_for(backend, dist.group.WORLD), torch.float32, rank=rank, size=4)
    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend="aot_eager")
    batches = (tensors(3 + rank, step, torch.float32) for step in range(steps))
    for x, ids, weights in even_rounds(batches, tensors(0, 0, torch.float32), dist.group.WORLD):
        compiled(x, ids, weights).square().sum().backward()
        rounds += 1
    layer.dispatcher.close()
    return layer.matrices.grad, rounds


@pytest.mark.parametrize("backend", ["alltoall", "allgather"])
def test_rounds_of_unequal_ranks_give_what_one_process_gives(backend: str) -> None:
    alone = Layer(dispatcher_for("local"), torch.float32)
    for rank, steps in enumerate((0, 1, 3, 5)):
        for step in range(steps):
            alone(*tensors(3 + rank, step, torch.float32)).square().sum().backward()
    grads, rounds = zip(*run_processes(_in_rounds, 4, backend, timeout=TIMEOUT), strict=True)
    assert rounds == (5,) * 4
    torch.testing.assert_close(torch.cat(grads), alone.matrices.grad, rtol=1e-5, atol=1e-6)
