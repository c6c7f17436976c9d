"""``alltoall``: each row goes once to each rank that owns one of its experts, and one sum comes back from each.

This module has the options, and what follows from them before the backend is open. ``backend`` moves the rows of an
eager dispatch; ``fixed`` those of graph-safe mode; ``two_level`` and ``exact`` are the other two forms. A form
is loaded when a config asks for it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal, final

import torch
from pydantic import Field, model_validator

from moe_dispatch.backends.alltoall.backend import AllToAll
from moe_dispatch.backends.base import Backend, BackendContext, BackendOptions, Constraints, MoEShape
from moe_dispatch.backends.capacity import CapacityFactor, Factor, GraphSafeSupport, capacity_of
from moe_dispatch.backends.volume import SentBytes, Volume
from moe_dispatch.backends.wire import ALL_WIRES, WireSupport, back_wire, dispatch_format, packet_format, row_format
from moe_dispatch.errors import ConfigError
from moe_dispatch.permutation import accumulation_dtype
from moe_dispatch.types import Capacity, Sizes

if TYPE_CHECKING:
    from moe_dispatch.backends.alltoall.two_level import Nodes


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
        levels: With 1, a row goes once to each rank that owns one of its experts. With 2, it goes once to each node,
            and there once to each rank; sums come back in the same way. So fewer bytes travel between nodes. If all
            ranks are on one node, or each is on a node of its own, 2 has nothing to save and works as 1.
        ranks_per_node: Number of consecutive ranks of the group that share a node, for ``levels=2``. None detects it by
            host name.
    """

    name = "alltoall"
    auto_reason = "is for several ranks"

    reduction: Literal["fast", "exact"] = "fast"
    pair_rows: Factor = "worst"
    levels: Literal[1, 2] = 1
    ranks_per_node: Annotated[int, Field(ge=1)] | None = None

    @model_validator(mode="after")
    def _options_have_an_effect(self) -> AllToAllOptions:
        if self.levels == 1 and self.ranks_per_node is not None:
            raise ConfigError(
                f"backend 'alltoall': ranks_per_node is for levels=2, got ranks_per_node={self.ranks_per_node} and "
                "levels=1. Set levels=2, or leave ranks_per_node out."
            )
        return self

    def constraints(self, shape: MoEShape) -> Constraints:
        reason = (
            'reduction="exact" brings back one row for each slot, as many as the routing says; reduction="fast" would '
            "work"
        )
        if self.levels == 2:
            self._nodes(shape)
            reason = "levels=2 has no exchange of fixed size; levels=1 would work"
        return Constraints(
            exchanges_counts=not shape.graph_safe,
            min_rows=int(shape.graph_safe),
            wire=WireSupport(dtypes=ALL_WIRES, other_formats=True, gradients="can", delivers=True),
            graph_safe=GraphSafeSupport(drop_order="weight") if self.reduction == "fast" and self.levels == 1 else None,
            graph_safe_reason=reason,
            compilable=True,
            carries="packets",
        )

    @property
    def capacity_bounds(self) -> dict[str, CapacityFactor]:
        return {"pair_rows": self.pair_rows}

    def capacity(self, shape: MoEShape) -> Capacity:
        return capacity_of(shape, pair_factor=self.pair_rows)

    def wire_bytes(self, shape: MoEShape, volume: Volume, dtype: torch.dtype) -> SentBytes | None:
        wide, back = accumulation_dtype(dtype), row_format(dtype, shape.hidden_size, back_wire(shape.wire_dtype))
        there = dispatch_format(shape, dtype, wide, note=shape.graph_safe)
        gradient = (
            back if shape.grad_wire_dtype is None else row_format(dtype, shape.hidden_size, shape.grad_wire_dtype)
        )
        exact, nodes = self.reduction == "exact", self._nodes(shape)
        legs, width = {"": volume}, 1 + shape.num_local_experts
        if nodes is not None:
            if volume.legs is None or shape.ranks_per_node not in (None, nodes.ranks_per_node):
                return None
            legs, width = dict(zip(nodes.suffixes, volume.legs, strict=True)), width + nodes.num_columns
        sent = {} if shape.graph_safe else {"counts": volume.others * 8 * width}
        for suffix, leg in legs.items():
            out, returned, slots = leg.pairs_out, leg.pairs_in, shape.top_k
            if exact:
                returned, slots = leg.slots_in, 1
            if shape.graph_safe:
                out = returned = leg.others * (self.capacity(shape).pair_rows or 0)
            sent |= {
                f"dispatch{suffix}": out * there.stride,
                f"combine{suffix}": returned * back.nbytes,
                f"combine.backward{suffix}": out * gradient.nbytes,
                f"dispatch.backward{suffix}": returned * packet_format(back, slots, wide).stride,
            }
        return SentBytes(sent=sent, row_dtypes=(there.row.numbers, back.numbers))

    def footprint(self, shape: MoEShape, sizes: Sizes, rows: int, dtype: torch.dtype) -> dict[str, int]:
        from moe_dispatch.backends.footprint import alltoall  # noqa: PLC0415 - formulas only

        return alltoall(shape, sizes, rows, dtype)

    def open(self, context: BackendContext) -> Backend:
        if context.shape.graph_safe:
            from moe_dispatch.backends.alltoall.fixed import FixedAllToAll  # noqa: PLC0415 - graph-safe mode only

            return FixedAllToAll(context)
        if self.levels == 2:
            from moe_dispatch.backends.alltoall.two_level import open_levels  # noqa: PLC0415 - levels=2 only

            opened = open_levels(context, self.ranks_per_node, exact=self.reduction == "exact")
            if opened is not None:
                return opened
        if self.reduction == "exact":
            from moe_dispatch.backends.alltoall.exact import ExactAllToAll  # noqa: PLC0415 - reduction="exact" only

            return ExactAllToAll(context)
        return AllToAll(context)

    def _nodes(self, shape: MoEShape) -> Nodes | None:
        """Return the nodes of the group, seen from rank 0, if rows travel in two legs; None if they travel in one."""
        if self.levels == 1:
            return None
        from moe_dispatch.backends.alltoall.two_level import nodes_seen_from  # noqa: PLC0415 - levels=2 only

        return nodes_seen_from(0, shape, self.ranks_per_node, exact=self.reduction == "exact")
