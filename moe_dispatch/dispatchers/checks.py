"""Check a call on its own rank, and draft its plan."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from moe_dispatch.backends.base import Constraints
from moe_dispatch.communication import to_device
from moe_dispatch.config import DispatcherConfig
from moe_dispatch.dispatched import Dispatched, check_plain
from moe_dispatch.dispatchers.channel import Channel
from moe_dispatch.dispatchers.requirements import check_max_rows
from moe_dispatch.errors import InputError, LayoutError, StateError, shown
from moe_dispatch.layouts import Layout
from moe_dispatch.seams.call import Call
from moe_dispatch.types import Plan, Routing

ROW_DTYPES = frozenset({torch.bfloat16, torch.float16, torch.float32, torch.float64})


def draft_plan(channel: Channel, layout: Layout, like: Tensor | None) -> Plan:
    """Make the part of a plan that needs no other rank: a plan without sizes.

    Raises:
        LayoutError: The layout is malformed or does not fit ``like``.
        InputError: There are too many rows; or the backend needs the number of rows, and the layout does not know it.
    """
    count = num_rows = layout.num_rows(None if like is None else like.shape)
    if num_rows is not None:
        layout.check(num_rows, values=channel.config.debug)
    real_rows, valid_T = None, None
    if cuts_rows(channel, layout):
        count = layout.num_real(num_rows)
        real_rows = None if num_rows is None else layout.real_rows(num_rows)
    elif like is not None and num_rows is not None and layout.on_host:
        # The mask is copied to the device here, because a captured graph cannot contain a copy from the host.
        valid_T = layout.valid_T(num_rows, like.device)
    maximum = channel.config.max_tokens_per_rank
    if count is None and channel.row_counts not in (None, "static"):
        raise InputError(
            f"Dispatcher.plan: backend {channel.backend_name!r} needs row counts, which {type(layout).__name__} does "
            "not know. Pass like=x."
        )
    if maximum is not None and (count or 0) > maximum:
        raise InputError(f"Dispatcher.plan: at most max_tokens_per_rank ({maximum}) rows per rank, got {count}.")
    # Ranks that agree on nothing later have no chance to refuse together, so each rank checks its own rows here.
    if channel.row_counts in (None, "assume"):
        rows = -(-(count or 0) // channel.config.num_chunks(count or 0))
        check_max_rows("Dispatcher.plan", channel.needs.padded(rows), channel.needs)
    if like is not None and real_rows is not None:
        real_rows = to_device(real_rows, like.device)
    return Plan(
        layout=layout,
        num_rows=num_rows,
        real_rows=real_rows,
        valid_T=valid_T,
        num_sent=count,
        settled=False,
        owner=channel.owner,
    )


def cuts_rows(channel: Channel, layout: Layout) -> bool:
    """Return whether rows that are no tokens are cut out.

    They are if the layout may have such rows, the host knows them, and shapes may vary between calls.
    """
    return not layout.all_real and layout.on_host and not channel.config.graph_safe


def rows_to_send(channel: Channel, plan: Plan, x_TD: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """Return the indices of the rows that are tokens, if the others are cut out; or else a mask (T,) of the tokens.

    Call it only if the layout may have rows that are no tokens.
    """
    layout, num_rows = plan.layout, x_TD.shape[0]
    if cuts_rows(channel, layout):
        real_rows = layout.real_rows(num_rows) if plan.num_rows is None else plan.real_rows
        return None if real_rows is None else to_device(real_rows, x_TD.device), None
    return None, layout.valid_T(num_rows, x_TD.device) if plan.valid_T is None else plan.valid_T


@final
@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Checked:
    """A dispatch that this rank has checked alone.

    Attributes:
        x_TD: All rows of the model.
        routing: The routing of these rows.
        plan: A plan, or the draft of one.
        real_rows: int64, the indices of the rows to send; None sends all rows.
        valid_T: bool, whether each row is a token. None if all rows are tokens, or if the other rows are cut out.
    """

    x_TD: Tensor
    routing: Routing
    plan: Plan
    real_rows: Tensor | None
    valid_T: Tensor | None


def check_call(channel: Channel, call: Call, layout_in: Callable[[Plan | Layout | None, Tensor], Layout]) -> Checked:
    """Check a dispatch on this rank, and draft its plan if it has none.

    Args:
        channel: Channel of the dispatcher.
        call: The dispatch.
        layout_in: Function that returns the layout of a dispatch from its plan and x.

    Raises:
        InputError: As ``check_routing``; or a value is wrong, with ``debug``; or carried data does not fit.
        LayoutError: The layout or the plan does not fit x.
        StateError: As ``check_routing``.
    """
    x, plan = call.x, call.plan
    if type(x) is not Tensor:
        check_plain("Dispatcher.dispatch", x=x)
    if call.columns is not None:
        call.columns.check()
    layout = plan.layout if isinstance(plan, Plan) else layout_in(plan, x)
    x_TD = layout.flatten(x)
    routing = check_routing(channel, x, x_TD, call.routing, plan)
    if channel.config.debug:
        layout.check(len(x_TD), values=True)
        check_values(routing, layout.valid_T(len(x_TD), x.device), channel.config.num_experts)
    known = plan if isinstance(plan, Plan) else draft_plan(channel, layout, x)
    real_rows, valid_T = (None, None) if layout.all_real else rows_to_send(channel, known, x_TD)
    for observer in channel.observers:  # last, so that an observer hears only of calls that this rank can make
        observer.asked(x, layout)
    return Checked(x_TD=x_TD, routing=routing, plan=known, real_rows=real_rows, valid_T=valid_T)


def check_routing(channel: Channel, x: Tensor, x_TD: Tensor, routing: Routing | None, plan: object) -> Routing:
    """Check the arguments of a dispatch, and return the routing.

    What can differ between two calls with tensors of the same kinds is compared in each call. The rest is checked once
    for each kind of tensors.

    Raises:
        InputError: A shape, dtype or device of x or of the routing does not fit.
        LayoutError: The plan is for another number of tokens, or does not fit x.
        StateError: The plan was made by a dispatcher of another config or group, or for another capacity; or the call
            is in a transform of torch.func.
    """
    if not isinstance(routing, Routing):
        raise no_routing(routing)
    if torch._C._are_functorch_transforms_active():
        raise no_transforms("dispatch")
    ids, weights = routing.topk_ids, routing.topk_weights
    if not (type(ids) is Tensor and type(weights) is Tensor):
        check_plain("Dispatcher.dispatch", topk_ids=ids, topk_weights=weights)
    num_rows = x_TD.shape[0]  # ``len`` of a tensor takes longer
    kinds = (
        *(x_TD.dtype, x_TD.device, x_TD.shape[1]),
        *(ids.dtype, ids.device, ids.shape[1:]),
        *(weights.dtype, weights.device, weights.shape[1:]),
    )
    if kinds not in channel.checked or not num_rows == ids.shape[0] == weights.shape[0]:
        check_tensors(x_TD, routing, channel.config, channel.needs)
        if channel.needs.differentiable:  # otherwise it matters whether a tensor requires grad
            channel.checked.add(kinds)
    if isinstance(plan, Plan):
        if plan.owner != channel.owner or plan.sizes.capacity != channel.capacity:
            raise foreign_plan(channel, plan)
        if plan.num_rows is None:  # the plan was made without a tensor, so the layout is checked now
            draft_plan(channel, plan.layout, x)
        elif plan.num_rows != num_rows:
            raise LayoutError(
                f"Dispatcher.dispatch: the plan is for {plan.num_rows} tokens, got x with {num_rows}. Make a plan per "
                "micro-batch. [MD06]"
            )
    return routing


def foreign_plan(channel: Channel, plan: Plan) -> StateError:
    """Return the error of a plan of another config or group, or from before ``release`` or ``grow``."""
    if plan.owner.partition("/")[0] == channel.name and plan.owner != channel.owner:
        return StateError("Dispatcher.dispatch: the plan was made before release(). Make the plan again.")
    if plan.owner != channel.owner:
        return StateError("Dispatcher.dispatch: the plan is of another config or group. Make it with this dispatcher.")
    return StateError("Dispatcher.dispatch: the capacity has grown since the plan was made. Make the plan again.")


def needs_chunks(plan: Plan, config: DispatcherConfig) -> InputError:
    """Return the error of one dispatch for which some rank has too many rows."""
    assert config.chunk_options is not None
    return InputError(
        f"Dispatcher.dispatch: a rank must pass at most chunks.tokens ({config.chunk_options.tokens}) rows, got more "
        f"on some rank: they take {plan.num_chunks} dispatches. Call the module or "
        "moe_dispatch.dispatchers.run_in_chunks."
    )


def no_routing(routing: object) -> InputError:
    """Return the error of a dispatch whose routing is no ``Routing``."""
    return InputError(f"Dispatcher.dispatch: pass Routing(topk_ids, topk_weights), not {type(routing).__name__}.")


def wrong_result(verb: str, sent: object) -> InputError | StateError:
    """Return the error of a verb whose ``sent`` is no result of this dispatcher."""
    if not isinstance(sent, Dispatched):
        return InputError(
            f"Dispatcher.{verb}: sent must be a Dispatched, got {type(sent).__name__}. Pass what dispatch returned. "
            "After async_op=True, wait()."
        )
    return StateError(f"Dispatcher.{verb}: sent must come from this dispatcher, not from another one.")


def no_layout(value: object) -> str:
    """Say what was passed in place of a layout, and what to do."""
    if isinstance(value, type) and issubclass(value, Layout):
        return f"got the class {value.__name__}. Make a layout of it: {value.__name__}(...)."
    told = f"got {type(value).__name__}."
    if isinstance(value, Tensor) and value.is_floating_point():
        return told + " Pass weights with their ids, as Routing(ids, weights), and x to plan as like=x."
    if isinstance(value, Tensor) and value.dtype == torch.bool:
        return told + " Pass a mask as Masked(mask)."
    if isinstance(value, Tensor | list | tuple):
        return told + " Pass lengths as BSHD(lengths), and offsets as THD(cu_seqlens)."
    if isinstance(value, str):
        return f"got {shown(value)}. Make a layout: THD(cu_seqlens), BSHD(), SBHD() or Rows()."
    return told


def no_transforms(verb: str) -> StateError:
    """Return the error of a call inside ``torch.func.grad``, ``vmap`` or ``jvp``."""
    return StateError(
        f"Dispatcher.{verb}: the transforms of torch.func are not supported, got a call inside one. Use "
        "torch.autograd.grad or backward(), or keep the MoE layer out of the transform."
    )


def check_tensors(x_TD: Tensor, routing: Routing, config: DispatcherConfig, needs: Constraints) -> None:
    """Check shapes, dtypes and devices of one call.

    Raises:
        InputError: A shape, dtype or device of x or of the routing does not fit.
    """
    ids, weights = routing.topk_ids, routing.topk_weights
    where = "Dispatcher.dispatch"
    if x_TD.shape[1] != config.hidden_size:
        raise InputError(f"{where}: x has hidden size {x_TD.shape[1]}, the config has {config.hidden_size}.")
    check_rows(where, "x", x_TD, config, needs, weights=weights)
    allowed = {config.device} if config.device is not None else needs.devices
    if allowed is not None and x_TD.device.type not in allowed:
        way_out = "change config.device"
        if config.device is None:
            way_out = f"use another backend: {config.backend_name!r} takes no other device as configured"
        raise InputError(
            f"{where}: x must be on {' or '.join(sorted(allowed))}, got {x_TD.device}. Move x, or {way_out}."
        )
    if ids.device != x_TD.device or weights.device != x_TD.device:
        raise InputError(
            f"{where}: x, topk_ids and topk_weights must share a device, got {x_TD.device}, {ids.device}, "
            f"{weights.device}."
        )
    if ids.is_floating_point() and not weights.is_floating_point():
        raise InputError(f"{where}: ids and weights of the Routing are swapped. torch.topk returns the weights first.")
    if ids.dtype != torch.int64:
        raise InputError(f"{where}: topk_ids must be torch.int64, got {ids.dtype}. Convert with topk_ids.long().")
    if not weights.is_floating_point():
        raise InputError(f"{where}: topk_weights must be a floating dtype, got {weights.dtype}. Pass float32 weights.")
    if ids.dim() > 2:
        raise InputError(
            f"{where}: topk_ids must be (T, top_k={config.top_k}), one row for each row of x, got {tuple(ids.shape)}. "
            "Flatten ids and weights in the order of x: layout.flatten(topk_ids)."
        )
    if ids.dim() != 2 or weights.shape != ids.shape or ids.shape[1] != config.top_k:
        raise InputError(
            f"{where}: topk_ids and topk_weights must be (T, top_k={config.top_k}), got {tuple(ids.shape)} and "
            f"{tuple(weights.shape)}. Give every row top_k slots, with id -1 for those to skip."
        )
    if x_TD.shape[0] != ids.shape[0]:
        raise InputError(
            f"{where}: x has {x_TD.shape[0]} tokens but routing has {ids.shape[0]}. Route every token of x, with id -1 "
            "for those to skip. [MD04]"
        )


def check_rows(
    where: str, what: str, rows: Tensor, config: DispatcherConfig, needs: Constraints, *, weights: Tensor | None = None
) -> None:
    """Refuse rows that the backend cannot carry, and rows that require grad if the backend has no backward.

    Args:
        where: Name of the call, for the error.
        what: Name of the tensor, for the error.
        rows: The rows to check. If the config has a ``wire``, any floating dtype is fine, because rows are
            converted.
        config: Config of the dispatcher.
        needs: Constraints of the backend.
        weights: Weights of the rows, which may require grad too.

    Raises:
        InputError: The backend does not carry the dtype; or a tensor requires grad, and the backend has no backward.
    """
    carried = ROW_DTYPES if needs.dtypes is None or config.wire is not None else needs.dtypes
    if rows.dtype not in carried:
        by_wire = rows.dtype in ROW_DTYPES and "bfloat16" in needs.wire.dtypes
        way_out = 'Set wire="bfloat16"' if by_wire else f"Convert {what}"
        names = ", ".join(sorted(map(str, carried)))
        raise InputError(f"{where}: {what} must be {names}, got {rows.dtype}. {way_out}, or use another backend.")
    wants_grad = torch.is_grad_enabled() and (rows.requires_grad or (weights is not None and weights.requires_grad))
    if wants_grad and not needs.differentiable:
        raise InputError(
            f"{where}: backend {config.backend_name!r} has no backward as configured, and tensors require grad. Call "
            "it under torch.no_grad(), or use another backend."
        )


def check_again(x_TD: Tensor, num_rows: int, device: torch.device, channel: Channel) -> None:
    """Check rows that are to take the route of an earlier dispatch.

    Raises:
        InputError: The rows differ in shape or device from the rows of that dispatch, or the backend cannot carry them.
    """
    expected = (num_rows, channel.config.hidden_size)
    if x_TD.shape != expected or x_TD.dtype not in ROW_DTYPES or x_TD.device != device:
        raise InputError(
            f"Dispatcher.dispatch: again=sent was made with floating {expected} on {device}, got "
            f"{x_TD.dtype} {tuple(x_TD.shape)} on {x_TD.device}. Pass a tensor of the same rows."
        )
    check_rows("Dispatcher.dispatch", "x", x_TD, channel.config, channel.needs)


def check_combine(rows: Tensor, dispatched: Tensor, channel: Channel) -> Tensor:
    """Compare expert outputs with the rows that were dispatched, and return them in the dtype of these.

    All ranks know that dtype, so the bytes of a row that comes back do not depend on what one rank's experts return.
    For example, a rank without rows may return ``torch.zeros(0, D)`` in float32 where its peers return bfloat16.

    Raises:
        InputError: The outputs do not fit the dispatched rows, or require grad although the backend has no backward.
        StateError: The call is in a transform of torch.func.
    """
    if torch._C._are_functorch_transforms_active():
        raise no_transforms("combine")
    if not isinstance(rows, Tensor):
        told = f"rows must be a Tensor, got {type(rows).__name__}"
        raise InputError(f"Dispatcher.combine: {told}. Pass combine(rows, sent) what the experts returned.")
    if type(rows) is not Tensor:
        check_plain("Dispatcher.combine", rows=rows)
    if rows.shape != dispatched.shape or rows.dtype not in ROW_DTYPES or rows.device != dispatched.device:
        raise InputError(
            f"Dispatcher.combine: rows must be floating {tuple(dispatched.shape)} on {dispatched.device}, like "
            f"sent.rows, got {rows.dtype} {tuple(rows.shape)} on {rows.device}. Return one output row per row."
        )
    rows = rows.to(dispatched.dtype)
    if not channel.needs.differentiable:
        check_rows("Dispatcher.combine", "rows", rows, channel.config, channel.needs)
    return rows


def check_values(routing: Routing, valid_T: Tensor | None, num_experts: int) -> None:
    """Check that ids are in range and weights are finite, in rows that are tokens. A host sync; for ``debug=True``.

    Raises:
        InputError: An id is outside -1..num_experts-1, or a weight is not finite.
    """
    # Detached: in a checkpointed forward, a check must not save tensors, because its recomputation does not repeat it.
    ids, weights = routing.topk_ids, routing.topk_weights.detach()
    if (problem := problem_of_ids(ids, num_experts, valid_T)) is not None:
        raise problem
    wrong_TK = ~torch.isfinite(weights) & (ids >= 0)
    if wrong := int((wrong_TK if valid_T is None else wrong_TK[valid_T]).sum()):
        raise InputError(
            f"Dispatcher.dispatch: topk_weights must be finite, got {wrong} that are not. Check the router."
        )


def problem_of_ids(ids: Tensor, num_experts: int, valid_T: Tensor | None = None) -> InputError | None:
    """Return an error with the lowest and highest id of the tokens if one is invalid, otherwise None. A host sync."""
    ids = ids if valid_T is None else ids[valid_T]
    low, high = (int(ids.min()), int(ids.max())) if ids.numel() else (0, 0)
    if -1 <= low <= high < num_experts:
        return None
    return InputError(
        f"Dispatcher.dispatch: topk_ids must lie in -1..{num_experts - 1}, got {low}..{high}. Check the router."
    )
