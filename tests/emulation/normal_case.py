"""A small job on v1's Buffer."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from moe_dispatch_testing.emulation import emulated_deep_ep
from tests.emulation.tokens import HIDDEN, NUM_EXPERTS, Tokens

deep_ep: Any = emulated_deep_ep("v1.2.1")
COUNTS = {2: (5, 7), 4: (5, 0, 7, 3)}


def open_buffer(group: dist.ProcessGroup, *, hidden_bytes: int = HIDDEN * 2) -> Any:
    size = group.size()
    configs = [deep_ep.Buffer.get_dispatch_config(size), deep_ep.Buffer.get_combine_config(size)]
    num_bytes = max(config.get_nvl_buffer_size_hint(hidden_bytes, size) for config in configs)
    return deep_ep.Buffer(group, num_bytes, 0, explicitly_destroy=True)


def dispatched(buffer: Any, tokens: Tokens, x: Any = None, **options: Any) -> Any:
    """A fresh dispatch by the layout of the tokens' ids."""
    per_rank, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(tokens.topk_idx, NUM_EXPERTS)
    return buffer.dispatch(
        tokens.x if x is None else x,
        num_tokens_per_rank=per_rank,
        is_token_in_rank=in_rank,
        num_tokens_per_expert=per_expert,
        topk_idx=tokens.topk_idx,
        topk_weights=tokens.topk_weights,
        **options,
    )
