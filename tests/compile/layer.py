"""A whole layer to compile: dispatch, experts without a loop over them, combine; and its runs beside eager ones."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
import torch._dynamo
import torch.distributed as dist
from torch import Tensor, nn
from torch.library import CustomOpDef

from moe_dispatch import Dispatched, DispatcherConfig, Plan, Routing, build_dispatcher
from moe_dispatch.capabilities.compiling import expert_rows, operators
from moe_dispatch.dispatchers import Dispatcher
from moe_dispatch.layouts import Layout

NUM_EXPERTS, TOP_K, HIDDEN = 8, 2, 16
COMPILER = os.environ.get("CXX", "g++")

needs_compiler = pytest.mark.skipif(shutil.which(COMPILER) is None, reason=f"inductor needs a C++ compiler: {COMPILER}")

Run = Callable[..., Tensor]
Experts = Callable[[Dispatched], Tensor]


def dispatcher_for(
    backend: str | dict[str, Any] = "local", group: dist.ProcessGroup | None = None, **fields: Any
) -> Dispatcher:
    sizes: dict[str, Any] = {"num_experts": NUM_EXPERTS, "top_k": TOP_K, "hidden_size": HIDDEN}
    return build_dispatcher(DispatcherConfig(backend=backend, **{**sizes, **fields}), group)


def operator_names() -> set[str]:
    """The operators that ``moe_dispatch.capabilities.compiling`` registers."""
    values = [value for module in (operators, expert_rows) for value in vars(module).values()]
    return {value._name for value in values if isinstance(value, CustomOpDef)}


class Layer(nn.Module):
    def __init__(self, dispatcher: Dispatcher, dtype: torch.dtype, *, rank: int = 0, size: int = 1) -> None:
        super().__init__()
        self.dispatcher = dispatcher
        generator = torch.Generator().manual_seed(99)
        matrices = torch.randn(NUM_EXPERTS, HIDDEN, HIDDEN, generator=generator) / HIDDEN**0.5
        self.matrices = nn.Parameter(matrices.chunk(size)[rank].to(dtype))

    def forward(self, x: Tensor, ids: Tensor, weights: Tensor, plan: Plan | Layout | None = None) -> Tensor:
        sent = self.dispatcher.dispatch(x, Routing(ids, weights), plan)
        assert isinstance(sent, Dispatched)
        y = torch.relu(apply_experts(sent.rows, sent.offs, self.matrices))  # exact in any compiler
        if self.dispatcher.config.weights == "experts":
            y = y * sent.weights.to(y.dtype).unsqueeze(1)
        return self.dispatcher.combine(y, sent)


def layer_of(dispatcher: Dispatcher, experts: Experts = lambda sent: sent.rows) -> Run:
    """A layer with these experts. Without any, each token gets its own row back for each of its experts."""

    def run(x: Tensor, ids: Tensor, weights: Tensor, plan: Plan | Layout | None = None) -> Tensor:
        sent = dispatcher.dispatch(x, Routing(ids, weights), plan)
        assert isinstance(sent, Dispatched)
        return dispatcher.combine(experts(sent), sent)

    return run


def apply_experts(rows: Tensor, offs: Tensor, matrices: Tensor) -> Tensor:
    """``torch._grouped_mm`` where it is; else each row times a row of its expert's matrix. No host sync."""
    if rows.dtype == torch.bfloat16:
        grouped: Tensor = torch._grouped_mm(rows, matrices, offs=offs)
        return grouped
    expert_R = torch.searchsorted(offs, torch.arange(rows.shape[0], dtype=torch.int32), right=True)
    return rows * matrices[expert_R.clamp(max=len(matrices) - 1), 0]


def tensors(rows: int, seed: int, dtype: torch.dtype, shape: tuple[int, ...] | None = None) -> tuple[Tensor, ...]:
    """x, ids with some -1 and some twice, weights; leaves."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(*(shape or (rows,)), HIDDEN, generator=generator).to(dtype)
    ids = torch.randint(-1, NUM_EXPERTS, (rows, TOP_K), generator=generator)
    weights = torch.rand(rows, TOP_K, generator=generator)
    return x.requires_grad_(), ids, weights.requires_grad_()


def step(run: Run, layer: Layer, inputs: tuple[Tensor, ...], plan: Plan | Layout | None = None) -> list[Tensor]:
    """Output, and gradients of x, weights and experts, of one forward and backward."""
    x, ids, weights = (tensor.detach().requires_grad_(tensor.requires_grad) for tensor in inputs)
    layer.matrices.grad = None
    y = run(x, ids, weights, plan)
    y.double().square().sum().backward()
    gradients = [x.grad, weights.grad, layer.matrices.grad]
    assert all(gradient is not None for gradient in gradients)
    return [y.detach(), *(gradient.clone() for gradient in gradients if gradient is not None)]


def expect_same(
    compiled: Run,
    layer: Layer,
    inputs: tuple[Tensor, ...],
    plan: Plan | Layout | None = None,
    *,
    unbacked: bool = False,
) -> None:
    """The compiled layer gives what the eager one gives, bit for bit."""
    marked = [tensor.detach().requires_grad_(tensor.requires_grad) for tensor in inputs]

    def run(*arguments: Any) -> Tensor:
        if unbacked:
            for tensor in arguments[:3]:
                torch._dynamo.decorators.mark_unbacked(tensor, 0)
        return compiled(*arguments)

    got, wanted = step(run, layer, tuple(marked), plan), step(layer, layer, inputs, plan)
    for name, one, other in zip(("y", "x", "weights", "experts"), got, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0, msg=partial("{}: {}".format, name))


@contextmanager
def no_recompilation() -> Iterator[None]:
    with torch._dynamo.config.patch(error_on_recompile=True):
        yield


def graphs() -> int:
    """How many graphs were compiled in this test so far."""
    count: int = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    return count
