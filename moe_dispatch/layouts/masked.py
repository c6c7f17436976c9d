"""Rows of which a mask says which are real: attention masks, padded on either side or with holes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import ClassVar, final

import torch
from torch import Tensor

from moe_dispatch.errors import LayoutError
from moe_dispatch.layouts.base import Layout, ShardKind, row_count
from moe_dispatch.layouts.splits import check_divisible, split_positions


@final
@dataclass(frozen=True, slots=True, eq=False)
class Masked(Layout):
    """``x`` is [..., D]; each position of its leading dimensions is a row, in order, and ``valid`` says if it is real.

    For masks that no lengths describe. Where padding is at the end only, ``BSHD`` and ``THD`` need less memory.

    Attributes:
        valid: bool (T,).
    """

    shard_kinds: ClassVar[tuple[ShardKind, ...]] = ("contiguous",)

    valid: Tensor

    def __post_init__(self) -> None:
        """Refuse what is not (T,) booleans."""
        if not isinstance(self.valid, Tensor) or self.valid.dtype != torch.bool or self.valid.dim() != 1:
            got = f"{self.valid.dtype} {tuple(self.valid.shape)}" if isinstance(self.valid, Tensor) else self.valid
            raise LayoutError(f"Masked: valid must be bool (T,), got {got}. Pass (mask != 0).flatten().")

    @property
    def metadata(self) -> tuple[Tensor, ...]:
        """The mask."""
        return (self.valid,)

    @property
    def all_real(self) -> bool:
        """False: only the values could tell."""
        return False

    def rows_of(self, shape: Sequence[int]) -> int:
        """The product of the leading dimensions."""
        if not len(shape):
            raise LayoutError(
                "Masked: x must be [..., D], got a tensor without dimensions. Give it a hidden dimension."
            )
        return row_count(shape)

    def known_rows(self) -> int | None:
        """One per entry of the mask."""
        return len(self.valid)

    def known_real(self) -> int | None:
        """The entries that are true."""
        return int(self.valid.sum())

    def grid(self, num_rows: int) -> tuple[int, ...]:
        """One leading dimension."""
        return (num_rows,)

    def sequence_dim(self, shape: Sequence[int]) -> int:
        """The first, along which contiguous parts of the rows are contiguous."""
        return 0

    def mask(self, num_rows: int) -> Tensor:
        """As it was given."""
        return self.valid

    def check_counts(self, num_rows: int) -> None:
        """One entry per row."""
        if len(self.valid) != num_rows:
            raise LayoutError(
                f"Masked: the mask must have an entry per row, got {len(self.valid)} entries and {num_rows} rows. "
                "Use the mask of this micro-batch, cut to the positions that x holds."
            )

    def check_values(self, num_rows: int) -> None:
        """Any booleans will do."""

    def check_shard(self, num_rows: int, size: int, kind: ShardKind, *, values: bool) -> None:
        """The rows divide."""
        check_divisible("the rows", num_rows, size, kind)

    def shard_rows(self, grid: Sequence[int], index: int, size: int, kind: ShardKind) -> Tensor:
        """A part of the rows."""
        num_rows = prod(grid)
        self.check_shard(num_rows, size, kind, values=False)
        return split_positions(num_rows, index, size, kind, self.valid.device)

    def __str__(self) -> str:
        """Its name, as error messages begin with it."""
        return "Masked"
