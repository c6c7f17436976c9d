"""The rows of v1's Buffer: which ranks get a token, in which order rows arrive, their exchange, and their sums.

A rank cuts its tokens into C pieces, one for each channel. Handles hold prefix sums over channels and over ranks.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moe_dispatch_testing.emulation.config import NVL_PEERS
from moe_dispatch_testing.emulation.exchange import Exchange
from moe_dispatch_testing.emulation.memory import grown, stacked, take
from moe_dispatch_testing.emulation.normal.call import DispatchInput, Received


def counts_and_flags(topk_idx: Tensor, num_experts: int, num_ranks: int) -> tuple[Tensor, Tensor]:
    """Count this rank's tokens per expert, int32 (E,), and flag the ranks that own an expert of a token, bool (T, P).

    An id outside 0..E-1, such as -1, is not counted. An expert that a token names twice is counted twice.

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
    """Flag the nodes that each token goes to: bool (T, P / 8)."""
    num_tokens, num_ranks = is_token_in_rank.shape
    return is_token_in_rank.view(num_tokens, num_ranks // NVL_PEERS, NVL_PEERS).any(2)


def channel_counts(is_token_in_rank: Tensor, num_channels: int) -> Tensor:
    """Count this rank's tokens for each rank and channel: int64 (P, C)."""
    num_tokens, num_ranks = is_token_in_rank.shape
    channel = _channel_of(num_tokens, num_channels)
    counts = torch.zeros(num_channels, num_ranks, dtype=torch.int64)
    return counts.index_add_(0, channel, is_token_in_rank.long()).T.contiguous()


def positions_in_channel(is_token_in_rank: Tensor, num_channels: int) -> Tensor:
    """Return the position of each token in its channel's queue to each rank, int32 (T, P). It is -1 for other ranks."""
    goes = is_token_in_rank.long()
    before = goes.cumsum(0) - goes
    counts = channel_counts(is_token_in_rank, num_channels)
    first = (counts.cumsum(1) - counts).T[_channel_of(goes.shape[0], num_channels)]
    return torch.where(is_token_in_rank, before - first, -1).to(torch.int32)


def _channel_of(num_tokens: int, num_channels: int) -> Tensor:
    per_channel = max(1, -(-num_tokens // num_channels))
    return torch.arange(num_tokens) // per_channel


def local_ids(topk_idx: Tensor, topk_weights: Tensor, rank: int, experts_per_rank: int) -> tuple[Tensor, Tensor]:
    """Turn expert ids into local ids of ``rank``. Ids of other ranks' experts become -1, with weight 0."""
    local = topk_idx - rank * experts_per_rank
    is_here = (local >= 0) & (local < experts_per_rank)
    return torch.where(is_here, local, -1), torch.where(is_here, topk_weights, 0.0)


def summed(
    arrived: list[Tensor], came_from: list[Tensor], num_tokens: int, *, start: list[Tensor], width: int
) -> Tensor:
    """Add up ``start``, then the rows of each rank in the order of ranks: float32 (num_tokens, width).

    ``came_from[q]`` are the tokens whose rows ``arrived[q]`` holds. The kernel adds in the same order
    (csrc/kernels/intranode.cu:817-832 of v1.2.1).
    """
    total = torch.zeros(num_tokens, width, dtype=torch.float32)
    for rows in start:
        total += rows.float()
    for rows, tokens in zip(arrived, came_from, strict=True):
        total[tokens] += rows.float()
    return total


def prefix_int32(counts: Tensor, dim: int) -> Tensor:
    """Return inclusive prefix sums, in the dtype of handles."""
    return counts.cumsum(dim).to(torch.int32)


def tokens_for(is_token_in_rank: Tensor) -> list[Tensor]:
    """List the tokens that go to each rank in ascending order, from flags (T, P)."""
    return [column.nonzero().flatten() for column in is_token_in_rank.unbind(1)]


def move(
    exchange: Exchange, sent: DispatchInput, tokens: list[Tensor], *, experts_per_rank: int, num_rows: int
) -> Received:
    """Send every row to its ranks. Return ``num_rows`` rows. Rows after the last received row are uninitialised."""

    def arrived(parts: list[Tensor]) -> Tensor:
        return grown(stacked(exchange.rows(parts)), num_rows)

    x = arrived([take(sent.x, index) for index in tokens])
    scales = None if sent.scales is None else arrived([take(sent.scales, index) for index in tokens])
    if sent.topk_idx is None or sent.topk_weights is None:
        return Received(x=x, scales=scales, topk_idx=None, topk_weights=None)
    local = [
        local_ids(sent.topk_idx[index], sent.topk_weights.detach()[index], rank, experts_per_rank)
        for rank, index in enumerate(tokens)
    ]
    ids = stacked(exchange.rows([ids for ids, _ in local]))
    # The kernel writes -1 to the ids after the last received row. It writes nothing to the other tensors there
    # (csrc/kernels/intranode.cu:460-470).
    tail = ids.new_full((num_rows - ids.shape[0], ids.shape[1]), -1)
    weights = arrived([weights for _, weights in local])
    return Received(x=x, scales=scales, topk_idx=torch.cat([ids, tail]), topk_weights=weights)


def bring_back(exchange: Exchange, rows: Tensor, back: list[int]) -> list[Tensor]:
    """Send ``back[p]`` rows back to rank p. Return by rank the rows that come back to this rank."""
    return exchange.rows(rows[: sum(back)].split(back))


def source_tokens(exchange: Exchange, tokens: list[Tensor]) -> Tensor:
    """Return the index of each received row among the tokens of its source rank, int32 (R,)."""
    return stacked(exchange.rows([index.to(torch.int32) for index in tokens]))


def starts_of_channels(exchange: Exchange, counts: Tensor) -> Tensor:
    """Return the first row of each channel among the rows from each source rank, int32 (P, C), from counts (P, C)."""
    starts = (counts.cumsum(1) - counts).to(torch.int32)
    return stacked(exchange.rows(starts.split(1)))
