"""What a training loop writes that hands each rank's own row count to the library; it should not."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from moe_dispatch_testing.emulation import emulated_deep_ep

HIDDEN, EXPERTS, TOP_K = 256, 8, 2


def choices(rows: int) -> torch.Tensor:
    """int64 (T, K): neighbours, round and round."""
    first_T = torch.arange(rows) % EXPERTS
    return torch.stack([first_T, (first_T + 1) % EXPERTS], 1)


def hybridep_by_hand(release: str, group: dist.ProcessGroup, rows: int, *, room: int | None = None) -> None:
    """One dispatch of ``HybridEPBuffer``, into a buffer for ``room`` rows a rank, or for this rank's own number."""
    buffer: Any = emulated_deep_ep(release).HybridEPBuffer(
        group=group,
        hidden_dim=HIDDEN,
        max_num_of_tokens_per_rank=room or rows,
        num_local_experts=EXPERTS // group.size(),
    )
    chosen_TE = torch.zeros(rows, EXPERTS, dtype=torch.bool).scatter_(1, choices(rows), True)
    buffer.dispatch_with_permute(
        hidden=torch.ones(rows, HIDDEN, dtype=torch.bfloat16),
        routing_map=chosen_TE,
        probs=chosen_TE.float(),
        pad_multiple=16,
    )


def elastic_by_hand(group: dist.ProcessGroup, rows: int) -> None:
    """One dispatch of v2's ``ElasticBuffer``, into a buffer for this rank's own number of rows."""
    buffer: Any = emulated_deep_ep("v2-2.1.0").ElasticBuffer(
        group, num_max_tokens_per_rank=rows, hidden=HIDDEN, num_topk=TOP_K
    )
    buffer.dispatch(
        torch.ones(rows, HIDDEN, dtype=torch.bfloat16),
        topk_idx=choices(rows),
        topk_weights=torch.ones(rows, TOP_K),
        num_experts=EXPERTS,
    )
