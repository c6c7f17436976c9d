"""The route of dispatches whose library itself delivers expert-major rows and adds expert rows up.

The library moves rows in bfloat16. This module does the rest: it applies weights, and makes the gradients from the two
moves of the library. Gradients of dispatch travel as in combine, and gradients of combine travel as in dispatch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from moe_dispatch.backends.base import Route
from moe_dispatch.permutation import accumulation_dtype


@final
@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ExpertMajorRoute(Route):
    """The two moves of the library, with the handle of one dispatch.

    Attributes:
        spread: Function that sends bfloat16 rows (T, D) the way of the dispatch: bfloat16 (R, D).
        collect: Function that brings bfloat16 expert rows (R, D) back, and adds the rows of each token: (T, D). With
            values, float32 (R,), it also brings one value per expert row back to its slot: (T, K), 0 for slots that go
            nowhere. Without values the second result is None.
        is_real: Function that returns flags of the rows, bool (R,). They are False on padding. Behind the last expert's
            rows they may be anything.
    """

    spread: Callable[[Tensor], Tensor]
    collect: Callable[[Tensor, Tensor | None], tuple[Tensor, Tensor | None]]
    is_real: Callable[[], Tensor]

    def send(self, rows_TD: Tensor) -> Tensor:
        return self.spread(rows_TD.bfloat16().contiguous()).to(rows_TD.dtype)

    def combine(self, rows_RD: Tensor, weights_R: Tensor | None) -> Tensor:
        weighted_RD = rows_RD
        if weights_R is not None:
            wide = accumulation_dtype(rows_RD.dtype)
            weighted_RD = rows_RD.to(wide) * weights_R.to(wide).unsqueeze(1)
        return self.collect(weighted_RD.bfloat16().contiguous(), None)[0].to(rows_RD.dtype)

    def dispatch_backward(self, grad_RD: Tensor, grad_R: Tensor | None) -> tuple[Tensor, Tensor | None]:
        values_R = None if grad_R is None else grad_R.float().contiguous()
        grad_TD, grad_TK = self.collect(grad_RD.bfloat16().contiguous(), values_R)
        if grad_R is None or grad_TK is None:
            return grad_TD.to(grad_RD.dtype), None
        return grad_TD.to(grad_RD.dtype), grad_TK.to(grad_R.dtype)

    def combine_backward(
        self, grad_TD: Tensor, rows_RD: Tensor | None, weights_R: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        grad_RD = self.spread(grad_TD.bfloat16().contiguous())
        if weights_R is None:
            return grad_RD.to(grad_TD.dtype), None
        wide, dots_R = accumulation_dtype(grad_TD.dtype), None
        grad_RD = grad_RD.to(wide)
        if rows_RD is not None:
            # Padding of the outputs may hold NaN, so its products are replaced by 0, not multiplied by 0.
            dots_R = torch.where(self.is_real(), torch.linalg.vecdot(grad_RD, rows_RD.to(wide)), 0).to(weights_R.dtype)
        return (grad_RD * weights_R.to(wide).unsqueeze(1)).to(grad_TD.dtype), dots_R
