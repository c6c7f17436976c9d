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
from moe_dispatch.backends.wire import packet, row_format
from moe_dispatch.communication import read_host
from moe_dispatch.permutation import Permutation, SlotIndex


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Splits:
    """The counts of one dispatch, on the host.

    Attributes:
        rows_out: Number of rows that go to each rank.
        rows_in: Number of rows that come from each rank.
        slots_out: Number of slots that go to each rank; empty unless ``reduction="exact"``.
        slots_in: Number of slots that come from each rank; empty unless ``reduction="exact"``.
        tokens_per_expert: Number of slots of each local expert.
    """

    rows_out: list[int]
    rows_in: list[int]
    slots_out: list[int]
    slots_in: list[int]
    tokens_per_expert: list[int]

    def tensor(self) -> Tensor:
        """Return all counts as one int64 tensor on the CPU, which ``splits_from`` reads."""
        parts = (self.rows_out, self.rows_in, self.slots_out, self.slots_in, self.tokens_per_expert)
        return torch.tensor([count for part in parts for count in part], dtype=torch.int64, device="cpu")


def splits_from(counts: Tensor, ep_size: int, *, exact: bool) -> Splits:
    """Rebuild splits from their ``tensor()``. The tensor is on the host, so there is no host sync."""
    values = iter(read_host(counts))

    def part(length: int) -> list[int]:
        return list(islice(values, length))

    slots = ep_size if exact else 0
    return Splits(
        rows_out=part(ep_size),
        rows_in=part(ep_size),
        slots_out=part(slots),
        slots_in=part(slots),
        tokens_per_expert=list(values),
    )


def even_splits(pair_rows: int, ep_size: int) -> Splits:
    """Return the splits of a graph-safe exchange, in which each rank sends ``pair_rows`` rows to each rank."""
    rows = [pair_rows] * ep_size
    return Splits(rows_out=rows, rows_in=rows, slots_out=[], slots_in=[], tokens_per_expert=[])


@final
@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class AllToAllRoute(RankMajorRoute):
    """A route with one data collective in each direction.

    For example, of two rows, row 0 goes to rank 1, and row 1 goes to ranks 0 and 1. Then ``source_S`` is [1, 0, 1],
    ``member_S`` is [1, 0, 2] and ``cu_T`` is [0, 1, 3].

    Attributes:
        source_S: int64 (S,), the row of this rank that each sent row is a copy of. Sent rows are ordered by
            destination rank, then by row.
        member_S: int64 (S,), the numbers of the sent rows, ordered by the row that they are copies of.
        cu_T: int64 (T+1,), where the copies of each row begin in ``member_S``.
        slots_by_rank: The slots grouped by destination rank if ``reduction="exact"``, else None.
        weights_TK: The weights if ``reduction="exact"``, which applies them on the rank that sent the rows; else None.
    """

    context: BackendContext
    permutation: Permutation
    splits: Splits
    index: SlotIndex
    wire_dtype: WireDtype | None
    source_S: Tensor
    member_S: Tensor
    cu_T: Tensor
    slots_by_rank: SlotIndex | None
    weights_TK: Tensor | None

    @contextmanager
    def spread(self, rows_TD: Tensor, wire: WireDtype | None, *, label: str) -> Iterator[Tensor]:
        row, splits = row_format(rows_TD.dtype, rows_TD.shape[1], wire), self.splits
        received = self._exchange(row.encode(rows_TD), self.source_S, splits.rows_out, splits.rows_in, label)
        yield row.read(received)
        self.context.workspace.give(received)

    def _exchange(
        self, rows: Tensor, source: Tensor, splits_out: Sequence[int], splits_in: Sequence[int], label: str
    ) -> Tensor:
        """Send ``rows[source]``, uint8. Return the rows that arrive, in memory of the workspace."""
        space, width = self.context.workspace, rows.shape[1]
        received = space.take((sum(splits_in), width), rows.device)
        outgoing = space.take((source.shape[0], width), rows.device)
        self.permutation.gather(rows, source, outgoing)
        work = self.context.communicator.all_to_all(received, outgoing, splits_in, splits_out, label=label)
        if work is not None:
            work.wait()
        space.give(outgoing)
        return received

    def collect(
        self, rows_RD: Tensor, weights_R: Tensor | None, values_R: Tensor | None, *, label: str
    ) -> tuple[Tensor, Tensor | None]:
        if self.slots_by_rank is not None:
            weights_TK = None if weights_R is None else self.weights_TK
            return self._collect_exact(self.slots_by_rank, rows_RD, weights_TK, values_R, label)
        form = packet(
            row_format(rows_RD.dtype, rows_RD.shape[1], back_wire(self.wire_dtype)),
            self.index.top_k,
            None if values_R is None else values_R.dtype,
        )
        space, device = self.context.workspace, rows_RD.device
        received = space.take((self.source_S.shape[0], form.stride), device)
        outgoing = space.take((self.index.num_rows, form.stride), device)
        self.permutation.reduce(rows_RD, self.index, weights_R, form.row.read(form.rows(outgoing)))
        if values_R is not None:
            form.weights(outgoing).copy_(self.index.to_slots(values_R))
        splits = self.splits
        work = self.context.communicator.all_to_all(received, outgoing, splits.rows_out, splits.rows_in, label=label)
        # The results are allocated while the rows travel.
        out = space.lend(self.num_rows, form.row.hidden, dtype=rows_RD.dtype, device=device)
        values = None if values_R is None else values_R.new_empty(self.num_rows, form.top_k)
        # Sum whole packets as if they held only numbers of the row's dtype. ``sum_bags`` ignores the columns behind the
        # row.
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
        self,
        slots_by_rank: SlotIndex,
        rows_RD: Tensor,
        weights_TK: Tensor | None,
        values_R: Tensor | None,
        label: str,
    ) -> tuple[Tensor, Tensor | None]:
        row = row_format(rows_RD.dtype, rows_RD.shape[1], back_wire(self.wire_dtype))
        form = packet(row, 1, None if values_R is None else values_R.dtype)
        if values_R is None:
            packets = row.encode(rows_RD)
        else:
            packets = torch.empty(rows_RD.shape[0], form.stride, dtype=torch.uint8, device=rows_RD.device)
            row.write(rows_RD, form.rows(packets))
            form.weights(packets).copy_(values_R.unsqueeze(1))
        space, splits = self.context.workspace, self.splits
        received = self._exchange(packets, self.index.byrow_N, splits.slots_in, splits.slots_out, label)
        out = space.lend(slots_by_rank.num_rows, row.hidden, dtype=rows_RD.dtype, device=rows_RD.device)
        weights_N = None if weights_TK is None else slots_by_rank.in_row_order(weights_TK)
        self.permutation.sum_bags(
            received.view(row.wire_dtype), slots_by_rank.byrow_N, slots_by_rank.cu_S, weights_N, out
        )
        values = None if values_R is None else slots_by_rank.to_slots(form.weights(received).reshape(-1))
        space.give(received)
        return out, values

    def tensors(self) -> list[Tensor]:
        ways = [self.source_S, self.member_S, self.cu_T, *self.index.tensors()]
        if self.index.fixed_size:
            return ways
        exact = [] if self.slots_by_rank is None or self.weights_TK is None else [self.weights_TK.clone()]
        if self.slots_by_rank is not None:
            exact += self.slots_by_rank.tensors()
        return [self.splits.tensor(), *exact, *ways]

    @property
    def num_rows(self) -> int:
        return self.cu_T.shape[0] - 1
