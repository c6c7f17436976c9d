"""The handles of v1's Buffer. A handle is a tuple of tensors, with the length and order of v1.2.1."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import final

import torch
from torch import Tensor

from moe_dispatch_testing.emulation.arguments import unpacked
from moe_dispatch_testing.emulation.config import NVL_PEERS, SOURCE_META_BYTES
from moe_dispatch_testing.emulation.memory import uninitialised
from moe_dispatch_testing.emulation.normal.call import CPP
from moe_dispatch_testing.emulation.normal.rows import channel_counts, nodes_of, prefix_int32
from moe_dispatch_testing.emulation.refusals import host_assert


@final
@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class IntranodeHandle:
    """The handle of a dispatch within a node (deep_ep/buffer.py:383 of v1.2.1).

    Cached dispatches and combine take it. C is the number of channels. ``is_token_in_rank`` is bool, and the other
    tensors are int32.

    Attributes:
        rank_prefix_matrix: (P, P). Entry [i, j] is the number of rows that ranks 0 to i send to rank j.
        channel_prefix_matrix: (P, C). Entry [i, c] is the number of rows that channels 0 to c send to rank i.
        recv_channel_prefix_matrix: (P, C). Entry [i, c] is the first row of channel c of rank i, among its rows here.
        recv_src_idx: (R,). The source token of each received row.
        is_token_in_rank: (T, P). Whether each token goes to each rank.
        send_head: (T, P). The position of each token in the queue to each rank, -1 if it does not go there.
    """

    rank_prefix_matrix: Tensor
    channel_prefix_matrix: Tensor
    recv_channel_prefix_matrix: Tensor
    recv_src_idx: Tensor
    is_token_in_rank: Tensor
    send_head: Tensor

    def as_tuple(self) -> tuple[Tensor, ...]:
        return tuple(getattr(self, field.name) for field in fields(self))

    @staticmethod
    def of(handle: tuple[Tensor, ...]) -> IntranodeHandle:
        return IntranodeHandle(**unpacked([field.name for field in fields(IntranodeHandle)], handle))

    def sent(self) -> Tensor:
        """Return the number of rows from rank i to rank j, int64 (P, P)."""
        prefix = self.rank_prefix_matrix.long()
        return prefix.diff(dim=0, prepend=prefix.new_zeros(1, prefix.shape[1]))

    def check_for_dispatch(self, num_ranks: int, num_channels: int) -> None:
        """Make the checks of a cached dispatch (csrc/deep_ep.cpp:328-329 and :342-344)."""
        _check_int32(self.rank_prefix_matrix, "cached_rank_prefix_matrix->scalar_type() == torch::kInt32", 328)
        _check_int32(self.channel_prefix_matrix, "cached_channel_prefix_matrix->scalar_type() == torch::kInt32", 329)
        _check_shape(self.rank_prefix_matrix, (num_ranks, num_ranks), "cached_rank_prefix_matrix->", "num_ranks", 342)
        shape = (num_ranks, num_channels)
        _check_shape(self.channel_prefix_matrix, shape, "cached_channel_prefix_matrix->", "num_channels", 344)

    def check_for_combine(self, num_ranks: int, num_channels: int) -> None:
        """Make the checks of combine (csrc/deep_ep.cpp:548-551 and :560-562)."""
        _check_int32(self.recv_src_idx, "src_idx.scalar_type() == torch::kInt32", 548)
        _check_int32(self.send_head, "send_head.scalar_type() == torch::kInt32", 549)
        _check_int32(self.rank_prefix_matrix, "rank_prefix_matrix.scalar_type() == torch::kInt32", 550)
        host_assert(self.send_head.shape[1] == num_ranks, "send_head.size(1) == num_ranks", f"{CPP}:560")
        _check_shape(self.rank_prefix_matrix, (num_ranks, num_ranks), "rank_prefix_matrix.", "num_ranks", 561)
        shape = (num_ranks, num_channels)
        _check_shape(self.recv_channel_prefix_matrix, shape, "channel_prefix_matrix.", "num_channels", 562)


def _check_int32(tensor: Tensor, condition: str, line: int) -> None:
    host_assert(tensor.dtype == torch.int32, condition, f"{CPP}:{line}")


def _check_shape(tensor: Tensor, shape: tuple[int, int], name: str, columns: str, line: int) -> None:
    condition = f"{name}size(0) == num_ranks and {name}size(1) == {columns}"
    host_assert(tuple(tensor.shape) == shape, condition, f"{CPP}:{line}")


@final
@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class InternodeHandle:
    """The handle of a dispatch between nodes (deep_ep/buffer.py:479-482 of v1.2.1).

    The emulation fills the flags, the prefix sums of sent rows for each channel (by node and by rank), and the prefix
    sums of received rows (by node and by rank). The other tensors stay uninitialised, because only kernels read them.
    """

    is_token_in_rank: Tensor
    rdma_channel_prefix_matrix: Tensor
    gbl_channel_prefix_matrix: Tensor
    recv_rdma_channel_prefix_matrix: Tensor
    recv_rdma_rank_prefix_sum: Tensor
    recv_gbl_channel_prefix_matrix: Tensor
    recv_gbl_rank_prefix_sum: Tensor
    recv_src_meta: Tensor
    send_rdma_head: Tensor
    send_nvl_head: Tensor

    @staticmethod
    def of_dispatch(
        is_token_in_rank: Tensor, from_ranks: Tensor, from_nodes: Tensor, *, num_channels: int
    ) -> InternodeHandle:
        """Make a handle from flags (T, P), the number of rows from each rank (P,), and the tokens from each node."""
        num_tokens, num_ranks = is_token_in_rank.shape
        num_nodes, num_rows = from_nodes.shape[0], int(from_ranks.sum())
        in_node = nodes_of(is_token_in_rank)
        return InternodeHandle(
            is_token_in_rank=is_token_in_rank,
            rdma_channel_prefix_matrix=prefix_int32(channel_counts(in_node, num_channels), 1),
            gbl_channel_prefix_matrix=prefix_int32(channel_counts(is_token_in_rank, num_channels), 1),
            recv_rdma_channel_prefix_matrix=uninitialised((num_nodes, num_channels), torch.int32),
            recv_rdma_rank_prefix_sum=prefix_int32(from_nodes, 0),
            recv_gbl_channel_prefix_matrix=uninitialised((num_ranks, num_channels), torch.int32),
            recv_gbl_rank_prefix_sum=prefix_int32(from_ranks, 0),
            recv_src_meta=uninitialised((num_rows, SOURCE_META_BYTES), torch.uint8),
            send_rdma_head=uninitialised((num_tokens, num_nodes), torch.int32),
            send_nvl_head=uninitialised((int(from_nodes.sum()), NVL_PEERS), torch.int32),
        )

    def as_tuple(self) -> tuple[Tensor, ...]:
        return tuple(getattr(self, field.name) for field in fields(self))

    @staticmethod
    def of(handle: tuple[Tensor, ...]) -> InternodeHandle:
        return InternodeHandle(**unpacked([field.name for field in fields(InternodeHandle)], handle))

    def received(self) -> list[int]:
        """Return the number of rows received from each rank."""
        ends = self.recv_gbl_rank_prefix_sum.long()
        rows: list[int] = ends.diff(prepend=ends.new_zeros(1)).tolist()
        return rows

    def check_for_dispatch(self, num_ranks: int, num_channels: int) -> None:
        """Make the checks of a cached dispatch (csrc/deep_ep.cpp:701-707)."""
        nodes, sums = num_ranks // NVL_PEERS, self.recv_rdma_rank_prefix_sum
        shape = (nodes, num_channels)
        _check_shape(self.rdma_channel_prefix_matrix, shape, "cached_rdma_channel_prefix_matrix->", "num_channels", 701)
        host_assert(sums.shape == (nodes,), "cached_recv_rdma_rank_prefix_sum->size(0) == num_rdma_ranks", f"{CPP}:703")
        shape = (num_ranks, num_channels)
        _check_shape(self.gbl_channel_prefix_matrix, shape, "cached_gbl_channel_prefix_matrix->", "num_channels", 705)

    def check_for_combine(self, num_ranks: int, num_channels: int) -> None:
        """Make the checks of combine (csrc/deep_ep.cpp:947-964)."""
        nodes = num_ranks // NVL_PEERS
        in_rank = "is_combined_token_in_rank.size(1) == num_ranks"
        host_assert(self.is_token_in_rank.shape[1] == num_ranks, in_rank, f"{CPP}:959")
        shape = (nodes, num_channels)
        _check_shape(self.recv_rdma_channel_prefix_matrix, shape, "rdma_channel_prefix_matrix.", "num_channels", 960)
        shape = (num_ranks, num_channels)
        _check_shape(self.recv_gbl_channel_prefix_matrix, shape, "gbl_channel_prefix_matrix.", "num_channels", 962)
