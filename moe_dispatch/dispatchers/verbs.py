"""Dispatch and combine: checked, prepared, run, and attached to autograd.

An eager call runs the bodies itself. A call that ``torch.compile`` traces, or that selective checkpointing watches, is
prepared in the same way and calls operators, which run the same bodies. Code for traced calls reads no device, counts
nothing and talks to no other rank: operators do.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils.checkpoint import _CachedTorchDispatchMode, _CachingTorchDispatchMode

from moe_dispatch.backends.base import Arrived, Sizes
from moe_dispatch.dispatchers import autograd, operators
from moe_dispatch.dispatchers.autograd import Selection, State, anchor, attach, run_dispatch, tie
from moe_dispatch.dispatchers.channel import Channel, Lease
from moe_dispatch.dispatchers.planning import (
    Draft,
    check_again,
    check_combine,
    check_owner,
    check_plan,
    check_rows,
    check_tensors,
    check_values,
    cuts_rows,
    draft_plan,
    refuse_routing,
    settle,
)
from moe_dispatch.errors import InputError, StateError
from moe_dispatch.layouts import Layout
from moe_dispatch.permutation import accumulation_dtype
from moe_dispatch.types import Dispatched, InFlight, Plan, Routing


def uses_operators(lease: Lease) -> bool:
    """Whether a verb calls operators rather than the backend, which is 20 to 50 us a call faster.

    True while the call is traced, and in selective checkpointing, which can save only what operators return.
    """
    if torch.compiler.is_compiling():
        return True
    if not torch._C._len_torch_dispatch_stack():
        return False
    return lease.channel.needs.compilable and any(
        isinstance(mode, (_CachingTorchDispatchMode, _CachedTorchDispatchMode))
        # One of torch's own modes for tracing (fake tensors, proxies), not one that a user wrote.
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
    name: str,
) -> Dispatched | InFlight:
    """``Dispatcher.dispatch`` of an eager call.

    Args:
        lease: of the dispatcher.
        x: as the model gave it.
        routing: of its rows.
        plan: settled before; or the layout of x, or None for the inferred one: then sizes are settled here.
        infer: gives the layout of x where none is given.
        async_op: return before the rows have arrived.
        name: Name of the dispatcher, stored in recorded traces.
    """
    given = plan if isinstance(plan, Plan) else None
    x_TD = x

    def check(channel: Channel) -> Draft | None:
        nonlocal x_TD
        x_TD, draft = _checked(channel, x, routing, plan, infer)
        return draft

    recorded = torch.is_grad_enabled()
    settled = settle(lambda: lease.channel, check, settled=given is not None, x=x, recorded=recorded) or given
    assert settled is not None
    assert routing is not None
    channel, layout, recorder = lease.channel, settled.layout, lease.channel.recorder
    note = None if recorder is None else recorder.note(lease, name, x, routing, layout)
    wants_weights = routing.topk_weights.requires_grad
    weights_TK = anchor(routing.topk_weights.to(accumulation_dtype(x.dtype)), channel)
    ids_TK, weights_TK = merged_slots(routing.topk_ids, weights_TK, asks=not channel.config.graph_safe)
    real_rows, valid_T = _real_rows(channel, settled, x_TD)
    count = x_TD.shape[0] if real_rows is None else real_rows.shape[0]
    padded = channel.needs.brought(count, settled.sizes)
    selection = Selection(num_rows=x_TD.shape[0], real_rows=real_rows, padded=padded)
    with torch.no_grad():
        finish = run_dispatch(channel, (x_TD, ids_TK, weights_TK), valid_T, selection, settled.sizes, recorded=recorded)
        if recorder is not None and note is not None:  # no rank refused: its peers keep this call too
            recorder.keep(note)
        here = None if async_op else finish()

    def attached(arrived: Arrived) -> Dispatched:
        state = State(
            lease=lease,
            layout=layout,
            shape=x.shape,
            selection=selection,
            wants_weights=wants_weights,
            route=arrived.route,
        )
        rows, weights = attach(x_TD, weights_TK, state, (arrived.rows, arrived.weights))
        return _dispatched(arrived, rows, weights, state)

    if here is not None:
        return attached(here)

    def complete() -> Dispatched:
        with torch.no_grad():
            arrived = finish()
        return attached(arrived)

    return InFlight(finish=_once(lease, complete))


def _checked(
    channel: Channel, x: Tensor, routing: Routing | None, plan: Plan | Layout | None, infer: Callable[[], Layout]
) -> tuple[Tensor, Draft | None]:
    """What this rank checks of a dispatch by itself: the rows of x, and the draft of a plan where none is given."""
    layout = layout_in(plan, infer)
    x_TD = layout.flatten(x)
    check_tensors(x_TD, routing, channel.config, channel.needs)
    if channel.config.debug and routing is not None:
        layout.check(x_TD.shape[0], values=True)
        check_values(routing, layout.valid_T(x_TD.shape[0], x.device), channel.config.num_experts)
    if not isinstance(plan, Plan):
        return x_TD, draft_plan(channel, layout, x)
    check_plan(channel, plan, x, x_TD.shape[0])
    return x_TD, None


def layout_in(plan: Plan | Layout | None, infer: Callable[[], Layout]) -> Layout:
    """The layout of a dispatch: of its plan, as given, or inferred.

    Raises:
        InputError: it is neither.
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


def _real_rows(channel: Channel, plan: Plan, x_TD: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """Which rows are tokens: those to cut out, or a mask of (T,); both None where all rows are tokens."""
    layout, num_rows = plan.layout, x_TD.shape[0]
    real_rows = plan.real_rows
    if cuts_rows(channel, layout):
        if plan.num_rows is None:
            real_rows = layout.real_rows(num_rows)
        return None if real_rows is None else real_rows.to(x_TD.device, non_blocking=True), None
    return None, layout.valid_T(num_rows, x_TD.device) if plan.valid_T is None else plan.valid_T


def _once(lease: Lease, complete: Callable[[], Dispatched]) -> Callable[[], Dispatched]:
    """``complete``, once, and only while the dispatcher is open."""
    waiting = [complete]  # emptied, so that an InFlight that is kept does not keep what was sent

    def wait() -> Dispatched:
        _ = lease.channel  # raises where closed
        if not waiting:
            raise StateError("Dispatcher.dispatch: wait() must be called once, got a second call. Keep its result.")
        return waiting.pop()()

    return wait


def dispatch_again(x: Tensor, again: Dispatched) -> Dispatched:
    """``Dispatcher.dispatch(again=...)``."""
    state: State = again.state
    channel, x_TD = state.lease.channel, state.layout.flatten(x)
    if state.route is None:
        rows = operators.dispatch_again(
            anchor(x_TD, channel),
            list(state.tensors),
            state.selection.real_rows,
            channel.name,
            state.selection.num_rows,
            again.rows.shape[0],
        )
    else:
        check_again(x_TD, state.selection.num_rows, again.rows.device, channel.config)
        check_rows("Dispatcher.dispatch", "x", x_TD, channel.config, channel.needs)
        with torch.no_grad():
            arrived = state.route.send(state.selection.take(x_TD))
        rows, _ = attach(anchor(x_TD, channel), None, state, (arrived, None))
    return _dispatched(again, rows, again.weights if torch.compiler.is_compiling() else tie(again.weights, rows), state)


def _dispatched(counts: Arrived | Dispatched, rows: Tensor, weights: Tensor, state: State) -> Dispatched:
    """Rows and weights with the counts of what arrived, or of an earlier dispatch."""
    return Dispatched(
        rows=rows,
        tokens_per_expert=counts.tokens_per_expert,
        real_tokens_per_expert=counts.real_tokens_per_expert,
        host_counts=counts.tokens_per_expert_list if isinstance(counts, Arrived) else counts.host_counts,
        weights=weights,
        pad_multiple=state.lease.channel.shape.pad_multiple,
        state=state,
    )


def combine(rows: Tensor, sent: Dispatched) -> Tensor:
    """``Dispatcher.combine``."""
    state: State = sent.state
    channel = state.lease.channel
    weights_R = anchor(sent.weights, channel)
    if state.route is None:
        y_TD = operators.combine(
            rows, weights_R, list(state.tensors), state.selection.real_rows, channel.name, state.selection.num_rows
        )
    else:
        check_combine(rows, sent.rows, channel.config, channel.needs)
        y_TD = autograd.combine(rows, weights_R, state, channel)
    return state.layout.unflatten(y_TD, state.shape)


def dispatch_by_operator(
    lease: Lease, x: Tensor, routing: Routing | None, plan: Plan | Layout | None, infer: Callable[[], Layout]
) -> Dispatched:
    """``Dispatcher.dispatch`` of a traced call: by an operator, which settles sizes where no plan did."""
    if not isinstance(routing, Routing):
        refuse_routing(routing)
    channel, layout = lease.channel, layout_in(plan, infer)
    x_TD, sizes, real_rows, valid_T = layout.flatten(x), Sizes(), None, None
    num_rows = x_TD.shape[0]
    if not torch.compiler.is_compiling():  # a compiled region sees symbols, and lengths may be on a device
        layout.check(num_rows, values=channel.config.debug)
    if isinstance(plan, Plan):
        _check_plan_by_shape(channel, plan, num_rows)
        sizes, valid_T = plan.sizes, plan.valid_T
        real_rows = None if plan.real_rows is None else plan.real_rows.to(x.device, non_blocking=True)
    # Without a plan, rows that are no tokens are masked, not cut: how many they are would be read on the host.
    if real_rows is None and valid_T is None:
        valid_T = layout.valid_T(num_rows, x.device)
    capacity = channel.capacity
    ids_TK, weights_TK = routing.topk_ids, routing.topk_weights
    if _fit(ids_TK, weights_TK):
        weights_TK = anchor(weights_TK.to(accumulation_dtype(x.dtype)), channel)
        ids_TK, weights_TK = merged_slots(ids_TK, weights_TK, asks=capacity is None)
    rows_RD, weights_R, real_L, *route = operators.dispatch(
        x_TD,
        ids_TK,
        weights_TK,
        real_rows,
        valid_T,
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
        state=State(
            lease=lease,
            layout=layout,
            shape=x.shape,
            selection=Selection(num_rows=num_rows, real_rows=real_rows, padded=None),
            wants_weights=routing.topk_weights.requires_grad,
            tensors=tuple(route),
        ),
    )


def _check_plan_by_shape(channel: Channel, plan: Plan, num_rows: int) -> None:
    """``check_plan``, as far as it can be traced: the number of rows may be a symbol, compared when it runs."""
    check_owner(channel, plan)
    if plan.num_rows is not None:
        torch._check(
            plan.num_rows == num_rows, lambda: "Dispatcher.dispatch: the plan is for another number of tokens."
        )
    elif plan.layout.on_host and not plan.layout.all_real:  # which rows to cut would be found out here, on the host
        raise StateError(
            f"Dispatcher.dispatch: in a compiled region a plan of {plan.layout} must know the rows of x, got one that "
            "was made without like. Make it with plan(layout, like=x)."
        )


def _fit(ids_TK: Tensor, weights_TK: Tensor) -> bool:
    """Whether ids and weights fit each other; where they do not, the operator refuses them when it runs."""
    # Imported here because it brings sympy, which an eager layer never needs.
    from torch.fx.experimental.symbolic_shapes import guard_or_true  # noqa: PLC0415

    fit = ids_TK.dim() == weights_TK.dim() == 2 and ids_TK.shape[1] == weights_TK.shape[1]
    return fit and weights_TK.is_floating_point() and guard_or_true(ids_TK.shape[0] == weights_TK.shape[0])


def refuse_tracing(verb: str) -> None:
    """Refuse what only an eager call can do: settle a plan, or use a Dispatched that one made.

    Raises:
        StateError: the call is being traced.
    """
    if torch.compiler.is_compiling():
        raise StateError(
            f"Dispatcher.{verb}: a plan must be made, and a Dispatched of eager mode be used, outside of compiled "
            "regions, got a call that is being traced. Pass the plan in; compile both verbs of a layer, or neither."
        )


def merged_slots(ids_TK: Tensor, weights_TK: Tensor, *, asks: bool) -> tuple[Tensor, Tensor]:
    """Give an expert that a row names twice one slot with the sum of the weights; the gradient reaches each slot.

    The later slots become -1. Weights of -1 slots are never read.

    Args:
        ids_TK: int64; ids that are invalid stay invalid.
        weights_TK: floating, in the accumulation dtype.
        asks: on the CPU, look first whether there are duplicates. Elsewhere that would be a host sync, so (T, K, K)
            tables are always summed.
    """
    if ids_TK.shape[1] == 1:
        return ids_TK, weights_TK
    same_TKK = ids_TK.unsqueeze(2) == ids_TK.unsqueeze(1)
    if asks and ids_TK.is_cpu and not torch.compiler.is_compiling():
        if int(same_TKK.count_nonzero()) == ids_TK.numel():
            return ids_TK, weights_TK
        real_TK = ids_TK >= 0  # slots that go nowhere are equal to each other
        if int((same_TKK & real_TK.unsqueeze(2)).count_nonzero()) == int(real_TK.count_nonzero()):
            return ids_TK, weights_TK
    slots_K = torch.arange(ids_TK.shape[1], device=ids_TK.device)
    is_first = (same_TKK.to(torch.uint8).argmax(2) == slots_K) & (ids_TK >= 0)
    merged = torch.where(same_TKK, weights_TK.unsqueeze(1), 0).sum(2)
    return torch.where(is_first, ids_TK, ids_TK.clamp(max=-1)), torch.where(is_first, merged, 0)
