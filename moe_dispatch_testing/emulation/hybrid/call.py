"""The arguments of a HybridEP dispatch, and the routing tensors that each release makes from the arguments."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor

from moe_dispatch_testing.emulation.refusals import EmulatedAbort

_MAX_IDS = 1 << 15  # ids are gathered as int16
_MAX_PER_RANK = 512


@final
@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Call:
    """The arguments of ``dispatch`` or ``dispatch_with_permute`` of any release, without the deprecated arguments."""

    hidden: Tensor
    scaling_factor: Tensor | None
    topk_idx: Tensor | None
    topk_weights: Tensor | None
    num_of_experts: int | None
    probs: Tensor | None
    routing_map: Tensor | None
    handle: tuple[Any, ...] | None
    permute: bool
    num_of_tokens_per_rank: int | None = None  # only in ragged releases: rows of every rank, with padding
    num_of_experts_per_rank: int | None = None
    use_fp8: bool | None = None
    num_permuted_tokens: int | None = None
    pad_multiple: int | None = None
    non_blocking: bool = False
    fused: bool = False

    @property
    def num_rows(self) -> int:
        return self.hidden.shape[0]


@final
@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Routing:
    """The routing of this rank's rows.

    Attributes:
        rows: Map bool (T, E), or ids int16 (T, topk) if ``topk`` > 0. None with a cached handle.
        probs: Probabilities float32 (T, E), or None.
        topk: Number of ids of a row, or 0 for a map.
    """

    rows: Tensor | None
    probs: Tensor | None
    topk: int = 0


def indices_to_map(
    topk_idx: Tensor, topk_weights: Tensor | None, num_of_tokens: int, num_of_experts: int
) -> tuple[Tensor, Tensor | None]:
    """Turn ids (T, K) and weights (T, K) into the bool map (T, E) and float32 probabilities (T, E).

    Raises:
        EmulatedAbort: An id, such as -1, is outside [0, E). On the GPU scatter traps (94a9f8f hybrid_ep_buffer.py:24).
    """
    assert topk_idx is not None
    ids = topk_idx.to(torch.int64)
    if bool(((ids < 0) | (ids >= num_of_experts)).any()):
        raise EmulatedAbort(
            "hybrid_ep_buffer.py:24: scatter on the device: Assertion `idx_dim >= 0 && idx_dim < index_size && "
            f'"index out of bounds"` failed: topk_idx must be in [0, {num_of_experts}), got '
            f"{int(ids.min())}..{int(ids.max())}. To send a row to no expert, pass a routing_map instead."
        )
    routing_map = torch.zeros(num_of_tokens, num_of_experts, dtype=torch.bool).scatter(1, ids, True)
    if topk_weights is None:
        return routing_map, None
    return routing_map, torch.zeros(num_of_tokens, num_of_experts, dtype=torch.float32).scatter(
        1, ids, topk_weights.detach()
    )


def routing_of(call: Call) -> Routing:
    """Make the bool map of releases without ragged dispatch.

    Raises:
        AssertionError: The arguments are not valid. The release raises the same text. Without a routing_map,
            ``dispatch`` requires num_of_experts even with a handle (94a9f8f hybrid_ep_buffer.py:195).
    """
    if call.routing_map is not None:
        assert call.routing_map.dtype == torch.bool
        return Routing(rows=call.routing_map, probs=call.probs)
    if not call.permute or call.topk_idx is not None:
        assert call.num_of_experts is not None, "The number of experts should be provided on index-based routing."
    if call.topk_idx is None:
        return Routing(rows=None, probs=call.probs)
    assert call.num_of_experts is not None
    rows, probs = indices_to_map(call.topk_idx, call.topk_weights, call.num_rows, call.num_of_experts)
    return Routing(rows=rows, probs=probs)


def ragged_routing_of(call: Call, *, experts_per_rank: int, ranks_per_node: int, nodes: int) -> Routing:
    """Make the map or the int16 ids of releases with ragged dispatch (744 hybrid_ep_buffer.py:_prepare_routing_data).

    Raises:
        AssertionError: The arguments are not valid. The release raises the same text.
    """
    if call.routing_map is not None:
        assert call.routing_map.dtype == torch.bool
        _check_probs(call, call.routing_map.shape[-1])
        return Routing(rows=call.routing_map, probs=call.probs)
    if call.topk_idx is None:
        return Routing(rows=None, probs=call.probs)
    experts = call.num_of_experts
    assert experts is not None, "num_of_experts is required with topk_idx"
    expected = experts_per_rank * ranks_per_node * nodes
    assert experts == expected, f"num_of_experts ({experts}) must match the HybridEP layout ({expected})"
    _check_probs(call, experts)
    # An id outside 0..E-1 routes nowhere and has no weight. An expert that a token names twice gets both weights.
    valid = (call.topk_idx >= 0) & (call.topk_idx < experts)
    ids = torch.where(valid, call.topk_idx, 0).to(torch.int64)
    probs = call.probs
    if probs is None and call.topk_weights is not None:
        weights = torch.where(valid, call.topk_weights.detach(), 0).to(torch.float32)
        probs = torch.zeros(call.num_rows, experts, dtype=torch.float32).scatter_add_(1, ids, weights)
    if experts <= _MAX_IDS and max(experts_per_rank, ranks_per_node) <= _MAX_PER_RANK:
        return Routing(rows=call.topk_idx.to(torch.int16).contiguous(), probs=probs, topk=call.topk_idx.shape[-1])
    counts = torch.zeros(call.num_rows, experts, dtype=torch.int32).scatter_add_(1, ids, valid.to(torch.int32))
    return Routing(rows=counts.bool(), probs=probs)


def _check_probs(call: Call, columns: int) -> None:
    if call.probs is not None:
        assert call.probs.shape[0] == call.num_rows
        assert call.probs.shape[-1] == columns


def rows_per_rank(call: Call, routing: Routing, *, ragged: bool) -> int:
    """Return the number of rows that every rank sends.

    It is the number of rows of ``hidden``. In ragged releases, it is ``num_of_tokens_per_rank`` or the number of rows
    of ``hidden``, rounded up to a multiple of 16.

    Raises:
        AssertionError: The arguments are not valid. The release raises the same text.
        AttributeError: ``dispatch_with_permute`` has no routing. The release raises the same error.
    """
    if routing.rows is None:
        assert call.permute, "The handle and routing_map should not be both None"
        raise AttributeError("'NoneType' object has no attribute 'size'")
    what = "routing data" if ragged else "routing_map"
    if call.permute or ragged:
        assert call.num_rows == routing.rows.shape[0], f"The hidden and the {what} should have the same row number."
    if not ragged:
        return call.num_rows
    rows = call.num_rows if call.num_of_tokens_per_rank is None else int(call.num_of_tokens_per_rank)
    assert rows >= call.num_rows, f"num_of_tokens_per_rank ({rows}) must be >= the local token count ({call.num_rows})"
    return max(16, rows + -rows % 16)


def padded(routing: Routing, num_rows: int) -> Tensor:
    """Append rows that route nowhere, up to ``num_rows`` rows."""
    assert routing.rows is not None
    out = torch.full((num_rows, routing.rows.shape[1]), -1 if routing.topk else 0, dtype=routing.rows.dtype)
    out[: routing.rows.shape[0]] = routing.rows
    return out


def require_device_sync(settings: Mapping[str, object]) -> None:
    """Refuse kernels that do not wait for each other, because their results would depend on timing."""
    for name in ("device_side_sync_dispatch_api", "device_side_sync_combine_api"):
        if not settings.get(name, True):
            raise NotImplementedError(
                f"HybridEP: kernels without device-side sync are not emulated, got {name}=False. Leave it at True."
            )


def check_non_blocking(call: Call) -> None:
    """Make the checks of a non-blocking call, with the texts of the release (94a9f8f hybrid_ep_buffer.py:351-356)."""
    given, multiple = call.num_permuted_tokens, call.pad_multiple
    assert given is not None, "The num_permuted_tokens is required for non-blocking mode."
    assert given >= 0, "The num_permuted_tokens is required for non-blocking mode."
    if multiple is not None and multiple > 0:
        assert given % multiple == 0, (
            f"num_permuted_tokens ({given}) must be a multiple of pad_multiple ({multiple}) in non-blocking mode."
        )


def non_blocking_of(use_host_meta: bool | None, non_blocking: bool, num_dispatched_tokens: int | None) -> bool:
    """Return ``non_blocking``, or the value that the deprecated ``use_host_meta`` stands for. Warn of deprecations."""
    if num_dispatched_tokens is not None:
        warn_deprecated("num_dispatched_tokens")
    if use_host_meta is None:
        return non_blocking
    warn_deprecated("use_host_meta")
    return not use_host_meta


def warn_deprecated(name: str) -> None:
    """Warn that an argument is deprecated, with the text of the release."""
    warnings.warn(f"The {name} is deprecated, it will be removed in the future.", stacklevel=3)
