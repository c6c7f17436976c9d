"""Compare the exchanges of ranks by a number that each of them changes: the trail of a channel.

Ranks take part in every exchange together, so they must make the same calls in the same order. A rank that does not,
may still exchange as many bytes as the others expect, and then nothing but the numbers of the model is wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache, partial
from typing import final

import torch
from torch import Tensor

from moe_dispatch.backends.marks import MARKED_DISPATCHERS
from moe_dispatch.communication import Communicator, digest, raise_alike, ranks_by_value
from moe_dispatch.dispatchers.meter import Meter
from moe_dispatch.errors import InputError

_MOST_CALLS = 1000  # between two comparisons, for the error text
UNKNOWN = -(2**40)
"""Less than any number of a dispatcher or a call, and than its negative: for a rank that does not know it."""


@lru_cache(maxsize=4096)
def _factor(what: str, distance: int | None, dispatcher: int | None) -> int:
    """Return the factor by which a call changes a trail: twice an odd number of 62 bits."""
    low = digest({"call": what}) % 2**31 | 1
    high = digest({"call": what, "distance": distance, "dispatcher": dispatcher}) % 2**31
    return 2 * low + (high << 32)


@final
class Trail:
    """What this rank has exchanged on a channel, in order.

    A call with the factor c changes the number n to n + c * n * n, modulo 2**64. As n is odd and c is even, no two
    numbers come to the same one, and two calls in another order come to another number.

    In graph-safe mode the trail is on the device, so that it follows what ran there, replays of CUDA graphs included,
    and ``Dispatcher.check`` compares it. In eager mode it is on the host, and the next dispatch or plan that exchanges
    something before rows travel compares it.

    Code that torch compiles does not know its dispatcher, nor which call a backward belongs to. So only the high half
    of a factor has these. The low half of the number follows from the low halves of the factors, and ranks compare it
    alone if one of them has compiled a call.

    Args:
        control: Communicator of the ranks that compare their trails.
        meter: Counters of the channel, whose turns order streams; None keeps the trail on the host.
        debug: Whether ranks compare each call that does not agree on anything else, before it exchanges rows.

    Attributes:
        number: Number of calls so far.
        known: Whether every call has told its dispatcher.
        value: The number, if the trail is on the host.
        compared: Function that forgets the calls that ranks have compared.
    """

    def __init__(self, control: Communicator, meter: Meter | None, *, debug: bool = False) -> None:
        self._control, self._meter, self._debug = control, meter, debug
        self.number, self.known, self.value = 0, True, 1
        self._calls: list[tuple[str, int | None]] = []
        self.compared: Callable[[], None] = self._calls.clear
        self._numbers: dict[torch.device, Tensor] = {}

    def prepare(self, device: torch.device) -> None:
        """Make the number of a device, if the trail is on devices."""
        if self._meter is not None and device not in self._numbers and self._control.size > 1:
            number = self._meter.zeros("", device)
            with torch.inference_mode(False), self._meter.turn(device):
                self._numbers[device] = number.fill_(1)

    def follow(
        self, what: str, device: torch.device, *, of: int | None = None, dispatcher: int | None, told: bool = False
    ) -> int:
        """Note a call before it exchanges anything, and return its number. No host sync.

        Args:
            what: Text of the call: the name of a verb, and for a dispatch what must be equal on all ranks.
            device: Device of its rows.
            of: Number of the call that this one belongs to, such as the dispatch of a combine.
            dispatcher: Number of its dispatcher; None in code that torch compiles.
            told: Whether the ranks have compared this call already.

        Raises:
            InputError: With ``debug``, the calls of the ranks differ. Raised on every rank.

        Cost: one launch in graph-safe mode.
        """
        if self._control.size == 1:
            return 0
        if self._debug and not told:
            self._compare(what, of)
        self.number += 1
        if len(self._calls) < _MOST_CALLS:
            self._calls.append((what, of))
        self.known = self.known and dispatcher is not None
        factor = _factor(what, None if of is None else self.number - of, dispatcher)
        if self._meter is None:
            self.value = (self.value + factor * self.value * self.value) % 2**64
            return self.number
        self.prepare(device)
        number = self._numbers[device]
        with self._meter.turn(device):
            number.addcmul_(number, number, value=factor)
        return self.number

    def _compare(self, what: str, of: int | None) -> None:
        """Raise on every rank if the ranks make different calls. A call of ``None`` fits every other."""
        compare = partial(raise_alike, self._control, None, of_call=True, label="debug")
        most, least = compare(facts={"the call": what}, values=(UNKNOWN, UNKNOWN) if of is None else (of, -of))
        if most not in (-least, UNKNOWN):
            compare(facts={"the call": _text(what, of)})

    def marked(self, mark: int, dispatcher: int | None) -> int:
        """Return the mark of a call with its dispatcher and the calls so far, if all of them are known."""
        if dispatcher is None or not self.known:
            return mark
        return mark + 1 + (dispatcher + (self.value >> 25)) % (MARKED_DISPATCHERS - 1)

    @property
    def told(self) -> int:
        """The number of a trail on the host, in 39 bits; ``UNKNOWN`` if a call has not told its dispatcher."""
        return self.value >> 25 if self.known else UNKNOWN

    def read(self) -> tuple[int, int]:
        """Return the halves of the number of a trail on devices, the high one first. A host sync on a GPU."""
        assert self._meter is not None
        number = 0
        for each in self._numbers.values():
            number ^= self._meter.read(each)
        return number >> 32, number % 2**32

    def difference(self, where: str, *, label: str) -> InputError | None:
        """Return the error of the first call that differs between ranks since they compared, and begin anew.

        Collective.

        Returns None if the calls are equal as far as the ranks remember them, which a trail on the host may be.
        """
        calls = [_text(*call) for call in self._calls]
        everyone = self._control.gather_json(calls, label=label)
        self.number, self.known, self.value = 0, True, 1
        self._calls.clear()
        for device, number in self._numbers.items():
            assert self._meter is not None
            with self._meter.turn(device):
                number.fill_(1)
        for at in range(max(map(len, everyone))):
            found = {rank: calls[at] if at < len(calls) else "nothing" for rank, calls in enumerate(everyone)}
            if len(set(found.values())) > 1:
                return _difference(where, found)
        if self._meter is None:
            return None
        return InputError(
            f"{where}: ranks must make the same calls in the same order, got a difference among replays of CUDA graphs "
            f"or behind the first {_MOST_CALLS} calls since the last check. {_WAY_OUT}"
        )


_WAY_OUT = (
    "Results since then are wrong. Give all ranks the same dtype of x, carry and grad mode, and the same order of "
    "micro-batches in forward and backward. [MD11]"
)


def _difference(where: str, found: Mapping[int, str]) -> InputError:
    told = ", ".join(f"{call} on {ranks}" for call, ranks in ranks_by_value(found).items())
    return InputError(f"{where}: ranks must make the same calls in the same order, got {told}. {_WAY_OUT}")


def _text(what: str, of: int | None) -> str:
    return what if of is None else f"{what} of call {of}"
