"""Agree on a call between ranks before rows move: on its sizes, and on who makes it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import final

import torch
from torch import Tensor

from moe_dispatch.backends.base import MARKED_DISPATCHERS, Sizes
from moe_dispatch.communication import control_device, device_of, digest, raise_alike
from moe_dispatch.dispatchers.channel import Channel, Lease
from moe_dispatch.dispatchers.planning import Draft, Outgoing
from moe_dispatch.dispatchers.requirements import check_max_rows
from moe_dispatch.errors import InputError
from moe_dispatch.types import Plan

REFUSED = -1
"""Number of rows that a rank tells its peers instead of its own, if it refuses a call."""

Facts = Mapping[str, str]
Agree = Callable[..., tuple[int, list[int]]]
_UNKNOWN = -(2**40)  # less than any number of a dispatcher, and than its negative


@final
@dataclass(frozen=True, slots=True)
class Caller:
    """Who makes a dispatch, as far as it must be equal on all ranks.

    Attributes:
        recorded: Whether the call records gradients. A rank that does not record them takes part in no backward.
        lease: Lease of the dispatcher; None in compiled code, which does not know it.
    """

    recorded: bool
    lease: Lease | None = None

    def facts(self, dtype: torch.dtype) -> Facts:
        """Return the facts about rows of this dtype that must be equal on all ranks, by name."""
        return _facts_of_rows(dtype, self.recorded)

    def described(self, facts: Facts) -> Facts:
        """Return the facts and the dispatcher, for the error text of calls that are known to differ.

        One dispatcher may have other names on other ranks, so this text is not what the ranks compare.
        """
        if self.lease is None:
            return facts
        return {**facts, "the dispatcher": f"{self.lease.name!r}, number {self.lease.number}"}

    def mark(self, dtype: torch.dtype) -> int:
        """Return the facts and the dispatcher as a mark of the exchange of counts, which ``marks_agree`` compares."""
        number = 0 if self.lease is None else 1 + self.lease.number % (MARKED_DISPATCHERS - 1)
        return _number_of_rows(dtype, self.recorded) * MARKED_DISPATCHERS + number


@cache
def _facts_of_rows(dtype: torch.dtype, recorded: bool) -> Facts:
    return {"the dtype of x": str(dtype).removeprefix("torch."), "grad mode": "enabled" if recorded else "disabled"}


@cache
def _number_of_rows(dtype: torch.dtype, recorded: bool) -> int:
    """Return the facts about rows as a number of 16 bits."""
    return digest(_facts_of_rows(dtype, recorded)) % 2**16


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
            _agree_on_largest(channel, 0, error)
        elif in_dispatch and channel.config.balance is not None:
            channel.control.gather_integers([REFUSED, *[0] * channel.config.num_experts], label="balance")
            raise_alike(channel.control, error, label="refusal")
        elif in_dispatch and channel.needs.exchanges_counts:
            preferred = torch.device(channel.config.device or (x.device if isinstance(x, Tensor) else "cpu"))
            channel.backend.refuse(device_of(channel.communicator.group, preferred))
            raise_alike(channel.control, error, label="refusal")
        elif channel.control.size > 1:
            error.add_note(
                "The other ranks were not told: nothing is exchanged before rows travel. debug=True tells them."
            )
    except Exception as failure:
        if failure is not error:  # a broken group: the error itself matters more
            error.add_note(f"The other ranks were not told: {failure}")


def settle(
    channel: Channel,
    plan: Draft | Plan,
    *,
    x: Tensor | None = None,
    caller: Caller | None = None,
    outgoing: Outgoing | None = None,
) -> Plan:
    """Agree on sizes, unless there is a plan. With ``debug``, also compare the calls of the ranks.

    Args:
        channel: Channel of the dispatcher.
        plan: A plan, or the draft of one.
        x: Hidden states of a dispatch; None in a call of ``plan``.
        caller: Who makes the dispatch; None in a call of ``plan``.
        outgoing: What this rank sends in the dispatch; None in a call of ``plan``.

    Returns:
        The plan. If the ranks have summed their counts of slots, its sizes hold the sums, and a plan that was made here
        is for this dispatch only.

    Raises:
        InputError: The ranks make different calls, and they agree on sizes or have ``debug``. Raised on every rank. Or
            an id of this rank is invalid, and the ranks sum their counts.
        PeerError: Another rank refused its call.
    """
    debug, agrees = channel.config.debug, channel.agrees_on_rows
    if isinstance(plan, Plan) and not debug:
        return plan
    facts = None
    if debug or agrees:
        facts = _facts_of_call(x, caller, agrees=agrees, has_plan=isinstance(plan, Plan))
    agree = partial(_agree_on_largest, channel, facts=facts, caller=caller)
    if debug and (isinstance(plan, Plan) or not agrees):
        agree(0, label="debug")  # first, because settling may make buffers, which is collective
    return plan if isinstance(plan, Plan) else _settle_draft(channel, plan, agree, outgoing)


def _facts_of_call(x: Tensor | None, caller: Caller | None, *, agrees: bool, has_plan: bool) -> Facts:
    """Return the facts that must be equal on all ranks of a call.

    If the ranks agree on sizes, either all of them must have a plan or none.
    """
    if x is None or caller is None:
        return {"the call": "plan"}
    how = "" if not agrees else " with a plan" if has_plan else " without a plan"
    return {"the call": "dispatch" + how, **caller.facts(x.dtype)}


def _settle_draft(channel: Channel, draft: Draft, agree: Agree, outgoing: Outgoing | None) -> Plan:
    """Agree on sizes. Collective if ``Channel.agrees_on_rows``.

    Raises:
        InputError: Some rank has too many rows, the facts of the ranks differ, or the numbers of rows differ under
            ``row_counts="check"``; raised on every rank. Or an id of this rank is invalid.
        PeerError: Another rank refused its call, or has an invalid id.
    """
    sizes = _agreed_sizes(channel, draft.count, agree, outgoing)
    channel.backend.reserve(sizes)
    return draft.plan(channel, sizes, None if sizes.capacity is None else _footprint(channel, draft, sizes))


def _footprint(channel: Channel, draft: Draft, sizes: Sizes) -> Callable[[torch.dtype], dict[str, int]]:
    most = channel.config.max_tokens_per_rank if draft.count is None else draft.count
    assert most is not None  # graph_safe asks for it
    return partial(channel.options.footprint, channel.shape, sizes, channel.needs.brought(most, sizes))


def _agreed_sizes(channel: Channel, count: int | None, agree: Agree, outgoing: Outgoing | None) -> Sizes:
    needs, policy, sums = channel.needs, channel.row_counts, list[int]()
    if policy is None:
        return Sizes(capacity=channel.capacity)
    if policy == "static":
        assert channel.config.max_tokens_per_rank is not None  # a rule of the config
        largest = channel.config.max_tokens_per_rank
    elif policy == "assume":
        largest = count or 0
    else:
        largest, sums = agree(count or 0, outgoing=outgoing)
    check_max_rows("Dispatcher.plan", needs.padded(largest), needs)
    if outgoing is None or not sums:
        return channel.sizes(largest)
    invalid, *tokens_per_expert = sums
    if invalid:
        raise_alike(channel.control, outgoing.problem(channel.config.num_experts), label="refusal")
    return replace(channel.sizes(largest), tokens_per_expert=tuple(tokens_per_expert))


def _agree_on_largest(
    channel: Channel,
    count: int,
    problem: Exception | None = None,
    *,
    facts: Facts | None = None,
    caller: Caller | None = None,
    outgoing: Outgoing | None = None,
    label: str = "sizes",
) -> tuple[int, list[int]]:
    """Return the largest row count of any rank, and the sums of ``Outgoing.tally``, if all ranks make the same call.

    The same call is one of the same dispatcher. Each count travels with its rank, so that an error can name both. This
    exchange has the same form in all calls: with ``debug``, a rank that has a plan and a rank that has none meet here.
    So if the channel sums tallies, an exchange without ``outgoing`` adds zeros. If it does not, there are no sums.
    """
    size, rank, num_experts = channel.control.size, channel.control.rank, channel.shape.num_experts
    number = None if caller is None or caller.lease is None else caller.lease.number
    numbers = (_UNKNOWN, _UNKNOWN) if number is None else (number, -number)
    values = (count * size + rank, -count * size + rank, *numbers)
    tally: list[Tensor] = []
    if channel.sums_tallies:
        assert channel.control.group is not None
        zeros = partial(torch.zeros, 1 + num_experts, dtype=torch.int64, device=control_device(channel.control.group))
        tally = [zeros()] if outgoing is None else outgoing.tally(num_experts)
    raise_same = partial(raise_alike, channel.control, of_call=True, label=label)
    high, low, last, first, *sums = raise_same(problem, values=values, sums=tally, facts=facts)
    if last not in (-first, _UNKNOWN):  # of the ranks that know their dispatcher, two call different ones
        raise_same(None, facts=facts if caller is None else caller.described(facts or {}))
    largest, smallest = high // size, -(low // size)
    if channel.config.row_counts == "check" and largest != smallest:
        raise InputError(
            'Dispatcher.plan: row_counts="check" needs equal rows on all ranks, got '
            f"{largest} on rank {high % size} and {smallest} on rank {low % size}. "
            'Pad them alike, or use row_counts="agree".'
        )
    return largest, sums
