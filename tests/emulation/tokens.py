"""Seeded rows of every rank, and what each rank must receive and get back: computed from all ranks' data at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tests.ranks import run_ranks as run_ranks

# Groups live on from test to test: whatever the emulation refuses, all ranks leave a call after the same collectives.
HIDDEN, TOP_K, NUM_EXPERTS = 256, 3, 8


@dataclass(frozen=True, eq=False)
class Tokens:
    x: Tensor
    topk_idx: Tensor
    topk_weights: Tensor


def make_tokens(counts: Sequence[int], *, num_experts: int = NUM_EXPERTS, seed: int = 0) -> list[Tokens]:
    """One ``Tokens`` per rank. A fifth of the ids are -1; the last token of a rank goes nowhere at all."""
    generator = torch.Generator().manual_seed(seed)
    made = []
    for count in counts:
        order = torch.rand(count, num_experts, generator=generator).argsort(1)[:, :TOP_K]
        ids = torch.where(torch.rand(count, TOP_K, generator=generator) < 0.2, -1, order)
        ids[-1:] = -1
        x = torch.randn(count, HIDDEN, generator=generator).bfloat16()
        made.append(Tokens(x, ids, torch.rand(count, TOP_K, generator=generator)))
    return made


def local(ids: Tensor, rank: int, size: int, num_experts: int = NUM_EXPERTS) -> Tensor:
    """Ids as the rank numbers its experts; -1 elsewhere."""
    experts = num_experts // size
    here = ids - rank * experts
    return torch.where((ids >= 0) & (here >= 0) & (here < experts), here, -1)


def goes_to(tokens: Tokens, rank: int, size: int, num_experts: int = NUM_EXPERTS) -> Tensor:
    """The tokens with an expert on the rank, ascending."""
    return (local(tokens.topk_idx, rank, size, num_experts) >= 0).any(1).nonzero().flatten()


def expected_rows(everyone: list[Tokens], rank: int, num_experts: int = NUM_EXPERTS) -> tuple[Tensor, Tensor, Tensor]:
    """Rows, local ids and weights that a rank receives, by source rank and token, each token once."""
    size = len(everyone)
    x, ids, weights = [], [], []
    for tokens in everyone:
        index = goes_to(tokens, rank, size, num_experts)
        x.append(tokens.x[index])
        ids.append(local(tokens.topk_idx[index], rank, size, num_experts))
        weights.append(torch.where(ids[-1] >= 0, tokens.topk_weights[index], 0.0))
    return torch.cat(x), torch.cat(ids), torch.cat(weights)


def rows_per_expert(everyone: list[Tokens], rank: int, num_experts: int = NUM_EXPERTS) -> list[int]:
    """Rows of each expert of the rank, from all ranks."""
    experts = num_experts // len(everyone)
    ids = torch.cat([tokens.topk_idx.flatten() for tokens in everyone])
    return [int((ids == expert).sum()) for expert in range(rank * experts, (rank + 1) * experts)]


def outcome(call: Callable[[], object]) -> str:
    """What a call did on this rank: "returned", or the error with its type."""
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "returned"


Call = Callable[[Any, "Tokens"], object]


def call_on_two_ranks(open_buffer: Callable[[Any], Any], call: Call) -> list[str]:
    """The same call on two ranks that hold tokens and an open buffer; how it ended on each."""
    everyone = make_tokens((5, 7))

    def body(group: dist.ProcessGroup) -> str:
        buffer = open_buffer(group)
        return outcome(lambda: call(buffer, everyone[group.rank()]))

    return run_ranks(body, 2)
