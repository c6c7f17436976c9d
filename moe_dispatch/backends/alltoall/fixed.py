"""Graph-safe ``alltoall``: every rank sends ``pair_rows`` rows to every rank, whatever the routing.

If a rank has fewer rows for another rank, the unused rows travel with ids of -1. Counts travel inside the packets, so
the host never reads one: the first packet from each rank to each rank has a note. The note is the number of slots that
the sender had for the receiver, including slots for which there was no room.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, final

import torch
from torch import Tensor

from moe_dispatch.backends.alltoall.backend import AllToAllRoute, Leg, rank_members
from moe_dispatch.backends.base import Arrived, Backend
from moe_dispatch.backends.capacity import tokens_of
from moe_dispatch.backends.rank_major import arrive
from moe_dispatch.backends.wire import PacketFormat, dispatch_format
from moe_dispatch.permutation.index import front, heaviest, running_total
from moe_dispatch.seams.group_observers import Work
from moe_dispatch.types import Capacity, Sizes


@final
@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class FixedStarted:
    """A graph-safe dispatch whose rows are on their way.

    Attributes:
        leg: The leg on which they are.
        busiest: As in ``SendTable``.
        work: The collective to wait for.
        outgoing: Packets that are being sent, in memory of the workspace.
        received: Memory of the workspace for the packets that arrive.
        form: Format of the packets.
        dtype: Dtype of the rows that were sent.
        capacity: Capacity of the dispatch.
    """

    leg: Leg
    busiest: Tensor
    work: Work
    outgoing: Tensor
    received: Tensor
    form: PacketFormat
    dtype: torch.dtype
    capacity: Capacity


@final
class FixedAllToAll(Backend):
    """``alltoall`` in graph-safe mode. Cost: one collective per dispatch, and one each way back; no host sync."""

    def start(
        self, rows_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor, sizes: Sizes, mark: Tensor | None = None
    ) -> FixedStarted:
        context, shape, capacity = self.context, self.context.shape, sizes.capacity
        assert capacity is not None
        assert capacity.pair_rows is not None
        size, pair_rows, experts = shape.ep_size, capacity.pair_rows, shape.num_local_experts
        permutation, form = (
            context.permutation_of(ids_TK),
            dispatch_format(shape, rows_TD.dtype, weights_TK.dtype, note=True),
        )
        if sizes.columns is not None:
            form = sizes.columns.added_to(form)
        outgoing = context.workspace.lend(size * pair_rows, form.stride, device=rows_TD.device)
        received = context.for_arrivals(size * pair_rows, form.stride, rows_TD.device)
        may_overflow, send_places = pair_rows < tokens_of(shape), permutation.send_places
        if send_places is None or may_overflow:
            owner_TK, counts = permutation.count_owners(ids_TK, experts, experts, (1 + size) * experts, graph_safe=True)
            members_PT, slots_P = rank_members(owner_TK, size), counts.view(-1, experts)[1:].sum(1)
            table = send_table(members_PT, owner_TK, weights_TK, pair_rows, may_overflow=may_overflow)
        else:
            *tables, slots_P = send_places(ids_TK, experts, size, pair_rows=pair_rows)
            table = SendTable(*tables)
        source_B, member_N, cu_T, busiest = table
        if send_places is None:
            is_empty_B1, source_B = (source_B < 0).unsqueeze(1), source_B.clamp(min=0)
            permutation.gather(form.pack(rows_TD, weights_TK, ids_TK), source_B, outgoing)
            form.ids(outgoing).masked_fill_(is_empty_B1, -1)
            form.notes(outgoing)[::pair_rows, 0] = slots_P
        else:
            form.scatter(permutation, rows_TD, (weights_TK, ids_TK), (source_B, member_N, cu_T), outgoing, slots_P)
        rows = [pair_rows] * size
        work = context.communicator.all_to_all(received, outgoing, rows, rows, label="dispatch")
        return FixedStarted(
            leg=self.leg(source_B, member_N, cu_T),
            busiest=busiest,
            work=work,
            outgoing=outgoing,
            received=received,
            form=form,
            dtype=rows_TD.dtype,
            capacity=capacity,
        )

    def finish(self, started: FixedStarted) -> Arrived:
        context, capacity, form, received = self.context, started.capacity, started.form, started.received
        started.work.wait()
        rows_SD, weights_SK, ids_SK = form.unpack(received)
        first_expert = context.communicator.rank * context.shape.num_local_experts
        index = context.group(ids_SK, weights_SK, capacity, first=first_expert)
        return arrive(
            AllToAllRoute(context=context, leg=started.leg, index=index),
            rows_SD,
            weights_SK,
            started.dtype,
            # Each sender has noted how many slots it had for this rank, those without room included.
            demand=torch.stack([form.notes(received)[:: capacity.pair_rows, 0].sum(), started.busiest]),
        )

    def dispatch(self, rows_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor, sizes: Sizes) -> Arrived:
        return self.finish(self.start(rows_TD, ids_TK, weights_TK, sizes))

    def leg(self, source_B: Tensor, member_B: Tensor, cu_T: Tensor) -> Leg:
        """Return the leg of a dispatch, on which all ranks send each other equally many rows."""
        size = self.context.shape.ep_size
        rows = [len(source_B) // size] * size
        return Leg(context=self.context, rows_out=rows, rows_in=rows, source_B=source_B, member_B=member_B, cu_T=cu_T)


@final
class SendTable(NamedTuple):
    """The rows in the B = P * pair_rows places of a send buffer. The first pair_rows places go to rank 0, and so on.

    For example, of two rows, row 0 goes to rank 1, and row 1 goes to ranks 0 and 1. With P = 2 and pair_rows = 2,
    ``source_B`` is [1, -1, 0, 1], ``member_N`` is [2, 0, 3, 0] and ``cu_T`` is [0, 1, 3].

    Attributes:
        source_B: int64 (B,), the row in each place, ascending for each destination rank; -1 in empty places.
        member_N: int64 (P * T,), the used places, ordered by their row and then by place. Entries from ``cu_T[-1]`` on
            may be anything.
        cu_T: int64 (T+1,), where the places of each row begin in ``member_N``.
        busiest: int64 (), the largest number of rows that this rank had for any one rank.
    """

    source_B: Tensor
    member_N: Tensor
    cu_T: Tensor
    busiest: Tensor


def send_table(
    members_PT: Tensor, owner_TK: Tensor, weights_TK: Tensor, pair_rows: int, *, may_overflow: bool
) -> SendTable:
    """Give each pair of a row and a destination rank a place in the send buffer.

    Args:
        members_PT: bool (P, T), True if the rank owns at least one expert of the row.
        owner_TK: int64 (T, K), 1 + the rank of each slot's expert; 0 for slots that go nowhere.
        weights_TK: floating (T, K).
        pair_rows: Number of places for each destination rank. If a rank has more rows for a destination, the rows of
            the smallest weights stay behind, and of equal weights the last rows. The weight of a row is the largest of
            its slots' weights at that destination.
        may_overflow: Whether a destination can have more rows than places.

    Cost: single passes over P * T, and a stable sort of P * T with ``may_overflow``; no host sync.
    """
    kept_PT, (size, count) = members_PT, members_PT.shape
    if may_overflow:
        weights_TP = weights_TK.new_full((count, size + 1), float("-inf"))
        weights_TP.scatter_reduce_(1, owner_TK, weights_TK, "amax")
        kept_PT = heaviest(weights_TP[:, 1:].t(), members_PT, pair_rows)
    nowhere = size * pair_rows
    at_PT = kept_PT.cumsum(1) + torch.arange(-1, nowhere - 1, pair_rows, device=owner_TK.device).unsqueeze(1)
    at_PT = torch.where(kept_PT, at_PT, nowhere)
    row_PT = torch.arange(count, device=owner_TK.device).expand(size, count)
    source_B = torch.full((nowhere + 1,), -1, dtype=torch.int64, device=owner_TK.device)
    source_B = source_B.index_copy_(0, at_PT.reshape(-1), row_PT.reshape(-1))[:nowhere]
    kept_TP = kept_PT.t()
    return SendTable(
        source_B=source_B,
        member_N=front(at_PT.t().reshape(-1), kept_TP.reshape(-1)),
        cu_T=running_total(kept_TP.sum(1)),
        busiest=members_PT.sum(1).amax(),
    )
