"""The number of rows that buffers of graph-safe mode hold.

It is fixed before the first dispatch and does not depend on the routing.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal, final

from pydantic import Field

from moe_dispatch.errors import ConfigError
from moe_dispatch.seams.options import Options
from moe_dispatch.types import Capacity

if TYPE_CHECKING:
    from moe_dispatch.backends.base import MoEShape
    from moe_dispatch.config import DispatcherConfig

CapacityFactor = Literal["worst"] | float
# A factor in a config. A factor above 1024 is taken for a typo: the worst case is P times the balanced load.
Factor = Literal["worst"] | Annotated[float, Field(gt=0, le=1024, allow_inf_nan=False)]


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class GraphSafeSupport:
    """How a backend works in graph-safe mode, for ``Constraints.graph_safe``.

    Attributes:
        drop_order: Order in which the backend drops rows beyond the capacity. "weight" drops the slots with the
            smallest weights first, and of equal weights the last by source rank, token and slot. "position" drops the
            last of its expert-major rows first, so the experts with the highest ids lose rows first. None means that it
            cannot drop rows, and supports only the capacity for the worst case.
    """

    drop_order: Literal["weight", "position"] | None = None


@final
class GraphSafeOptions(Options):
    """The options of ``graph_safe``.

    Attributes:
        capacity_factor: Room for the rows of a rank's experts. A float is relative to the balanced load: the room is
            ``ceil(capacity_factor * max_tokens_per_rank * top_k)`` rows, before experts are padded. With chunks of
            fewer tokens, their number takes the place of ``max_tokens_per_rank``. "worst" is room for every possible
            routing.
        on_overflow: What happens to rows that exceed a finite capacity; required with one. "raise": ``check()`` raises
            on all ranks. "drop": the slots with the least weight are dropped; among equal weights, the last by source
            rank, token and slot. "drop_by_position": the rows of the highest experts are dropped, as ``hybridep`` does.
    """

    capacity_factor: Factor = "worst"
    on_overflow: Literal["raise", "drop", "drop_by_position"] | None = None

    def check(self, config: DispatcherConfig) -> None:
        if config.row_counts_policy != "static":
            raise ConfigError(f'graph_safe needs row_counts "static", got {config.row_counts!r}. Leave row_counts out.')
        bounds = {"graph_safe.capacity_factor": self.capacity_factor, **config.backend_bounds}
        finite = [f"{name}={bound!r}" for name, bound in bounds.items() if bound != "worst"]
        if finite and self.on_overflow is None:
            offered = '"raise", "drop" or "drop_by_position"'
            raise ConfigError(f"graph_safe.on_overflow must be {offered} with {' and '.join(finite)}.")

    def check_backend(self, where: str, support: GraphSafeSupport) -> None:
        """Raise ConfigError if the backend drops no rows, or others than ``on_overflow`` says."""
        order = support.drop_order
        if self.on_overflow is not None and order is None:
            raise ConfigError(f"{where}: its library cannot drop rows. Write graph_safe=True, without options.")
        fitting = "drop" if order == "weight" else "drop_by_position"
        if self.on_overflow not in (None, "raise", fitting):
            raise ConfigError(
                f'{where}: it drops rows by {order}. Use "{fitting}" or "raise" for graph_safe.on_overflow.'
            )


def capacity_of(shape: MoEShape, *, pair_factor: CapacityFactor | None = None) -> Capacity:
    """Compute the capacity from the factors of a config.

    Args:
        shape: Shape with ``max_tokens_per_rank`` (Tmax) and ``capacity_factor``.
        pair_factor: Factor for ``pair_rows``: a multiple of the rows that one rank sends to one rank on average if
            tokens choose their experts evenly, or "worst". None for backends without a bound on pairs.
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
    """Return the capacity with this number of rows, at least one, and compute its ``buffer_rows``.

    Padding is largest if as many experts as possible get a row that needs padding. For example, with 4 experts and
    ``pad_multiple`` 16, 10 rows need at most 64 rows: three experts with 1 row each and one with 7 get 16 rows each.
    """
    rows = max(rows, 1)
    padding = min(shape.num_local_experts, rows) * (shape.pad_multiple - 1)
    buffer_rows = (rows + padding) // shape.pad_multiple * shape.pad_multiple
    if shape.planned_rows is not None:
        buffer_rows = min(buffer_rows, shape.planned_rows)
    return Capacity(rows=rows, buffer_rows=buffer_rows, pair_rows=None if pair_rows is None else max(pair_rows, 1))


def tokens_of(shape: MoEShape) -> int:
    """Return Tmax."""
    assert shape.max_tokens_per_rank is not None  # graph_safe needs it, and the config checks that
    return shape.max_tokens_per_rank


def worst_rows(shape: MoEShape, pair_rows: int | None = None) -> int:
    """Return the rows of one rank's experts if all slots that can go to the rank do so: ``P * Tmax * min(K, L)``.

    With ``pair_rows``, this number takes the place of Tmax. With a plan that bounds the rows, it is at most the bound.
    """
    from_each = tokens_of(shape) if pair_rows is None else pair_rows
    worst = shape.ep_size * from_each * min(shape.top_k, shape.num_local_experts)
    return worst if shape.planned_rows is None else min(worst, shape.planned_rows)


def balanced_rows(shape: MoEShape) -> int:
    """Return the rows of one rank's experts if all ranks get the same number of rows: ``Tmax * K``."""
    return tokens_of(shape) * shape.top_k


def balanced_pair_rows(shape: MoEShape) -> float:
    """Return the expected number of rows that one rank sends to one rank if each row chooses K experts evenly.

    It is Tmax times the probability that at least one of the K experts is on the receiving rank.
    """
    others = shape.num_experts - shape.num_local_experts
    none_there = math.comb(others, shape.top_k) / math.comb(shape.num_experts, shape.top_k)
    return tokens_of(shape) * (1 - none_there)


def grown(shape: MoEShape, capacity: Capacity, *, rows: int, pair_rows: int, headroom: float) -> Capacity:
    """Return a larger capacity, for the ``rows`` and ``pair_rows`` that a dispatch needed.

    A bound that was too small becomes the needed number times ``headroom``, at most the worst case. No bound becomes
    smaller.
    """
    pair, was_worst = capacity.pair_rows, capacity.rows == worst_rows(shape, capacity.pair_rows)
    if pair is not None and pair_rows > pair:
        pair = min(math.ceil(pair_rows * headroom), tokens_of(shape))
    if was_worst:  # only ``pair_rows`` bounded ``rows``: keep room for all rows that ``pair_rows`` lets through
        rows = worst_rows(shape, pair)
    elif rows > capacity.rows:
        rows = min(math.ceil(rows * headroom), worst_rows(shape, pair))
    return sized(shape, max(rows, capacity.rows), pair)
