"""Packed sequences: ``[T, D]`` with ``cu_seqlens``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import prod
from typing import final

import torch
from torch import Tensor

from moe_dispatch.errors import LayoutError
from moe_dispatch.layouts.base import Layout, ShardKind, is_host, row_count
from moe_dispatch.layouts.integers import describe, integer_tensor
from moe_dispatch.layouts.splits import check_divisible, split_multiple, split_positions


@final
@dataclass(frozen=True, slots=True, eq=False)
class THD(Layout):
    """``x`` is [T, D], [1, T, D] or [T, 1, D]; sequences lie one after another.

    Without ``cu_seqlens_padded`` every row is real. With it, sequence ``i`` owns the rows from ``cu_seqlens_padded[i]``
    to ``cu_seqlens_padded[i+1]``, of which the first ``cu_seqlens[i+1] - cu_seqlens[i]`` are real.

    Attributes:
        cu_seqlens: int32 or int64 (n+1,), 0 first, equal neighbours for an empty sequence; a list becomes a CPU tensor.
        cu_seqlens_padded: the same of the padded sequences, or None.
        max_seqlen: the longest sequence or a bound on it, for attention kernels; nothing here needs it.
    """

    cu_seqlens: Tensor | Sequence[int]
    cu_seqlens_padded: Tensor | Sequence[int] | None = None
    max_seqlen: int | None = None
    # Read once, so that layers neither read a tensor per call nor break a compiled graph.
    _known_rows: int | None = field(init=False, repr=False, default=None)

    def __post_init__(self) -> None:
        """Turn lists into tensors, and refuse what is not (n+1,) integers."""
        cu = _offsets("cu_seqlens", self.cu_seqlens)
        object.__setattr__(self, "cu_seqlens", cu)
        if self.cu_seqlens_padded is not None:
            padded = _offsets("cu_seqlens_padded", self.cu_seqlens_padded)
            object.__setattr__(self, "cu_seqlens_padded", padded)
            _check_same_form(cu, padded)
        if self.max_seqlen is not None and self.max_seqlen < 0:
            raise LayoutError(f"THD: max_seqlen must be 0 or more, got {self.max_seqlen}. Pass the longest sequence.")
        if is_host(self.owned):
            object.__setattr__(self, "_known_rows", int(self.owned[-1]))

    @property
    def real(self) -> Tensor:
        """``cu_seqlens`` as a tensor."""
        return self.metadata[0]

    @property
    def owned(self) -> Tensor:
        """Where each sequence's rows begin and end: ``cu_seqlens_padded`` where there are gaps, else ``cu_seqlens``."""
        return self.metadata[-1]

    @property
    def metadata(self) -> tuple[Tensor, ...]:
        """The one or two cu_seqlens."""
        return tuple(cu for cu in (self.cu_seqlens, self.cu_seqlens_padded) if isinstance(cu, Tensor))

    @property
    def all_real(self) -> bool:
        """True without gaps."""
        return self.cu_seqlens_padded is None

    def rows_of(self, shape: Sequence[int]) -> int:
        """The product of the leading dimensions, of which one is 1."""
        if len(shape) != 2 and not (len(shape) == 3 and 1 in shape[:2]):
            raise LayoutError(
                f"THD: x must be [T, D], [1, T, D] or [T, 1, D], got shape {tuple(shape)}. Use BSHD or SBHD for "
                "padded sequences."
            )
        return row_count(shape)

    def known_rows(self) -> int | None:
        """The last of the cu_seqlens, when they are on the host."""
        return self._known_rows

    def known_real(self) -> int | None:
        """The last of cu_seqlens."""
        return int(self.real[-1])

    def grid(self, num_rows: int) -> tuple[int, ...]:
        """Packed rows have one leading dimension."""
        return (num_rows,)

    def sequence_dim(self, shape: Sequence[int]) -> int:
        """That of T."""
        return 1 if len(shape) == 3 and shape[0] == 1 else 0

    def mask(self, num_rows: int) -> Tensor:
        """Rows before the real end of the sequence that owns them."""
        sequence_T, offset_T = locate(self.owned, torch.arange(num_rows, device=self.owned.device))
        return offset_T < self.real.diff()[sequence_T]

    def check_counts(self, num_rows: int) -> None:
        """Only the values tell how many rows there are."""

    def check_values(self, num_rows: int) -> None:
        """The cu_seqlens start at 0, do not decrease, end at the row count, and real sequences fit into padded ones."""
        for name, cu in zip(("cu_seqlens", "cu_seqlens_padded"), self.metadata, strict=False):
            _check_offsets(name, cu)
        if int(self.owned[-1]) != num_rows:
            raise LayoutError(self._wrong_end(int(self.owned[-1]), num_rows))
        self._check_lengths()

    def check_shard(self, num_rows: int, size: int, kind: ShardKind, *, values: bool) -> None:
        """Contiguous divides the packed rows, zigzag every sequence with its padding."""
        if values and kind == "zigzag":
            lengths = self.owned.diff()
            for sequence in (lengths % split_multiple(size, kind)).nonzero()[:1, 0].tolist():
                check_divisible(f"the rows of sequence {sequence}", int(lengths[sequence]), size, kind)
        check_divisible("the rows", num_rows, size, kind)

    def shard_rows(self, grid: Sequence[int], index: int, size: int, kind: ShardKind) -> Tensor:
        """A part of the packed rows, or two chunks of every sequence."""
        num_rows, cu = prod(grid), self.owned
        self.check_shard(num_rows, size, kind, values=False)
        if kind == "contiguous" or size == 1:
            return split_positions(num_rows, index, size, kind, cu.device)
        return zigzag_rows(cu, num_rows, index, size)

    def _check_lengths(self) -> None:
        real, owned = self.real.diff(), self.owned.diff()
        over = (real > owned).nonzero()
        if len(over):
            i = int(over[0])
            raise LayoutError(
                f"THD: a sequence must fit into its padded rows, got {int(real[i])} real and {int(owned[i])} padded "
                f"rows for sequence {i}. Build both cu_seqlens from the same sequences."
            )
        longest = int(real.max()) if len(real) else 0
        if self.max_seqlen is not None and self.max_seqlen < longest:
            raise LayoutError(
                f"THD: max_seqlen must be at least the longest sequence ({longest}), got {self.max_seqlen}. "
                "Compute it from the same cu_seqlens."
            )

    def _wrong_end(self, end: int, num_rows: int) -> str:
        name = "cu_seqlens" if self.all_real else "cu_seqlens_padded"
        return (
            f"THD: {name} must end at the number of rows, got {end} and {num_rows} rows. "
            + ("Pass cu_seqlens_padded if sequences are padded, or shard(...) " if self.all_real else "Use shard(...) ")
            + "if this rank holds a part of them."
        )

    def __str__(self) -> str:
        """Its name, as error messages begin with it."""
        return "THD"


def locate(cu: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    """The sequence that owns each row, and the row's offset in it.

    Args:
        cu: (n+1,), where sequences begin and end.
        rows: int64, any shape, on the same device.

    Returns:
        Both int64 in the shape of ``rows``. Rows past the end count to the last sequence: values on a device are not
        checked here, so nothing may index out of bounds.

    Cost: no host sync.
    """
    ends = cu[1:].to(torch.int64).contiguous()
    sequence = torch.searchsorted(ends, rows, right=True).clamp_(max=len(ends) - 1)
    return sequence, rows - cu[sequence]


def zigzag_rows(cu: Tensor, num_rows: int, index: int, size: int) -> Tensor:
    """Chunks ``index`` and ``2*size-1-index`` of every sequence.

    Returns:
        int64 (num_rows / size,) on the device of ``cu``.

    Source: the order of transformer-engine 2.12's ``thd_get_partitioned_indices``.

    Cost: no host sync.
    """
    sequence, offset = locate(cu // size, torch.arange(num_rows // size, device=cu.device))
    chunk = (cu.diff() // (2 * size))[sequence]
    # The local second half continues at the mirrored chunk of the whole sequence.
    start = torch.where(offset < chunk, index * chunk, (2 * size - 2 - index) * chunk)
    return (cu[sequence] + start + offset).clamp_(max=max(num_rows - 1, 0)).to(torch.int64)


def _offsets(name: str, value: Tensor | Sequence[int]) -> Tensor:
    cu = integer_tensor(f"THD: {name}", value)
    if not len(cu):
        raise LayoutError(f"THD: {name} must have n+1 entries for n sequences, got none. Pass [0] for no sequences.")
    return cu


def _check_same_form(cu: Tensor, padded: Tensor) -> None:
    if cu.shape != padded.shape or cu.device != padded.device:
        raise LayoutError(
            f"THD: cu_seqlens and cu_seqlens_padded must have the same length and device, got {len(cu)} entries on "
            f"{cu.device} and {len(padded)} on {padded.device}. Describe the same sequences in both."
        )


def _check_offsets(name: str, cu: Tensor) -> None:
    if int(cu[0]) != 0:
        raise LayoutError(
            f"THD: {name} must start at 0, got {describe(cu)}. Put a 0 before the running sums of lengths."
        )
    if bool((cu.diff() < 0).any()):
        raise LayoutError(f"THD: {name} must not decrease, got {describe(cu)}. Pass running sums of sequence lengths.")
