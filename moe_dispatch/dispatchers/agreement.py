"""Agree on a call between ranks before rows move: on its sizes, and on who makes it.

A mistake of one rank must end the call on all ranks, so that none waits. Who hears of an invalid id, and when, follows
from what the ranks exchange anyway; with ``debug``, all hear of it first.

- If the backend exchanges counts: all ranks, before rows travel, by a mark (``backends/marks.py``).
- If the ranks sum counts when they agree on the sizes of this dispatch (``Channel.num_summed``): all ranks, before rows
  travel.
- In graph-safe mode, in which the host does not wait: all ranks, in ``Dispatcher.check``.
- Otherwise: this rank alone, when its rows have arrived. Its peers wait in their next call.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache, lru_cache, partial
from typing import Any

import torch
from torch import Tensor

from moe_dispatch.backends import marks
from moe_dispatch.communication import control_device, device_of, raise_alike
from moe_dispatch.dispatchers.channel import Channel, Lease
from moe_dispatch.dispatchers.requirements import check_max_rows
from moe_dispatch.dispatchers.trail import UNKNOWN
from moe_dispatch.errors import InputError
from moe_dispatch.permutation import count_experts
from moe_dispatch.seams.calls import of_thread
from moe_dispatch.types import Plan, Sizes

UNTOLD = (
    "The other ranks were not told, because nothing is exchanged before rows travel. They wait until the watchdog, or "
    "a timeout of the group or of the backend's library, ends it. debug=True tells them."
)
"""Note on an error that only one rank raises."""


def leave_untold(channel: Channel, error: Exception) -> None:
    """Note on an error of this rank that the other ranks wait. Where a watchdog runs, it tells them the text."""
    error.add_note(UNTOLD)
    for observer in channel.communicator.observers:
        observer.raised_alone(error)


Facts = Mapping[str, str]


@cache
def facts_of(dtype: torch.dtype, grad_enabled: bool, repetition: str = "", carried: str = "") -> Facts:
    """Return the facts about a dispatch that must be equal on all ranks, by name.

    Args:
        dtype: Dtype of the rows.
        grad_enabled: Whether the call records gradients. A rank that does not record them takes part in no backward.
        repetition: As in ``Call``; it is added to the grad mode.
        carried: Names and dtypes of what travels with the rows.
    """
    grad_mode = ("enabled" if grad_enabled else "disabled") + repetition
    facts = {"the dtype of x": str(dtype).removeprefix("torch."), "grad mode": grad_mode}
    return {**facts, "carry": carried} if carried else facts


@lru_cache(maxsize=1024)
def mark_of(facts: tuple[Any, ...], wants_weights: bool) -> int:
    """Return the mark of a dispatch, as ``marks.encoded`` does. ``facts`` are the arguments of ``facts_of``."""
    return marks.encoded(facts_of(*facts), wants_weights=wants_weights)


@lru_cache(maxsize=1024)
def text_of(verb: str, facts: tuple[Any, ...], rows: int | None = None) -> str:
    """Return the text of a dispatch for the trail: its facts, of which this has the arguments, and rows of a rank."""
    told = {**facts_of(*facts), **({} if rows is None else {"most rows": rows})}
    return f"{verb} ({'; '.join(f'{name}: {value}' for name, value in told.items())})"


def described(facts: Facts, lease: Lease | None) -> Facts:
    """Return the facts and the dispatcher, for the error text of calls that are known to differ.

    One dispatcher may have other names on other ranks, so this text is not what the ranks compare.
    """
    if lease is None:
        return facts
    return {"the call": "dispatch", **facts, "the dispatcher": f"{lease.name!r}, number {lease.number}"}


def tell_peers(
    channel: Channel, error: Exception, *, in_dispatch: bool, x: object = None, has_sizes: bool = False
) -> None:
    """Tell the peers that this rank refuses a call: it marks its first exchange of the call, so they raise too.

    Never raises. If the peers cannot be told, the error gets a note.

    Args:
        channel: Channel of the dispatcher.
        error: The error of this rank, which the caller raises afterwards.
        in_dispatch: Whether the call is a dispatch, in which peers may wait for this rank's counts.
        x: What the dispatch was given as hidden states.
        has_sizes: Whether sizes were settled before, so that the ranks do not agree on them in this call.
    """
    try:
        if channel.config.debug or (not has_sizes and channel.agrees_on_rows):
            # The peers come to this exchange first, whatever else the call would exchange later.
            agree_on_largest(channel, 0, error)
        elif in_dispatch and channel.slots is not None and channel.slots.hears_refusals:
            channel.slots.refuse(channel, error)
        elif in_dispatch and channel.needs.exchanges_counts:
            preferred = torch.device(channel.config.device or (x.device if isinstance(x, Tensor) else "cpu"))
            # The peers wait for this rank's counts. A mark of -1 sends all ranks to the exchange of texts below.
            channel.backend.refuse(device_of(channel.communicator.group, preferred))
            raise_alike(channel.control, error, label="refusal")
        elif channel.control.size > 1:
            leave_untold(channel, error)
    except Exception as failure:
        if failure is not error:  # a broken group: the error itself matters more
            error.add_note(f"The other ranks were not told: {failure}")


def settle(
    channel: Channel,
    plan: Plan,
    *,
    facts: Facts | None = None,
    lease: Lease | None = None,
    ids_TK: Tensor | None = None,
    invalid: Tensor | None = None,
    problem: Callable[[], InputError | None] = lambda: None,
) -> Plan:
    """Agree on sizes, unless the plan has some. With ``debug``, also compare the calls of the ranks.

    Args:
        channel: Channel of the dispatcher.
        plan: A plan, or the draft of one.
        facts: What must be equal on all ranks of a dispatch; None in a call of ``plan``.
        lease: Lease of the dispatcher; None in compiled code.
        ids_TK: In a dispatch, the valid ids of the rows that this rank sends.
        invalid: In a dispatch, the number of its invalid ids, int64 (); None if the ranks learn it otherwise.
        problem: Function that returns the error of an invalid id of this rank.

    Returns:
        The plan. If the ranks have summed their counts, its sizes hold the sums, and a plan that was made here is for
        this dispatch only.

    Raises:
        InputError: The ranks make different calls, and they agree on sizes or have ``debug``; or some rank has too many
            rows, or the numbers of rows differ under ``row_counts="check"``. Raised on every rank. Or an id of this
            rank is invalid, and the ranks sum their counts.
        PeerError: Another rank refused its call, or has an invalid id.

    Cost: an all-reduce if ``Channel.agrees_on_rows``.
    """
    config, needs, policy = channel.config, channel.needs, channel.row_counts
    if plan.settled and not config.debug:
        return plan
    if ids_TK is None and of_thread.interceptor is not None:
        return of_thread.interceptor.settle(channel, plan, facts=facts, lease=lease)
    told: dict[str, str] | None = None
    if config.debug or channel.agrees_on_rows:  # with an agreement, either all ranks have a plan or none
        how = "" if not channel.agrees_on_rows else " with a plan" if plan.settled else " without a plan"
        told = {"the call": "plan"} if facts is None else {"the call": "dispatch" + how, **facts}
    agree = partial(agree_on_largest, channel, facts=told, lease=lease)
    if config.debug and (plan.settled or not channel.agrees_on_rows):
        agree(0, label="debug")  # first, because settling may make buffers, which is collective
    if plan.settled:
        return plan
    # Nothing below is skipped by one rank alone: whether ranks agree follows from the config, which is equal.
    sizes, num_chunks = Sizes(capacity=channel.capacity), 1
    if policy is not None:
        largest, sums = (config.max_tokens_per_rank if policy == "static" else plan.num_sent) or 0, list[int]()
        if policy not in ("static", "assume"):
            # The one exchange of a dispatch without a plan. Counts and invalid ids ride along, which saves another.
            largest, sums = agree(largest, ids_TK=ids_TK, invalid=invalid)
        num_chunks = config.num_chunks(largest)
        largest = -(-largest // num_chunks)
        check_max_rows("Dispatcher.plan", needs.padded(largest), needs)
        sizes = channel.sizes(largest)
        if ids_TK is not None and sums:
            if sums[0]:  # of all ranks, so all of them exchange the text of the one that is wrong
                raise_alike(channel.control, problem(), label="refusal")
            if needs.counts_with_sizes:
                sizes = replace(sizes, tokens_per_expert=tuple(sums[1:]))
    # Last, because it may grow buffers, which is collective: no rank may have raised by then.
    channel.backend.reserve(sizes)
    footprint = None
    if sizes.capacity is not None:
        most = (config.max_tokens_per_rank if plan.num_sent is None else plan.num_sent) or 0
        rows = needs.brought(-(-most // num_chunks), sizes)
        footprint = partial(_footprint, channel.options, channel.shape, needs, sizes, rows)
    return replace(plan, sizes=sizes, num_chunks=num_chunks, settled=True, footprint=footprint)


def _footprint(*given: Any) -> dict[str, int]:
    from moe_dispatch.backends.footprint import planned  # noqa: PLC0415 - formulas only

    return planned(*given)


def agree_on_largest(
    channel: Channel,
    count: int,
    problem: Exception | None = None,
    *,
    facts: Facts | None = None,
    lease: Lease | None = None,
    ids_TK: Tensor | None = None,
    invalid: Tensor | None = None,
    label: str = "sizes",
) -> tuple[int, list[int]]:
    """Return the largest row count of any rank, and the sums of their counts, if all ranks make the same call.

    The same call is one of the same dispatcher. Each count travels with its rank, so that an error can name both. This
    exchange has the same form in all calls: with ``debug``, a rank that has a plan and a rank that has none meet here.
    So if the ranks of the channel sum counts (``Channel.num_summed``), a call without ids adds zeros.
    """
    size, rank = channel.control.size, channel.control.rank
    numbers = (UNKNOWN, UNKNOWN) if lease is None else (lease.number, -lease.number)
    trail = (channel.trail.told, -channel.trail.told if channel.trail.known else UNKNOWN)
    values = (count * size + rank, -count * size + rank, *numbers, *trail)
    sums: list[Tensor] = []
    if channel.num_summed and ids_TK is not None:
        counts = [count_experts(ids_TK, channel.shape.num_experts)] if channel.needs.counts_with_sizes else []
        sums = [ids_TK.new_zeros(1) if invalid is None else invalid.view(1), *counts]
    elif channel.num_summed:
        device = control_device(channel.control.group)
        sums = [torch.zeros(channel.num_summed, dtype=torch.int64, device=device)]
    raise_same = partial(raise_alike, channel.control, of_call=True, label=label)
    high, low, last, first, *found = raise_same(problem, values=values, sums=sums, facts=facts)
    most, least, *summed = found
    # The errors below follow from numbers that all ranks have, so all of them raise the same one.
    if last not in (-first, UNKNOWN):  # of the ranks that know their dispatcher, two call different ones
        raise_same(None, facts=described(facts or {}, lease))
    if most not in (-least, UNKNOWN):
        verb = "plan" if lease is None else "dispatch"
        if (difference := channel.trail.difference(f"Dispatcher.{verb}", label=label)) is not None:
            raise difference
    channel.trail.compared()
    largest, smallest = high // size, -(low // size)
    if channel.config.row_counts == "check" and largest != smallest:
        raise InputError(
            f'Dispatcher.plan: row_counts="check" needs equal rows on all ranks, got {largest} on rank {high % size} '
            f'and {smallest} on rank {low % size}. Or use row_counts="agree".'
        )
    return largest, summed
