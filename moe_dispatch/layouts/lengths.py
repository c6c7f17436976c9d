"""The lengths to which a data loader pads sequences."""

from __future__ import annotations

from math import gcd, lcm

from moe_dispatch.errors import ConfigError, LayoutError

# The rows of a GEMM operand in fp8 must be a multiple of this: transformer-engine, delayed and current scaling.
FP8_ROWS = 16


def sequence_multiple(
    *,
    batch_size: int = 1,
    tp: int = 1,
    cp: int = 1,
    sequence_parallel: bool = False,
    fp8: bool = False,
    row_multiple: int = 1,
) -> int:
    """Return what the length of a sequence must be a multiple of: the lcm of all needs below.

    Args:
        batch_size: The number of sequences in a micro-batch, all of one padded length.
        tp: The number of tensor-parallel ranks.
        cp: The number of context-parallel ranks.
        sequence_parallel: Whether activations are divided among the tensor-parallel ranks.
        fp8: Whether linear layers run in fp8.
        row_multiple: What a dispatch backend needs the rows of one rank to be a multiple of, if it does not pad them
            itself: 64 or 128 for early versions of HybridEP.

    Returns:
        The multiple. If cp > 1 and tp is even, it is up to twice the exact need, ``lcm(2*cp, cp*tp)``: Megatron's data
        pipelines use this number, so both pad alike.

    Source: NVIDIA-NeMo/Megatron-Bridge#3294, 2026.
    """
    for name, size in {"batch_size": batch_size, "tp": tp, "cp": cp, "row_multiple": row_multiple}.items():
        if size < 1:
            raise ConfigError(
                f"sequence_multiple: {name} must be 1 or more, got {size}. Leave it out if it is not used."
            )
    multiple = 2 * tp * cp if cp > 1 else tp
    if fp8:
        multiple = lcm(multiple, FP8_ROWS)
    rows = row_multiple * cp * (tp if sequence_parallel else 1)
    return lcm(multiple, rows // gcd(batch_size, rows))


def padded_length(length: int, multiple: int, seq_length: int | None = None) -> int:
    """Return the length to which a sequence is padded.

    Args:
        length: The number of real tokens.
        multiple: From ``sequence_multiple``.
        seq_length: The fixed length that a pipeline asks for, if any; it is rounded up to the multiple too.
    """
    if multiple < 1:
        raise ConfigError(f"padded_length: multiple must be 1 or more, got {multiple}. Pass sequence_multiple(...).")
    if length < 0:
        raise LayoutError(f"padded_length: length must be 0 or more, got {length}. Pass the number of tokens.")
    if seq_length is not None and seq_length < length:
        raise LayoutError(
            f"padded_length: seq_length must be at least the length, got seq_length {seq_length} and length {length}. "
            "Truncate the sequence or raise seq_length."
        )
    target = length if seq_length is None else seq_length
    return -(-target // multiple) * multiple
