"""The arithmetic of v1's Buffer: who gets which token, in which order, and how it comes back. No process group here.

A rank cuts its tokens into ``num_channels`` pieces; prefix sums over these and over ranks are what handles hold.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moe_dispatch.testing.emulation.config import NVL_PEERS


def recipients(topk_idx: Tensor, num_experts: int, num_ranks: int) -> tuple[Tensor, Tensor]:
    """Tokens of this rank per expert int32 (E,), and bool (T, P): does a rank own one of the token's experts?

    Ids outside the experts count for nobody, -1 among them; an expert named twice by a token counts twice.
    Source: csrc/kernels/layout.cu of v1.2.1.
    """
    experts_per_rank = num_experts // num_ranks
    counted = topk_idx[(topk_idx >= 0) & (topk_idx < num_experts)]
    per_expert = torch.bincount(counted, minlength=num_experts).to(torch.int32)
    owned = (topk_idx >= 0) & (topk_idx < experts_per_rank * num_ranks)
    owner = torch.where(owned, topk_idx // max(1, experts_per_rank), num_ranks)
    in_rank = torch.zeros(topk_idx.shape[0], num_ranks + 1, dtype=torch.bool).scatter_(1, owner, True)
    return per_expert, in_rank[:, :num_ranks].contiguous()


def nodes_of(is_token_in_rank: Tensor) -> Tensor:
    """bool (T, P / 8): which token goes to which node."""
    num_tokens, num_ranks = is_token_in_rank.shape
    return is_token_in_rank.view(num_tokens, num_ranks // NVL_PEERS, NVL_PEERS).any(2)


def channel_counts(is_token_in_rank: Tensor, num_channels: int) -> Tensor:
    """int64 (P, C): how many of this rank's tokens each channel takes to each rank."""
    num_tokens, num_ranks = is_token_in_rank.shape
    channel = _channel_of(num_tokens, num_channels)
    counts = torch.zeros(num_channels, num_ranks, dtype=torch.int64)
    return counts.index_add_(0, channel, is_token_in_rank.long()).T.contiguous()


def positions_in_channel(is_token_in_rank: Tensor, num_channels: int) -> Tensor:
    """int32 (T, P): the token's place in its channel's queue to each rank, -1 where it does not go."""
    goes = is_token_in_rank.long()
    before = goes.cumsum(0) - goes
    counts = channel_counts(is_token_in_rank, num_channels)
    first = (counts.cumsum(1) - counts).T[_channel_of(goes.shape[0], num_channels)]
    return torch.where(is_token_in_rank, before - first, -1).to(torch.int32)


def _channel_of(num_tokens: int, num_channels: int) -> Tensor:
    per_channel = max(1, -(-num_tokens // num_channels))
    return torch.arange(num_tokens) // per_channel


def local_ids(topk_idx: Tensor, topk_weights: Tensor, rank: int, experts_per_rank: int) -> tuple[Tensor, Tensor]:
    """Ids as ``rank`` numbers its own experts, -1 for the others, with weight 0 there."""
    local = topk_idx - rank * experts_per_rank
    is_here = (local >= 0) & (local < experts_per_rank)
    return torch.where(is_here, local, -1), torch.where(is_here, topk_weights, 0.0)


def summed(
    arrived: list[Tensor], came_from: list[Tensor], num_tokens: int, *, start: list[Tensor], width: int
) -> Tensor:
    """float32 (num_tokens, width): ``start`` added up, then the rows of each rank in the order of ranks.

    ``came_from[q]`` are the tokens whose rows ``arrived[q]`` holds. The order of additions is the kernel's
    (csrc/kernels/intranode.cu:817-832 of v1.2.1).
    """
    total = torch.zeros(num_tokens, width)
    for rows in start:
        total += rows.float()
    for rows, tokens in zip(arrived, came_from, strict=True):
        total[tokens] += rows.float()
    return total


def prefix_int32(counts: Tensor, dim: int) -> Tensor:
    """Inclusive prefix sums, in the type that handles have."""
    return counts.cumsum(dim).to(torch.int32)
