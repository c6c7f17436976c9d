"""The handle of a dispatch of HybridEP: a dataclass inside the emulation, a plain tuple outside, as in the real one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, final

from torch import Tensor

from moe_dispatch.testing.emulation.arguments import unpacked
from moe_dispatch.testing.emulation.hybrid.config import HybridEpConfigInstance


@final
@dataclass(kw_only=True, slots=True)
class Handle:
    """``HandleImpl`` of the binding; None where the real one holds an undefined tensor.

    Shapes, with T rows a rank, P ranks in N nodes of M, L experts a rank and n rows received:
    sparse_to_dense_map int32 (N*T, M); rdma_to_attn_map bool (T up to 16, N), laid out by node; attn_to_rdma_map bool
    (T, N-1); num_dispatched_tokens_tensor int32 (1,); local_expert_routing_map bool (P*T, L), n rows written;
    dense_chunk_layout int32 (chunks,), inclusive; dense_to_expert_map int32 (P*T, L), n rows written, -1 for none;
    row_id_map int32 (capacity*P + pad_multiple, L), counted from 1, negative for padding, 0 for none;
    tokens_per_expert int32 (L,), without padding beside a dense map and with it beside a row_id_map;
    padded_tokens_per_expert int64 (L,), which no tuple carries; overflow_flag int32 (1,).
    """

    sparse_to_dense_map: Tensor
    rdma_to_attn_map: Tensor
    attn_to_rdma_map: Tensor
    num_dispatched_tokens_tensor: Tensor
    local_expert_routing_map: Tensor
    num_of_tokens_per_rank: int
    config: HybridEpConfigInstance
    dense_chunk_layout: Tensor | None = None
    dense_to_expert_map: Tensor | None = None
    row_id_map: Tensor | None = None
    tokens_per_expert: Tensor | None = None
    padded_tokens_per_expert: Tensor | None = None
    overflow_flag: Tensor | None = None
    num_permuted_tokens: int = -1
    num_of_valid_tokens: int = -1

    @property
    def num_dispatched(self) -> int:
        return int(self.num_dispatched_tokens_tensor)

    @property
    def valid_tokens(self) -> int:
        """Rows that combine returns."""
        return self.num_of_tokens_per_rank if self.num_of_valid_tokens < 0 else self.num_of_valid_tokens

    def agreed(self, *, with_probs: bool) -> dict[str, object]:
        """Values that every rank must pass alike to a dispatch or combine with this handle."""
        return {"num_of_tokens_per_rank": self.num_of_tokens_per_rank, "with_probs": with_probs}

    def packed(self, names: Sequence[str]) -> tuple[Any, ...]:
        return tuple(getattr(self, name) for name in names)


def handle_of(names: Sequence[str], handle: Sequence[Any], **more: Any) -> Handle:
    """Make a handle of a tuple with these fields, and of ``more`` that the tuple does not carry.

    Raises:
        ValueError: the tuple has another length.
    """
    return Handle(**unpacked(names, handle), **more)
