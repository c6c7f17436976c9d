"""The computation of both verbs and of their backwards, for all backends, and its attachment to autograd.

Call ``start``, ``finish`` and the functions on a route with gradients off. On the way to the backend they mask or cut
out rows that are no tokens, and pad the other rows. On the way back they trim the padding and set rows that were cut
out to zero. ``Dispatch`` and ``Combine`` make the calls differentiable.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, final

import torch
from torch import Size, Tensor
from torch.profiler import record_function

from moe_dispatch.backends.base import Arrived, Route
from moe_dispatch.backends.wire import Encoded
from moe_dispatch.communication import HostCopy, raise_alike
from moe_dispatch.dispatched import Dispatched, check_plain
from moe_dispatch.dispatchers.agreement import (
    Facts,
    described,
    facts_of,
    leave_untold,
    mark_of,
    settle,
    tell_peers,
    text_of,
)
from moe_dispatch.dispatchers.channel import NO_RANGE, Channel, Lease, profiled
from moe_dispatch.dispatchers.checks import needs_chunks, problem_of_ids
from moe_dispatch.dispatchers.meter import Tally
from moe_dispatch.errors import InputError, LostPeerError, PeerError, StateError
from moe_dispatch.layouts import Layout
from moe_dispatch.seams.slots import Assigned, Slots
from moe_dispatch.types import Plan

if TYPE_CHECKING:
    from moe_dispatch.capabilities.carry.columns import CarriedColumns


@final
@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class State:
    """The private state of a ``Dispatched``: its dispatcher, and the values that ``combine`` needs.

    Attributes:
        lease: The dispatcher's share of its channel.
        layout: Layout of the dispatched x.
        shape: Shape of the dispatched x.
        num_rows: T, the number of the rows of x.
        real_rows: int64, the indices of the rows that went to the backend; None if all of them did.
        padded: Tp, the number of rows that went to the backend, with padding.
        wants_weights: Whether the backward of combine needs the expert outputs, for gradients of the weights of any
            rank. False only if no rank wants them and the ranks know it.
        route: Route of the backend.
        number: Number of the dispatch on the trail of the channel.
        tally: What counts its rows as trained.
    """

    lease: Lease
    layout: Layout
    shape: Size
    num_rows: int
    real_rows: Tensor | None
    padded: int
    wants_weights: bool
    route: Route
    tally: Tally
    number: int = 0

    def changed(self, **changes: Any) -> State:
        """Return a state with other values. It is no dataclass for ``dataclasses.replace``."""
        return State(**{name: getattr(self, name) for name in self.__slots__} | changes)


# FSDP2 maps over the dataclasses among the arguments of a module, which may be a Dispatched, and casts their tensors. A
# class without this mark is left as it is.
del State.__dataclass_fields__


def pad(tensor: Tensor, real_rows: Tensor | None, padded: int, fill: float = 0) -> Tensor:
    """Turn (T, ...) into (Tp, ...): select ``real_rows``, and append rows of ``fill``."""
    rows = tensor if real_rows is None else tensor.index_select(0, real_rows)
    missing = padded - rows.shape[0]
    assert missing >= 0
    return rows if missing == 0 else torch.nn.functional.pad(rows, (0, 0, 0, missing), value=fill)


def trim(tensor: Tensor, real_rows: Tensor | None, num_rows: int) -> Tensor:
    """Turn (Tp, ...) into (T, ...): drop padding, and put zeros into the rows that were not selected.

    The tensor is shortened in place. A slice would be a view, and autograd forbids in-place additions to that view.
    """
    if real_rows is None:
        same = tensor.shape[0] == num_rows
        return tensor if same else tensor.contiguous().resize_(num_rows, *tensor.shape[1:])
    rows = tensor[: real_rows.shape[0]]
    return rows.new_zeros(num_rows, *rows.shape[1:]).index_copy_(0, real_rows, rows)


@final
@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Request:
    """A dispatch as a rank has checked it alone, before it asks other ranks.

    Attributes:
        x_TD: All rows of the model.
        ids_TK: int64, the ids of the router for all rows, merged: no row names an expert twice.
        weights_TK: Weights of all rows, in the accumulation dtype.
        plan: A plan, or the draft of one.
        real_rows: int64, the indices of the rows to send; None sends all rows.
        valid_T: bool, whether each row is a token. None if all rows are tokens, or if the other rows are cut out.
        slots: The expert slots in force; None if every rank holds its own experts only.
        grad_enabled: Whether the call records gradients.
        repetition: As in ``Call``.
        columns: The data that travels with the rows; None if there is none.
        wants_weights: Whether the weights of the model require grad; in compiled code, True.
        lease: Lease of the dispatcher; None if an operator makes the dispatch.
        layer: Number of the layer for the meter, ``Lease.layer``; -1 in compiled code.
    """

    x_TD: Tensor
    ids_TK: Tensor
    weights_TK: Tensor
    plan: Plan
    real_rows: Tensor | None
    valid_T: Tensor | None
    slots: Slots | None
    grad_enabled: bool
    repetition: str = ""
    columns: CarriedColumns | None = None
    wants_weights: bool = True
    lease: Lease | None = None
    layer: int = -1


@final
@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Departed:
    """A dispatch that ``start`` has handed to the backend.

    Attributes:
        channel: Channel of the dispatch.
        arrive: Function that waits for the rows, and returns what the backend delivers.
        padded: Tp, the number of rows that this rank sends, with padding.
        real_rows: int64, the indices of the rows that are sent; None if all are.
        given_TK: The ids of the router, of the rows that are sent.
        outcome: int64 (), what ``valid_ids`` found about them.
        unread: Copy of ``outcome`` that the host reads when the rows have arrived, if no other rank hears of it.
        valid_T: bool, whether each row is a token, if ids of other rows became -1; else None.
        assigned: The expert slots of this dispatch; None if every rank holds its own experts only.
        layer: Number of the layer for the meter, ``Lease.layer``; -1 in compiled code.
        recomputed: Whether activation checkpointing repeats a dispatch of the forward.
        columns: What travels with the rows; None for nothing.
        number: Number of the dispatch on the trail of the channel.
    """

    channel: Channel
    arrive: Callable[[], Arrived]
    padded: int
    real_rows: Tensor | None
    given_TK: Tensor
    outcome: Tensor
    unread: HostCopy | None
    valid_T: Tensor | None
    assigned: Assigned | None
    layer: int
    recomputed: bool
    columns: CarriedColumns | None = None
    number: int = 0


def start(channel: Channel, call: Request, *, async_op: bool = False) -> Departed:
    """Clean the ids, settle the sizes if the plan has none, pad, and start to send.

    Slots with an invalid id go nowhere. ``agreement`` says who hears of them, and when.

    Args:
        channel: Channel of the dispatcher.
        call: The dispatch.
        async_op: Whether the caller does other work before ``finish``.

    Raises:
        InputError: An id is invalid; or the ranks exchange counts, and another rank makes a different call.
        PeerError: The ranks exchange counts or sizes, and another rank refused its call.
    """
    config, needs, slots, plan, columns = channel.config, channel.needs, call.slots, call.plan, call.columns
    given = (call.x_TD.dtype, call.grad_enabled, call.repetition, "" if columns is None else columns.text())
    facts = facts_of(*given)
    alone = not (needs.exchanges_counts or config.graph_safe) and (plan.settled or not channel.num_summed)
    mark, dispatcher = None, None if call.lease is None else call.lease.number
    told = channel.trail.marked(mark_of(given, call.wants_weights), dispatcher)
    if needs.exchanges_counts:
        mark = told
    # Alone first: a rank that fails here tells its peers in the first exchange that they would wait in.
    given_TK, ids_TK, outcome, assigned = _own_ids(channel, call, mark)
    count, problem = ids_TK.shape[0], partial(problem_of_ids, given_TK, config.num_experts, call.valid_T)
    # The sizes come first, because everything behind them needs them. This also is the last exchange in which a rank
    # can refuse the call of a backend that exchanges no counts.
    if config.debug or not plan.settled:
        invalid = outcome if mark is None else None  # with a mark, the outcome is the mark
        plan = settle(channel, plan, facts=facts, lease=call.lease, ids_TK=ids_TK, invalid=invalid, problem=problem)
    # Behind the agreement, which all ranks have left with the same number, so all of them raise.
    if plan.num_chunks > 1:
        raise needs_chunks(plan, config)
    sizes = plan.sizes
    # Without the sums of an agreement, the host reads the counts of all rows that arrive, and marks with them.
    if needs.counts_with_sizes and sizes.tokens_per_expert is None:
        sizes = replace(sizes, mark=told)
    # Before the first launch: memory of counters must not be allocated while a CUDA graph is captured.
    if sizes.capacity is not None:
        channel.meter.prepare(call.x_TD.device, call.layer)
        channel.trail.prepare(call.x_TD.device)
    # A planner sums the rows of all experts over the ranks. It comes before rows are padded, because it changes the
    # ids, and behind the agreement, in which a rank whose routing is wrong has refused the call.
    if slots is not None and slots.collective:
        assigned = slots.assign(channel, ids_TK)
        ids_TK = assigned.ids_TK
    # With graph_safe the host never learns what the device found, so the device itself turns the mark into a refusal.
    marks = [] if mark is None else [torch.where(outcome > 0, -1, mark) if config.graph_safe else outcome]
    # Nobody else hears of invalid ids then, so this rank reads the outcome when its rows have arrived, not now.
    unread = HostCopy(outcome) if alone else None
    padded = sizes.padded_rows
    if padded is None:
        padded = count if needs.row_multiple == 1 and count >= needs.min_rows else needs.padded(count)
    x_TD, weights_TK = call.x_TD, call.weights_TK
    if call.real_rows is not None or padded != count:
        x_TD, weights_TK = pad(x_TD, call.real_rows, padded), pad(weights_TK, call.real_rows, padded)
        ids_TK = pad(ids_TK, None, padded, -1)
    # Carried data is padded as rows are. A backend without packets gathers it here, in front of the rows, when all
    # ranks are certain to send them.
    if columns is not None:
        sizes = columns.depart(channel, sizes, ids_TK, call.real_rows)
    if call.repetition:
        sizes = replace(sizes, keeps_route=True)
    # The rows. A backend that exchanges counts does so first, and their marks tell whether all ranks make this call.
    try:
        if async_op or marks:
            arrive = partial(channel.backend.finish, channel.backend.start(x_TD, ids_TK, weights_TK, sizes, *marks))
        else:
            arrive = partial(_same, channel.backend.dispatch(x_TD, ids_TK, weights_TK, sizes))
    except PeerError as refusal:
        raise_refusal(channel, call, refusal, facts, problem)
        raise
    if marks or sizes.mark is not None:
        channel.trail.compared()
    # The trail follows what has been exchanged, so a call that was refused leaves none: its repetition fits the peers'.
    what = text_of("dispatch", given, sizes.group_max_rows if needs.equal_rows or needs.group_max else None)
    number = channel.trail.follow(what, call.x_TD.device, dispatcher=dispatcher, told=config.debug)
    if padded != count or count != call.x_TD.shape[0]:
        channel.meter.count_rows(rank=padded - count, cut=call.x_TD.shape[0] - count)
    return Departed(
        channel=channel,
        arrive=arrive,
        padded=padded,
        real_rows=call.real_rows,
        given_TK=given_TK,
        outcome=outcome,
        unread=unread,
        valid_T=call.valid_T,
        assigned=assigned,
        layer=call.layer,
        recomputed=torch._C._current_graph_task_id() != -1,  # as ``is_recomputation`` says, without a call
        columns=columns,
        number=number,
    )


def raise_refusal(
    channel: Channel, call: Request, refusal: PeerError, facts: Facts, problem: Callable[[], InputError | None]
) -> None:
    """Raise one error on all ranks, if the marks in their counts said that some rank refuses or makes another call.

    Returns if no rank can say more than ``refusal`` does.
    """
    if isinstance(refusal, LostPeerError):
        return  # a rank that is gone would be missed in the exchange below
    # All ranks come here, because all have read the same marks. Only now do they exchange texts: a call that no rank
    # refuses pays for no text.
    raise_alike(channel.control, problem(), facts=described(facts, call.lease), of_call=True, label="refusal")
    # No rank has refused and all facts are equal, so the order of calls differs. The trails name the call.
    if (difference := channel.trail.difference("Dispatcher.dispatch", label="refusal")) is not None:
        raise difference from None


def _own_ids(channel: Channel, call: Request, mark: int | None) -> tuple[Tensor, Tensor, Tensor, Assigned | None]:
    """Do what a rank can do alone: cut its ids, replace invalid ones, and find their slots if no rank is asked.

    If this fails, the peers are told.

    Returns:
        The ids of the router of the rows that are sent; the ids that go to the backend; the outcome of ``valid_ids``;
        and the expert slots, if they were found.
    """
    asks, assigned = not channel.config.graph_safe, None
    try:
        given_TK = call.ids_TK if call.real_rows is None else call.ids_TK.index_select(0, call.real_rows)
        valid_ids = channel.context.permutations[type(given_TK), given_TK.device.type].valid_ids
        ids_TK, outcome = valid_ids(
            given_TK, channel.config.num_experts, mark if asks else None, valid_T=call.valid_T, asks=asks
        )
        if call.slots is not None and not call.slots.collective:
            assigned = call.slots.assign(channel, ids_TK)
            ids_TK = assigned.ids_TK
    except Exception as error:
        tell_peers(channel, error, in_dispatch=True, x=call.x_TD, has_sizes=call.plan.settled)
        raise
    return given_TK, ids_TK, outcome, assigned


def _same(arrived: Arrived) -> Arrived:
    return arrived


def finish(departed: Departed) -> Arrived:
    """Wait until the rows of a dispatch have arrived, and count them.

    Raises:
        InputError: An id is invalid, and the ranks have not exchanged counts.
    """
    channel = departed.channel
    arrived = departed.arrive()
    if departed.unread is not None and departed.unread.read():
        problem = problem_of_ids(departed.given_TK, channel.config.num_experts, departed.valid_T)
        assert problem is not None
        if channel.communicator.size > 1:
            leave_untold(channel, problem)
        raise problem
    channel.meter.record(arrived, departed)
    return arrived


def send(channel: Channel, state: State, x_TD: Tensor) -> tuple[Tensor | Encoded, State]:
    """Send other rows along the route of a dispatch. Return what arrives, and the state of the new dispatch."""
    what, dispatcher = text_of("dispatch again", (x_TD.dtype, torch.is_grad_enabled())), state.lease.number
    number = channel.trail.follow(what, x_TD.device, of=state.number, dispatcher=dispatcher)
    with torch.no_grad():
        return state.route.send(pad(x_TD, state.real_rows, state.padded)), state.changed(number=number)


def attach(
    make: Callable[..., Dispatched],
    rows: Tensor | Encoded,
    weights_R: Tensor | None,
    state: State,
    sent: tuple[Tensor, Tensor | None],
) -> Dispatched:
    """Attach rows that arrived to the autograd graph, and return the result of the dispatch. The end of every dispatch.

    Args:
        make: Function that returns the result from its ``in_graph`` and ``weights``.
        rows: (R, D); as they travelled if ``MoEShape.quantised``.
        weights_R: Weights of these rows; None if they took the route of an earlier dispatch.
        state: State of the result.
        sent: (T, D) and (T, K), the rows and the weights that were sent; None for the weights as above.
    """
    x_TD, weights_TK = sent
    received = (rows if isinstance(rows, Tensor) else rows.stand_in(x_TD.dtype), weights_R)
    in_graph, weights = Dispatch.apply(x_TD, weights_TK, state, received)  # type: ignore[no-untyped-call]
    made = make(in_graph=in_graph, weights=weights)
    return made if isinstance(rows, Tensor) else rows.added_to(made, state.lease.channel.shape.wire_dtype)


class Dispatch(torch.autograd.Function):
    """Attach the arrived rows and weights to the sent ones in the autograd graph.

    The context holds the lease, so the channel stays open for the backward even if the model is deleted before it.
    ``arrived`` is a tuple, because autograd turns a tensor that is both an argument and a result into a view.
    ``weights_TK`` is None if the rows took the route of an earlier dispatch.
    """

    is_dispatch = True
    """Behind this node of a graph are no experts; ``seams.observers`` looks for it."""

    @staticmethod
    def forward(
        ctx: Any, x_TD: Tensor, weights_TK: Tensor | None, state: State, arrived: tuple[Tensor, Tensor | None]
    ) -> tuple[Tensor, Tensor | None]:
        ctx.state = state
        return arrived

    @staticmethod
    def backward(ctx: Any, grad_RD: Tensor, grad_R: Tensor | None) -> Any:
        state: State = ctx.state
        if torch.is_grad_enabled():
            raise double_backward("dispatch")
        if type(grad_RD) is not Tensor:
            check_plain("Dispatcher.dispatch", gradient=grad_RD)
        state.tally.count()
        lease = state.lease
        if lease.channel.communicator.observers or lease.channel.control.observers:
            lease.channel.announce(lease.name)
        lease.channel.trail.follow("dispatch.backward", grad_RD.device, of=state.number, dispatcher=lease.number)
        # Always compute the gradient of the weights: all ranks must exchange it, even if this rank does not need it.
        with record_function("moe_dispatch::dispatch.backward") if profiled() else NO_RANGE:
            try:
                grad_TD, grad_TK = state.route.dispatch_backward(grad_RD, grad_R)
            except Exception as error:
                state.lease.name_in(error)
                raise
        if state.real_rows is not None or state.padded != state.num_rows:
            grad_TD = trim(grad_TD, state.real_rows, state.num_rows)
            grad_TK = None if grad_TK is None else trim(grad_TK, state.real_rows, state.num_rows)
        return grad_TD, grad_TK, None, None


class Combine(torch.autograd.Function):
    """Combine as an autograd function of the expert rows and their weights.

    The weights connect it to the backward of dispatch even if no expert got a row, or the expert rows are detached.
    """

    @staticmethod
    def forward(ctx: Any, rows_RD: Tensor, weights_R: Tensor, state: State, channel: Channel) -> Tensor:
        ctx.state, ctx.channel = state, channel
        applied = channel.config.weights == "combine"
        lease = state.lease
        ctx.number = channel.trail.follow("combine", rows_RD.device, of=state.number, dispatcher=lease.number)
        ctx.save_for_backward(
            weights_R, rows_RD if applied and state.wants_weights and ctx.needs_input_grad[1] else None
        )
        # ``data`` is no view, so models may add a residual to the result in place, also below FSDP2, which has hooks on
        # it. A library may return a view, and the shape of x makes one.
        y_TD = state.route.combine(rows_RD, weights_R if applied else None).data
        if state.real_rows is not None or state.padded != state.num_rows:
            y_TD = trim(y_TD, state.real_rows, state.num_rows)
        return state.layout.unflatten(y_TD, state.shape).data

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        if torch.is_grad_enabled():
            raise double_backward("combine")
        if type(grad) is not Tensor:
            check_plain("Dispatcher.combine", gradient=grad)
        (weights_R, rows_RD), state = ctx.saved_tensors, ctx.state
        state.tally.count()  # on one rank, a gradient of the experts may be the only one
        grad_TD = grad.reshape(state.num_rows, grad.shape[-1])
        lease = state.lease
        if lease.channel.communicator.observers or lease.channel.control.observers:
            lease.channel.announce(lease.name)
        weights_R = weights_R if ctx.channel.config.weights == "combine" else None
        lease.channel.trail.follow("combine.backward", grad.device, of=ctx.number, dispatcher=lease.number)
        with record_function("moe_dispatch::combine.backward") if profiled() else NO_RANGE:
            if state.real_rows is not None or state.padded != state.num_rows:
                grad_TD = pad(grad_TD, state.real_rows, state.padded)
            try:
                return *state.route.combine_backward(grad_TD, rows_RD, weights_R), None, None
            except Exception as error:
                state.lease.name_in(error)
                raise


def double_backward(verb: str) -> StateError:
    """Return the error of a backward that autograd records, because the backwards here have no backward."""
    return StateError(
        f"Dispatcher.{verb}: double backward is not supported. Use create_graph=False, or keep gradient penalties out "
        "of the MoE layer. [MD09]"
    )


_CPU = torch.device("cpu")
_ANCHORS: dict[torch.device, Tensor] = {}


def make_anchor(device: torch.device) -> None:
    """Make the anchor of a device, because a traced call cannot. That of the CPU would keep CUDA graphs away."""
    with torch.inference_mode(False):  # training must be able to save an anchor that an evaluation made
        anchor = torch.empty(0, device=device, requires_grad=True)
    _ANCHORS.setdefault(anchor.device, anchor)


make_anchor(_CPU)


def anchor_for(tensor: Tensor, channel: Channel) -> Tensor | None:
    """Return a tensor that requires grad, if gradients are recorded and peers may wait for this rank's backward.

    Ranks may differ in which of x, the weights and the experts require grad. But every rank must take part in every
    backward, because a rank that skips one leaves its peers waiting. So what goes through a verb always requires grad.
    A single rank has no peers.
    """
    if channel.communicator.size == 1 or not torch.is_grad_enabled() or not channel.needs.differentiable:
        return None
    return _ANCHORS.get(tensor.device, _ANCHORS[_CPU])


def anchor(tensor: Tensor, channel: Channel) -> Tensor:
    """Return ``tensor`` so that it requires grad, as ``anchor_for`` says."""
    if tensor.requires_grad or (origin := anchor_for(tensor, channel)) is None:
        return tensor
    result: Tensor = _Tie.apply(tensor, origin)  # type: ignore[no-untyped-call]
    return result


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
        if torch.is_grad_enabled():
            raise double_backward("dispatch")
        return grad, None
