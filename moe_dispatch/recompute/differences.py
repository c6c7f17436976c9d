"""Report that the router of a recomputation has chosen other experts than that of its forward."""

from __future__ import annotations

import weakref
from typing import final

import torch
from torch import Tensor

from moe_dispatch.communication import HostCopy, raise_alike
from moe_dispatch.dispatchers.channel import Channel
from moe_dispatch.dispatchers.dispatcher import Dispatcher
from moe_dispatch.errors import InputError

_ADVICE = (
    "The gradients of this router are wrong. Give it the ids of the forward by moe_dispatch.recompute.keep_ids, or let "
    "it choose the same each time."
)


def _rule(names: str) -> str:
    return f"in a recomputation, the router{f' of {names}' * bool(names)} must choose the experts of its forward"


def report(dispatcher: Dispatcher, count: Tensor, other: InputError | None = None) -> None:
    """Report the number of ids that differ, int64 (), and another layout than that of the forward.

    In graph-safe mode ``Dispatcher.check`` raises. Otherwise the backward does when it is done: one exchange then tells
    all ranks, however many dispatches were recomputed.
    """
    channel = dispatcher._lease.channel
    if channel.config.graph_safe:
        if other is not None:
            channel.meter.report(str(other), torch.ones_like(count))
        channel.meter.report(f"{_rule(repr(dispatcher.name) * bool(dispatcher.name))}. {_ADVICE}", count)
        return
    task = torch._C._current_graph_task_id()
    if task == -1:  # somebody reads what the graph has saved, without a backward
        alone = _AtEnd()
        alone.found[channel] = [(dispatcher.name, HostCopy(count), other)]
        return alone.compare()
    at_end = _at_ends.get(task)
    if at_end is None:
        at_end = _at_ends[task] = _AtEnd()
        torch.autograd.Variable._execution_engine.queue_callback(at_end.compare)
    at_end.found.setdefault(channel, []).append((dispatcher.name, HostCopy(count), other))


@final
class _AtEnd:
    """What a running backward has found out. The backward holds it, so an error in it leaves nothing behind.

    Attributes:
        found: For each channel and dispatch, the name of the dispatcher, the number of different ids, and the error of
            another layout or None.
    """

    def __init__(self) -> None:
        self.found: dict[Channel, list[tuple[str, HostCopy, InputError | None]]] = {}

    def compare(self) -> None:
        """Raise InputError if the ids or a layout of this rank differ, PeerError if those of another rank do.

        A rank may be in several groups, and raises if it hears of a problem in one of them. So it exchanges with all of
        them before it raises, and passes the problem on. Groups that share ranks do so twice, the second time in the
        reverse order, for a problem that came up after a group had exchanged.
        """
        own = {channel: _problem_in(found) for channel, found in self.found.items()}
        problem = next(filter(None, own.values()), None)
        num_groups = len({channel.control.group for channel in own})
        coming = [*own]
        for _ in range(2):
            again = []
            for channel in coming:
                try:
                    values = [int(num_groups > 1)]
                    (shares_ranks,) = raise_alike(
                        channel.control, own[channel] or problem, values=values, label="recompute"
                    )
                    again += [channel] * shares_ranks
                except Exception as error:
                    problem = problem or error
            coming = again[::-1]
        if problem is not None:
            raise problem


def _problem_in(found: list[tuple[str, HostCopy, InputError | None]]) -> Exception | None:
    """Return the error of the dispatches of a channel, or None. Waits for copies from the device."""
    counts = [(name, copy.read()) for name, copy, _ in found]
    problem = next((other for *_, other in found if other is not None), None)
    if problem is None and (wrong := [(name, count) for name, count in counts if count]):
        names = ", ".join(sorted({repr(name) for name, _ in wrong if name}))
        count = sum(count for _, count in wrong)
        problem = InputError(f"Dispatcher.dispatch: {_rule(names)}, got {count} other ids. {_ADVICE}")
    return problem


_at_ends: weakref.WeakValueDictionary[int, _AtEnd] = weakref.WeakValueDictionary()
