"""How far sums of many tokens stray from what is expected of them, and how often they pass a bound."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

# How often a range may be left, by any of the ranks it is given for.
MISSES = 1e-3
_LARGEST_TILT = 60.0


def deviation(variance: Tensor, step: float, events: int) -> Tensor:
    """How far a sum of independent terms strays from its mean, in all but ``MISSES`` of the cases.

    Args:
        variance: of each of several such sums, float64.
        step: the most by which a single term may be off its mean.
        events: how many sums are to stay within, all at once, above and below.

    Source: Bernstein's inequality, which holds at any size; some 4.5 standard deviations for large sums.
    """
    bits = math.log(2 * events / MISSES)
    return (2 * bits * variance).sqrt() + step * bits / 3


def above(odds: Tensor, count: int, limit: int) -> Tensor:
    """How likely the sum of ``count`` independent draws exceeds ``limit``.

    Args:
        odds: of a draw of 0, 1, .. J, float64 (B, J+1); rows add up to 1.
        count: of draws.
        limit: the largest sum that is not counted.

    Returns:
        float64 (B,), to about a percent of themselves, also where they are tiny.

    Source: the saddlepoint approximation of tails, Lugannani and Rice 1980, corrected for whole numbers (Daniels 1987).
    """
    values = torch.arange(odds.shape[1], dtype=torch.float64, device="cpu")
    largest = torch.where(odds > 0, values, 0).amax(1)
    target = limit + 0.5
    tilt = _tilt(odds, values, target / max(count, 1))
    log_moment, mean, variance, third = _tilted(odds, values, tilt)
    scale = (count * variance).clamp(min=1e-300).sqrt()
    spread = (2 * count * (tilt * mean - log_moment)).clamp(min=0).sqrt() * tilt.sign()
    # At the mean itself the correction is 0 / 0: there it is that of skewness.
    correction = torch.where(
        spread.abs() < 0.02, -count * third / (6 * scale**3), 1 / (2 * (tilt / 2).sinh() * scale) - 1 / spread
    )
    density = (-spread.square() / 2).exp() / math.sqrt(2 * math.pi)
    tail = torch.special.erfc(spread / math.sqrt(2)) / 2 + density * correction
    sure = odds.gather(1, largest.long().unsqueeze(1)).squeeze(1) > 1 - 1e-12
    tail = torch.where(sure, (largest * count > limit).double(), tail)
    return torch.where(largest * count <= limit, 0, tail).clamp(0, 1)


def any_above(odds: Tensor, count: int, limit: int, *, times: int = 1) -> tuple[float, float]:
    """How likely any of several sums of draws, as in ``above``, exceeds ``limit``: between two bounds.

    There are ``times`` as many sums: so many of each kind.

    Sums that share a fixed total rather exclude each other: it is at least as if they were independent, and at most
    what theirs add up to.
    """
    tails = above(odds, count, limit)
    return float(-torch.expm1(torch.log1p(-tails).sum() * times)), min(1.0, float(tails.sum()) * times)


def largest(odds: Tensor, count: int) -> tuple[int, int, int]:
    """The largest of several sums of draws, as in ``above``: its median, least and most in all but ``MISSES`` cases."""

    def first(is_enough: Callable[[tuple[float, float]], bool]) -> int:
        low, high = 0, count * (odds.shape[1] - 1)
        while low < high:
            middle = (low + high) // 2
            low, high = (low, middle) if is_enough(any_above(odds, count, middle)) else (middle + 1, high)
        return low

    median = first(lambda above: above[0] <= 0.5)
    least = first(lambda above: above[0] < 1 - MISSES / 2)
    return median, least, first(lambda above: above[1] <= MISSES / 2)


def _tilt(odds: Tensor, values: Tensor, target: float) -> Tensor:
    """The exponential weight under which a draw is expected to be ``target``, by bisection."""
    low, high = (torch.full((len(odds),), side * _LARGEST_TILT, dtype=torch.float64) for side in (-1, 1))
    logs = odds.log()
    for _ in range(45):
        middle = (low + high) / 2
        too_low = torch.addcmul(logs, middle.unsqueeze(1), values).softmax(1) @ values < target
        low, high = torch.where(too_low, middle, low), torch.where(too_low, high, middle)
    return (low + high) / 2


def _tilted(odds: Tensor, values: Tensor, tilt: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Logarithm of the moment function, and three cumulants of a draw, under the weight ``exp(tilt * value)``."""
    logs = odds.log() + tilt.unsqueeze(1) * values
    total = logs.logsumexp(1)
    shares = (logs - total.unsqueeze(1)).exp()
    mean = (shares * values).sum(1)
    off = values - mean.unsqueeze(1)
    return total, mean, (shares * off.square()).sum(1), (shares * off**3).sum(1)


def padding_odds(odds_E: Tensor, count: int, multiple: int) -> Tensor:
    """How likely 0, 1, .. rows round a count up to a multiple, exactly: float64 (E, multiple).

    Args:
        odds_E: of a token to be counted, for each of several counts.
        count: of tokens, each counted or not on its own.
        multiple: what the count is rounded up to.
    """
    wheel = torch.arange(multiple, dtype=torch.float64, device="cpu") * (2 * math.pi / multiple)
    turns = torch.polar(torch.ones_like(wheel), wheel)
    remainders = torch.fft.fft((1 + odds_E.unsqueeze(1) * (turns - 1)) ** count).real / multiple
    rows = -torch.arange(multiple, device="cpu") % multiple
    found: Tensor = remainders.index_select(1, rows).clamp(min=0)
    return found


def sum_range(odds: Tensor) -> tuple[Tensor, Tensor]:
    """The bounds that sums keep to in all but ``MISSES`` of the cases, all at once.

    Args:
        odds: of 0, 1, .. J for each of the L terms of each of B sums, float64 (B, L, J+1); terms are independent.

    Returns:
        The least and the most, float64 (B,) each.
    """
    sums, terms, values = odds.shape
    length = terms * (values - 1) + 1
    below = torch.fft.irfft(torch.fft.rfft(odds, n=length).prod(1), n=length).cumsum(1)
    rare = MISSES / (2 * sums)
    return (below <= rare).sum(1).double(), (below < 1 - rare).sum(1).clamp(max=length - 1).double()
