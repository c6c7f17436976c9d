"""The index of a one-rank reorder: where the copies of each row stand once rows are grouped by key.

Legend: S rows, K slots per row, R grouped rows with their padding, L keys. A slot is one (row, k) pair; its key is an
expert or a rank, or none. N is the number of slots that have a key.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor


def round_up(value: int, multiple: int) -> int:
    """Return the smallest multiple of ``multiple`` that is at least ``value``; 0 stays 0."""
    return -(-value // multiple) * multiple


@final
@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class SlotIndex:
    """Where each slot's row stands after grouping. ``group_slots`` and ``group_statically`` make it.

    Grouped rows are ordered by key, and by row within a key. Padding follows each key's rows.

    For example, two rows have the keys ``[[1, 0], [-1, 1]]``, where -1 is no key. With ``pad_multiple=2`` the grouped
    rows are: row 0 for key 0, padding, row 0 for key 1, row 1 for key 1. So ``source_R`` is [0, 0, 0, 1], ``slot_N``
    is [1, 0, 3], ``place_N`` is [0, 2, 3], ``byrow_N`` is [2, 0, 3], ``cu_S`` is [0, 2, 3] and ``padding`` is [1].

    An index has a fixed size if its shapes do not depend on the keys. Then N is S * K. Slots without a key come last in
    ``slot_N``, and their place is R, one position behind the last grouped row. ``byrow_N`` ends in zeros. ``padding``
    is filled up with R. A buffer that is written by ``place_N`` or ``padding`` therefore has one spare row. Behind the
    last key's padding there may be slack, which has no row, like padding.

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
        cu_S: int64 (S+1,), where each row begins in ``byrow_N``.
        padding: int64, the grouped positions that are padding; None if ``pad_multiple`` is 1.
        filled_R: int64 (R,), ``source_R`` with -1 on padding and slack; only with a fixed size.
        counts: The number of slots of each key, on the host and without padding; only with a size that follows the
            keys. An index made by ``from_tensors`` has no ``counts``, ``real_L``, ``padded_L`` and ``needed``.
        real_L: int64 (L,), the same counts on the device. Without a fixed size they are there only if the caller had
            them. With a fixed size, slots that were dropped do not count.
        padded_L: int64 (L,), ``real_L`` with padding; only with a fixed size.
        needed: int64 (), the number of slots that have a key, dropped ones included; only with a fixed size.
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
    counts: Sequence[int] | None = None
    real_L: Tensor | None = None
    padded_L: Tensor | None = None
    needed: Tensor | None = None

    @property
    def fixed_size(self) -> bool:
        """Whether the shapes are independent of the keys."""
        return self.filled_R is not None

    def to_grouped(self, values_SK: Tensor) -> Tensor:
        """Bring one value per slot, (S, K), to the grouped rows, (R,).

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
        return grouped.resize_(self.num_grouped)  # the caller may write to it in place, which a view would not allow

    def to_slots(self, values_R: Tensor) -> Tensor:
        """Bring one value per grouped row, (R,), back to the slots, (S, K).

        Slots without a key get 0. The values on padding are never read.
        """
        if self.filled_R is not None:
            values_R = torch.cat([values_R, values_R.new_zeros(1)])  # place R, which slots without a key point to
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
        return self.source_R if self.padding is None else self.source_R.index_fill(0, self.padding, -1)

    def tokens_per_key(self, device: torch.device) -> tuple[Tensor, Tensor, tuple[int, ...] | None]:
        """Count the rows of each key. The index must have been made by ``group_slots`` or ``group_statically``.

        Args:
            device: Where the counts are needed.

        Returns:
            The counts on the device, int64 (L,), without and with padding, and the padded counts on the host. With a
            fixed size the host does not know them: None. Without padding both tensors are the same object.

        Cost: no host sync; one copy to the device if the index knows the counts only on the host.
        """
        if self.counts is None:
            assert self.real_L is not None
            assert self.padded_L is not None
            return self.real_L, self.padded_L, None
        real_L, multiple = self.real_L, self.pad_multiple
        if real_L is None:
            real_L = torch.tensor(self.counts, dtype=torch.int64, device="cpu").to(device, non_blocking=True)
        if multiple == 1:
            return real_L, real_L, tuple(self.counts)
        return real_L, real_L + (-real_L % multiple), tuple(round_up(count, multiple) for count in self.counts)

    def tensors(self) -> list[Tensor]:
        """Return the tables, without the counts, for an operator to return: none shares memory with another."""
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
            num_rows: S; None if it is known at run time only.
            top_k: K.
            pad_multiple: As in ``group_slots``.
            new_size: Makes a symbol for a size that is known at run time only.
            device: Device of the tables.
            num_keys: L, needed only with ``buffer_rows``.
            buffer_rows: R of an index of fixed size; None if the sizes follow the keys.
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
    """Return the bytes of an index of fixed size with its counts: S, K, L and R as in ``group_statically``."""
    slots = num_rows * top_k
    of_slots = 3 * slots + 1  # slot_N, place_N, and byrow_N with a spare entry
    of_rows = num_rows + 1 + 2 * buffer_rows + 1  # cu_S, source_R, and filled_R with a spare entry
    of_keys = num_keys + 1 + num_keys + 1  # real_L with one count for slots without a key, padded_L, needed
    of_padding = num_keys * (pad_multiple - 1)
    return 8 * (of_slots + of_rows + of_keys + of_padding)


def group_slots(
    keys_SK: Tensor, counts: Sequence[int], pad_multiple: int = 1, *, real_L: Tensor | None = None
) -> SlotIndex:
    """Group the slots of a key table, where the host knows how many slots each key has.

    Args:
        keys_SK: int16, int32 or int64 (S, K). A key outside ``[0, len(counts))`` is no key.
        counts: The number of slots of each key, on the host.
        pad_multiple: The number of rows of each key is rounded up to a multiple of this; a key without rows stays
            empty.
        real_L: int64 (L,), ``counts`` on the device, if the caller has them there. The index keeps them.

    Cost: one stable sort of S*K keys, one sort of N slots, else single passes; no host sync.
    """
    num_rows, top_k = keys_SK.shape
    real, device = sum(counts), keys_SK.device
    # Without the sign bit, negative keys are large, so they sort behind all groups.
    keys = keys_SK.bitwise_and(torch.iinfo(keys_SK.dtype).max)
    slot_N = keys.reshape(-1).sort(stable=True).indices[:real]
    source_R = slot_N.div(top_k, rounding_mode="floor")
    byrow = slot_N.sort()
    byrow_N, firsts_S = byrow.indices, torch.arange(0, (num_rows + 1) * top_k, top_k, device=device)
    place_N, padding, padded = None, None, real
    if pad_multiple > 1:
        place_N, padding, padded = _with_padding(counts, pad_multiple, device)
        source_R = source_R.new_zeros(padded).index_copy_(0, place_N, source_R)
        byrow_N = place_N.index_select(0, byrow_N)
    return SlotIndex(
        num_rows=num_rows,
        top_k=top_k,
        num_grouped=padded,
        pad_multiple=pad_multiple,
        source_R=source_R,
        slot_N=slot_N,
        place_N=place_N,
        byrow_N=byrow_N,
        cu_S=torch.searchsorted(byrow.values, firsts_S),
        padding=padding,
        counts=counts,
        real_L=real_L,
    )


def _with_padding(counts: Sequence[int], multiple: int, device: torch.device) -> tuple[Tensor, Tensor, int]:
    """Return the grouped positions of the real rows, the positions of the padding, and the number of both."""
    real, total = sum(counts), sum(round_up(count, multiple) for count in counts)
    counts_L = torch.tensor(counts, dtype=torch.int64, device="cpu")  # whatever torch.set_default_device says
    gaps_L = -counts_L % multiple
    shift_L = (gaps_L.cumsum(0) - gaps_L).to(device, non_blocking=True)
    shift_N = shift_L.repeat_interleave(counts_L.to(device, non_blocking=True), output_size=real)
    place_N = torch.arange(real, device=device) + shift_N
    is_padding = torch.ones(total, dtype=torch.bool, device=device).index_fill_(0, place_N, 0)
    return place_N, true_places(is_padding, total - real).view(-1), total


def group_statically(
    keys_SK: Tensor, num_keys: int, *, rows: int, buffer_rows: int, pad_multiple: int, weights_SK: Tensor | None
) -> SlotIndex:
    """Group the slots of a key table into a buffer of fixed size.

    Args:
        keys_SK: int16, int32 or int64 (S, K), S at least 1. A key outside ``[0, num_keys)`` is no key.
        num_keys: L.
        rows: The number of slots that there is room for. If more slots have a key, the lightest are dropped, and of
            equally heavy slots the last.
        buffer_rows: R, room for ``rows`` and their padding.
        pad_multiple: As in ``group_slots``.
        weights_SK: floating (S, K), the weights that decide which slots are dropped; None if there is room for all.

    Cost: one stable sort of S*K keys, one more with ``weights_SK``, else single passes; no host sync.
    """
    num_rows, top_k = keys_SK.shape
    keys_N = keys_SK.reshape(-1)
    keys_N = torch.where((keys_N < 0) | (keys_N >= num_keys), num_keys, keys_N)
    needed = (keys_N < num_keys).sum()
    if weights_SK is not None:
        keys_N = torch.where(heaviest(weights_SK.reshape(-1), keys_N < num_keys, rows), keys_N, num_keys)
    sorted_N, slot_N = keys_N.sort(stable=True)
    real_L = torch.zeros(num_keys + 1, dtype=torch.int64, device=keys_N.device)
    real_L = real_L.scatter_add_(0, keys_N.long(), torch.ones_like(slot_N))[:num_keys]
    padded_L = real_L + (-real_L % pad_multiple)
    shift_L = running_total(padded_L) - running_total(real_L)
    in_order_N = torch.arange(len(keys_N), device=keys_N.device)
    place_N = torch.where(sorted_N < num_keys, in_order_N + shift_L.index_select(0, sorted_N.int()), buffer_rows)
    filled_R = torch.full((buffer_rows + 1,), -1, dtype=torch.int64, device=keys_N.device)
    filled_R.index_copy_(0, place_N, slot_N.div(top_k, rounding_mode="floor"))
    place_SK = torch.empty_like(place_N).index_copy_(0, slot_N, place_N)
    is_real_SK = place_SK < buffer_rows
    return SlotIndex(
        num_rows=num_rows,
        top_k=top_k,
        num_grouped=buffer_rows,
        pad_multiple=pad_multiple,
        source_R=filled_R[:buffer_rows].clamp(min=0),
        filled_R=filled_R[:buffer_rows],
        slot_N=slot_N,
        place_N=place_N,
        byrow_N=front(place_SK, is_real_SK),
        cu_S=running_total(is_real_SK.view(num_rows, top_k).sum(1)),
        padding=None if pad_multiple == 1 else _padding(real_L, padded_L, pad_multiple, buffer_rows),
        real_L=real_L,
        padded_L=padded_L,
        needed=needed,
    )


def heaviest(weights_N: Tensor, is_real_N: Tensor, room: int) -> Tensor:
    """Return bool (N,): the real entries, or the ``room`` heaviest of them; of equally heavy entries the first.

    A NaN counts as heaviest: it must reach the output, not be dropped.
    """
    lightness_N = -torch.where(weights_N.isnan(), float("inf"), weights_N)
    # An entry that is not real becomes NaN, which sorts behind every number.
    order_N = torch.where(is_real_N, lightness_N, float("nan")).sort(stable=True).indices
    return torch.zeros_like(is_real_N).index_fill_(0, order_N[:room], True) & is_real_N


def _padding(real_L: Tensor, padded_L: Tensor, pad_multiple: int, nowhere: int) -> Tensor:
    """Return the positions of the padding, int64 (L * (pad_multiple - 1),), filled up with ``nowhere``."""
    step = torch.arange(pad_multiple - 1, device=real_L.device)
    at = (padded_L.cumsum(0) - padded_L + real_L).unsqueeze(1) + step
    return torch.where(step < (padded_L - real_L).unsqueeze(1), at, nowhere).view(-1)


def front(values_N: Tensor, is_kept_N: Tensor) -> Tensor:
    """Move the kept values to the front, in their order, and put zeros behind them; the size stays."""
    count = len(values_N)
    target_N = torch.where(is_kept_N, is_kept_N.cumsum(0) - 1, count)
    return values_N.new_zeros(count + 1).index_copy_(0, target_N, values_N)[:count]


def running_total(counts: Tensor) -> Tensor:
    """Return int64 (n+1,): 0, then the inclusive sums of the (n,) counts."""
    total = torch.zeros(counts.shape[0] + 1, dtype=torch.int64, device=counts.device)
    torch.cumsum(counts, 0, out=total[1:])
    return total


def count_values(values_N: Tensor, length: int) -> Tensor:
    """Count how often each of ``range(length)`` occurs in int64 (N,): int64 (length,). No host sync."""
    if values_N.device.type == "cpu":
        return torch.bincount(values_N, minlength=length)  # on a GPU, bincount reads the largest value
    counts = torch.zeros(length, dtype=torch.int64, device=values_N.device)
    return counts.scatter_add_(0, values_N, torch.ones_like(values_N))


def true_places(mask: Tensor, count: int | None) -> Tensor:
    """Return where the mask is True, in order: int64 (count, dims). No host sync.

    Args:
        mask: bool.
        count: The number of True entries, if the host knows it; needed on a GPU only.
    """
    if mask.is_cpu:
        return mask.nonzero()  # three times as fast on the CPU; on a GPU it reads the count
    assert count is not None
    return torch.nonzero_static(mask, size=count)
