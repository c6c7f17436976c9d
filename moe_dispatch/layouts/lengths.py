"""The lengths to which a data loader pads sequences."""

from __future__ import annotations

from math import gcd, lcm

from moe_dispatch.errors import ConfigError, LayoutError

# The number of rows of an fp8 GEMM operand must be a multiple of this, for delayed and current scaling of
# transformer-engine.
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
        length: Number of real tokens.
        multiple: Result of ``sequence_multiple``.
        seq_length: Fixed length that a pipeline asks for, if any. It is rounded up to the multiple too.
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
