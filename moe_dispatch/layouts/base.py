"""What every layout offers a dispatcher, and what a layout must tell for it.

Dimensions: ``T`` rows of this rank as the model gave them, ``D`` hidden, ``B`` sequences, ``S`` positions of each.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from math import prod
from typing import ClassVar, Literal, final

import torch
from torch import Tensor

from moe_dispatch.errors import LayoutError

ShardKind = Literal["contiguous", "zigzag"]


def is_host(tensor: Tensor) -> bool:
    """Whether reading the values costs no device synchronisation."""
    return tensor.device.type == "cpu"


class Layout(ABC):
    """How a model's tensor holds tokens: its rows, and which of them are real.

    A frozen value. Reading it never synchronises with a device unless a method says so. The final methods are what a
    dispatcher uses; the abstract ones are what a concrete layout answers.

    Attributes:
        shard_kinds: the ways this layout can be split.
    """

    __slots__ = ()

    shard_kinds: ClassVar[tuple[ShardKind, ...]] = ("contiguous", "zigzag")

    @final
    def flatten(self, x: Tensor) -> Tensor:
        """The rows of ``x``, (T, D): a view where the strides of ``x`` allow one.

        Raises:
            LayoutError: the shape of ``x`` does not fit, or its row count is not the one the layout knows.
        """
        num_rows, known = self.rows_of(x.shape), self.known_rows()
        if known is not None and torch.compiler.is_compiling():  # either may be a symbol, compared when it runs
            torch._check(
                known == num_rows, lambda: "Layout.flatten: the layout must describe all rows of x. Use x's own."
            )
        elif known is not None and known != num_rows:
            self.check(num_rows)
        return x if x.dim() == 2 else x.reshape(num_rows, x.shape[-1])

    @final
    def unflatten(self, y_TD: Tensor, like: Tensor | Sequence[int]) -> Tensor:
        """Rows put back into the model's form.

        Args:
            y_TD: (T, any width).
            like: what ``flatten`` was given, or its shape.

        Returns:
            The shape of ``like`` with the last dimension of ``y_TD``.

        Raises:
            LayoutError: ``y_TD`` is not 2-D, or has other rows than ``like``.
        """
        shape = like.shape if isinstance(like, Tensor) else like
        if y_TD.dim() != 2 or y_TD.shape[0] != self.rows_of(shape):
            raise LayoutError(
                f"{self}.unflatten: y must be 2-D with the {self.rows_of(shape)} rows of like {tuple(shape)}, got "
                f"{tuple(y_TD.shape)}. Return one row per row of flatten(x)."
            )
        return y_TD if len(shape) == 2 else y_TD.reshape(*shape[:-1], y_TD.shape[-1])

    @final
    def num_rows(self, shape: Sequence[int] | None = None) -> int | None:
        """T: from the shape of ``x`` when given, else from what the layout knows on the host, else None.

        Raises:
            LayoutError: the shape does not fit.
        """
        return self.known_rows() if shape is None else self.rows_of(shape)

    @property
    @final
    def on_host(self) -> bool:
        """Whether it is known without reading a device which rows are real."""
        return self.all_real or all(map(is_host, self.metadata))

    @final
    def num_real(self, num_rows: int | None) -> int | None:
        """How many rows are real, or None where the host does not know."""
        rows = self.known_rows() if num_rows is None else num_rows
        if self.all_real or not self.on_host:
            return rows if self.all_real else None
        known = self.known_real()
        return int(self.mask(rows).sum()) if known is None and rows is not None else known

    @final
    def valid_T(self, num_rows: int, device: torch.device | str | None = None) -> Tensor | None:
        """A bool (T,), True where a row is real; None when every row is.

        Cost: no host sync, unless ``device`` is the CPU and the lengths live elsewhere.
        """
        if self.all_real:
            return None
        mask = self.mask(num_rows)
        # From pageable host memory the copy is staged before the call returns; towards the host it must be waited for.
        return mask if device is None else mask.to(device, non_blocking=is_host(mask))

    @final
    def real_rows(self, num_rows: int) -> Tensor | None:
        """An int64 (num_real,) on the CPU, the real rows in ascending order; None when every row is real.

        Raises:
            LayoutError: only a device knows; ask ``on_host`` first.
        """
        if self.all_real:
            return None
        if not self.on_host:
            raise LayoutError(
                f"{self}.real_rows: lengths must be known on the host, got them on {self.metadata[0].device}. "
                "Use valid_T."
            )
        rows = self.mask(num_rows).nonzero().squeeze(1)
        return None if len(rows) == num_rows else rows

    @final
    def check(self, num_rows: int, *, values: bool = False) -> None:
        """Whether the layout is well formed and describes ``num_rows`` rows.

        Args:
            num_rows: T.
            values: also check values that live on a device, which is a host sync.

        Raises:
            LayoutError: it is not or does not.
        """
        if values or all(map(is_host, self.metadata)):
            self.check_values(num_rows)
        self.check_counts(num_rows)

    @final
    def shard(self, index: int, size: int, kind: ShardKind = "contiguous") -> Layout:
        """The layout of one rank's part of the rows.

        Args:
            index: the rank's place in its sequence- or context-parallel group.
            size: ranks in that group; with 1 the layout itself comes back.
            kind: ``"contiguous"`` (sequence parallelism, contiguous context parallelism) or ``"zigzag"``
                (context parallelism that balances causal attention: chunks ``index`` and ``2*size-1-index`` of each
                sequence).

        Raises:
            ConfigError: index, size or kind are out of range, or this layout cannot be split that way.
        """
        # Shard is itself a Layout, so its module imports this one.
        from moe_dispatch.layouts.shard import Shard  # noqa: PLC0415

        part = Shard(self, index, size, kind)
        return self if size == 1 else part

    @property
    @abstractmethod
    def metadata(self) -> tuple[Tensor, ...]:
        """The tensors that describe rows; empty when host integers do, or nothing needs describing."""

    @property
    @abstractmethod
    def all_real(self) -> bool:
        """Whether this layout cannot have padding at all."""

    @abstractmethod
    def rows_of(self, shape: Sequence[int]) -> int:
        """T for an ``x`` of this shape.

        Raises:
            LayoutError: the shape does not fit.
        """

    @abstractmethod
    def known_rows(self) -> int | None:
        """T where the layout itself tells it on the host."""

    @abstractmethod
    def known_real(self) -> int | None:
        """The number of real rows where the layout alone tells it; asked only when it is on the host."""

    @abstractmethod
    def grid(self, num_rows: int) -> tuple[int, ...]:
        """The leading dimensions behind ``num_rows`` rows; asked only when the layout has metadata.

        Raises:
            LayoutError: no whole number of sequences makes that many rows.
        """

    @abstractmethod
    def sequence_dim(self, shape: Sequence[int]) -> int:
        """The dimension of ``x`` that sharding divides."""

    @abstractmethod
    def mask(self, num_rows: int) -> Tensor:
        """``valid_T`` where padding is possible, on the device of the metadata, without a host sync."""

    @abstractmethod
    def check_counts(self, num_rows: int) -> None:
        """Raise LayoutError where ``num_rows`` cannot fit, from shapes alone."""

    @abstractmethod
    def check_values(self, num_rows: int) -> None:
        """Raise LayoutError where the values are malformed or do not fit; reads them."""

    @abstractmethod
    def check_shard(self, num_rows: int, size: int, kind: ShardKind, *, values: bool) -> None:
        """Raise LayoutError where ``num_rows`` rows of the whole cannot be divided; reads values only if told to."""

    @abstractmethod
    def shard_rows(self, grid: Sequence[int], index: int, size: int, kind: ShardKind) -> Tensor:
        """The rows of the whole that a shard holds, in the shard's order: int64, without a host sync.

        Args:
            grid: leading dimensions of the whole tensor.
            index: which shard.
            size: how many shards.
            kind: see ``shard``.

        Raises:
            LayoutError: the sizes do not divide.
        """


def row_count(shape: Sequence[int]) -> int:
    """Rows of a tensor whose last dimension is the hidden one."""
    return prod(shape[:-1])
