"""Packed sequences: ``[T, D]`` with ``cu_seqlens``."""

from __future__ import annotations

from abc import ABC
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, cast, final

import torch
from torch import Tensor

from moe_dispatch.errors import LayoutError
from moe_dispatch.layouts.base import Layout, integer, integer_tensor, is_host
from moe_dispatch.layouts.shard import ShardKind, check_divisible, split_multiple, split_positions


class CountedRows(Layout, ABC):
    """Base with room for a number that is read once, when the layout is made.

    A read per call would take time in every layer, and would break a compiled graph. The number is no field of the
    dataclass, because ``dataclasses.replace`` passes all fields to the class, and refuses those that it does not take.
    """

    __slots__ = ("_known_rows",)

    _known_rows: int | None


@final
@dataclass(frozen=True, slots=True, eq=False)
class THD(CountedRows):
    """``x`` is [T, D], [1, T, D] or [T, 1, D]; sequences lie one after another.

    Without ``cu_seqlens_padded`` every row is real. With it, sequence ``i`` owns the rows from ``cu_seqlens_padded[i]``
    to ``cu_seqlens_padded[i+1]``, of which the first ``cu_seqlens[i+1] - cu_seqlens[i]`` are real.

    Attributes:
        cu_seqlens: int32 or int64 (n+1,), the running sums of the lengths, with a leading 0. Lengths 3, 0 and 2 give
            [0, 3, 3, 5]. A list becomes a CPU tensor.
        cu_seqlens_padded: The running sums of the padded lengths, or None if there is no padding.
        max_seqlen: The length of the longest sequence or a bound on it, for attention kernels.
    """

    cu_seqlens: Tensor | Sequence[int]
    cu_seqlens_padded: Tensor | Sequence[int] | None = None
    max_seqlen: int | None = None

    def __post_init__(self) -> None:
        """Turn lists into tensors, and refuse offsets that are not (n+1,) integers."""
        given = {"cu_seqlens": self.cu_seqlens}
        if self.cu_seqlens_padded is not None:
            given["cu_seqlens_padded"] = self.cu_seqlens_padded
        tensors = {name: integer_tensor(f"THD: {name}", value) for name, value in given.items()}
        for name, cu in tensors.items():
            if not len(cu):
                raise LayoutError(f"THD: {name} must have n+1 entries for n sequences, got none. Pass [0] for n = 0.")
            object.__setattr__(self, name, cu)
        if self.real.shape != self.owned.shape or self.real.device != self.owned.device:
            raise LayoutError(
                "THD: cu_seqlens and cu_seqlens_padded must have the same length and device, got "
                f"{len(self.real)} entries on {self.real.device} and {len(self.owned)} on {self.owned.device}."
            )
        if self.max_seqlen is not None:
            object.__setattr__(self, "max_seqlen", longest := integer("THD: max_seqlen", self.max_seqlen))
            if longest < 0:
                raise LayoutError(f"THD: max_seqlen must be 0 or more, got {longest}. Pass the longest sequence.")
        object.__setattr__(self, "_known_rows", int(self.owned[-1]) if is_host(self.owned) else None)

    def __reduce__(self) -> tuple[Any, ...]:
        """Copy and pickle the arguments. A dataclass with slots would copy its fields only, without ``_known_rows``."""
        return type(self), (self.cu_seqlens, self.cu_seqlens_padded, self.max_seqlen)

    @property
    def metadata(self) -> tuple[Tensor, ...]:
        """``cu_seqlens``, and ``cu_seqlens_padded`` if given."""
        given = (self.cu_seqlens,) if self.cu_seqlens_padded is None else (self.cu_seqlens, self.cu_seqlens_padded)
        return cast(tuple[Tensor, ...], given)  # lists have become tensors

    @property
    def real(self) -> Tensor:
        """``cu_seqlens`` as a tensor."""
        return self.metadata[0]

    @property
    def owned(self) -> Tensor:
        """Where the rows of each sequence begin and end: ``cu_seqlens_padded`` if given, else ``cu_seqlens``."""
        return self.metadata[-1]

    @property
    def all_real(self) -> bool:
        return self.cu_seqlens_padded is None

    def rows_of(self, shape: Sequence[int]) -> int:
        if len(shape) != 2 and not (len(shape) == 3 and 1 in shape[:2]):
            raise LayoutError(f"THD: x must be [T, D], [1, T, D] or [T, 1, D], got shape {tuple(shape)}.")
        return prod(shape[:-1])

    def known_rows(self) -> int | None:
        return self._known_rows

    def known_real(self) -> int | None:
        return int(self.real[-1])

    def sequence_dim(self, shape: Sequence[int]) -> int:
        return 1 if len(shape) == 3 and shape[0] == 1 else 0

    def mask(self, num_rows: int) -> Tensor:
        """Mark the real rows, which are the first rows of each sequence."""
        sequence_T, offset_T = locate(self.owned, torch.arange(num_rows, device=self.owned.device))
        return offset_T < self.real.diff()[sequence_T]

    def num_sequences(self, shape: Sequence[int]) -> int:
        return len(self.owned) - 1

    def all_positions(self, shape: Sequence[int]) -> Tensor:
        """Return the sequence that owns each row, and the row's offset in it."""
        return torch.stack(locate(self.owned, torch.arange(prod(shape[:-1]), device=self.owned.device)))

    def check_rows(self, num_rows: int, *, values: bool) -> None:
        """Check that offsets start at 0, do not decrease, end at T, and that sequences fit into their padded rows."""
        if not values:
            return
        names = ("cu_seqlens", "cu_seqlens_padded")[: len(self.metadata)]
        for name, cu in zip(names, self.metadata, strict=True):
            if int(cu[0]) != 0:
                raise LayoutError(
                    f"THD: {name} must start at 0, got {_describe(cu)}. Put a 0 before the running sums: lengths 2 "
                    "and 3 give [0, 2, 5]."
                )
            if bool((cu[1:] < cu[:-1]).any()):  # a difference could overflow
                raise LayoutError(f"THD: {name} must not decrease, got {_describe(cu)}. Pass running sums of lengths.")
        if (end := int(self.owned[-1])) != num_rows:
            way_out = "Pass cu_seqlens_padded if sequences are padded, or" if self.all_real else "Use"
            raise LayoutError(
                f"THD: {names[-1]} must end at the number of rows, got {end} and {num_rows} rows. {way_out} shard(...) "
                "if this rank holds a part of them. [MD06]"
            )
        real, owned = self.real.diff(), self.owned.diff()
        for i in (real > owned).nonzero()[:1, 0].tolist():
            raise LayoutError(f"THD: sequence {i} has {int(real[i])} rows, but only {int(owned[i])} with padding.")
        if self.max_seqlen is not None and len(real) and self.max_seqlen < int(real.max()):
            raise LayoutError(
                f"THD: max_seqlen must be at least the longest sequence ({int(real.max())}), got {self.max_seqlen}."
            )

    def check_shard(self, num_rows: int, size: int, kind: ShardKind, *, values: bool) -> None:
        """Check that the packed rows divide (contiguous), and with ``values`` every padded sequence (zigzag)."""
        if values and kind == "zigzag":
            lengths = self.owned.diff()
            for sequence in (lengths % split_multiple(size, kind)).nonzero()[:1, 0].tolist():
                check_divisible(f"the rows of sequence {sequence}", int(lengths[sequence]), size, kind)
        check_divisible("the rows", num_rows, size, kind)

    def shard_rows(self, grid: Sequence[int], index: int, size: int, kind: ShardKind) -> Tensor:
        """Select a part of the packed rows (contiguous), or two chunks of every sequence (zigzag).

        Source: the order of transformer-engine 2.12's ``thd_get_partitioned_indices``, for zigzag.
        """
        if kind == "contiguous" or size == 1:
            return Layout.shard_rows(self, grid, index, size, kind)
        num_rows, cu = prod(grid), self.owned
        check_divisible("the rows", num_rows, size, kind)
        sequence, offset = locate(cu // size, torch.arange(num_rows // size, device=cu.device))
        rows = cu[sequence] + split_positions(offset, cu.diff()[sequence], index, size, kind)
        return rows.clamp_(max=max(num_rows - 1, 0)).to(torch.int64)


def locate(cu: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Find the sequence that owns each row, and the row's offset in it: int64, in the shape of ``rows``. No host sync.

    Rows past the end are given to the last sequence. Values on a device are not checked, so without this rule a wrong
    value would lead to an index out of bounds.
    """
    ends = cu[1:].to(torch.int64).contiguous()
    sequence = torch.searchsorted(ends, rows, right=True).clamp_(max=len(ends) - 1)
    return sequence, rows - cu[sequence]


def _describe(values: Tensor) -> str:
    """Write the first values for an error message. This reads them, which may be a host sync."""
    head = ", ".join(str(value) for value in values[:8].tolist())
    return f"[{head}{', ...' if len(values) > 8 else ''}]"
