"""The rows that a rank brings, and the sequences they come from."""

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
    """What divides a sequence among ranks, as ``sequence_multiple`` takes it."""

    tp: int = 1
    cp: int = 1
    sequence_parallel: bool = False


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Batch:
    """Rows of a rank, or the micro-batch that they come from."""

    tokens: int | None = None
    batch_size: int = 1
    seq_length: int | None = None


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Sequences:
    """Lengths of sequences, and the rows of a rank.

    Attributes:
        multiple: multiple to which a data loader should pad a sequence.
        length: real tokens of a sequence; None if only the rows of a rank are known.
        padded_length: length of a sequence with padding.
        padding: rows of a sequence that are no tokens.
        rows_per_rank: rows that a rank brings to each dispatch.
        batch_size: sequences in a micro-batch.
        fp8: whether linear layers run in fp8, as a quantised ``pad_multiple`` says.
        parallelism: what divides the sequence.
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
        """Multiple of sequences for which a rank's rows are already a multiple of ``row_multiple``."""
        return _multiple(self.parallelism, self.batch_size, fp8=self.fp8, row_multiple=row_multiple)


def sequences_of(
    config: DispatcherConfig, parallelism: Parallelism, batch: Batch, *, recorded: int | None = None
) -> Sequences:
    """Work out the rows of a rank.

    Args:
        config: config with ``pad_multiple``, and with ``max_tokens_per_rank`` if nothing else says the rows.
        parallelism: what divides a sequence.
        batch: rows or sequences.
        recorded: rows of a recorded routing; then ``batch`` must not say another number.

    Raises:
        ConfigError: no number of rows is given, or two are.
    """
    given = {"--tokens": batch.tokens, "--seq": batch.seq_length, "the recorded routing": recorded}
    told = [name for name, number in given.items() if number is not None]
    if len(told) > 1:
        raise ConfigError(
            f"plan: one of {', '.join(given)} must say how many rows, got {' and '.join(told)}. Leave one."
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
    """Add padded sequences, whose rows the ranks divide."""
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
