"""Dispatch and combine for every backend whose exchange delivers rows in the order of their source rank.

Such a backend only knows a ``Route``: how rows travel from home to the ranks that need them, and how sums travel back.
Spreading rows over experts, weighting, padding and the whole of autograd are done here, once. The two verbs are each
other's backward: the gradient of dispatch is collected like a combine, that of combine is spread like a dispatch.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from moe_dispatch.backends.base import Arrived, WireDtype
from moe_dispatch.errors import StateError
from moe_dispatch.permutation import Permutation, SlotIndex, StaticIndex, round_up


class Route(ABC):
    """The way of one dispatch, frozen: which rows go where, and back. Its methods are raw, outside autograd."""

    __slots__ = ()
    permutation: Permutation
    index: SlotIndex
    wire_dtype: WireDtype | None

    @abstractmethod
    def spread(self, rows_TD: Tensor, wire: WireDtype | None, *, label: str) -> AbstractContextManager[Tensor]:
        """Send rows out; gives (S, D) in the wire's or the rows' dtype, valid inside the block."""

    @abstractmethod
    def collect(
        self, rows_RD: Tensor, weights_R: Tensor | None, values_R: Tensor | None, *, label: str
    ) -> tuple[Tensor, Tensor | None]:
        """Bring expert rows home, weighted and summed: (T, D); and one value per slot along with them: (T, K).

        Rows and values on padding are never read.
        """

    @property
    def gradient_wire(self) -> WireDtype | None:
        """What gradients and combined rows travel in: never narrower than bfloat16."""
        return gradient_wire(self.wire_dtype)


def gradient_wire(wire: WireDtype | None) -> WireDtype | None:
    """What gradients and combined rows travel in, where rows are sent as ``wire``."""
    return None if wire is None else "bfloat16"


Received = tuple[Tensor, Tensor]  # rows (S, D) and the weights of their slots (S, K)


def arrive(
    rows_TD: Tensor,
    weights_TK: Tensor,
    route: Route,
    received: Received,
    counts: Sequence[int],
    pad_multiple: int,
    *,
    real_L: Tensor | None = None,
) -> Arrived:
    """Turn what a route delivered into expert-major rows attached to autograd.

    Args:
        rows_TD: (T, D), what was sent; read only by autograd.
        weights_TK: (T, K), likewise.
        route: the way it took.
        received: what the route delivered.
        counts: real rows per local expert.
        pad_multiple: rows per expert were rounded up to this in ``route.index``.
        real_L: ``counts`` on the device, int64 (L,), where the backend has them there.
    """
    rows_RD, weights_R = _Dispatch.apply(rows_TD, weights_TK, route, received)  # type: ignore[no-untyped-call]
    padded = counts if pad_multiple == 1 else [round_up(count, pad_multiple) for count in counts]
    if real_L is None:
        real_L = torch.tensor(counts, dtype=torch.int64, device="cpu").to(rows_RD.device, non_blocking=True)
    padded_L = real_L if pad_multiple == 1 else (real_L + (-real_L % pad_multiple))
    return Arrived(
        rows=rows_RD,
        weights=weights_R,
        tokens_per_expert=padded_L,
        real_tokens_per_expert=real_L,
        tokens_per_expert_list=tuple(padded),
        state=route,
    )


def arrive_statically(
    rows_TD: Tensor,
    weights_TK: Tensor,
    route: Route,
    received: Received,
    *,
    needed: Tensor | None = None,
    busiest_pair: Tensor | None = None,
) -> Arrived:
    """``arrive`` for a route whose ``index`` is a ``StaticIndex``: counts stay on the device.

    Args:
        rows_TD: (T, D), what was sent; read only by autograd.
        weights_TK: (T, K), likewise.
        route: the way it took.
        received: what the route delivered.
        needed: int64 (), the rows that this rank's experts needed room for, where more than arrived.
        busiest_pair: int64 (), the most rows that this rank had for one rank; None where that has no bound.
    """
    index = route.index
    assert isinstance(index, StaticIndex)
    rows_RD, weights_R = _Dispatch.apply(rows_TD, weights_TK, route, received)  # type: ignore[no-untyped-call]
    needed = index.needed if needed is None else needed
    pair = torch.zeros_like(needed) if busiest_pair is None else busiest_pair
    return Arrived(
        rows=rows_RD,
        weights=weights_R,
        tokens_per_expert=index.padded_L,
        real_tokens_per_expert=index.real_L,
        tokens_per_expert_list=None,
        state=route,
        demand=torch.stack([needed, pair]),
    )


def send_again(rows_TD: Tensor, route: Route) -> Tensor:
    """Other rows the same way: (R, D), differentiable."""
    result: Tensor = _DispatchAgain.apply(rows_TD, route)  # type: ignore[no-untyped-call]
    return result


def bring_home(rows_RD: Tensor, weights_R: Tensor, route: Route, *, weighted: bool) -> Tensor:
    """(R, D) expert rows -> (T, D), summed over slots; differentiable in rows and weights."""
    result: Tensor = _Combine.apply(rows_RD, weights_R, route, weighted)  # type: ignore[no-untyped-call]
    return result


def refuse_double_backward(verb: str) -> None:
    """Raise where autograd records a backward, which ours does not support."""
    if torch.is_grad_enabled():
        raise StateError(
            f"Dispatcher.{verb}: double backward is not supported, got a backward with create_graph=True. "
            "Use create_graph=False, or keep gradient penalties out of the MoE layer."
        )


class _Dispatch(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, rows_TD: Tensor, weights_TK: Tensor, route: Route, received: Received
    ) -> tuple[Tensor, Tensor]:
        ctx.route = route
        rows_SD, weights_SK = received
        return route.permutation.expand(rows_SD, route.index, rows_TD.dtype), route.index.to_grouped(weights_SK)

    @staticmethod
    def backward(ctx: Any, grad_rows_RD: Tensor, grad_weights_R: Tensor) -> Any:
        refuse_double_backward("dispatch")
        # Always with the gradient of the weights: what travels must not depend on what one rank needs.
        return *dispatch_backward(grad_rows_RD, grad_weights_R, ctx.route), None, None


class _DispatchAgain(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows_TD: Tensor, route: Route) -> Tensor:
        ctx.route = route
        with route.spread(rows_TD, route.wire_dtype, label="dispatch") as rows_SD:
            return route.permutation.expand(rows_SD, route.index, rows_TD.dtype)

    @staticmethod
    def backward(ctx: Any, grad_rows_RD: Tensor) -> Any:
        refuse_double_backward("dispatch")
        return dispatch_backward(grad_rows_RD, None, ctx.route)


class _Combine(torch.autograd.Function):
    """``weights_R`` leads on to the backward of dispatch even where no expert saw a row and the result is detached."""

    @staticmethod
    def forward(ctx: Any, rows_RD: Tensor, weights_R: Tensor, route: Route, weighted: bool) -> Tensor:
        ctx.route, ctx.weighted = route, weighted
        wants_dots = weighted and ctx.needs_input_grad[1]
        ctx.save_for_backward(weights_R, rows_RD if wants_dots else None)
        return route.collect(rows_RD, weights_R if weighted else None, None, label="combine")[0]

    @staticmethod
    def backward(ctx: Any, grad_TD: Tensor) -> Any:
        refuse_double_backward("combine")
        weights_R, rows_RD = ctx.saved_tensors
        return *combine_backward(grad_TD, rows_RD, weights_R if ctx.weighted else None, ctx.route), None, None


def dispatch_backward(grad_RD: Tensor, grad_R: Tensor | None, route: Route) -> tuple[Tensor, Tensor | None]:
    """Gradients of the rows sent, (T, D), and of their weights, (T, K), where those of the arrived ones are given."""
    with profiler_range("dispatch.backward"):
        return route.collect(grad_RD, None, grad_R, label="dispatch.backward")


def combine_backward(
    grad_TD: Tensor, rows_RD: Tensor | None, weights_R: Tensor | None, route: Route
) -> tuple[Tensor, Tensor | None]:
    """Gradients of the expert rows, (R, D), in the dtype of ``grad_TD``; of their weights, (R,), if given the rows."""
    with (
        profiler_range("combine.backward"),
        route.spread(grad_TD, route.gradient_wire, label="combine.backward") as grad_SD,
    ):
        return route.permutation.expand_weighted(grad_SD, route.index, weights_R, rows_RD, grad_TD.dtype)


def profiler_range(name: str) -> AbstractContextManager[Any]:
    """A ``moe_dispatch::name`` range in profiles; costs nothing while no profiler runs."""
    if torch.autograd._profiler_enabled():
        return torch.profiler.record_function(f"moe_dispatch::{name}")
    return _NO_RANGE


class _NoRange(AbstractContextManager[None]):
    def __exit__(self, *_: object) -> None:
        return None


_NO_RANGE = _NoRange()
