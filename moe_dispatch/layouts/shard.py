"""How sequence and context parallelism divide rows among ranks, and the layout of one rank's part."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, final

import torch
from torch import Tensor

from moe_dispatch.errors import ConfigError, LayoutError
from moe_dispatch.layouts.base import Layout, ShardKind, integer


@final
@dataclass(frozen=True, slots=True, eq=False)
class Shard(Layout):
    """The rows of ``base`` that one rank holds; ``x`` is that rank's tensor, in the dimension order of ``base``.

    Lengths and ``cu_seqlens`` still describe the whole sequences. Shards nest: context parallelism divides the batch,
    then sequence parallelism divides the part of each context-parallel rank.

    Attributes:
        base: The layout of the whole, or of the part that is divided further.
        index: Number of this part, 0 to ``size - 1``.
        size: Number of parts.
        kind: How the rows are divided. ``"zigzag"`` is possible only as the first division.
    """

    shard_kinds: ClassVar[tuple[ShardKind, ...]] = ("contiguous",)

    base: Layout
    index: int
    size: int
    kind: ShardKind = "contiguous"

    def __post_init__(self) -> None:
        """Refuse arguments that do not name a part of ``base``."""
        for name in ("index", "size"):
            object.__setattr__(self, name, integer(f"shard: {name}", getattr(self, name)))
        if self.kind not in self.base.shard_kinds:
            raise ConfigError(
                f"{self.base}.shard: kind must be one of {', '.join(self.base.shard_kinds)}, got {self.kind!r}. Zigzag "
                "splits whole sequences: shard BSHD, SBHD or THD that way first, contiguous parts after it."
            )
        if self.size < 1 or not 0 <= self.index < self.size:
            raise ConfigError(
                f"shard: index must lie in 0..size-1, got index {self.index} and size {self.size}. Pass group.rank() "
                "and group.size()."
            )

    @property
    def metadata(self) -> tuple[Tensor, ...]:
        return self.base.metadata

    @property
    def all_real(self) -> bool:
        return self.base.all_real

    def rows_of(self, shape: Sequence[int]) -> int:
        """Count this rank's rows. A zigzag part must be two chunks of the same length."""
        rows = self.base.rows_of(shape)
        length = shape[self.sequence_dim(shape)]
        if self.kind == "zigzag" and length % 2:
            raise LayoutError(
                f"{self}: this rank's part must be two equal chunks, got {length} positions. Pad sequences to a "
                f"multiple of {2 * self.size}."
            )
        return rows

    def known_rows(self) -> int | None:
        """Divide the number of rows of the whole, if it is known."""
        rows = self.base.known_rows()
        if rows is None:
            return None
        self.base.check_shard(rows, self.size, self.kind, values=False)
        return rows // self.size

    def grid(self, num_rows: int) -> tuple[int, ...]:
        return self.base.grid(num_rows)

    def sequence_dim(self, shape: Sequence[int]) -> int:
        return self.base.sequence_dim(shape)

    def mask(self, num_rows: int) -> Tensor:
        """Select this rank's rows from the mask of the whole."""
        whole = num_rows * self.size
        rows = self.base.shard_rows(self.base.grid(whole), self.index, self.size, self.kind)
        return self.base.mask(whole).index_select(0, rows)

    def num_sequences(self, shape: Sequence[int]) -> int:
        return self.base.num_sequences(self._whole(shape))

    def places(self, shape: Sequence[int]) -> Tensor:
        """Select this rank's rows from the places of the whole."""
        whole = self._whole(shape)
        rows = self.base.shard_rows(whole[:-1], self.index, self.size, self.kind)
        return self.base.places(whole).index_select(1, rows)

    def _whole(self, shape: Sequence[int]) -> list[int]:
        """Return the shape of the tensor of which this rank holds a part."""
        whole = list(shape)
        whole[self.sequence_dim(shape)] *= self.size
        return whole

    def check_counts(self, num_rows: int) -> None:
        """Check that the parts together fit the whole, and that the whole can be divided."""
        self.base.check_counts(num_rows * self.size)
        self.base.check_shard(num_rows * self.size, self.size, self.kind, values=False)

    def check_values(self, num_rows: int) -> None:
        """Check the values of the whole, and that its sequences can be divided."""
        self.base.check_values(num_rows * self.size)
        self.base.check_shard(num_rows * self.size, self.size, self.kind, values=True)

    def check_shard(self, num_rows: int, size: int, kind: ShardKind, *, values: bool) -> None:
        self.base.check_shard(num_rows, size, kind, values=values)

    def shard_rows(self, grid: Sequence[int], index: int, size: int, kind: ShardKind) -> Tensor:
        """Select a contiguous part of this rank's rows."""
        return self.base.shard_rows(grid, index, size, kind)

    def __str__(self) -> str:
        return f"{self.base}.shard({self.index}, {self.size}, {self.kind!r})"


def split_multiple(size: int, kind: ShardKind) -> int:
    """Return the number of which a length must be a multiple to be divided among ``size`` ranks."""
    return size if kind == "contiguous" or size == 1 else 2 * size


def check_divisible(what: str, length: int, size: int, kind: ShardKind) -> None:
    """Raise LayoutError unless ``length`` can be divided. ``what`` names the length in the error."""
    multiple = split_multiple(size, kind)
    if length % multiple:
        raise LayoutError(
            f"shard: {what} ({length}) must be divisible by {multiple} to be split {kind} over {size} ranks. Pad "
            "sequences to sequence_multiple(...)."
        )


def split_positions(offset: Tensor, length: Tensor | int, index: int, size: int, kind: ShardKind) -> Tensor:
    """Convert offsets in the part of rank ``index`` of ``size`` to positions in the whole sequence, int64.

    Of 8 positions on 2 ranks, rank 0 holds 0 1 2 3 (contiguous) or 0 1 6 7 (zigzag). Zigzag cuts the sequence into ``2
    * size`` chunks. The first half of a part is chunk ``index`` from the start, the second half is chunk ``index`` from
    the end. ``length`` is the length of the whole sequence: one number for all offsets, or one per offset.

    Source: the chunk order of Megatron-LM core 0.16, ``get_batch_on_this_cp_rank``, for zigzag.
    """
    if kind == "contiguous" or size == 1:
        return offset + index * (length // size)
    chunk = length // (2 * size)
    return offset + torch.where(offset < chunk, index * chunk, (2 * size - 2 - index) * chunk)
