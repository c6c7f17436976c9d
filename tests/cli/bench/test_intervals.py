"""The interval of a ratio: how often it is wrong where nothing changed, and what it finds where something did."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from moe_dispatch_tools.bench.command import SAVED_STARTS
from moe_dispatch_tools.bench.intervals import ratio_interval, verdict_of

TRIALS = 2000
RUNS = 10
SCATTER = 0.1  # standard deviation of the logarithm of a time within a start, as in docs/performance.md


def simulated(starts: int, spread: float) -> torch.Tensor:
    """Draw the times of pairs of benchmark runs, (TRIALS, 2, starts, RUNS).

    On a busy machine one start in ten, and one run in ten, takes 1.5 times as long.

    Args:
        starts: Starts of each side.
        spread: Standard deviation of the logarithm of a factor that all runs of a start share.
    """
    generator = torch.Generator().manual_seed(starts)

    def factors(deviation: float, *shape: int) -> torch.Tensor:
        drawn = (deviation * torch.randn(shape, generator=generator)).exp()
        return torch.where(torch.rand(shape, generator=generator) < 0.1, 1.5 * drawn, drawn)

    return factors(spread, TRIALS, 2, starts, 1) * factors(SCATTER, TRIALS, 2, starts, RUNS)


def verdicts(times: torch.Tensor, factor: float = 1.0) -> list[str]:
    """Return the verdict of each trial on times (TRIALS, 2, units), if the code has become ``factor`` times as slow."""
    found = []
    for now, then in times.tolist():
        interval = ratio_interval([factor * time for time in now], then)
        assert interval is not None
        found.append(verdict_of(interval))
    return found


@pytest.mark.parametrize("spread", [0.0, 0.1, 0.3])
@pytest.mark.parametrize("starts", [4, 5, SAVED_STARTS, 10])
def test_identical_code_is_rarely_called_different(starts: int, spread: float) -> None:
    found = verdicts(simulated(starts, spread).quantile(0.5, dim=-1))
    assert 1 - found.count("no difference seen") / TRIALS <= 0.05


def test_runs_of_a_start_are_no_units() -> None:
    """What this guards against: with all runs of all starts as units, half of all verdicts are false."""
    found = verdicts(simulated(SAVED_STARTS, 0.1)[:100].flatten(2))
    assert found.count("no difference seen") < 70


@pytest.mark.parametrize(
    ("starts", "factor", "least"), [(SAVED_STARTS, 1.5, 0.85), (SAVED_STARTS, 2.0, 0.99), (10, 1.3, 0.85)]
)
def test_differences_are_found(starts: int, factor: float, least: float) -> None:
    medians = simulated(starts, 0.1).quantile(0.5, dim=-1)
    for change, verdict in ((factor, "slower"), (1 / factor, "faster")):
        found = verdicts(medians, change)
        assert found.count(verdict) / TRIALS > least
        assert set(found) <= {verdict, "no difference seen"}


@pytest.mark.parametrize(("now", "then"), [(1, 30), (3, 3), (3, 9), (4, 4), (5, 5), (4, 8), (6, 6)])
def test_false_alarms_of_every_order_are_at_most_5_percent(now: int, then: int) -> None:
    """Without a difference, all orders of the runs are equally likely: count those that are called different."""
    ranks = range(1, now + then + 1)
    alarms = 0
    for chosen in itertools.combinations(ranks, now):
        others = [rank for rank in ranks if rank not in chosen]
        interval = ratio_interval(chosen, others)
        alarms += interval is not None and not interval[0] <= 1 <= interval[1]
    assert alarms / math.comb(now + then, now) <= 0.05
    assert (alarms > 0) == (now > 3)


def test_interval_by_hand() -> None:
    """Of 25 ratios the third to the 23rd."""
    now, then = [2.0, 4.0, 8.0, 16.0, 32.0], [1.0, 1.0, 1.0, 1.0, 1.0]
    assert ratio_interval(now, then) == (2.0, 32.0)
    assert ratio_interval(then, now) == (1 / 32, 1 / 2)
    assert ratio_interval(now, now) == (1 / 8, 8.0)
    assert ratio_interval(now[:3], then[:3]) is None
    assert ratio_interval([], then) is None
