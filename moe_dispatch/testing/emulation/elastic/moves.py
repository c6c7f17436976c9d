"""The exchanges of v2's ElasticBuffer: rows to their slots on other ranks, and back to the choices they came from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from moe_dispatch.testing.emulation.elastic.calls import Sent
from moe_dispatch.testing.emulation.exchange import Exchange
from moe_dispatch.testing.emulation.memory import grown, stacked, take, uninitialised


@final
@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Arrived:
    """Rows as they lie in the receive buffer: by source rank, then slot."""

    x: Tensor
    sf: Tensor | None
    topk_idx: Tensor  # of the group, not of this rank
    topk_weights: Tensor  # never written where the sender had none
    token: Tensor
    source: Tensor


def move(exchange: Exchange, sent: Sent, tokens: list[Tensor], counts: list[int]) -> Arrived:
    """``counts[q]`` rows are read from the part of the buffer that rank q writes, whatever it wrote there."""
    weights = sent.topk_weights
    if weights is None:
        weights = uninitialised(sent.topk_idx.shape, torch.float32)

    def arrived(rows: Tensor) -> Tensor:
        parts = exchange.rows([take(rows, index) for index in tokens])
        return stacked([grown(part[:count], count) for part, count in zip(parts, counts, strict=True)])

    return Arrived(
        x=arrived(sent.x),
        sf=None if sent.sf is None else arrived(sent.sf),
        topk_idx=arrived(sent.topk_idx),
        topk_weights=arrived(weights),
        token=arrived(torch.arange(sent.x.shape[0])),
        source=torch.arange(len(counts)).repeat_interleave(torch.tensor(counts)),
    )


@final
@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Returned:
    """What the combine buffer holds for each token and choice, NaN where nobody wrote: (T, K, D) and (T, K, K)."""

    x: Tensor
    topk_weights: Tensor | None


def bring_back(
    exchange: Exchange,
    rows: Tensor,
    topk_weights: Tensor | None,
    *,
    source: Tensor,
    token: Tensor,
    choice: Tensor,
    like: Tensor,
) -> Returned:
    """Row i to token ``token[i]`` of rank ``source[i]``, in the place of its choice; weights (R, K) with it.

    ``like`` (T, K) are the choices of this rank's own tokens.
    """
    num_tokens, num_topk = like.shape
    by_rank = [(source == rank).nonzero().flatten() for rank in range(exchange.size)]

    def arrived(values: Tensor) -> Tensor:
        return stacked(exchange.rows([take(values, index) for index in by_rank]))

    place = arrived(torch.stack([token, choice], dim=1).long())
    is_inside = (place[:, 0] >= 0) & (place[:, 0] < num_tokens)
    at = place[is_inside].unbind(1)
    back = uninitialised((num_tokens, num_topk, rows.shape[1]), rows.dtype)
    back[at] = arrived(rows)[is_inside]
    if topk_weights is None:
        return Returned(x=back, topk_weights=None)
    weights = uninitialised((num_tokens, num_topk, num_topk), torch.float32)
    weights[at] = arrived(topk_weights)[is_inside]
    return Returned(x=back, topk_weights=weights)
