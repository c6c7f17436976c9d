"""Routings of all kinds for four ranks, and what a dense layer of all experts computes for them in float64."""

from __future__ import annotations

import random
from functools import lru_cache

import torch
from torch import Tensor

RANKS, EXPERTS, TOP_K, HIDDEN, INNER, TOKENS = 4, 8, 2, 16, 8, 12


def all_weights(hidden: int = HIDDEN) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    up = torch.randn(EXPERTS, hidden, INNER, generator=generator, dtype=torch.float64)
    return up / hidden**0.5, torch.randn(EXPERTS, INNER, hidden, generator=generator, dtype=torch.float64) / 4


def inputs_of(step: int, hidden: int = HIDDEN) -> tuple[Tensor, Tensor, Tensor]:
    """Rows, ids and weights of all ranks, one rank after the other, on the CPU."""
    generator = torch.Generator().manual_seed(step)
    draw, kind = random.Random(step), step % 5
    x = torch.randn(RANKS * TOKENS, hidden, generator=generator, dtype=torch.float64)
    weights = torch.rand(RANKS * TOKENS, TOP_K, generator=generator, dtype=torch.float64)
    scores = torch.rand(RANKS * TOKENS, EXPERTS, generator=generator)
    if kind == 1:  # a hot expert
        scores[:, draw.randrange(EXPERTS)] += 0.9
    ids = scores.argsort(1, descending=True)[:, :TOP_K]
    if kind == 2:  # all rows on one expert
        ids = torch.tensor([draw.randrange(EXPERTS), -1]).repeat(len(x), 1)
    if kind == 3:  # zero rows on some ranks, and a few of the others' slots go nowhere
        ids = ids.masked_fill(torch.rand(ids.shape, generator=generator) < 0.2, -1)
        for rank in draw.sample(range(RANKS), draw.randrange(1, RANKS + 1)):
            ids[rank * TOKENS : (rank + 1) * TOKENS] = -1
    if kind == 4:  # all rows on the experts of one rank
        ids = draw.randrange(RANKS) * 2 + torch.arange(TOP_K).repeat(len(x), 1)
    return x, ids.contiguous(), weights


@lru_cache(maxsize=RANKS)
def dense(step: int, hidden: int = HIDDEN) -> list[Tensor]:
    """Outputs of all ranks, and the gradients of rows, routing weights and parameters, without a dispatcher."""
    x, ids, weights = inputs_of(step, hidden)
    leaves = [each.clone().requires_grad_() for each in (x, weights, *all_weights(hidden))]
    shares = x.new_zeros(len(x), EXPERTS + 1).scatter(1, ids % (EXPERTS + 1), leaves[1])[:, :EXPERTS]
    y = torch.einsum("te,etd->td", shares, torch.tanh(leaves[0] @ leaves[2]) @ leaves[3])
    return [y.detach(), *torch.autograd.grad(y.square().sum(), leaves)]
