"""Padded batches: ``[B, S, D]``, and Megatron's ``[S, B, D]``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import ClassVar, cast, final

import torch
from torch import Tensor

from moe_dispatch.errors import LayoutError
from moe_dispatch.layouts.base import Layout, integer_tensor
from moe_dispatch.layouts.shard import ShardKind, check_divisible, split_positions


@dataclass(frozen=True, slots=True, eq=False)
class PaddedBatch(Layout):
    """Base of the two dimension orders of a batch whose sequences are padded at their end to a common length ``S``.

    Attributes:
        lengths: int32 or int64 (B,), the number of real positions of each sequence, 0 to S. A list becomes a CPU
            tensor. None if every position is real.
    """

    lengths: Tensor | Sequence[int] | None = None

    dims: ClassVar[str]
    batch_dim: ClassVar[int]

    def __post_init__(self) -> None:
        """Turn a list into a tensor, and refuse lengths that are not (B,) integers."""
        if self.lengths is not None:
            object.__setattr__(self, "lengths", integer_tensor(f"{self}: lengths", self.lengths))

    @property
    def metadata(self) -> tuple[Tensor, ...]:
        return () if self.lengths is None else (cast(Tensor, self.lengths),)  # a list has become a tensor

    @property
    def all_real(self) -> bool:
        return self.lengths is None

    def rows_of(self, shape: Sequence[int]) -> int:
        if len(shape) != 3:
            raise LayoutError(f"{self}: x must be {self.dims}, got shape {tuple(shape)}. Or use THD or Rows.")
        if self.lengths is not None and shape[self.batch_dim] != len(self.lengths):
            raise LayoutError(
                f"{self}: x must hold one sequence per length, got {self.dims} = {tuple(shape)} and "
                f"{len(self.lengths)} lengths. Use the layout of this micro-batch."
            )
        return prod(shape[:-1])

    def known_real(self) -> int | None:
        return int(self.metadata[0].sum())

    def grid(self, num_rows: int) -> tuple[int, ...]:
        """Return (B, S) or (S, B)."""
        batch = len(self.metadata[0])
        if num_rows % batch if batch else num_rows:
            raise LayoutError(f"{self}: the rows ({num_rows}) must be a multiple of the number of lengths ({batch}).")
        length = num_rows // batch if batch else 0
        return (batch, length) if self.batch_dim == 0 else (length, batch)

    def sequence_dim(self, shape: Sequence[int]) -> int:
        return 1 - self.batch_dim

    def mask(self, num_rows: int) -> Tensor:
        """Mark the positions before the end of their sequence."""
        lengths_B = self.metadata[0]
        positions_S = torch.arange(self._length(num_rows), device=lengths_B.device)
        if self.batch_dim == 0:
            return (positions_S < lengths_B[:, None]).flatten()
        return (positions_S[:, None] < lengths_B).flatten()

    def num_sequences(self, shape: Sequence[int]) -> int:
        return shape[self.batch_dim]

    def all_positions(self, shape: Sequence[int]) -> Tensor:
        """Return the indices of the batch and of the sequence dimension."""
        indices = [torch.arange(length, device=self.device) for length in shape[:2]]
        grids = torch.meshgrid(*indices, indexing="ij")
        return torch.stack([grids[self.batch_dim].flatten(), grids[1 - self.batch_dim].flatten()])

    def check_rows(self, num_rows: int, *, values: bool) -> None:
        """Check that the rows divide into the sequences, and that lengths lie in 0..S."""
        longest = self._length(num_rows)
        if not values or not len(self.metadata[0]):
            return
        low, high = map(int, torch.aminmax(self.metadata[0]))
        if low < 0 or high > longest:
            raise LayoutError(f"{self}: lengths must lie in 0..{longest} (S), got {low if low < 0 else high}. [MD06]")

    def check_shard(self, num_rows: int, size: int, kind: ShardKind, *, values: bool) -> None:
        if self.metadata:
            check_divisible("S", self._length(num_rows), size, kind)

    def shard_rows(self, grid: Sequence[int], index: int, size: int, kind: ShardKind) -> Tensor:
        """Select a part of the positions of every sequence."""
        dim = 1 - self.batch_dim
        check_divisible("S", grid[dim], size, kind)
        offsets = torch.arange(grid[dim] // size, device=self.device)
        positions = split_positions(offsets, grid[dim], index, size, kind)
        return torch.arange(prod(grid), device=self.device).view(*grid).index_select(dim, positions).flatten()

    def _length(self, num_rows: int) -> int:
        """Return S."""
        return self.grid(num_rows)[1 - self.batch_dim]


@final
@dataclass(frozen=True, slots=True, eq=False)
class BSHD(PaddedBatch):
    """``x`` is [B, S, D]. Row ``b * S + s`` is position s of sequence b; the first ``lengths[b]`` of them are real.

    ``lengths`` are int32 or int64 (B,), each from 0 to S, in a tensor or a list. With None, every position is real.
    """

    dims: ClassVar[str] = "[B, S, D]"
    batch_dim: ClassVar[int] = 0


@final
@dataclass(frozen=True, slots=True, eq=False)
class SBHD(PaddedBatch):
    """``x`` is [S, B, D], the order of Megatron-LM. Row ``s * B + b`` is position s of sequence b.

    ``lengths`` are those of ``BSHD``.
    """

    dims: ClassVar[str] = "[S, B, D]"
    batch_dim: ClassVar[int] = 1
