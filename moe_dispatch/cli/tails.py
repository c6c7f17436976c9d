"""How far sums of many tokens stray from what is expected of them, and how often they pass a bound."""

from __future__ import annotations

import math

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
    deviation = (count * variance).clamp(min=1e-300).sqrt()
    spread = (2 * count * (tilt * mean - log_moment)).clamp(min=0).sqrt() * tilt.sign()
    # At the mean itself the correction is 0 / 0: there it is that of skewness.
    correction = torch.where(
        spread.abs() < 0.02, -count * third / (6 * deviation**3), 1 / (2 * (tilt / 2).sinh() * deviation) - 1 / spread
    )
    density = (-spread.square() / 2).exp() / math.sqrt(2 * math.pi)
    tail = torch.special.erfc(spread / math.sqrt(2)) / 2 + density * correction
    sure = odds.gather(1, largest.long().unsqueeze(1)).squeeze(1) > 1 - 1e-12
    tail = torch.where(sure, (largest * count > limit).double(), tail)
    return torch.where(largest * count <= limit, 0, tail).clamp(0, 1)


def _tilt(odds: Tensor, values: Tensor, target: float) -> Tensor:
    """The exponential weight under which a draw is expected to be ``target``, by bisection."""
    low, high = (torch.full((len(odds),), side * _LARGEST_TILT, dtype=torch.float64) for side in (-1, 1))
    for _ in range(80):
        middle = (low + high) / 2
        too_low = _tilted(odds, values, middle)[1] < target
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


def padding(odds_E: Tensor, count: int, multiple: int) -> tuple[Tensor, Tensor]:
    """Rows that round a count up to a multiple: their mean and variance, exactly, float64 (E,).

    Args:
        odds_E: of a token to be counted, for each of several counts.
        count: of tokens, each counted or not on its own.
        multiple: what the count is rounded up to.
    """
    wheel = torch.arange(multiple, dtype=torch.float64, device="cpu") * (2 * math.pi / multiple)
    turns = torch.polar(torch.ones_like(wheel), wheel)
    remainders = torch.fft.fft((1 + odds_E.unsqueeze(1) * (turns - 1)) ** count).real / multiple
    rows = (-torch.arange(multiple, device="cpu")).remainder(multiple).double()
    mean = (remainders * rows).sum(1)
    return mean, ((remainders * rows.square()).sum(1) - mean.square()).clamp(min=0)
