"""``alltoall`` with ``reduction="exact"``: the output of every slot comes home, and is summed there in slot order.

Rows go out as in the fast form. On the way back each leg carries one packet for each slot instead of one sum for each
row, so each leg also knows the slots that it carried: a ``SlotWay``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import final

import torch
from torch import Tensor

from moe_dispatch.backends.alltoall.backend import (
    AllToAll,
    Leg,
    Underway,
    blank_leg,
    exchange,
    restored_leg,
)
from moe_dispatch.backends.base import BackendContext, Route, WireDtype
from moe_dispatch.backends.rank_major import RankMajorRoute, back_wire
from moe_dispatch.backends.wire import packet, row_format
from moe_dispatch.communication import read_host
from moe_dispatch.permutation import SlotIndex, group_slots
from moe_dispatch.types import Capacity, Sizes


@final
@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class SlotWay:
    """The way back of the slots of one leg.

    Attributes:
        leg: The leg on which their rows went out.
        slots_out: Number of slots that went to each rank, on the host.
        slots_in: Number of slots that came from each rank.
        index: The slots of this rank's rows, grouped by the rank to which they went.
    """

    leg: Leg
    slots_out: Sequence[int]
    slots_in: Sequence[int]
    index: SlotIndex

    @staticmethod
    def make(leg: Leg, slots_out: Sequence[int], slots_in: Sequence[int], owner_TK: Tensor, to: range) -> SlotWay:
        """Group slots by rank.

        Args:
            leg: As in ``SlotWay``.
            slots_out: As in ``SlotWay``.
            slots_in: As in ``SlotWay``.
            owner_TK: int64 (T, K), 1 + the number in ``to`` of the rank to which each slot goes; 0 for none.
            to: The ranks to which the leg sends.
        """
        index = group_slots(owner_TK - 1, [slots_out[rank] for rank in to])
        return SlotWay(leg=leg, slots_out=slots_out, slots_in=slots_in, index=index)

    def splits(self) -> Tensor:
        """Return the numbers of rows and of slots as one int64 tensor on the CPU."""
        counts = [*self.leg.rows_out, *self.leg.rows_in, *self.slots_out, *self.slots_in]
        return torch.tensor(counts, dtype=torch.int64, device="cpu")


@final
@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ExactRoute(RankMajorRoute):
    """A route on which the outputs of slots come back one by one.

    Attributes:
        ways: The way of each leg: one leg, or two with ``levels=2``.
        weights_TK: The weights, which this rank applies to what comes home.
    """

    context: BackendContext
    ways: tuple[SlotWay, ...]
    index: SlotIndex
    weights_TK: Tensor

    @contextmanager
    def spread(self, rows_TD: Tensor, wire: WireDtype | None, *, label: str) -> Iterator[Tensor]:
        with send_along([way.leg for way in self.ways], rows_TD, wire, label) as rows_SD:
            yield rows_SD

    def collect(
        self, rows_RD: Tensor, weights_R: Tensor | None, values_R: Tensor | None, *, label: str
    ) -> tuple[Tensor, Tensor | None]:
        context, slots = self.context, self.index
        row = row_format(rows_RD.dtype, rows_RD.shape[1], back_wire(context.shape.wire_dtype))
        form = packet(row, 1, None if values_R is None else values_R.dtype)
        if values_R is None:
            packets = row.encode(rows_RD)
        else:
            packets = torch.empty(rows_RD.shape[0], form.stride, dtype=torch.uint8, device=rows_RD.device)
            row.write(rows_RD, packets[:, : row.nbytes])
            form.weights(packets).copy_(values_R.unsqueeze(1))
        for way in reversed(self.ways):
            home = label + way.leg.suffix
            received = exchange(context, packets, slots.byrow_N, way.slots_in, way.slots_out, home)
            if way is not self.ways[-1]:
                context.workspace.give(packets)
            packets, slots = received, way.index
        out = context.workspace.lend(slots.num_rows, row.hidden, dtype=rows_RD.dtype, device=rows_RD.device)
        weights_N = None if weights_R is None else slots.in_row_order(self.weights_TK)
        context.permutation_of(self.index.source_R).sum_bags(
            packets.view(row.wire_dtype), slots.byrow_N, slots.cu_S, weights_N, out
        )
        values = None if values_R is None else slots.to_slots(form.weights(packets).reshape(-1))
        context.workspace.give(packets)
        return out, values

    def tensors(self) -> list[Tensor]:
        tables = ([way.leg.source_S, way.leg.member_S, way.leg.cu_T, *way.index.tensors()] for way in self.ways)
        splits = [way.splits() for way in self.ways]
        return [
            *splits,
            self.weights_TK.clone(),
            *(each for of_way in tables for each in of_way),
            *self.index.tensors(),
        ]

    @property
    def num_rows(self) -> int:
        return self.ways[0].leg.cu_T.shape[0] - 1


@final
class ExactAllToAll(AllToAll):
    """``alltoall`` with one level and ``reduction="exact"``."""

    def start(
        self, rows_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor, sizes: Sizes, mark: Tensor | None = None
    ) -> Underway:
        """Start the dispatch as in the fast form, and group the slots for the way home while the rows travel."""
        started = super().start(rows_TD, ids_TK, weights_TK, sizes, mark)
        width, size, host = self.width, self.context.shape.ep_size, started.host
        by_rank = [sum(host[begin : begin + width - 1]) for begin in range(width, len(host), width)]
        owner_TK = (ids_TK + (width - 1)).div(width - 1, rounding_mode="floor")
        way = SlotWay.make(started.leg, by_rank[:size], by_rank[size:], owner_TK, range(size))
        return replace(started, kept=(way, weights_TK))

    def route(self, started: Underway, index: SlotIndex) -> RankMajorRoute:
        way, weights_TK = started.kept
        return ExactRoute(context=self.context, ways=(way,), index=index, weights_TK=weights_TK)

    def restore(self, tensors: Sequence[Tensor]) -> Route:
        return restored_route(self.context, tensors, ("",))

    def blank_route(
        self, num_rows: int | None, weights_TK: Tensor, new_size: Callable[[], int], capacity: Capacity | None
    ) -> Route:
        return blank_exact(self.context, num_rows, weights_TK, new_size, ("",))


@contextmanager
def send_along(legs: Sequence[Leg], rows_TD: Tensor, wire: WireDtype | None, label: str) -> Iterator[Tensor]:
    """Send rows along one leg after the other. The result of the ``with`` statement is the rows that arrive."""
    (first, *others), row = legs, row_format(rows_TD.dtype, rows_TD.shape[1], wire)
    space, packets = first.context.workspace, row.encode(rows_TD)
    received = exchange(first.context, packets, first.source_S, first.rows_out, first.rows_in, label)
    for leg in others:
        relayed = received
        received = exchange(leg.context, relayed, leg.source_S, leg.rows_out, leg.rows_in, label + leg.suffix)
        space.give(relayed)
    yield row.read(received)
    space.give(received)


def restored_route(context: BackendContext, tensors: Sequence[Tensor], suffixes: Sequence[str]) -> ExactRoute:
    """Rebuild an exact route from its ``tensors()``. ``suffixes`` has an entry for each leg."""
    splits, (weights_TK, *rest) = tensors[: len(suffixes)], tensors[len(suffixes) :]
    ways: list[SlotWay] = []
    for suffix, counted in zip(suffixes, splits, strict=True):
        source_S, member_S, cu_T, *tables = rest[:7]
        (rows, slots), rest = counted.view(2, -1), rest[7:]
        leg = restored_leg(context, rows, source_S, member_S, cu_T, suffix)
        counts, index = read_host(slots), SlotIndex.from_tensors(tables, context.shape.top_k, 1, fixed_size=False)
        half = len(counts) // 2
        ways.append(SlotWay(leg=leg, slots_out=counts[:half], slots_in=counts[half:], index=index))
    return ExactRoute(context=context, ways=tuple(ways), index=context.index_from(rest), weights_TK=weights_TK)


def blank_exact(
    context: BackendContext,
    num_rows: int | None,
    weights_TK: Tensor,
    new_size: Callable[[], int],
    suffixes: Sequence[str],
) -> ExactRoute:
    """Make an exact route whose tensors have shapes but no values. ``suffixes`` has an entry for each leg."""
    device, top_k, none = weights_TK.device, context.shape.top_k, [0] * context.shape.ep_size
    ways: list[SlotWay] = []
    for suffix in suffixes:
        edges = new_size() if num_rows is None or ways else num_rows + 1
        leg = blank_leg(context, edges, new_size, device, suffix)
        index = SlotIndex.blank(edges - 1, top_k, 1, new_size=new_size, device=device)
        ways.append(SlotWay(leg=leg, slots_out=none, slots_in=none, index=index))
    return ExactRoute(
        context=context,
        ways=tuple(ways),
        index=context.blank_index(None, new_size, capacity=None, device=device),
        weights_TK=weights_TK.new_empty(new_size() if num_rows is None else num_rows, top_k),
    )
