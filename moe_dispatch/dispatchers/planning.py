"""How ranks come to the sizes of one micro-batch forward."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import final

import torch
from torch import Tensor

from moe_dispatch.backends.base import Sizes
from moe_dispatch.communication import device_of
from moe_dispatch.dispatchers.channel import Channel
from moe_dispatch.dispatchers.requirements import check_max_rows
from moe_dispatch.errors import InputError, LayoutError, PeerError, StateError, reason_code, refusal
from moe_dispatch.layouts import Layout
from moe_dispatch.types import Plan


@final
@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Draft:
    """What a rank knows by itself: its layout, T, the rows it keeps, and how many it brings to the backend."""

    layout: Layout
    num_rows: int | None
    real_rows: Tensor | None
    valid_T: Tensor | None
    count: int | None


def draft_plan(channel: Channel, layout: Layout, like: Tensor | None) -> Draft:
    """Everything about a plan that needs no other rank.

    Raises:
        LayoutError: the layout is malformed or does not fit ``like``.
        InputError: too many rows, or a layout that does not know how many where the backend needs it.
    """
    count = num_rows = layout.num_rows(None if like is None else like.shape)
    if num_rows is not None:
        layout.check(num_rows, values=channel.config.debug)
    real_rows, valid_T = None, None
    if cuts_rows(channel, layout):
        count = layout.num_real(num_rows)
        real_rows = None if num_rows is None else layout.real_rows(num_rows)
    elif like is not None and num_rows is not None and layout.on_host:
        # Here, because a copy from the host has no place in a captured graph.
        valid_T = layout.valid_T(num_rows, like.device)
    _check_count(channel, layout, count)
    if like is not None and real_rows is not None:
        real_rows = real_rows.to(like.device, non_blocking=True)
    return Draft(layout=layout, num_rows=num_rows, real_rows=real_rows, valid_T=valid_T, count=count)


def cuts_rows(channel: Channel, layout: Layout) -> bool:
    """Whether rows that are no tokens are cut out: if there may be some, the host knows which, and shapes may vary."""
    return not layout.all_real and layout.on_host and not channel.config.graph_safe


def settle_plan(channel: Channel, draft: Draft) -> Plan:
    """Agree on sizes; collective where ``agrees_on_rows``.

    Raises:
        InputError: too many rows on some rank, or unequal rows under "check"; on every rank alike.
        PeerError: another rank refused.
    """
    sizes = _agreed_sizes(channel, draft.count)
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
    brought = channel.needs.padded(most) if sizes.padded_rows is None else sizes.padded_rows
    return partial(channel.backend.footprint, sizes, brought)


def check_plan(channel: Channel, plan: Plan, like: Tensor, num_rows: int) -> None:
    """Refuse a plan that is not for this call.

    Raises:
        StateError: it was made by a dispatcher of another config or group.
        LayoutError: it is for another number of tokens, or does not fit ``like``.
    """
    check_owner(channel, plan)
    if plan.num_rows not in (None, num_rows):
        raise LayoutError(
            f"Dispatcher.dispatch: the plan is for {plan.num_rows} tokens, got x with {num_rows}. "
            "Make a plan per micro-batch."
        )
    if plan.num_rows is None:  # what the plan could not check without a tensor
        draft_plan(channel, plan.layout, like)


def check_owner(channel: Channel, plan: Plan) -> None:
    """Refuse a plan of a dispatcher of another config or group, or of before it has grown, with a StateError."""
    if plan.owner != channel.name:
        raise StateError(
            "Dispatcher.dispatch: the plan must be made by a dispatcher of the same config and group, got one of "
            f"{plan.owner} on {channel.name}. Make it with this dispatcher's plan()."
        )
    if plan.sizes.capacity != channel.capacity:
        raise StateError(
            f"Dispatcher.dispatch: the plan must be made for the capacity in force, got one for {plan.sizes.capacity} "
            f"on {channel.capacity}: it has grown since. Make the plan again."
        )


def agrees_on_rows(channel: Channel) -> bool:
    """Whether sizes are settled by a collective."""
    return _needs_agreement(channel) and channel.row_counts in ("agree", "check")


def refuse_agreement(channel: Channel, error: BaseException) -> None:
    """Join the agreement its peers are about to enter, with a mark."""
    _exchange(channel, 0, reason_code(error))


def refuse_dispatch(find: Callable[[], Channel], error: Exception, device: torch.device, *, settled: bool) -> None:
    """Join the first exchange the peers of a dispatch are about to enter, with a mark, so that they raise too.

    Args:
        find: gives the channel, or raises where it is closed.
        error: what this rank raises next; gets a note where the peers could not be told.
        device: of x.
        settled: sizes were settled before the call, by a plan.
    """
    try:
        channel = find()
        if not settled and agrees_on_rows(channel):
            refuse_agreement(channel, error)
        elif channel.config.debug:
            exchange_mark(channel, reason_code(error))
        elif channel.needs.exchanges_counts:
            preferred = torch.device(channel.config.device or device)
            channel.backend.refuse(reason_code(error), device_of(channel.communicator.group, preferred))
    except Exception as failure:  # a closed dispatcher, a broken group: the error itself matters more
        error.add_note(f"The other ranks were not told: {failure}")


def exchange_mark(channel: Channel, code: int = 0) -> None:
    """Tell and hear refusals (``debug=True``).

    Raises:
        PeerError: another rank refused.
    """
    control = channel.control
    (worst,) = control.max([code * control.size + control.rank if code else -1], label="debug")
    if worst >= 0 and not code:
        raise PeerError(refusal({worst % control.size: worst // control.size}))


def _check_count(channel: Channel, layout: Layout, count: int | None) -> None:
    """The rules on this rank's rows that it can check alone."""
    needs, maximum = channel.needs, channel.config.max_tokens_per_rank
    if count is None and _needs_agreement(channel) and channel.row_counts != "static":
        raise InputError(
            f"Dispatcher.plan: backend {channel.backend_name!r} needs row counts, and {type(layout).__name__} does not "
            "know its own. Pass like=x, any tensor shaped like the hidden states."
        )
    if maximum is not None and (count or 0) > maximum:
        raise InputError(
            f"Dispatcher.plan: at most max_tokens_per_rank ({maximum}) rows per rank, got {count}. "
            "Raise max_tokens_per_rank."
        )
    if not _needs_agreement(channel) or channel.row_counts == "assume":  # later nobody could tell the peers
        check_max_rows("Dispatcher.plan", needs.padded(count or 0), needs)


def _needs_agreement(channel: Channel) -> bool:
    return channel.needs.equal_rows or channel.needs.group_max


def _agreed_sizes(channel: Channel, count: int | None) -> Sizes:
    needs, policy = channel.needs, channel.row_counts
    if not _needs_agreement(channel):
        return Sizes(capacity=channel.capacity)
    if policy == "static":
        assert channel.config.max_tokens_per_rank is not None  # a rule of the config
        largest = channel.config.max_tokens_per_rank
    elif policy == "assume":
        largest = count or 0
    else:
        largest = _exchange(channel, count or 0, 0)
    check_max_rows("Dispatcher.plan", needs.padded(largest), needs)
    return channel.sizes(largest)


def _exchange(channel: Channel, count: int, code: int) -> int:
    """One all-reduce: the largest and the smallest count with their ranks, and whether a rank refused."""
    control = channel.control
    size, rank = control.size, control.rank
    mark = code * size + rank if code else -1
    low_count = -count * size + rank
    high, low, worst = control.max([count * size + rank, low_count, mark], label="sizes")
    if worst >= 0 and not code:
        raise PeerError(refusal({worst % size: worst // size}))
    largest, smallest = high // size, -(low // size)
    if channel.row_counts == "check" and largest != smallest and not code:
        raise InputError(
            'Dispatcher.plan: row_counts="check" wants equal rows on all ranks, got '
            f"{largest} on rank {high % size} and {smallest} on rank {low % size}. "
            'Pad them alike, or use row_counts="agree".'
        )
    return largest
