"""Rows without a structure: any tensor, taken row by row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import ClassVar, final

import torch
from torch import Tensor

from moe_dispatch.errors import LayoutError
from moe_dispatch.layouts.base import Layout, ShardKind, is_host, row_count
from moe_dispatch.layouts.integers import INTEGER_DTYPES
from moe_dispatch.layouts.splits import check_divisible, split_positions


@final
@dataclass(frozen=True, slots=True, eq=False, init=False)
class Rows(Layout):
    """``x`` is [..., D]; each position of its leading dimensions is a row, in order.

    Attributes:
        count: how many rows, from the first, are real; None when all are.
    """

    shard_kinds: ClassVar[tuple[ShardKind, ...]] = ("contiguous",)

    count: int | Tensor | None

    def __init__(self, num_real: int | Tensor | None = None) -> None:
        """Take the number of real rows: an int, or one int32 or int64 in a tensor, which on the CPU becomes an int."""
        if isinstance(num_real, Tensor):
            if num_real.dtype not in INTEGER_DTYPES or num_real.numel() != 1:
                raise LayoutError(
                    f"Rows: num_real must be one int32 or int64, got {num_real.dtype} {tuple(num_real.shape)}. Pass an "
                    "int or a one-element tensor."
                )
            num_real = int(num_real) if is_host(num_real) else num_real
        object.__setattr__(self, "count", num_real)

    @property
    def metadata(self) -> tuple[Tensor, ...]:
        """The count, where only a device knows it."""
        return (self.count,) if isinstance(self.count, Tensor) else ()

    @property
    def all_real(self) -> bool:
        """True without a count."""
        return self.count is None

    def rows_of(self, shape: Sequence[int]) -> int:
        """The product of the leading dimensions."""
        if not len(shape):
            raise LayoutError("Rows: x must be [..., D], got a tensor without dimensions. Give it a hidden dimension.")
        return row_count(shape)

    def known_rows(self) -> int | None:
        """None: any number of rows will do."""
        return None

    def known_real(self) -> int | None:
        """The count."""
        return None if self.count is None else int(self.count)

    def grid(self, num_rows: int) -> tuple[int, ...]:
        """One leading dimension."""
        return (num_rows,)

    def sequence_dim(self, shape: Sequence[int]) -> int:
        """The first, along which contiguous parts of the rows are contiguous."""
        return 0

    def mask(self, num_rows: int) -> Tensor:
        """The first rows."""
        assert self.count is not None  # the base class asks only where padding is possible
        return torch.arange(num_rows, device=self._device) < self.count

    def check_counts(self, num_rows: int) -> None:
        """Any number of rows will do."""

    def check_values(self, num_rows: int) -> None:
        """The count lies in 0..T."""
        if self.count is not None and not 0 <= int(self.count) <= num_rows:
            raise LayoutError(
                f"Rows: num_real must lie in 0..{num_rows} (rows), got {int(self.count)}. "
                "Count the rows that hold tokens."
            )

    def check_shard(self, num_rows: int, size: int, kind: ShardKind, *, values: bool) -> None:
        """The rows divide."""
        check_divisible("the rows", num_rows, size, kind)

    def shard_rows(self, grid: Sequence[int], index: int, size: int, kind: ShardKind) -> Tensor:
        """A part of the rows."""
        num_rows = prod(grid)
        self.check_shard(num_rows, size, kind, values=False)
        return split_positions(num_rows, index, size, kind, self._device)

    @property
    def _device(self) -> torch.device | None:
        return self.metadata[0].device if self.metadata else None

    def __str__(self) -> str:
        """Its name, as error messages begin with it."""
        return "Rows"
