"""Layouts without sequences: the first rows are real (``Rows``), or a mask marks the real rows (``Masked``)."""

from __future__ import annotations

from abc import ABC
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import ClassVar, final

import torch
from torch import Tensor

from moe_dispatch.errors import LayoutError
from moe_dispatch.layouts.base import INTEGER_DTYPES, Layout, integer, is_host
from moe_dispatch.layouts.shard import ShardKind


class PlainRows(Layout, ABC):
    """Base of layouts in which ``x`` is [..., D], and each position of its leading dimensions is a row, in order.

    Such layouts can only be divided into contiguous parts.
    """

    __slots__ = ()

    shard_kinds: ClassVar[tuple[ShardKind, ...]] = ("contiguous",)

    def rows_of(self, shape: Sequence[int]) -> int:
        if not shape:
            raise LayoutError(f"{self}: x must be [..., D], got no dimension. Give it a hidden dimension.")
        return prod(shape[:-1])

    def num_sequences(self, shape: Sequence[int]) -> int:
        return prod(shape[:-2])

    def all_positions(self, shape: Sequence[int]) -> Tensor:
        """Number the rows of the last leading dimension from 0. Every such dimension is a sequence."""
        length = shape[-2] if len(shape) > 1 else 1
        rows = torch.arange(prod(shape[:-1]), device=self.device)
        return torch.stack([rows // max(length, 1), rows % max(length, 1)])


@final
@dataclass(frozen=True, slots=True, eq=False, init=False)
class Rows(PlainRows):
    """``x`` is [..., D]; each position of its leading dimensions is a row, in order.

    Attributes:
        count: Number of real rows, which are the first rows; None if every row is real.
    """

    count: int | Tensor | None

    def __init__(self, num_real: int | Tensor | None = None, *, count: int | Tensor | None = None) -> None:
        """Take the number of real rows: an int, or a tensor with one int32 or int64, which is read if on the CPU.

        Args:
            num_real: The number, or None.
            count: The same number by the name of its attribute, as ``dataclasses.replace`` passes it.
        """
        if num_real is not None and count is not None:
            raise LayoutError(f"Rows: num_real and count are the same number, got {num_real} and {count}. Pass one.")
        num_real = count if num_real is None else num_real
        if isinstance(num_real, Tensor):
            if num_real.dtype not in INTEGER_DTYPES or num_real.numel() != 1:
                got = f"{num_real.dtype} {tuple(num_real.shape)}"
                raise LayoutError(f"Rows: num_real must be an int or one int32 or int64, got {got}.")
            num_real = int(num_real) if is_host(num_real) else num_real
        elif num_real is not None:
            num_real = integer("Rows: num_real", num_real)
        object.__setattr__(self, "count", num_real)

    @property
    def metadata(self) -> tuple[Tensor, ...]:
        return (self.count,) if isinstance(self.count, Tensor) else ()

    @property
    def all_real(self) -> bool:
        return self.count is None

    def known_real(self) -> int | None:
        return None if self.count is None else int(self.count)

    def mask(self, num_rows: int) -> Tensor:
        assert self.count is not None  # the base class asks only if padding is possible
        return torch.arange(num_rows, device=self.device) < self.count

    def check_rows(self, num_rows: int, *, values: bool) -> None:
        if values and self.count is not None and not 0 <= int(self.count) <= num_rows:
            raise LayoutError(f"Rows: num_real must lie in 0..{num_rows} (rows), got {int(self.count)}. [MD06]")


@final
@dataclass(frozen=True, slots=True, eq=False)
class Masked(PlainRows):
    """``x`` is [..., D]; each position of its leading dimensions is a row, in order, and ``valid`` marks the real rows.

    This layout is for padding that lengths do not describe, such as padding on the left or between tokens. If padding
    is only at the end of sequences, ``BSHD`` and ``THD`` need less memory.

    Attributes:
        valid: bool (T,), True where a row is real.
    """

    valid: Tensor

    def __post_init__(self) -> None:
        """Refuse a mask that is not (T,) booleans."""
        if not isinstance(self.valid, Tensor) or self.valid.dtype != torch.bool or self.valid.dim() != 1:
            got = f"{self.valid.dtype} {tuple(self.valid.shape)}" if isinstance(self.valid, Tensor) else self.valid
            raise LayoutError(f"Masked: valid must be bool (T,), got {got}. Pass (mask != 0).flatten().")

    @property
    def metadata(self) -> tuple[Tensor, ...]:
        return (self.valid,)

    @property
    def all_real(self) -> bool:
        """False, because the values of the mask may mark padding."""
        return False

    def known_rows(self) -> int | None:
        return len(self.valid)

    def known_real(self) -> int | None:
        return int(self.valid.sum())

    def mask(self, num_rows: int) -> Tensor:
        return self.valid

    def all_positions(self, shape: Sequence[int]) -> Tensor:
        """Count the real rows before each row in its sequence, because padding may come before a token."""
        sequences_T, _ = PlainRows.all_positions(self, shape)
        real_BS = self.valid.view(self.num_sequences(shape), shape[-2] if len(shape) > 1 else 1)
        return torch.stack([sequences_T, (real_BS.cumsum(1) - 1).flatten()])

    def check_rows(self, num_rows: int, *, values: bool) -> None:
        if len(self.valid) != num_rows:
            raise LayoutError(
                f"Masked: the mask must have an entry per row, got {len(self.valid)} and {num_rows} rows. [MD06]"
            )
