"""Dispatch on the route of an earlier dispatch, and compare the two calls.

Dimensions: ``T`` rows of this rank, ``K`` top_k, ``R`` rows of this rank's experts, ``D`` hidden size.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn, final

import torch
from torch import Tensor
from torch.utils.checkpoint import _CheckpointFrame

from moe_dispatch.backends.wire import Encoded
from moe_dispatch.capabilities.recompute.differences import report
from moe_dispatch.capabilities.recompute.nesting import Asker, Place
from moe_dispatch.communication import control_device, raise_alike
from moe_dispatch.dispatched import Dispatched, InFlight, check_plain
from moe_dispatch.dispatchers import autograd, checks
from moe_dispatch.dispatchers.agreement import leave_untold
from moe_dispatch.dispatchers.channel import Channel, Lease, profiler_range
from moe_dispatch.dispatchers.dispatcher import Dispatcher, make, once
from moe_dispatch.errors import InputError
from moe_dispatch.layouts import Layout
from moe_dispatch.layouts.base import is_host
from moe_dispatch.permutation import accumulation_dtype
from moe_dispatch.seams.call import Call
from moe_dispatch.seams.calls import of_thread
from moe_dispatch.types import Plan, Routing

_MANY_EXPERTS = torch.iinfo(torch.int16).max


@final
@dataclass(kw_only=True, slots=True, eq=False)
class Kept:
    """A dispatch whose recomputations take its route.

    Attributes:
        dtype: Dtype of its x.
        ids: The ids of the rows that were sent, (T, K) in 16 or 32 bits; -1 in rows that are no tokens.
        weights: The weights of the router, (T, K); None if recomputations have no gradients of them.
        recorded: Whether gradients were recorded. In the forward of a reentrant checkpoint they are not.
        sent: Its result without rows; None while they travel.
    """

    dtype: torch.dtype
    ids: Tensor
    weights: Tensor | None
    recorded: bool
    sent: Dispatched | None = None


@final
class Log:
    """The dispatches of one checkpointed call, in order.

    Attributes:
        only_added: What ``keep_routes`` was told.
        told: Text that is added to the grad mode of a dispatch, which ranks compare.
        kept: The dispatches of each dispatcher.
        plans: What ranks agreed on for each plan on a channel, by field; None for one that is settled again.
        ids: Who has called ``keep_ids``, in order, and the results.
        recorded: Whether gradients are recorded in the forward.
        combines: Number of combines.
        verbs: Number of dispatches and combines that the forward has begun.
        repeated: Number of those that the running recomputation has begun.
        saved: How many tensors the forward had saved, and verbs it had begun, when it saved the last tensor.
        leaves_out: Whether recomputations leave out the last combine: by ``only_added``, or because on all ranks they
            stop there.
    """

    def __init__(self, *, only_added: bool = False) -> None:
        self.only_added = only_added
        self.told = ", and a recomputation takes the same route" + " without its last combine" * only_added
        self.kept: dict[Lease, list[Kept]] = {}
        self.plans: dict[Channel, list[dict[str, Any] | None]] = {}
        self.ids: list[tuple[Asker, Tensor]] = []
        self.recorded = True
        self.combines, self.leaves_out = 0, only_added
        self.verbs = self.repeated = 0
        self.saved = 0, 0
        self._frame: weakref.ref[Any] | None = None
        self._last: tuple[Channel, int] | None = None

    def begin(self, frame: _CheckpointFrame | None, *, recorded: bool) -> None:
        """Note the record of the checkpointed call. It is not kept alive, because it holds this log."""
        self.recorded = recorded
        self._frame = None if frame is None else weakref.ref(frame)

    def add(self, lease: Lease, kept: Kept) -> None:
        """Add a dispatch."""
        self.kept.setdefault(lease, []).append(kept)
        if not self.only_added:
            _unasked.setdefault(lease.channel, weakref.WeakSet()).add(self)

    def combined(self, lease: Lease) -> None:
        """Note that the forward has combined, and how many tensors the checkpoint has saved by now."""
        self.combines += 1
        own = None if self._frame is None else self._frame()
        self._last = None
        if own is Place().frame and own is not None:  # else a checkpoint inside of this one runs
            self._last = (lease.channel, len(own.weak_holders))

    def combined_last_on(self, channel: Channel) -> bool:
        """Return whether the last combine was on a channel."""
        return self._last is not None and self._last[0] is channel

    def stops_on(self, channel: Channel) -> bool:
        """Return whether a recomputation stops at the last combine, because nothing behind it was saved."""
        frame = None if self._frame is None else self._frame()
        if frame is None or self._last is None or self._last[0] is not channel:
            return False
        return bool(frame.early_stop and frame.forward_completed and len(frame.weak_holders) == self._last[1])


# The logs of each channel about which ranks have not been asked yet whether they stop at the last combine.
_unasked: weakref.WeakKeyDictionary[Channel, weakref.WeakSet[Log]] = weakref.WeakKeyDictionary()


def dispatch_anew(dispatcher: Dispatcher, call: Call) -> tuple[Kept, Dispatched | InFlight]:
    """Make a dispatch, and keep its route."""
    outer = of_thread.interceptor
    arriving = make(dispatcher, call) if outer is None else outer.dispatch(dispatcher, call)
    layout = dispatcher._layout_in(call.plan, call.x)
    assert call.routing is not None
    weights = call.routing.topk_weights
    kept = Kept(
        dtype=call.x.dtype,
        ids=_narrow(_ids_of_tokens(call.routing, layout, call.plan), dispatcher.config.num_experts),
        weights=weights.detach().clone() if weights.requires_grad or not torch.is_grad_enabled() else None,
        recorded=torch.is_grad_enabled(),
    )

    def arrived(sent: Dispatched) -> Dispatched:
        # New tensors, because the caller may change these in place, they are part of the autograd graph or of a buffer
        # with rows, and rows must not be kept.
        kept.sent = Dispatched(
            in_graph=sent.in_graph.new_empty((0, 0)),
            tokens_per_expert=sent.tokens_per_expert.clone(),
            real_tokens_per_expert=sent.real_tokens_per_expert.clone(),
            host_counts=sent.host_counts,
            weights=sent.weights.detach().clone(),
            pad_multiple=sent.pad_multiple,
            placement=sent.placement,
            state=sent.state,
            carried=_copied(sent.carried),
        )
        tally = sent.state.tally
        tally.real_L, tally.is_kept = kept.sent.real_tokens_per_expert, True
        return sent

    if isinstance(arriving, Dispatched):
        return kept, arrived(arriving)
    return kept, InFlight(placement=arriving.placement, finish=lambda: arrived(arriving.wait()))


def dispatch_on(
    log: Log, kept: Kept, dispatcher: Dispatcher, call: Call, *, problem_before: InputError | None
) -> Dispatched | InFlight:
    """Send x along the route of ``kept``, an earlier dispatch of the dispatcher in the log.

    If the recomputation has had a problem before, it is reported with the dispatch.

    Raises:
        InputError: The call is not that of the forward. Raised on every rank if the control group is on the CPU, or
            with ``debug``.
        PeerError: The call of another rank is not that of its forward.
    """
    channel, x = dispatcher._lease.enter(), call.x
    try:
        problem, checked, other = None, None, None
        try:
            if kept.sent is None:
                raise InputError(
                    f"Dispatcher.dispatch: a recomputation{of(dispatcher)} must take a route whose rows have arrived. "
                    "Call wait() in the checkpointed function."
                )
            if type(x) is not Tensor:
                check_plain("Dispatcher.dispatch", x=x)
            state = kept.sent.state
            layout = dispatcher._layout_in(call.plan, x)
            _compare_carried(kept, dispatcher, call)
            other = _difference(kept, state, dispatcher, x, layout)
            if other is not None and (_asks(channel) or x.shape != state.shape or x.dtype != kept.dtype):
                raise other
            layout = state.layout  # if it is another one, all ranks hear of it later
            x_TD = layout.flatten(x)
            routing = checks.check_routing(channel, x, x_TD, call.routing, None)
            checked = x_TD, routing, _ids_of_tokens(routing, layout, call.plan)
        except Exception as error:
            problem = error
        _raise_alike(log, channel, problem)
        assert checked is not None
        with profiler_range("dispatch"):
            finish = _send(kept, channel, *checked)
        report(dispatcher._lease, _differences(kept, *checked[1:], channel), other or problem_before)
        if not call.async_op:
            return finish()
        assert kept.sent is not None
        return InFlight(placement=kept.sent.placement, finish=once(dispatcher._lease, finish, x.device))
    except Exception as error:
        dispatcher._lease.name_in(error)
        raise


def refuse(log: Log, lease: Lease, number: str) -> NoReturn:
    """Refuse a recomputation that dispatches more often than its forward, or less often."""
    error = InputError(
        f"Dispatcher.dispatch: a recomputation{of(lease)} must make the dispatches of its forward, got {number}. "
        "Checkpoint a function that does the same each time."
    )
    _raise_alike(log, lease.enter(), error)
    raise error


def _asks(channel: Channel) -> bool:
    """Return whether ranks ask each other in each recomputed dispatch. It must not be a host sync."""
    config = channel.config
    return config.debug or (not config.graph_safe and control_device(channel.control.group).type == "cpu")


def _raise_alike(log: Log, channel: Channel, problem: Exception | None) -> None:
    """Raise on every rank if one has a problem, or on that rank alone if ranks do not ask each other.

    Where ranks ask, they also tell whether they stop at the last combine of the log. If they do not ask in each
    dispatch, then in the first one of a backward, for all logs that are new; but never in graph-safe mode, which reads
    nothing.
    """
    control, logs = channel.control, list[Log]()
    unasked = _unasked.get(channel, weakref.WeakSet[Log]())
    if control.size == 1 or _asks(channel):
        logs = [log]
    elif log in unasked and not channel.config.graph_safe:
        logs = [*unasked]
    goes_on = int(not all(each.stops_on(channel) for each in logs))
    if control.size > 1 and logs:
        (goes_on,) = raise_alike(control, problem, values=[goes_on], label="recompute")
    elif problem is not None:
        if control.size > 1:
            leave_untold(channel, problem)
        raise problem
    for each in logs:
        if each.combined_last_on(channel):
            each.leaves_out = each.only_added or not goes_on
        unasked.discard(each)


def _send(kept: Kept, channel: Channel, x_TD: Tensor, routing: Routing, ids_TK: Tensor) -> partial[Dispatched]:
    """Send rows along the route of an earlier dispatch, and return a function that attaches them to the graph."""
    sent = kept.sent
    assert sent is not None
    state: autograd.State = sent.state
    weights_TK = autograd.anchor(routing.topk_weights.to(accumulation_dtype(x_TD.dtype)), channel)
    permutation = channel.context.permutations[type(routing.topk_ids), routing.topk_ids.device.type]
    _, weights_TK = permutation.merge_slots(routing.topk_ids, weights_TK, asks=not channel.config.graph_safe)
    if not kept.recorded:  # nobody knew then whether weights require grad
        state = state.changed(wants_weights=weights_TK.requires_grad)
    rows, state = autograd.send(channel, state, x_TD)
    return partial(_attach, sent, state, rows, (x_TD, weights_TK))


def _attach(
    sent: Dispatched, state: autograd.State, rows: Tensor | Encoded, given: tuple[Tensor, Tensor]
) -> Dispatched:
    result = partial(
        dataclasses.replace,
        sent,
        tokens_per_expert=sent.tokens_per_expert.clone(),
        real_tokens_per_expert=sent.real_tokens_per_expert.clone(),
        state=state,
        carried=_copied(sent.carried),
    )
    return autograd.attach(result, rows, sent.weights.clone(), state, given)


def _copied(carried: Mapping[str, Tensor] | None) -> dict[str, Tensor] | None:
    return None if carried is None else {name: values.clone() for name, values in carried.items()}


def of(dispatcher: Dispatcher | Lease) -> str:
    """Return text that names a dispatcher in an error, or nothing."""
    return f" of {dispatcher.name!r}" * bool(dispatcher.name)


def _difference(
    kept: Kept, state: autograd.State, dispatcher: Dispatcher, x: Tensor, layout: Layout
) -> InputError | None:
    """Return the error of an x or a layout that is not that of the forward. It has both."""
    if x.shape == state.shape and x.dtype == kept.dtype and _are_equal(layout, state.layout):
        return None
    return InputError(
        f"Dispatcher.dispatch: a recomputation{of(dispatcher)} must be given the x and the layout of its forward, "
        f"{kept.dtype} {tuple(state.shape)} in {state.layout!r}, got {x.dtype} {tuple(x.shape)} in {layout!r}. Pass "
        "what belongs to the micro-batch as arguments of the checkpointed function."
    )


def _differences(kept: Kept, routing: Routing, ids_TK: Tensor, channel: Channel) -> Tensor:
    """Return the numbers of other ids and of other weights than in the forward, int64 (2,). No host sync.

    Weights may differ by rounding, if what comes before the router is not computed bit for bit alike.
    """
    is_other = _narrow(ids_TK, channel.config.num_experts) != kept.ids
    weights_TK, kept_TK = routing.topk_weights.detach(), kept.weights
    if kept_TK is None or not routing.topk_weights.requires_grad:
        return torch.stack([is_other.sum(), is_other.new_zeros((), dtype=torch.int64)])
    kind = weights_TK.device.type
    dtypes = [kept.dtype, weights_TK.dtype, *[torch.get_autocast_dtype(kind)] * torch.is_autocast_enabled(kind)]
    rounding = max(torch.finfo(dtype).eps for dtype in dtypes) ** 0.5
    limit_T1 = kept_TK.abs().amax(1, keepdim=True) * rounding
    differs = ((weights_TK - kept_TK).abs() > limit_T1) & (kept.ids >= 0) & ~is_other
    return torch.stack([is_other.sum(), differs.sum()])


def _compare_carried(kept: Kept, dispatcher: Dispatcher, call: Call) -> None:
    """Raise if a recomputation carries other names or dtypes than its forward, whose numbers it gets."""
    columns = call.columns
    if columns is not None:
        columns.check()
    assert kept.sent is not None
    mine = None if columns is None else columns.dtypes
    its = None if kept.sent.carried is None else {name: values.dtype for name, values in kept.sent.carried.items()}
    if mine != its:
        raise InputError(
            f"Dispatcher.dispatch: a recomputation{of(dispatcher)} must carry what its forward carried, {its}, got "
            f"{mine}. Checkpoint a function that does the same each time."
        )


def _are_equal(mine: Any, its: Any) -> bool:
    """Return whether two layouts, or values of their fields, are equal, as far as the host knows."""
    if mine is its:
        return True
    if type(mine) is not type(its):
        return False
    if isinstance(mine, Tensor):
        return mine.shape == its.shape and (not (is_host(mine) and is_host(its)) or torch.equal(mine, its))
    if isinstance(mine, Layout):
        names = [field.name for field in dataclasses.fields(mine)] if dataclasses.is_dataclass(mine) else ["metadata"]
        return all(_are_equal(getattr(mine, name), getattr(its, name)) for name in names)
    if isinstance(mine, tuple):
        return len(mine) == len(its) and all(map(_are_equal, mine, its))
    return bool(mine == its)


def _ids_of_tokens(routing: Routing, layout: Layout, plan: Plan | Layout | None) -> Tensor:
    """Return the ids of a call, int64 (T, K), with -1 in rows that are no tokens. No host sync."""
    ids_TK = routing.topk_ids
    if layout.all_real:
        return ids_TK
    valid_T = plan.valid_T if isinstance(plan, Plan) else None
    if valid_T is None:
        valid_T = layout.valid_T(len(ids_TK), ids_TK.device)
    return ids_TK if valid_T is None else torch.where(valid_T.unsqueeze(1), ids_TK, -1)


def _narrow(ids_TK: Tensor, num_experts: int) -> Tensor:
    return ids_TK.to(torch.int32 if num_experts > _MANY_EXPERTS else torch.int16)
