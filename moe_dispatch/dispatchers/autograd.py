"""The computation of both verbs and of their backwards, for all backends, and its attachment to autograd.

The ``run_`` functions do the work; call them with gradients off. On the way to the backend, they mask or cut out rows
that are no tokens, and pad the other rows. On the way back, they trim the padding and set rows that were cut out to
zero. ``attach`` and ``combine`` make eager calls differentiable. ``operators.py`` makes operators for ``torch.compile``
out of the same functions.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Size, Tensor

from moe_dispatch.backends.base import Arrived, Route, Sizes
from moe_dispatch.balance.placement import ExpertPlacement
from moe_dispatch.communication import HostCopy, raise_alike
from moe_dispatch.dispatchers.agreement import Caller
from moe_dispatch.dispatchers.channel import Channel, Lease
from moe_dispatch.dispatchers.planning import Outgoing
from moe_dispatch.errors import LostPeerError, PeerError, StateError
from moe_dispatch.layouts import Layout


@final
@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Selection:
    """The rows that go to the backend: the selected rows of the model, then padding.

    Attributes:
        num_rows: T, the number of the model's rows.
        real_rows: int64, the indices of the selected rows; None selects all rows.
        padded: Tp, the number of rows with padding; None in the ``State`` of a traced call, where the operator decides
            it.
    """

    num_rows: int
    real_rows: Tensor | None
    padded: int | None

    def take(self, tensor: Tensor) -> Tensor:
        """Turn (T, ...) into (Tp, ...): select rows, and append padding rows of zeros."""
        return self.pad(tensor if self.real_rows is None else tensor.index_select(0, self.real_rows))

    def pad(self, tensor: Tensor, fill: float = 0) -> Tensor:
        """Append padding rows of ``fill`` to selected rows."""
        assert self.padded is not None
        missing = self.padded - tensor.shape[0]
        assert missing >= 0
        return tensor if missing == 0 else torch.nn.functional.pad(tensor, (0, 0, 0, missing), value=fill)

    def put(self, tensor: Tensor) -> Tensor:
        """Turn (Tp, ...) into (T, ...): drop padding, and put zeros into the rows that were not selected.

        The tensor is shortened in place. A slice would be a view, and autograd forbids in-place additions to that view.
        """
        if self.real_rows is None:
            same = self.padded == self.num_rows
            return tensor if same else tensor.contiguous().resize_(self.num_rows, *tensor.shape[1:])
        rows = tensor[: self.real_rows.shape[0]]
        return rows.new_zeros(self.num_rows, *rows.shape[1:]).index_copy_(0, self.real_rows, rows)


@final
@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class State:
    """The private state of a ``Dispatched``: its dispatcher, and the values that ``combine`` needs.

    Attributes:
        lease: The dispatcher's share of its channel.
        layout: Layout of the dispatched x.
        shape: Shape of the dispatched x.
        selection: The rows of x that went to the backend.
        wants_weights: Whether the model's weights require grad. The weights that ``anchor`` returns always do.
        placement: Placement of the dispatch; None if every rank holds its own experts only.
        route: Route of the backend; None if an operator made the dispatch.
        tensors: The route as tensors, if an operator made the dispatch; otherwise empty.
    """

    lease: Lease
    layout: Layout
    shape: Size
    selection: Selection
    wants_weights: bool
    placement: ExpertPlacement | None = None
    route: Route | None = None
    tensors: tuple[Tensor, ...] = ()


def run_dispatch(
    channel: Channel, outgoing: Outgoing, sizes: Sizes, caller: Caller
) -> tuple[Selection, Callable[[], Arrived]]:
    """Cut, pad and send rows. The returned function waits until rows have arrived. Call both with gradients off.

    Slots with an invalid id go nowhere. In graph-safe mode, ``check`` reports them. Otherwise the call raises. If the
    ranks exchange counts, it raises before rows travel, and the peers raise too. Without such an exchange it raises
    after the rows have arrived, so that no peer is left waiting.

    Args:
        channel: Channel of the dispatcher.
        outgoing: What this rank sends.
        sizes: Sizes that the ranks have settled.
        caller: Who makes the dispatch.

    Raises:
        InputError: An id is invalid; or the ranks exchange counts, and another rank makes a different call.
        PeerError: The ranks exchange counts, and another rank refused its call.
    """
    x_TD, count = outgoing.x_TD, outgoing.ids_TK.shape[0]
    padded = channel.needs.brought(count, sizes)
    selection = Selection(num_rows=x_TD.shape[0], real_rows=outgoing.real_rows, padded=padded)
    if sizes.capacity is not None:
        channel.meter.prepare(x_TD.device)
    mark, is_invalid, num_experts = None, None, channel.config.num_experts
    if channel.needs.exchanges_counts:
        mark = outgoing.mark_or_invalid
        if sizes.capacity is not None:
            mark = torch.where(mark > 0, -1, caller.mark(x_TD.dtype))
    elif sizes.capacity is None and sizes.tokens_per_expert is None:
        is_invalid = HostCopy(outgoing.mark_or_invalid)
    try:
        finish = channel.backend.dispatch_async(
            selection.take(x_TD),
            selection.pad(outgoing.ids_TK, -1),
            selection.take(outgoing.weights_TK),
            sizes,
            *([] if mark is None else [mark]),
        )
    except LostPeerError:
        raise
    except PeerError:  # a mark in the exchanged counts said that some rank refuses, or makes a different call
        facts = caller.described(caller.facts(x_TD.dtype))
        raise_alike(channel.control, outgoing.problem(num_experts), facts=facts, of_call=True, label="refusal")
        raise

    def complete() -> Arrived:
        arrived = finish()
        if is_invalid is not None and is_invalid.read():
            problem = outgoing.problem(num_experts)
            assert problem is not None
            raise problem
        channel.meter.record(
            arrived,
            padded=padded - count,
            cut=selection.num_rows - count,
            valid_T=outgoing.valid_T,
            table=outgoing.table,
            invalid=outgoing.mark_or_invalid,
        )
        return arrived

    return selection, complete


def run_dispatch_backward(
    route: Route, selection: Selection, grad_RD: Tensor, grad_R: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Return the gradients of the model's rows, (T, D), and, if ``grad_R`` is given, of their weights, (T, K)."""
    with profiler_range("dispatch.backward"):
        grad_TD, grad_TK = route.dispatch_backward(grad_RD, grad_R)
    return selection.put(grad_TD), None if grad_TK is None else selection.put(grad_TK)


def run_combine(channel: Channel, rows_RD: Tensor, weights_R: Tensor, route: Route, selection: Selection) -> Tensor:
    """Bring expert rows back to (T, D), weighted if the config says so."""
    weights = weights_R if channel.config.weights == "combine" else None
    return selection.put(route.combine(rows_RD, weights))


def run_combine_backward(
    channel: Channel, grad_TD: Tensor, saved: tuple[Tensor | None, Tensor], route: Route, selection: Selection
) -> tuple[Tensor, Tensor | None]:
    """Return the gradients of the expert rows, (R, D), and, if the combined rows were saved, of their weights, (R,).

    Args:
        channel: Channel of the dispatcher.
        grad_TD: Gradient of the result of ``combine``.
        saved: The combined rows, or None, and their weights.
        route: Route of the dispatch.
        selection: The rows that the dispatch sent.
    """
    rows_RD, weights_R = saved
    weights = weights_R if channel.config.weights == "combine" else None
    with profiler_range("combine.backward"):
        return route.combine_backward(selection.take(grad_TD), rows_RD, weights)


class _Dispatch(torch.autograd.Function):
    """Attach the arrived rows and weights to the sent ones in the autograd graph.

    The context holds the lease, so the channel stays open for the backward even if the model is deleted before it.
    """

    @staticmethod
    def forward(
        ctx: Any, x_TD: Tensor, weights_TK: Tensor | None, state: State, arrived: tuple[Tensor, Tensor | None]
    ) -> tuple[Tensor, Tensor | None]:
        ctx.state = state
        return arrived

    @staticmethod
    def backward(ctx: Any, grad_RD: Tensor, grad_R: Tensor | None) -> Any:
        refuse_double_backward("dispatch")
        ctx.state.lease.tell_watchdog()
        # Always compute the gradient of the weights: all ranks must exchange it, even if this rank does not need it.
        return *run_dispatch_backward(ctx.state.route, ctx.state.selection, grad_RD, grad_R), None, None


class _Combine(torch.autograd.Function):
    """Combine as an autograd function of the expert rows and their weights.

    The weights connect it to the backward of dispatch even if no expert got a row, or the expert rows are detached.
    """

    @staticmethod
    def forward(ctx: Any, rows_RD: Tensor, weights_R: Tensor, state: State, channel: Channel) -> Tensor:
        assert state.route is not None
        ctx.state, ctx.channel = state, channel
        wants_dots = channel.config.weights == "combine" and state.wants_weights and ctx.needs_input_grad[1]
        ctx.save_for_backward(weights_R, rows_RD if wants_dots else None)
        return run_combine(channel, rows_RD, weights_R, state.route, state.selection)

    @staticmethod
    def backward(ctx: Any, grad_TD: Tensor) -> Any:
        refuse_double_backward("combine")
        weights_R, rows_RD = ctx.saved_tensors
        state: State = ctx.state
        assert state.route is not None
        state.lease.tell_watchdog()
        found = run_combine_backward(ctx.channel, grad_TD, (rows_RD, weights_R), state.route, state.selection)
        return *found, None, None


def attach(
    x_TD: Tensor, weights_TK: Tensor | None, state: State, arrived: tuple[Tensor, Tensor | None]
) -> tuple[Tensor, Any]:
    """Return the arrived rows and weights, connected to the backward of dispatch.

    Args:
        x_TD: (T, D), the sent rows.
        weights_TK: (T, K), the weights of the sent rows; None if the rows took the route of an earlier dispatch.
        state: State of the dispatch, with its route.
        arrived: The arrived rows and weights. They are passed in a tuple, because autograd turns a tensor that is both
            an argument and a result into a view.
    """
    attached: tuple[Tensor, Any] = _Dispatch.apply(x_TD, weights_TK, state, arrived)  # type: ignore[no-untyped-call]
    return attached


def combine(rows_RD: Tensor, weights_R: Tensor, state: State, channel: Channel) -> Tensor:
    """Run ``run_combine``, differentiable in rows and weights."""
    result: Tensor = _Combine.apply(rows_RD, weights_R, state, channel)  # type: ignore[no-untyped-call]
    return result


def refuse_double_backward(verb: str) -> None:
    """Raise a StateError if autograd records this backward, because the backwards here have no backward."""
    if torch.is_grad_enabled():
        raise StateError(
            f"Dispatcher.{verb}: double backward is not supported, got a backward with create_graph=True. "
            "Use create_graph=False, or keep gradient penalties out of the MoE layer. [MD09]"
        )


_ANCHOR = torch.empty(0, device="cpu", requires_grad=True)


def anchor(tensor: Tensor, channel: Channel) -> Tensor:
    """Return ``tensor`` so that it requires grad if gradients are recorded.

    Ranks may differ in which of x, the weights and the experts require grad. But every rank must take part in every
    backward, because a rank that skips one leaves its peers waiting. So a tensor that goes through a verb always
    requires grad. Two cases need no anchor: a single rank has no peers, and ranks that compile the same layer have the
    same backward.
    """
    if channel.communicator.size == 1 or tensor.requires_grad or not torch.is_grad_enabled():
        return tensor
    if torch.compiler.is_compiling() or not channel.needs.differentiable:
        return tensor
    return tie(tensor, _ANCHOR)


def tie(tensor: Tensor, other: Tensor) -> Tensor:
    """Return ``tensor``, connected in the autograd graph to the origin of ``other``, which gets no gradient.

    An example is ``dispatch(again=...)``. Its rows are combined with the weights of the first dispatch. If a rank's
    experts detach their outputs, only the weights connect ``combine`` to the second dispatch. Without the tie, this
    rank would skip the backward of the second dispatch.
    """
    result: Tensor = _Tie.apply(tensor, other)  # type: ignore[no-untyped-call]
    return result


class _Tie(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, other: Tensor) -> Tensor:
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        refuse_double_backward("dispatch")
        return grad, None


def profiler_range(name: str) -> AbstractContextManager[Any]:
    """Return a context that marks a ``moe_dispatch::name`` range in profiles. Without a profiler it does nothing."""
    if torch.autograd._profiler_enabled():
        return torch.profiler.record_function(f"moe_dispatch::{name}")
    return _NO_RANGE


_NO_RANGE = nullcontext()
