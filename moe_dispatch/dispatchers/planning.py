"""A call on its own rank: check it, draft its plan, and prepare what the rank sends."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import final

import torch
from torch import Tensor

from moe_dispatch.backends.base import Constraints, Sizes
from moe_dispatch.backends.local import count_experts
from moe_dispatch.balance.slot_table import SlotTable, slots_of
from moe_dispatch.communication import to_device
from moe_dispatch.config import DispatcherConfig
from moe_dispatch.dispatchers.channel import Channel
from moe_dispatch.dispatchers.requirements import check_max_rows
from moe_dispatch.errors import InputError, LayoutError, StateError
from moe_dispatch.layouts import Layout
from moe_dispatch.types import Plan, Routing

ROW_DTYPES = frozenset({torch.bfloat16, torch.float16, torch.float32, torch.float64})


@final
@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Draft:
    """The part of a plan that a rank knows without the other ranks.

    Attributes:
        layout: How the model's tensor holds tokens.
        num_rows: T, or None if not known yet.
        real_rows: int64, the indices of the rows to send, if the other rows are cut out; otherwise None.
        valid_T: bool (T,), whether each row is a token, if the host knows it and no rows are cut out; otherwise None.
        count: Number of rows that this rank sends, before padding; None if not known yet.
    """

    layout: Layout
    num_rows: int | None
    real_rows: Tensor | None
    valid_T: Tensor | None
    count: int | None

    def plan(
        self, channel: Channel, sizes: Sizes, footprint: Callable[[torch.dtype], dict[str, int]] | None = None
    ) -> Plan:
        """Return the plan with these sizes, which the ranks have settled."""
        return Plan(
            layout=self.layout,
            num_rows=self.num_rows,
            real_rows=self.real_rows,
            valid_T=self.valid_T,
            sizes=sizes,
            owner=channel.name,
            footprint=footprint,
        )


def draft_plan(channel: Channel, layout: Layout, like: Tensor | None) -> Draft:
    """Make the part of a plan that needs no other rank.

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
    _check_count(channel, layout, count)
    if like is not None and real_rows is not None:
        real_rows = to_device(real_rows, like.device)
    return Draft(layout=layout, num_rows=num_rows, real_rows=real_rows, valid_T=valid_T, count=count)


def cuts_rows(channel: Channel, layout: Layout) -> bool:
    """Return whether rows that are no tokens are cut out.

    They are if the layout may have such rows, the host knows them, and shapes may vary between calls.
    """
    return not layout.all_real and layout.on_host and not channel.config.graph_safe


def check_plan(channel: Channel, plan: Plan, like: Tensor, num_rows: int) -> None:
    """Refuse a plan that is not for this call.

    Raises:
        StateError: The plan was made by a dispatcher of another config or group, or for another capacity.
        LayoutError: The plan is for another number of tokens, or does not fit ``like``.
    """
    check_owner(channel, plan)
    if plan.num_rows not in (None, num_rows):
        raise LayoutError(
            f"Dispatcher.dispatch: the plan is for {plan.num_rows} tokens, got x with {num_rows}. "
            "Make a plan per micro-batch. [MD06]"
        )
    if plan.num_rows is None:  # the plan was made without a tensor, so the layout is checked now
        draft_plan(channel, plan.layout, like)


def check_owner(channel: Channel, plan: Plan) -> None:
    """Refuse a plan of another channel or of another capacity.

    Raises:
        StateError: The plan was made by a dispatcher of another config or group, or before the capacity has grown.
    """
    if plan.owner != channel.name:
        raise StateError(
            "Dispatcher.dispatch: the plan must be made by a dispatcher of the same config and group, got one of "
            f"{plan.owner} on {channel.name}. Make it with this dispatcher's plan()."
        )
    if plan.sizes.capacity != channel.capacity:
        raise StateError(
            f"Dispatcher.dispatch: the plan must be made for the capacity in force, got one for {plan.sizes.capacity} "
            f"on {channel.capacity}: the capacity has grown since. Make the plan again."
        )


def _check_count(channel: Channel, layout: Layout, count: int | None) -> None:
    """Check this rank's number of rows, as far as no other rank is needed."""
    needs, maximum = channel.needs, channel.config.max_tokens_per_rank
    if count is None and channel.row_counts not in (None, "static"):
        raise InputError(
            f"Dispatcher.plan: backend {channel.backend_name!r} needs row counts, and {type(layout).__name__} does not "
            "know its own. Pass like=x, any tensor shaped like the hidden states."
        )
    if maximum is not None and (count or 0) > maximum:
        raise InputError(
            f"Dispatcher.plan: at most max_tokens_per_rank ({maximum}) rows per rank, got {count}. "
            "Raise max_tokens_per_rank."
        )
    # Ranks that agree on nothing later have no chance to refuse together, so each rank checks its own rows here.
    if channel.row_counts in (None, "assume"):
        check_max_rows("Dispatcher.plan", needs.padded(count or 0), needs)


def no_routing(routing: object) -> InputError:
    """Return the error of a dispatch whose routing is no ``Routing``."""
    return InputError(
        f"Dispatcher.dispatch: routing must be a Routing, got {type(routing).__name__}. "
        "Pass Routing(topk_ids, topk_weights), or again=sent."
    )


def check_tensors(x_TD: Tensor, routing: object, config: DispatcherConfig, needs: Constraints) -> Routing:
    """Check shapes, dtypes and devices of one call, and return the routing.

    Raises:
        InputError: The routing is no ``Routing``; or a shape, dtype or device of x or of the routing does not fit.
    """
    if not isinstance(routing, Routing):
        raise no_routing(routing)
    ids, weights = routing.topk_ids, routing.topk_weights
    where = "Dispatcher.dispatch"
    if x_TD.shape[1] != config.hidden_size:
        raise InputError(
            f"{where}: x has hidden size {x_TD.shape[1]}, hidden_size is {config.hidden_size}. Build the dispatcher "
            f"for it."
        )
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
            f"{weights.device}. "
            "Move the routing."
        )
    if ids.is_floating_point() and not weights.is_floating_point():
        raise InputError(
            f"{where}: topk_ids must be torch.int64 and topk_weights floating, got {ids.dtype} and {weights.dtype}. "
            "Were the arguments swapped? torch.topk returns weights first; pass Routing(topk_ids, topk_weights)."
        )
    if ids.dtype != torch.int64:
        raise InputError(f"{where}: topk_ids must be torch.int64, got {ids.dtype}. Convert with topk_ids.long().")
    if not weights.is_floating_point():
        raise InputError(f"{where}: topk_weights must be a floating dtype, got {weights.dtype}. Pass float32 weights.")
    if ids.dim() != 2 or weights.shape != ids.shape or ids.shape[1] != config.top_k:
        raise InputError(
            f"{where}: topk_ids and topk_weights must be (T, top_k={config.top_k}), got {tuple(ids.shape)} and "
            f"{tuple(weights.shape)}. Give every row top_k slots, with id -1 for those to skip."
        )
    if x_TD.shape[0] != ids.shape[0]:
        raise InputError(
            f"{where}: x has {x_TD.shape[0]} tokens but routing has {ids.shape[0]}. "
            "Route every token of x, with id -1 for those to skip. [MD04]"
        )
    return routing


def check_rows(
    where: str, what: str, rows: Tensor, config: DispatcherConfig, needs: Constraints, *, weights: Tensor | None = None
) -> None:
    """Refuse rows that the backend cannot carry, and rows that require grad if the backend has no backward.

    Args:
        where: Name of the call, for the error.
        what: Name of the tensor, for the error.
        rows: The rows to check. If the config has a ``wire_dtype``, any floating dtype is fine, because rows are
            converted.
        config: Config of the dispatcher.
        needs: Constraints of the backend.
        weights: Weights of the rows, which may require grad too.

    Raises:
        InputError: The backend does not carry the dtype; or a tensor requires grad, and the backend has no backward.
    """
    carried = ROW_DTYPES if needs.dtypes is None or config.wire_dtype is not None else needs.dtypes
    if rows.dtype not in carried:
        by_wire = rows.dtype in ROW_DTYPES and "bfloat16" in needs.wire_dtypes
        way_out = 'Set wire_dtype="bfloat16"' if by_wire else f"Convert {what}"
        raise InputError(
            f"{where}: {what} must be {', '.join(sorted(map(str, carried)))}, got {rows.dtype}. "
            f"{way_out}, or use another backend."
        )
    if needs.differentiable or not torch.is_grad_enabled():
        return
    if rows.requires_grad or (weights is not None and weights.requires_grad):
        raise InputError(
            f"{where}: backend {config.backend_name!r} has no backward as configured, got tensors that require grad. "
            "Call it under torch.no_grad(), or use another backend."
        )


def check_again(x_TD: Tensor, num_rows: int, device: torch.device, config: DispatcherConfig) -> None:
    """Check rows that are to take the route of an earlier dispatch.

    Raises:
        InputError: The rows differ in shape or device from the rows of that dispatch, or are not floating.
    """
    expected = (num_rows, config.hidden_size)
    if x_TD.shape != expected or x_TD.dtype not in ROW_DTYPES or x_TD.device != device:
        raise InputError(
            f"Dispatcher.dispatch: again=sent was made with floating {expected} on {device}, got "
            f"{x_TD.dtype} {tuple(x_TD.shape)} on {x_TD.device}. Pass a tensor of the same rows."
        )


def check_combine(rows: Tensor, dispatched: Tensor, config: DispatcherConfig, needs: Constraints) -> None:
    """Compare expert outputs with the rows that were dispatched: shape, dtype, device and gradients.

    Raises:
        InputError: The outputs do not fit the dispatched rows, or the backend cannot carry them.
    """
    if rows.shape != dispatched.shape or rows.dtype not in ROW_DTYPES or rows.device != dispatched.device:
        raise InputError(
            f"Dispatcher.combine: rows must be floating {tuple(dispatched.shape)} on {dispatched.device}, like "
            f"sent.rows, got {rows.dtype} {tuple(rows.shape)} on {rows.device}. Return one output row per row."
        )
    check_rows("Dispatcher.combine", "rows", rows, config, needs)


def check_values(routing: Routing, valid_T: Tensor | None, num_experts: int) -> None:
    """Check that ids are in range and weights are finite, in rows that are tokens. A host sync; for ``debug=True``.

    Raises:
        InputError: An id is outside -1..num_experts-1, or a weight is not finite.
    """
    ids, weights = routing.topk_ids, routing.topk_weights
    if valid_T is not None:
        ids, weights = ids[valid_T], weights[valid_T]
    if (problem := problem_of_ids(ids, num_experts)) is not None:
        raise problem
    wrong = int((~torch.isfinite(weights) & (ids >= 0)).sum())
    if wrong:
        raise InputError(
            f"Dispatcher.dispatch: topk_weights must be finite, got {wrong} that are not. Check the router's logits."
        )


@final
@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Outgoing:
    """What a rank sends in a dispatch, without padding. ``prepare`` makes it.

    Attributes:
        x_TD: All rows of the model, of which ``real_rows`` are sent.
        weights_TK: Weights of all rows, in the accumulation dtype.
        given_TK: int64, the ids of the router, only of the rows to send; -1 in rows that are no tokens.
        ids_TK: int64, ``given_TK`` with -1 for each invalid id; ids of expert slots if there is a ``table``.
        mark_or_invalid: int64 (). In an eager call whose ranks exchange counts it is the mark of this rank, or -1 if
            an id is invalid. Otherwise it is the number of invalid ids.
        real_rows: int64, the indices of the rows to send; None sends all rows.
        valid_T: bool, whether each row is a token. None if all rows are tokens, or if the other rows are cut out.
        table: Table that turned ids of experts into ids of expert slots; None if they are equal.
    """

    x_TD: Tensor
    weights_TK: Tensor
    given_TK: Tensor
    ids_TK: Tensor
    mark_or_invalid: Tensor
    real_rows: Tensor | None
    valid_T: Tensor | None
    table: SlotTable | None = None

    def placed(self, table: SlotTable) -> Outgoing:
        """Return the same with ids of expert slots."""
        return replace(self, ids_TK=slots_of(self.ids_TK, table.copies_EC.to(self.ids_TK.device)), table=table)

    def problem(self, num_experts: int) -> InputError | None:
        """Return the result of ``problem_of_ids``. A host sync."""
        return problem_of_ids(self.given_TK, num_experts)

    def tally(self, num_experts: int) -> list[Tensor]:
        """Return the number of invalid ids, int64 (1,), and the number of slots of each expert, int64 (E,)."""
        return [self.mark_or_invalid.view(1), count_experts(self.ids_TK, num_experts)]


def prepare(
    channel: Channel,
    x_TD: Tensor,
    ids_TK: Tensor,
    weights_TK: Tensor,
    *,
    real_rows: Tensor | None,
    valid_T: Tensor | None,
    table: SlotTable | None,
    mark: int,
) -> Outgoing:
    """Mask ids, select those of the rows that are sent, and replace invalid ids. No host sync.

    Args:
        channel: Channel of the dispatcher.
        x_TD: As in ``Outgoing``.
        ids_TK: int64, the ids of the router for all rows. No row names an expert twice.
        weights_TK: As in ``Outgoing``.
        real_rows: As in ``Outgoing``.
        valid_T: As in ``Outgoing``.
        table: As in ``Outgoing``.
        mark: Mark of this rank, which travels with counts if the ranks exchange counts.
    """
    if valid_T is not None:
        ids_TK = torch.where(valid_T.unsqueeze(1), ids_TK, -1)
    if real_rows is not None:
        ids_TK = ids_TK.index_select(0, real_rows)
    tables = channel.context.permutation_of(ids_TK).tables
    asks = not channel.config.graph_safe
    marked = mark if channel.needs.exchanges_counts and asks else None
    valid_TK, mark_or_invalid = tables.valid_ids(ids_TK, channel.config.num_experts, marked, asks=asks)
    found = Outgoing(
        x_TD=x_TD,
        weights_TK=weights_TK,
        given_TK=ids_TK,
        ids_TK=valid_TK,
        mark_or_invalid=mark_or_invalid,
        real_rows=real_rows,
        valid_T=valid_T,
    )
    return found if table is None else found.placed(table)


def problem_of_ids(ids: Tensor, num_experts: int) -> InputError | None:
    """Return an error with the lowest and the highest id if some id is invalid, otherwise None. A host sync."""
    low, high = (int(ids.min()), int(ids.max())) if ids.numel() else (0, 0)
    if -1 <= low <= high < num_experts:
        return None
    return InputError(
        f"Dispatcher.dispatch: topk_ids must lie in -1..{num_experts - 1}, got {low}..{high}. Check the router."
    )
