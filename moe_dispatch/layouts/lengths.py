"""What a data loader must pad sequences to."""

from __future__ import annotations

from math import gcd, lcm

from moe_dispatch.errors import ConfigError, LayoutError

# Rows that an fp8 GEMM needs its operands to be a multiple of: transformer-engine, delayed and current scaling.
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
    """What the length of a sequence must be a multiple of.

    Each need is composed with lcm, so that none gets lost where another applies.

    Args:
        batch_size: sequences in a micro-batch, of equal padded length.
        tp: tensor-parallel ranks.
        cp: context-parallel ranks.
        sequence_parallel: activations are divided among the tensor-parallel ranks.
        fp8: linear layers run in fp8.
        row_multiple: what a dispatch backend needs the rows of one rank to be a multiple of, if it does not pad itself:
            64 or 128 for early versions of HybridEP.

    Returns:
        The multiple. Where cp > 1 and tp is even it is up to twice the exact need, ``lcm(2*cp, cp*tp)``: the number
        that Megatron's data pipelines use, so that both pad alike.

    Raises:
        ConfigError: a size is below 1.

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
    """The length a sequence is padded to.

    Args:
        length: real tokens.
        multiple: from ``sequence_multiple``.
        seq_length: the fixed length a pipeline asks for, if it does. It is rounded up to the multiple: forced as it is,
            it would bypass the rule that the multiple stands for.

    Raises:
        ConfigError: ``multiple`` is below 1.
        LayoutError: ``length`` is negative, or ``seq_length`` is shorter than it.
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
