"""The backend: which of the gathered rows this rank's experts take, and how their outputs are summed.

Tensor suffixes are moe-dispatch's: T rows of a rank, D columns, P ranks, K top_k, R expert-major rows of this rank with
padding, N of them real.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from moe_dispatch.backends import (
    Arrived,
    Backend,
    BackendContext,
    BackendOptions,
    Communicator,
    Constraints,
    MoEShape,
    Route,
    Sizes,
)
from moe_dispatch_ring.ring import gather, scatter_sum


@final
class RingOptions(BackendOptions):
    """What a config's ``backend="ring"`` is parsed into. It has no options."""

    name = "ring"
    auto_reason = "is slow"

    def constraints(self, shape: MoEShape) -> Constraints:
        return Constraints(equal_rows=True)

    def open(self, context: BackendContext) -> Backend:
        return Ring(context)


@final
@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class RingRoute(Route):
    """The way of one dispatch. Every method is raw: moe-dispatch connects the methods to autograd.

    Attributes:
        communicator: of the group.
        source_N: int64 (N,), which gathered row (rank * T + token) each real expert row is a copy of.
        slot_N: int64 (N,), the slot of that row, 0 to K-1.
        place_N: int64 (N,), the position of each real row among the expert rows.
        num_expert_rows: R.
        num_tokens: T.
        top_k: K.
    """

    communicator: Communicator
    source_N: Tensor
    slot_N: Tensor
    place_N: Tensor
    num_expert_rows: int
    num_tokens: int
    top_k: int

    def send(self, rows_TD: Tensor) -> Tensor:
        return self.to_experts(gather(rows_TD, self.communicator, "dispatch"))

    def combine(self, rows_RD: Tensor, weights_R: Tensor | None) -> Tensor:
        rows_ND = self._real(rows_RD)
        if weights_R is not None:
            rows_ND = rows_ND * weights_R[self.place_N].unsqueeze(1)
        return self._sum(rows_ND, "combine").to(rows_RD.dtype)

    def dispatch_backward(self, grad_RD: Tensor, grad_R: Tensor | None) -> tuple[Tensor, Tensor | None]:
        grad_TD = self._sum(self._real(grad_RD), "dispatch.backward").to(grad_RD.dtype)
        if grad_R is None:
            return grad_TD, None
        grad_SK = grad_R.new_zeros(self.communicator.size * self.num_tokens, self.top_k)
        grad_SK[self.source_N, self.slot_N] = grad_R[self.place_N]
        return grad_TD, scatter_sum(self._by_rank(grad_SK), self.communicator, "dispatch.backward")

    def combine_backward(
        self, grad_TD: Tensor, rows_RD: Tensor | None, weights_R: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        grad_RD = self.to_experts(gather(grad_TD, self.communicator, "combine.backward"))
        if weights_R is None:
            return grad_RD, None
        grad_ND, weighted_RD = self._real(grad_RD), torch.zeros_like(grad_RD)
        weighted_ND = grad_ND * weights_R[self.place_N].unsqueeze(1)
        weighted_RD[self.place_N] = weighted_ND.to(grad_RD.dtype)
        if rows_RD is None:
            return weighted_RD, None
        grad_R = torch.zeros_like(weights_R)
        grad_R[self.place_N] = (grad_ND * self._real(rows_RD)).sum(1).to(weights_R.dtype)
        return weighted_RD, grad_R

    def to_experts(self, rows_PTD: Tensor) -> Tensor:
        """Copy gathered rows to their experts: (R, D), zero on padding."""
        rows_ND = rows_PTD.flatten(0, 1)[self.source_N]
        return rows_ND.new_zeros(self.num_expert_rows, rows_ND.shape[1]).index_copy(0, self.place_N, rows_ND)

    def _real(self, rows_RD: Tensor) -> Tensor:
        """The rows that are no padding, (N, D), wide enough to sum. Padding may hold NaN, so it is left out first."""
        return rows_RD[self.place_N].to(torch.promote_types(rows_RD.dtype, torch.float32))

    def _sum(self, rows_ND: Tensor, label: str) -> Tensor:
        """Sum real expert rows per token, on the rank that sent the token: (T, D)."""
        sums_SD = rows_ND.new_zeros(self.communicator.size * self.num_tokens, rows_ND.shape[1])
        return scatter_sum(self._by_rank(sums_SD.index_add(0, self.source_N, rows_ND)), self.communicator, label)

    def _by_rank(self, tensor: Tensor) -> Tensor:
        return tensor.view(self.communicator.size, self.num_tokens, tensor.shape[1])


@final
class Ring(Backend):
    """Rows go around a ring, past every rank; sums come back around it."""

    def dispatch(self, rows_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor, sizes: Sizes) -> Arrived:
        shape, communicator = self.context.shape, self.context.communicator
        rows_PTD, ids_PTK, weights_PTK = (
            gather(block, communicator, "dispatch") for block in (rows_TD, ids_TK, weights_TK)
        )
        first = communicator.rank * shape.num_local_experts
        mine_L = torch.arange(first, first + shape.num_local_experts, device=ids_TK.device)
        chosen_LSK = ids_PTK.flatten(0, 1) == mine_L[:, None, None]
        # nonzero is sorted by expert, then by row, that is by source rank and token: the order experts are promised.
        expert_N, source_N, slot_N = chosen_LSK.nonzero().unbind(1)
        real_L = torch.bincount(expert_N, minlength=len(mine_L))
        padded_L = real_L + -real_L % shape.pad_multiple
        # With 3 and 2 real rows and pad_multiple 4, padded_L is 4 and 4: the real rows stand at 0 1 2 and 4 5.
        padding_before_L = (padded_L - real_L).cumsum(0) - (padded_L - real_L)
        route = RingRoute(
            communicator=communicator,
            source_N=source_N,
            slot_N=slot_N,
            place_N=torch.arange(len(source_N), device=ids_TK.device) + padding_before_L[expert_N],
            num_expert_rows=int(padded_L.sum()),
            num_tokens=len(rows_TD),
            top_k=shape.top_k,
        )
        weights_N = weights_PTK.flatten(0, 1)[source_N, slot_N]
        return Arrived(
            rows=route.to_experts(rows_PTD),
            weights=weights_N.new_zeros(route.num_expert_rows).index_copy(0, route.place_N, weights_N),
            tokens_per_expert=padded_L,
            real_tokens_per_expert=real_L,
            tokens_per_expert_list=tuple(padded_L.tolist()),
            route=route,
        )
