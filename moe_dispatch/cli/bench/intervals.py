"""Compare the run times of two benchmark runs: an interval for their ratio, and a verdict."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import NormalDist

CONFIDENCE = 0.95


def ratio_interval(now: Sequence[float], then: Sequence[float]) -> tuple[float, float] | None:
    """Return the 95 % confidence interval of the ratio of a time now to a time then.

    The interval is that of Hodges and Lehmann: sort the ratios of each time now to each time then, and leave out the
    same number of ratios at both ends. The rank test of Mann and Whitney says how many may be left out. It assumes
    nothing about the distribution of the times. If both sequences have the same distribution, the interval excludes 1
    in at most 5 % of all comparisons. Two starts of the same code on a busy machine may have different distributions,
    and the interval then excludes 1 more often (docs/cli.md has measured rates).

    Example: 5 times now and 5 times then have 25 ratios. 2 ratios are left out at each end, so the interval goes from
    the 3rd to the 23rd ratio.

    Args:
        now: Positive times, such as seconds.
        then: Positive times of the earlier run.

    Returns:
        Both ends of the interval. None if there are too few times to exclude any ratio; 4 of each are enough.
    """
    pairs = len(now) * len(then)
    deviation = math.sqrt(pairs * (len(now) + len(then) + 1) / 12)
    left_out = math.floor(pairs / 2 - 0.5 - NormalDist().inv_cdf((1 + CONFIDENCE) / 2) * deviation)
    if left_out < 0:
        return None
    ratios = sorted(new / old for new in now for old in then)
    return ratios[left_out], ratios[-1 - left_out]


def verdict_of(interval: tuple[float, float] | None) -> str:
    """Say in words what a ratio interval shows."""
    if interval is None:
        return "too few runs to tell"
    low, high = interval
    return "slower" if low > 1 else "faster" if high < 1 else "no difference seen"
