"""Report that a recomputation differs from its forward, such as in the experts that its router has chosen."""

from __future__ import annotations

import weakref
from typing import final

import torch
from torch import Tensor

from moe_dispatch.communication import HostCopy, raise_alike
from moe_dispatch.dispatchers.channel import Channel, Lease
from moe_dispatch.errors import InputError

# What the router of a recomputation must do, what was counted, and what to do.
_RULES = (
    (
        "must choose the experts of its forward",
        "other ids",
        "The gradients of this router are wrong. Give it the ids of the forward by moe_dispatch.recompute.keep_ids, or "
        "let it choose the same each time.",
    ),
    (
        "must give the weights of its forward",
        "other weights",
        "The gradients of this router are wrong. Keep its noise by moe_dispatch.recompute.keep_ids too, or draw it "
        "from a generator that the checkpoint restores.",
    ),
)


def _rule(names: str, rule: str) -> str:
    return f"in a recomputation, the router{f' of {names}' * bool(names)} {rule}"


def report(lease: Lease, counts: Tensor, problem: InputError | None = None) -> None:
    """Report how a recomputed dispatch differs from that of its forward.

    In graph-safe mode ``Dispatcher.check`` raises. Otherwise the backward does when it is done: one exchange then tells
    all ranks, however many dispatches were recomputed.

    Args:
        lease: Lease of the dispatcher.
        counts: int64 (2,), the numbers of other ids and of other weights.
        problem: Another difference, which the host knows.
    """
    channel = lease.channel
    if channel.config.graph_safe:
        if problem is not None:
            channel.meter.report(str(problem), torch.ones_like(counts[0]))
        for (rule, _, advice), count in zip(_RULES, counts, strict=True):
            channel.meter.report(f"{_rule(repr(lease.name) * bool(lease.name), rule)}. {advice}", count)
        return
    found = lease.name, HostCopy(counts), problem
    task = torch._C._current_graph_task_id()
    if task == -1:  # somebody reads what the graph has saved, without a backward
        alone = _AtEnd()
        alone.found[channel] = [found]
        return alone.compare()
    at_end = _at_ends.get(task)
    if at_end is None:
        at_end = _at_ends[task] = _AtEnd()
        torch.autograd.Variable._execution_engine.queue_callback(at_end.compare)
    at_end.found.setdefault(channel, []).append(found)


@final
class _AtEnd:
    """What a running backward has found out. The backward holds it, so an error in it leaves nothing behind.

    Attributes:
        found: For each channel and dispatch, the name of the dispatcher, the numbers of other ids and weights, and the
            error of another difference or None.
    """

    def __init__(self) -> None:
        self.found: dict[Channel, list[tuple[str, HostCopy, InputError | None]]] = {}

    def compare(self) -> None:
        """Raise InputError if something differs on this rank, PeerError if it does on another rank.

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
    by_name = [(name, copy.read()) for name, copy, _ in found]
    problem = next((other for *_, other in found if other is not None), None)
    for kind, (rule, what, advice) in enumerate(_RULES):
        wrong = [(name, counts[kind]) for name, counts in by_name if counts[kind]]
        if problem is None and wrong:
            names = ", ".join(sorted({repr(name) for name, _ in wrong if name}))
            count = sum(count for _, count in wrong)
            problem = InputError(f"Dispatcher.dispatch: {_rule(names, rule)}, got {count} {what}. {advice}")
    return problem


_at_ends: weakref.WeakValueDictionary[int, _AtEnd] = weakref.WeakValueDictionary()
