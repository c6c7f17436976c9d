"""``alltoall`` with ``levels=2``, which sends a row once to each node that needs it.

Legend: P ranks in M nodes of G consecutive ranks; T rows of K slots; L experts on each rank.

A row travels in two legs. In the first leg it goes to one rank of each node that owns one of its experts: the relay,
which has the same place on its node as the sender has on its own. In the second leg the relay sends the row to each
rank of its node that owns one of the experts. Sums come back along the same legs, and the relay adds up the sums of its
node.

For example, with 2 nodes of 2 ranks, a row of rank 1 has experts on ranks 1, 2 and 3. Its relays are rank 1 on node 0
and rank 3 on node 1. Rank 1 keeps the row, and sends it to rank 3. Rank 3 keeps it, and sends it to rank 2.

Both legs are collectives of the whole group in which a rank exchanges no rows with most ranks. So they need no process
groups of their own: NCCL skips ranks without rows, and gloo sends them an empty message.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import final

import torch
from torch import Tensor

from moe_dispatch.backends.alltoall.backend import (
    AllToAll,
    AllToAllRoute,
    Started,
    ordered,
    rank_members,
    start_rows,
)
from moe_dispatch.backends.alltoall.exact import ExactRoute, slot_way
from moe_dispatch.backends.alltoall.kernels import lend_packets
from moe_dispatch.backends.base import Arrived, BackendContext, MoEShape
from moe_dispatch.backends.rank_major import RankMajorRoute
from moe_dispatch.communication import to_device
from moe_dispatch.errors import ConfigError
from moe_dispatch.types import Sizes

logger = logging.getLogger("moe_dispatch")

WITHIN_NODE = ".within_node"  # behind the labels of the collectives of the second leg


def nodes_of(shape: MoEShape, ranks_per_node: int | None) -> int:
    """Return the number of ranks of the group that share a node.

    Args:
        shape: Shape with the detected number of ranks per node.
        ranks_per_node: Number that was configured in place of the detected one, or None.

    Raises:
        ConfigError: The ranks cannot be divided among nodes of this size.
    """
    found = min(ranks_per_node or shape.ranks_per_node or shape.ep_size, shape.ep_size)
    if shape.ep_size % found:
        raise ConfigError(
            f"Backend 'alltoall': ep_size must be a multiple of ranks_per_node, got {shape.ep_size} ranks and "
            f"ranks_per_node={found}. Give another ranks_per_node, or leave it out to detect it."
        )
    return found


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Nodes:
    """The nodes of a group, seen from one rank.

    Attributes:
        rank: Number of this rank in the group.
        ranks_per_node: G.
        num_nodes: M.
        num_local_experts: L.
        exact: Whether slots are counted too, for ``reduction="exact"``.
    """

    rank: int
    ranks_per_node: int
    num_nodes: int
    num_local_experts: int
    exact: bool

    @property
    def suffixes(self) -> tuple[str, str]:
        """What stands behind the labels of the collectives of each leg."""
        return "", WITHIN_NODE

    @property
    def relays(self) -> range:
        """The ranks to which this rank sends in the first leg: one on each node."""
        return range(self.rank % self.ranks_per_node, self.num_nodes * self.ranks_per_node, self.ranks_per_node)

    @property
    def neighbours(self) -> range:
        """The ranks to which this rank sends in the second leg: the ranks of its node."""
        first = self.rank - self.rank % self.ranks_per_node
        return range(first, first + self.ranks_per_node)

    @property
    def num_columns(self) -> int:
        """Number of columns that ``write_counts`` fills."""
        return 1 + self.ranks_per_node * (2 if self.exact else 1)

    def node_of(self, owner_TK: Tensor) -> Tensor:
        """Return 1 + the node of each slot's expert, from 1 + its rank. Slots that go nowhere have 0 in both tables."""
        return (owner_TK + (self.ranks_per_node - 1)).div(self.ranks_per_node, rounding_mode="floor")

    def neighbour_of(self, ids_SK: Tensor) -> Tensor:
        """Return 1 + the place of each expert's rank on this node, int64; 0 for experts elsewhere and for no expert."""
        first = self.neighbours.start * self.num_local_experts
        position_SK = (ids_SK.long() - first).div(self.num_local_experts, rounding_mode="floor") + 1
        return torch.where((position_SK < 0) | (position_SK > self.ranks_per_node), 0, position_SK)

    def write_counts(self, counts_PC: Tensor, members_MT: Tensor) -> None:
        """Write the counts that only relays need, into the last columns of the rows of the relays.

        They are: the number of this rank's rows that go to the relay; for each rank of the relay's node, the number of
        rows that the relay sends on to it; and, if slots are counted, for each rank of the node the number of slots.

        Args:
            counts_PC: int64 (P, L + 1 + num_columns), the counts for each rank. The first L + 1 columns are filled: the
                slots of each of its experts, and the rows.
            members_MT: bool (M, T), True if the node owns at least one expert of the row.
        """
        slots, size = self.num_local_experts, self.ranks_per_node
        by_node = (self.num_nodes, size)
        for_relays = counts_PC.view(*by_node, -1)[:, self.rank % size, slots + 1 :]
        torch.sum(members_MT, 1, out=for_relays.select(1, 0))
        for_relays[:, 1 : 1 + size] = counts_PC.select(1, slots).view(by_node)
        if self.exact:
            for_relays[:, 1 + size :] = counts_PC[:, :slots].sum(1).view(by_node)

    def leg_within(self, host: list[int]) -> tuple[list[int], list[int], list[int]]:
        """Return the numbers of rows that go out and come in on the second leg, and of slots that do, by rank.

        Args:
            host: Table of L + 1 + num_columns columns: the sums of all counts that came in, then P rows of counts that
                went out, then P rows of counts that came in.
        """
        slots, size = self.num_local_experts, self.ranks_per_node
        width, group = slots + 1 + self.num_columns, size * self.num_nodes
        total, came = (
            host[:width],
            [host[begin : begin + width] for begin in range((1 + group) * width, len(host), width)],
        )
        from_peers = [came[peer::size] for peer in range(size)]
        rows_in = [sum(row[slots] for row in rows) for rows in from_peers]
        slots_in = [sum(sum(row[:slots]) for row in rows) for rows in from_peers]
        slots_out = total[slots + 2 + size :] or [0] * size
        rows_out = total[slots + 2 : slots + 2 + size]
        return self._at(rows_out), self._at(rows_in), self._at(slots_out) + self._at(slots_in)

    def _at(self, values: list[int]) -> list[int]:
        """Return a list with one entry for each rank of the group: the values for the neighbours, 0 for all others."""
        before, after = self.neighbours.start, self.ranks_per_node * self.num_nodes - self.neighbours.stop
        return [0] * before + values + [0] * after

    def keys(self, ids_SK: Tensor, rows_in: list[int]) -> Tensor:
        """Return numbers that sort slots by expert, then by the node that their row comes from: M for each expert.

        Rows arrive ordered by relay, then by the node of their sender, then by row. So after a stable sort by these
        numbers, the rows of an expert are ordered by their sender, as if they had come without a relay.

        Args:
            ids_SK: integer (S, K), global expert ids.
            rows_in: Number of rows from each rank of the group.
        """
        by_peer = [count for peer in range(self.ranks_per_node) for count in rows_in[peer :: self.ranks_per_node]]
        edges, at_S = to_device([*accumulate(by_peer)], ids_SK.device), torch.arange(sum(rows_in), device=ids_SK.device)
        origin_S = torch.bucketize(at_S, edges, out_int32=True, right=True) % self.num_nodes
        return torch.add(origin_S.unsqueeze(1), ids_SK, alpha=self.num_nodes)


@final
class TwoLevelAllToAll(AllToAll):
    """``alltoall`` with ``levels=2``.

    Cost: every exchange of rows takes two collectives: one between nodes, and one on each node. The number of host
    syncs stays one. Between nodes, each distinct pair of a row and another node takes the bytes that a pair of a row
    and a rank takes with one level. If a dispatch is asynchronous, its collective on the node starts in ``wait``.

    Args:
        context: The objects that the backend is built with.
        nodes: The nodes of the group. ``nodes.exact`` asks for ``reduction="exact"``.
    """

    def __init__(self, context: BackendContext, nodes: Nodes) -> None:
        super().__init__(context)
        self.nodes = nodes
        self.targets = self.num_experts * nodes.ranks_per_node, nodes.num_nodes
        self.width += nodes.num_columns
        self.rows_at += 1

    def members(self, owner_TK: Tensor, to_ranks: Tensor) -> Tensor:
        super().members(owner_TK, to_ranks)
        members_MT = rank_members(self.nodes.node_of(owner_TK), self.nodes.num_nodes)
        self.nodes.write_counts(to_ranks, members_MT)
        return members_MT

    def start(
        self, rows_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor, sizes: Sizes, mark: Tensor | None = None
    ) -> Started:
        """Start the first leg as a dispatch with one level does, with nodes in place of ranks."""
        started, nodes = super().start(rows_TD, ids_TK, weights_TK, sizes, mark), self.nodes
        if not nodes.exact:
            return replace(started, kept=(started.leg,))
        experts, host, width = self.num_experts, started.host, self.width
        of_slots = slice(experts + 2 + nodes.ranks_per_node, None)  # only relays have numbers there
        slots = [sum(host[begin : begin + width][of_slots]) for begin in range(width, len(host), width)]
        node_TK = nodes.node_of((ids_TK + experts).div(experts, rounding_mode="floor"))
        return replace(started, kept=(started.leg, slot_way(slots, node_TK, nodes.relays), weights_TK))

    def finish(self, started: Started) -> Arrived:
        """Send the packets on: this rank is a relay for the ranks of its node that need them."""
        context, nodes, relayed, kept = self.context, self.nodes, started.received, started.kept
        started.work.wait()
        ids_SK, permutation = started.form.ids(relayed), context.permutation_of(relayed)
        rows_out, rows_in, slots = nodes.leg_within(started.host)
        owner_SK = nodes.neighbour_of(ids_SK) if permutation.send_places is None or nodes.exact else None
        tables: tuple[Tensor, ...]
        if permutation.send_places is not None:
            first = nodes.neighbours.start * self.num_experts
            places = permutation.send_places(ids_SK, self.num_experts, nodes.ranks_per_node, first=first)
            tables, outgoing = lend_packets(context, places, relayed.shape[1], sum(rows_out))
            permutation.scatter(relayed, *tables, outgoing)
        else:
            assert owner_SK is not None
            members_PS = rank_members(owner_SK, nodes.ranks_per_node)
            tables, outgoing = ordered(context, relayed, members_PS, sum(rows_out))
        inner, received, work = start_rows(context, tables, outgoing, len(relayed), rows_out, rows_in, WITHIN_NODE)
        if owner_SK is not None and nodes.exact:
            kept = (*kept, slot_way(slots, owner_SK, nodes.neighbours))
        return super().finish(replace(started, leg=inner, work=work, outgoing=outgoing, received=received, kept=kept))

    def route(self, started: Started, ids_SK: Tensor) -> RankMajorRoute:
        context, nodes, experts = self.context, self.nodes, self.num_experts
        keys_SK = nodes.keys(ids_SK, started.host[experts :: self.width][1 + context.shape.ep_size :])
        index = context.permutation_of(keys_SK).group_slots(
            keys_SK,
            started.host[:experts],
            context.shape.pad_multiple,
            first=self.first_expert * nodes.num_nodes,
            entries_per_key=nodes.num_nodes,
            real_L=started.counts[:experts],
        )
        outer, *exact = started.kept
        legs = (outer, started.leg)
        if not exact:
            return AllToAllRoute(context=context, legs=legs, index=index)
        way, weights_TK, inner_way = exact
        return ExactRoute(context=context, legs=legs, ways=(way, inner_way), index=index, weights_TK=weights_TK)


def nodes_seen_from(rank: int, shape: MoEShape, ranks_per_node: int | None, *, exact: bool) -> Nodes | None:
    """Return the nodes of the group, seen from a rank, if rows travel in two legs; None if they travel in one.

    Args:
        rank: Number of the rank.
        shape: As in ``nodes_of``.
        ranks_per_node: As in ``nodes_of``.
        exact: Whether slots are counted too, for ``reduction="exact"``.

    Raises:
        ConfigError: The ranks cannot be divided among nodes of this size.
    """
    size = nodes_of(shape, ranks_per_node)
    if size in (1, shape.ep_size):
        return None
    return Nodes(
        rank=rank,
        ranks_per_node=size,
        num_nodes=shape.ep_size // size,
        num_local_experts=shape.num_local_experts,
        exact=exact,
    )


def open_levels(context: BackendContext, ranks_per_node: int | None, *, exact: bool) -> TwoLevelAllToAll | None:
    """Open the backend with two levels, and log the nodes. Return None if the second level would save nothing.

    Raises:
        ConfigError: The group is torch's fake one.
    """
    comm = context.communicator
    nodes = nodes_seen_from(comm.rank, context.shape, ranks_per_node, exact=exact)
    if nodes and comm.dry_run:
        raise ConfigError(
            "Backend 'alltoall': a dry run must have levels=1, got levels=2, on which ranks of other places on their "
            "nodes do not send what this rank sends. Set levels=1."
        )
    if comm.rank == 0:
        logger.info(
            "backend 'alltoall': levels=2, ranks per node: %d (%s), %s.",
            nodes_of(context.shape, ranks_per_node),
            "detected" if ranks_per_node is None else "configured",
            f"nodes: {nodes.num_nodes}" if nodes else f"ranks: {comm.size}, so it works as levels=1",
        )
    return None if nodes is None else TwoLevelAllToAll(context, nodes)
