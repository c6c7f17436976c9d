"""Index arithmetic of a one-rank reorder: (row, slot) pairs grouped by key. Pure; no process group, no host sync."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor


def round_up(value: int, multiple: int) -> int:
    """The smallest multiple of ``multiple`` that is at least ``value``; 0 stays 0."""
    return -(-value // multiple) * multiple


@final
@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class SlotIndex:
    """Where each (row, slot) pair stands once the pairs are grouped by key; keys are experts, or ranks.

    Grouped rows are ordered by key, within a key by row, and each key's group is followed by its padding.

    Attributes:
        num_rows: S, rows before grouping.
        num_grouped: R, grouped rows with padding.
        source_R: int64 (R,), the row a grouped row is a copy of; 0 on padding.
        slot_N: int64 (N,), flat (row * K + slot) of each real grouped row, in grouped order.
        place_N: int64 (N,), grouped position of each of those; None when there is no padding (position = order).
        position_SK: int64 (S, K), grouped position of every pair, -1 for pairs without a key.
        byrow_slot_N: int64 (N,), flat (row * K + slot) in (row, slot) order.
        byrow_N: int64 (N,), grouped position of each of those.
        cu_S: int64 (S+1,), where each row's pairs begin in ``byrow_N``.
        padding: int64 (R-N,), grouped positions that are padding, or None.
    """

    num_rows: int
    num_grouped: int
    source_R: Tensor
    slot_N: Tensor
    place_N: Tensor | None
    position_SK: Tensor
    byrow_slot_N: Tensor
    byrow_N: Tensor
    cu_S: Tensor
    padding: Tensor | None

    def to_grouped(self, values_SK: Tensor) -> Tensor:
        """One value per pair -> (R,) by grouped row, 0 on padding. Values of pairs without a key are never read."""
        real = values_SK.reshape(-1).index_select(0, self.slot_N)
        if self.place_N is None:
            return real
        return real.new_zeros(self.num_grouped).index_copy_(0, self.place_N, real)

    def to_slots(self, values_R: Tensor) -> Tensor:
        """The reverse: (R,) -> (S, K), 0 for pairs without a key. Values on padding are never read."""
        real = values_R if self.place_N is None else values_R.index_select(0, self.place_N)
        out = real.new_zeros(self.position_SK.numel())
        return out.index_copy_(0, self.slot_N, real).view_as(self.position_SK)


def group_slots(keys_SK: Tensor, counts: Sequence[int], pad_multiple: int = 1) -> SlotIndex:
    """Group the pairs of a key table.

    Args:
        keys_SK: int16, int32 or int64 (S, K), key in ``[0, len(counts))`` or negative for none.
        counts: pairs per key, on the host.
        pad_multiple: each group's length is rounded up to this; empty groups stay empty.

    Cost: one stable sort of S*K keys, else passes over S*K or R indices; no host sync.
    """
    num_rows, top_k = keys_SK.shape
    real, device = sum(counts), keys_SK.device
    valid = keys_SK.reshape(-1) >= 0
    keys = torch.where(valid, keys_SK.reshape(-1), len(counts))
    slot_N = keys.sort(stable=True).indices[:real]
    row_N = slot_N.div(top_k, rounding_mode="floor")
    place_N, padding, padded = None, None, real
    if pad_multiple > 1:
        place_N, padding, padded = _with_padding(counts, pad_multiple, device)
        row_N = row_N.new_zeros(padded).index_copy_(0, place_N, row_N)
    places = torch.arange(real, device=device) if place_N is None else place_N
    position = slot_N.new_full((num_rows * top_k,), -1).index_copy_(0, slot_N, places)
    byrow_slot_N = torch.nonzero_static(valid, size=real).view(-1)
    cu_S = torch.zeros(num_rows + 1, dtype=torch.int64, device=device)
    torch.cumsum(valid.view(num_rows, top_k).sum(1), 0, out=cu_S[1:])
    return SlotIndex(
        num_rows=num_rows,
        num_grouped=padded,
        source_R=row_N,
        slot_N=slot_N,
        place_N=place_N,
        position_SK=position.view(num_rows, top_k),
        byrow_slot_N=byrow_slot_N,
        byrow_N=position.index_select(0, byrow_slot_N),
        cu_S=cu_S,
        padding=padding,
    )


def _with_padding(counts: Sequence[int], multiple: int, device: torch.device) -> tuple[Tensor, Tensor, int]:
    """Grouped positions of the real rows, those of the padding, and their total."""
    real, total = sum(counts), sum(round_up(count, multiple) for count in counts)
    counts_L = torch.tensor(counts, dtype=torch.int64)
    gaps_L = -counts_L % multiple
    shift_L = (gaps_L.cumsum(0) - gaps_L).to(device, non_blocking=True)
    shift_N = shift_L.repeat_interleave(counts_L.to(device, non_blocking=True), output_size=real)
    place_N = torch.arange(real, device=device) + shift_N
    is_padding = torch.ones(total, dtype=torch.bool, device=device).index_fill_(0, place_N, 0)
    return place_N, torch.nonzero_static(is_padding, size=total - real).view(-1), total
