"""A small job on v2's ElasticBuffer or V2.5's EPBuffer, and what its ranks must see."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from moe_dispatch_testing.emulation import emulated_deep_ep
from tests.emulation.tokens import HIDDEN, NUM_EXPERTS, TOP_K, Tokens, goes_to, local

deep_ep: Any = emulated_deep_ep("v2-2.1.0")
CAPACITY = 8
COUNTS = {1: (5,), 2: (5, 7), 4: (5, 0, 7, 3)}


def open_buffer(group: dist.ProcessGroup | None, release: str = "v2-2.1.0", **options: Any) -> Any:
    module: Any = emulated_deep_ep(release)
    cls = module.EPBuffer if hasattr(module, "EPBuffer") else module.ElasticBuffer
    return cls(group, **({"num_max_tokens_per_rank": CAPACITY, "hidden": HIDDEN, "num_topk": TOP_K} | options))


def dispatched(buffer: Any, tokens: Tokens, **options: Any) -> Any:
    arguments = {"topk_idx": tokens.topk_idx, "topk_weights": tokens.topk_weights, "num_experts": NUM_EXPERTS}
    return buffer.dispatch(options.pop("x", tokens.x), **(arguments | options))


def sources(everyone: list[Tokens], rank: int) -> list[tuple[int, int]]:
    """(source rank, token) of each row that a rank receives, sorted."""
    size = len(everyone)
    return [(peer, int(token)) for peer, tokens in enumerate(everyone) for token in goes_to(tokens, rank, size)]


def found_sources(handle: Any, rows: int) -> list[tuple[int, int]]:
    """(source rank, token) of each row in the order it lies, as the handle tells."""
    return [divmod(int(index), handle.num_max_tokens_per_rank) for index in handle.recv_src_metadata[:rows, 0]]


def expert_rows(everyone: list[Tokens], rank: int) -> list[list[tuple[int, int, int]]]:
    """For each expert of a rank the (source rank, token, choice) that lead to it, sorted."""
    size = len(everyone)
    rows: list[list[tuple[int, int, int]]] = [[] for _ in range(NUM_EXPERTS // size)]
    for peer, tokens in enumerate(everyone):
        for token, choices in enumerate(local(tokens.topk_idx, rank, size).tolist()):
            for choice, expert in enumerate(choices):
                if expert >= 0:
                    rows[expert].append((peer, token, choice))
    return rows


def ranks_of(tokens: Tokens, token: int, size: int) -> list[int]:
    """The ranks that a token goes to, in the order in which its sum is made: by the last choice that leads there."""
    owners = [int(expert) // (NUM_EXPERTS // size) if expert >= 0 else -1 for expert in tokens.topk_idx[token]]
    return [rank for choice, rank in enumerate(owners) if rank >= 0 and rank not in owners[choice + 1 :]]


def added(rows: list[Tensor]) -> Tensor:
    """The release's sum: two rows in bfloat16, more in float32 and rounded once."""
    if len(rows) <= 2:
        return sum(rows, torch.zeros(HIDDEN, dtype=torch.bfloat16))
    return torch.stack([row.float() for row in rows]).sum(0).bfloat16()
