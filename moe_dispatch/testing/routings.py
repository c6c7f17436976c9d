"""Tables of expert ids that a scenario can ask for; each is drawn from a seeded generator."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Generator, Tensor

Draw = Callable[[int, int, int, Generator], Tensor]


def balanced(rows: int, top_k: int, num_experts: int, generator: Generator) -> Tensor:
    """Slot by slot to the next expert: equal counts, up to one."""
    return torch.arange(rows * top_k).view(rows, top_k) % num_experts


def uniform(rows: int, top_k: int, num_experts: int, generator: Generator) -> Tensor:
    """Distinct experts at random, in no order."""
    return torch.rand(rows, num_experts, generator=generator).argsort(1)[:, :top_k]


def skewed(rows: int, top_k: int, num_experts: int, generator: Generator) -> Tensor:
    """Distinct experts, the first far more often than the last."""
    odds = torch.arange(1, num_experts + 1).double().pow(-2).expand(rows, -1)
    return torch.multinomial(odds, top_k, generator=generator) if rows else torch.empty(0, top_k, dtype=torch.int64)


def last_expert(rows: int, top_k: int, num_experts: int, generator: Generator) -> Tensor:
    """Everything to the last expert; further slots go nowhere."""
    ids = torch.full((rows, top_k), -1)
    ids[:, 0] = num_experts - 1
    return ids


def first_half(rows: int, top_k: int, num_experts: int, generator: Generator) -> Tensor:
    """Distinct experts of the first half: on several ranks, some ranks get nothing."""
    return uniform(rows, top_k, num_experts // 2, generator)


def duplicates(rows: int, top_k: int, num_experts: int, generator: Generator) -> Tensor:
    """Experts with replacement, and every other row names its first expert in all slots."""
    ids = torch.randint(num_experts, (rows, top_k), generator=generator)
    ids[::2] = ids[::2, :1]
    return ids


def nowhere(rows: int, top_k: int, num_experts: int, generator: Generator) -> Tensor:
    """-1 throughout."""
    return torch.full((rows, top_k), -1)


def partly_nowhere(rows: int, top_k: int, num_experts: int, generator: Generator) -> Tensor:
    """Distinct experts, a third of the slots -1, also the first ones; every fourth row goes nowhere at all."""
    ids = uniform(rows, top_k, num_experts, generator)
    ids[torch.rand(rows, top_k, generator=generator) < 1 / 3] = -1
    ids[::4] = -1
    return ids


ROUTINGS: dict[str, Draw] = {
    draw.__name__: draw
    for draw in (balanced, uniform, skewed, last_expert, first_half, duplicates, nowhere, partly_nowhere)
}
