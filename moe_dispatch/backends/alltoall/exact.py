"""``alltoall`` with ``reduction="exact"``: the output of every slot comes home, and is summed there in slot order.

Rows go out as with ``reduction="fast"``. On the way back a leg carries one packet for each slot instead of one sum for
each row, so the route also knows the slots that the leg carried: a ``SlotWay``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from moe_dispatch.backends.alltoall.backend import CountingBackend, LegRoute, Started, exchange
from moe_dispatch.backends.base import Arrived, BackendContext
from moe_dispatch.backends.rank_major import RankMajorRoute, arrive
from moe_dispatch.backends.wire import PacketFormat, back_wire, packet_format, row_format
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

    def home(self, context: BackendContext, packets: Tensor, slots: SlotIndex, *, label: str) -> Tensor:
        """Send one packet back for each slot. Return those that come in, in memory of the workspace.

        Args:
            context: Context of the backend.
            packets: The packets of this rank's slots.
            slots: The slots, in the order in which ``packets`` has them.
            label: Label of the collective.
        """
        outgoing = context.workspace.lend(slots.byrow_N.shape[0], packets.shape[1], device=packets.device)
        context.permutation_of(packets).gather(packets, slots.byrow_N, outgoing)
        return exchange(context, outgoing, self.slots_in, self.slots_out, label)


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


def slot_packets(context: BackendContext, rows_RD: Tensor, values_R: Tensor | None) -> tuple[PacketFormat, Tensor]:
    """Pack the outputs of experts, each with its value if there are values. Return the format and the packets."""
    row = row_format(rows_RD.dtype, rows_RD.shape[1], back_wire(context.shape.wire_dtype))
    form = packet_format(row, 1, None if values_R is None else values_R.dtype)
    if values_R is None:
        return form, row.encoded(rows_RD)
    packets = torch.empty(rows_RD.shape[0], form.stride, dtype=torch.uint8, device=rows_RD.device)
    row.encode(rows_RD, packets[:, : row.nbytes])
    form.weights(packets).copy_(values_R.unsqueeze(1))
    return form, packets


def slot_sums(
    route: RankMajorRoute,
    way: SlotWay,
    packets: Tensor,
    form: PacketFormat,
    weights_TK: Tensor | None,
    *,
    dtype: torch.dtype,
    has_values: bool,
) -> tuple[Tensor, Tensor | None]:
    """Sum the packets that came home in the order of slots: (T, D), and their values by slot (T, K) if they have any.

    Args:
        route: Route of the dispatch.
        way: The way on which the packets came.
        packets: The packets.
        form: Format of the packets.
        weights_TK: Weights to apply; None for none.
        dtype: Dtype of the sums.
        has_values: Whether the packets have values.
    """
    slots, row = way.index, form.row
    out = route.context.workspace.lend(slots.num_rows, row.hidden, dtype=dtype, device=packets.device)
    weights_N = None if weights_TK is None else slots.in_row_order(weights_TK)
    route.permutation.sum_bags(packets.view(row.numbers), slots.byrow_N, slots.cu_S, weights_N, out)
    return out, slots.to_slots(form.weights(packets).reshape(-1)) if has_values else None


@final
@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ExactRoute(LegRoute):
    """A route on which the outputs of slots come back one by one.

    Attributes:
        way: The way back of the slots.
        weights_TK: The weights, which this rank applies to what comes home.
    """

    way: SlotWay
    weights_TK: Tensor

    def collect(
        self, rows_RD: Tensor, weights_R: Tensor | None, values_R: Tensor | None, *, label: str
    ) -> tuple[Tensor, Tensor | None]:
        form, packets = slot_packets(self.context, rows_RD, values_R)
        packets = self.way.home(self.context, packets, self.index, label=label)
        weights_TK = None if weights_R is None else self.weights_TK
        has_values = values_R is not None
        return slot_sums(self, self.way, packets, form, weights_TK, dtype=rows_RD.dtype, has_values=has_values)


@final
@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ExactStarted:
    """A dispatch whose rows are on their way, with what its route needs for the way home."""

    sent: Started
    way: SlotWay
    weights_TK: Tensor


@final
class ExactAllToAll(CountingBackend):
    """``alltoall`` with ``reduction="exact"``."""

    def start(
        self, rows_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor, sizes: Sizes, mark: Tensor | None = None
    ) -> ExactStarted:
        """Start the dispatch as ``AllToAll`` does, and group the slots for the way home while the rows travel."""
        sent = self.send(rows_TD, ids_TK, weights_TK, sizes, mark)
        experts, width, host = self.targets.num_experts, self.targets.width, sent.host
        slots = [sum(host[begin : begin + experts]) for begin in range(width, len(host), width)]
        owner_TK = (ids_TK + experts).div(experts, rounding_mode="floor")
        way = slot_way(slots, owner_TK, range(self.context.shape.ep_size))
        return ExactStarted(sent=sent, way=way, weights_TK=weights_TK.detach())  # a route is no part of a graph

    def finish(self, started: ExactStarted) -> Arrived:
        sent = started.sent
        sent.work.wait()
        rows_SD, weights_SK, ids_SK = sent.form.unpack(sent.received)
        route = ExactRoute(
            context=self.context,
            leg=sent.leg,
            way=started.way,
            index=self.index_of(sent, ids_SK),
            weights_TK=started.weights_TK,
        )
        return arrive(route, rows_SD, weights_SK, sent.form.row.dtype, wants_weights=sent.wants_weights)
