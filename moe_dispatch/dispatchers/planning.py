"""How ranks come to the sizes of one micro-batch forward."""

from __future__ import annotations

from torch import Tensor

from moe_dispatch.backends.permutation import round_up
from moe_dispatch.dispatchers.channel import Channel
from moe_dispatch.dispatchers.requirements import check_max_rows
from moe_dispatch.errors import InputError, PeerError, reason_code, refusal
from moe_dispatch.layouts import Layout
from moe_dispatch.types import Plan


def make_plan(channel: Channel, layout: Layout, like: Tensor | None) -> Plan:
    """Settle sizes; collective where ``agrees_on_rows``, and then a refusal here is told to the peers.

    Raises:
        LayoutError: the layout is malformed or does not fit ``like``.
        InputError: too many rows, unequal rows under "check", or a layout that does not know its rows.
        PeerError: another rank refused.
    """
    try:
        num_rows = layout.num_rows(None if like is None else like.shape)
        if num_rows is not None:
            layout.check(num_rows, values=channel.config.debug)
        real_rows = _rows_to_keep(layout, num_rows)
        count = _count(channel, layout, num_rows)
    except Exception as error:
        refuse_agreement(channel, error)
        raise
    if like is not None and real_rows is not None:
        real_rows = real_rows.to(like.device, non_blocking=True)
    padded, largest = _padded_rows(channel, count)
    return Plan(
        layout=layout,
        num_rows=num_rows,
        real_rows=real_rows,
        padded_rows=padded,
        group_max_rows=largest,
        row_counts=channel.row_counts,
        owner=channel.name,
    )


def agrees_on_rows(channel: Channel) -> bool:
    """Whether making a plan is collective."""
    return channel.needs.equal_rows and channel.row_counts in ("agree", "check")


def refuse_agreement(channel: Channel, error: BaseException) -> None:
    """Join the agreement its peers are about to enter, with a mark."""
    if agrees_on_rows(channel):
        _exchange(channel, 0, reason_code(error))


def exchange_mark(channel: Channel, code: int = 0) -> None:
    """Tell and hear refusals (``debug=True``).

    Raises:
        PeerError: another rank refused.
    """
    control = channel.control
    (worst,) = control.max([code * control.size + control.rank if code else -1], label="debug")
    if worst >= 0 and not code:
        raise PeerError(refusal({worst % control.size: worst // control.size}))


def _rows_to_keep(layout: Layout, num_rows: int | None) -> Tensor | None:
    if num_rows is None or not layout.on_host:
        return None
    return layout.real_rows(num_rows)


def _count(channel: Channel, layout: Layout, num_rows: int | None) -> int | None:
    """Rows this rank brings to the backend, before padding."""
    count = layout.num_real(num_rows) if layout.on_host else None
    if count is None:
        count = num_rows
    if count is None and channel.needs.equal_rows and channel.row_counts != "static":
        raise InputError(
            f"Dispatcher.plan: backend {channel.backend_name!r} needs row counts, and {type(layout).__name__} does "
            f"not know "
            "its own. Pass like=x, any tensor shaped like the hidden states."
        )
    return count


def _padded_rows(channel: Channel, count: int | None) -> tuple[int | None, int | None]:
    """Tp and the group's largest count; None where every rank may bring its own."""
    needs, policy = channel.needs, channel.row_counts
    where = f"Backend {channel.backend_name!r}"
    if policy == "static":
        largest = _static_rows(channel, count)
    if not needs.equal_rows:
        check_max_rows(where, round_up(count or 0, needs.row_multiple), needs)
        return None, None
    if policy != "static":
        assert count is not None
        largest = count if policy == "assume" else _exchange(channel, count, 0)
    padded = round_up(largest, needs.row_multiple)
    check_max_rows(where, padded, needs)
    return padded, largest


def _static_rows(channel: Channel, count: int | None) -> int:
    maximum = channel.config.max_tokens_per_rank
    assert maximum is not None  # a rule of the config
    if count is not None and count > maximum:
        raise InputError(
            f"Dispatcher.plan: at most max_tokens_per_rank ({maximum}) rows per rank, got {count}. "
            "Raise max_tokens_per_rank."
        )
    return maximum


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
            f'Dispatcher.plan: row_counts="check" wants equal rows on all ranks, got {largest} on rank {high % size} '
            f"and "
            f'{smallest} on rank {low % size}. Pad them alike, or use row_counts="agree".'
        )
    return largest
