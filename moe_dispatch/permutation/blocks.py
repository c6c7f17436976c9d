"""How much of a pass is done at once, and in which dtype it accumulates."""

from __future__ import annotations

import torch
from torch import Tensor

# Bytes of float32 that one block of a pass may hold: on the CPU a share of a core's L2 cache, so that a block is read
# back before it is evicted; elsewhere a bound on the temporary memory of a pass, which holds at most three such blocks.
CPU_BLOCK_BYTES = 2 << 20
_ELSEWHERE = 256 << 20


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """``max(float32, dtype)``: in what sums over experts are accumulated before they are rounded once."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def blocks_of(length: int, others: int, *, limit: int) -> list[slice]:
    """Slices of a dimension of this length, each at most ``limit`` bytes of float32 with ``others`` numbers a step."""
    size = max(1, limit // (4 * max(1, others)))
    return [slice(begin, min(begin + size, length)) for begin in range(0, length, size)]


def row_blocks(out: Tensor) -> list[slice]:
    """Slices of the rows of ``out`` that fit the block size."""
    return blocks_of(out.shape[0], out.shape[1], limit=block_bytes(out))


def block_bytes(out: Tensor) -> int:
    """Bytes of a block where this tensor is."""
    return CPU_BLOCK_BYTES if out.is_cpu else _ELSEWHERE
