"""``alltoall`` with ``reduction="exact"``: the output of every slot comes home, and is summed there in slot order.

Rows go out as with ``reduction="fast"``. On the way back each leg carries one packet for each slot instead of one sum
for each row, so the route also knows the slots that each leg carried: a ``SlotWay``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import final

import torch
from torch import Tensor

from moe_dispatch.backends.alltoall.backend import AllToAll, AllToAllRoute, Started, exchange
from moe_dispatch.backends.rank_major import RankMajorRoute
from moe_dispatch.backends.wire import back_wire, packet_format, row_format
from moe_dispatch.permutation import SlotIndex, group_slots
from moe_dispatch.types import Sizes


@final
@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class SlotWay:
    """The way back of the slots of one leg.

    Attributes:
        slots_out: Number of slots that went to each rank, on the host.
        slots_in: Number of slots that came from each rank.
        index: The slots of this rank's rows, grouped by the rank to which they went.
    """

    slots_out: Sequence[int]
    slots_in: Sequence[int]
    index: SlotIndex


def slot_way(slots: Sequence[int], owner_TK: Tensor, to: range) -> SlotWay:
    """Group slots by rank.

    Args:
        slots: The numbers of slots that went to each rank, then those that came from each rank.
        owner_TK: int64 (T, K), 1 + the number in ``to`` of the rank to which each slot goes; 0 for none.
        to: The ranks to which the leg sends.
    """
    size = len(slots) // 2
    index = group_slots(owner_TK - 1, [slots[rank] for rank in to])
    return SlotWay(slots_out=slots[:size], slots_in=slots[size:], index=index)


@final
@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ExactRoute(AllToAllRoute):
    """A route on which the outputs of slots come back one by one.

    Attributes:
        ways: The way back of each leg.
        weights_TK: The weights, which this rank applies to what comes home.
    """

    ways: Sequence[SlotWay]
    weights_TK: Tensor

    def collect(
        self, rows_RD: Tensor, weights_R: Tensor | None, values_R: Tensor | None, *, label: str
    ) -> tuple[Tensor, Tensor | None]:
        context, slots = self.context, self.index
        row = row_format(rows_RD.dtype, rows_RD.shape[1], back_wire(context.shape.wire_dtype))
        form = packet_format(row, 1, None if values_R is None else values_R.dtype)
        if values_R is None:
            packets = row.encoded(rows_RD)
        else:
            packets = torch.empty(rows_RD.shape[0], form.stride, dtype=torch.uint8, device=rows_RD.device)
            row.encode(rows_RD, packets[:, : row.nbytes])
            form.weights(packets).copy_(values_R.unsqueeze(1))
        for leg, way in zip(reversed(self.legs), reversed(self.ways), strict=True):
            outgoing = context.workspace.lend(slots.byrow_N.shape[0], packets.shape[1], device=packets.device)
            context.permutation_of(packets).gather(packets, slots.byrow_N, outgoing)
            packets = exchange(context, outgoing, way.slots_in, way.slots_out, label + leg.suffix)
            slots = way.index
        out = context.workspace.lend(slots.num_rows, row.hidden, dtype=rows_RD.dtype, device=rows_RD.device)
        weights_N = None if weights_R is None else slots.in_row_order(self.weights_TK)
        context.permutation_of(self.index.source_R).sum_bags(
            packets.view(row.numbers), slots.byrow_N, slots.cu_S, weights_N, out
        )
        values = None if values_R is None else slots.to_slots(form.weights(packets).reshape(-1))
        return out, values


@final
class ExactAllToAll(AllToAll):
    """``alltoall`` with one level and ``reduction="exact"``."""

    def start(
        self, rows_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor, sizes: Sizes, mark: Tensor | None = None
    ) -> Started:
        """Start the dispatch as ``AllToAll`` does, and group the slots for the way home while the rows travel."""
        started = super().start(rows_TD, ids_TK, weights_TK, sizes, mark)
        experts, host = self.num_experts, started.host
        slots = [sum(host[begin : begin + experts]) for begin in range(self.width, len(host), self.width)]
        owner_TK = (ids_TK + experts).div(experts, rounding_mode="floor")
        way = slot_way(slots, owner_TK, range(self.context.shape.ep_size))
        return replace(started, kept=(way, weights_TK.detach()))  # a route is no part of a graph

    def route(self, started: Started, ids_SK: Tensor) -> RankMajorRoute:
        index, (way, weights_TK) = super().route(started, ids_SK).index, started.kept
        return ExactRoute(context=self.context, legs=(started.leg,), ways=(way,), index=index, weights_TK=weights_TK)
