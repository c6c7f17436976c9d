"""The arguments of one dispatch of HybridEP, the same for every signature."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, final

from torch import Tensor

from moe_dispatch.testing.emulation.hybrid.routing import Given, Routing


@final
@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Call:
    """The arguments of a dispatch, with or without permute, of any release."""

    hidden: Tensor
    given: Given
    scaling_factor: Tensor | None
    handle: tuple[Any, ...] | None
    permute: bool
    num_of_experts_per_rank: int | None = None
    use_fp8: bool | None = None
    num_permuted_tokens: int | None = None
    pad_multiple: int | None = None
    non_blocking: bool = False
    fused: bool = False
    num_of_tokens_per_rank: int | None = None  # slots, in ragged releases


def slots_of(call: Call, routing: Routing, *, ragged: bool) -> int:
    """Rows of this rank, or in ragged releases the slots that the group shares: a multiple of 16, and at least 16.

    Raises:
        AssertionError: in their words.
        AttributeError: dispatch_with_permute without routing, as theirs.
    """
    rows = call.hidden.shape[0]
    if routing.rows is None:
        assert call.permute, "The handle and routing_map should not be both None"
        raise AttributeError("'NoneType' object has no attribute 'size'")
    what = "routing data" if ragged else "routing_map"
    if call.permute or ragged:
        assert rows == routing.rows.shape[0], f"The hidden and the {what} should have the same row number."
    if not ragged:
        return rows
    slots = rows if call.num_of_tokens_per_rank is None else int(call.num_of_tokens_per_rank)
    assert slots >= rows, f"num_of_tokens_per_rank ({slots}) must be >= the local token count ({rows})"
    return max(16, slots + -slots % 16)


def require_device_sync(settings: Mapping[str, object]) -> None:
    """Without their waiting at the end, what other ranks see depends on timing, which is not emulated."""
    for name in ("device_side_sync_dispatch_api", "device_side_sync_combine_api"):
        if not settings.get(name, True):
            raise NotImplementedError(f"HybridEP: kernels without device-side sync are not emulated, got {name}=False.")


def check_non_blocking(call: Call) -> None:
    """Raises AssertionError in their words (94a9f8f hybrid_ep_buffer.py:351-356)."""
    given, multiple = call.num_permuted_tokens, call.pad_multiple
    assert given is not None, "The num_permuted_tokens is required for non-blocking mode."
    assert given >= 0, "The num_permuted_tokens is required for non-blocking mode."
    if multiple is not None and multiple > 0:
        assert given % multiple == 0, (
            f"num_permuted_tokens ({given}) must be a multiple of pad_multiple ({multiple}) in non-blocking mode."
        )


def without_host_meta(use_host_meta: bool | None, non_blocking: bool, num_dispatched_tokens: int | None) -> bool:
    """non_blocking, as the deprecated arguments change it."""
    if num_dispatched_tokens is not None:
        warn_deprecated("num_dispatched_tokens")
    if use_host_meta is None:
        return non_blocking
    warn_deprecated("use_host_meta")
    return not use_host_meta


def warn_deprecated(name: str) -> None:
    """In their words."""
    warnings.warn(f"The {name} is deprecated, it will be removed in the future.", stacklevel=3)
