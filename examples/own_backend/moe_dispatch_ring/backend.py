"""The backend: it selects rows for the experts of this rank, and sums the outputs of the experts.

Tensor suffixes: T rows of a rank, D columns, P ranks, S = P * T gathered rows, L experts of this rank, K top_k, R
expert-major rows of this rank with padding, N expert-major rows without padding.
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
    """The result of parsing ``backend="ring"``. The backend has no options."""

    name = "ring"
    auto_reason = "is slow"

    def constraints(self, shape: MoEShape) -> Constraints:
        return Constraints(equal_rows=True)

    def open(self, context: BackendContext) -> Backend:
        return Ring(context)


@final
@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class RingRoute(Route):
    """The route of one dispatch. moe-dispatch connects its methods to autograd.

    Attributes:
        communicator: Communicator of the group.
        source_N: int64 (N,). Each real expert row is a copy of the gathered row with this index (rank * T + token).
        slot_N: int64 (N,). Slot of that gathered row, 0 to K-1.
        position_N: int64 (N,). Position of each real row among the expert rows.
        num_expert_rows: R.
        num_tokens: T.
        top_k: K.
    """

    communicator: Communicator
    source_N: Tensor
    slot_N: Tensor
    position_N: Tensor
    num_expert_rows: int
    num_tokens: int
    top_k: int

    def send(self, rows_TD: Tensor) -> Tensor:
        return self.to_experts(gather(rows_TD, self.communicator, "dispatch"))

    def combine(self, rows_RD: Tensor, weights_R: Tensor | None) -> Tensor:
        rows_ND = self._real(rows_RD)
        if weights_R is not None:
            rows_ND = rows_ND * weights_R[self.position_N].unsqueeze(1)
        return self._sum(rows_ND, "combine").to(rows_RD.dtype)

    def dispatch_backward(self, grad_RD: Tensor, grad_R: Tensor | None) -> tuple[Tensor, Tensor | None]:
        grad_TD = self._sum(self._real(grad_RD), "dispatch.backward").to(grad_RD.dtype)
        if grad_R is None:
            return grad_TD, None
        grad_SK = grad_R.new_zeros(self.communicator.size * self.num_tokens, self.top_k)
        grad_SK[self.source_N, self.slot_N] = grad_R[self.position_N]
        return grad_TD, scatter_sum(self._by_rank(grad_SK), self.communicator, "dispatch.backward")

    def combine_backward(
        self, grad_TD: Tensor, rows_RD: Tensor | None, weights_R: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        grad_RD = self.to_experts(gather(grad_TD, self.communicator, "combine.backward"))
        if weights_R is None:
            return grad_RD, None
        grad_ND, weighted_RD = self._real(grad_RD), torch.zeros_like(grad_RD)
        weighted_ND = grad_ND * weights_R[self.position_N].unsqueeze(1)
        weighted_RD[self.position_N] = weighted_ND.to(grad_RD.dtype)
        if rows_RD is None:
            return weighted_RD, None
        grad_R = torch.zeros_like(weights_R)
        grad_R[self.position_N] = (grad_ND * self._real(rows_RD)).sum(1).to(weights_R.dtype)
        return weighted_RD, grad_R

    def to_experts(self, rows_PTD: Tensor) -> Tensor:
        """Copy gathered rows to their experts: (R, D), zero on padding."""
        rows_ND = rows_PTD.flatten(0, 1)[self.source_N]
        return rows_ND.new_zeros(self.num_expert_rows, rows_ND.shape[1]).index_copy(0, self.position_N, rows_ND)

    def _real(self, rows_RD: Tensor) -> Tensor:
        """Return the real rows (N, D) in a dtype for sums. Padding may hold NaN, so it is removed first."""
        return rows_RD[self.position_N].to(torch.promote_types(rows_RD.dtype, torch.float32))

    def _sum(self, rows_ND: Tensor, label: str) -> Tensor:
        """Sum real expert rows per token, on the rank that sent the token: (T, D)."""
        sums_SD = rows_ND.new_zeros(self.communicator.size * self.num_tokens, rows_ND.shape[1])
        return scatter_sum(self._by_rank(sums_SD.index_add(0, self.source_N, rows_ND)), self.communicator, label)

    def _by_rank(self, tensor: Tensor) -> Tensor:
        return tensor.view(self.communicator.size, self.num_tokens, tensor.shape[1])


@final
class Ring(Backend):
    """A backend that passes rows around a ring of ranks, and sums on the way back."""

    def dispatch(self, rows_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor, sizes: Sizes) -> Arrived:
        shape, communicator = self.context.shape, self.context.communicator
        rows_PTD, ids_PTK, weights_PTK = (
            gather(block, communicator, "dispatch") for block in (rows_TD, ids_TK, weights_TK)
        )
        first = communicator.rank * shape.num_local_experts
        mine_L = torch.arange(first, first + shape.num_local_experts, device=ids_TK.device)
        chosen_LSK = ids_PTK.flatten(0, 1) == mine_L[:, None, None]
        # nonzero sorts by expert, then by row, which means by source rank and token. The contract asks for this order.
        expert_N, source_N, slot_N = chosen_LSK.nonzero().unbind(1)
        real_L = torch.bincount(expert_N, minlength=len(mine_L))
        padded_L = real_L + -real_L % shape.pad_multiple
        # Example: with 3 and 2 real rows and pad_multiple 4, padded_L is 4 and 4. The real rows are at 0 1 2 and 4 5.
        padding_before_L = (padded_L - real_L).cumsum(0) - (padded_L - real_L)
        route = RingRoute(
            communicator=communicator,
            source_N=source_N,
            slot_N=slot_N,
            position_N=torch.arange(len(source_N), device=ids_TK.device) + padding_before_L[expert_N],
            num_expert_rows=int(padded_L.sum()),
            num_tokens=len(rows_TD),
            top_k=shape.top_k,
        )
        weights_N = weights_PTK.flatten(0, 1)[source_N, slot_N]
        return Arrived(
            rows=route.to_experts(rows_PTD),
            weights=weights_N.new_zeros(route.num_expert_rows).index_copy(0, route.position_N, weights_N),
            tokens_per_expert=padded_L,
            real_tokens_per_expert=real_L,
            tokens_per_expert_list=tuple(padded_L.tolist()),
            route=route,
        )
