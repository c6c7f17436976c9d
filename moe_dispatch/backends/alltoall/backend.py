"""``alltoall`` in eager mode: a dispatch, its route, and the exchange of rows between ranks.

``exact`` has the class for ``reduction="exact"``, ``fixed`` that of graph-safe mode, and ``options`` chooses one.

Legend, beside the one of ``moe_dispatch/types.py``: B rows that this rank sends on one leg.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from moe_dispatch.backends.alltoall.kernels import ByKernels
from moe_dispatch.backends.base import (
    Arrived,
    Backend,
    BackendContext,
)
from moe_dispatch.backends.marks import WANTS_WEIGHTS, marks_agree
from moe_dispatch.backends.rank_major import RankMajorRoute, arrive
from moe_dispatch.backends.wire import (
    Encoded,
    PacketFormat,
    back_wire,
    dispatch_format,
    packet_format,
    row_format,
)
from moe_dispatch.communication import read_host
from moe_dispatch.errors import PeerError
from moe_dispatch.permutation import SlotIndex
from moe_dispatch.permutation.index import true_positions
from moe_dispatch.seams.group_observers import Work
from moe_dispatch.types import Sizes

# The exchange of counts sends ``rows + mark * MARK``, where ``mark`` is the mark of the sending rank. Every number of
# rows is smaller than ``MARK``, so a floor division gives the mark, and the remainder is the number of rows.
MARK = 2**40


@final
@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Leg:
    """One exchange of rows between ranks, and its way back.

    For example, of two rows, row 0 goes to rank 1, and row 1 goes to ranks 0 and 1. Then ``source_B`` is [1, 0, 1],
    ``member_B`` is [1, 0, 2] and ``cu_T`` is [0, 1, 3].

    Attributes:
        rows_out: Number of rows that go to each rank, on the host.
        rows_in: Number of rows that come from each rank.
        source_B: int64 (B,), the row of this rank that each sent row is a copy of. Sent rows are ordered by
            destination rank, then by row. Kernels write -1 for the places of graph-safe mode that stay empty.
        member_B: int64 (B,), the numbers of the sent rows, ordered by the row that they are copies of. In graph-safe
            mode it is longer, and entries from ``cu_T[-1]`` on may be anything.
        cu_T: int64 (T+1,), where the copies of each row begin in ``member_B``.
    """

    context: BackendContext
    rows_out: Sequence[int]
    rows_in: Sequence[int]
    source_B: Tensor
    member_B: Tensor
    cu_T: Tensor

    @property
    def tables(self) -> tuple[Tensor, Tensor, Tensor]:
        """The tables of ``Permutation.scatter``."""
        return self.source_B, self.member_B, self.cu_T

    def add_up(self, packets: Tensor, form: PacketFormat, out: Tensor, values: Tensor | None, *, label: str) -> None:
        """Send one packet back for each row that arrived, and sum the packets that come back by row.

        Args:
            packets: The packets.
            form: Format of the packets.
            out: (T, D), gets the sums of the rows.
            values: (T, K), gets the sums of the weights; None if the packets have none.
            label: Label of the collective.
        """
        context = self.context
        received = context.workspace.lend(self.source_B.shape[0], packets.shape[1], device=packets.device)
        # The way back: what went out comes in.
        work = context.communicator.all_to_all(received, packets, self.rows_out, self.rows_in, label=label)
        permutation = context.permutations[type(received), received.device.type]
        work.wait()
        # Sum whole packets as if they held only numbers of the row's dtype. ``sum_bags`` ignores the columns behind the
        # row.
        permutation.sum_bags(received.view(form.row.numbers), self.member_B, self.cu_T, None, out)
        if values is not None:
            permutation.sum_bags(form.weights(received), self.member_B, self.cu_T, None, values)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class LegRoute(RankMajorRoute):
    """The base of routes on which rows go out along one leg."""

    leg: Leg

    @final
    def spread(self, rows_TD: Tensor, wire: str | None, *, label: str) -> Tensor | Encoded:
        row, context, leg = row_format(rows_TD.dtype, rows_TD.shape[1], wire), self.context, self.leg
        permutation = context.permutations[type(rows_TD), rows_TD.device.type]
        outgoing = context.workspace.lend(leg.source_B.shape[0], row.nbytes, device=rows_TD.device)
        if permutation.send_places is None:
            permutation.gather(row.encoded(rows_TD), leg.source_B, outgoing)
        else:
            row.scatter(permutation, rows_TD, leg.tables, outgoing)
        return row.decode(exchange(context, outgoing, leg.rows_out, leg.rows_in, label))


@final
@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class AllToAllRoute(LegRoute):
    """A route on which one sum comes back for each row that went out."""

    def collect(
        self, rows_RD: Tensor, weights_R: Tensor | None, values_R: Tensor | None, *, label: str
    ) -> tuple[Tensor, Tensor | None]:
        form, packets = reduced_packets(self, rows_RD, weights_R, values_R)
        num_rows = self.leg.cu_T.shape[0] - 1
        out = self.context.workspace.lend(num_rows, form.row.hidden, dtype=rows_RD.dtype, device=rows_RD.device)
        values = None if values_R is None else values_R.new_empty(num_rows, form.top_k)
        self.leg.add_up(packets, form, out, values, label=label)
        return out, values


@final
@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Started:
    """A dispatch whose rows are on their way.

    Attributes:
        leg: The leg on which they are.
        work: The collective to wait for.
        outgoing: Packets that are being sent, in memory of the workspace.
        received: Memory of the workspace for the packets that arrive.
        form: Format of the packets.
        counts: The table of counts on the device, flat; the first L are the numbers of slots of this rank's experts.
        host: The same counts on the host, without marks.
        wants_weights: As in ``Arrived``.
    """

    leg: Leg
    work: Work
    outgoing: Tensor
    received: Tensor
    form: PacketFormat
    counts: Tensor
    host: list[int]
    wants_weights: bool


class Targets(ABC):
    """What rows are sent to, and the table of counts that says how many go to each rank.

    Attributes:
        num_experts: L.
        per_target: Number of experts of each target.
        count: Number of targets.
        width: Number of columns of the table. The first L are the slots of each expert, the next the rows with a mark.
        rows_at: Column of the numbers of rows that go to each rank on the leg.
    """

    num_experts: int
    per_target: int
    count: int
    width: int
    rows_at: int

    @abstractmethod
    def members(self, owner_TK: Tensor, to_ranks: Tensor) -> Tensor:
        """Write the numbers of rows to the table of counts, and return which rows go to which of the targets.

        Args:
            owner_TK: int64 (T, K), 1 + the rank of each slot's expert; 0 for slots that go nowhere.
            to_ranks: int64 (P, width), the part of the table that goes out. Its first L columns are filled.

        Returns:
            bool, one row for each target, in the order of their ranks, and T columns.
        """


@final
class Ranks(Targets):
    """The ranks of the group as targets."""

    def __init__(self, context: BackendContext) -> None:
        self.num_experts = self.per_target = self.rows_at = context.shape.num_local_experts
        self.count, self.width = context.shape.ep_size, self.num_experts + 1

    def members(self, owner_TK: Tensor, to_ranks: Tensor) -> Tensor:
        members_PT = rank_members(owner_TK, to_ranks.shape[0])
        torch.sum(members_PT, 1, out=to_ranks.select(1, self.num_experts))
        return members_PT


@final
class ByOperators:
    """The counts and packets of one dispatch by operators of torch: rows are packed once, and copied to each target.

    On the CPU the copies are made while the counts travel. A GPU learns the number of packets with the counts.

    Args:
        context: Context of the backend.
        targets: What rows are sent to.
        ids_TK: As in ``Backend.start``.
        mark: As in ``Backend.start``.

    Attributes:
        counts: The table of counts of ``CountingBackend.send``, flat, with the rows that go out.
        ready: The tables of the leg and its packets, if they are made before their number is known.
    """

    ready: tuple[tuple[Tensor, ...], Tensor] | None = None

    def __init__(self, context: BackendContext, targets: Targets, ids_TK: Tensor, mark: Tensor | None) -> None:
        self._context, experts, width = context, targets.num_experts, targets.width
        size = context.shape.ep_size
        permutation = context.permutations[type(ids_TK), ids_TK.device.type]
        length = (1 + 2 * size) * width
        owner_TK, self.counts = permutation.count_owners(ids_TK, experts, width, length, graph_safe=False)
        to_ranks = self.counts.view(-1, width)[1 : 1 + size]
        self._members = targets.members(owner_TK, to_ranks)
        if mark is not None:  # -1 makes the number of rows negative
            to_ranks.select(1, experts).add_(mark, alpha=MARK)

    def pack(self, form: PacketFormat, rows_TD: Tensor, weights_TK: Tensor, ids_TK: Tensor) -> None:
        """Pack the rows, and on the CPU order the packets."""
        self._packets = form.pack(rows_TD, weights_TK, ids_TK)
        if self._packets.is_cpu:
            self.ready = ordered(self._context, self._packets, self._members)

    def outgoing(self, count: int) -> tuple[tuple[Tensor, ...], Tensor]:
        """Return the tables of the leg, and its packets, from their number."""
        return ordered(self._context, self._packets, self._members, count)


class CountingBackend(Backend):
    """The base of backends of this kind: ranks exchange counts with marks, and then exactly the rows that are needed.

    Args:
        context: The objects that the backend is built with.
        targets: What rows are sent to; by default ranks.
    """

    def __init__(self, context: BackendContext, targets: Targets | None = None) -> None:
        super().__init__(context)
        self.targets: Targets = Ranks(context) if targets is None else targets
        self.first_expert = context.communicator.rank * context.shape.num_local_experts

    @final
    def dispatch(self, rows_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor, sizes: Sizes) -> Arrived:
        """Do both halves. The dispatcher calls ``start`` and ``finish`` instead."""
        return self.finish(self.start(rows_TD, ids_TK, weights_TK, sizes))

    @final
    def refuse(self, device: torch.device) -> None:
        comm, ones = self.context.communicator, [1] * self.context.shape.ep_size
        marked = torch.full((len(ones), self.targets.width), -1, dtype=torch.int64, device=device)
        comm.all_to_all(torch.empty_like(marked), marked, ones, ones, label="counts").wait()

    @final
    def send(
        self, rows_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor, sizes: Sizes, mark: Tensor | None = None
    ) -> Started:
        """Exchange counts, then start to send exactly the rows that are needed.

        The counts stand in a table of at least L + 1 columns: the number of slots of each of L experts, then the number
        of rows with a mark. Row 0 is for the sums of all counts that come in. Rows 1 to P are the counts that go to
        ranks 0 to P-1. Rows P+1 to 2P are the counts that come from ranks 0 to P-1.

        Raises:
            PeerError: A rank refuses its call, or makes another one.
        """
        context, targets, width, size = self.context, self.targets, self.targets.width, self.context.shape.ep_size
        packing: ByOperators | ByKernels
        if context.permutations[type(ids_TK), ids_TK.device.type].send_places is None:
            packing = ByOperators(context, targets, ids_TK, mark)
        elif targets.count == size:
            packing = ByKernels(context, targets, ids_TK, mark)
        else:  # the targets are nodes, but ranks are counted
            packing = ByKernels(context, targets, ids_TK, mark, ByOperators(context, targets, ids_TK, mark).counts)
        counts = packing.counts
        _, to_ranks, from_ranks = counts.view(-1, width).split_with_sizes([1, size, size])
        # First the counts, because a rank must know how many rows come in before it can receive them. They also bring
        # the marks, so all ranks refuse a call here, before rows travel.
        work = context.communicator.all_to_all(from_ranks, to_ranks, [1] * size, [1] * size, label="counts")
        form = dispatch_format(context.shape, rows_TD.dtype, weights_TK.dtype)
        if sizes.columns is not None:
            form = sizes.columns.added_to(form)
        packing.pack(form, rows_TD, weights_TK, ids_TK)  # while the counts travel
        work.wait()
        torch.sum(from_ranks, 0, out=counts[:width])
        # The one host sync of a dispatch: the sizes of the messages that follow must be numbers of the host.
        host, marks = read_host(counts), []
        for row, at in enumerate(range(targets.num_experts, len(host), width)):
            its_mark, host[at] = divmod(host[at], MARK)
            if row > size:  # the rows behind number P came in, with the marks of their senders
                marks.append(its_mark)
        if not 0 <= min(marks) == max(marks) and not marks_agree(marks):
            raise PeerError(f"Backend 'alltoall': the calls of all ranks must have one mark, got {marks} by rank.")
        rows = host[targets.rows_at :: width]
        rows_out, rows_in = rows[1 : 1 + size], rows[1 + size :]
        tables, outgoing = packing.ready or packing.outgoing(sum(rows_out))
        leg, received, work = start_rows(context, tables, outgoing, rows_TD.shape[0], rows_out, rows_in)
        return Started(
            leg=leg,
            work=work,
            outgoing=outgoing,
            received=received,
            form=form,
            counts=counts,
            host=host,
            wants_weights=mark is None or max(marks) >= WANTS_WEIGHTS,
        )

    @final
    def index_of(self, sent: Started, ids_SK: Tensor) -> SlotIndex:
        """Return the index of a dispatch with one leg whose rows have arrived, with the global ids ``ids_SK``."""
        experts, pad_multiple = self.targets.num_experts, self.context.shape.pad_multiple
        permutation = self.context.permutations[type(ids_SK), ids_SK.device.type]
        slots_L, real_L = sent.host[:experts], sent.counts[:experts]
        return permutation.group_slots(ids_SK, slots_L, pad_multiple, first=self.first_expert, real_L=real_L)


@final
class AllToAll(CountingBackend):
    """The backend over ``torch.distributed`` all-to-all.

    With operators of torch, rows are packed while counts travel, and on the CPU they are also ordered by destination.
    While rows travel, the order in which they will be summed is computed by a sort. Kernels give rows their places
    while counts travel, and then write each row to all its packets.

    Cost: one host sync and two collectives (counts, data) per dispatch; one collective per combine, and one per
    backward of either. Each distinct pair of a row and another rank takes these bytes: in dispatch, the row and 6 bytes
    per top_k slot (a float32 weight and an int16 id); in combine and its backward, the row; in the backward of
    dispatch, the row, and 4 bytes per slot for the gradient of the weights. A row with slots is rounded up to a
    multiple of 32 bytes, and of 16 of its numbers.

    Source: sending a row once per rank, as in DeepEP's normal mode (v1.2.1).
    """

    start = CountingBackend.send

    def finish(self, started: Started) -> Arrived:
        started.work.wait()
        rows_SD, weights_SK, ids_SK = started.form.unpack(started.received)
        route = AllToAllRoute(context=self.context, leg=started.leg, index=self.index_of(started, ids_SK))
        return arrive(route, rows_SD, weights_SK, started.form.row.dtype, wants_weights=started.wants_weights)


def ordered(
    context: BackendContext, packets: Tensor, members_PT: Tensor, count: int | None = None
) -> tuple[tuple[Tensor, ...], Tensor]:
    """Return the rows to send in order of their destinations, int64 (B,) in a tuple, and their packets.

    ``count`` is not used on the CPU, where the rows are found without it.
    """
    source_B = true_positions(members_PT, count).select(1, 1).contiguous()
    outgoing = context.workspace.lend(source_B.shape[0], packets.shape[1], device=packets.device)
    context.permutations[type(packets), packets.device.type].gather(packets, source_B, outgoing)
    return (source_B,), outgoing


def start_rows(
    context: BackendContext,
    tables: tuple[Tensor, ...],
    outgoing: Tensor,
    num_rows: int,
    rows_out: Sequence[int],
    rows_in: Sequence[int],
    *,
    label: str = "dispatch",
) -> tuple[Leg, Tensor, Work]:
    """Start to send packets. While they travel, compute the order of the sums that will come back if it is not known.

    Args:
        context: Context of the backend.
        tables: ``source_B``, ``member_B`` and ``cu_T`` of the leg, or ``source_B`` alone.
        outgoing: The packets, in the order of ``source_B``.
        num_rows: T.
        rows_out: As in ``Leg``.
        rows_in: As in ``Leg``.
        label: Label of the collective.

    Returns:
        The leg, memory of the workspace for the packets that arrive, and the exchange under way.
    """
    lend = context.workspace.lend if context.deliver is None else context.for_arrivals
    received = lend(sum(rows_in), outgoing.shape[1], device=outgoing.device)
    work = context.communicator.all_to_all(received, outgoing, rows_in, rows_out, label=label)
    source_B, *by_row = tables
    if not by_row:
        order = source_B.sort(stable=True)
        edges = torch.arange(num_rows + 1, device=source_B.device)
        by_row = [order.indices, torch.searchsorted(order.values, edges)]
    leg = Leg(
        context=context,
        rows_out=rows_out,
        rows_in=rows_in,
        source_B=source_B,
        member_B=by_row[0],
        cu_T=by_row[1],
    )
    return leg, received, work


def exchange(
    context: BackendContext, outgoing: Tensor, rows_out: Sequence[int], rows_in: Sequence[int], label: str
) -> Tensor:
    """Send rows, uint8. Return the rows that arrive, in memory of the workspace."""
    received = context.workspace.lend(sum(rows_in), outgoing.shape[1], device=outgoing.device)
    context.communicator.all_to_all(received, outgoing, rows_in, rows_out, label=label).wait()
    return received


def reduced_packets(
    route: RankMajorRoute, rows_RD: Tensor, weights_R: Tensor | None, values_R: Tensor | None
) -> tuple[PacketFormat, Tensor]:
    """Sum expert rows for each row that arrived here, and pack the sums with one value for each of their slots.

    Returns:
        The format of the packets, and the packets in memory of the workspace.
    """
    context, index = route.context, route.index
    row = row_format(rows_RD.dtype, rows_RD.shape[1], back_wire(context.shape.wire_dtype))
    form = packet_format(row, index.top_k, None if values_R is None else values_R.dtype)
    packets = context.workspace.lend(index.num_rows, form.stride, device=rows_RD.device)
    permutation = context.permutations[type(index.source_R), rows_RD.device.type]
    values = None if values_R is None else (values_R, form.weights(packets))
    permutation.reduce(rows_RD, index, weights_R, packets.view(row.numbers)[:, : row.hidden], values)
    return form, packets


def rank_members(owner_TK: Tensor, ep_size: int) -> Tensor:
    """Return bool (P, T), True if the rank owns at least one expert of the row.

    Args:
        owner_TK: int64 (T, K), 1 + the rank of each slot's expert; 0 for slots that go nowhere.
        ep_size: P.
    """
    members = torch.zeros(ep_size + 1, owner_TK.shape[0], dtype=torch.bool, device=owner_TK.device)
    return members.scatter_(0, owner_TK.t(), True)[1:]
