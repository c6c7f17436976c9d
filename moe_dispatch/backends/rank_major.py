"""The route of every backend whose exchange delivers rows in the order of their source rank.

Such a backend only says how rows travel from the ranks that have them to the ranks that need them (``spread``), and how
sums travel back (``collect``). Copying rows to their experts, weighting and padding are written here, once. The two
directions are each other's backward: the gradient of dispatch is collected as in combine, the gradient of combine is
spread as in dispatch.
"""

from __future__ import annotations

from abc import abstractmethod
from contextlib import AbstractContextManager
from typing import final

import torch
from torch import Tensor

from moe_dispatch.backends.base import Arrived, Route, WireDtype
from moe_dispatch.permutation import Permutation, SlotIndex


class RankMajorRoute(Route):
    """A route over a ``SlotIndex``: which of the S rows that arrived here goes to which expert.

    Attributes:
        permutation: what copies rows to their experts and sums them.
        index: where each (row, slot) pair stands among the expert-major rows.
        wire_dtype: what rows travel in; None is their own dtype.
    """

    __slots__ = ()
    permutation: Permutation
    index: SlotIndex
    wire_dtype: WireDtype | None

    @abstractmethod
    def spread(self, rows_TD: Tensor, wire: WireDtype | None, *, label: str) -> AbstractContextManager[Tensor]:
        """Send rows out as ``wire``; gives (S, D) in the wire's or the rows' dtype, valid inside the block."""

    @abstractmethod
    def collect(
        self, rows_RD: Tensor, weights_R: Tensor | None, values_R: Tensor | None, *, label: str
    ) -> tuple[Tensor, Tensor | None]:
        """Bring expert rows back, weighted and summed: (T, D); and one value per slot along with them: (T, K).

        Rows and values on padding are never read.
        """

    @property
    def num_grouped(self) -> int:
        return self.index.num_grouped

    @final
    def send(self, rows_TD: Tensor) -> Tensor:
        with self.spread(rows_TD, self.wire_dtype, label="dispatch") as rows_SD:
            return self.permutation.expand(rows_SD, self.index, rows_TD.dtype)

    @final
    def combine(self, rows_RD: Tensor, weights_R: Tensor | None) -> Tensor:
        return self.collect(rows_RD, weights_R, None, label="combine")[0]

    @final
    def dispatch_backward(self, grad_RD: Tensor, grad_R: Tensor | None) -> tuple[Tensor, Tensor | None]:
        return self.collect(grad_RD, None, grad_R, label="dispatch.backward")

    @final
    def combine_backward(
        self, grad_TD: Tensor, rows_RD: Tensor | None, weights_R: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        with self.spread(grad_TD, back_wire(self.wire_dtype), label="combine.backward") as grad_SD:
            return self.permutation.expand_weighted(grad_SD, self.index, weights_R, rows_RD, grad_TD.dtype)


def back_wire(wire: WireDtype | None) -> WireDtype | None:
    """What combined rows and gradients travel in, where rows are sent as ``wire``: never narrower than bfloat16."""
    return None if wire is None else "bfloat16"


def arrive(
    route: RankMajorRoute,
    rows_SD: Tensor,
    weights_SK: Tensor,
    dtype: torch.dtype,
    *,
    needed: Tensor | None = None,
    busiest_pair: Tensor | None = None,
) -> Arrived:
    """Copy the rows that arrived to their experts.

    Args:
        route: with the index that was just made: its counts are on the host, or in graph-safe mode on the device.
        rows_SD: rows by source rank.
        weights_SK: of their slots.
        dtype: of the rows that were sent.
        needed: int64 (), graph-safe: the rows that this rank's experts needed room for, where more than arrived here.
        busiest_pair: int64 (), graph-safe: the most rows that this rank had for one rank; None where that has no bound.
    """
    index = route.index
    needed = index.needed if needed is None else needed
    demand = None
    if needed is not None:
        demand = torch.stack([needed, torch.zeros_like(needed) if busiest_pair is None else busiest_pair])
    real_L, padded_L, padded_list = index.tokens_per_key(rows_SD.device)
    return Arrived(
        rows=route.permutation.expand(rows_SD, index, dtype),
        weights=index.to_grouped(weights_SK),
        tokens_per_expert=padded_L,
        real_tokens_per_expert=real_L,
        tokens_per_expert_list=padded_list,
        route=route,
        demand=demand,
    )
