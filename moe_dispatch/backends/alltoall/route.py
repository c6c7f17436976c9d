"""The route of ``alltoall``: it stores which rows go to which rank."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import final

import torch
from torch import Tensor

from moe_dispatch.backends.base import BackendContext, WireDtype
from moe_dispatch.backends.rank_major import RankMajorRoute, back_wire
from moe_dispatch.backends.wire import Packet, packet, row_format
from moe_dispatch.communication import Started, read_host
from moe_dispatch.permutation import SlotIndex


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Splits:
    """The counts of one exchange, on the host.

    Attributes:
        rows_out: Number of rows that go to each rank.
        rows_in: Number of rows that come from each rank.
        slots_out: Number of slots that go to each rank; empty unless ``reduction="exact"``.
        slots_in: Number of slots that come from each rank; empty unless ``reduction="exact"``.
    """

    rows_out: list[int]
    rows_in: list[int]
    slots_out: list[int]
    slots_in: list[int]

    def tensor(self) -> Tensor:
        """Return all counts as one int64 tensor on the CPU, which ``splits_from`` reads."""
        parts = (self.rows_out, self.rows_in, self.slots_out, self.slots_in)
        return torch.tensor([count for part in parts for count in part], dtype=torch.int64, device="cpu")


def splits_from(counts: Tensor, ep_size: int, *, exact: bool) -> Splits:
    """Rebuild splits from their ``tensor()``. The tensor is on the host, so there is no host sync."""
    values = iter(read_host(counts))

    def part(length: int) -> list[int]:
        return list(islice(values, length))

    slots = ep_size if exact else 0
    return Splits(rows_out=part(ep_size), rows_in=part(ep_size), slots_out=part(slots), slots_in=part(slots))


def even_splits(pair_rows: int, ep_size: int) -> Splits:
    """Return the splits of a graph-safe exchange, in which each rank sends ``pair_rows`` rows to each rank."""
    rows = [pair_rows] * ep_size
    return Splits(rows_out=rows, rows_in=rows, slots_out=[], slots_in=[])


@final
@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Leg:
    """One exchange of rows between ranks, and its way back.

    For example, of two rows, row 0 goes to rank 1, and row 1 goes to ranks 0 and 1. Then ``source_S`` is [1, 0, 1],
    ``member_S`` is [1, 0, 2] and ``cu_T`` is [0, 1, 3].

    Attributes:
        splits: Counts of the exchange.
        suffix: Text behind the labels of the collectives.
        source_S: int64 (S,), the row of this rank that each sent row is a copy of. Sent rows are ordered by
            destination rank, then by row.
        member_S: int64 (S,), the numbers of the sent rows, ordered by the row that they are copies of. In graph-safe
            mode it is longer, and entries from ``cu_T[-1]`` on may be anything.
        cu_T: int64 (T+1,), where the copies of each row begin in ``member_S``.
        slots_by_rank: The slots grouped by destination rank if ``reduction="exact"``, else None.
    """

    context: BackendContext
    splits: Splits
    suffix: str = ""
    source_S: Tensor
    member_S: Tensor
    cu_T: Tensor
    slots_by_rank: SlotIndex | None = None

    @property
    def num_rows(self) -> int:
        """T, the number of rows from which this rank sends."""
        return self.cu_T.shape[0] - 1

    def send(self, rows: Tensor, label: str) -> Tensor:
        """Send rows, uint8 (T, n), and return the rows that arrive, in memory of the workspace."""
        return self._exchange(rows, self.source_S, self.splits.rows_out, self.splits.rows_in, label)

    def start_return(self, packets: Tensor, label: str) -> tuple[Tensor, Started | None]:
        """Start to return one packet for each row that arrived.

        Returns:
            Memory of the workspace for the packets that come back, in the order of ``source_S``, and the exchange
            under way.
        """
        splits, comm = self.splits, self.context.communicator
        received = self.context.workspace.take((self.source_S.shape[0], packets.shape[1]), packets.device)
        return received, comm.all_to_all(received, packets, splits.rows_out, splits.rows_in, label=label + self.suffix)

    def add_up(self, received: Tensor, form: Packet, out: Tensor, values: Tensor | None) -> None:
        """Sum the packets that came back by row: their rows into ``out``, and their weights into ``values``."""
        # Sum whole packets as if they held only numbers of the row's dtype. ``sum_bags`` ignores the columns behind the
        # row.
        permutation = self.context.permutation_of(received)
        permutation.sum_bags(received.view(form.row.wire_dtype), self.member_S, self.cu_T, None, out)
        if values is not None:
            permutation.sum_bags(form.weights(received).contiguous(), self.member_S, self.cu_T, None, values)

    def return_slots(self, packets: Tensor, order_N: Tensor, label: str) -> Tensor:
        """Return one packet for each slot that arrived: packet ``order_N[i]`` belongs to the i-th slot.

        The result is in memory of the workspace. It has the packets of the slots that this rank sent, in the order of
        ``slots_by_rank``.
        """
        return self._exchange(packets, order_N, self.splits.slots_in, self.splits.slots_out, label)

    def _exchange(
        self, rows: Tensor, source: Tensor, splits_out: Sequence[int], splits_in: Sequence[int], label: str
    ) -> Tensor:
        """Send ``rows[source]``, uint8. Return the rows that arrive, in memory of the workspace."""
        space, width = self.context.workspace, rows.shape[1]
        received = space.take((sum(splits_in), width), rows.device)
        outgoing = space.take((source.shape[0], width), rows.device)
        self.context.permutation_of(rows).gather(rows, source, outgoing)
        work = self.context.communicator.all_to_all(
            received, outgoing, splits_in, splits_out, label=label + self.suffix
        )
        if work is not None:
            work.wait()
        space.give(outgoing)
        return received

    def tensors(self) -> list[Tensor]:
        """Return the tables as a list, without the splits."""
        slots = [] if self.slots_by_rank is None else self.slots_by_rank.tensors()
        return [self.source_S, self.member_S, self.cu_T, *slots]


@final
@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class AllToAllRoute(RankMajorRoute):
    """A route with one data collective in each direction for each of its legs.

    Attributes:
        legs: The exchange between ranks. With ``levels=2``: the exchange between nodes, then the exchange between the
            ranks of this node, whose rows are the rows that arrived in the first.
        weights_TK: The weights if ``reduction="exact"``, which applies them on the rank that sent the rows; else None.
    """

    context: BackendContext
    legs: tuple[Leg, ...]
    index: SlotIndex
    weights_TK: Tensor | None = None

    @contextmanager
    def spread(self, rows_TD: Tensor, wire: WireDtype | None, *, label: str) -> Iterator[Tensor]:
        row, (first, *others) = row_format(rows_TD.dtype, rows_TD.shape[1], wire), self.legs
        received = first.send(row.encode(rows_TD), label)
        for leg in others:
            relayed, received = received, leg.send(received, label)
            self.context.workspace.give(relayed)
        yield row.read(received)
        self.context.workspace.give(received)

    def collect(
        self, rows_RD: Tensor, weights_R: Tensor | None, values_R: Tensor | None, *, label: str
    ) -> tuple[Tensor, Tensor | None]:
        if self.legs[0].slots_by_rank is not None:
            weights_TK = None if weights_R is None else self.weights_TK
            return self._collect_exact(rows_RD, weights_TK, values_R, label)
        form = packet(
            row_format(rows_RD.dtype, rows_RD.shape[1], back_wire(self.wire_dtype)),
            self.index.top_k,
            None if values_R is None else values_R.dtype,
        )
        space, device = self.context.workspace, rows_RD.device
        outgoing = space.take((self.index.num_rows, form.stride), device)
        self.permutation.reduce(rows_RD, self.index, weights_R, form.row.read(form.rows(outgoing)))
        if values_R is not None:
            form.weights(outgoing).copy_(self.index.to_slots(values_R))
        home, *relays = self.legs
        for leg in reversed(relays):
            received, work = leg.start_return(outgoing, label)
            sums = space.take((leg.num_rows, form.stride), device)
            if work is not None:
                work.wait()
            space.give(outgoing)
            values = None if values_R is None else form.weights(sums)
            leg.add_up(received, form, form.row.read(form.rows(sums)), values)
            space.give(received)
            outgoing = sums
        received, work = home.start_return(outgoing, label)
        # The results are allocated while the rows travel.
        out = space.lend(self.num_rows, form.row.hidden, dtype=rows_RD.dtype, device=device)
        values = None if values_R is None else values_R.new_empty(self.num_rows, form.top_k)
        if work is not None:
            work.wait()
        space.give(outgoing)
        home.add_up(received, form, out, values)
        space.give(received)
        return out, values

    def _collect_exact(
        self, rows_RD: Tensor, weights_TK: Tensor | None, values_R: Tensor | None, label: str
    ) -> tuple[Tensor, Tensor | None]:
        row = row_format(rows_RD.dtype, rows_RD.shape[1], back_wire(self.wire_dtype))
        form = packet(row, 1, None if values_R is None else values_R.dtype)
        if values_R is None:
            packets = row.encode(rows_RD)
        else:
            packets = torch.empty(rows_RD.shape[0], form.stride, dtype=torch.uint8, device=rows_RD.device)
            row.write(rows_RD, form.rows(packets))
            form.weights(packets).copy_(values_R.unsqueeze(1))
        space, slots = self.context.workspace, self.index
        for leg in reversed(self.legs):
            assert leg.slots_by_rank is not None
            received = leg.return_slots(packets, slots.byrow_N, label)
            if leg is not self.legs[-1]:
                space.give(packets)
            packets, slots = received, leg.slots_by_rank
        out = space.lend(slots.num_rows, row.hidden, dtype=rows_RD.dtype, device=rows_RD.device)
        weights_N = None if weights_TK is None else slots.in_row_order(weights_TK)
        self.permutation.sum_bags(packets.view(row.wire_dtype), slots.byrow_N, slots.cu_S, weights_N, out)
        values = None if values_R is None else slots.to_slots(form.weights(packets).reshape(-1))
        space.give(packets)
        return out, values

    def tensors(self) -> list[Tensor]:
        ways = [*(tensor for leg in self.legs for tensor in leg.tensors()), *self.index.tensors()]
        if self.index.fixed_size:
            return ways
        exact = [] if self.weights_TK is None else [self.weights_TK.clone()]
        return [*(leg.splits.tensor() for leg in self.legs), *exact, *ways]

    @property
    def num_rows(self) -> int:
        return self.legs[0].num_rows
