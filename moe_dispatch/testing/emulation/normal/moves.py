"""The exchanges of v1's Buffer: rows with their scales, ids and weights to their ranks, and sums of what comes back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from moe_dispatch.testing.emulation.exchange import Exchange
from moe_dispatch.testing.emulation.memory import grown, stacked, take
from moe_dispatch.testing.emulation.normal.calls import Sent
from moe_dispatch.testing.emulation.normal.rows import local_ids


@final
@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Arrived:
    """Rows by source rank, then token; what was not sent is None."""

    x: Tensor
    scales: Tensor | None
    topk_idx: Tensor | None
    topk_weights: Tensor | None


def tokens_for(is_token_in_rank: Tensor) -> list[Tensor]:
    """The tokens that go to each rank, ascending: of bool (T, P)."""
    return [column.nonzero().flatten() for column in is_token_in_rank.unbind(1)]


def move(exchange: Exchange, sent: Sent, tokens: list[Tensor], *, experts_per_rank: int, num_rows: int) -> Arrived:
    """Every row to its ranks, in ``num_rows`` rows there, of which those past the last are not written."""

    def arrived(parts: list[Tensor]) -> Tensor:
        return grown(stacked(exchange.rows(parts)), num_rows)

    x = arrived([take(sent.x, index) for index in tokens])
    scales = None if sent.scales is None else arrived([take(sent.scales, index) for index in tokens])
    if sent.topk_idx is None or sent.topk_weights is None:
        return Arrived(x=x, scales=scales, topk_idx=None, topk_weights=None)
    local = [
        local_ids(sent.topk_idx[index], sent.topk_weights.detach()[index], rank, experts_per_rank)
        for rank, index in enumerate(tokens)
    ]
    ids = stacked(exchange.rows([ids for ids, _ in local]))
    # The kernel marks the tail of the ids, and of nothing else (csrc/kernels/intranode.cu:460-470).
    tail = ids.new_full((num_rows - ids.shape[0], ids.shape[1]), -1)
    weights = arrived([weights for _, weights in local])
    return Arrived(x=x, scales=scales, topk_idx=torch.cat([ids, tail]), topk_weights=weights)


def bring_back(exchange: Exchange, rows: Tensor, back: list[int]) -> list[Tensor]:
    """The first rows to the ranks they came from, ``back[p]`` of them to rank p; what came home, by rank."""
    return exchange.rows(rows[: sum(back)].split(back))


def source_tokens(exchange: Exchange, tokens: list[Tensor]) -> Tensor:
    """int32: which token of its rank each received row is."""
    return stacked(exchange.rows([index.to(torch.int32) for index in tokens]))


def starts_of_channels(exchange: Exchange, counts: Tensor) -> Tensor:
    """int32 (P, C): where each source rank's channels start among the rows it sends here; of its counts (P, C)."""
    starts = (counts.cumsum(1) - counts).to(torch.int32)
    return stacked(exchange.rows(starts.split(1)))
