"""``local``: one rank holds all experts, and no row travels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, final

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
from moe_dispatch.backends.rank_major import RankMajorRoute, arrive
from moe_dispatch.backends.volume import SentBytes, Volume
from moe_dispatch.backends.wire import ALL_WIRES, Encoded, WireSupport, back_wire, row_format
from moe_dispatch.communication import read_host
from moe_dispatch.permutation import count_experts
from moe_dispatch.types import Sizes


@final
class LocalOptions(BackendOptions):
    """Options of ``local``.

    Attributes:
        reduction: As for ``alltoall``. With a ``wire``, "exact" rounds every expert row to this dtype, and "fast"
            rounds only their sum. Without a ``wire``, both give the same result here.
    """

    name = "local"
    auto_reason = "is for one rank"

    reduction: Literal["fast", "exact"] = "fast"

    def constraints(self, shape: MoEShape) -> Constraints:
        return Constraints(
            group_sizes=frozenset({1}),
            group_sizes_hint='Use "alltoall", or pass group=None.',
            wire=WireSupport(dtypes=ALL_WIRES, other_formats=True, gradients="can", delivers=True),
            min_rows=int(shape.graph_safe),  # the padding of a fixed-size buffer is copied from row 0
            graph_safe=GraphSafeSupport(drop_order="weight"),
            compilable=True,
            carries="packets",
        )

    def wire_bytes(self, shape: MoEShape, volume: Volume, dtype: torch.dtype) -> SentBytes:
        return SentBytes(sent={})

    def footprint(self, shape: MoEShape, sizes: Sizes, rows: int, dtype: torch.dtype) -> dict[str, int]:
        from moe_dispatch.backends.footprint import local  # noqa: PLC0415 - formulas only

        return local(shape, sizes, rows, dtype)

    def open(self, context: BackendContext) -> Backend:
        return Local(context, exact=self.reduction == "exact")


@final
@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class LocalRoute(RankMajorRoute):
    """A route on which rows stay where they are.

    A ``wire`` still rounds the rows, so that one rank computes the same numbers as a large run.
    """

    exact: bool

    def spread(self, rows_TD: Tensor, wire: str | None, *, label: str) -> Tensor | Encoded:
        return row_format(rows_TD.dtype, rows_TD.shape[1], wire).carried(rows_TD)

    def collect(
        self, rows_RD: Tensor, weights_R: Tensor | None, values_R: Tensor | None, *, label: str
    ) -> tuple[Tensor, Tensor | None]:
        row = row_format(rows_RD.dtype, rows_RD.shape[1], back_wire(self.context.shape.wire_dtype))
        out = rows_RD.new_empty(self.index.num_rows, rows_RD.shape[1])
        values_SK = None if values_R is None else values_R.new_empty(self.index.num_rows, self.index.top_k)
        values = None if values_R is None or values_SK is None else (values_R, values_SK)
        self.permutation.reduce(row.round_trip(rows_RD) if self.exact else rows_RD, self.index, weights_R, out, values)
        return out if self.exact else row.round_trip(out), values_SK


@final
class Local(Backend):
    """The backend of one rank, which holds all experts. Cost: one host sync per dispatch (the counts)."""

    def __init__(self, context: BackendContext, *, exact: bool) -> None:
        super().__init__(context)
        self.exact = exact

    def dispatch(self, rows_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor, sizes: Sizes) -> Arrived:
        shape = self.context.shape
        rows = row_format(rows_TD.dtype, shape.hidden_size, shape.wire_dtype).carried(rows_TD)
        counts = () if sizes.capacity is not None else read_host(count_experts(ids_TK, shape.num_experts))
        index = self.context.group(ids_TK, weights_TK, sizes.capacity, counts=counts)
        route = LocalRoute(context=self.context, index=index, exact=self.exact)
        return arrive(route, rows, weights_TK, rows_TD.dtype)
