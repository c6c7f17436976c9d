"""How much of a pass is done at once, and in which dtype it accumulates."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

# Bytes of float32 that one block of a pass may hold: on the CPU a share of a core's L2 cache, so that a block is read
# back before it is evicted; elsewhere a bound on the temporary memory of a pass, which holds at most three such blocks.
BLOCK_BYTES = {"cpu": 2 << 20}
_ELSEWHERE = 256 << 20


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """``max(float32, dtype)``: in what sums over experts are accumulated before they are rounded once."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def blocks_of(length: int, others: int, *, limit: int) -> Iterator[slice]:
    """Slices of a dimension of this length, each at most ``limit`` bytes of float32 with ``others`` numbers a step."""
    size = max(1, limit // (4 * max(1, others)))
    for begin in range(0, length, size):
        yield slice(begin, min(begin + size, length))


def row_blocks(out: Tensor) -> Iterator[slice]:
    """Slices of the rows of ``out`` that fit the block size."""
    return blocks_of(out.shape[0], out.shape[1], limit=block_bytes(out.device))


def block_bytes(device: torch.device) -> int:
    """Bytes of a block on this device."""
    return BLOCK_BYTES.get(device.type, _ELSEWHERE)
