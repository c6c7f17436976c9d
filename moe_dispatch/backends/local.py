"""``local``: one rank holds all experts; nothing travels."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, final

import torch
from torch import Tensor

from moe_dispatch.backends.base import Arrived, Backend, BackendOptions, Constraints, MoEShape, Sizes, WireDtype
from moe_dispatch.backends.capacity import Capacity
from moe_dispatch.backends.rank_major import arrive, arrive_statically, bring_home, send_again
from moe_dispatch.backends.traceable import TraceableRoute, TracedRoutes
from moe_dispatch.backends.volume import Volume, Wire
from moe_dispatch.backends.wire import row_format
from moe_dispatch.communication import read_host
from moe_dispatch.permutation import Permutation, SlotIndex, count_values, group_slots


@final
class LocalOptions(BackendOptions):
    """Options of ``local``.

    Attributes:
        reduction: as on ``alltoall``. Without a ``wire_dtype`` the two are the same here; with one, "exact" rounds
            every expert row to it, "fast" their sum.
    """

    reduction: Literal["fast", "exact"] = "fast"


@final
@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class LocalRoute(TraceableRoute):
    """No way at all; a ``wire_dtype`` still rounds, so that a single-rank run has the numbers of a large one."""

    permutation: Permutation
    index: SlotIndex
    wire_dtype: WireDtype | None
    exact: bool

    @contextmanager
    def spread(self, rows_TD: Tensor, wire: WireDtype | None, *, label: str) -> Iterator[Tensor]:
        yield row_format(rows_TD.dtype, rows_TD.shape[1], wire).round_trip(rows_TD)

    def collect(
        self, rows_RD: Tensor, weights_R: Tensor | None, values_R: Tensor | None, *, label: str
    ) -> tuple[Tensor, Tensor | None]:
        row = row_format(rows_RD.dtype, rows_RD.shape[1], self.gradient_wire)
        out = rows_RD.new_empty(self.index.num_rows, rows_RD.shape[1])
        self.permutation.reduce(row.round_trip(rows_RD) if self.exact else rows_RD, self.index, weights_R, out)
        out = out if self.exact else row.round_trip(out)
        return out, None if values_R is None else self.index.to_slots(values_R)

    def tensors(self) -> list[Tensor]:
        return self.index.tensors()

    @property
    def num_home_rows(self) -> int:
        return self.index.num_rows


@final
class Local(TracedRoutes, Backend):
    """All experts on this rank. Cost: one host sync per dispatch (the counts), no collective."""

    name = "local"
    Options = LocalOptions

    @classmethod
    def constraints(cls, shape: MoEShape, options: BackendOptions) -> Constraints:
        return Constraints(
            group_sizes=frozenset({1}),
            wire_dtypes=frozenset({"bfloat16", "float8_e4m3fn"}),
            min_rows=int(shape.graph_safe),  # a buffer of fixed size is filled from some row
            graph_safe=True,
            drop_order="weight",
            compilable=True,
        )

    @classmethod
    def wire_bytes(cls, shape: MoEShape, options: BackendOptions, volume: Volume, dtype: torch.dtype) -> Wire:
        return Wire(sent={})

    def footprint(self, sizes: Sizes, rows: int, dtype: torch.dtype) -> dict[str, int]:
        assert sizes.capacity is not None
        return self.context.grouped_bytes(sizes.capacity, dtype, rows)

    def dispatch(self, rows_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor, sizes: Sizes) -> Arrived:
        shape = self.context.shape
        rows = row_format(rows_TD.dtype, shape.hidden_size, shape.wire_dtype).round_trip(rows_TD.detach())
        received = (rows, weights_TK.detach())
        if sizes.capacity is not None:
            index = self.context.group_statically(ids_TK, weights_TK.detach(), sizes.capacity)
            return arrive_statically(rows_TD, weights_TK, self._route(index, rows.device), received)
        counts = read_host(count_experts(ids_TK, shape.num_experts))
        route = self._route(group_slots(ids_TK, counts, shape.pad_multiple), rows.device)
        return arrive(rows_TD, weights_TK, route, received, counts, shape.pad_multiple)

    def _route(self, index: SlotIndex, device: torch.device) -> LocalRoute:
        assert isinstance(self.options, LocalOptions)
        return LocalRoute(
            permutation=self.context.permutation_on(device),
            index=index,
            wire_dtype=self.context.shape.wire_dtype,
            exact=self.options.reduction == "exact",
        )

    def restore(self, tensors: Sequence[Tensor]) -> LocalRoute:
        return self._route(self.context.index_from(tensors), tensors[0].device)

    def blank_route(
        self, num_rows: int | None, weights_TK: Tensor, new_size: Callable[[], int], capacity: Capacity | None
    ) -> LocalRoute:
        index = self.context.blank_index(num_rows, new_size, capacity=capacity, device=weights_TK.device)
        return self._route(index, weights_TK.device)

    def dispatch_again(self, rows_TD: Tensor, state: Any) -> Tensor:
        return send_again(rows_TD, state)

    def combine(self, rows_RD: Tensor, weights_R: Tensor, state: Any, *, weighted: bool) -> Tensor:
        return bring_home(rows_RD, weights_R, state, weighted=weighted)


def count_experts(ids_TK: Tensor, num_experts: int) -> Tensor:
    """int64 (E,): how many slots name each expert; -1 is not counted. No host sync, integer sums only."""
    flat = (ids_TK + 1).reshape(-1)
    return count_values(flat, num_experts + 1)[1:]
