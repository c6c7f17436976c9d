"""The index of a one-rank reorder: where the copies of each row stand after the rows are grouped by key.

Legend: S rows, K slots per row, R grouped rows with their padding, L keys. A slot is one (row, k) pair. The key of a
slot is an expert or a rank; a slot may also have no key. N is the number of slots that have a key.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from moe_dispatch.communication import to_device


def round_up(value: int, multiple: int) -> int:
    """Return the smallest multiple of ``multiple`` that is at least ``value``. 0 stays 0."""
    return -(-value // multiple) * multiple


@final
@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class SlotIndex:
    """The positions of all slots among the grouped rows. ``group_slots`` and ``group_statically`` make an index.

    Grouped rows are ordered by key, and by row within a key. Padding follows the rows of each key.

    For example, two rows have the keys ``[[1, 0], [-1, 1]]``, where -1 is no key. With ``pad_multiple=2`` the grouped
    rows are: row 0 for key 0, padding, row 0 for key 1, row 1 for key 1. So ``source_R`` is [0, 0, 0, 1], ``slot_N``
    is [1, 0, 3], ``place_N`` is [0, 2, 3], ``byrow_N`` is [2, 0, 3], ``cu_S`` is [0, 2, 3] and ``padding`` is [1].

    An index has a fixed size if its shapes do not depend on the keys. Then N is S * K. Slots without a key come last in
    ``slot_N``, and their place is R, one position behind the last grouped row. ``byrow_N`` ends in zeros. ``padding``
    is filled up with R. So a buffer that is written at ``place_N`` or ``padding`` needs one spare row, number R. The
    grouped rows behind the padding of the last key are slack: like padding, they are copies of no row.

    With a fixed size of R = 6, the example has two rows of slack. ``source_R`` is [0, 0, 0, 1, 0, 0], ``filled_R`` is
    [0, -1, 0, 1, -1, -1], ``slot_N`` is [1, 0, 3, 2], ``place_N`` is [0, 2, 3, 6], ``byrow_N`` is [2, 0, 3, 0],
    ``cu_S`` is [0, 2, 3] and ``padding`` is [1, 6].

    Attributes:
        num_rows: S.
        top_k: K.
        num_grouped: R.
        pad_multiple: The number of rows of each key is rounded up to a multiple of this; a key without rows stays
            empty.
        source_R: int64 (R,), the row that each grouped row is a copy of; 0 on padding and slack.
        slot_N: int64 (N,), the slot (row * K + k) of each real grouped row, in grouped order.
        place_N: int64 (N,), the grouped position of each entry of ``slot_N``; None if it is 0, 1, ..., N-1.
        byrow_N: int64 (N,), the grouped positions of the slots that have a key, in the order of the slots.
        cu_S: int64 (S+1,), where the slots of each row begin in ``byrow_N``.
        padding: int64, the grouped positions that are padding; None if ``pad_multiple`` is 1.
        filled_R: int64 (R,), ``source_R`` with -1 on padding and slack; None without a fixed size.
        masked_R: int64 (R,), ``source_R`` with -1 on padding, if a kernel made it; None with a fixed size.
        counts: The number of slots of each key, on the host, without padding; None with a fixed size. An index made by
            ``from_tensors`` has neither ``counts`` nor ``real_L``, ``padded_L`` and ``needed``.
        real_L: int64 (L,), the number of slots of each key, on the device, without padding. With a fixed size, dropped
            slots are not counted. Without a fixed size, it is None if the caller of ``group_slots`` did not have it.
        padded_L: int64 (L,), ``real_L`` with padding; without a fixed size, None unless a kernel made the index.
        needed: int64 (), the number of slots that have a key, dropped slots included; None without a fixed size.
    """

    num_rows: int
    top_k: int
    num_grouped: int
    pad_multiple: int
    source_R: Tensor
    slot_N: Tensor
    place_N: Tensor | None
    byrow_N: Tensor
    cu_S: Tensor
    padding: Tensor | None
    filled_R: Tensor | None = None
    masked_R: Tensor | None = None
    counts: Sequence[int] | None = None
    real_L: Tensor | None = None
    padded_L: Tensor | None = None
    needed: Tensor | None = None

    @property
    def fixed_size(self) -> bool:
        """Whether the shapes do not depend on the keys."""
        return self.filled_R is not None

    def to_grouped(self, values_SK: Tensor) -> Tensor:
        """Move one value per slot, (S, K), to the grouped rows, (R,).

        Padding gets 0. The values of slots without a key are never read.
        """
        if self.filled_R is None:
            real = values_SK.take(self.slot_N)
            if self.place_N is None:
                return real
            return real.new_zeros(self.num_grouped).index_copy_(0, self.place_N, real)
        assert self.place_N is not None
        values_N = values_SK.reshape(-1).index_select(0, self.slot_N)
        grouped = values_N.new_zeros(self.num_grouped + 1).index_copy_(0, self.place_N, values_N)
        return grouped.resize_(self.num_grouped)  # not a view: the caller may write to the result

    def to_slots(self, values_R: Tensor) -> Tensor:
        """Move one value per grouped row, (R,), back to the slots, (S, K).

        Slots without a key get 0. The values on padding are never read.
        """
        if self.filled_R is not None:
            values_R = torch.cat([values_R, values_R.new_zeros(1)])  # position R, the place of slots without a key
        real = values_R if self.place_N is None else values_R.index_select(0, self.place_N)
        slots = real.new_zeros(self.num_rows * self.top_k)
        return slots.index_copy_(0, self.slot_N, real).view(self.num_rows, self.top_k)

    def in_row_order(self, values_SK: Tensor) -> Tensor:
        """Return the values of the slots that have a key, (N,), in the order of the slots."""
        return self.to_grouped(values_SK).index_select(0, self.byrow_N)

    def source_or_none(self) -> Tensor:
        """Return int64 (R,): the row that each grouped row is a copy of, -1 on padding."""
        if self.filled_R is not None:
            return self.filled_R
        if self.masked_R is not None:
            return self.masked_R
        return self.source_R if self.padding is None else self.source_R.index_fill(0, self.padding, -1)

    def tokens_per_key(self, device: torch.device) -> tuple[Tensor, Tensor, tuple[int, ...] | None]:
        """Return the number of rows of each key. ``group_slots`` or ``group_statically`` must have made the index.

        Args:
            device: Device for the counts.

        Returns:
            The counts without padding on the device, int64 (L,); the counts with padding on the device, int64 (L,); and
            the counts with padding on the host. The last is None with a fixed size, because the host does not know
            them. If ``pad_multiple`` is 1, the first two may be one tensor.

        Cost: no host sync; one copy to the device if the index knows the counts only on the host.
        """
        if self.counts is None:
            assert self.real_L is not None
            assert self.padded_L is not None
            return self.real_L, self.padded_L, None
        real_L, multiple = self.real_L, self.pad_multiple
        if real_L is None:
            real_L = to_device(self.counts, device)
        if multiple == 1:
            return real_L, real_L, tuple(self.counts)
        padded_L = real_L + (-real_L % multiple) if self.padded_L is None else self.padded_L
        return real_L, padded_L, tuple(round_up(count, multiple) for count in self.counts)

    def tensors(self) -> list[Tensor]:
        """Return the tables as a list for custom operators. No two share memory. Counts are left out."""
        tables = (self.source_R, self.slot_N, self.byrow_N, self.cu_S, self.place_N, self.padding, self.filled_R)
        return [table for table in tables if table is not None]

    @staticmethod
    def from_tensors(tensors: Sequence[Tensor], top_k: int, pad_multiple: int, *, fixed_size: bool) -> SlotIndex:
        """Rebuild the index from its ``tensors()``. The result has no counts."""
        source_R, slot_N, byrow_N, cu_S, *rest = tensors
        is_padded = pad_multiple > 1
        return SlotIndex(
            num_rows=cu_S.shape[0] - 1,
            top_k=top_k,
            num_grouped=source_R.shape[0],
            pad_multiple=pad_multiple,
            source_R=source_R,
            slot_N=slot_N,
            byrow_N=byrow_N,
            cu_S=cu_S,
            place_N=rest.pop(0) if is_padded or fixed_size else None,
            padding=rest.pop(0) if is_padded else None,
            filled_R=rest.pop(0) if fixed_size else None,
        )

    @staticmethod
    def blank(
        num_rows: int | None,
        top_k: int,
        pad_multiple: int,
        *,
        new_size: Callable[[], int],
        device: torch.device,
        num_keys: int = 0,
        buffer_rows: int | None = None,
    ) -> SlotIndex:
        """Make an index whose tables have shapes but no values, for tracing.

        Args:
            num_rows: S; None if S is known only at run time.
            top_k: K.
            pad_multiple: As in ``group_slots``.
            new_size: Function that returns a symbol for a size that is known only at run time.
            device: Device of the tables.
            num_keys: L; needed only with ``buffer_rows``.
            buffer_rows: R of an index of fixed size; None if the shapes depend on the keys.
        """
        is_padded, fixed_size = pad_multiple > 1, buffer_rows is not None
        edges = new_size() if num_rows is None else num_rows + 1
        slots = (edges - 1) * top_k if fixed_size else new_size()
        grouped = buffer_rows if buffer_rows is not None else new_size() if is_padded else slots
        lengths = [grouped, slots, slots, edges]
        if is_padded or fixed_size:
            lengths.append(slots)
        if is_padded:
            lengths.append(num_keys * (pad_multiple - 1) if fixed_size else new_size())
        if fixed_size:
            lengths.append(grouped)
        tables = [torch.empty(length, dtype=torch.int64, device=device) for length in lengths]
        return SlotIndex.from_tensors(tables, top_k, pad_multiple, fixed_size=fixed_size)


def index_bytes(num_rows: int, top_k: int, num_keys: int, *, buffer_rows: int, pad_multiple: int) -> int:
    """Return the number of bytes of an index of fixed size and its counts.

    The arguments are S, K, L, R and ``pad_multiple`` of ``group_statically``.
    """
    slots = num_rows * top_k
    of_slots = 3 * slots + 1  # slot_N, place_N, and byrow_N with a spare entry
    of_rows = num_rows + 1 + 2 * buffer_rows + 1  # cu_S, source_R, and filled_R with a spare entry
    of_keys = num_keys + 1 + num_keys + 1  # real_L with one count for slots without a key, padded_L, needed
    of_padding = num_keys * (pad_multiple - 1)
    return 8 * (of_slots + of_rows + of_keys + of_padding)
