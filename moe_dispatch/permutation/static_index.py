"""The index of a reorder whose sizes are fixed beforehand: how many pairs there are is known to the device only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, final

import torch
from torch import Tensor

from moe_dispatch.permutation.index import SlotIndex, running_total


@final
@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class StaticIndex(SlotIndex):
    """A ``SlotIndex`` of fixed shapes, N = S * K and R as given.

    Behind the real pairs, the entries of ``slot_N`` and ``byrow_N`` are any valid ones, and ``place_N`` is R, a
    position that every buffer of grouped rows has to spare; ``padding`` likewise ends in R. ``source_R`` is 0 also on
    the slack behind the last group.

    Attributes:
        filled_R: int64 (R,), ``source_R``, but -1 on padding and slack.
        real_L: int64 (L,), pairs in each group, without those that were dropped.
        padded_L: int64 (L,), the same with padding.
        needed: int64 (), pairs that have a key, with those that were dropped.
    """

    spare: ClassVar[int] = 1
    filled_R: Tensor
    real_L: Tensor
    padded_L: Tensor
    needed: Tensor

    def source_or_none(self) -> Tensor:
        return self.filled_R

    def tensors(self) -> list[Tensor]:
        """All of it as tensors, for an operator to return; ``static_index_from`` puts them together again."""
        assert self.place_N is not None
        tables = [self.source_R, self.slot_N, self.byrow_N, self.cu_S, self.place_N, self.filled_R]
        counts = [self.real_L.clone(), self.padded_L, self.needed]  # real_L is returned beside them
        return [*tables, *counts] if self.padding is None else [*tables, *counts, self.padding]

    def to_grouped(self, values_SK: Tensor) -> Tensor:
        assert self.place_N is not None
        values_N = values_SK.reshape(-1).index_select(0, self.slot_N)
        grouped = values_N.new_zeros(self.num_grouped + 1).index_copy_(0, self.place_N, values_N)
        return grouped.resize_(self.num_grouped)  # not a view: it may be written to

    def to_slots(self, values_R: Tensor) -> Tensor:
        assert self.place_N is not None
        values_N = values_R.index_select(0, self.place_N.clamp(max=self.num_grouped - 1))
        values_N = torch.where(self.place_N < self.num_grouped, values_N, 0)
        return torch.empty_like(values_N).index_copy_(0, self.slot_N, values_N).view(self.num_rows, self.top_k)


def group_statically(
    keys_SK: Tensor, num_keys: int, *, rows: int, buffer_rows: int, pad_multiple: int, weights_SK: Tensor | None
) -> StaticIndex:
    """Group the pairs of a key table into a buffer of fixed size.

    Args:
        keys_SK: int16, int32 or int64 (S, K), S at least 1; a pair whose key is outside ``[0, num_keys)`` belongs to no
            group.
        num_keys: L.
        rows: how many pairs there is room for. Of more, the lightest are dropped; of equal ones the last.
        buffer_rows: R, room for ``rows`` and their padding.
        pad_multiple: each group's length is rounded up to this; empty groups stay empty.
        weights_SK: floating (S, K), what decides who is dropped; None where no more than ``rows`` pairs can come.

    Cost: two stable sorts of S*K keys, one more with ``weights_SK``, else single passes; no host sync.
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
    return StaticIndex(
        num_rows=num_rows,
        top_k=top_k,
        num_grouped=buffer_rows,
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


def static_index_from(tensors: Sequence[Tensor], top_k: int) -> StaticIndex:
    """The index whose ``tensors()`` these are."""
    source_R, slot_N, byrow_N, cu_S, place_N, filled_R, real_L, padded_L, needed, *padding = tensors
    return StaticIndex(
        num_rows=cu_S.shape[0] - 1,
        top_k=top_k,
        num_grouped=source_R.shape[0],
        source_R=source_R,
        filled_R=filled_R,
        slot_N=slot_N,
        place_N=place_N,
        byrow_N=byrow_N,
        cu_S=cu_S,
        padding=padding[0] if padding else None,
        real_L=real_L,
        padded_L=padded_L,
        needed=needed,
    )


def blank_static_index(
    num_rows: int, top_k: int, num_keys: int, *, buffer_rows: int, pad_multiple: int, device: torch.device
) -> StaticIndex:
    """What ``group_statically`` gives for so many rows, without values: for tracing."""
    pairs, padding = num_rows * top_k, num_keys * (pad_multiple - 1)
    tables = [(buffer_rows,), (pairs,), (pairs,), (num_rows + 1,), (pairs,), (buffer_rows,)]
    shapes = [*tables, (num_keys,), (num_keys,), (), *[(padding,)] * (pad_multiple > 1)]
    return static_index_from([torch.empty(shape, dtype=torch.int64, device=device) for shape in shapes], top_k)


def heaviest(weights_N: Tensor, is_real_N: Tensor, room: int) -> Tensor:
    """bool (N,): the real entries, but of more than ``room`` only the heaviest; of equal ones the first.

    A NaN counts as heaviest, so that it is seen rather than dropped.
    """
    lightness_N = -torch.where(weights_N.isnan(), float("inf"), weights_N)
    # What is not real is NaN, which sorts behind every number.
    order_N = torch.where(is_real_N, lightness_N, float("nan")).sort(stable=True).indices
    return torch.zeros_like(is_real_N).index_fill_(0, order_N[:room], True) & is_real_N


def front(values_N: Tensor, is_kept_N: Tensor) -> Tensor:
    """The kept values in their order, and zeros behind them: a compaction of fixed size."""
    count = len(values_N)
    target_N = torch.where(is_kept_N, is_kept_N.cumsum(0) - 1, count)
    return values_N.new_zeros(count + 1).index_copy_(0, target_N, values_N)[:count]


def _padding(real_L: Tensor, padded_L: Tensor, pad_multiple: int, nowhere: int) -> Tensor:
    """Positions of the padding, ``nowhere`` for the rest of the most that there can be: L * (pad_multiple - 1)."""
    step = torch.arange(pad_multiple - 1, device=real_L.device)
    at = (padded_L.cumsum(0) - padded_L + real_L).unsqueeze(1) + step
    return torch.where(step < (padded_L - real_L).unsqueeze(1), at, nowhere).view(-1)


def index_bytes(num_rows: int, top_k: int, num_keys: int, *, buffer_rows: int, pad_multiple: int) -> int:
    """Bytes of all tables of a ``StaticIndex``: S, K, L and R as in ``group_statically``."""
    pairs = num_rows * top_k
    of_pairs = 3 * pairs + 1  # slot_N, place_N, byrow_N with one to spare
    of_rows = num_rows + 1 + 2 * buffer_rows + 1  # cu_S, source_R, and filled_R with the row to spare
    of_keys = num_keys + 1 + num_keys + 1  # real_L with the pairs that have none, padded_L, needed
    of_padding = num_keys * (pad_multiple - 1)
    return 8 * (of_pairs + of_rows + of_keys + of_padding)
