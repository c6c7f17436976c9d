"""What tests of the one-rank reorder are given: tables of keys with a plain Python grouping of them, and rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from hypothesis import strategies as st
from torch import Tensor

from moe_dispatch.permutation import Permutation, SlotIndex, group_slots, group_statically

FLOATS = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


@dataclass(frozen=True)
class Table:
    """Keys of (row, slot) pairs as lists; a key outside ``0..num_keys-1`` is none."""

    keys: list[list[int]]
    top_k: int
    num_keys: int
    multiple: int

    @property
    def tensor(self) -> Tensor:
        return torch.tensor(self.keys, dtype=torch.int64).view(-1, self.top_k)

    @property
    def counts(self) -> list[int]:
        return [sum(row.count(key) for row in self.keys) for key in range(self.num_keys)]

    @property
    def has_no_key(self) -> Tensor:
        return (self.tensor < 0) | (self.tensor >= self.num_keys)

    @property
    def index(self) -> SlotIndex:
        return group_slots(self.tensor, self.counts, self.multiple)

    def grouped(self) -> list[tuple[int, int] | None]:
        """(row, slot) at each grouped position, None for padding."""
        out: list[tuple[int, int] | None] = []
        for key in range(self.num_keys):
            out += [(s, k) for s, row in enumerate(self.keys) for k, other in enumerate(row) if other == key]
            out += [None] * (-len(out) % self.multiple if self.counts[key] else 0)
        return out


@st.composite
def tables(draw: Callable[..., int]) -> Table:
    top_k, num_keys, num_rows = draw(st.integers(1, 4)), draw(st.integers(1, 5)), draw(st.integers(0, 9))
    key = st.integers(-7, num_keys + 3)
    keys = draw(st.lists(st.lists(key, min_size=top_k, max_size=top_k), min_size=num_rows, max_size=num_rows))
    return Table(keys, top_k, num_keys, draw(st.sampled_from([1, 2, 3, 16])))  # type: ignore[arg-type]


EXAMPLE = Table([[1, 0], [-1, 1], [-3, 4], [2, 1]], 2, 4, 4)


def rows_of(count: int, width: int = 6, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(count, width, generator=torch.Generator().manual_seed(seed)).to(dtype)


def many_slots() -> SlotIndex:
    """40 rows of 8 slots over 16 keys; some rows go nowhere."""
    keys = torch.rand(40, 16, generator=torch.Generator().manual_seed(0)).argsort(1)[:, :8]
    keys[::7] = -1
    return group_slots(keys, torch.bincount(keys[keys >= 0], minlength=16).tolist(), 4)


def reduced(permutation: Permutation, rows_RD: Tensor, index: SlotIndex, weights_R: Tensor | None) -> Tensor:
    out = torch.full((index.num_rows, rows_RD.shape[1]), float("nan"), dtype=rows_RD.dtype)
    permutation.reduce(rows_RD, index, weights_R, out)
    return out


def static_index(table: Table, slack: int = 0) -> SlotIndex:
    """The table's index of fixed size: room for what it needs and ``slack``."""
    size, keys_SK = max(len(table.grouped()) + slack, 1), table.tensor
    sizes = {"rows": keys_SK.numel(), "buffer_rows": size, "pad_multiple": table.multiple}
    return group_statically(keys_SK, table.num_keys, weights_SK=None, **sizes)
