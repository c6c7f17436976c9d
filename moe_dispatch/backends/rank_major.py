"""The base of the route of every backend that delivers rows ordered by source rank.

Such a backend defines how rows travel from the ranks that have them to the ranks that need them (``spread``), and how
sums travel back (``collect``). This module does the rest for all of them: it copies rows to their experts, pads them
and applies weights. Each direction is the backward of the other: gradients of dispatch travel as in combine
(``collect``), and gradients of combine travel as in dispatch (``spread``).
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor

from moe_dispatch.backends.base import Arrived, BackendContext, Route
from moe_dispatch.backends.wire import Encoded, back_wire
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
    def spread(self, rows_TD: Tensor, wire: str | None, *, label: str) -> Tensor | Encoded:
        """Send rows out in the format ``wire``. Return the rows that arrived, (S, D), as ``WireFormat.decode`` does."""

    @abstractmethod
    def collect(
        self, rows_RD: Tensor, weights_R: Tensor | None, values_R: Tensor | None, *, label: str
    ) -> tuple[Tensor, Tensor | None]:
        """Bring expert rows back, multiplied by their weights and summed: (T, D).

        With ``values_R``, also bring one value per expert row back to its slot: (T, K). Rows and values on padding are
        never read.
        """

    @final
    def send(self, rows_TD: Tensor) -> Tensor | Encoded:
        rows_SD = self.spread(rows_TD, self.context.shape.wire_dtype, label="dispatch")
        return expand(self, rows_SD, rows_TD.dtype)

    @final
    def combine(self, rows_RD: Tensor, weights_R: Tensor | None) -> Tensor:
        return self.collect(rows_RD, weights_R, None, label="combine")[0]

    @final
    def dispatch_backward(self, grad_RD: Tensor, grad_R: Tensor | None) -> tuple[Tensor, Tensor | None]:
        return self.collect(grad_RD, None, grad_R, label="dispatch.backward")

    @final
    def spread_gradient(self, grad_TD: Tensor) -> Tensor | Encoded:
        """Send the gradient of the result of ``combine`` out. Return the rows that arrived, as ``spread`` does."""
        shape = self.context.shape
        return self.spread(grad_TD, shape.grad_wire_dtype or back_wire(shape.wire_dtype), label="combine.backward")

    @final
    def combine_backward(
        self, grad_TD: Tensor, rows_RD: Tensor | None, weights_R: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        shape, grad_SD = self.context.shape, self.spread_gradient(grad_TD)
        if not isinstance(grad_SD, Tensor):
            given = (self.index, weights_R, rows_RD, grad_TD.dtype)
            return grad_SD.expand_weighted(self.permutation, *given, as_sent=shape.quantised)
        permutation = self.context.permutations[type(grad_SD), grad_SD.device.type]
        return permutation.expand_weighted(grad_SD, self.index, weights_R, rows_RD, grad_TD.dtype)


def expand(route: RankMajorRoute, rows_SD: Tensor | Encoded, dtype: torch.dtype) -> Tensor | Encoded:
    """Return the rows of experts: copies in ``dtype``, or encoded if the config wants them so, or as they arrived."""
    deliver = route.context.deliver
    return grouped(route, rows_SD, dtype) if deliver is None else deliver(route, rows_SD)


def grouped(route: RankMajorRoute, rows_SD: Tensor | Encoded, dtype: torch.dtype) -> Any:
    """Copy the rows that arrived to their experts: rows of ``dtype``, or encoded rows if the config wants them so."""
    context, index = route.context, route.index
    if not isinstance(rows_SD, Tensor):
        permutation = context.permutation_of(index.source_R)
        return rows_SD.expand(permutation, index, dtype, as_sent=context.shape.quantised)
    return context.permutations[type(rows_SD), rows_SD.device.type].expand(rows_SD, index, dtype)


def arrive(
    route: RankMajorRoute,
    rows_SD: Tensor | Encoded,
    weights_SK: Tensor,
    dtype: torch.dtype,
    *,
    wants_weights: bool = True,
    demand: Tensor | None = None,
) -> Arrived:
    """Copy the rows that arrived to their experts.

    Args:
        route: Route with a new index, which knows its counts on the host, or on the device in graph-safe mode.
        rows_SD: The rows, encoded or not, ordered by source rank.
        weights_SK: Weights of their slots.
        dtype: Dtype of the rows that were sent.
        wants_weights: As in ``Arrived``.
        demand: As in ``Arrived``, if the backend has ``pair_rows``. Otherwise all rows arrived here, so the index knows
            in graph-safe mode how many were needed.
    """
    index, deliver = route.index, route.context.deliver
    if demand is None and index.needed is not None:
        demand = torch.stack([index.needed, torch.zeros_like(index.needed)])
    real_L, padded_L, padded_list = index.tokens_per_key(weights_SK.device)
    return Arrived(
        rows=grouped(route, rows_SD, dtype) if deliver is None else deliver(route, rows_SD),
        weights=route.context.permutations[type(weights_SK), weights_SK.device.type].to_grouped(index, weights_SK),
        tokens_per_expert=padded_L,
        real_tokens_per_expert=real_L,
        tokens_per_expert_list=padded_list,
        route=route,
        wants_weights=wants_weights,
        demand=demand,
    )
