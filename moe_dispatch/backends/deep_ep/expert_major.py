"""The route of dispatches whose library itself delivers expert-major rows and adds expert rows up.

The library moves rows in bfloat16, or quantised to experts. This module does the rest: it applies weights, and makes
the gradients from the two moves of the library. Gradients of dispatch travel as in combine, and gradients of combine
travel as in dispatch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from moe_dispatch.backends.base import BackendContext, Route
from moe_dispatch.backends.deep_ep.rank_rows import Payload, pack, unpack
from moe_dispatch.backends.wire import Encoded
from moe_dispatch.permutation import accumulation_dtype


@final
@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ExpertMajorRoute(Route):
    """The two moves of the library, with the handle of one dispatch.

    Attributes:
        context: Context of the backend.
        spread: Function that sends rows (T, D) the way of the dispatch: (R, D) in the same form.
        collect: Function that brings bfloat16 expert rows (R, D) back, and adds the rows of each token: (T, D). With
            values, float32 (R,), it also brings one value per expert row back to its slot: (T, K), 0 for slots that go
            nowhere. Without values the second result is None.
        is_real: Function that returns flags of the rows, bool (R,). They are False on padding, and behind the rows of
            the last expert.
    """

    context: BackendContext
    spread: Callable[[Payload], Payload]
    collect: Callable[[Tensor, Tensor | None], tuple[Tensor, Tensor | None]]
    is_real: Callable[[], Tensor]

    def arrived(self, payload: Payload) -> Tensor | Encoded:
        """Return the rows that the library delivered. Scales become 1 on padding."""
        rows_RD = unpack(payload)
        if not isinstance(rows_RD, Tensor):
            rows_RD.scale_by_one(~self.is_real())
        return rows_RD

    def delivered(self, payload: Payload, dtype: torch.dtype) -> Tensor | Encoded:
        """Return the rows of a dispatch as experts get them."""
        rows_RD = self.arrived(payload)
        if isinstance(rows_RD, Tensor):
            return rows_RD.to(dtype)
        return rows_RD if self.context.shape.quantised else rows_RD.decoded(dtype)

    def send(self, rows_TD: Tensor) -> Tensor | Encoded:
        return self.delivered(self.spread(pack(rows_TD, self.context.shape.wire_dtype)), rows_TD.dtype)

    def combine(self, rows_RD: Tensor, weights_R: Tensor | None) -> Tensor:
        if weights_R is None:
            weighted_RD = rows_RD.bfloat16()
        else:
            weighted_RD, _ = self.context.permutation_of(rows_RD).weigh(
                rows_RD, weights_R, self.is_real, torch.bfloat16
            )
        return self.collect(weighted_RD.contiguous(), None)[0].to(rows_RD.dtype)

    def dispatch_backward(self, grad_RD: Tensor, grad_R: Tensor | None) -> tuple[Tensor, Tensor | None]:
        values_R = None if grad_R is None else grad_R.float().contiguous()
        grad_TD, grad_TK = self.collect(grad_RD.bfloat16().contiguous(), values_R)
        if grad_R is None or grad_TK is None:
            return grad_TD.to(grad_RD.dtype), None
        return grad_TD.to(grad_RD.dtype), grad_TK.to(grad_R.dtype)

    def combine_backward(
        self, grad_TD: Tensor, rows_RD: Tensor | None, weights_R: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        arrived = self.arrived(self.spread(pack(grad_TD, self.context.shape.grad_wire_dtype)))
        if weights_R is None:
            if isinstance(arrived, Tensor):
                return arrived.to(grad_TD.dtype), None
            return arrived.gradient(grad_TD.dtype), None
        grad_RD = arrived if isinstance(arrived, Tensor) else arrived.decoded(accumulation_dtype(grad_TD.dtype))
        return self.context.permutation_of(grad_RD).weigh(
            grad_RD, weights_R, self.is_real, grad_TD.dtype, partners_RD=rows_RD, clears=True
        )
