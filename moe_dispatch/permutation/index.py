"""Index arithmetic of a one-rank reorder: (row, slot) pairs grouped by key. Pure; no process group, no host sync."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor


def round_up(value: int, multiple: int) -> int:
    """The smallest multiple of ``multiple`` that is at least ``value``; 0 stays 0."""
    return -(-value // multiple) * multiple


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class SlotIndex:
    """Where each (row, slot) pair stands once the pairs are grouped by key; keys are experts, or ranks.

    Grouped rows are ordered by key, within a key by row, and each key's group is followed by its padding.

    Attributes:
        num_rows: S, rows before grouping.
        top_k: K, slots per row.
        num_grouped: R, grouped rows with padding.
        source_R: int64 (R,), the row a grouped row is a copy of; 0 on padding.
        slot_N: int64 (N,), flat (row * K + slot) of each real grouped row, in grouped order.
        place_N: int64 (N,), grouped position of each of those; None when there is no padding (position = order).
        byrow_N: int64 (N,), grouped positions of the real pairs in (row, slot) order.
        cu_S: int64 (S+1,), where each row's pairs begin in ``byrow_N``.
        padding: int64 (R-N,), grouped positions that are padding, or None.
        spare: rows that a buffer of grouped rows needs behind its last, for what has no place.
    """

    spare: ClassVar[int] = 0
    num_rows: int
    top_k: int
    num_grouped: int
    source_R: Tensor
    slot_N: Tensor
    place_N: Tensor | None
    byrow_N: Tensor
    cu_S: Tensor
    padding: Tensor | None

    def to_grouped(self, values_SK: Tensor) -> Tensor:
        """One value per pair -> (R,) by grouped row, 0 on padding. Values of pairs without a key are never read."""
        real = values_SK.take(self.slot_N)
        if self.place_N is None:
            return real
        return real.new_zeros(self.num_grouped).index_copy_(0, self.place_N, real)

    def to_slots(self, values_R: Tensor) -> Tensor:
        """The reverse: (R,) -> (S, K), 0 for pairs without a key. Values on padding are never read."""
        real = values_R if self.place_N is None else values_R.index_select(0, self.place_N)
        slots = real.new_zeros(self.num_rows * self.top_k)
        return slots.index_copy_(0, self.slot_N, real).view(self.num_rows, self.top_k)

    def source_or_none(self) -> Tensor:
        """int64 (R,): the row that a grouped row is a copy of, -1 on padding."""
        return self.source_R if self.padding is None else self.source_R.index_fill(0, self.padding, -1)

    def tensors(self) -> list[Tensor]:
        """All of it as tensors, for an operator to return; ``index_from`` puts them together again."""
        tables = [self.source_R, self.slot_N, self.byrow_N, self.cu_S]
        return tables if self.place_N is None or self.padding is None else [*tables, self.place_N, self.padding]

    def in_row_order(self, values_SK: Tensor) -> Tensor:
        """One value per pair -> (N,) in (row, slot) order, without the pairs that have no key."""
        return self.to_grouped(values_SK).index_select(0, self.byrow_N)


def group_slots(keys_SK: Tensor, counts: Sequence[int], pad_multiple: int = 1) -> SlotIndex:
    """Group the pairs of a key table.

    Args:
        keys_SK: int16, int32 or int64 (S, K); a pair whose key is outside ``[0, len(counts))`` belongs to no group.
        counts: pairs per key, on the host.
        pad_multiple: each group's length is rounded up to this; empty groups stay empty.

    Cost: one stable sort of S*K keys, one of N indices, else single passes; no host sync.
    """
    num_rows, top_k = keys_SK.shape
    real, device = sum(counts), keys_SK.device
    # Without the sign bit, negative keys sort behind all groups, like those beyond the last.
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
        source_R=source_R,
        slot_N=slot_N,
        place_N=place_N,
        byrow_N=byrow_N,
        cu_S=torch.searchsorted(byrow.values, firsts_S),
        padding=padding,
    )


def count_values(values_N: Tensor, length: int) -> Tensor:
    """int64 (length,): how often each of ``range(length)`` stands in the int64 (N,). No host sync."""
    if values_N.device.type == "cpu":
        return torch.bincount(values_N, minlength=length)  # which on a GPU reads the largest value
    counts = torch.zeros(length, dtype=torch.int64, device=values_N.device)
    return counts.scatter_add_(0, values_N, torch.ones_like(values_N))


def true_places(mask: Tensor, count: int | None) -> Tensor:
    """int64 (count, dims), in order: where the mask is True, ``count`` times as the host knows. No host sync.

    On the CPU the count is not needed.
    """
    if mask.is_cpu:
        return mask.nonzero()  # three times as fast here; on a GPU it reads the count
    assert count is not None
    return torch.nonzero_static(mask, size=count)


def index_from(tensors: Sequence[Tensor], top_k: int) -> SlotIndex:
    """The index whose ``tensors()`` these are."""
    source_R, slot_N, byrow_N, cu_S = tensors[:4]
    place_N, padding = tensors[4:] if len(tensors) > 4 else (None, None)
    return SlotIndex(
        num_rows=cu_S.shape[0] - 1,
        top_k=top_k,
        num_grouped=source_R.shape[0],
        source_R=source_R,
        slot_N=slot_N,
        place_N=place_N,
        byrow_N=byrow_N,
        cu_S=cu_S,
        padding=padding,
    )


def blank_index(
    num_edges: int, top_k: int, pad_multiple: int, *, new_size: Callable[[], int], device: torch.device
) -> SlotIndex:
    """What ``group_slots`` gives for ``num_edges - 1`` rows, without values: for tracing, by ``new_size`` symbols."""
    real = new_size()
    lengths = [real, real, real, num_edges]
    if pad_multiple > 1:
        lengths = [new_size(), *lengths[1:], real, new_size()]
    return index_from([torch.empty(length, dtype=torch.int64, device=device) for length in lengths], top_k)


def running_total(counts: Tensor) -> Tensor:
    """int64 (n+1,): 0, then the inclusive sums of the (n,) counts."""
    total = torch.zeros(counts.shape[0] + 1, dtype=torch.int64, device=counts.device)
    torch.cumsum(counts, 0, out=total[1:])
    return total


def _with_padding(counts: Sequence[int], multiple: int, device: torch.device) -> tuple[Tensor, Tensor, int]:
    """Grouped positions of the real rows, those of the padding, and their total."""
    real, total = sum(counts), sum(round_up(count, multiple) for count in counts)
    counts_L = torch.tensor(counts, dtype=torch.int64, device="cpu")  # whatever torch.set_default_device says
    gaps_L = -counts_L % multiple
    shift_L = (gaps_L.cumsum(0) - gaps_L).to(device, non_blocking=True)
    shift_N = shift_L.repeat_interleave(counts_L.to(device, non_blocking=True), output_size=real)
    place_N = torch.arange(real, device=device) + shift_N
    is_padding = torch.ones(total, dtype=torch.bool, device=device).index_fill_(0, place_N, 0)
    return place_N, true_places(is_padding, total - real).view(-1), total
