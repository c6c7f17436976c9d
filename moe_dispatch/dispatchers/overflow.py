"""What graph-safe dispatches needed room for, and what is done where there was too little."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar, final

import torch
from torch import Tensor

from moe_dispatch.backends.capacity import Capacity, balanced_pair_rows, balanced_rows, grown
from moe_dispatch.communication import Communicator, raise_alike
from moe_dispatch.errors import CapacityError, InputError, StateError

if TYPE_CHECKING:
    from moe_dispatch.dispatchers.channel import Channel

Result = TypeVar("Result")

logger = logging.getLogger("moe_dispatch")


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class RequiredCapacity:
    """The most that any dispatch of any rank needed since the channel was opened; the same on all ranks.

    Attributes:
        rows: real rows of one rank's experts, without expert padding.
        pair_rows: rows from one rank to one rank; 0 where the backend has no bound of pairs.
        capacity_factor: the ``capacity_factor`` that gives so many rows, and at least one.
        pair_factor: the ``pair_rows`` of ``alltoall`` that gives so many, and at least one; 0 where it has no bound.
        overflowed: whether there was room for less, so that rows were dropped.
        invalid_ids: the most ids outside -1..num_experts-1 that one dispatch was given, since ``check`` last raised for
            them. Their slots went nowhere.
    """

    rows: int
    pair_rows: int
    capacity_factor: float
    pair_factor: float
    overflowed: bool
    invalid_ids: int


@final
class HighWaterMark:
    """The most rows needed and the most invalid ids so far, on the device.

    They are maxima of single dispatches, so a recomputed or replayed dispatch counts once.
    """

    def __init__(self) -> None:
        self._marks: dict[torch.device, Tensor] = {}

    def prepare(self, device: torch.device) -> None:
        """Make the mark of a device, before anything else of a dispatch is allocated.

        Raises:
            StateError: the first call on the device is being captured: its mark would be made again by every replay.
        """
        if device not in self._marks:
            if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
                raise StateError(
                    "Dispatcher.dispatch: it must have run once before it is captured in a CUDA graph, got a capture "
                    "of its first call. Run the step once, or use moe_dispatch.capture, which warms up."
                )
            with torch.inference_mode(False):  # a mark made in an evaluation is raised in training too
                self._marks[device] = torch.zeros(3, dtype=torch.int64, device=device)

    def record(self, demand: Tensor, invalid: Tensor) -> None:
        """Raise the mark. No sync; in place, so that a captured graph raises the same mark.

        Args:
            demand: int64 (2,), as in ``Arrived``.
            invalid: int64 (), the number of invalid ids.
        """
        mark = self._marks[demand.device]
        torch.maximum(mark, torch.cat([demand, invalid.view(1)]), out=mark)

    def read(self) -> list[int]:
        """Rows, rows of a pair, and invalid ids, of this rank. A host sync."""
        marks = [mark.tolist() for mark in self._marks.values()]
        return [max((mark[i] for mark in marks), default=0) for i in range(3)]

    def forget_invalid_ids(self) -> None:
        """Start to count invalid ids again, after they have been reported."""
        for mark in self._marks.values():
            mark[2:].zero_()


def required(channel: Channel) -> RequiredCapacity:
    """What all ranks needed. Collective; a host sync."""
    return _agree(channel, 1.0, "required_capacity")[0]


def _agree(channel: Channel, headroom: float, verb: str) -> tuple[RequiredCapacity, float]:
    """What all ranks needed, and the largest headroom of any, to a thousandth."""
    capacity = _capacity(channel, verb)
    mine = [*channel.high_water.read(), math.ceil(1000 * headroom)]
    rows, pair_rows, invalid_ids, thousandths = channel.control.max(mine, label="capacity")
    needed = RequiredCapacity(
        rows=rows,
        pair_rows=pair_rows,
        capacity_factor=max(rows, 1) / balanced_rows(channel.shape),
        pair_factor=0 if capacity.pair_rows is None else max(pair_rows, 1) / balanced_pair_rows(channel.shape),
        overflowed=not capacity.holds(rows, pair_rows),
        invalid_ids=invalid_ids,
    )
    return needed, thousandths / 1000


def check(channel: Channel) -> RequiredCapacity:
    """Raise on every rank where some dispatch of some rank had invalid ids, or more rows than fit; collective.

    Raises:
        InputError: invalid ids, with their number; the next call does not raise for them again.
        CapacityError: more rows than fit under ``on_overflow="raise"``, with what would fit.
    """
    needed = required(channel)
    if (problem := _invalid_ids("check", channel, needed)) is not None:
        raise problem
    if needed.overflowed and channel.config.on_overflow == "raise":
        raise CapacityError(_told("Dispatcher.check", channel, needed) + " Results since then lack rows. [MD07]")
    return needed


def _invalid_ids(verb: str, channel: Channel, needed: RequiredCapacity) -> InputError | None:
    """The one report of invalid ids in graph-safe mode, the same on every rank; None if there were none."""
    if not needed.invalid_ids:
        return None
    channel.high_water.forget_invalid_ids()
    return InputError(
        f"Dispatcher.{verb}: topk_ids must lie in -1..{channel.shape.num_experts - 1}, got up to {needed.invalid_ids} "
        "others in one dispatch of one rank. Their slots went nowhere. Check the router."
    )


def grow(channel: Channel, headroom: float) -> RequiredCapacity:
    """Make room for what was needed. Collective."""
    check_headroom("grow", headroom)
    before = _capacity(channel, "grow")
    needed, headroom = _agree(channel, headroom, "grow")
    if needed.overflowed:
        after = grown(channel.shape, before, rows=needed.rows, pair_rows=needed.pair_rows, headroom=headroom)
        told = _told(channel.name, channel, needed)  # of the room that was too small
        channel.set_capacity(after)
        if channel.control.rank == 0:
            logger.warning(
                "%s Growing it to %d rows%s; plans and CUDA graphs made before must be made again.",
                told,
                after.rows,
                "" if after.pair_rows is None else f" and {after.pair_rows} rows to each rank",
            )
    return needed


def retry_on_overflow(
    channels: Sequence[Channel], step: Callable[[], Result], *, everyone: Communicator | None, headroom: float
) -> Result:
    """Run a step until nothing overflows on any of the ranks that run it. Collective."""
    check_headroom("retry_on_overflow", headroom)
    for channel in channels:
        _capacity(channel, "retry_on_overflow")
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    before = torch.get_rng_state(), [torch.cuda.get_rng_state(device) for device in devices]
    while True:
        result = step()
        needed = [grow(channel, headroom) for channel in channels]  # all of them, and on all ranks alike
        again = any(each.overflowed for each in needed)
        found = (_invalid_ids("retry_on_overflow", *pair) for pair in zip(channels, needed, strict=True))
        problem = next(filter(None, found), None)  # the rest is left for another call
        if everyone is not None:
            again = bool(raise_alike(everyone, problem, values=[int(again)], label="capacity")[0])
        elif problem is not None:
            raise problem
        if not again:
            return result
        torch.set_rng_state(before[0])
        for device, state in zip(devices, before[1], strict=True):
            torch.cuda.set_rng_state(state, device)


def check_headroom(verb: str, headroom: float) -> None:
    """Refuse a factor that would shrink, or make no sense, with an InputError."""
    if not 1 <= headroom <= 1024:
        raise InputError(
            f"Dispatcher.{verb}: headroom must lie in 1..1024, got {headroom}. Use 1.0 for what was needed."
        )


def _capacity(channel: Channel, verb: str) -> Capacity:
    if channel.capacity is None:
        raise StateError(
            f"Dispatcher.{verb}: it must be graph_safe, got graph_safe=False, where sizes follow the routing and "
            "nothing overflows. Leave the call out."
        )
    return channel.capacity


def _told(where: str, channel: Channel, needed: RequiredCapacity) -> str:
    capacity = _capacity(channel, "check")
    pair = "" if capacity.pair_rows is None else f" and {capacity.pair_rows} rows to each rank"
    wanted = "" if capacity.pair_rows is None else f" and {needed.pair_rows} (pair_rows {_upwards(needed.pair_factor)})"
    return (
        f"{where}: a dispatch must need at most {capacity.rows} rows of a rank's experts{pair}, got {needed.rows} "
        f"(capacity_factor {_upwards(needed.capacity_factor)}){wanted}. Call grow(), or raise these."
    )


def _upwards(factor: float) -> str:
    """With three decimals, and no less: whoever copies it has enough."""
    return f"{math.ceil(factor * 1000) / 1000:.3f}"
