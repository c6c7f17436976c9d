"""The backend: which of the gathered rows this rank's experts take, and how their outputs are summed.

Tensor suffixes are moe-dispatch's: T rows of a rank, P ranks, K top_k, R rows that this rank's experts see, N of them
real.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from moe_dispatch.backends import Arrived, Backend, BackendOptions, Constraints, MoEShape, Sizes
from moe_dispatch_ring.ring import gather, gather_both, sum_at_home


@final
@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class RingState:
    """What one dispatch leaves for its combine.

    Attributes:
        source_N: int64 (N,), which gathered row (rank * T + token) each real expert row is a copy of.
        place_N: int64 (N,), where it stands among the expert rows.
        num_expert_rows: R.
        rows_per_rank: T.
    """

    source_N: Tensor
    place_N: Tensor
    num_expert_rows: int
    rows_per_rank: int


@final
class Ring(Backend):
    """Rows go around a ring, past every rank; sums come back around it."""

    name = "ring"

    @classmethod
    def constraints(cls, shape: MoEShape, options: BackendOptions) -> Constraints:
        return Constraints(equal_rows=True)

    def dispatch(self, rows_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor, sizes: Sizes) -> Arrived:
        shape, communicator = self.context.shape, self.context.communicator
        rows_PTD, weights_PTK = gather_both(rows_TD, weights_TK, communicator)
        ids_PTK = gather(ids_TK, communicator, "dispatch")
        first = communicator.rank * shape.num_local_experts
        mine_L = torch.arange(first, first + shape.num_local_experts, device=ids_TK.device)
        chosen_LSK = ids_PTK.flatten(0, 1) == mine_L[:, None, None]
        # nonzero is sorted by expert, then by row, that is by source rank and token: the order experts are promised.
        expert_N, source_N, slot_N = chosen_LSK.nonzero().unbind(1)
        real_L = torch.bincount(expert_N, minlength=len(mine_L))
        padded_L = real_L + -real_L % shape.pad_multiple
        padding_before_L = (padded_L - real_L).cumsum(0) - (padded_L - real_L)
        state = RingState(
            source_N=source_N,
            place_N=torch.arange(len(source_N), device=ids_TK.device) + padding_before_L[expert_N],
            num_expert_rows=int(padded_L.sum()),
            rows_per_rank=len(rows_TD),
        )
        weights_N = weights_PTK.flatten(0, 1)[source_N, slot_N]
        return Arrived(
            rows=self._to_experts(rows_PTD, state),
            weights=weights_N.new_zeros(state.num_expert_rows).index_copy(0, state.place_N, weights_N),
            tokens_per_expert=padded_L,
            real_tokens_per_expert=real_L,
            tokens_per_expert_list=tuple(padded_L.tolist()),
            state=state,
        )

    def dispatch_again(self, rows_TD: Tensor, state: RingState) -> Tensor:
        no_weights = rows_TD.new_empty(len(rows_TD), 0)
        return self._to_experts(gather_both(rows_TD, no_weights, self.context.communicator)[0], state)

    def combine(self, rows_RD: Tensor, weights_R: Tensor, state: RingState, *, weighted: bool) -> Tensor:
        communicator = self.context.communicator
        # Indexing first: padding rows may hold NaN, so they are left out rather than multiplied by 0.
        outputs_ND = rows_RD[state.place_N].to(torch.promote_types(rows_RD.dtype, torch.float32))
        if weighted:
            outputs_ND = outputs_ND * weights_R[state.place_N].unsqueeze(1)
        sums = outputs_ND.new_zeros(communicator.size * state.rows_per_rank, rows_RD.shape[1])
        sums_PTD = sums.index_add(0, state.source_N, outputs_ND).unflatten(0, (communicator.size, state.rows_per_rank))
        return sum_at_home(sums_PTD, weights_R, communicator).to(rows_RD.dtype)

    def _to_experts(self, rows_PTD: Tensor, state: RingState) -> Tensor:
        rows_ND = rows_PTD.flatten(0, 1)[state.source_N]
        return rows_ND.new_zeros(state.num_expert_rows, rows_ND.shape[1]).index_copy(0, state.place_N, rows_ND)
