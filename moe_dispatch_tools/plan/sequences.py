"""Compute the rows of a rank from its sequences."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import final

from moe_dispatch.config import DispatcherConfig
from moe_dispatch.errors import ConfigError
from moe_dispatch.layouts import padded_length, sequence_multiple


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Parallelism:
    """The parallelism that divides a sequence among ranks. Its fields are arguments of ``sequence_multiple``."""

    tp: int = 1
    cp: int = 1
    sequence_parallel: bool = False


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Batch:
    """The rows of a rank, or the sequences of its micro-batch."""

    tokens: int | None = None
    batch_size: int = 1
    seq_length: int | None = None


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Sequences:
    """The lengths of sequences, and the rows of a rank.

    Attributes:
        multiple: Multiple to which a data loader should pad a sequence.
        length: Real tokens of a sequence; None if only the rows of a rank are known.
        padded_length: Length of a sequence with padding.
        padding: Padding rows of a sequence.
        rows_per_rank: Rows that a rank brings to each dispatch.
        batch_size: Number of sequences in a micro-batch.
        fp8: Whether linear layers run in fp8. This is so if ``pad_multiple`` names a quantised format.
        parallelism: Parallelism that divides the sequence.
    """

    multiple: int
    length: int | None
    padded_length: int | None
    padding: int | None
    rows_per_rank: int
    batch_size: int
    fp8: bool
    parallelism: Parallelism

    def multiple_for(self, row_multiple: int) -> int:
        """Return the multiple of the sequence length that makes the rows of a rank a multiple of ``row_multiple``."""
        return _multiple(self.parallelism, self.batch_size, fp8=self.fp8, row_multiple=row_multiple)


def sequences_of(
    config: DispatcherConfig, parallelism: Parallelism, batch: Batch, *, recorded: int | None = None
) -> Sequences:
    """Compute the rows of a rank.

    Args:
        config: Config. Its ``max_tokens_per_rank`` is the number of rows if no other argument gives it.
        parallelism: Parallelism that divides a sequence.
        batch: Rows or sequences.
        recorded: Rows of a recorded routing. ``batch`` must then give no number.

    Raises:
        ConfigError: No number of rows is given, or more than one.
    """
    given = {"--tokens": batch.tokens, "--seq": batch.seq_length, "the recorded routing": recorded}
    told = [name for name, number in given.items() if number is not None]
    if len(told) > 1:
        raise ConfigError(
            f"plan: only one of {', '.join(given)} must give the number of rows, got {' and '.join(told)}. Leave out "
            "the others."
        )
    fp8 = config.pad_multiple in ("fp8", "mxfp8", "nvfp4")
    multiple = _multiple(parallelism, batch.batch_size, fp8=fp8, row_multiple=1)
    found = Sequences(
        multiple=multiple,
        length=batch.seq_length,
        padded_length=None,
        padding=None,
        rows_per_rank=batch.tokens or recorded or config.max_tokens_per_rank or 0,
        batch_size=batch.batch_size,
        fp8=fp8,
        parallelism=parallelism,
    )
    if batch.seq_length is not None:
        return _divided(found, batch.seq_length)
    if found.rows_per_rank < 1:
        raise ConfigError(
            f"plan: the rows of a rank must be 1 or more, got {batch.tokens or 'none'}. Give --tokens, or --batch and "
            "--seq, or set max_tokens_per_rank."
        )
    return found


def _divided(found: Sequences, length: int) -> Sequences:
    """Add the padded length of a sequence, and the rows of a rank."""
    if length < 1:
        raise ConfigError(f"plan: --seq must be 1 or more, got {length}. Give the tokens of a sequence.")
    padded, ways = padded_length(length, found.multiple), found.parallelism
    shares = ways.cp * (ways.tp if ways.sequence_parallel else 1)
    return dataclasses.replace(
        found,
        padded_length=padded,
        padding=padded - length,
        rows_per_rank=found.batch_size * padded // shares,
    )


def _multiple(parallelism: Parallelism, batch_size: int, *, fp8: bool, row_multiple: int) -> int:
    return sequence_multiple(
        batch_size=batch_size,
        tp=parallelism.tp,
        cp=parallelism.cp,
        sequence_parallel=parallelism.sequence_parallel,
        fp8=fp8,
        row_multiple=row_multiple,
    )
