"""The scan kernel of HybridEP as index arithmetic. It turns the routing of all ranks into the maps of one rank.

Dimensions: P ranks are N nodes of M ranks each. Each rank has T rows and L experts. E = P*L is the number of all
experts. R is the number of rows that this rank receives.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from moe_dispatch_testing.emulation.memory import grown, uninitialised


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Topology:
    """The position of a rank among P = nodes * ranks_per_node ranks."""

    rank: int
    ranks_per_node: int
    nodes: int

    @property
    def local_rank(self) -> int:
        return self.rank % self.ranks_per_node

    @property
    def node(self) -> int:
        return self.rank // self.ranks_per_node

    @property
    def peers(self) -> list[int]:
        """Return the ranks of this node."""
        return [self.node * self.ranks_per_node + local for local in range(self.ranks_per_node)]

    @property
    def counterparts(self) -> list[int]:
        """Return the rank of each node that has this local rank. Rows cross nodes only between these ranks."""
        return [node * self.ranks_per_node + self.local_rank for node in range(self.nodes)]


@final
@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Scan:
    """The maps that one rank makes from the routing of all ranks."""

    sparse_to_dense_map: Tensor
    rdma_to_attn_map: Tensor
    attn_to_rdma_map: Tensor
    received_PT: Tensor  # bool: flags of the rows that this rank receives, by source rank and token
    local_RL: Tensor  # bool: flags of the experts of this rank that each received row goes to

    @property
    def num_dispatched(self) -> int:
        return self.local_RL.shape[0]


def scan(map_PTE: Tensor, topology: Topology) -> Scan:
    """Scan the routing. Received rows are by source rank and token (94a9f8f hybrid_ep_backend.cuh:5300-5470)."""
    ranks = topology.ranks_per_node * topology.nodes
    rows = map_PTE.shape[0] // ranks
    by_rank = map_PTE.view(ranks, rows, topology.nodes, topology.ranks_per_node, -1)
    here = by_rank[:, :, topology.node].reshape(ranks * rows, topology.ranks_per_node, -1)
    needed = here.any(-1)
    position = torch.where(needed, needed.cumsum(0) - 1, -1).to(torch.int32)
    own_column = position.view(topology.nodes, topology.ranks_per_node, rows, -1)[:, topology.local_rank]
    wanted_by_node = needed.any(-1).view(topology.nodes, topology.ranks_per_node, rows)[:, topology.local_rank]
    others = [node for node in range(topology.nodes) if node != topology.node]
    return Scan(
        sparse_to_dense_map=own_column.reshape(topology.nodes * rows, -1).contiguous(),
        rdma_to_attn_map=_padded_by_node(wanted_by_node),
        attn_to_rdma_map=by_rank[topology.rank].any(-1).any(-1)[:, others].contiguous(),
        received_PT=needed[:, topology.local_rank],
        local_RL=here[needed[:, topology.local_rank], topology.local_rank],
    )


def _padded_by_node(wanted_NT: Tensor) -> Tensor:
    """Pad the rows of each node to a multiple of 16.

    The memory is ordered by node, then by row. Yet the shape is (rows, nodes), because the release declares this shape.
    """
    nodes, rows = wanted_NT.shape
    padded = grown(wanted_NT.T.contiguous(), max(16, rows + -rows % 16)).T.contiguous()
    return padded.reshape(-1, nodes)


def routing_rows(scanned: Scan, num_rows: int) -> Tensor:
    """Make local_expert_routing_map: flags of the experts of received rows. It has room for the rows of all ranks."""
    return grown(scanned.local_RL, num_rows)


def chunk_layout(scanned: Scan, *, ranks: int, chunk: int) -> Tensor:
    """Make dense_chunk_layout, int32: the number of rows received up to the end of each chunk of each rank."""
    received = scanned.received_PT.view(ranks, -1)
    rows = received.shape[1]
    chunks = max(1, -(-rows // chunk))
    filled = torch.zeros(ranks, chunks * chunk, dtype=torch.int32)
    filled[:, :rows] = received
    return filled.view(ranks * chunks, chunk).sum(1).cumsum(0).to(torch.int32)


@final
@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ExpertRows:
    """The expert row of each received row and expert, and whether some expert rows did not fit."""

    dense_to_expert_RL: Tensor  # int32, -1 for none
    tokens_per_expert: Tensor  # int32 (L,), real rows that fit
    overflowed: bool


def expert_rows(local_RL: Tensor, *, pad_multiple: int, limit: int | None) -> ExpertRows:
    """Number the expert rows by expert, with each expert padded to a multiple of ``pad_multiple`` >= 1.

    Rows with number ``limit`` or more are dropped, so the experts with the highest ids lose rows first (94a9f8f
    hybrid_ep_backend.cuh:5150-5222 and 5429).
    """
    counts = local_RL.sum(0)
    padded = -(-counts // pad_multiple) * pad_multiple
    starts = padded.cumsum(0) - padded
    dest = torch.where(local_RL, starts + local_RL.cumsum(0) - 1, -1)
    if limit is None:
        return ExpertRows(
            dense_to_expert_RL=dest.to(torch.int32), tokens_per_expert=counts.to(torch.int32), overflowed=False
        )
    return ExpertRows(
        dense_to_expert_RL=torch.where(dest >= limit, -1, dest).to(torch.int32),
        tokens_per_expert=torch.minimum(counts, (limit - starts).clamp(min=0)).to(torch.int32),
        overflowed=int(starts[-1] + counts[-1]) > limit,
    )


def row_ids(local_RL: Tensor, *, pad_multiple: int, limit: int | None, capacity: int) -> tuple[Tensor, Tensor, bool]:
    """Make row_id_map and tokens_per_expert with padding. Return also whether a row or a padding row did not fit.

    In releases whose first scan does not compute the expert rows, a second scan does (34152ae permute.cu:33-250). Row
    ids count from 1. After the received rows, the map has ``pad_multiple`` more rows, which hold the negative ids of
    padding rows.
    """
    counts = local_RL.sum(0)
    padded = counts if pad_multiple <= 0 else -(-counts // pad_multiple) * pad_multiple
    starts = padded.cumsum(0) - padded
    real = torch.where(local_RL, starts + local_RL.cumsum(0), 0)
    extra = torch.arange(max(pad_multiple, 0))[:, None]
    padding = torch.where(extra < padded - counts, starts + counts + extra + 1, 0)
    bound = torch.iinfo(torch.int32).max if limit is None else limit
    overflowed = bool((real > bound).any() or (padding > bound).any())
    ids = torch.cat([torch.where(real > bound, 0, real), torch.where(padding > bound, 0, -padding)]).to(torch.int32)
    fitting = torch.minimum(padded, (bound - starts).clamp(min=0)).to(torch.int32)
    out = uninitialised((capacity + max(pad_multiple, 0), local_RL.shape[1]), torch.int32)
    out[: ids.shape[0]] = ids
    return out, fitting, overflowed


def rounded_up(counts: Tensor, pad_multiple: int) -> Tensor:
    """Make padded_tokens_per_expert, int64: the counts rounded up to a multiple of ``pad_multiple``, if positive."""
    wide = counts.to(torch.int64)
    return wide if pad_multiple <= 0 else -(-wide // pad_multiple) * pad_multiple
