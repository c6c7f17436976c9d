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

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor

from moe_dispatch.backends.alltoall.backend import (
    MARK,
    Leg,
    blank_leg,
    form_of,
    ordered,
    rank_members,
    read_counts,
    reduced_packets,
    refuse_counts,
    restored_leg,
    start_rows,
)
from moe_dispatch.backends.alltoall.exact import ExactRoute, SlotWay, blank_exact, restored_route, send_along
from moe_dispatch.backends.base import Arrived, Backend, BackendContext, MoEShape, Route, WireDtype
from moe_dispatch.backends.rank_major import RankMajorRoute, arrive
from moe_dispatch.communication import to_device
from moe_dispatch.errors import ConfigError
from moe_dispatch.permutation import SlotIndex
from moe_dispatch.types import Capacity, Sizes

WITHIN_NODE = ".within_node"  # behind the labels of the collectives of the second leg
_SUFFIXES = ("", WITHIN_NODE)


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
class Splits:
    """The numbers of rows and slots that one leg carries to and from each rank, on the host."""

    rows_out: list[int]
    rows_in: list[int]
    slots_out: list[int]
    slots_in: list[int]


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
        return (owner_TK - 1).div(self.ranks_per_node, rounding_mode="floor") + 1

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

    def splits(self, host: list[int]) -> tuple[Splits, Splits]:
        """Return the numbers of rows and slots of both legs.

        Args:
            host: Table of L + 1 + num_columns columns: the sums of all counts that came in, then P rows of counts that
                went out, then P rows of counts that came in.
        """
        slots, size = self.num_local_experts, self.ranks_per_node
        width, group = slots + 1 + self.num_columns, size * self.num_nodes
        total, *others = [host[begin : begin + width] for begin in range(0, len(host), width)]
        sent, came = others[:group], others[group:]
        from_peers = [came[peer::size] for peer in range(size)]
        return (
            Splits(
                rows_out=self._at(self.relays, [sent[rank][slots + 1] for rank in self.relays]),
                rows_in=self._at(self.relays, [came[rank][slots + 1] for rank in self.relays]),
                slots_out=self._at(self.relays, [sum(sent[rank][slots + 2 + size :]) for rank in self.relays]),
                slots_in=self._at(self.relays, [sum(came[rank][slots + 2 + size :]) for rank in self.relays]),
            ),
            Splits(
                rows_out=self._at(self.neighbours, total[slots + 2 : slots + 2 + size]),
                rows_in=self._at(self.neighbours, [sum(row[slots] for row in rows) for rows in from_peers]),
                slots_out=self._at(self.neighbours, total[slots + 2 + size :] or [0] * size),
                slots_in=self._at(self.neighbours, [sum(sum(row[:slots]) for row in rows) for rows in from_peers]),
            ),
        )

    def _at(self, ranks: range, values: list[int]) -> list[int]:
        """Return a list with one entry for each rank of the group: the values for ``ranks``, 0 for all others."""
        found = [0] * (self.ranks_per_node * self.num_nodes)
        for rank, value in zip(ranks, values, strict=True):
            found[rank] = value
        return found

    def keys(self, local_ids_SK: Tensor, rows_in: list[int]) -> Tensor:
        """Return numbers that sort slots by expert, then by the node that their row comes from: M for each expert.

        Rows arrive ordered by relay, then by the node of their sender, then by row. So after a stable sort by these
        numbers, the rows of an expert are ordered by their sender, as if they had come without a relay.

        Args:
            local_ids_SK: integer (S, K), local expert ids. Other ids are no experts of this rank.
            rows_in: Number of rows from each rank of the group.
        """
        by_peer = [count for peer in range(self.ranks_per_node) for count in rows_in[peer :: self.ranks_per_node]]
        repeats = to_device(by_peer, local_ids_SK.device)
        nodes = torch.arange(self.num_nodes, device=local_ids_SK.device).repeat(self.ranks_per_node)
        origin_S = nodes.repeat_interleave(repeats, output_size=sum(rows_in))
        return local_ids_SK.int() * self.num_nodes + origin_S.int().unsqueeze(1)


@final
@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class TwoLevelRoute(RankMajorRoute):
    """A route in two legs: between nodes, then between the ranks of this node. The relay adds up sums on the way back.

    Attributes:
        legs: The rows of the second leg are the rows that arrived in the first.
    """

    context: BackendContext
    legs: tuple[Leg, Leg]
    index: SlotIndex

    @contextmanager
    def spread(self, rows_TD: Tensor, wire: WireDtype | None, *, label: str) -> Iterator[Tensor]:
        with send_along(self.legs, rows_TD, wire, label) as rows_SD:
            yield rows_SD

    def collect(
        self, rows_RD: Tensor, weights_R: Tensor | None, values_R: Tensor | None, *, label: str
    ) -> tuple[Tensor, Tensor | None]:
        (outer, inner), space = self.legs, self.context.workspace
        form, packets = reduced_packets(self, rows_RD, weights_R, values_R)
        came_back = inner.start_return(packets, label)
        relayed = space.take((inner.cu_T.shape[0] - 1, form.stride), rows_RD.device)
        values = None if values_R is None else form.weights(relayed)
        inner.add_up(came_back, packets, form, form.read(relayed), values)
        came_back = outer.start_return(relayed, label)
        out = space.lend(self.num_rows, form.hidden, dtype=rows_RD.dtype, device=rows_RD.device)
        values = None if values_R is None else values_R.new_empty(self.num_rows, form.top_k)
        outer.add_up(came_back, relayed, form, out, values)
        return out, values

    def tensors(self) -> list[Tensor]:
        tables = [[leg.splits(), leg.source_S, leg.member_S, leg.cu_T] for leg in self.legs]
        return [*tables[0], *tables[1], *self.index.tensors()]

    @property
    def num_rows(self) -> int:
        return self.legs[0].cu_T.shape[0] - 1


@final
class TwoLevelAllToAll(Backend):
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
        self._nodes = nodes
        self._width = 1 + context.shape.num_local_experts + nodes.num_columns

    def start(
        self, rows_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor, sizes: Sizes, mark: Tensor | None = None
    ) -> Any:
        context, nodes, width = self.context, self._nodes, self._width
        size, experts = context.shape.ep_size, context.shape.num_local_experts
        owner_TK, counts = context.permutation_of(ids_TK).count_owners(
            ids_TK, experts, width, (1 + 2 * size) * width, graph_safe=False
        )
        _, to_ranks, from_ranks = counts.view(-1, width).split_with_sizes([1, size, size])
        num_rows_P = torch.sum(rank_members(owner_TK, size), 1, out=to_ranks.select(1, experts))
        node_TK = nodes.node_of(owner_TK)
        members_MT = rank_members(node_TK, nodes.num_nodes)
        nodes.write_counts(to_ranks, members_MT)
        if mark is not None:
            num_rows_P.add_(mark, alpha=MARK)
        ones = [1] * size
        work = context.communicator.all_to_all(from_ranks, to_ranks, ones, ones, label="counts")
        form = form_of(context.shape, rows_TD.dtype, weights_TK.dtype)
        packets = form.pack(rows_TD, weights_TK, ids_TK)
        in_order = ordered(context, packets, members_MT) if packets.is_cpu else None  # as in the one-level form
        host = read_counts(counts, from_ranks, experts, work)
        first, second = nodes.splits(host)
        source_S, outgoing = in_order or ordered(context, packets, members_MT, sum(first.rows_out))
        leg, received, work = start_rows(context, source_S, outgoing, len(rows_TD), first.rows_out, first.rows_in)
        way = SlotWay.make(leg, first.slots_out, first.slots_in, node_TK, nodes.relays) if nodes.exact else None
        return leg, way, outgoing, received, work, form, second, host, counts, rows_TD.dtype, weights_TK

    def finish(self, started: Any) -> Arrived:
        leg, way, outgoing, relayed, work, form, second, host, counts, dtype, weights_TK = started
        context, nodes, space = self.context, self._nodes, self.context.workspace
        if work is not None:
            work.wait()
        space.give(outgoing)
        # This rank is a relay: it sends the packets on to the ranks of its node that need them.
        owner_SK = nodes.neighbour_of(form.ids(relayed))
        members_PS = rank_members(owner_SK, nodes.ranks_per_node)
        source_S, outgoing = ordered(context, relayed, members_PS, sum(second.rows_out))
        space.give(relayed)
        inner, received, work = start_rows(
            context, source_S, outgoing, len(relayed), second.rows_out, second.rows_in, WITHIN_NODE
        )
        if work is not None:
            work.wait()
        space.give(outgoing)
        rows_SD, weights_SK, ids_SK = form.unpack(received)
        experts, size = context.shape.num_local_experts, context.shape.ep_size
        keys_SK = nodes.keys(ids_SK - nodes.rank * experts, host[experts :: self._width][1 + size :])
        index = context.permutation_of(keys_SK).group_slots(
            keys_SK,
            host[:experts],
            context.shape.pad_multiple,
            entries_per_key=nodes.num_nodes,
            real_L=counts[:experts],
        )
        route: RankMajorRoute
        if way is None:
            route = TwoLevelRoute(context=context, legs=(leg, inner), index=index)
        else:
            ways = (way, SlotWay.make(inner, second.slots_out, second.slots_in, owner_SK, nodes.neighbours))
            route = ExactRoute(context=context, ways=ways, index=index, weights_TK=weights_TK)
        arrived = arrive(route, rows_SD, weights_SK, dtype)
        space.give(received)
        return arrived

    def dispatch(self, rows_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor, sizes: Sizes) -> Arrived:
        return self.finish(self.start(rows_TD, ids_TK, weights_TK, sizes))

    def refuse(self, device: torch.device) -> None:
        refuse_counts(self.context, self._width, device)

    def restore(self, tensors: Sequence[Tensor]) -> Route:
        if self._nodes.exact:
            return restored_route(self.context, tensors, _SUFFIXES)
        splits, source_T, member_T, cu_of_T, more_splits, source_S, member_S, cu_T = tensors[:8]
        inner = restored_leg(self.context, more_splits, source_S, member_S, cu_T, WITHIN_NODE)
        legs = restored_leg(self.context, splits, source_T, member_T, cu_of_T), inner
        return TwoLevelRoute(context=self.context, legs=legs, index=self.context.index_from(tensors[8:]))

    def blank_route(
        self, num_rows: int | None, weights_TK: Tensor, new_size: Callable[[], int], capacity: Capacity | None
    ) -> Route:
        context, device = self.context, weights_TK.device
        if self._nodes.exact:
            return blank_exact(context, num_rows, weights_TK, new_size, _SUFFIXES)
        first = blank_leg(context, new_size() if num_rows is None else num_rows + 1, new_size, device)
        second = blank_leg(context, new_size(), new_size, device, WITHIN_NODE)
        index = context.blank_index(None, new_size, capacity=None, device=device)
        return TwoLevelRoute(context=context, legs=(first, second), index=index)
