"""Marks: a number that a rank sends with its counts, so that all ranks hear of a mistake before rows travel.

A mark is -1 if its rank refuses the call. Otherwise it is ``WANTS_WEIGHTS * w + 64 * facts + dispatcher``. Here ``w``
is 1 if the weights of the rank require grad, ``facts`` are 15 bits of a digest of what must be equal on all ranks, and
``dispatcher`` is 1 to 63 for the dispatcher and its calls so far (``Trail.marked``), or 0 if the rank does not know it,
as in compiled code.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from moe_dispatch.communication import digest

MARKED_DISPATCHERS = 64
"""Numbers of dispatchers that marks tell apart, with 0 for an unknown one."""

WANTS_WEIGHTS = 2**21
"""Added to the mark of a rank whose weights require grad."""


def encoded(facts: Mapping[str, Any], *, wants_weights: bool) -> int:
    """Return the mark of a call whose dispatcher is not known.

    Args:
        facts: What must be equal on all ranks, by name.
        wants_weights: Whether the weights of this rank require grad.
    """
    return digest(facts) * MARKED_DISPATCHERS % WANTS_WEIGHTS + WANTS_WEIGHTS * wants_weights


def marks_agree(marks: Collection[int]) -> bool:
    """Return whether no rank refuses, and all make the same call, from the marks of all ranks.

    Ranks may differ in ``WANTS_WEIGHTS``. A rank that does not know its dispatcher agrees with one that does: some
    ranks may have fallen back from compiled code to eager mode.
    """
    if min(marks) < 0:
        return False
    calls = {mark % WANTS_WEIGHTS for mark in marks}
    if len(calls) == 1:  # in nearly every call
        return True
    dispatchers = {call % MARKED_DISPATCHERS for call in calls} - {0}
    return len(dispatchers) <= 1 and len({call // MARKED_DISPATCHERS for call in calls}) == 1
