"""Rows between ranks as HybridEP moves them: first across nodes, between ranks of one number, then inside a node."""

from __future__ import annotations

import torch
from torch import Tensor

from moe_dispatch.testing.emulation.exchange import Exchange
from moe_dispatch.testing.emulation.hybrid.handle import Handle
from moe_dispatch.testing.emulation.hybrid.maps import Place
from moe_dispatch.testing.emulation.hybrid.rows import Rows
from moe_dispatch.testing.emulation.memory import grown, uninitialised


def dispatch_rows(exchange: Exchange, place: Place, handle: Handle, rows: Rows) -> Rows:
    """The rows this rank receives, by (source rank, token), from the own ``rows`` of every rank.

    Probabilities float32 (T, E) arrive as those of the own node's experts, (n, L * ranks_per_node).
    """
    return Rows(
        tokens=_dispatched(exchange, place, handle, [rows.tokens] * place.nodes),
        probs=None
        if rows.probs is None
        else _dispatched(exchange, place, handle, list(rows.probs.chunk(place.nodes, dim=1))),
        scales=None if rows.scales is None else _dispatched(exchange, place, handle, [rows.scales] * place.nodes),
    )


def _dispatched(exchange: Exchange, place: Place, handle: Handle, by_node: list[Tensor]) -> Tensor:
    staged = _across_nodes(exchange, place, handle, by_node)
    positions = _positions(place, handle)
    chosen = [torch.empty(0, dtype=torch.int64)] * exchange.size
    for peer, dense in zip(place.peers, positions, strict=True):
        chosen[peer] = (dense >= 0).nonzero().flatten()
    told = exchange.rows([_dense_of(place, positions, peer)[rows] for peer, rows in enumerate(chosen)])
    sent = exchange.rows([staged[rows] for rows in chosen])
    return _written(torch.cat(told), torch.cat(sent), handle.num_dispatched)


def _positions(place: Place, handle: Handle) -> list[Tensor]:
    """For each rank of the node, where the rows this rank forwards stand among those it receives; -1 for none."""
    return [column.to(torch.int64) for column in handle.sparse_to_dense_map.unbind(1)]


def _dense_of(place: Place, positions: list[Tensor], peer: int) -> Tensor:
    inside = peer in place.peers
    return positions[peer % place.ranks_per_node] if inside else torch.empty(0, dtype=torch.int64)


def _written(where: Tensor, values: Tensor, num_rows: int) -> Tensor:
    """Memory as large as all ranks may write to, of which the caller sees ``num_rows``."""
    last = int(where.max()) + 1 if where.numel() else 0
    out = uninitialised((max(num_rows, last), *values.shape[1:]), values.dtype)
    as_bytes = out.view(torch.uint8) if out.dtype.itemsize == 1 else out
    as_bytes[where] = values.view(as_bytes.dtype)
    return out[:num_rows]


def _across_nodes(exchange: Exchange, place: Place, handle: Handle, by_node: list[Tensor]) -> Tensor:
    """Rows (N*T, ...) of the ranks with the own local rank, by node, as far as the own node needs them."""
    slots = handle.num_of_tokens_per_rank
    if place.nodes == 1:
        return grown(by_node[0][:slots], slots)
    needed = (handle.sparse_to_dense_map >= 0).any(1).view(place.nodes, slots)
    parts = [by_node[0][:0]] * exchange.size
    for node, rank in enumerate(place.counterparts):
        flags = needed[node] if node == place.node else _wanted_by(place, handle, node)
        parts[rank] = by_node[node][flags.nonzero().flatten()]
    received = exchange.rows(parts)
    where = needed.flatten().nonzero().flatten()
    return _written(where, torch.cat([received[rank] for rank in place.counterparts]), place.nodes * slots)


def _wanted_by(place: Place, handle: Handle, node: int) -> Tensor:
    """Which own rows go to another node."""
    return handle.attn_to_rdma_map[:, node if node < place.node else node - 1]


def combine_rows(exchange: Exchange, place: Place, handle: Handle, rows: Rows, *, own_slice: bool) -> Rows:
    """Per own token the sum over the ranks that had it: bfloat16 (T, H) and probabilities float32 (T, E).

    Sums are in float32, the ranks of the own node first, then the other nodes downwards from it; another node's sum is
    rounded to bfloat16 before it travels (94a9f8f hybrid_ep_backend.cuh:3300-3540). ``own_slice``: from each rank
    only the probabilities of its own experts are taken, where other releases add whole rows.
    """
    tokens = _reduced(exchange, place, handle, rows.tokens)
    if rows.probs is None:
        return Rows(tokens=_summed_over_nodes(exchange, place, handle, tokens).to(torch.bfloat16))
    probs = _reduced(exchange, place, handle, rows.probs, own_slice=own_slice)
    return Rows(
        tokens=_summed_over_nodes(exchange, place, handle, tokens).to(torch.bfloat16),
        probs=_side_by_side(exchange, place, handle, probs),
    )


def _reduced(exchange: Exchange, place: Place, handle: Handle, dense: Tensor, *, own_slice: bool = False) -> Tensor:
    """float32 (N*T, ...): for every token of the ranks with the own number, the sum over the own node's ranks."""
    positions = _positions(place, handle)
    wanted = [_dense_of(place, positions, peer) for peer in range(exchange.size)]
    asked = exchange.rows([dense_rows[dense_rows >= 0] for dense_rows in wanted])
    last = max((int(where.max()) + 1 for where in asked if where.numel()), default=0)
    memory = grown(dense, max(last, dense.shape[0]))
    answered = exchange.rows([memory[where] for where in asked])
    sums = torch.zeros(handle.sparse_to_dense_map.shape[0], *dense.shape[1:])
    for local, peer in enumerate(place.peers):
        values = answered[peer].float()
        columns = _slice(local, place.ranks_per_node, values.shape[1]) if own_slice else slice(None)
        sums[(positions[local] >= 0).nonzero().flatten(), columns] += values[:, columns]
    return sums


def _slice(local: int, ranks: int, width: int) -> slice:
    return slice(local * width // ranks, (local + 1) * width // ranks)


def _summed_over_nodes(exchange: Exchange, place: Place, handle: Handle, partial: Tensor) -> Tensor:
    by_node = partial.view(place.nodes, handle.num_of_tokens_per_rank, -1)
    total = by_node[place.node]
    if place.nodes == 1:
        return total
    returned = _returned(exchange, place, by_node.to(torch.bfloat16))
    for step in range(1, place.nodes):
        total += returned[(place.node - step) % place.nodes].float()
    return total


def _side_by_side(exchange: Exchange, place: Place, handle: Handle, partial: Tensor) -> Tensor:
    """Each node's probabilities in its own columns; zero where it had no row."""
    by_node = partial.view(place.nodes, handle.num_of_tokens_per_rank, -1)
    if place.nodes == 1:
        return by_node[0]
    return torch.cat(_returned(exchange, place, by_node), dim=1)


def _returned(exchange: Exchange, place: Place, by_node: Tensor) -> list[Tensor]:
    """``by_node[m]`` goes back to the rank of node m; what the own tokens got from each node, by node."""
    parts = [by_node[0][:0]] * exchange.size
    for node, rank in enumerate(place.counterparts):
        parts[rank] = by_node[node]
    received = exchange.rows(parts)
    return [received[rank] for rank in place.counterparts]
