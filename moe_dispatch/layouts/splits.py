"""Which positions of a sequence a rank holds under sequence and context parallelism."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import get_args

import torch
from torch import Tensor

from moe_dispatch.errors import ConfigError, LayoutError
from moe_dispatch.layouts.base import ShardKind


def check_split(index: int, size: int, kind: str) -> None:
    """Raise ConfigError unless index, size and kind name a shard."""
    if kind not in get_args(ShardKind):
        raise ConfigError(
            f"shard: kind must be one of {', '.join(get_args(ShardKind))}, got {kind!r}. Name one of them."
        )
    if size < 1 or not 0 <= index < size:
        raise ConfigError(
            f"shard: index must lie in 0..size-1, got index {index} and size {size}. Pass group.rank() and "
            "group.size()."
        )


def split_multiple(size: int, kind: ShardKind) -> int:
    """What a length must be a multiple of to be divided among ``size`` ranks."""
    return size if kind == "contiguous" or size == 1 else 2 * size


def check_divisible(what: str, length: int, size: int, kind: ShardKind) -> None:
    """Raise LayoutError unless ``length`` can be divided."""
    multiple = split_multiple(size, kind)
    if length % multiple:
        raise LayoutError(
            f"shard: {what} ({length}) must be divisible by {multiple} to be split {kind} over {size} ranks. Pad "
            "sequences to sequence_multiple(...)."
        )


def split_positions(length: int, index: int, size: int, kind: ShardKind, device: torch.device | None = None) -> Tensor:
    """The positions that rank ``index`` of ``size`` holds, in its order: int64 (length / size,).

    Source: the chunk order of Megatron-LM core 0.16, ``get_batch_on_this_cp_rank``, for zigzag.
    """
    part = length // size
    positions = torch.arange(part, device=device)
    if kind == "contiguous" or size == 1:
        return positions + index * part
    chunk = part // 2
    # The second half of what a rank holds is the mirror image of its first chunk, counted from the end.
    return positions + torch.where(positions < chunk, index * chunk, (2 * size - 2 - index) * chunk)


def rows_at(grid: Sequence[int], dim: int, positions: Tensor) -> Tensor:
    """The rows of a grid that have one of ``positions`` along ``dim``, in row order of the smaller grid."""
    return torch.arange(prod(grid), device=positions.device).view(*grid).index_select(dim, positions).flatten()
