"""Padded batches: ``[B, S, D]``, and Megatron's ``[S, B, D]``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, final

import torch
from torch import Tensor

from moe_dispatch.errors import LayoutError
from moe_dispatch.layouts.base import Layout, ShardKind, row_count
from moe_dispatch.layouts.integers import integer_tensor
from moe_dispatch.layouts.splits import check_divisible, rows_at, split_positions


@dataclass(frozen=True, slots=True, eq=False)
class PaddedBatch(Layout):
    """Sequences of different lengths, padded at their end to a common ``S``; the base of the two dimension orders.

    Attributes:
        lengths: int32 or int64 (B,), real positions of each sequence, 0 to S; a list becomes a CPU tensor. None when
            every position is real.
    """

    lengths: Tensor | Sequence[int] | None = None

    dims: ClassVar[str]
    batch_dim: ClassVar[int]

    def __post_init__(self) -> None:
        """Turn a list into a tensor, and refuse what is not (B,) integers."""
        if self.lengths is not None:
            object.__setattr__(self, "lengths", integer_tensor(f"{type(self).__name__}: lengths", self.lengths))

    @property
    def metadata(self) -> tuple[Tensor, ...]:
        """The lengths, if any."""
        return () if self.lengths is None else (_tensor(self.lengths),)

    @property
    def all_real(self) -> bool:
        """True without lengths."""
        return self.lengths is None

    def rows_of(self, shape: Sequence[int]) -> int:
        """``B * S``."""
        if len(shape) != 3:
            raise LayoutError(
                f"{self}: x must be {self.dims}, got shape {tuple(shape)}. Use THD or Rows for other shapes of x."
            )
        if self.lengths is not None and shape[self.batch_dim] != len(self.lengths):
            raise LayoutError(
                f"{self}: x must hold one sequence per length, got B = {shape[self.batch_dim]} in {self.dims} "
                f"{tuple(shape)} and {len(self.lengths)} lengths. Use the layout of this micro-batch and of "
                "this dimension order."
            )
        return row_count(shape)

    def known_rows(self) -> int | None:
        """None: lengths do not tell S."""
        return None

    def known_real(self) -> int | None:
        """The sum of the lengths."""
        return int(self.metadata[0].sum())

    def grid(self, num_rows: int) -> tuple[int, ...]:
        """(B, S) or (S, B)."""
        batch = len(self.metadata[0])
        if num_rows % batch if batch else num_rows:
            raise LayoutError(
                f"{self}: the rows must be a multiple of the number of lengths, got {num_rows} rows and {batch} "
                "lengths. Use the layout of this micro-batch."
            )
        length = num_rows // batch if batch else 0
        return (batch, length) if self.batch_dim == 0 else (length, batch)

    def sequence_dim(self, shape: Sequence[int]) -> int:
        """That of S."""
        return 1 - self.batch_dim

    def mask(self, num_rows: int) -> Tensor:
        """Positions below their sequence's length."""
        lengths_B = self.metadata[0]
        positions_S = torch.arange(self.grid(num_rows)[1 - self.batch_dim], device=lengths_B.device)
        if self.batch_dim == 0:
            return (positions_S < lengths_B[:, None]).flatten()
        return (positions_S[:, None] < lengths_B).flatten()

    def check_counts(self, num_rows: int) -> None:
        """The rows are a multiple of B."""
        if self.lengths is not None:
            self.grid(num_rows)

    def check_values(self, num_rows: int) -> None:
        """Lengths lie in 0..S."""
        if self.lengths is None or not len(self.lengths):
            return
        longest = self.grid(num_rows)[1 - self.batch_dim]
        low, high = map(int, torch.aminmax(self.metadata[0]))
        if low < 0 or high > longest:
            raise LayoutError(
                f"{self}: lengths must lie in 0..{longest} (S), got {low if low < 0 else high}. "
                "Count each sequence's real tokens."
            )

    def check_shard(self, num_rows: int, size: int, kind: ShardKind, *, values: bool) -> None:
        """S divides."""
        if self.lengths is not None:
            check_divisible("S", self.grid(num_rows)[1 - self.batch_dim], size, kind)

    def shard_rows(self, grid: Sequence[int], index: int, size: int, kind: ShardKind) -> Tensor:
        """A part of S of every sequence."""
        dim = 1 - self.batch_dim
        check_divisible("S", grid[dim], size, kind)
        device = None if self.lengths is None else self.metadata[0].device
        return rows_at(grid, dim, split_positions(grid[dim], index, size, kind, device))

    def __str__(self) -> str:
        """Its name, as error messages begin with it."""
        return type(self).__name__


@final
@dataclass(frozen=True, slots=True, eq=False)
class BSHD(PaddedBatch):
    """``x`` is [B, S, D]; row ``b * S + s``."""

    dims: ClassVar[str] = "[B, S, D]"
    batch_dim: ClassVar[int] = 0


@final
@dataclass(frozen=True, slots=True, eq=False)
class SBHD(PaddedBatch):
    """``x`` is [S, B, D], as Megatron-LM has it; row ``s * B + b``."""

    dims: ClassVar[str] = "[S, B, D]"
    batch_dim: ClassVar[int] = 1


def _tensor(value: Tensor | Sequence[int]) -> Tensor:
    # What __post_init__ has already made; this only tells the type checker.
    assert isinstance(value, Tensor)
    return value
