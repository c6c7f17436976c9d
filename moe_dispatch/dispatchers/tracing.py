"""The verbs by operators: what a Dispatcher does while ``torch.compile`` traces it, or a mode saves its operators.

Nothing here reads a device, counts, or talks to other ranks: bodies of operators do.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import torch
from torch import Size, Tensor
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils.checkpoint import _CachedTorchDispatchMode, _CachingTorchDispatchMode

from moe_dispatch.backends.base import Sizes
from moe_dispatch.dispatchers import operators
from moe_dispatch.dispatchers.channel import Channel, Lease
from moe_dispatch.dispatchers.planning import check_owner
from moe_dispatch.dispatchers.rows import anchor, merge_duplicates, tie
from moe_dispatch.errors import StateError
from moe_dispatch.layouts import Layout
from moe_dispatch.permutation import accumulation_dtype
from moe_dispatch.types import Dispatched, Plan, Routing


@final
@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class TracedState:
    """What a Dispatched made by operators is combined with: the way home, and the backend's state as tensors."""

    lease: Lease
    layout: Layout
    shape: Size
    num_rows: int
    real_rows: Tensor | None
    tensors: tuple[Tensor, ...]


def uses_operators(lease: Lease) -> bool:
    """Whether a verb is to call operators rather than the backend, which is 20 to 50 us a call faster.

    True while it is traced, and in selective checkpointing, which can save only what operators return.
    """
    if torch.compiler.is_compiling():
        return True
    if not torch._C._len_torch_dispatch_stack():
        return False
    return lease.channel.needs.compilable and any(
        isinstance(mode, (_CachingTorchDispatchMode, _CachedTorchDispatchMode)) or _traces(mode)
        for mode in _get_current_dispatch_mode_stack()
    )


def _traces(mode: object) -> bool:
    """Whether a dispatch mode is one of torch's own for tracing (fake tensors, proxies), not one that a user wrote."""
    return getattr(mode, "_mode_key", None) is not None


def dispatch_traced(
    lease: Lease, x: Tensor, routing: Routing, plan: Plan | Layout | None, layout: Layout
) -> Dispatched:
    """``Dispatcher.dispatch`` by an operator."""
    channel, x_TD = lease.channel, layout.flatten(x)
    pad_multiple, num_rows, sizes, real_rows = channel.shape.pad_multiple, x_TD.shape[0], Sizes(), None
    valid_T: Tensor | None = None
    if isinstance(plan, Plan):
        _check_plan(channel, plan, num_rows)
        sizes, real_rows, valid_T = plan.sizes, plan.real_rows, plan.valid_T
    # Without a plan, rows that are no tokens are masked, not cut: how many they are would be read on the host.
    if real_rows is None and valid_T is None:
        valid_T = layout.valid_T(num_rows, x.device)
    capacity = channel.capacity
    ids_TK, weights_TK = _merged(
        routing.topk_ids, routing.topk_weights, accumulation_dtype(x.dtype), asks=capacity is None
    )
    rows_RD, weights_R, real_L, *state = operators.dispatch(
        x_TD,
        ids_TK,
        anchor(weights_TK, channel.communicator.size),
        None if real_rows is None else real_rows.to(x.device, non_blocking=True),
        valid_T,
        channel.name,
        sizes.padded_rows,
        sizes.group_max_rows,
        *((None,) * 3 if capacity is None else (capacity.rows, capacity.buffer_rows, capacity.pair_rows)),
    )
    return Dispatched(
        rows=rows_RD,
        tokens_per_expert=real_L if pad_multiple == 1 else real_L + (-real_L % pad_multiple),
        real_tokens_per_expert=real_L,
        tokens_per_expert_list=None,
        weights=weights_R,
        pad_multiple=pad_multiple,
        state=TracedState(
            lease=lease, layout=layout, shape=x.shape, num_rows=num_rows, real_rows=real_rows, tensors=tuple(state)
        ),
    )


def send_traced_again(x: Tensor, again: Dispatched) -> Dispatched:
    """``Dispatcher.dispatch(again=...)`` by an operator."""
    state: TracedState = again.state
    channel = state.lease.channel
    x_TD = anchor(state.layout.flatten(x), channel.communicator.size)
    rows_RD = operators.dispatch_again(x_TD, list(state.tensors), state.real_rows, channel.name, again.rows.shape[0])
    return Dispatched(
        rows=rows_RD,
        tokens_per_expert=again.tokens_per_expert,
        real_tokens_per_expert=again.real_tokens_per_expert,
        tokens_per_expert_list=None,
        weights=again.weights if torch.compiler.is_compiling() else tie(again.weights, rows_RD),
        pad_multiple=again.pad_multiple,
        state=state,
    )


def combine_traced(rows: Tensor, sent: Dispatched) -> Tensor:
    """``Dispatcher.combine`` by an operator."""
    state: TracedState = sent.state
    channel = state.lease.channel
    weights_R = anchor(sent.weights, channel.communicator.size)
    y_TD = operators.combine(rows, weights_R, list(state.tensors), state.real_rows, channel.name, state.num_rows)
    return state.layout.unflatten(y_TD, state.shape)


def _check_plan(channel: Channel, plan: Plan, num_rows: int) -> None:
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


def _merged(ids_TK: Tensor, weights_TK: Tensor, dtype: torch.dtype, *, asks: bool) -> tuple[Tensor, Tensor]:
    """Ids and weights without duplicates; as they are where they do not fit each other, for the operator to refuse."""
    if not weights_TK.is_floating_point():
        return ids_TK, weights_TK
    weights_TK = weights_TK.to(dtype)
    # Here, because it brings sympy, which an eager layer never needs.
    from torch.fx.experimental.symbolic_shapes import guard_or_true  # noqa: PLC0415

    fit = ids_TK.dim() == weights_TK.dim() == 2 and ids_TK.shape[1] == weights_TK.shape[1]
    fit = fit and guard_or_true(ids_TK.shape[0] == weights_TK.shape[0])
    return merge_duplicates(ids_TK, weights_TK, asks=asks) if fit else (ids_TK, weights_TK)


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
