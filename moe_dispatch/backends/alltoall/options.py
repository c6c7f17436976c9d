"""``alltoall``: each row goes once to each rank that owns one of its experts, and one sum comes back from each.

This module has the options, and what follows from them before the backend is open. ``backend`` moves the rows of an
eager dispatch; ``fixed`` those of graph-safe mode; ``exact`` those of ``reduction="exact"``. A form is loaded when a
config asks for it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, final

import torch
from pydantic import model_validator
from torch import Tensor

from moe_dispatch.backends.alltoall.backend import AllToAll
from moe_dispatch.backends.base import Backend, BackendContext, BackendOptions, Constraints, MoEShape
from moe_dispatch.backends.capacity import CapacityFactor, Factor, GraphSafeSupport, capacity_of
from moe_dispatch.backends.volume import SentBytes, Volume
from moe_dispatch.backends.wire import ALL_WIRES, WireSupport, back_wire, dispatch_format, packet_format, row_format
from moe_dispatch.errors import ConfigError, shown
from moe_dispatch.permutation import accumulation_dtype
from moe_dispatch.types import Capacity, Sizes


@final
class AllToAllOptions(BackendOptions):
    """Options of ``alltoall``.

    Attributes:
        reduction: Where the outputs of a row's experts are summed. "fast" sums them in float32 on the rank of the
            experts, and sends one row back, which takes the fewest bytes. "exact" sends the output of every (row,
            expert) pair back and sums in slot order on the rank that sent the row. So the bits of the result are the
            same for every ep_size, but up to top_k times as many bytes travel back.
        pair_rows: In graph-safe mode, the number of rows that each rank sends to each rank. It is a multiple of the
            number that is expected if every token chooses its experts evenly, ``T * (1 - C(E-L, K) / C(E, K))``.
            "worst" stands for ``max_tokens_per_rank`` rows.
    """

    name = "alltoall"
    auto_reason = "is for several ranks"

    reduction: Literal["fast", "exact"] = "fast"
    pair_rows: Factor = "worst"

    @model_validator(mode="before")
    @classmethod
    def _levels_are_a_backend(cls, options: Any) -> Any:
        if isinstance(options, Mapping) and "levels" in options:
            raise ConfigError(
                f"backend 'alltoall': levels must be left out, got {shown(options['levels'])}. levels=2 is the backend "
                "'alltoall_by_node', which has ranks_per_node and reduction."
            )
        return options

    def constraints(self, shape: MoEShape) -> Constraints:
        support = GraphSafeSupport(drop_order="weight") if self.reduction == "fast" else None
        reason = (
            'reduction="exact" brings back one row for each slot, as many as the routing says; reduction="fast" would '
            "work"
        )
        return constraints_of(shape, support, reason)

    @property
    def capacity_bounds(self) -> dict[str, CapacityFactor]:
        return {"pair_rows": self.pair_rows}

    def capacity(self, shape: MoEShape) -> Capacity:
        return capacity_of(shape, pair_factor=self.pair_rows)

    def wire_bytes(self, shape: MoEShape, volume: Volume, dtype: torch.dtype) -> SentBytes | None:
        pair_rows = (self.capacity(shape).pair_rows or 0) if shape.graph_safe else None
        exact, columns = self.reduction == "exact", 1 + shape.num_local_experts
        sent = {} if shape.graph_safe else {"counts": volume.others * 8 * columns}
        return sent_along(shape, {"": volume}, dtype, sent, exact=exact, pair_rows=pair_rows)

    def footprint(self, shape: MoEShape, sizes: Sizes, rows: int, dtype: torch.dtype) -> dict[str, int]:
        from moe_dispatch.backends.footprint import alltoall  # noqa: PLC0415 - formulas only

        return alltoall(shape, sizes, rows, dtype)

    def open(self, context: BackendContext) -> Backend:
        if context.shape.graph_safe:
            from moe_dispatch.backends.alltoall.fixed import FixedAllToAll  # noqa: PLC0415 - graph-safe mode only

            return FixedAllToAll(context)
        if self.reduction == "exact":
            from moe_dispatch.backends.alltoall.exact import ExactAllToAll  # noqa: PLC0415 - reduction="exact" only

            return ExactAllToAll(context)
        return AllToAll(context)


def constraints_of(shape: MoEShape, graph_safe: GraphSafeSupport | None, graph_safe_reason: str) -> Constraints:
    """Return what a backend of this kind needs: it exchanges counts, unless it is graph-safe."""
    return Constraints(
        exchanges_counts=not shape.graph_safe,
        min_rows=int(shape.graph_safe),
        wire=WireSupport(dtypes=ALL_WIRES, other_formats=True, gradients="can", delivers=True),
        graph_safe=graph_safe,
        graph_safe_reason=graph_safe_reason,
        compilable=True,
        carries="packets",
    )


def sent_along(
    shape: MoEShape,
    legs: Mapping[str, Volume],
    dtype: torch.dtype,
    sent: dict[str, Tensor],
    *,
    exact: bool,
    pair_rows: int | None = None,
) -> SentBytes:
    """Return the bytes that rows take along legs, beside those that were ``sent`` before.

    Args:
        shape: As in ``BackendOptions.wire_bytes``.
        legs: The volume of each leg, by what stands behind the labels of its collectives.
        dtype: As in ``BackendOptions.wire_bytes``.
        sent: Bytes of the counts, by collective.
        exact: Whether one row comes back for each slot.
        pair_rows: In graph-safe mode, the number of rows that each rank sends to each rank.
    """
    wide, back = accumulation_dtype(dtype), row_format(dtype, shape.hidden_size, back_wire(shape.wire_dtype))
    there = dispatch_format(shape, dtype, wide, note=shape.graph_safe)
    gradient = back if shape.grad_wire_dtype is None else row_format(dtype, shape.hidden_size, shape.grad_wire_dtype)
    for suffix, leg in legs.items():
        out, returned, slots = leg.pairs_out, leg.pairs_in, shape.top_k
        if exact:
            returned, slots = leg.slots_in, 1
        if pair_rows is not None:
            out = returned = leg.others * pair_rows
        sent |= {
            f"dispatch{suffix}": out * there.stride,
            f"combine{suffix}": returned * back.nbytes,
            f"combine.backward{suffix}": out * gradient.nbytes,
            f"dispatch.backward{suffix}": returned * packet_format(back, slots, wide).stride,
        }
    return SentBytes(sent=sent, row_dtypes=(there.row.numbers, back.numbers))
