"""Compare the times of two benchmark runs: an interval for their ratio, and a verdict."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import NormalDist

CONFIDENCE = 0.95
NEEDED_STARTS = 4


def ratio_interval(now: Sequence[float], then: Sequence[float]) -> tuple[float, float] | None:
    """Return the 95 % confidence interval of the ratio of a time now to a time then.

    Each time belongs to a start: to processes of its own. Runs of one start share the placement of their memory and
    the load of the machine, so they say nothing about another start, and only one time of each start is compared.

    The interval is that of Hodges and Lehmann: sort the ratios of each time now to each time then, and leave out the
    same number of ratios at both ends. The rank test of Mann and Whitney says how many may be left out. It assumes
    nothing about the distribution of the times. If both sequences have the same distribution, the interval excludes 1
    in at most 5 % of all comparisons.

    Example: 5 times now and 5 times then have 25 ratios. 2 ratios are left out at each end, so the interval goes from
    the 3rd to the 23rd ratio.

    Args:
        now: Time of each start of this run, above 0.
        then: Time of each start of the earlier run.

    Returns:
        Both ends of the interval. None if a sequence has fewer than ``NEEDED_STARTS`` times: all ratios of 3 times now
        and 3 times then are above 1 in 5 % of all comparisons, and below 1 in another 5 %.
    """
    if min(len(now), len(then)) < NEEDED_STARTS:
        return None
    pairs = len(now) * len(then)
    deviation = math.sqrt(pairs * (len(now) + len(then) + 1) / 12)
    left_out = math.floor(pairs / 2 - 0.5 - NormalDist().inv_cdf((1 + CONFIDENCE) / 2) * deviation)
    ratios = sorted(new / old for new in now for old in then)
    return ratios[left_out], ratios[-1 - left_out]


def verdict_of(interval: tuple[float, float]) -> str:
    """Say in words what a ratio interval shows."""
    low, high = interval
    return "slower" if low > 1 else "faster" if high < 1 else "no difference seen"
