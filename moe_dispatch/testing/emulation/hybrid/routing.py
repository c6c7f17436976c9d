"""The routing that a caller gives a dispatch of HybridEP, as the Python layer of each release turns it into tensors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from moe_dispatch.testing.emulation.refusals import EmulatedAbort

_MOST_IDS = 1 << 15  # ids travel as int16
_MOST_PER_RANK = 512


@final
@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Given:
    """Arguments of a dispatch that say where rows go; all of them may be None."""

    topk_idx: Tensor | None
    topk_weights: Tensor | None
    num_of_experts: int | None
    probs: Tensor | None
    routing_map: Tensor | None


@final
@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Routing:
    """bool (T, E), or with ``topk`` > 0 int16 (T, topk); None with a cached handle. probs float32 (T, E) or None."""

    rows: Tensor | None
    probs: Tensor | None
    topk: int = 0


def indices_to_map(
    topk_idx: Tensor, topk_weights: Tensor | None, num_of_tokens: int, num_of_experts: int
) -> tuple[Tensor, Tensor | None]:
    """The bool map (T, E) and the dense probabilities of ids (T, K) and weights (T, K), float32.

    Raises:
        EmulatedAbort: an id outside [0, E), as -1 is: scatter traps on the GPU (94a9f8f hybrid_ep_buffer.py:24).
    """
    assert topk_idx is not None
    ids = topk_idx.to(torch.int64)
    if bool(((ids < 0) | (ids >= num_of_experts)).any()):
        raise EmulatedAbort(
            "hybrid_ep_buffer.py:24: scatter on the device: Assertion `idx_dim >= 0 && idx_dim < index_size && "
            f'"index out of bounds"` failed: topk_idx must be in [0, {num_of_experts}), got '
            f"{int(ids.min())}..{int(ids.max())}. Route rows to nowhere with a routing_map instead."
        )
    routing_map = torch.zeros(num_of_tokens, num_of_experts, dtype=torch.bool).scatter(1, ids, True)
    if topk_weights is None:
        return routing_map, None
    return routing_map, torch.zeros(num_of_tokens, num_of_experts).scatter(1, ids, topk_weights.detach())


def routing_of(given: Given, num_of_tokens: int, *, experts_always: bool) -> Routing:
    """The bool map of releases without ragged dispatch.

    ``experts_always``: without a routing_map, num_of_experts is required even with a handle (dispatch without permute,
    94a9f8f hybrid_ep_buffer.py:195).

    Raises:
        AssertionError: in their words.
    """
    if given.routing_map is not None:
        assert given.routing_map.dtype == torch.bool
        return Routing(rows=given.routing_map, probs=given.probs)
    if experts_always or given.topk_idx is not None:
        assert given.num_of_experts is not None, "The number of experts should be provided on index-based routing."
    if given.topk_idx is None:
        return Routing(rows=None, probs=given.probs)
    assert given.num_of_experts is not None
    rows, probs = indices_to_map(given.topk_idx, given.topk_weights, num_of_tokens, given.num_of_experts)
    return Routing(rows=rows, probs=probs)


def ragged_routing_of(
    given: Given, num_of_tokens: int, *, experts_per_rank: int, ranks_per_node: int, nodes: int
) -> Routing:
    """The map or the int16 ids of releases with ragged dispatch (744 hybrid_ep_buffer.py:_prepare_routing_data).

    Raises:
        AssertionError: in their words.
    """
    if given.routing_map is not None:
        assert given.routing_map.dtype == torch.bool
        _check_probs(given.probs, num_of_tokens, given.routing_map.shape[-1])
        return Routing(rows=given.routing_map, probs=given.probs)
    if given.topk_idx is None:
        return Routing(rows=None, probs=given.probs)
    experts = given.num_of_experts
    assert experts is not None, "num_of_experts is required with topk_idx"
    expected = experts_per_rank * ranks_per_node * nodes
    assert experts == expected, f"num_of_experts ({experts}) must match the HybridEP layout ({expected})"
    _check_probs(given.probs, num_of_tokens, experts)
    probs = given.probs
    if probs is None and given.topk_weights is not None:
        probs = _summed_probs(given.topk_idx, given.topk_weights, num_of_tokens, experts)
    if experts <= _MOST_IDS and max(experts_per_rank, ranks_per_node) <= _MOST_PER_RANK:
        return Routing(rows=given.topk_idx.to(torch.int16).contiguous(), probs=probs, topk=given.topk_idx.shape[-1])
    return Routing(rows=_map_of_valid(given.topk_idx, num_of_tokens, experts), probs=probs)


def _check_probs(probs: Tensor | None, rows: int, columns: int) -> None:
    if probs is not None:
        assert probs.shape[0] == rows
        assert probs.shape[-1] == columns


def _summed_probs(ids: Tensor, weights: Tensor, rows: int, experts: int) -> Tensor:
    """Ids outside the experts have no weight; an expert named twice gets both."""
    valid = (ids >= 0) & (ids < experts)
    kept = torch.where(valid, weights.detach(), 0).to(torch.float32)
    return torch.zeros(rows, experts).scatter_add_(1, torch.where(valid, ids, 0).to(torch.int64), kept)


def _map_of_valid(ids: Tensor, rows: int, experts: int) -> Tensor:
    valid = (ids >= 0) & (ids < experts)
    counts = torch.zeros(rows, experts, dtype=torch.int32)
    return counts.scatter_add_(1, torch.where(valid, ids, 0).to(torch.int64), valid.to(torch.int32)).bool()


def padded(routing: Routing, slots: int) -> Tensor:
    """Routing rows up to the slots of the group; the rows added go nowhere."""
    assert routing.rows is not None
    out = torch.full((slots, routing.rows.shape[1]), -1 if routing.topk else 0, dtype=routing.rows.dtype)
    out[: routing.rows.shape[0]] = routing.rows
    return out
