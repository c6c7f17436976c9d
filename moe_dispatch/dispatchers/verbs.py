"""Dispatch and combine: check and prepare a call, run it, and attach its result to autograd.

An eager call runs the functions of ``autograd`` itself. A call that ``torch.compile`` traces, or that selective
checkpointing records, calls operators instead, which run the same functions. Code for traced calls must not read a
device, change a counter or exchange anything with other ranks: the operators do that when they run.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils.checkpoint import _CachedTorchDispatchMode, _CachingTorchDispatchMode

from moe_dispatch.backends.base import Arrived, Sizes
from moe_dispatch.communication import to_device
from moe_dispatch.dispatchers import autograd, operators
from moe_dispatch.dispatchers.agreement import Caller, settle, tell_peers
from moe_dispatch.dispatchers.autograd import Selection, State, anchor, attach, run_dispatch, tie
from moe_dispatch.dispatchers.channel import Channel, Lease
from moe_dispatch.dispatchers.placing import plan_balance
from moe_dispatch.dispatchers.planning import (
    Draft,
    Outgoing,
    check_again,
    check_combine,
    check_owner,
    check_plan,
    check_rows,
    check_tensors,
    check_values,
    cuts_rows,
    draft_plan,
    no_routing,
    prepare,
)
from moe_dispatch.errors import InputError, StateError
from moe_dispatch.layouts import Layout
from moe_dispatch.permutation import accumulation_dtype, merge_slots
from moe_dispatch.types import Dispatched, InFlight, Plan, Routing


def uses_operators(lease: Lease) -> bool:
    """Return whether a verb must call operators instead of the backend.

    It must while the call is traced, and in selective checkpointing, which can save only results of operators. Other
    calls go to the backend directly, which saves 20 to 50 us a call.
    """
    if torch.compiler.is_compiling():
        return True
    if not torch._C._len_torch_dispatch_stack():
        return False
    return lease.channel.needs.compilable and any(
        isinstance(mode, (_CachingTorchDispatchMode, _CachedTorchDispatchMode))
        # Only torch's own modes for tracing (fake tensors, proxies) have this key; modes of users have none.
        or getattr(mode, "_mode_key", None) is not None
        for mode in _get_current_dispatch_mode_stack()
    )


def dispatch(
    lease: Lease,
    x: Tensor,
    routing: Routing | None,
    plan: Plan | Layout | None,
    infer: Callable[[], Layout],
    *,
    async_op: bool,
) -> Dispatched | InFlight:
    """Run ``Dispatcher.dispatch`` in an eager call.

    Args:
        lease: The dispatcher's share of its channel.
        x: Hidden states in the shape of the model.
        routing: Ids and weights of the rows of x.
        plan: A plan, a layout, or None for the inferred layout. Without a plan, this call settles the sizes.
        infer: Function that returns the layout of x; called if ``plan`` is None.
        async_op: Whether to return before the rows have arrived.
    """
    channel, caller, has_sizes = lease.channel, Caller(torch.is_grad_enabled(), lease), isinstance(plan, Plan)
    try:
        if not isinstance(x, Tensor):
            raise InputError(
                f"Dispatcher.dispatch: x must be a Tensor, got {type(x).__name__}. Pass the hidden states, with 0 rows "
                "if this rank has no tokens."
            )
        layout = layout_in(plan, infer)
        x_TD = layout.flatten(x)
        routing = check_tensors(x_TD, routing, channel.config, channel.needs)
        if channel.config.debug:
            layout.check(x_TD.shape[0], values=True)
            check_values(routing, layout.valid_T(x_TD.shape[0], x.device), channel.config.num_experts)
        if isinstance(plan, Plan):
            check_plan(channel, plan, x, x_TD.shape[0])
        known = plan if isinstance(plan, Plan) else draft_plan(channel, layout, x)
        outgoing = _outgoing(lease, x_TD, routing, known, caller)
    except Exception as error:
        tell_peers(channel, error, in_dispatch=True, x=x, has_sizes=has_sizes)
        raise
    sizes = settle(channel, known, x=x, caller=caller, outgoing=outgoing).sizes
    recorder, placement, wants_weights = channel.recorder, lease.placement, routing.topk_weights.requires_grad
    note = None if recorder is None else recorder.note(lease, lease.name, x, routing, layout)
    with torch.no_grad():
        if channel.config.balance is not None:
            placement, table = plan_balance(channel, outgoing.ids_TK)
            outgoing = outgoing.placed(table)
        selection, finish = run_dispatch(channel, outgoing, sizes, caller)
        if routing.drift is not None:
            channel.meter.record_drift(lease.name, routing.drift)
        if recorder is not None and note is not None:  # no rank refused the call, so the traces of all ranks hold it
            recorder.keep(note)

    def complete() -> Dispatched:
        with torch.no_grad():
            arrived = finish()
        state = State(
            lease=lease,
            layout=layout,
            shape=x.shape,
            selection=selection,
            wants_weights=wants_weights,
            placement=placement,
            route=arrived.route,
        )
        rows, weights = attach(x_TD, outgoing.weights_TK, state, (arrived.rows, arrived.weights))
        return _dispatched(arrived, rows, weights, state)

    return InFlight(placement=placement, finish=_once(lease, complete, x.device)) if async_op else complete()


def layout_in(plan: Plan | Layout | None, infer: Callable[[], Layout]) -> Layout:
    """Return the layout of a dispatch: the plan's layout, the given layout, or the inferred layout.

    Raises:
        InputError: ``plan`` is no Plan, Layout or None.
    """
    if isinstance(plan, Plan):
        return plan.layout
    layout = infer() if plan is None else plan
    if not isinstance(layout, Layout):
        raise InputError(
            f"Dispatcher.dispatch: plan must be a Plan, a Layout or None, got {type(layout).__name__}. "
            "Pass dispatcher.plan(layout)."
        )
    return layout


def _outgoing(lease: Lease, x_TD: Tensor, routing: Routing, plan: Draft | Plan, caller: Caller) -> Outgoing:
    """Prepare what this rank sends: merge duplicate ids, and find the rows that are tokens. No host sync on a GPU."""
    channel = lease.channel
    weights_TK = anchor(routing.topk_weights.to(accumulation_dtype(x_TD.dtype)), channel)
    tables = channel.context.permutation_of(routing.topk_ids).tables
    ids_TK, weights_TK = tables.merge_slots(routing.topk_ids, weights_TK, asks=not channel.config.graph_safe)
    real_rows, valid_T = (None, None) if plan.layout.all_real else _real_rows(channel, plan, x_TD)
    return prepare(
        channel,
        x_TD,
        ids_TK,
        weights_TK,
        real_rows=real_rows,
        valid_T=valid_T,
        table=None if channel.config.balance is not None else lease.table,  # with balance, slots are planned later
        mark=caller.mark(x_TD.dtype),
    )


def _real_rows(channel: Channel, plan: Draft | Plan, x_TD: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """Return the indices of the rows that are tokens, or a mask (T,) of them.

    The layout may have rows that are no tokens. The indices are returned if these are cut out.
    """
    layout, num_rows = plan.layout, x_TD.shape[0]
    real_rows = plan.real_rows
    if cuts_rows(channel, layout):
        if plan.num_rows is None:
            real_rows = layout.real_rows(num_rows)
        return None if real_rows is None else to_device(real_rows, x_TD.device), None
    return None, layout.valid_T(num_rows, x_TD.device) if plan.valid_T is None else plan.valid_T


def _once(lease: Lease, complete: Callable[[], Dispatched], device: torch.device) -> Callable[[], Dispatched]:
    """Return a function that calls ``complete`` once, on the current stream, and only while the dispatcher is open."""
    waiting = [complete]  # emptied by the call, so that a kept InFlight does not hold the sent tensors
    stream = torch.cuda.current_stream(device) if device.type == "cuda" else None

    def wait() -> Dispatched:
        _ = lease.channel  # raises if closed
        if stream is not None and (current := torch.cuda.current_stream(device)) != stream:  # nothing orders the two
            raise StateError(
                f"Dispatcher.dispatch: wait() must run on the stream of the dispatch, {stream}, got {current}. Call it "
                "under torch.cuda.stream(...) of the dispatch, and let the other stream wait for that one."
            )
        if not waiting:
            raise StateError("Dispatcher.dispatch: wait() must be called once, got a second call. Keep its result.")
        return waiting.pop()()

    return wait


def dispatch_again(x: Tensor, again: Dispatched) -> Dispatched:
    """Run ``Dispatcher.dispatch(x, again=again)`` in an eager call."""
    state: State = again.state
    assert state.route is not None
    channel, x_TD = state.lease.channel, state.layout.flatten(x)
    check_again(x_TD, state.selection.num_rows, again.rows.device, channel.config)
    check_rows("Dispatcher.dispatch", "x", x_TD, channel.config, channel.needs)
    with torch.no_grad():
        arrived = state.route.send(state.selection.take(x_TD))
    rows, _ = attach(anchor(x_TD, channel), None, state, (arrived, None))
    return _dispatched(again, rows, tie(again.weights, rows), state)


def _dispatched(counts: Arrived | Dispatched, rows: Tensor, weights: Tensor, state: State) -> Dispatched:
    """Make a ``Dispatched`` from rows, weights, and the counts of what arrived or of an earlier dispatch."""
    return Dispatched(
        rows=rows,
        tokens_per_expert=counts.tokens_per_expert,
        real_tokens_per_expert=counts.real_tokens_per_expert,
        host_counts=counts.tokens_per_expert_list if isinstance(counts, Arrived) else counts.host_counts,
        weights=weights,
        pad_multiple=state.lease.channel.shape.pad_multiple,
        placement=state.placement,
        state=state,
    )


def combine(rows: Tensor, sent: Dispatched) -> Tensor:
    """Run ``Dispatcher.combine`` in an eager call."""
    state: State = sent.state
    channel = state.lease.channel
    check_combine(rows, sent.rows, channel.config, channel.needs)
    y_TD = autograd.combine(rows, anchor(sent.weights, channel), state, channel)
    return state.layout.unflatten(y_TD, state.shape)


def dispatch_by_operator(
    lease: Lease, x: Tensor, routing: Routing | None, plan: Plan | Layout | None, infer: Callable[[], Layout]
) -> Dispatched:
    """Run ``Dispatcher.dispatch`` in a traced call. The operator settles the sizes if there is no plan."""
    if not isinstance(routing, Routing):
        raise no_routing(routing)
    channel, layout = lease.channel, layout_in(plan, infer)
    if channel.config.balance is not None:
        raise StateError(
            "Dispatcher.dispatch: a config with balance must be called eagerly, because the host plans each dispatch, "
            f"got balance={channel.config.balance!r} inside torch.compile or selective checkpointing. Keep both verbs "
            "out of it, or use dispatcher.place(placement) with balance=None."
        )
    x_TD, sizes, real_rows, valid_T = layout.flatten(x), Sizes(), None, None
    num_rows = x_TD.shape[0]
    if not torch.compiler.is_compiling():  # under tracing, the number of rows is a symbol, and lengths are unknown
        layout.check(num_rows, values=channel.config.debug)
    if isinstance(plan, Plan):
        _check_plan_by_shape(channel, plan, num_rows)
        sizes, valid_T = plan.sizes, plan.valid_T
        real_rows = None if plan.real_rows is None else to_device(plan.real_rows, x.device)
    # Without a plan, rows that are no tokens are masked. To cut them out, their number would have to be read here.
    if real_rows is None and valid_T is None:
        valid_T = layout.valid_T(num_rows, x.device)
    capacity = channel.capacity
    ids_TK, weights_TK = routing.topk_ids, routing.topk_weights
    if _fit(ids_TK, weights_TK):
        weights_TK = anchor(weights_TK.to(accumulation_dtype(x.dtype)), channel)
        merge = merge_slots
        if not torch.compiler.is_compiling():  # a kernel cannot be traced
            merge = channel.context.permutation_of(ids_TK).tables.merge_slots
        ids_TK, weights_TK = merge(ids_TK, weights_TK, asks=capacity is None)
    rows_RD, weights_R, real_L, *route = operators.dispatch(
        x_TD,
        ids_TK,
        weights_TK,
        real_rows,
        valid_T,
        [] if lease.table is None else [lease.table.copies_EC, lease.table.experts_L],
        channel.name,
        torch.is_grad_enabled(),
        *operators.flat_sizes(sizes, capacity),
    )
    pad_multiple = channel.shape.pad_multiple
    return Dispatched(
        rows=rows_RD,
        tokens_per_expert=real_L if pad_multiple == 1 else real_L + (-real_L % pad_multiple),
        real_tokens_per_expert=real_L,
        host_counts=None,
        weights=weights_R,
        pad_multiple=pad_multiple,
        placement=lease.placement,
        state=State(
            lease=lease,
            layout=layout,
            shape=x.shape,
            selection=Selection(num_rows=num_rows, real_rows=real_rows, padded=None),
            wants_weights=routing.topk_weights.requires_grad,
            placement=lease.placement,
            tensors=tuple(route),
        ),
    )


def dispatch_again_by_operator(x: Tensor, again: Dispatched) -> Dispatched:
    """Run ``Dispatcher.dispatch(x, again=again)`` if an operator made the first dispatch."""
    state: State = again.state
    channel = state.lease.channel
    rows = operators.dispatch_again(
        anchor(state.layout.flatten(x), channel),
        list(state.tensors),
        state.selection.real_rows,
        channel.name,
        state.selection.num_rows,
        again.rows.shape[0],
    )
    weights = again.weights if torch.compiler.is_compiling() else tie(again.weights, rows)
    return _dispatched(again, rows, weights, state)


def combine_by_operator(rows: Tensor, sent: Dispatched) -> Tensor:
    """Run ``Dispatcher.combine`` if an operator made the dispatch."""
    state: State = sent.state
    channel, selection = state.lease.channel, state.selection
    weights_R = anchor(sent.weights, channel)
    y_TD = operators.combine(
        rows, weights_R, list(state.tensors), selection.real_rows, channel.name, selection.num_rows
    )
    return state.layout.unflatten(y_TD, state.shape)


def _check_plan_by_shape(channel: Channel, plan: Plan, num_rows: int) -> None:
    """Check a plan as ``check_plan`` does, as far as a traced call can.

    The number of rows may be a symbol, so it is compared when the compiled code runs.
    """
    check_owner(channel, plan)
    if plan.num_rows is not None:
        torch._check(
            plan.num_rows == num_rows, lambda: "Dispatcher.dispatch: the plan is for another number of tokens."
        )
    elif plan.layout.on_host and not plan.layout.all_real:  # the rows to cut would have to be found here, on the host
        raise StateError(
            f"Dispatcher.dispatch: in a compiled region a plan of {plan.layout} must know the rows of x, got one that "
            "was made without like. Make it with plan(layout, like=x)."
        )


def _fit(ids_TK: Tensor, weights_TK: Tensor) -> bool:
    """Return whether ids and weights fit each other. If they do not, the operator refuses them when it runs."""
    # Imported here because this module imports sympy, which an eager layer never needs.
    from torch.fx.experimental.symbolic_shapes import guard_or_true  # noqa: PLC0415

    fit = ids_TK.dim() == weights_TK.dim() == 2 and ids_TK.shape[1] == weights_TK.shape[1]
    return fit and weights_TK.is_floating_point() and guard_or_true(ids_TK.shape[0] == weights_TK.shape[0])


def refuse_tracing(verb: str) -> None:
    """Refuse a traced call of ``plan``, or a traced call that uses a Dispatched of an eager call.

    Raises:
        StateError: The call is being traced.
    """
    if torch.compiler.is_compiling():
        raise StateError(
            f"Dispatcher.{verb}: a plan must be made, and a Dispatched of eager mode be used, outside of compiled "
            "regions, got a call that is being traced. Pass the plan in. Compile both verbs of a layer, or neither."
        )
