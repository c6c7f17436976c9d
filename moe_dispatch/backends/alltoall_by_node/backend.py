"""``alltoall_by_node`` sends a row once to each node that needs it, and there once to each rank.

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

from dataclasses import dataclass
from itertools import accumulate
from typing import final

import torch
from torch import Tensor

from moe_dispatch.backends.alltoall.backend import (
    CountingBackend,
    Leg,
    Started,
    Targets,
    exchange,
    ordered,
    rank_members,
    reduced_packets,
    start_rows,
)
from moe_dispatch.backends.alltoall.exact import SlotWay, slot_packets, slot_sums, slot_way
from moe_dispatch.backends.alltoall.kernels import lend_packets
from moe_dispatch.backends.base import Arrived, BackendContext
from moe_dispatch.backends.rank_major import RankMajorRoute, arrive
from moe_dispatch.backends.wire import Encoded, row_format
from moe_dispatch.communication import to_device
from moe_dispatch.permutation import SlotIndex
from moe_dispatch.types import Sizes

WITHIN_NODE = ".within_node"  # behind the labels of the collectives of the second leg


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
class NodeTargets(Targets):
    """The nodes of the group as targets. The table also counts what relays need."""

    def __init__(self, nodes: Nodes) -> None:
        self.nodes, self.num_experts = nodes, nodes.num_local_experts
        self.per_target, self.count = self.num_experts * nodes.ranks_per_node, nodes.num_nodes
        self.width, self.rows_at = self.num_experts + 1 + nodes.num_columns, self.num_experts + 1

    def members(self, owner_TK: Tensor, to_ranks: Tensor) -> Tensor:
        nodes, members_PT = self.nodes, rank_members(owner_TK, to_ranks.shape[0])
        torch.sum(members_PT, 1, out=to_ranks.select(1, self.num_experts))
        members_MT = rank_members(nodes.node_of(owner_TK), nodes.num_nodes)
        nodes.write_counts(to_ranks, members_MT)
        return members_MT


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class RelayedRoute(RankMajorRoute):
    """The base of routes with a leg between nodes, and one on the node.

    Attributes:
        between: The leg between nodes.
        within: The leg on the node, whose rows are those that arrived on ``between``.
    """

    between: Leg
    within: Leg

    @final
    def spread(self, rows_TD: Tensor, wire: str | None, *, label: str) -> Tensor | Encoded:
        row, context = row_format(rows_TD.dtype, rows_TD.shape[1], wire), self.context
        permutation = context.permutations[type(rows_TD), rows_TD.device.type]
        packets = row.encoded(rows_TD) if permutation.send_places is None else None
        for leg, suffix in ((self.between, ""), (self.within, WITHIN_NODE)):
            outgoing = context.workspace.lend(leg.source_B.shape[0], row.nbytes, device=rows_TD.device)
            if packets is None:
                row.scatter(permutation, rows_TD, leg.tables, outgoing)
            elif permutation.send_places is None:
                permutation.gather(packets, leg.source_B, outgoing)
            else:
                permutation.scatter(packets, *leg.tables, outgoing)
            packets = exchange(context, outgoing, leg.rows_out, leg.rows_in, label + suffix)
        assert packets is not None
        return row.decode(packets)


@final
@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class NodeRoute(RelayedRoute):
    """A route on which a relay adds up the sums of its node, and sends one sum home for each row."""

    def collect(
        self, rows_RD: Tensor, weights_R: Tensor | None, values_R: Tensor | None, *, label: str
    ) -> tuple[Tensor, Tensor | None]:
        space, device = self.context.workspace, rows_RD.device
        form, packets = reduced_packets(self, rows_RD, weights_R, values_R)
        relayed = space.lend(self.within.cu_T.shape[0] - 1, form.stride, device=device)
        values = None if values_R is None else form.weights(relayed)
        self.within.add_up(packets, form, form.rows(relayed), values, label=label + WITHIN_NODE)
        num_rows = self.between.cu_T.shape[0] - 1
        out = space.lend(num_rows, form.row.hidden, dtype=rows_RD.dtype, device=device)
        values = None if values_R is None else values_R.new_empty(num_rows, form.top_k)
        self.between.add_up(relayed, form, out, values, label=label)
        return out, values


@final
@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ExactNodeRoute(RelayedRoute):
    """A route on which the outputs of slots come back one by one, through the relay.

    Attributes:
        way_between: The way back of the slots between nodes.
        way_within: Their way back on the node.
        weights_TK: The weights, which this rank applies to what comes home.
    """

    way_between: SlotWay
    way_within: SlotWay
    weights_TK: Tensor

    def collect(
        self, rows_RD: Tensor, weights_R: Tensor | None, values_R: Tensor | None, *, label: str
    ) -> tuple[Tensor, Tensor | None]:
        form, packets = slot_packets(self.context, rows_RD, values_R)
        packets = self.way_within.home(self.context, packets, self.index, label=label + WITHIN_NODE)
        packets = self.way_between.home(self.context, packets, self.way_within.index, label=label)
        weights_TK = None if weights_R is None else self.weights_TK
        has_values = values_R is not None
        return slot_sums(self, self.way_between, packets, form, weights_TK, dtype=rows_RD.dtype, has_values=has_values)


@final
@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class NodeStarted:
    """A dispatch whose rows are on their way to the relays.

    Attributes:
        sent: What ``CountingBackend.send`` returned.
        exact: The way back of the slots between nodes, and the weights, with ``reduction="exact"``; else None.
    """

    sent: Started
    exact: tuple[SlotWay, Tensor] | None


@final
class AllToAllByNode(CountingBackend):
    """``alltoall_by_node`` on several nodes of several ranks.

    Cost: every exchange of rows takes two collectives: one between nodes, and one on each node. The number of host
    syncs stays one. Between nodes, each distinct pair of a row and another node takes the bytes that a pair of a row
    and a rank takes on ``alltoall``. If a dispatch is asynchronous, its collective on the node starts in ``wait``.

    Args:
        context: The objects that the backend is built with.
        nodes: The nodes of the group. ``nodes.exact`` asks for ``reduction="exact"``.
    """

    def __init__(self, context: BackendContext, nodes: Nodes) -> None:
        super().__init__(context, NodeTargets(nodes))
        self.nodes = nodes

    def start(
        self, rows_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor, sizes: Sizes, mark: Tensor | None = None
    ) -> NodeStarted:
        """Start the leg between nodes as ``alltoall`` does its only one, with nodes in place of ranks."""
        sent, nodes = self.send(rows_TD, ids_TK, weights_TK, sizes, mark), self.nodes
        if not nodes.exact:
            return NodeStarted(sent=sent, exact=None)
        experts, host, width = nodes.num_local_experts, sent.host, self.targets.width
        of_slots = slice(experts + 2 + nodes.ranks_per_node, None)  # only relays have numbers there
        slots = [sum(host[begin : begin + width][of_slots]) for begin in range(width, len(host), width)]
        node_TK = nodes.node_of((ids_TK + experts).div(experts, rounding_mode="floor"))
        return NodeStarted(sent=sent, exact=(slot_way(slots, node_TK, nodes.relays), weights_TK.detach()))

    def finish(self, started: NodeStarted) -> Arrived:
        """Send the packets on: this rank is a relay for the ranks of its node that need them."""
        context, nodes, sent, relayed = self.context, self.nodes, started.sent, started.sent.received
        sent.work.wait()
        ids_SK, permutation = sent.form.ids(relayed), context.permutation_of(relayed)
        rows_out, rows_in, slots = nodes.leg_within(sent.host)
        owner_SK = nodes.neighbour_of(ids_SK) if permutation.send_places is None or nodes.exact else None
        tables: tuple[Tensor, ...]
        if permutation.send_places is not None:
            first = nodes.neighbours.start * nodes.num_local_experts
            places = permutation.send_places(ids_SK, nodes.num_local_experts, nodes.ranks_per_node, first=first)
            tables, outgoing = lend_packets(context, places, relayed.shape[1], sum(rows_out))
            permutation.scatter(relayed, *tables, outgoing)
        else:
            assert owner_SK is not None
            members_PS = rank_members(owner_SK, nodes.ranks_per_node)
            tables, outgoing = ordered(context, relayed, members_PS, sum(rows_out))
        label = "dispatch" + WITHIN_NODE
        within, received, work = start_rows(context, tables, outgoing, len(relayed), rows_out, rows_in, label=label)
        way_within = None if owner_SK is None or not nodes.exact else slot_way(slots, owner_SK, nodes.neighbours)
        work.wait()
        rows_SD, weights_SK, ids_SK = sent.form.unpack(received)
        index = self._index(sent, ids_SK)
        route: RankMajorRoute
        if started.exact is None or way_within is None:
            route = NodeRoute(context=context, between=sent.leg, within=within, index=index)
        else:
            way_between, weights_TK = started.exact
            route = ExactNodeRoute(
                context=context,
                between=sent.leg,
                within=within,
                index=index,
                way_between=way_between,
                way_within=way_within,
                weights_TK=weights_TK,
            )
        return arrive(route, rows_SD, weights_SK, sent.form.row.dtype, wants_weights=sent.wants_weights)

    def _index(self, sent: Started, ids_SK: Tensor) -> SlotIndex:
        context, nodes, experts = self.context, self.nodes, self.nodes.num_local_experts
        keys_SK = nodes.keys(ids_SK, sent.host[experts :: self.targets.width][1 + context.shape.ep_size :])
        return context.permutation_of(keys_SK).group_slots(
            keys_SK,
            sent.host[:experts],
            context.shape.pad_multiple,
            first=self.first_expert * nodes.num_nodes,
            entries_per_key=nodes.num_nodes,
            real_L=sent.counts[:experts],
        )
