"""The way of one dispatch of ``alltoall``: what goes to which rank, and back."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import final

import torch
from torch import Tensor

from moe_dispatch.backends.base import BackendContext, WireDtype
from moe_dispatch.backends.traceable import TraceableRoute
from moe_dispatch.backends.wire import packet, row_format
from moe_dispatch.communication import read_host
from moe_dispatch.permutation import Permutation, SlotIndex, StaticIndex


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Traffic:
    """Host counts of one dispatch: rows to and from each rank, slots too where exact, rows per local expert."""

    rows_out: list[int]
    rows_in: list[int]
    slots_out: list[int]
    slots_in: list[int]
    tokens_per_expert: list[int]

    def tensor(self) -> Tensor:
        """All counts in one int64 tensor on the CPU; ``traffic_from`` reads them again."""
        parts = (self.rows_out, self.rows_in, self.slots_out, self.slots_in, self.tokens_per_expert)
        return torch.tensor([count for part in parts for count in part], dtype=torch.int64, device="cpu")


def traffic_from(counts: Tensor, ep_size: int, *, exact: bool) -> Traffic:
    """The traffic whose ``tensor()`` this is. It is on the host, so reading it waits for nothing."""
    values = iter(read_host(counts))

    def part(length: int) -> list[int]:
        return list(islice(values, length))

    slots = ep_size if exact else 0
    return Traffic(
        rows_out=part(ep_size),
        rows_in=part(ep_size),
        slots_out=part(slots),
        slots_in=part(slots),
        tokens_per_expert=list(values),
    )


def even_traffic(pair_rows: int, ep_size: int) -> Traffic:
    """The same number of rows from each rank to each: all that a graph-safe exchange needs to know."""
    splits = [pair_rows] * ep_size
    return Traffic(rows_out=splits, rows_in=splits, slots_out=[], slots_in=[], tokens_per_expert=[])


@final
@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class AllToAllRoute(TraceableRoute):
    """One data collective each way.

    Attributes:
        source_S: int64, the home row of each row sent, by destination rank, then row.
        member_S: int64, the sent rows in the order of their home rows; ``cu_T`` int64 (T+1,) where each home row
            begins.
        home: for ``reduction="exact"``, the slots grouped by destination rank, and ``weights_TK`` to apply at home;
            else both None.
    """

    context: BackendContext
    permutation: Permutation
    traffic: Traffic
    index: SlotIndex
    wire_dtype: WireDtype | None
    source_S: Tensor
    member_S: Tensor
    cu_T: Tensor
    home: SlotIndex | None
    weights_TK: Tensor | None

    @contextmanager
    def spread(self, rows_TD: Tensor, wire: WireDtype | None, *, label: str) -> Iterator[Tensor]:
        row = row_format(rows_TD.dtype, rows_TD.shape[1], wire)
        encoded = row.encode(rows_TD)
        with self._exchange(encoded, self.source_S, self.traffic.rows_out, self.traffic.rows_in, label) as received:
            yield row.read(received)

    @contextmanager
    def _exchange(
        self, rows: Tensor, source: Tensor, splits_out: Sequence[int], splits_in: Sequence[int], label: str
    ) -> Iterator[Tensor]:
        """Gather ``rows[source]``, uint8, and exchange them; the received rows, uint8, valid inside the block."""
        space, width = self.context.workspace, rows.shape[1]
        with space.lease((sum(splits_in), width), rows.device) as received:
            with space.lease((source.shape[0], width), rows.device) as outgoing:
                self.permutation.gather(rows, source, outgoing)
                work = self.context.communicator.all_to_all(received, outgoing, splits_in, splits_out, label=label)
                if work is not None:
                    work.wait()
            yield received

    def collect(
        self, rows_RD: Tensor, weights_R: Tensor | None, values_R: Tensor | None, *, label: str
    ) -> tuple[Tensor, Tensor | None]:
        if self.home is not None:
            weights_TK = None if weights_R is None else self.weights_TK
            return self._collect_exact(self.home, rows_RD, weights_TK, values_R, label)
        form = packet(
            row_format(rows_RD.dtype, rows_RD.shape[1], self.gradient_wire),
            self.index.top_k,
            None if values_R is None else values_R.dtype,
        )
        space, device = self.context.workspace, rows_RD.device
        received = space.take((self.source_S.shape[0], form.stride), device)
        outgoing = space.take((self.index.num_rows, form.stride), device)
        self.permutation.reduce(rows_RD, self.index, weights_R, form.row.read(form.rows(outgoing)))
        if values_R is not None:
            form.weights(outgoing).copy_(self.index.to_slots(values_R))
        traffic = self.traffic
        work = self.context.communicator.all_to_all(received, outgoing, traffic.rows_out, traffic.rows_in, label=label)
        # Made while the rows are under way.
        out = space.lend(self.num_home_rows, form.row.hidden, dtype=rows_RD.dtype, device=device)
        values = None if values_R is None else values_R.new_empty(self.num_home_rows, form.top_k)
        # The whole packets are summed, as numbers of the row's dtype: sums over what is behind the row are not kept.
        packets = received.view(form.row.wire_dtype)
        if work is not None:
            work.wait()
        space.give(outgoing)
        self.permutation.sum_bags(packets, self.member_S, self.cu_T, None, out)
        if values is not None:
            self.permutation.sum_bags(form.weights(received).contiguous(), self.member_S, self.cu_T, None, values)
        space.give(received)
        return out, values

    def _collect_exact(
        self, home: SlotIndex, rows_RD: Tensor, weights_TK: Tensor | None, values_R: Tensor | None, label: str
    ) -> tuple[Tensor, Tensor | None]:
        row = row_format(rows_RD.dtype, rows_RD.shape[1], self.gradient_wire)
        form = packet(row, 1, None if values_R is None else values_R.dtype)
        if values_R is None:
            packets = row.encode(rows_RD)
        else:
            packets = torch.empty(rows_RD.shape[0], form.stride, dtype=torch.uint8, device=rows_RD.device)
            row.write(rows_RD, form.rows(packets))
            form.weights(packets).copy_(values_R.unsqueeze(1))
        traffic = self.traffic
        with self._exchange(packets, self.index.byrow_N, traffic.slots_in, traffic.slots_out, label) as received:
            out = self.context.workspace.lend(home.num_rows, row.hidden, dtype=rows_RD.dtype, device=rows_RD.device)
            weights_N = None if weights_TK is None else home.in_row_order(weights_TK)
            self.permutation.sum_bags(received.view(row.wire_dtype), home.byrow_N, home.cu_S, weights_N, out)
            values = None if values_R is None else home.to_slots(form.weights(received).reshape(-1))
        return out, values

    def tensors(self) -> list[Tensor]:
        ways = [self.source_S, self.member_S, self.cu_T]
        if isinstance(self.index, StaticIndex):
            return ways + self.index.tensors()
        ways.insert(0, self.traffic.tensor())
        if self.home is not None and self.weights_TK is not None:
            ways += [self.weights_TK.clone(), *self.home.tensors()]
        return ways + self.index.tensors()

    @property
    def num_home_rows(self) -> int:
        return self.cu_T.shape[0] - 1
