"""Read how many rows graph-safe dispatches needed, and raise, grow or retry after an overflow."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar, final

import torch

from moe_dispatch.backends.capacity import balanced_pair_rows, balanced_rows, grown
from moe_dispatch.communication import Communicator, raise_alike, ranks_by_value
from moe_dispatch.dispatchers.channel import Channel
from moe_dispatch.errors import CapacityError, InputError, StateError
from moe_dispatch.types import Capacity

Result = TypeVar("Result")

logger = logging.getLogger("moe_dispatch")


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class RequiredCapacity:
    """The largest need of any dispatch of any rank since the channel was opened. It is the same on all ranks.

    Attributes:
        rows: Largest number of rows that arrived at one rank's experts, without expert padding.
        pair_rows: Largest number of rows from one sending rank to one receiving rank; 0 if the backend does not bound
            it.
        capacity_factor: Value of ``graph_safe.capacity_factor`` in the config that gives room for ``rows``, and for at
            least one.
        pair_factor: Value of ``alltoall``'s option ``pair_rows`` that gives room for ``pair_rows``, and for at least
            one; 0 if the backend does not bound them.
        overflowed: Whether the need exceeds the capacity, so that rows were dropped.
        invalid_ids: Largest number of ids outside -1..num_experts-1 in one dispatch, since they were last reported.
            Their slots went nowhere.
    """

    rows: int
    pair_rows: int
    capacity_factor: float
    pair_factor: float
    overflowed: bool
    invalid_ids: int


@final
class _Found(NamedTuple):
    """What the ranks have agreed on: the largest need, the largest headroom, and which problems some rank has.

    Attributes:
        needed: The largest need.
        headroom: The largest headroom, rounded up to a thousandth.
        reported: Whether some rank has reported a problem.
        differs: Whether the ranks have made different calls.
    """

    needed: RequiredCapacity
    headroom: float
    reported: bool
    differs: bool


def required(channel: Channel) -> RequiredCapacity:
    """Return the largest need of all ranks. Collective; a host sync."""
    return _agree(channel, 1.0, "required_capacity").needed


def _agree(channel: Channel, headroom: float, verb: str) -> _Found:
    """Agree on the needs and the problems of all ranks. Collective."""
    capacity = _capacity(channel, verb)
    high, low = channel.trail.read()
    mine = [*channel.meter.needs(), math.ceil(1000 * headroom), int(bool(channel.meter.reports()))]
    mine += [int(not channel.trail.known), high, -high, low, -low]
    found = channel.control.max(mine, label="capacity")
    rows, pair_rows, invalid_ids, thousandths, reported, unknown, high, minus_high, low, minus_low = found
    needed = RequiredCapacity(
        rows=rows,
        pair_rows=pair_rows,
        capacity_factor=max(rows, 1) / balanced_rows(channel.shape),
        pair_factor=0 if capacity.pair_rows is None else max(pair_rows, 1) / balanced_pair_rows(channel.shape),
        overflowed=not capacity.holds(rows, pair_rows),
        invalid_ids=invalid_ids,
    )
    differs = low != -minus_low or (not unknown and high != -minus_high)
    return _Found(needed, thousandths / 1000, bool(reported), differs)


def check(channel: Channel) -> RequiredCapacity:
    """Run ``Dispatcher.check``. Collective; a host sync.

    Raises:
        InputError: The calls of the ranks differ, a dispatch of some rank had invalid ids, or something else was
            reported. The next call does not report it again.
        CapacityError: A dispatch of some rank overflowed under ``graph_safe.on_overflow="raise"``.
        StateError: The config is not graph_safe.
    """
    found = _agree(channel, 1.0, "check")
    needed = found.needed
    if (problem := _problem("check", channel, found)) is not None:
        raise problem
    options = channel.config.graph_safe_options
    assert options is not None
    if needed.overflowed and options.on_overflow == "raise":
        raise CapacityError(_told("Dispatcher.check", channel, needed) + " Results since then lack rows. [MD07]")
    return needed


def _problem(verb: str, channel: Channel, found: _Found) -> InputError | None:
    """Return the error of what some rank did wrong since the last check, and reset its mark; None if there is none.

    It is the same on every rank. Collective if there is one, to name the ranks.
    """
    if found.differs:  # first, because needs that were read from the packets of another call mean nothing
        channel.meter.forget_needs()
        return channel.trail.difference(f"Dispatcher.{verb}", label="capacity")
    channel.trail.compared()
    return _invalid_ids(verb, channel, found.needed) or _reported(verb, channel, found.reported)


def _invalid_ids(verb: str, channel: Channel, needed: RequiredCapacity) -> InputError | None:
    """Return the error for invalid ids, and reset their mark; None if there were none."""
    if not needed.invalid_ids:
        return None
    everyone = channel.control.gather_integers(channel.meter.needs()[2:], label="capacity")
    ranks = ranks_by_value({rank: "invalid" for rank, (count,) in enumerate(everyone) if count})["invalid"]
    channel.meter.forget_invalid_ids()
    return InputError(
        f"Dispatcher.{verb}: topk_ids must lie in -1..{channel.config.num_experts - 1}, got up to {needed.invalid_ids} "
        f"invalid ids in one dispatch of {ranks}. Their slots went nowhere. Check the router."
    )


def _reported(verb: str, channel: Channel, reported: bool) -> InputError | None:
    """Return the error for all problems that were reported, and reset them; None if no rank has one."""
    if not reported:
        return None
    everyone = channel.control.gather_json(channel.meter.reports(), label="capacity")
    channel.meter.forget_reports()
    told = []
    for problem in dict.fromkeys(problem for of_rank in everyone for problem in of_rank):
        counts = {rank: of_rank[problem] for rank, of_rank in enumerate(everyone) if problem in of_rank}
        counted = ", ".join(f"{count} on {ranks}" for count, ranks in ranks_by_value(counts).items())
        told.append(f"Dispatcher.{verb}: {problem} Counted {counted}.")
    return InputError("\n".join(told))


def grow(channel: Channel, headroom: float) -> RequiredCapacity:
    """Run ``Dispatcher.grow``. Collective; a host sync."""
    return _grow(channel, headroom).needed


def _grow(channel: Channel, headroom: float) -> _Found:
    """Run ``grow``, and return what the ranks have agreed on."""
    check_headroom("grow", headroom)
    before = _capacity(channel, "grow")
    found = _agree(channel, headroom, "grow")
    needed = found.needed
    if needed.overflowed and not found.differs:
        after = grown(channel.shape, before, rows=needed.rows, pair_rows=needed.pair_rows, headroom=found.headroom)
        told = _told(channel.name, channel, needed)  # before the capacity changes
        channel.set_capacity(after)
        if channel.control.rank == 0:
            logger.warning("%s Growing it to %s. Make plans and CUDA graphs again.", told, after)
    return found


def retry_on_overflow(
    channels: Sequence[Channel], step: Callable[[], Result], *, everyone: Communicator | None, headroom: float
) -> Result:
    """Run a step, and again until nothing overflows on any rank that runs it. Collective."""
    check_headroom("retry_on_overflow", headroom)
    for channel in channels:
        _capacity(channel, "retry_on_overflow")
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    before = torch.get_rng_state(), [torch.cuda.get_rng_state(device) for device in devices]
    while True:
        undo = [channel.meter.watch_trained() for channel in channels]
        result = step()
        found = [_grow(channel, headroom) for channel in channels]  # grow all channels, in the same order on all ranks
        again = any(each.needed.overflowed for each in found)
        # Of all channels, because asking for the ranks that have a problem is collective.
        problems = [_problem("retry_on_overflow", *each) for each in zip(channels, found, strict=True)]
        problem = next(filter(None, problems), None)  # a second problem is not reported
        if everyone is not None:
            again = bool(raise_alike(everyone, problem, values=[int(again)], label="capacity")[0])
        elif problem is not None:
            raise problem
        if not again:
            return result
        for take_back in undo:
            take_back()
        torch.set_rng_state(before[0])
        for device, state in zip(devices, before[1], strict=True):
            torch.cuda.set_rng_state(state, device)


def check_headroom(verb: str, headroom: float) -> None:
    """Refuse a headroom outside 1..1024 with an InputError."""
    if not 1 <= headroom <= 1024:
        raise InputError(f"Dispatcher.{verb}: headroom must lie in 1..1024, got {headroom}.")


def _capacity(channel: Channel, verb: str) -> Capacity:
    if channel.capacity is None:
        raise StateError(f"Dispatcher.{verb}: without graph_safe, sizes follow the routing and nothing overflows.")
    return channel.capacity


def _told(where: str, channel: Channel, needed: RequiredCapacity) -> str:
    capacity = _capacity(channel, "check")
    pair = "" if capacity.pair_rows is None else f" and {capacity.pair_rows} rows to each rank"
    wanted = (
        ""
        if capacity.pair_rows is None
        else f" and {needed.pair_rows} (backend.pair_rows {_upwards(needed.pair_factor)})"
    )
    return (
        f"{where}: a dispatch must need at most {capacity.rows} rows of a rank's experts{pair}, got {needed.rows} "
        f"(graph_safe.capacity_factor {_upwards(needed.capacity_factor)}){wanted}. Call grow(), or raise these limits."
    )


def _upwards(factor: float) -> str:
    """Format a factor with three decimals, rounded up, so that a copied number is large enough."""
    return f"{math.ceil(factor * 1000) / 1000:.3f}"
