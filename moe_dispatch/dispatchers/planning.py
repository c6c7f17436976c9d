"""Check a call on each rank, and settle the sizes of a micro-batch between ranks before rows move."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import NoReturn, final

import torch
from torch import Tensor

from moe_dispatch.backends.base import Constraints, Sizes
from moe_dispatch.communication import control_device, device_of, digest, raise_alike, to_device
from moe_dispatch.config import DispatcherConfig
from moe_dispatch.dispatchers.channel import Channel
from moe_dispatch.dispatchers.ids import SentIds, problem_of_ids
from moe_dispatch.dispatchers.requirements import check_max_rows
from moe_dispatch.errors import InputError, LayoutError, StateError
from moe_dispatch.layouts import Layout
from moe_dispatch.types import Plan, Routing

REFUSED = -1
"""Number of rows that a rank tells its peers instead of its own, if it refuses a call."""

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


def _settle_plan(channel: Channel, draft: Draft, facts: Facts | None, ids: SentIds | None) -> Plan:
    """Agree on sizes. Collective if ``agrees_on_rows``.

    Raises:
        InputError: Some rank has too many rows, the facts of the ranks differ, or the numbers of rows differ under
            ``row_counts="check"``; raised on every rank. Or an id of this rank is invalid.
        PeerError: Another rank refused its call, or has an invalid id.
    """
    sizes = _agreed_sizes(channel, draft.count, facts, ids)
    channel.backend.reserve(sizes)
    return Plan(
        layout=draft.layout,
        num_rows=draft.num_rows,
        real_rows=draft.real_rows,
        valid_T=draft.valid_T,
        sizes=sizes,
        owner=channel.name,
        footprint=None if sizes.capacity is None else _footprint(channel, draft, sizes),
    )


def _footprint(channel: Channel, draft: Draft, sizes: Sizes) -> Callable[[torch.dtype], dict[str, int]]:
    most = channel.config.max_tokens_per_rank if draft.count is None else draft.count
    assert most is not None  # graph_safe asks for it
    return partial(channel.options.footprint, channel.shape, sizes, channel.needs.brought(most, sizes))


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


def agrees_on_rows(channel: Channel) -> bool:
    """Return whether the ranks settle sizes with a collective."""
    return _needs_agreement(channel) and channel.config.row_counts_policy in ("agree", "check")


Facts = Mapping[str, str]


@cache
def facts_of_rows(dtype: torch.dtype | None, *, recorded: bool) -> Facts:
    """Return the facts about rows that must be equal on all ranks of a dispatch, by name.

    Args:
        dtype: Dtype of x.
        recorded: Whether gradients are recorded. A rank that does not record them takes part in no backward.
    """
    return {"the dtype of x": str(dtype).removeprefix("torch."), "grad mode": "enabled" if recorded else "disabled"}


@cache
def number_of_rows(dtype: torch.dtype, *, recorded: bool) -> int:
    """Return ``facts_of_rows`` as a number of 22 bits, which fits into the exchange of counts."""
    return digest(facts_of_rows(dtype, recorded=recorded)) % 2**22


def mark_of(channel: Channel, dtype: torch.dtype, *, recorded: bool) -> int | None:
    """Return the mark that ``valid_ids`` takes in a dispatch of these rows; None if it must count the invalid ids."""
    if channel.config.graph_safe or not channel.needs.exchanges_counts:
        return None
    return number_of_rows(dtype, recorded=recorded)


def settle(
    find: Callable[[], Channel],
    check: Callable[[Channel], Draft | None],
    *,
    settled: bool = False,
    x: Tensor | None = None,
    recorded: bool = False,
    ids: Callable[[], SentIds] | None = None,
) -> Plan | None:
    """Run this rank's checks of a call, tell the peers if one fails, and agree on sizes.

    Args:
        find: Function that returns the channel, or raises if it is closed.
        check: Function that checks the call on this rank, and returns a draft of the plan.
        settled: Whether a plan has settled the sizes before. If so, the ranks do not agree on sizes here.
        x: Hidden states of a dispatch, in which peers may wait for this rank's counts; None in a call of ``plan``.
        recorded: Whether the call records gradients.
        ids: Function that returns the ids of a dispatch, called after ``check``; None in a call of ``plan``.

    Returns:
        The plan; None if ``settled``. If the ranks have summed their counts of slots, its sizes hold the sums, and the
        plan is for this dispatch only.

    Raises:
        Exception: ``find`` or ``check`` raised it on this rank.
        InputError: The ranks make different calls, and they agree on sizes or have ``debug``. Raised on every rank.
        PeerError: The check failed on another rank, and the ranks exchange something before rows travel.
    """
    try:
        channel = find()
        draft = check(channel)
    except Exception as error:
        _tell_peers(find, error, settled=settled, x=x)
        raise
    debug, agrees, facts = channel.config.debug, agrees_on_rows(channel), None
    if debug or (agrees and not settled):
        facts = _facts_of_call(x, agrees=agrees, settled=settled, recorded=recorded)
    if debug and (settled or not agrees):  # first, because settling may make buffers, which is collective
        _agree_on_largest(channel, 0, facts=facts, label="debug")
    return None if settled or draft is None else _settle_plan(channel, draft, facts, None if ids is None else ids())


def _facts_of_call(x: Tensor | None, *, agrees: bool, settled: bool, recorded: bool) -> Facts:
    """Return the facts that must be equal on all ranks of a call.

    If the ranks agree on sizes, either all of them must have a plan or none.
    """
    if x is None:
        return {"the call": "plan"}
    how = "" if not agrees else " with a plan" if settled else " without a plan"
    return {"the call": "dispatch" + how, **facts_of_rows(x.dtype, recorded=recorded)}


def _tell_peers(find: Callable[[], Channel], error: Exception, *, settled: bool, x: Tensor | None) -> None:
    """Enter the first exchange of this call with a mark that this rank refuses, so that the peers raise too.

    If there is no such exchange, or the exchange fails, the error gets a note that the peers do not know of it.
    """
    try:
        channel = find()
        if channel.config.debug or (not settled and agrees_on_rows(channel)):
            _agree_on_largest(channel, 0, error)
        elif x is not None and channel.config.balance is not None:
            channel.control.gather_integers([REFUSED, *[0] * channel.config.num_experts], label="balance")
            raise_alike(channel.control, error, label="refusal")
        elif x is not None and channel.needs.exchanges_counts:
            preferred = torch.device(channel.config.device or (x.device if isinstance(x, Tensor) else "cpu"))
            channel.backend.refuse(device_of(channel.communicator.group, preferred))
            raise_alike(channel.control, error, label="refusal")
        elif channel.control.size > 1:
            error.add_note(
                "The other ranks were not told: nothing is exchanged before rows travel. debug=True tells them."
            )
    except Exception as failure:  # a closed dispatcher, a broken group: the error itself matters more
        if failure is not error:
            error.add_note(f"The other ranks were not told: {failure}")


def _check_count(channel: Channel, layout: Layout, count: int | None) -> None:
    """Check this rank's number of rows, as far as no other rank is needed."""
    needs, maximum = channel.needs, channel.config.max_tokens_per_rank
    if count is None and _needs_agreement(channel) and channel.config.row_counts_policy != "static":
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
    if not _needs_agreement(channel) or channel.config.row_counts_policy == "assume":
        check_max_rows("Dispatcher.plan", needs.padded(count or 0), needs)


def _needs_agreement(channel: Channel) -> bool:
    return channel.needs.equal_rows or channel.needs.group_max


def _agreed_sizes(channel: Channel, count: int | None, facts: Facts | None, ids: SentIds | None) -> Sizes:
    needs, policy, sums = channel.needs, channel.config.row_counts_policy, list[int]()
    if not _needs_agreement(channel):
        return Sizes(capacity=channel.capacity)
    if policy == "static":
        assert channel.config.max_tokens_per_rank is not None  # a rule of the config
        largest = channel.config.max_tokens_per_rank
    elif policy == "assume":
        largest = count or 0
    else:
        largest, sums = _agree_on_largest(channel, count or 0, facts=facts, ids=ids)
    check_max_rows("Dispatcher.plan", needs.padded(largest), needs)
    if ids is None or not sums:
        return channel.sizes(largest)
    invalid, *tokens_per_expert = sums
    if invalid:
        raise_alike(channel.control, problem_of_ids(ids.given_TK, channel.config.num_experts), label="refusal")
    return replace(channel.sizes(largest), tokens_per_expert=tuple(tokens_per_expert))


def _agree_on_largest(
    channel: Channel,
    count: int,
    problem: Exception | None = None,
    *,
    facts: Facts | None = None,
    ids: SentIds | None = None,
    label: str = "sizes",
) -> tuple[int, list[int]]:
    """Return the largest row count of any rank, if all ranks make the same call, and the sums of ``SentIds.tally``.

    Each count travels with its rank, so that an error can name both. This exchange has the same form in all calls: with
    ``debug``, a rank that has a plan and a rank that has none meet here. So if the channel sums tallies, a call without
    ids adds zeros. If it does not, there are no sums.
    """
    size, rank, num_experts = channel.control.size, channel.control.rank, channel.shape.num_experts
    values = (count * size + rank, -count * size + rank)
    tally: list[Tensor] = []
    if channel.sums_tallies:
        assert channel.control.group is not None
        zeros = partial(torch.zeros, 1 + num_experts, dtype=torch.int64, device=control_device(channel.control.group))
        tally = [zeros()] if ids is None else ids.tally(num_experts)
    high, low, *sums = raise_alike(
        channel.control, problem, values=values, sums=tally, facts=facts, of_call=True, label=label
    )
    largest, smallest = high // size, -(low // size)
    if channel.config.row_counts == "check" and largest != smallest:
        raise InputError(
            'Dispatcher.plan: row_counts="check" needs equal rows on all ranks, got '
            f"{largest} on rank {high % size} and {smallest} on rank {low % size}. "
            'Pad them alike, or use row_counts="agree".'
        )
    return largest, sums


def refuse_routing(routing: object) -> NoReturn:
    """Raise the InputError for a routing that is no ``Routing``."""
    raise InputError(
        f"Dispatcher.dispatch: routing must be a Routing, got {type(routing).__name__}. "
        "Pass Routing(topk_ids, topk_weights), or again=sent."
    )


def check_tensors(x_TD: Tensor, routing: Routing | None, config: DispatcherConfig, needs: Constraints) -> None:
    """Check shapes, dtypes and devices of one call.

    Raises:
        InputError: The shape, dtype or device of x or of the routing does not fit.
    """
    if not isinstance(routing, Routing):
        refuse_routing(routing)
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
