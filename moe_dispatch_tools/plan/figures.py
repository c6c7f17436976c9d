"""Figures of a plan: statistics of rows and bytes, of one backend, and of one capacity factor."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import final

from moe_dispatch.backends.capacity import CapacityFactor


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Figure:
    """Statistics of a number that each rank has in each dispatch.

    Attributes:
        expected: Mean over ranks and dispatches.
        error: Standard error of ``expected``; 0 for recorded dispatches.
        low: Smallest number of any rank in any dispatch.
        high: Largest number of any rank in any dispatch.
    """

    expected: float
    error: float
    low: float
    high: float

    def times(self, factor: float) -> Figure:
        """Multiply all numbers, for example by the number of layers."""
        return Figure(**{name: value * factor for name, value in dataclasses.asdict(self).items()})

    def plus(self, number: float) -> Figure:
        """Add a number without an error."""
        return dataclasses.replace(
            self, expected=self.expected + number, low=self.low + number, high=self.high + number
        )


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class BackendPlan:
    """The plan of one backend.

    Attributes:
        name: Name of the backend, with the release if its library is not installed.
        rules: Source of the rules in this plan: an installed version, or the release that the emulation follows.
        refused: Error message of the backend if it cannot be used here. Then all other attributes are empty.
        rows_per_rank: Rows that a rank brings to the backend, including ``rank_padding`` rows of padding.
        sequence_multiple: Multiple of the sequence length that makes ``rank_padding`` 0.
        sent: Bytes that a rank sends to other ranks in a layer, by collective; None if the backend cannot say.
        row_dtypes: Names of the dtypes of the rows on the wire, dispatch first.
        forward: Bytes of all layers in the forward, and of one agreement on row counts.
        backward: Bytes of all layers in the backward.
        between_nodes: Mean of the bytes that a rank sends to other nodes in a step.
        payload_only: Whether ``sent`` counts only rows.
        buffers: Bytes by purpose. In graph-safe mode: the buffers of a dispatch. In eager mode: "rows", the rows of the
            experts.
    """

    name: str
    rules: str
    refused: str | None = None
    rows_per_rank: Figure | None = None
    rank_padding: Figure | None = None
    sequence_multiple: int | None = None
    sent: dict[str, Figure] | None = None
    row_dtypes: str = ""
    forward: Figure | None = None
    backward: Figure | None = None
    between_nodes: float | None = None
    payload_only: bool = False
    buffers: dict[str, Figure] | None = None


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class CapacityPlan:
    """The plan of one capacity factor of graph-safe mode. Each overflow is a share, given as two bounds.

    Attributes:
        factor: Capacity divided by the balanced load.
        rows: Capacity of the experts of a rank, in rows.
        buffer_rows: Rows of the buffer, which has room for expert padding.
        buffer_bytes: Bytes of the buffer.
        overflow: Share of dispatches in which some rank needs more rows.
        step_overflow: Share of steps with such a dispatch, if layers are independent.
        pair_rows: ``pair_rows`` of ``alltoall`` for this factor.
        pair_overflow: Share of dispatches in which some pair of ranks needs more rows than ``pair_rows``.
    """

    factor: CapacityFactor
    rows: int
    buffer_rows: int
    buffer_bytes: int
    overflow: tuple[float, float]
    step_overflow: tuple[float, float]
    pair_rows: int
    pair_overflow: tuple[float, float]
