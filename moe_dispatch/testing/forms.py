"""How a scenario's tokens stand in the tensor a model would hold: every layout, also with rows that are none."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import final

import torch
from torch import Tensor

from moe_dispatch.layouts import BSHD, SBHD, THD, Layout, Rows, ShardKind


@final
@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Form:
    """Where T real tokens stand.

    Attributes:
        layout: what the dispatcher is told.
        leading: dimensions of x without the hidden one.
        real_T: int64, the row of each token.
        is_default: a dispatcher that is told nothing takes x the same way.
    """

    layout: Layout
    leading: tuple[int, ...]
    real_T: Tensor
    is_default: bool = False

    @property
    def num_rows(self) -> int:
        """Rows of x."""
        return prod(self.leading)

    def place(self, tokens: Tensor, fill: float) -> Tensor:
        """(T, width) -> (rows, width), with ``fill`` in rows that are no tokens."""
        rows = tokens.new_full((self.num_rows, tokens.shape[1]), fill)
        return rows.index_copy_(0, self.real_T, tokens)

    def split(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """The tokens (T, width), and the rows that are none."""
        flat = rows.reshape(self.num_rows, rows.shape[-1])
        others = torch.ones(self.num_rows, dtype=torch.bool).index_fill_(0, self.real_T, False)
        return flat.index_select(0, self.real_T), flat[others]


@final
@dataclass(frozen=True, slots=True, eq=False)
class DeviceKnown(Layout):
    """A layout whose lengths cannot be read without a device: what a GPU's layouts are, on a CPU.

    A dispatcher may ask it only for what needs no host value, so rows must be masked instead of cut out.
    """

    base: Layout

    @property
    def metadata(self) -> tuple[Tensor, ...]:
        """Tensors without values, on a device that is not the host."""
        return tuple(torch.empty_like(tensor, device="meta") for tensor in (*self.base.metadata, torch.empty(1)))

    @property
    def all_real(self) -> bool:
        """As the layout within."""
        return self.base.all_real

    def rows_of(self, shape: Sequence[int]) -> int:
        """As the layout within."""
        return self.base.rows_of(shape)

    def known_rows(self) -> int | None:
        """Only the device knows."""
        return None

    def known_real(self) -> int | None:
        """Only the device knows."""
        raise AssertionError("a dispatcher must not read lengths that only the device knows")

    def grid(self, num_rows: int) -> tuple[int, ...]:
        """As the layout within."""
        return self.base.grid(num_rows)

    def sequence_dim(self, shape: Sequence[int]) -> int:
        """As the layout within."""
        return self.base.sequence_dim(shape)

    def mask(self, num_rows: int) -> Tensor:
        """As the layout within."""
        return self.base.mask(num_rows)

    def check_counts(self, num_rows: int) -> None:
        """As the layout within."""
        self.base.check_counts(num_rows)

    def check_values(self, num_rows: int) -> None:
        """As the layout within; asked only with ``debug=True``."""
        self.base.check_values(num_rows)

    def check_shard(self, num_rows: int, size: int, kind: ShardKind, *, values: bool) -> None:
        """As the layout within."""
        self.base.check_shard(num_rows, size, kind, values=values)

    def shard_rows(self, grid: Sequence[int], index: int, size: int, kind: ShardKind) -> Tensor:
        """As the layout within."""
        return self.base.shard_rows(grid, index, size, kind)


def rows(tokens: int) -> Form:
    """(T, D), every row a token."""
    return Form(layout=Rows(), leading=(tokens,), real_T=torch.arange(tokens), is_default=True)


def rows_with_num_real(tokens: int) -> Form:
    """(T + 3, D), the first rows are tokens."""
    return Form(layout=Rows(num_real=tokens), leading=(tokens + 3,), real_T=torch.arange(tokens))


def bshd_full(tokens: int) -> Form:
    """(1, T, D), every position a token."""
    return Form(layout=BSHD(), leading=(1, tokens), real_T=torch.arange(tokens), is_default=True)


def bshd(tokens: int) -> Form:
    """(3, S, D) with an empty sequence, and at least one padding position in each."""
    lengths, longest = _lengths(tokens)
    positions = [b * longest + s for b, length in enumerate(lengths) for s in range(length)]
    return Form(layout=BSHD(lengths), leading=(3, longest), real_T=torch.tensor(positions, dtype=torch.int64))


def sbhd(tokens: int) -> Form:
    """(S, 3, D), likewise."""
    lengths, longest = _lengths(tokens)
    positions = [s * 3 + b for s in range(longest) for b, length in enumerate(lengths) if s < length]
    return Form(layout=SBHD(lengths), leading=(longest, 3), real_T=torch.tensor(positions, dtype=torch.int64))


def thd(tokens: int) -> Form:
    """(1, T, D), sequences one after another, one of them empty."""
    cu_seqlens = [0, tokens // 3, tokens // 3, tokens]
    return Form(layout=THD(cu_seqlens), leading=(1, tokens), real_T=torch.arange(tokens))


def thd_with_gaps(tokens: int) -> Form:
    """(T + 7, 1, D), each sequence followed by a gap, the empty one too."""
    lengths, gaps = [tokens // 3, 0, tokens - tokens // 3], [2, 4, 1]
    cu, padded, positions = [0], [0], list[int]()
    for length, gap in zip(lengths, gaps, strict=True):
        positions += range(padded[-1], padded[-1] + length)
        cu.append(cu[-1] + length)
        padded.append(padded[-1] + length + gap)
    return Form(layout=THD(cu, padded), leading=(padded[-1], 1), real_T=torch.tensor(positions, dtype=torch.int64))


def _lengths(tokens: int) -> tuple[list[int], int]:
    lengths = [tokens - tokens // 3, 0, tokens // 3]
    return lengths, max(lengths) + 1


def _known_to_the_device(build: Callable[[int], Form]) -> Callable[[int], Form]:
    def masked(tokens: int) -> Form:
        form = build(tokens)
        return Form(layout=DeviceKnown(form.layout), leading=form.leading, real_T=form.real_T)

    return masked


FORMS: dict[str, Callable[[int], Form]] = {
    build.__name__: build for build in (rows, rows_with_num_real, bshd_full, bshd, sbhd, thd, thd_with_gaps)
}
FORMS |= {
    f"{build.__name__}_on_device": _known_to_the_device(build)
    for build in (rows_with_num_real, bshd, sbhd, thd_with_gaps)
}
