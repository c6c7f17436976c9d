"""How many of a token's experts lie in each block of experts, where routers choose at random: exact, nothing is drawn.

A token names ``top_k`` different experts, one after the other, each with odds in proportion to its popularity among
those still left: what a router does whose logits are the logarithms of the popularities plus Gumbel noise. The same
experts come of clocks that ring once, each after an exponential time of its expert's rate: the first ``top_k`` to ring.
At a given time clocks are independent, so how many have rung in a block is a sum of independent events, and one
integral over the time of the last ring is all that is left.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

_STEPS, _WINDOW = 192, 64  # of the integral, in log time; and how many are in memory at once
_NEGLIGIBLE = math.log(1e-12)  # odds of a last ring outside of the times looked at


def popularity(num_experts: int, exponent: float, seed: int) -> Tensor:
    """Odds of each expert, float64 (E,), adding up to 1: equal, or Zipf's, ``rank ** -exponent`` in a drawn order."""
    odds = torch.arange(1, num_experts + 1, dtype=torch.float64, device="cpu").pow(-exponent)
    order = torch.randperm(num_experts, generator=torch.Generator().manual_seed(seed), device="cpu")
    return (odds / odds.sum())[order]


def block_picks(odds_E: Tensor, top_k: int, num_blocks: int) -> Tensor:
    """How likely a token has 0, 1, .. K of its experts in each of the blocks that the experts are divided in.

    Args:
        odds_E: float64 (E,), adding up to 1; all above 0.
        top_k: experts that a token names, at most E.
        num_blocks: equal ones, of consecutive experts; divides E.

    Returns:
        float64 (B, K+1); rows add up to 1. Accurate to some 1e-6.

    Cost: time and memory of B * K^2; a second or two for 512 blocks and K of 8.
    """
    times = _times(odds_E, top_k)
    found = torch.zeros(num_blocks, top_k + 1, dtype=torch.float64, device="cpu")
    for start in range(0, _STEPS, _WINDOW):
        found += _integral(odds_E, top_k, num_blocks, times[start : start + _WINDOW + 1])
    count, size = torch.arange(top_k + 1, device="cpu"), len(odds_E) // num_blocks
    possible = (count <= size) & (top_k - count <= len(odds_E) - size)
    found = torch.where(possible, found.clamp(min=0), 0)  # what rounding left of the rest would count in far tails
    return found / found.sum(1, keepdim=True)


def draw_ids(odds_E: Tensor, top_k: int, num_tokens: int, seed: int) -> Tensor:
    """Experts of so many tokens, int64 (T, K), drawn by the clocks."""
    uniform = torch.rand(num_tokens, len(odds_E), dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    return (-uniform.clamp(min=1e-300).log() / odds_E).topk(top_k, dim=1, largest=False).indices


def _times(odds_E: Tensor, top_k: int) -> Tensor:
    """Where the ring number K may be: before, so many are too many for the expected number of rings; after, too few."""
    last = math.log(40 / float(odds_E.min()))  # by then all have rung
    times = torch.linspace(_NEGLIGIBLE, last, 2000, dtype=torch.float64, device="cpu").exp()
    expected = torch.cat([-torch.expm1(-part.unsqueeze(1) * odds_E).sum(1) for part in times.split(100)])
    # Chernoff's bound for sums of independent events, of at least K and of at most K - 1 of them.
    reached = top_k * (1 + (expected / top_k).log()) - expected
    below = top_k - 1
    missed = below - expected + (below * (expected / below).log() if below else 0)
    early = (expected < top_k) & (reached < _NEGLIGIBLE)
    late = (expected > top_k) & (missed < _NEGLIGIBLE)
    first = float(times[int(early.sum()) - 1 if early.any() else 0].log())
    if late.any():
        last = float(times[late][0].log())
    return torch.linspace(first, last, _STEPS + 1, dtype=torch.float64, device="cpu").exp()


def _integral(odds_E: Tensor, top_k: int, num_blocks: int, times: Tensor) -> Tensor:
    """The share of (B, K+1) that falls to tokens whose last ring is in this stretch of times."""
    rung = -torch.expm1(-times.unsqueeze(1) * odds_E).view(len(times), num_blocks, -1)
    inside = _start(num_blocks, len(times), top_k)
    for member in range(rung.shape[2]):
        odds = rung[:, :, member].t().unsqueeze(2)
        inside = inside * (1 - odds) + _shifted(inside) * odds
    outside = _all_but_one(inside)
    halved = _last_rings(inside[:, ::2], outside[:, ::2])
    return (4 * _last_rings(inside, outside) - halved) / 3  # Richardson's: the error of the square of a step is gone


def _last_rings(inside: Tensor, outside: Tensor) -> Tensor:
    """The last ring is in the block, or outside: either way one side grows by one while the other stands."""
    elsewhere = outside.flip(2)  # j in the block go with K - j outside
    grows, grows_elsewhere = _at_least(inside), _at_least(outside).flip(2)
    return (_steps(grows) * _means(elsewhere) + _means(inside) * _steps(grows_elsewhere)).sum(1)


def _start(num_blocks: int, points: int, top_k: int) -> Tensor:
    """Distributions of a count that is 0, (B, G, K+1)."""
    start = torch.zeros(num_blocks, points, top_k + 1, dtype=torch.float64, device="cpu")
    start[..., 0] = 1
    return start


def _shifted(counts: Tensor) -> Tensor:
    return torch.nn.functional.pad(counts[..., :-1], (1, 0))


def _all_but_one(inside: Tensor) -> Tensor:
    """For each block the distribution of the count in all others, (B, G, K+1), without a division."""
    size, before, after = len(inside), torch.empty_like(inside), torch.empty_like(inside)
    before[0] = after[-1] = _start(1, inside.shape[1], inside.shape[2] - 1)[0]
    for block in range(1, size):
        before[block] = _sum(before[block - 1], inside[block - 1])
        after[-1 - block] = _sum(after[-block], inside[-block])
    return _sum(before, after)


def _sum(left: Tensor, right: Tensor) -> Tensor:
    """The distribution of the sum of two counts, as far as K."""
    total = left[..., :1] * right
    for count in range(1, left.shape[-1]):
        total[..., count:] += left[..., count : count + 1] * right[..., :-count]
    return total


def _at_least(counts: Tensor) -> Tensor:
    """How likely a count has reached 0, 1, .. K."""
    return 1 - _shifted(counts).cumsum(2)


def _steps(values: Tensor) -> Tensor:
    return values[:, 1:] - values[:, :-1]


def _means(values: Tensor) -> Tensor:
    return (values[:, 1:] + values[:, :-1]) / 2
