"""A small job on v1's Buffer."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from moe_dispatch_testing.emulation import emulated_deep_ep
from tests.emulation.tokens import HIDDEN, NUM_EXPERTS, Tokens

deep_ep: Any = emulated_deep_ep("v1.2.1")
COUNTS = {2: (5, 7), 4: (5, 0, 7, 3), 16: tuple(rank % 5 for rank in range(16))}


def open_buffer(group: dist.ProcessGroup, *, hidden_bytes: int = HIDDEN * 2, **options: Any) -> Any:
    """With room for the queues; between nodes also for those of RDMA."""
    size = group.size()
    configs = [deep_ep.Buffer.get_dispatch_config(size), deep_ep.Buffer.get_combine_config(size)]
    nvl = max(config.get_nvl_buffer_size_hint(hidden_bytes, size) for config in configs)
    rdma = max(config.get_rdma_buffer_size_hint(hidden_bytes, size) for config in configs) if size > 8 else 0
    return deep_ep.Buffer(group, nvl, rdma, explicitly_destroy=True, **options)


def dispatched(buffer: Any, tokens: Tokens, *, num_experts: int = NUM_EXPERTS, **changed: Any) -> Any:
    """A fresh dispatch whose arguments are those of the layout of the tokens' ids, but for ``changed``."""
    per_rank, per_node, per_expert, in_rank, _ = buffer.get_dispatch_layout(tokens.topk_idx, num_experts)
    arguments = {
        "x": tokens.x,
        "num_tokens_per_rank": per_rank,
        "num_tokens_per_rdma_rank": per_node,
        "is_token_in_rank": in_rank,
        "num_tokens_per_expert": per_expert,
        "topk_idx": tokens.topk_idx,
        "topk_weights": tokens.topk_weights,
    }
    return buffer.dispatch(**arguments | changed)
