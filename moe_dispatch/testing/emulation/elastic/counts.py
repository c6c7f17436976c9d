"""Row counts of a v2 dispatch: what ranks tell each other, and what follows for the rows of one of them."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import Any, final

import torch
from torch import Tensor

from moe_dispatch.testing.emulation.elastic.handle import EPHandle
from moe_dispatch.testing.emulation.elastic.routes import has_duplicates, masters
from moe_dispatch.testing.emulation.elastic.sizes import aligned


def told(topk_idx: Tensor, owner: Tensor, *, num_experts: int, num_ranks: int) -> dict[str, Any]:
    """Of this rank's tokens: rows for each rank, rows for each expert, and which ranks find an expert named twice."""
    leads = masters(owner)
    chosen = topk_idx[topk_idx >= 0]
    return {
        "rows": [int((leads & (owner == rank)).sum()) for rank in range(num_ranks)],
        "experts": torch.bincount(chosen, minlength=num_experts).tolist(),
        "twice": has_duplicates(topk_idx, num_experts, num_ranks),
    }


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Counts:
    """Rows that one rank receives: from each rank, and for each of its experts."""

    rows_from: list[int]
    per_expert: list[int]
    alignment: int

    @staticmethod
    def of(everyone: list[dict[str, Any]], rank: int, alignment: int) -> Counts:
        experts = torch.tensor([one["experts"] for one in everyone]).sum(0).view(len(everyone), -1)
        per_expert: list[int] = experts[rank].tolist()
        return Counts(rows_from=[one["rows"][rank] for one in everyone], per_expert=per_expert, alignment=alignment)

    @staticmethod
    def of_handle(handle: EPHandle) -> Counts:
        ends = handle.psum_num_recv_tokens_per_scaleup_rank
        rows_from: list[int] = ends.diff(prepend=ends.new_zeros(1)).tolist()
        per_expert: list[int] = handle.num_unaligned_recv_tokens_per_expert.tolist()
        return Counts(rows_from=rows_from, per_expert=per_expert, alignment=handle.expert_alignment)

    @property
    def aligned(self) -> list[int]:
        return [aligned(rows, self.alignment) for rows in self.per_expert]

    @property
    def starts(self) -> list[int]:
        """The first expanded row of each expert."""
        return list(accumulate(self.aligned, initial=0))[:-1]

    def rows_psum(self) -> Tensor:
        return torch.tensor(list(accumulate(self.rows_from)), dtype=torch.int32)

    def experts_real(self) -> Tensor:
        return torch.tensor(self.per_expert, dtype=torch.int32)

    def experts_psum(self, *, do_expand: bool) -> Tensor:
        """Compact: inclusive sums of aligned counts. Expanded: the end of each expert's real rows."""
        ends = [start + rows for start, rows in zip(self.starts, self.per_expert, strict=True)]
        return torch.tensor(ends if do_expand else list(accumulate(self.aligned)), dtype=torch.int32)


def worst_rows(counts: Counts, *, num_max_tokens_per_rank: int, num_topk: int) -> tuple[int, int]:
    """Compact and expanded rows of any routing, which is all that a host knows that does not wait.

    Source: csrc/elastic/buffer.hpp:1065-1071 of v2.
    """
    rows = num_max_tokens_per_rank * len(counts.rows_from)
    num_local_experts = len(counts.per_expert)
    expanded = rows * min(num_topk, num_local_experts) + (counts.alignment - 1) * num_local_experts
    return rows, aligned(expanded, counts.alignment)
