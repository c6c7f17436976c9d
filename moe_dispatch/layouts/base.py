"""The base of all layouts: methods that a dispatcher calls, hooks that a layout defines, and the part of one rank.

Dimensions: ``T`` rows of this rank, ``D`` hidden size, ``B`` sequences, ``S`` positions of each sequence.
"""

from __future__ import annotations

import operator
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, ClassVar, final

import torch
from torch import Tensor

from moe_dispatch.communication import to_device
from moe_dispatch.errors import ConfigError, LayoutError, shown
from moe_dispatch.layouts.shard import ShardKind, check_divisible, split_positions

INTEGER_DTYPES = (torch.int32, torch.int64)


class Layout(ABC):
    """A description of how a model's tensor ``x`` holds tokens: its rows, and which of them are real.

    A layout is a frozen value. Its methods never synchronise with a device unless their docstring says so. Dispatchers
    call the final methods. A concrete layout defines the abstract methods. It also defines the optional hooks that it
    can answer, such as ``known_rows``.

    Attributes:
        shard_kinds: Ways in which this layout can be divided.
    """

    __slots__ = ()

    shard_kinds: ClassVar[tuple[ShardKind, ...]] = ("contiguous", "zigzag")

    @final
    def flatten(self, x: Tensor) -> Tensor:
        """Return the rows of ``x``, (T, D), as a view if the strides of ``x`` allow one.

        Raises:
            LayoutError: The shape of ``x`` does not fit the layout, or the layout describes another number of rows.
        """
        num_rows = self.rows_of(x.shape)
        known = self.known_rows() if self.metadata else None
        if known is not None:
            if torch.compiler.is_compiling():  # the counts may be symbols, which are compared at run time
                torch._check(
                    known == num_rows,
                    lambda: "Layout.flatten: the layout must describe all rows of x. Use the layout of x.",
                )
            elif known != num_rows:
                self.check(num_rows)
        return x if x.dim() == 2 else x.reshape(num_rows, x.shape[-1])

    @final
    def unflatten(self, y_TD: Tensor, like: Tensor | Sequence[int]) -> Tensor:
        """Put rows (T, any width) back into the shape of ``like``, the tensor that ``flatten`` was given or its shape.

        Raises:
            LayoutError: ``y_TD`` is not 2-D, or its number of rows differs from that of ``like``.
        """
        shape = like.shape if isinstance(like, Tensor) else like
        rows = self.rows_of(shape)
        if y_TD.dim() != 2 or y_TD.shape[0] != rows:
            raise LayoutError(f"{self}.unflatten: y must be 2-D with {rows} rows, got {tuple(y_TD.shape)}.")
        return y_TD if len(shape) == 2 else y_TD.reshape(*shape[:-1], y_TD.shape[-1])

    @final
    def num_rows(self, shape: Sequence[int] | None = None) -> int | None:
        """Return T, from the shape of ``x`` if it is given, else from the layout. None if the host cannot know T."""
        return self.known_rows() if shape is None else self.rows_of(shape)

    @property
    @final
    def on_host(self) -> bool:
        """Whether the host knows which rows are real without reading from a device."""
        return self.all_real or all(map(is_host, self.metadata))

    @final
    def num_real(self, num_rows: int | None) -> int | None:
        """Return the number of real rows, or None if the host does not know it. ``num_rows`` is T if T is known."""
        rows = self.known_rows() if num_rows is None else num_rows
        if self.all_real:
            return rows
        if not self.on_host:
            return None
        real = self.known_real()
        return int(self.mask(rows).sum()) if real is None and rows is not None else real

    @final
    def valid_T(self, num_rows: int, device: torch.device | str | None = None) -> Tensor | None:
        """Return a bool (T,) that is True where a row is real, or None if every row is real.

        Cost: no host sync, unless ``device`` is the CPU and the lengths are on another device.
        """
        if self.all_real:
            return None
        mask = self.mask(num_rows)
        if device is None:
            return mask
        # A copy to the host must not be asynchronous, because its result would be read too early.
        return to_device(mask, device) if is_host(mask) else mask.to(device)

    @final
    def real_rows(self, num_rows: int) -> Tensor | None:
        """Return the indices of the real rows, int64 (num_real,) on the CPU, ascending; None if every row is real.

        Raises:
            LayoutError: Only a device knows which rows are real. Read ``on_host`` first.
        """
        if self.all_real:
            return None
        if not self.on_host:
            raise LayoutError(f"{self}.real_rows: the lengths are on {self.device}. Use valid_T.")
        rows = self.mask(num_rows).nonzero().squeeze(1)
        return None if len(rows) == num_rows else rows

    @final
    def positions(self, shape: Sequence[int]) -> Tensor:
        """Return the sequence of each row of ``x`` and its position in that sequence, int64 (2, T).

        Sequences are numbered in the order of the layout: b in [B, S, D], i of ``cu_seqlens[i]``. Positions count the
        tokens of a sequence from its start, on whichever rank they are. Both numbers are -1 for a row without a token.
        For example, ``THD([0, 2, 3], [0, 4, 8])`` gives [[0, 0, -1, -1, 1, -1, -1, -1], [0, 1, -1, -1, 0, -1, -1, -1]].
        Without sequences in the layout (``Rows``, ``Masked``), the last leading dimension of x holds a sequence.

        Args:
            shape: The shape of this rank's ``x``.

        Raises:
            LayoutError: The shape does not fit the layout.

        Cost: no host sync. The result is on the device of the metadata.
        """
        rows = self.rows_of(shape)
        positions_2T, valid_T = self.all_positions(shape), self.valid_T(rows)
        return positions_2T if valid_T is None else torch.where(valid_T, positions_2T, -1)

    @final
    def check(self, num_rows: int, *, values: bool = False) -> None:
        """Raise LayoutError if the layout is malformed or does not describe ``num_rows`` rows.

        With ``values``, also check values that are on a device. This is a host sync.
        """
        if self.all_real and not self.metadata:
            return  # nothing describes the rows, so any number of them fits
        self.check_rows(num_rows, values=values or all(map(is_host, self.metadata)))

    @final
    def shard(self, index: int, size: int, kind: ShardKind = "contiguous") -> Layout:
        """Return the layout of one rank's part of the rows.

        Args:
            index: The rank in its sequence- or context-parallel group.
            size: The number of ranks in that group. If it is 1, the layout itself is returned.
            kind: ``"contiguous"`` for sequence parallelism and contiguous context parallelism. ``"zigzag"`` for context
                parallelism that balances causal attention: the rank holds the chunks ``index`` and ``2*size-1-index``
                of the ``2*size`` chunks of each sequence.

        Raises:
            ConfigError: ``index``, ``size`` or ``kind`` is out of range, or this layout cannot be divided that way.
        """
        part = Shard(self, index, size, kind)
        return self if size == 1 else part

    @property
    @abstractmethod
    def metadata(self) -> tuple[Tensor, ...]:
        """The tensors that describe the rows; empty if integers describe the rows, or if nothing describes them."""

    @property
    @abstractmethod
    def all_real(self) -> bool:
        """Whether every row is real, whatever the values of the metadata."""

    @abstractmethod
    def rows_of(self, shape: Sequence[int]) -> int:
        """Return T for an ``x`` of this shape, or raise LayoutError if the shape does not fit."""

    @property
    @final
    def device(self) -> torch.device | None:
        """Device of the metadata; None without metadata."""
        return self.metadata[0].device if self.metadata else None

    def known_rows(self) -> int | None:
        """Return T if it follows from metadata on the host, else None."""
        return None

    def known_real(self) -> int | None:
        """Return the number of real rows if it does not depend on T, else None. Called only if ``on_host``."""
        return None

    def grid(self, num_rows: int) -> tuple[int, ...]:
        """Return the leading dimensions of an ``x`` of ``num_rows`` rows, or raise LayoutError if no ``x`` has so many.

        Called only if the layout has metadata.
        """
        return (num_rows,)

    def sequence_dim(self, shape: Sequence[int]) -> int:
        """Return the dimension of ``x`` that sharding divides."""
        return 0

    @abstractmethod
    def mask(self, num_rows: int) -> Tensor:
        """Return ``valid_T`` on the device of the metadata, without a host sync. Not called if all rows are real."""

    @abstractmethod
    def num_sequences(self, shape: Sequence[int]) -> int:
        """Return the number of sequences in the whole of which this rank's ``x`` has this shape."""

    @abstractmethod
    def all_positions(self, shape: Sequence[int]) -> Tensor:
        """Return ``positions`` of an ``x`` of this shape. Rows without a token may get any numbers. No host sync."""

    @abstractmethod
    def check_rows(self, num_rows: int, *, values: bool) -> None:
        """Raise LayoutError if the metadata is malformed or does not fit ``num_rows`` rows. Read it only if ``values``.

        Called only if something describes the rows.
        """

    def check_shard(self, num_rows: int, size: int, kind: ShardKind, *, values: bool) -> None:
        """Raise LayoutError if ``num_rows`` rows cannot be divided. Read the metadata only if ``values``."""
        check_divisible("the rows", num_rows, size, kind)

    def shard_rows(self, grid: Sequence[int], index: int, size: int, kind: ShardKind) -> Tensor:
        """Return the rows that a shard holds, int64, in the order of the shard. No host sync.

        They are rows of a whole tensor with leading dimensions ``grid``. Raises LayoutError if the sizes do not divide.
        """
        num_rows = prod(grid)
        check_divisible("the rows", num_rows, size, kind)
        return split_positions(torch.arange(num_rows // size, device=self.device), num_rows, index, size, kind)

    def __str__(self) -> str:
        """Return the class name, with which error messages begin."""
        return type(self).__name__


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
            kinds = ", ".join(self.base.shard_kinds)
            raise ConfigError(f"{self.base}.shard: kind must be one of {kinds}, got {self.kind!r}.")
        if self.size < 1 or not 0 <= self.index < self.size:
            raise ConfigError(f"shard: index must lie in 0..size-1, got index {self.index} and size {self.size}.")

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
            raise LayoutError(f"{self}: x must be two equal chunks, got {length} positions.")
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

    def all_positions(self, shape: Sequence[int]) -> Tensor:
        """Select this rank's rows from the positions of the whole."""
        whole = self._whole(shape)
        rows = self.base.shard_rows(whole[:-1], self.index, self.size, self.kind)
        return self.base.all_positions(whole).index_select(1, rows)

    def _whole(self, shape: Sequence[int]) -> list[int]:
        """Return the shape of the tensor of which this rank holds a part."""
        whole = list(shape)
        whole[self.sequence_dim(shape)] *= self.size
        return whole

    def check_rows(self, num_rows: int, *, values: bool) -> None:
        """Check that the parts together fit the whole, and that the whole can be divided."""
        self.base.check_rows(num_rows * self.size, values=values)
        self.base.check_shard(num_rows * self.size, self.size, self.kind, values=values)

    def check_shard(self, num_rows: int, size: int, kind: ShardKind, *, values: bool) -> None:
        self.base.check_shard(num_rows, size, kind, values=values)

    def shard_rows(self, grid: Sequence[int], index: int, size: int, kind: ShardKind) -> Tensor:
        """Select a contiguous part of this rank's rows."""
        return self.base.shard_rows(grid, index, size, kind)

    def __str__(self) -> str:
        return f"{self.base}.shard({self.index}, {self.size}, {self.kind!r})"


def is_host(tensor: Tensor) -> bool:
    """Return whether the values can be read without a host sync."""
    return tensor.device.type == "cpu"


def integer(where: str, value: Any) -> int:
    """Return a Python integer as it is. Convert an integer of another library, such as numpy, to a Python integer.

    Raises:
        LayoutError: ``value`` is not an integer, is a bool or a tensor, or has more than 64 bits. The error begins with
            ``where``.
    """
    # a tensor may be on a device, and a bool is an int
    number = None if isinstance(value, bool | Tensor) or not hasattr(value, "__index__") else operator.index(value)
    if number is None or not -(2**63) <= number < 2**63:
        raise LayoutError(f"{where} must be an integer of at most 64 bits, got {shown(value)}.")
    return number


def integer_tensor(where: str, value: Tensor | Sequence[int]) -> Tensor:
    """Return lengths or offsets as a 1-D tensor: a list becomes int64 on the CPU, a tensor is returned as it is.

    Raises:
        LayoutError: ``value`` does not hold integers, or is not 1-D int32 or int64. The error begins with ``where``.
    """
    if not isinstance(value, Tensor):
        if not isinstance(value, Iterable):
            raise LayoutError(f"{where} must be a list or a tensor, got {value!r}. Pass integers.")
        numbers = [integer(f"{where}[{i}]", item) for i, item in enumerate(value)]
        return torch.tensor(numbers, dtype=torch.int64, device="cpu")
    if value.dtype not in INTEGER_DTYPES or value.dim() != 1:
        told = f"{where} must be a 1-D int32 or int64 tensor, got {value.dtype} {tuple(value.shape)}."
        raise LayoutError(told + " Pass a mask as Masked(mask.flatten())." * (value.dtype == torch.bool))
    return value
