"""Packed sequences with gaps: who owns which row, and which rows a rank holds, written out without the library."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import final

import torch
from torch import Tensor

from moe_dispatch import THD
from tests.sharded.grid import Grid, Place


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Packed:
    """One micro-batch of a data-parallel rank.

    Attributes:
        lengths: real tokens of each sequence.
        padded: rows of each, multiples of 2 * cp * tp; all behind the real ones are padding.
        seed: of its hidden states.
    """

    lengths: tuple[int, ...]
    padded: tuple[int, ...]
    seed: int

    @property
    def layout(self) -> THD:
        return THD([0, *accumulate(self.lengths)], [0, *accumulate(self.padded)])

    @property
    def num_rows(self) -> int:
        return sum(self.padded)

    @property
    def sequence_T(self) -> Tensor:
        return torch.arange(len(self.padded)).repeat_interleave(torch.tensor(self.padded, dtype=torch.int64))

    @property
    def position_T(self) -> Tensor:
        return torch.tensor([position for rows in self.padded for position in range(rows)], dtype=torch.int64)

    @property
    def real_T(self) -> Tensor:
        lengths = torch.tensor(self.lengths, dtype=torch.int64)
        return self.position_T < lengths[self.sequence_T]

    def random(self, columns: int, *, salt: int = 0) -> Tensor:
        """float64 (T, columns); also where there is padding, which must not matter."""
        generator = torch.Generator().manual_seed(1000 * self.seed + salt)
        return torch.randn(self.num_rows, columns, generator=generator, dtype=torch.float64)

    def held_rows(self, grid: Grid, place: Place) -> list[int]:
        """Chunk ``cp`` and its mirror of each sequence, then the tensor-parallel rank's part of all that."""
        rows: list[int] = []
        for end, length in zip(accumulate(self.padded), self.padded, strict=True):
            chunk = length // (2 * grid.cp)
            for which in (place.cp, 2 * grid.cp - 1 - place.cp):
                begin = end - length + which * chunk
                rows += range(begin, begin + chunk)
        part = len(rows) // grid.tp
        return rows[place.tp * part : (place.tp + 1) * part]
