"""What both verbs and their backwards run, and their autograd: once for every backend, eager call and operator.

The ``run_`` functions are raw: gradients are off. Rows that are no tokens are masked or cut, the others are padded and
handed to the backend; on the way back padding is trimmed, and rows that were cut become zero. Eager calls attach them
to autograd by the two functions here; operators bring the same backwards to ``torch.compile`` (``operators.py``).
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Size, Tensor

from moe_dispatch.backends.base import Arrived, Route, Sizes
from moe_dispatch.communication import HostCopy, raise_alike
from moe_dispatch.dispatchers.channel import Channel, Lease
from moe_dispatch.dispatchers.planning import facts_of_rows, number_of_rows, problem_of_ids, valid_ids
from moe_dispatch.errors import LostPeerError, PeerError, StateError
from moe_dispatch.layouts import Layout


@final
@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Selection:
    """Which of the model's rows go to the backend: the real ones of T, then padding up to ``padded``.

    Attributes:
        num_rows: T.
        real_rows: int64, the rows that go; None where all do.
        padded: Tp; None in the ``State`` of a traced call, where the operator decides it.
    """

    num_rows: int
    real_rows: Tensor | None
    padded: int | None

    @property
    def count(self) -> int:
        """The rows that go, without padding."""
        return self.num_rows if self.real_rows is None else self.real_rows.shape[0]

    def take(self, tensor: Tensor, fill: float = 0) -> Tensor:
        """(T, ...) -> (Tp, ...): what goes to the backend, with ``fill`` in the padding."""
        if self.real_rows is not None:
            tensor = tensor.index_select(0, self.real_rows)
        assert self.padded is not None
        missing = self.padded - tensor.shape[0]
        assert missing >= 0
        return tensor if missing == 0 else torch.nn.functional.pad(tensor, (0, 0, 0, missing), value=fill)

    def put(self, tensor: Tensor) -> Tensor:
        """(Tp, ...) -> (T, ...): what comes back, with zeros for the rows that did not go.

        Padding is cut off in place: a model may add to the result in place, which autograd forbids for a view.
        """
        if self.real_rows is None:
            same = self.padded == self.num_rows
            return tensor if same else tensor.contiguous().resize_(self.num_rows, *tensor.shape[1:])
        rows = tensor[: self.real_rows.shape[0]]
        return rows.new_zeros(self.num_rows, *rows.shape[1:]).index_copy_(0, self.real_rows, rows)


@final
@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class State:
    """What ties a ``Dispatched`` to its dispatcher, and what its combine needs.

    Attributes:
        lease: of the dispatcher.
        layout: of the x that was dispatched.
        shape: of that x.
        selection: of its rows.
        wants_weights: whether the weights that the model gave require grad; what ``anchor`` made of them always does.
        route: of the backend; None where an operator made the dispatch.
        tensors: the route as tensors, where an operator made the dispatch.
    """

    lease: Lease
    layout: Layout
    shape: Size
    selection: Selection
    wants_weights: bool
    route: Route | None = None
    tensors: tuple[Tensor, ...] = ()


def run_dispatch(
    channel: Channel,
    tensors: tuple[Tensor, Tensor, Tensor],
    valid_T: Tensor | None,
    selection: Selection,
    sizes: Sizes,
    *,
    recorded: bool,
) -> Callable[[], Arrived]:
    """Mask, cut, pad and send rows; the returned function waits for what arrives. Raw: gradients are off.

    Slots with an invalid id go nowhere. Graph-safe, ``check`` reports them. Else the call raises: before rows travel if
    ranks exchange counts, so that the peers raise too; elsewhere after the rows have arrived, so that no peer waits.

    Args:
        channel: of the dispatcher.
        tensors: rows (T, D), ids and weights (T, K), as the model has them, without duplicate ids.
        valid_T: bool, which rows are tokens, where others are not cut; None for all.
        selection: which rows go.
        sizes: settled.
        recorded: whether the call records gradients.

    Raises:
        InputError: an invalid id; or the ranks exchange counts, and another rank makes another call.
        PeerError: the ranks exchange counts, and another rank refused its call.
    """
    (rows_TD, ids_TK, weights_TK), padded = tensors, selection.padded
    assert padded is not None
    if sizes.capacity is not None:
        channel.prepare_counters(rows_TD.device)
    if valid_T is not None:
        ids_TK = torch.where(valid_T.unsqueeze(1), ids_TK, -1)
        channel.meter.record_masked(valid_T)
    given_TK, num_experts = selection.take(ids_TK, -1), channel.shape.num_experts
    ids_TK, invalid_TK = valid_ids(given_TK, num_experts)
    sent = selection.take(rows_TD), ids_TK, selection.take(weights_TK)
    mark, is_invalid = None, None
    if channel.needs.exchanges_counts:
        mark = torch.where(invalid_TK.any(), -1, number_of_rows(rows_TD.dtype, recorded=recorded))
    elif sizes.capacity is None:
        is_invalid = HostCopy(invalid_TK.any())
    try:
        finish = channel.backend.dispatch_async(*sent, sizes, *([] if mark is None else [mark]))
    except LostPeerError:
        raise
    except PeerError:  # what the ranks exchange first has told that some rank refuses or makes another call
        problem, facts = problem_of_ids(given_TK, num_experts), facts_of_rows(rows_TD.dtype, recorded=recorded)
        raise_alike(channel.control, problem, facts=facts, of_call=True, label="refusal")
        raise

    def complete() -> Arrived:
        arrived = finish()
        if is_invalid is not None and is_invalid.read():
            problem = problem_of_ids(given_TK, num_experts)
            assert problem is not None
            raise problem
        channel.meter.record(arrived, padded=padded - selection.count, cut=selection.num_rows - selection.count)
        if arrived.demand is not None:
            channel.high_water.record(arrived.demand, invalid_TK.sum())
        return arrived

    return complete


def run_dispatch_backward(
    route: Route, selection: Selection, grad_RD: Tensor, grad_R: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Gradients of the model's rows, (T, D), and where ``grad_R`` is given of their weights, (T, K)."""
    with profiler_range("dispatch.backward"):
        grad_TD, grad_TK = route.dispatch_backward(grad_RD, grad_R)
    return selection.put(grad_TD), None if grad_TK is None else selection.put(grad_TK)


def run_combine(channel: Channel, rows_RD: Tensor, weights_R: Tensor, route: Route, selection: Selection) -> Tensor:
    """Bring expert rows back: (T, D), weighted where the config says so."""
    weights = weights_R if channel.config.weights == "combine" else None
    return selection.put(route.combine(rows_RD, weights))


def run_combine_backward(
    channel: Channel, grad_TD: Tensor, saved: tuple[Tensor | None, Tensor], route: Route, selection: Selection
) -> tuple[Tensor, Tensor | None]:
    """Gradients of the expert rows, (R, D), and of their weights, (R,), where the combined rows were saved.

    Args:
        channel: of the dispatcher.
        grad_TD: gradient of what ``combine`` gave.
        saved: the rows that were combined, or None, and their weights.
        route: of the dispatch.
        selection: of the dispatch.
    """
    rows_RD, weights_R = saved
    weights = weights_R if channel.config.weights == "combine" else None
    with profiler_range("combine.backward"):
        return route.combine_backward(selection.take(grad_TD), rows_RD, weights)


class _Dispatch(torch.autograd.Function):
    """Attaches what has arrived to the rows and weights that were sent.

    The context holds the lease, so that the channel stays open for the backward where the dispatcher is dropped before.
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
        ctx.state.lease.mark()
        # Always with the gradient of the weights: what travels must not depend on what one rank needs.
        return *run_dispatch_backward(ctx.state.route, ctx.state.selection, grad_RD, grad_R), None, None


class _Combine(torch.autograd.Function):
    """``weights_R`` leads on to the backward of dispatch even where no expert saw a row and the result is detached."""

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
        state.lease.mark()
        found = run_combine_backward(ctx.channel, grad_TD, (rows_RD, weights_R), state.route, state.selection)
        return *found, None, None


def attach(
    x_TD: Tensor, weights_TK: Tensor | None, state: State, arrived: tuple[Tensor, Tensor | None]
) -> tuple[Tensor, Any]:
    """The arrived rows and weights, with the backward of dispatch behind them.

    Args:
        x_TD: (T, D), what was sent.
        weights_TK: their weights; None for rows that were sent the way of an earlier dispatch.
        state: with the route.
        arrived: rows and weights; a tuple, because autograd would make views of tensors that go in and come out.
    """
    attached: tuple[Tensor, Any] = _Dispatch.apply(x_TD, weights_TK, state, arrived)  # type: ignore[no-untyped-call]
    return attached


def combine(rows_RD: Tensor, weights_R: Tensor, state: State, channel: Channel) -> Tensor:
    """``run_combine``, differentiable in rows and weights."""
    result: Tensor = _Combine.apply(rows_RD, weights_R, state, channel)  # type: ignore[no-untyped-call]
    return result


def refuse_double_backward(verb: str) -> None:
    """Raise where autograd records a backward, which ours does not support."""
    if torch.is_grad_enabled():
        raise StateError(
            f"Dispatcher.{verb}: double backward is not supported, got a backward with create_graph=True. "
            "Use create_graph=False, or keep gradient penalties out of the MoE layer. [MD09]"
        )


_ANCHOR = torch.empty(0, device="cpu", requires_grad=True)


def anchor(tensor: Tensor, channel: Channel) -> Tensor:
    """``tensor``, requiring grad wherever gradients are recorded.

    Which of x, the weights and the experts require grad may differ between ranks. What goes through a verb always does,
    so that every rank takes part in every backward: one that skipped it would leave its peers waiting. A rank alone has
    no peers, and ranks that compile the same layer have the same backward anyway.
    """
    if channel.communicator.size == 1 or tensor.requires_grad or not torch.is_grad_enabled():
        return tensor
    if torch.compiler.is_compiling() or not channel.needs.differentiable:
        return tensor
    return tie(tensor, _ANCHOR)


def tie(tensor: Tensor, other: Tensor) -> Tensor:
    """``tensor``, behind which autograd also reaches where ``other`` came from, with no gradient for it.

    Rows sent again come back by the weights of the first dispatch; untied, a rank whose experts detach would skip the
    backward of the second.
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
    """A ``moe_dispatch::name`` range in profiles; costs nothing while no profiler runs."""
    if torch.autograd._profiler_enabled():
        return torch.profiler.record_function(f"moe_dispatch::{name}")
    return _NO_RANGE


_NO_RANGE = nullcontext()
