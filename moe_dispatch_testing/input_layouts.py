"""The layouts of the input x in which scenarios run. Each places the real tokens among rows of padding or gaps."""

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
class InputLayout:
    """A layout of x, and the rows of its T real tokens.

    Attributes:
        layout: Layout that the dispatcher is given.
        leading: Dimensions of x without the hidden one.
        real_T: Row of each token, int64.
        is_default: Whether a dispatcher without a layout reads x in this layout.
    """

    layout: Layout
    leading: tuple[int, ...]
    real_T: Tensor
    is_default: bool = False

    @property
    def num_rows(self) -> int:
        """Return the number of rows of x, with and without a token."""
        return prod(self.leading)

    def place(self, tokens: Tensor, fill: float) -> Tensor:
        """Place tokens (T, width) in a tensor (rows, width) with ``fill`` in all other rows."""
        rows = tokens.new_full((self.num_rows, tokens.shape[1]), fill)
        return rows.index_copy_(0, self.real_T, tokens)

    def split(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Split rows of x into the tokens (T, width) and all other rows."""
        flat = rows.reshape(self.num_rows, rows.shape[-1])
        others = torch.ones(self.num_rows, dtype=torch.bool).index_fill_(0, self.real_T, False)
        return flat.index_select(0, self.real_T), flat[others]


@final
@dataclass(frozen=True, slots=True, eq=False)
class DeviceKnown(Layout):
    """A layout whose lengths the host cannot read. On a CPU it stands for a layout with its lengths on a GPU.

    A dispatcher cannot cut rows out of it, because that needs lengths on the host. It must mask them.
    """

    base: Layout

    @property
    def metadata(self) -> tuple[Tensor, ...]:
        """Return tensors without values, on the device "meta"."""
        return tuple(torch.empty_like(tensor, device="meta") for tensor in (*self.base.metadata, torch.empty(1)))

    @property
    def all_real(self) -> bool:
        """Delegate to ``base``."""
        return self.base.all_real

    def rows_of(self, shape: Sequence[int]) -> int:
        """Delegate to ``base``."""
        return self.base.rows_of(shape)

    def known_rows(self) -> int | None:
        """Return None, because the host does not know the number of rows."""
        return None

    def known_real(self) -> int | None:
        """Raise AssertionError, because the host does not know the number of tokens."""
        raise AssertionError("a dispatcher must not read lengths that only the device knows")

    def grid(self, num_rows: int) -> tuple[int, ...]:
        """Delegate to ``base``."""
        return self.base.grid(num_rows)

    def sequence_dim(self, shape: Sequence[int]) -> int:
        """Delegate to ``base``."""
        return self.base.sequence_dim(shape)

    def mask(self, num_rows: int) -> Tensor:
        """Delegate to ``base``."""
        return self.base.mask(num_rows)

    def num_sequences(self, shape: Sequence[int]) -> int:
        """Delegate to ``base``."""
        return self.base.num_sequences(shape)

    def all_positions(self, shape: Sequence[int]) -> Tensor:
        """Delegate to ``base``."""
        return self.base.all_positions(shape)

    def check_rows(self, num_rows: int, *, values: bool) -> None:
        """Delegate to ``base``. Only ``debug=True`` asks for the values."""
        self.base.check_rows(num_rows, values=values)

    def check_shard(self, num_rows: int, size: int, kind: ShardKind, *, values: bool) -> None:
        """Delegate to ``base``."""
        self.base.check_shard(num_rows, size, kind, values=values)

    def shard_rows(self, grid: Sequence[int], index: int, size: int, kind: ShardKind) -> Tensor:
        """Delegate to ``base``."""
        return self.base.shard_rows(grid, index, size, kind)


def rows(tokens: int) -> InputLayout:
    """Lay out (T, D). Every row is a token."""
    return InputLayout(layout=Rows(), leading=(tokens,), real_T=torch.arange(tokens), is_default=True)


def rows_with_num_real(tokens: int) -> InputLayout:
    """Lay out (T + 3, D). The first T rows are tokens."""
    return InputLayout(layout=Rows(num_real=tokens), leading=(tokens + 3,), real_T=torch.arange(tokens))


def bshd_full(tokens: int) -> InputLayout:
    """Lay out (1, T, D). Every position is a token."""
    return InputLayout(layout=BSHD(), leading=(1, tokens), real_T=torch.arange(tokens), is_default=True)


def bshd(tokens: int) -> InputLayout:
    """Lay out (3, S, D). One sequence is empty. Each sequence ends with at least one position of padding."""
    lengths, longest = _lengths(tokens)
    positions = [b * longest + s for b, length in enumerate(lengths) for s in range(length)]
    return InputLayout(layout=BSHD(lengths), leading=(3, longest), real_T=torch.tensor(positions, dtype=torch.int64))


def sbhd(tokens: int) -> InputLayout:
    """Lay out (S, 3, D), with the sequences of ``bshd``."""
    lengths, longest = _lengths(tokens)
    positions = [s * 3 + b for s in range(longest) for b, length in enumerate(lengths) if s < length]
    return InputLayout(layout=SBHD(lengths), leading=(longest, 3), real_T=torch.tensor(positions, dtype=torch.int64))


def thd(tokens: int) -> InputLayout:
    """Lay out (1, T, D), packed. One of three sequences is empty."""
    cu_seqlens = [0, tokens // 3, tokens // 3, tokens]
    return InputLayout(layout=THD(cu_seqlens), leading=(1, tokens), real_T=torch.arange(tokens))


def thd_with_gaps(tokens: int) -> InputLayout:
    """Lay out (T + 7, 1, D), packed. One of three sequences is empty. A gap follows each sequence."""
    lengths, gaps = [tokens // 3, 0, tokens - tokens // 3], [2, 4, 1]
    cu, padded, positions = [0], [0], list[int]()
    for length, gap in zip(lengths, gaps, strict=True):
        positions += range(padded[-1], padded[-1] + length)
        cu.append(cu[-1] + length)
        padded.append(padded[-1] + length + gap)
    return InputLayout(
        layout=THD(cu, padded), leading=(padded[-1], 1), real_T=torch.tensor(positions, dtype=torch.int64)
    )


def _lengths(tokens: int) -> tuple[list[int], int]:
    lengths = [tokens - tokens // 3, 0, tokens // 3]
    return lengths, max(lengths) + 1


def _with_lengths_on_device(build: Callable[[int], InputLayout]) -> Callable[[int], InputLayout]:
    def on_device(tokens: int) -> InputLayout:
        inner = build(tokens)
        return InputLayout(layout=DeviceKnown(inner.layout), leading=inner.leading, real_T=inner.real_T)

    return on_device


INPUT_LAYOUTS: dict[str, Callable[[int], InputLayout]] = {
    build.__name__: build for build in (rows, rows_with_num_real, bshd_full, bshd, sbhd, thd, thd_with_gaps)
}
INPUT_LAYOUTS |= {
    f"{build.__name__}_on_device": _with_lengths_on_device(build)
    for build in (rows_with_num_real, bshd, sbhd, thd_with_gaps)
}
