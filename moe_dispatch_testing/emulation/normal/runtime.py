"""The part of the C++ side of v1's Buffer that is the same within a node and between nodes (v1.2.1)."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
import torch.distributed as dist
from torch import Tensor

from moe_dispatch_testing.emulation.config import NVL_PEERS
from moe_dispatch_testing.emulation.exchange import Exchange
from moe_dispatch_testing.emulation.normal.call import (
    CPP,
    CombineInput,
    DispatchInput,
    DispatchLayout,
    Received,
    Settings,
)
from moe_dispatch_testing.emulation.normal.checks import check_ids, check_sizes, require_ranks_of_a_node
from moe_dispatch_testing.emulation.normal.rows import counts_and_flags, nodes_of
from moe_dispatch_testing.emulation.refusals import host_assert, require_cpu


class Runtime(ABC):
    """The buffers of one rank. All ranks of the group open and destroy their buffers together."""

    def __init__(self, group: dist.ProcessGroup, *, num_nvl_bytes: int, num_rdma_bytes: int) -> None:
        self.exchange = Exchange(group)
        self.num_ranks = self.exchange.size
        self.num_nvl_bytes = num_nvl_bytes
        self.num_rdma_bytes = num_rdma_bytes
        with self.exchange.entrance("Buffer") as entry:
            check_sizes(self.num_ranks, num_nvl_bytes, num_rdma_bytes)
            entry.told = [num_nvl_bytes, num_rdma_bytes]
        self.nvl_bytes_of_peers = [told[0] for told in entry.everyone]
        self.rdma_bytes_of_peers = [told[1] for told in entry.everyone]

    def get_num_rdma_ranks(self) -> int:
        return max(1, self.num_ranks // NVL_PEERS)

    def destroy(self) -> None:
        """Meet the other ranks in a barrier, if there is an NVLink buffer."""
        if self.num_nvl_bytes > 0:
            self.exchange.barrier("Buffer.destroy")
            require_ranks_of_a_node(min(self.num_ranks, NVL_PEERS))

    def get_dispatch_layout(self, topk_idx: Tensor, num_experts: int, settings: Settings) -> DispatchLayout:
        """Count this rank's tokens for each rank, node and expert, without an exchange."""
        require_cpu("Buffer.get_dispatch_layout", topk_idx)
        host_assert(topk_idx.dim() == 2, "topk_idx.dim() == 2", f"{CPP}:245")
        host_assert(topk_idx.is_contiguous(), "topk_idx.is_contiguous()", f"{CPP}:246")
        host_assert(num_experts > 0, "num_experts > 0", f"{CPP}:247")
        settings.check_events(253)
        check_ids(topk_idx)
        per_expert, in_rank = counts_and_flags(topk_idx.detach(), num_experts, self.num_ranks)
        in_node = nodes_of(in_rank) if self.num_ranks > NVL_PEERS else None
        return DispatchLayout(
            tokens_per_rank=in_rank.sum(0, dtype=torch.int32),
            tokens_per_rdma_rank=None if in_node is None else in_node.sum(0, dtype=torch.int32),
            tokens_per_expert=per_expert,
            is_token_in_rank=in_rank,
        )

    @abstractmethod
    def dispatch(self, sent: DispatchInput, layout: DispatchLayout, settings: Settings) -> Received:
        """Exchange the counts, then send the rows."""

    @abstractmethod
    def cached_dispatch(self, sent: DispatchInput, handle: tuple[Tensor, ...], settings: Settings) -> Received:
        """Send rows to the same ranks as the dispatch that made the handle. Send no ids, weights or counts."""

    @abstractmethod
    def combine(
        self, sent: CombineInput, handle: tuple[Tensor, ...], settings: Settings
    ) -> tuple[Tensor, Tensor | None]:
        """Send rows back to their source ranks, and add them up there."""

    def aligned_rows(self, per_expert: list[list[int]], alignment: int) -> list[int]:
        """Return the rows of each expert of this rank, rounded up (csrc/kernels/intranode.cu:64, internode.cu:243)."""
        rows = torch.tensor(per_expert).view(self.num_ranks, self.num_ranks, -1)[:, self.exchange.rank].sum(0)
        aligned: list[int] = (-(-rows // alignment) * alignment).tolist()
        return aligned
