"""The counts of ``alltoall`` with ``levels=2``, which sends a row once to each node that needs it.

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
from typing import final

import torch
from torch import Tensor

from moe_dispatch.backends.alltoall.route import Splits
from moe_dispatch.backends.base import MoEShape
from moe_dispatch.communication import to_device
from moe_dispatch.errors import ConfigError

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
        place_SK = (ids_SK.long() - first).div(self.num_local_experts, rounding_mode="floor") + 1
        return torch.where((place_SK < 0) | (place_SK > self.ranks_per_node), 0, place_SK)

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
        """Return the splits of both legs.

        Args:
            host: Table of L + 1 + num_columns columns: the sums of all counts that came in, then P rows of counts that
                went out, then P rows of counts that came in.
        """
        slots, size = self.num_local_experts, self.ranks_per_node
        width, group = slots + 1 + self.num_columns, size * self.num_nodes
        total, *others = [host[begin : begin + width] for begin in range(0, len(host), width)]
        sent, came = others[:group], others[group:]
        first = Splits(
            rows_out=self._at(self.relays, [sent[rank][slots + 1] for rank in self.relays]),
            rows_in=self._at(self.relays, [came[rank][slots + 1] for rank in self.relays]),
            slots_out=self._slots_at(self.relays, [sum(sent[rank][slots + 2 + size :]) for rank in self.relays]),
            slots_in=self._slots_at(self.relays, [sum(came[rank][slots + 2 + size :]) for rank in self.relays]),
        )
        from_place = [came[place::size] for place in range(size)]
        second = Splits(
            rows_out=self._at(self.neighbours, total[slots + 2 : slots + 2 + size]),
            rows_in=self._at(self.neighbours, [sum(row[slots] for row in rows) for rows in from_place]),
            slots_out=self._slots_at(self.neighbours, total[slots + 2 + size :]),
            slots_in=self._slots_at(self.neighbours, [sum(sum(row[:slots]) for row in rows) for rows in from_place]),
        )
        return first, second

    def _slots_at(self, ranks: range, values: list[int]) -> list[int]:
        return self._at(ranks, values) if self.exact else []

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
        by_place = [count for place in range(self.ranks_per_node) for count in rows_in[place :: self.ranks_per_node]]
        repeats = to_device(by_place, local_ids_SK.device)
        nodes = torch.arange(self.num_nodes, device=local_ids_SK.device).repeat(self.ranks_per_node)
        origin_S = nodes.repeat_interleave(repeats, output_size=sum(rows_in))
        return local_ids_SK.int() * self.num_nodes + origin_S.int().unsqueeze(1)
