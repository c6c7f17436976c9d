"""The interval of a ratio: how often it is wrong where nothing changed, and what it finds where something did."""

from __future__ import annotations

import inspect
import itertools
import math

import pytest
import torch

from moe_dispatch.cli.app import bench_command
from moe_dispatch.cli.bench.intervals import ratio_interval, verdict_of

TRIALS = 2000
SCATTER = 0.1  # standard deviation of the logarithm of a time, as in docs/performance.md


def verdicts(runs: int, factor: float) -> list[str]:
    """Return the verdicts on random pairs of benchmark runs. On a busy machine one time in ten is 1.5 times as long."""
    generator = torch.Generator().manual_seed(runs)
    times = (SCATTER * torch.randn(TRIALS, 2, runs, generator=generator)).exp()
    slow = torch.rand(TRIALS, 2, runs, generator=generator) < 0.1
    times = torch.where(slow, 1.5 * times, times)
    return [verdict_of(ratio_interval([factor * time for time in now], then)) for now, then in times.tolist()]


@pytest.mark.parametrize("runs", [3, 5, 10, 20])
def test_identical_code_is_rarely_called_different(runs: int) -> None:
    found = verdicts(runs, 1.0)
    assert sum(verdict in ("slower", "faster") for verdict in found) / TRIALS <= 0.05
    assert ("too few runs to tell" in found) == (runs == 3)


@pytest.mark.parametrize(("factor", "verdict"), [(1.3, "slower"), (1 / 1.3, "faster")])
def test_a_difference_of_1_3_times_is_found_by_default(factor: float, verdict: str) -> None:
    iterations = inspect.signature(bench_command).parameters["iterations"].default
    found = verdicts(iterations, factor)
    assert found.count(verdict) / TRIALS > 0.9
    assert set(found) <= {verdict, "no difference seen"}


@pytest.mark.parametrize(("now", "then"), [(1, 30), (2, 9), (3, 3), (3, 6), (4, 4), (5, 5), (4, 8), (6, 6)])
def test_false_alarms_of_every_order_are_at_most_5_percent(now: int, then: int) -> None:
    """Without a difference, all orders of the runs are equally likely: count those that are called different."""
    ranks = range(1, now + then + 1)
    alarms = 0
    for chosen in itertools.combinations(ranks, now):
        others = [rank for rank in ranks if rank not in chosen]
        interval = ratio_interval(chosen, others)
        alarms += interval is not None and not interval[0] <= 1 <= interval[1]
    assert alarms / math.comb(now + then, now) <= 0.05
    assert (alarms > 0) == ((now, then) != (3, 3) and now > 1)


def test_interval_by_hand() -> None:
    """Of 25 ratios the third to the 23rd."""
    now, then = [2.0, 4.0, 8.0, 16.0, 32.0], [1.0, 1.0, 1.0, 1.0, 1.0]
    assert ratio_interval(now, then) == (2.0, 32.0)
    assert ratio_interval(then, now) == (1 / 32, 1 / 2)
    assert ratio_interval(now, now) == (1 / 8, 8.0)
    assert ratio_interval(now[:3], then[:3]) is None
    assert ratio_interval([], then) is None
