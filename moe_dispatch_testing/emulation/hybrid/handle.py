"""The handle of a HybridEP dispatch. It is a dataclass inside the emulation. Callers get a tuple, as in the release."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, final

from torch import Tensor

from moe_dispatch_testing.emulation.arguments import unpacked
from moe_dispatch_testing.emulation.hybrid.config import HybridEpConfigInstance


@final
@dataclass(kw_only=True, slots=True)
class Handle:
    """``HandleImpl`` of the C++ binding. An undefined tensor of the real handle is None here.

    P ranks are N nodes of M ranks each. Each rank has T rows and L experts, and receives n rows.

    Attributes:
        sparse_to_dense_map: int32 (N*T, M).
        rdma_to_attn_map: bool (T rounded up to a multiple of 16, N). The memory is ordered by node.
        attn_to_rdma_map: bool (T, N-1).
        num_dispatched_tokens_tensor: int32 (1,), the value n.
        local_expert_routing_map: bool (P*T, L). The first n rows are written.
        num_of_tokens_per_rank: T.
        config: Configuration of the kernels of the dispatch.
        dense_chunk_layout: int32 (chunks,), inclusive sums.
        dense_to_expert_map: int32 (P*T, L), -1 for no expert row. The first n rows are written.
        row_id_map: int32 (capacity*P + pad_multiple, L). Ids count from 1. They are negative for padding, and 0 means
            no row.
        tokens_per_expert: int32 (L,). With a row_id_map it includes padding. With a dense map it does not.
        padded_tokens_per_expert: int64 (L,). No tuple holds it.
        overflow_flag: int32 (1,).
        num_permuted_tokens: Number of expert rows, or -1 if it is not known.
        num_of_valid_tokens: Number of this rank's rows without padding, or -1 if all T rows are valid.
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
        """Return the number of rows that combine returns."""
        return self.num_of_tokens_per_rank if self.num_of_valid_tokens < 0 else self.num_of_valid_tokens

    def agreed(self, *, with_probs: bool) -> dict[str, object]:
        """Return the values that must be equal on all ranks in a dispatch or combine with this handle."""
        return {"num_of_tokens_per_rank": self.num_of_tokens_per_rank, "with_probs": with_probs}

    def packed(self, names: Sequence[str]) -> tuple[Any, ...]:
        return tuple(getattr(self, name) for name in names)


def handle_of(names: Sequence[str], handle: Sequence[Any], **more: Any) -> Handle:
    """Make a handle from a tuple with items of these names, and from ``more`` fields that the tuple does not hold.

    Raises:
        ValueError: The tuple has another length.
    """
    return Handle(**unpacked(names, handle), **more)
