"""The exchange of rows between ranks in HybridEP: first across nodes, then inside each node.

Rows cross nodes only between ranks with the same local rank. N is the number of nodes.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moe_dispatch_testing.emulation.exchange import Exchange
from moe_dispatch_testing.emulation.hybrid.handle import Handle
from moe_dispatch_testing.emulation.hybrid.maps import Topology
from moe_dispatch_testing.emulation.hybrid.rows import Rows
from moe_dispatch_testing.emulation.memory import grown, uninitialised


def dispatch_rows(exchange: Exchange, topology: Topology, handle: Handle, rows: Rows) -> Rows:
    """Send ``rows``. Return the n rows that this rank receives, by source rank and token.

    Probabilities are sent as float32 (T, E). A rank receives only the columns of its node's experts, so they arrive as
    (n, L * ranks_per_node).
    """
    return Rows(
        tokens=_dispatched(exchange, topology, handle, [rows.tokens] * topology.nodes),
        probs=None
        if rows.probs is None
        else _dispatched(exchange, topology, handle, list(rows.probs.chunk(topology.nodes, dim=1))),
        scales=None if rows.scales is None else _dispatched(exchange, topology, handle, [rows.scales] * topology.nodes),
    )


def _dispatched(exchange: Exchange, topology: Topology, handle: Handle, by_node: list[Tensor]) -> Tensor:
    staged = _across_nodes(exchange, topology, handle, by_node)
    positions = _positions(handle)
    chosen = [torch.empty(0, dtype=torch.int64)] * exchange.size
    for peer, dense in zip(topology.peers, positions, strict=True):
        chosen[peer] = (dense >= 0).nonzero().flatten()
    told = exchange.rows([_dense_of(topology, positions, peer)[rows] for peer, rows in enumerate(chosen)])
    sent = exchange.rows([staged[rows] for rows in chosen])
    return _written(torch.cat(told), torch.cat(sent), handle.num_dispatched)


def _positions(handle: Handle) -> list[Tensor]:
    """List for each rank of the node where the rows that this rank forwards go among its received rows, or -1."""
    return [column.to(torch.int64) for column in handle.sparse_to_dense_map.unbind(1)]


def _dense_of(topology: Topology, positions: list[Tensor], peer: int) -> Tensor:
    inside = peer in topology.peers
    return positions[peer % topology.ranks_per_node] if inside else torch.empty(0, dtype=torch.int64)


def _written(where: Tensor, values: Tensor, num_rows: int) -> Tensor:
    """Write rows to new memory that has room for all of them. Return the first ``num_rows`` rows of this memory."""
    last = int(where.max()) + 1 if where.numel() else 0
    out = uninitialised((max(num_rows, last), *values.shape[1:]), values.dtype)
    as_bytes = out.view(torch.uint8) if out.dtype.itemsize == 1 else out
    as_bytes[where] = values.view(as_bytes.dtype)
    return out[:num_rows]


def _across_nodes(exchange: Exchange, topology: Topology, handle: Handle, by_node: list[Tensor]) -> Tensor:
    """Return the rows (N*T, ...) of all ranks with this local rank, by node.

    Rows that this node does not need stay uninitialised.
    """
    num_rows = handle.num_of_tokens_per_rank
    if topology.nodes == 1:
        return grown(by_node[0][:num_rows], num_rows)
    needed = (handle.sparse_to_dense_map >= 0).any(1).view(topology.nodes, num_rows)
    parts = [by_node[0][:0]] * exchange.size
    for node, rank in enumerate(topology.counterparts):
        flags = needed[node] if node == topology.node else _wanted_by(topology, handle, node)
        parts[rank] = by_node[node][flags.nonzero().flatten()]
    received = exchange.rows(parts)
    where = needed.flatten().nonzero().flatten()
    return _written(where, torch.cat([received[rank] for rank in topology.counterparts]), topology.nodes * num_rows)


def _wanted_by(topology: Topology, handle: Handle, node: int) -> Tensor:
    """Flag this rank's rows that go to another node."""
    return handle.attn_to_rdma_map[:, node if node < topology.node else node - 1]


def combine_rows(exchange: Exchange, topology: Topology, handle: Handle, rows: Rows, *, own_slice: bool) -> Rows:
    """Send rows back. Return the sums of this rank's tokens, bfloat16 (T, H), and their probabilities, float32 (T, E).

    Sums are in float32. The rows of this node's ranks come first, then the sums of the other nodes in descending order
    from this node. Another node rounds its sum to bfloat16 before it sends it (94a9f8f
    hybrid_ep_backend.cuh:3300-3540).

    Args:
        exchange: Collectives of the group.
        topology: Position of this rank.
        handle: Handle of the dispatch.
        rows: A row for each row that this rank received.
        own_slice: Whether to take from each rank only the probabilities of its own experts. If False, add up all
            columns.
    """
    tokens = _reduced(exchange, topology, handle, rows.tokens)
    if rows.probs is None:
        return Rows(tokens=_summed_over_nodes(exchange, topology, handle, tokens).to(torch.bfloat16))
    probs = _reduced(exchange, topology, handle, rows.probs, own_slice=own_slice)
    return Rows(
        tokens=_summed_over_nodes(exchange, topology, handle, tokens).to(torch.bfloat16),
        probs=_side_by_side(exchange, topology, handle, probs),
    )


def _reduced(
    exchange: Exchange, topology: Topology, handle: Handle, dense: Tensor, *, own_slice: bool = False
) -> Tensor:
    """Add up the rows of this node's ranks for every token of the ranks with this local rank: float32 (N*T, ...)."""
    positions = _positions(handle)
    wanted = [_dense_of(topology, positions, peer) for peer in range(exchange.size)]
    asked = exchange.rows([dense_rows[dense_rows >= 0] for dense_rows in wanted])
    last = max((int(where.max()) + 1 for where in asked if where.numel()), default=0)
    memory = grown(dense, max(last, dense.shape[0]))
    answered = exchange.rows([memory[where] for where in asked])
    sums = torch.zeros(handle.sparse_to_dense_map.shape[0], *dense.shape[1:], dtype=torch.float32)
    for local, peer in enumerate(topology.peers):
        values = answered[peer].float()
        columns = _slice(local, topology.ranks_per_node, values.shape[1]) if own_slice else slice(None)
        sums[(positions[local] >= 0).nonzero().flatten(), columns] += values[:, columns]
    return sums


def _slice(local: int, ranks: int, width: int) -> slice:
    return slice(local * width // ranks, (local + 1) * width // ranks)


def _summed_over_nodes(exchange: Exchange, topology: Topology, handle: Handle, partial: Tensor) -> Tensor:
    by_node = partial.view(topology.nodes, handle.num_of_tokens_per_rank, -1)
    total = by_node[topology.node]
    if topology.nodes == 1:
        return total
    returned = _returned(exchange, topology, by_node.to(torch.bfloat16))
    for step in range(1, topology.nodes):
        total += returned[(topology.node - step) % topology.nodes].float()
    return total


def _side_by_side(exchange: Exchange, topology: Topology, handle: Handle, partial: Tensor) -> Tensor:
    """Place the probabilities of each node in its own columns. They are zero for tokens that did not go there."""
    by_node = partial.view(topology.nodes, handle.num_of_tokens_per_rank, -1)
    if topology.nodes == 1:
        return by_node[0]
    return torch.cat(_returned(exchange, topology, by_node), dim=1)


def _returned(exchange: Exchange, topology: Topology, by_node: Tensor) -> list[Tensor]:
    """Send ``by_node[m]`` back to the rank of node m. Return the values that each node sent for this rank's tokens."""
    parts = [by_node[0][:0]] * exchange.size
    for node, rank in enumerate(topology.counterparts):
        parts[rank] = by_node[node]
    received = exchange.rows(parts)
    return [received[rank] for rank in topology.counterparts]
