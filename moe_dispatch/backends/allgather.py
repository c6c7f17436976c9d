"""``allgather``: every rank sees every row, keeps what its experts need, and partial sums are reduce-scattered."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor

from moe_dispatch.backends.base import (
    Arrived,
    Backend,
    BackendContext,
    BackendOptions,
    Constraints,
    MoEShape,
    Sizes,
    WireDtype,
)
from moe_dispatch.backends.capacity import Capacity
from moe_dispatch.backends.local import count_experts
from moe_dispatch.backends.rank_major import arrive, arrive_statically, bring_home, send_again
from moe_dispatch.backends.traceable import TraceableRoute, TracedRoutes
from moe_dispatch.backends.volume import Volume, Wire
from moe_dispatch.backends.wire import Packet, id_dtype_for, packet, row_format
from moe_dispatch.communication import read_host
from moe_dispatch.permutation import Permutation, SlotIndex, accumulation_dtype, group_slots


@final
@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class AllGatherRoute(TraceableRoute):
    """Out by all-gather, back by a reduce-scatter in ``max(float32, dtype)``, rounded once at home."""

    context: BackendContext
    permutation: Permutation
    index: SlotIndex
    wire_dtype: WireDtype | None = None

    @contextmanager
    def spread(self, rows_TD: Tensor, wire: WireDtype | None, *, label: str) -> Iterator[Tensor]:
        comm, row = self.context.communicator, row_format(rows_TD.dtype, rows_TD.shape[1])
        with self.context.workspace.lease(self.index.num_rows * row.nbytes, rows_TD.device) as buffer:
            everyone = buffer.view(self.index.num_rows, row.nbytes)
            comm.all_gather(everyone, row.encode(rows_TD), label=label)
            yield row.read(everyone)

    def collect(
        self, rows_RD: Tensor, weights_R: Tensor | None, values_R: Tensor | None, *, label: str
    ) -> tuple[Tensor, Tensor | None]:
        comm, hidden = self.context.communicator, rows_RD.shape[1]
        dtype = accumulation_dtype(rows_RD.dtype)
        width = hidden + (0 if values_R is None else self.index.top_k)
        nbytes = self.index.num_rows * width * dtype.itemsize
        mine = torch.empty(self.index.num_rows // comm.size, width, dtype=dtype, device=rows_RD.device)
        with self.context.workspace.lease(nbytes, rows_RD.device) as buffer:
            sums = buffer.view(dtype).view(self.index.num_rows, width)
            self.permutation.reduce(rows_RD, self.index, weights_R, sums[:, :hidden])
            if values_R is not None:
                sums[:, hidden:].copy_(self.index.to_slots(values_R))
            comm.reduce_scatter(mine, sums, label=label)
        values = None if values_R is None else mine[:, hidden:].to(values_R.dtype)
        return mine[:, :hidden].to(rows_RD.dtype).contiguous(), values

    def tensors(self) -> list[Tensor]:
        return self.index.tensors()

    @property
    def num_home_rows(self) -> int:
        return self.index.num_rows // self.context.communicator.size


@final
class AllGather(TracedRoutes, Backend):
    """Simple and regular: P times the bytes, but no routing-dependent message sizes.

    Cost: one all-gather and one host sync (the counts) per dispatch, one reduce-scatter per combine.
    """

    name = "allgather"

    @classmethod
    def constraints(cls, shape: MoEShape, options: BackendOptions) -> Constraints:
        # A reduce-scatter adds on the way: a narrow wire would round at every hop, so no wire_dtype is offered.
        return Constraints(
            equal_rows=True, min_rows=int(shape.graph_safe), graph_safe=True, drop_order="weight", compilable=True
        )

    @classmethod
    def wire_bytes(cls, shape: MoEShape, options: BackendOptions, volume: Volume, dtype: torch.dtype) -> Wire:
        wide, hidden, copies = accumulation_dtype(dtype), shape.hidden_size, volume.rows * volume.others
        return Wire(
            sent={
                "dispatch": copies * _form(shape, dtype, wide).stride,
                "combine": copies * hidden * wide.itemsize,
                "combine.backward": copies * row_format(dtype, hidden).nbytes,
                "dispatch.backward": copies * (hidden + shape.top_k) * wide.itemsize,
            },
            once_per_node=True,
        )

    def footprint(self, sizes: Sizes, rows: int, dtype: torch.dtype) -> dict[str, int]:
        assert sizes.capacity is not None
        size = self.context.shape.ep_size
        wire = (1 + size) * rows * _form(self.context.shape, dtype, accumulation_dtype(dtype)).stride
        return {**self.context.grouped_bytes(sizes.capacity, dtype, size * rows), "wire": wire}

    def dispatch(self, rows_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor, sizes: Sizes) -> Arrived:
        shape, comm = self.context.shape, self.context.communicator
        form = _form(shape, rows_TD.dtype, weights_TK.dtype)
        packets = form.pack(rows_TD.detach(), weights_TK.detach(), ids_TK)
        everyone = packets.new_empty(len(packets) * comm.size, form.stride)
        comm.all_gather(everyone, packets, label="dispatch")
        rows_SD, weights_SK, ids_SK = form.unpack(everyone)
        received = (rows_SD, weights_SK)
        first = comm.rank * shape.num_local_experts
        if sizes.capacity is not None:
            index = self.context.group_statically(ids_SK - first, weights_SK, sizes.capacity)
            return arrive_statically(rows_TD, weights_TK, self._route(index, rows_TD.device), received)
        counts = read_host(count_experts(ids_SK.long(), shape.num_experts)[first : first + shape.num_local_experts])
        route = self._route(group_slots(ids_SK - first, counts, shape.pad_multiple), rows_TD.device)
        return arrive(rows_TD, weights_TK, route, received, counts, shape.pad_multiple)

    def _route(self, index: SlotIndex, device: torch.device) -> AllGatherRoute:
        return AllGatherRoute(context=self.context, permutation=self.context.permutation_on(device), index=index)

    def restore(self, tensors: Sequence[Tensor]) -> AllGatherRoute:
        return self._route(self.context.index_from(tensors), tensors[0].device)

    def blank_route(
        self, num_rows: int | None, weights_TK: Tensor, new_size: Callable[[], int], capacity: Capacity | None
    ) -> AllGatherRoute:
        everyone = None if num_rows is None else num_rows * self.context.shape.ep_size
        index = self.context.blank_index(everyone, new_size, capacity=capacity, device=weights_TK.device)
        return self._route(index, weights_TK.device)

    def dispatch_again(self, rows_TD: Tensor, state: Any) -> Tensor:
        return send_again(rows_TD, state)

    def combine(self, rows_RD: Tensor, weights_R: Tensor, state: Any, *, weighted: bool) -> Tensor:
        return bring_home(rows_RD, weights_R, state, weighted=weighted)


def _form(shape: MoEShape, row_dtype: torch.dtype, weight_dtype: torch.dtype) -> Packet:
    row = row_format(row_dtype, shape.hidden_size)
    return packet(row, shape.top_k, weight_dtype, id_dtype_for(shape.num_experts))
