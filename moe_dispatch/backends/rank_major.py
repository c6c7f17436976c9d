"""The base of the route of every backend that delivers rows ordered by source rank.

Such a backend defines how rows travel from the ranks that have them to the ranks that need them (``spread``), and how
sums travel back (``collect``). This module does the rest for all of them: it copies rows to their experts, pads them
and applies weights. Each direction is the backward of the other: gradients of dispatch travel as in combine
(``collect``), and gradients of combine travel as in dispatch (``spread``).
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from functools import cache
from typing import final

import torch
from torch import Tensor

from moe_dispatch._recipes import Quantised, widen, widened_gradient
from moe_dispatch.backends.base import Arrived, BackendContext, Route, WireDtype
from moe_dispatch.permutation import Permutation, SlotIndex

__all__ = ["RankMajorRoute", "arrive"]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class RankMajorRoute(Route):
    """A route with a ``SlotIndex``, which says which of the S rows that arrived here go to which expert.

    Attributes:
        context: The objects that the backend is built with.
        index: Positions of all slots among the expert-major rows.
    """

    context: BackendContext
    index: SlotIndex

    @property
    def permutation(self) -> Permutation:
        """Implementation that copies rows to their experts and sums them."""
        return self.context.permutation_of(self.index.source_R)

    @abstractmethod
    def spread(self, rows_TD: Tensor, wire: WireDtype | None, *, label: str) -> Tensor | Quantised:
        """Send rows out in the dtype ``wire``. Return the rows that arrived, (S, D).

        They are quantised, or have the dtype of the wire or of ``rows_TD``.
        """

    @abstractmethod
    def collect(
        self, rows_RD: Tensor, weights_R: Tensor | None, values_R: Tensor | None, *, label: str
    ) -> tuple[Tensor, Tensor | None]:
        """Bring expert rows back, multiplied by their weights and summed: (T, D).

        With ``values_R``, also bring one value per expert row back to its slot: (T, K). Rows and values on padding are
        never read.
        """

    def tensors(self) -> list[Tensor]:
        return self.index.tensors()

    @property
    def num_grouped(self) -> int:
        return self.index.num_grouped

    @final
    def send(self, rows_TD: Tensor) -> Tensor | Quantised:
        rows_SD = self.spread(rows_TD, self.context.shape.wire_dtype, label="dispatch")
        return expand(self, rows_SD, rows_TD.dtype)

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
        shape = self.context.shape
        wire = shape.grad_wire_dtype or back_wire(shape.wire_dtype)
        grad_SD = self.spread(grad_TD, wire, label="combine.backward")
        if isinstance(grad_SD, Quantised):
            if weights_R is None:
                grad_RD = expand(self, grad_SD, grad_TD.dtype)
                return grad_RD if isinstance(grad_RD, Tensor) else widened_gradient(grad_RD, grad_TD.dtype), None
            grad_SD = widen(grad_SD, grad_TD.dtype)
        permutation = self.context.permutations[type(grad_SD), grad_SD.device.type]
        return permutation.expand_weighted(grad_SD, self.index, weights_R, rows_RD, grad_TD.dtype)


@cache
def back_wire(wire: WireDtype | None) -> WireDtype | None:
    """Return the wire dtype of combined rows if rows are sent as ``wire``: at least bfloat16."""
    return None if wire is None else "bfloat16"


def expand(route: RankMajorRoute, rows_SD: Tensor | Quantised, dtype: torch.dtype) -> Tensor | Quantised:
    """Copy the rows that arrived to their experts: rows of ``dtype``, or quantised rows if the config wants them so.

    The padding of quantised rows has values of 0 and scales of 1.

    Cost: with quantised rows, one pass over their values and one over their scales.
    """
    index = route.index
    if isinstance(rows_SD, Tensor) or not route.context.shape.quantised:
        rows_SD = rows_SD if isinstance(rows_SD, Tensor) else widen(rows_SD, dtype)
        permutation = route.context.permutations[type(rows_SD), rows_SD.device.type]
        return permutation.expand(rows_SD, index, dtype)
    permutation = route.context.permutation_of(index.source_R)
    values, scales = (permutation.expand(part.view(torch.uint8), index, torch.uint8) for part in rows_SD)
    scales, one = (scales, 127) if rows_SD.scales.dtype == torch.float8_e8m0fnu else (scales.view(torch.float32), 1)
    if index.filled_R is not None:
        scales.masked_fill_((index.filled_R < 0).unsqueeze(1), one)
    elif index.padding is not None:
        scales.index_fill_(0, index.padding, one)
    return Quantised(values.view(rows_SD.values.dtype), scales.view(rows_SD.scales.dtype))


def arrive(
    route: RankMajorRoute,
    rows_SD: Tensor | Quantised,
    weights_SK: Tensor,
    dtype: torch.dtype,
    *,
    wants_weights: bool = True,
    demand: Tensor | None = None,
) -> Arrived:
    """Copy the rows that arrived to their experts.

    Args:
        route: Route with a new index, which knows its counts on the host, or on the device in graph-safe mode.
        rows_SD: The rows, quantised or not, ordered by source rank.
        weights_SK: Weights of their slots.
        dtype: Dtype of the rows that were sent.
        wants_weights: As in ``Arrived``.
        demand: As in ``Arrived``, if the backend has ``pair_rows``. Otherwise all rows arrived here, so the index knows
            in graph-safe mode how many were needed.
    """
    index = route.index
    if demand is None and index.needed is not None:
        demand = torch.stack([index.needed, torch.zeros_like(index.needed)])
    real_L, padded_L, padded_list = index.tokens_per_key(weights_SK.device)
    rows_RD, scales = expand(route, rows_SD, dtype), None
    if isinstance(rows_RD, Quantised):
        rows_RD, scales = rows_RD
    return Arrived(
        rows=rows_RD,
        scales=scales,
        weights=index.to_grouped(weights_SK),
        tokens_per_expert=padded_L,
        real_tokens_per_expert=real_L,
        tokens_per_expert_list=padded_list,
        route=route,
        wants_weights=wants_weights,
        demand=demand,
    )
