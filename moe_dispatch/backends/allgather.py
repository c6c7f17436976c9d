"""``allgather``: every rank gets every row and keeps the rows of its experts; a reduce-scatter adds their outputs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from moe_dispatch.backends.base import (
    Arrived,
    Backend,
    BackendContext,
    BackendOptions,
    Constraints,
    MoEShape,
)
from moe_dispatch.backends.capacity import GraphSafeSupport
from moe_dispatch.backends.marks import marks_agree
from moe_dispatch.backends.rank_major import RankMajorRoute, arrive
from moe_dispatch.backends.volume import SentBytes, Volume
from moe_dispatch.backends.wire import ALL_WIRES, Encoded, WireSupport, back_wire, dispatch_format, row_format
from moe_dispatch.communication import read_host
from moe_dispatch.errors import PeerError
from moe_dispatch.permutation import accumulation_dtype, count_experts
from moe_dispatch.types import Sizes


@final
class AllGatherOptions(BackendOptions):
    """``allgather`` has no options."""

    name = "allgather"
    auto_reason = "sends more bytes"

    def constraints(self, shape: MoEShape) -> Constraints:
        # Only rows that are sent out can be narrow. A reduce-scatter adds on the way back, so bfloat16 would round at
        # every hop.
        return Constraints(
            wire=WireSupport(dtypes=ALL_WIRES - {"bfloat16"}, other_formats=True, gradients="can", delivers=True),
            equal_rows=True,
            min_rows=int(shape.graph_safe),
            counts_with_sizes=not shape.graph_safe,
            graph_safe=GraphSafeSupport(drop_order="weight"),
            compilable=True,
            carries="packets",
        )

    def wire_bytes(self, shape: MoEShape, volume: Volume, dtype: torch.dtype) -> SentBytes:
        wide, hidden, copies = accumulation_dtype(dtype), shape.hidden_size, volume.rows * volume.others
        gradient = row_format(dtype, hidden, shape.grad_wire_dtype or back_wire(shape.wire_dtype))
        return SentBytes(
            sent={
                "dispatch": copies * dispatch_format(shape, dtype, wide).stride,
                "combine": copies * hidden * wide.itemsize,
                "combine.backward": copies * gradient.nbytes,
                "dispatch.backward": copies * (hidden + shape.top_k) * wide.itemsize,
            },
            once_per_node=True,
            row_dtypes=(dispatch_format(shape, dtype, wide).row.numbers, wide),
        )

    def footprint(self, shape: MoEShape, sizes: Sizes, rows: int, dtype: torch.dtype) -> dict[str, int]:
        from moe_dispatch.backends.footprint import allgather  # noqa: PLC0415 - formulas only

        return allgather(shape, sizes, rows, dtype)

    def open(self, context: BackendContext) -> Backend:
        return AllGather(context)


@final
@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class AllGatherRoute(RankMajorRoute):
    """A route out by all-gather, and back by a reduce-scatter in ``max(float32, dtype)``, rounded once at the end."""

    def spread(self, rows_TD: Tensor, wire: str | None, *, label: str) -> Tensor | Encoded:
        comm, row = self.context.communicator, row_format(rows_TD.dtype, rows_TD.shape[1], wire)
        everyone = self.context.workspace.lend(self.index.num_rows, row.nbytes, device=rows_TD.device)
        comm.all_gather(everyone, row.encoded(rows_TD), label=label)
        return row.decode(everyone)

    def collect(
        self, rows_RD: Tensor, weights_R: Tensor | None, values_R: Tensor | None, *, label: str
    ) -> tuple[Tensor, Tensor | None]:
        hidden, dtype = rows_RD.shape[1], accumulation_dtype(rows_RD.dtype)
        width = hidden + (0 if values_R is None else self.index.top_k)
        sums = self.context.workspace.lend(self.index.num_rows, width, dtype=dtype, device=rows_RD.device)
        values = None if values_R is None else (values_R, sums[:, hidden:])
        self.permutation.reduce(rows_RD, self.index, weights_R, sums[:, :hidden], values)
        mine = sums.new_empty(self.num_rows, width)
        self.context.communicator.reduce_scatter(mine, sums, label=label)
        if values_R is None:
            return mine.to(rows_RD.dtype), None
        return mine[:, :hidden].to(rows_RD.dtype).contiguous(), mine[:, hidden:].to(values_R.dtype)

    @property
    def num_rows(self) -> int:
        """Tp, the number of rows that this rank brought."""
        return self.index.num_rows // self.context.communicator.size


@final
class AllGather(Backend):
    """All rows go to all ranks. This is P times the bytes, but no message size depends on the routing.

    Cost: one all-gather and one host sync per dispatch, one reduce-scatter per combine. The host reads the counts, or,
    if the ranks agree on sizes in this dispatch, sizes and counts together. With a plan it also reads their marks.
    """

    def dispatch(self, rows_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor, sizes: Sizes) -> Arrived:
        shape, comm = self.context.shape, self.context.communicator
        mark = sizes.mark if len(rows_TD) else None
        form = dispatch_format(shape, rows_TD.dtype, weights_TK.dtype, note=mark is not None)
        if sizes.columns is not None:
            form = sizes.columns.added_to(form)
        packets = form.pack(rows_TD, weights_TK, ids_TK)
        if mark is not None:
            form.notes(packets).fill_(mark)
        everyone = self.context.for_arrivals(len(packets) * comm.size, form.stride, packets.device)
        comm.all_gather(everyone, packets, label="dispatch")
        rows_SD, weights_SK, ids_SK = form.unpack(everyone)
        first, counts = comm.rank * shape.num_local_experts, list[int]()
        if sizes.capacity is None:
            mine, of_all = slice(first, first + shape.num_local_experts), sizes.tokens_per_expert
            if of_all is None:
                ids = ids_SK.long()
                if mark is not None:  # packets of another call may hold anything where this one has its ids
                    ids = ids.clamp(-1, shape.num_experts - 1)
                of_mine = count_experts(ids, shape.num_experts)[mine]
                notes_P = form.notes(everyone)[:: len(packets), 0] if mark is not None else of_mine[:0]
                counts = read_host(torch.cat([of_mine, notes_P]))
                counts, marks = counts[: len(of_mine)], counts[len(of_mine) :]
                if marks and not marks_agree(marks):
                    raise PeerError(f"Backend 'allgather': the calls of all ranks must have one mark, got {marks}.")
            else:
                counts = list(of_all[mine])
        index = self.context.group(ids_SK, weights_SK, sizes.capacity, first=first, counts=counts)
        return arrive(AllGatherRoute(context=self.context, index=index), rows_SD, weights_SK, rows_TD.dtype)
