"""One rank's part of a layout, under sequence or context parallelism."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, final

from torch import Tensor

from moe_dispatch.errors import ConfigError, LayoutError
from moe_dispatch.layouts.base import Layout, ShardKind
from moe_dispatch.layouts.splits import check_split


@final
@dataclass(frozen=True, slots=True, eq=False)
class Shard(Layout):
    """The rows of ``base`` that one rank holds; ``x`` is that rank's tensor, in the dimension order of ``base``.

    Lengths and ``cu_seqlens`` stay those of the whole sequences. Shards nest: context parallelism divides the batch,
    sequence parallelism then divides what each context-parallel rank holds.

    Attributes:
        base: the layout of the whole, or of the rank's part before this division.
        index: which part.
        size: how many parts.
        kind: how it is divided; ``"zigzag"`` only as the first division.
    """

    shard_kinds: ClassVar[tuple[ShardKind, ...]] = ("contiguous",)

    base: Layout
    index: int
    size: int
    kind: ShardKind = "contiguous"

    def __post_init__(self) -> None:
        """Refuse what names no shard of ``base``."""
        check_split(self.index, self.size, self.kind)
        if self.kind not in self.base.shard_kinds:
            raise ConfigError(
                f"{self.base}.shard: kind must be one of {', '.join(self.base.shard_kinds)}, got {self.kind!r}. Zigzag "
                "splits whole sequences: shard BSHD, SBHD or THD that way first, contiguous parts after it."
            )

    @property
    def metadata(self) -> tuple[Tensor, ...]:
        """The whole's."""
        return self.base.metadata

    @property
    def all_real(self) -> bool:
        """The whole's."""
        return self.base.all_real

    def rows_of(self, shape: Sequence[int]) -> int:
        """This rank's rows."""
        rows = self.base.rows_of(shape)
        length = shape[self.sequence_dim(shape)]
        if self.kind == "zigzag" and length % 2:
            raise LayoutError(
                f"{self}: this rank's part must be two equal chunks, got {length} positions. Pad sequences to a "
                f"multiple of {2 * self.size}."
            )
        return rows

    def known_rows(self) -> int | None:
        """This rank's rows, where the whole's are known."""
        rows = self.base.known_rows()
        if rows is None:
            return None
        self.base.check_shard(rows, self.size, self.kind, values=False)
        return rows // self.size

    def known_real(self) -> int | None:
        """None: the whole tells it only row by row."""
        return None

    def grid(self, num_rows: int) -> tuple[int, ...]:
        """The dimension order and the number of sequences are the whole's."""
        return self.base.grid(num_rows)

    def sequence_dim(self, shape: Sequence[int]) -> int:
        """The whole's."""
        return self.base.sequence_dim(shape)

    def mask(self, num_rows: int) -> Tensor:
        """The whole's, at this rank's rows."""
        whole = num_rows * self.size
        rows = self.base.shard_rows(self.base.grid(whole), self.index, self.size, self.kind)
        return self.base.mask(whole).index_select(0, rows)

    def check_counts(self, num_rows: int) -> None:
        """The parts together fit the whole, and the whole divides."""
        self.base.check_counts(num_rows * self.size)
        self.base.check_shard(num_rows * self.size, self.size, self.kind, values=False)

    def check_values(self, num_rows: int) -> None:
        """The whole's values, and that its sequences divide."""
        self.base.check_values(num_rows * self.size)
        self.base.check_shard(num_rows * self.size, self.size, self.kind, values=True)

    def check_shard(self, num_rows: int, size: int, kind: ShardKind, *, values: bool) -> None:
        """What this rank holds divides as the whole would."""
        self.base.check_shard(num_rows, size, kind, values=values)

    def shard_rows(self, grid: Sequence[int], index: int, size: int, kind: ShardKind) -> Tensor:
        """A contiguous part of what this rank holds."""
        return self.base.shard_rows(grid, index, size, kind)

    def __str__(self) -> str:
        """Whose part it is."""
        return f"{self.base}.shard({self.index}, {self.size}, {self.kind!r})"
