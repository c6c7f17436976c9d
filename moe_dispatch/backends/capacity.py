"""How many rows graph-safe buffers hold: fixed before the first dispatch, whatever the routing will be."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal, final

from pydantic import Field

if TYPE_CHECKING:
    from moe_dispatch.backends.base import MoEShape

CapacityFactor = Literal["worst"] | float
# As a config takes it. Beyond 1024 times the balanced load lies a typing error: the worst case is P times that load.
Factor = Literal["worst"] | Annotated[float, Field(gt=0, le=1024, allow_inf_nan=False)]


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Capacity:
    """Room of a graph-safe dispatch, the same on all ranks.

    Attributes:
        rows: real rows that one rank's experts take, without expert padding.
        buffer_rows: R, the rows that experts work on: room for ``rows`` whichever experts they go to, with padding.
        pair_rows: rows that a rank may send to each rank; None where the backend has no such bound.
    """

    rows: int
    buffer_rows: int
    pair_rows: int | None = None

    def holds(self, rows: int, pair_rows: int) -> bool:
        """Whether a dispatch that needs so many rows drops none."""
        return rows <= self.rows and (self.pair_rows is None or pair_rows <= self.pair_rows)


def capacity_of(shape: MoEShape, *, pair_factor: CapacityFactor | None = None) -> Capacity:
    """What the factors of a config come to.

    Args:
        shape: with ``max_tokens_per_rank``, Tmax, and ``capacity_factor``.
        pair_factor: over the rows that a pair of ranks exchanges where experts are chosen evenly, or "worst"; None
            for backends without a bound of pairs.
    """
    pair = None
    if pair_factor is not None:
        pair = tokens_of(shape)
        if pair_factor != "worst":
            pair = min(pair, math.ceil(pair_factor * balanced_pair_rows(shape)))
    rows = worst_rows(shape, pair)
    if shape.capacity_factor != "worst":
        rows = min(rows, math.ceil(shape.capacity_factor * balanced_rows(shape)))
    return sized(shape, rows, pair)


def sized(shape: MoEShape, rows: int, pair_rows: int | None) -> Capacity:
    """A capacity of so many rows, and at least one."""
    rows = max(rows, 1)
    padding = min(shape.num_local_experts, rows) * (shape.pad_multiple - 1)
    buffer_rows = (rows + padding) // shape.pad_multiple * shape.pad_multiple
    return Capacity(rows=rows, buffer_rows=buffer_rows, pair_rows=None if pair_rows is None else max(pair_rows, 1))


def tokens_of(shape: MoEShape) -> int:
    """Tmax."""
    assert shape.max_tokens_per_rank is not None  # graph_safe asks for it
    return shape.max_tokens_per_rank


def worst_rows(shape: MoEShape, pair_rows: int | None = None) -> int:
    """Every slot of the group that can go to one rank does: ``P * Tmax * min(K, L)``, or ``pair_rows`` for Tmax."""
    from_each = tokens_of(shape) if pair_rows is None else pair_rows
    return shape.ep_size * from_each * min(shape.top_k, shape.num_local_experts)


def balanced_rows(shape: MoEShape) -> int:
    """Rows of a rank's experts when all ranks get alike: ``Tmax * K``."""
    return tokens_of(shape) * shape.top_k


def balanced_pair_rows(shape: MoEShape) -> float:
    """Rows from one rank to one rank, expected when each chooses K experts evenly: Tmax times the odds of any there."""
    others = shape.num_experts - shape.num_local_experts
    none_there = math.comb(others, shape.top_k) / math.comb(shape.num_experts, shape.top_k)
    return tokens_of(shape) * (1 - none_there)


def grown(shape: MoEShape, capacity: Capacity, *, rows: int, pair_rows: int, headroom: float) -> Capacity:
    """Room for what was needed, times ``headroom`` where it was short; never beyond the worst case, never less."""
    pair, was_worst = capacity.pair_rows, capacity.rows == worst_rows(shape, capacity.pair_rows)
    if pair is not None and pair_rows > pair:
        pair = min(math.ceil(pair_rows * headroom), tokens_of(shape))
    if was_worst:  # only the pairs bounded the rows: what is asked for is still room for whatever they let through
        rows = worst_rows(shape, pair)
    elif rows > capacity.rows:
        rows = min(math.ceil(rows * headroom), worst_rows(shape, pair))
    return sized(shape, max(rows, capacity.rows), pair)
