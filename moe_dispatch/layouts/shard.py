"""The arithmetic of sequence and context parallelism: which rows a rank holds, and which lengths can be divided."""

from __future__ import annotations

from math import gcd, lcm
from typing import Literal

import torch
from torch import Tensor

from moe_dispatch.errors import ConfigError, LayoutError

ShardKind = Literal["contiguous", "zigzag"]
"""How the rows of a sequence are divided among ranks."""
# The number of rows of an fp8 GEMM operand must be a multiple of this, for delayed and current scaling of
# transformer-engine.
FP8_ROWS = 16


def split_multiple(size: int, kind: ShardKind) -> int:
    """Return the number of which a length must be a multiple to be divided among ``size`` ranks."""
    return size if kind == "contiguous" or size == 1 else 2 * size


def check_divisible(what: str, length: int, size: int, kind: ShardKind) -> None:
    """Raise LayoutError unless ``length`` can be divided. ``what`` names the length in the error."""
    multiple = split_multiple(size, kind)
    if length % multiple:
        raise LayoutError(
            f"shard: {what} ({length}) must be divisible by {multiple} to be split {kind} over {size} ranks."
        )


def split_positions(offset: Tensor, length: Tensor | int, index: int, size: int, kind: ShardKind) -> Tensor:
    """Convert offsets in the part of rank ``index`` of ``size`` to positions in the whole sequence, int64.

    Of 8 positions on 2 ranks, rank 0 holds 0 1 2 3 (contiguous) or 0 1 6 7 (zigzag). Zigzag cuts the sequence into ``2
    * size`` chunks. The first half of a part is chunk ``index`` from the start, the second half is chunk ``index`` from
    the end. ``length`` is the length of the whole sequence: one number for all offsets, or one per offset.

    Source: the chunk order of Megatron-LM core 0.16, ``get_batch_on_this_cp_rank``, for zigzag.
    """
    if kind == "contiguous" or size == 1:
        return offset + index * (length // size)
    chunk = length // (2 * size)
    return offset + torch.where(offset < chunk, index * chunk, (2 * size - 2 - index) * chunk)


def sequence_multiple(
    *,
    batch_size: int = 1,
    tp: int = 1,
    cp: int = 1,
    sequence_parallel: bool = False,
    fp8: bool = False,
    row_multiple: int = 1,
) -> int:
    """Return the number of which the length of a sequence must be a multiple.

    It is the least common multiple of the needs of all arguments.

    Args:
        batch_size: Number of sequences in a micro-batch, all with the same padded length.
        tp: Number of tensor-parallel ranks.
        cp: Number of context-parallel ranks.
        sequence_parallel: Whether activations are divided among the tensor-parallel ranks.
        fp8: Whether linear layers run in fp8.
        row_multiple: Number of which the rows of one rank must be a multiple, for a dispatch backend that does not pad
            rows itself: 64 or 128 for early versions of HybridEP.

    Returns:
        The multiple. If cp > 1 and tp is even, it is up to twice the exact need, ``lcm(2*cp, cp*tp)``. Megatron's data
        pipelines use this larger number too, so the padding is the same in both.

    Source: NVIDIA-NeMo/Megatron-Bridge#3294, 2026.
    """
    for name, size in {"batch_size": batch_size, "tp": tp, "cp": cp, "row_multiple": row_multiple}.items():
        if size < 1:
            raise ConfigError(f"sequence_multiple: {name} must be 1 or more, got {size}.")
    multiple = 2 * tp * cp if cp > 1 else tp
    if fp8:
        multiple = lcm(multiple, FP8_ROWS)
    rows = row_multiple * cp * (tp if sequence_parallel else 1)
    return lcm(multiple, rows // gcd(batch_size, rows))


def padded_length(length: int, multiple: int, seq_length: int | None = None) -> int:
    """Return the length to which a sequence is padded.

    Args:
        length: Number of real tokens.
        multiple: Result of ``sequence_multiple``.
        seq_length: Fixed length that a pipeline asks for, if any. It is rounded up to the multiple too.
    """
    if multiple < 1:
        raise ConfigError(f"padded_length: multiple must be 1 or more, got {multiple}. Pass sequence_multiple(...).")
    if length < 0:
        raise LayoutError(f"padded_length: length must be 0 or more, got {length}. Pass the number of tokens.")
    if seq_length is not None and seq_length < length:
        raise LayoutError(f"padded_length: seq_length ({seq_length}) must be at least the length ({length}).")
    return -(-(length if seq_length is None else seq_length) // multiple) * multiple
