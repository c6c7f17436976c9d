"""The tables of a one-rank reorder, made by Triton kernels. A kernel does in one launch what torch does in ten or more.

A GPU takes one or two microseconds for each launch, which small batches feel. All kernels work on integers, except
``merge_kernel``, whose sums have a fixed order. So every run gives the same bits. Positions are 64 bits wide.

Triton compiles a kernel anew for an integer that is 1 or that 16 divides. Sizes that change from step to step are not
specialised, so that no step waits for the compiler.

Legend: as in ``index.py``.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from moe_dispatch.communication import to_device
from moe_dispatch.permutation.index import SlotIndex, kept_keys, round_up

_BLOCK = 1024
_OPTIONS: Any = {"block": _BLOCK, "num_warps": 4, "enable_fp_fusion": False}


@triton.jit(do_not_specialize=["num_slots", "grouped", "num_padding"])
def start_kernel(
    keys,
    cleaned,
    has_key,
    real,
    source,
    filled,
    place,
    byrow,
    padding,
    num_slots,
    num_keys,
    grouped,
    num_padding,
    fixed: tl.constexpr,
    block: tl.constexpr,
):
    """Write L for each slot without a key, and mark the others.

    With a fixed size, also count the slots of each key, and fill the tables with what stands where no slot is placed.
    """
    at = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    inside = at < num_slots
    key = tl.load(keys + at, mask=inside, other=-1)
    exists = inside & (key >= 0) & (key < num_keys)
    tl.store(cleaned + at, tl.where(exists, key, num_keys), mask=inside)
    tl.store(has_key + at, exists.to(tl.int64), mask=inside)
    if fixed:
        tl.atomic_add(real + key, tl.full((block,), 1, tl.int64), mask=exists)
        tl.store(place + at, tl.full((block,), grouped, tl.int64), mask=inside)
        tl.store(byrow + at, tl.zeros((block,), tl.int64), mask=inside)
        tl.store(source + at, tl.zeros((block,), tl.int64), mask=at < grouped)
        tl.store(filled + at, tl.full((block,), -1, tl.int64), mask=at < grouped)
        tl.store(padding + at, tl.full((block,), grouped, tl.int64), mask=at < num_padding)


@triton.jit
def edges_kernel(real, padded, shifts, ends, needed, num_keys, multiple, block: tl.constexpr):
    """Write for each key its padded count, the padding of all keys before it, and where its real rows would end."""
    key = tl.arange(0, block)
    inside = key < num_keys
    count = tl.load(real + key, mask=inside, other=0)
    gap = (multiple - count % multiple) % multiple
    end = tl.cumsum(count, 0)
    tl.store(padded + key, count + gap, mask=inside)
    tl.store(shifts + key, tl.cumsum(gap, 0) - gap, mask=inside)
    tl.store(ends + key, end, mask=inside)
    tl.store(needed, tl.sum(count))


@triton.jit(do_not_specialize=["num_sorted", "num_rows"])
def place_kernel(
    slots,
    cleaned,
    seen,
    real,
    shifts,
    ends,
    source,
    filled,
    place,
    byrow,
    cu,
    padding,
    num_sorted,
    num_keys,
    entries,
    num_rows,
    top_k,
    multiple,
    is_padded: tl.constexpr,
    fixed: tl.constexpr,
    block: tl.constexpr,
):
    """Write the tables of a ``SlotIndex``. Element ``at`` has a part in each of the three.

    The first part places the slot that is number ``at`` in the order of the keys. ``seen`` holds the number of slots
    with a key up to and including each slot. In ``cleaned``, each key has ``entries`` entries. The second part writes
    ``cu[at]``. The third part is number ``at % (multiple - 1)`` of the padding of key ``at // (multiple - 1)``, if the
    key has so much padding.
    """
    at = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    sorted_ = at < num_sorted
    slot = tl.load(slots + at, mask=sorted_, other=0)
    key = tl.load(cleaned + slot, mask=sorted_, other=0) // entries
    placed = sorted_ & (key < num_keys)
    to = at
    if is_padded:
        to += tl.load(shifts + key, mask=placed, other=0)
        if not fixed:
            tl.store(place + at, to, mask=placed)
    if fixed:
        tl.store(place + at, to, mask=placed)
        tl.store(filled + to, slot // top_k, mask=placed)
    tl.store(source + to, slot // top_k, mask=placed)
    tl.store(byrow + tl.load(seen + slot, mask=placed, other=1) - 1, to, mask=placed)
    before = tl.load(seen + at * top_k - 1, mask=(at > 0) & (at <= num_rows), other=0)
    tl.store(cu + at, before, mask=at <= num_rows)
    if is_padded:
        owner, number = at // (multiple - 1), at % (multiple - 1)
        exists = owner < num_keys
        count = tl.load(real + owner, mask=exists, other=0)
        exists = exists & (number < (multiple - count % multiple) % multiple)
        shift = tl.load(shifts + owner, mask=exists, other=0)
        position = tl.load(ends + owner, mask=exists, other=0) + shift + number
        if fixed:
            tl.store(padding + at, position, mask=exists)
        else:
            tl.store(padding + shift + number, position, mask=exists)
            tl.store(source + position, tl.zeros((block,), tl.int64), mask=exists)


@triton.jit(do_not_specialize=["num_rows"])
def merge_kernel(
    ids, weights, merged_ids, merged, firsts, num_rows, top_k: tl.constexpr, columns: tl.constexpr, block: tl.constexpr
):
    """Merge the slots of a row that name one expert. ``firsts`` gets the slot whose weight has the sum, or -1."""
    row = (tl.program_id(0).to(tl.int64) * block + tl.arange(0, block))[:, None]
    column = tl.arange(0, columns)[None, :]
    inside = (row < num_rows) & (column < top_k)
    to = row * top_k + column
    mine = tl.load(ids + to, mask=inside, other=-1)
    total = tl.zeros((block, columns), merged.dtype.element_ty)
    first = tl.full((block, columns), columns, tl.int64)
    for j in range(top_k):
        other = tl.load(ids + row * top_k + j, mask=row < num_rows, other=-1)
        weight = tl.load(weights + row * top_k + j, mask=row < num_rows, other=0)
        total += tl.where(mine == other, weight, 0)
        first = tl.where((mine == other) & (first == columns), j, first)
    is_first = (first == column) & (mine >= 0)
    tl.store(merged_ids + to, tl.where(is_first | (mine < 0), mine, -1), mask=inside)
    tl.store(merged + to, tl.where(is_first, total, 0), mask=inside)
    tl.store(firsts + to, tl.where(mine >= 0, first, -1), mask=inside)


@triton.jit(do_not_specialize=["num_ids"])
def valid_kernel(ids, tokens, valid, outcome, num_ids, num_experts, top_k, marks: tl.constexpr, block: tl.constexpr):
    """Replace invalid ids by -1. Count them in ``outcome``, or with ``marks`` lower it to -1 if there are any.

    ``tokens`` says which rows are tokens; the ids of the others become -1 too. None if all are.
    """
    at = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    inside = at < num_ids
    exists = inside
    if tokens is not None:
        exists = inside & (tl.load(tokens + at // top_k, mask=inside, other=0) != 0)
    given = tl.load(ids + at, mask=exists, other=-1)
    invalid = (given < -1) | (given >= num_experts)
    tl.store(valid + at, tl.where(invalid, -1, given), mask=inside)
    count = tl.sum(invalid.to(tl.int64))
    if marks:
        tl.atomic_min(outcome, -1, mask=count > 0)
    else:
        tl.atomic_add(outcome, count, mask=count > 0)


@triton.jit(do_not_specialize=["num_ids"])
def owners_kernel(ids, owners, counts, num_ids, slots, width, block: tl.constexpr):
    """Write 1 + the rank of each id, 0 for -1. Count id e of rank r in ``counts[(r + 1) * width + e]``."""
    at = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    inside = at < num_ids
    shifted = tl.load(ids + at, mask=inside, other=-1) + slots
    owner = shifted // slots
    tl.store(owners + at, owner, mask=inside)
    place = owner * width + shifted % slots
    tl.atomic_add(counts + place, tl.full((block,), 1, tl.int64), mask=inside & (owner > 0))


@triton.jit(do_not_specialize=["num_rows", "num_places"])
def members_kernel(
    ids, marks, slots, source, is_empty, member, num_rows, top_k, size, experts, num_places, block: tl.constexpr
):
    """Mark each pair of a row and a rank that owns one of its experts, ordered by row and again ordered by rank.

    Also count the slots of each rank, and fill the tables with what stands where no pair is placed.
    """
    at = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    pairs = tl.full((), 1, tl.int64) * num_rows * size
    inside, row, rank = at < pairs, at // size, at % size
    found = tl.zeros((block,), tl.int64)
    for k in range(top_k):
        expert = tl.load(ids + row * top_k + k, mask=inside, other=-1)
        found += ((expert >= 0) & (expert // experts == rank)).to(tl.int64)
    mark = (found > 0).to(tl.int64)
    tl.store(marks + at, mark, mask=inside)
    tl.store(marks + pairs + rank * num_rows + row, mark, mask=inside)
    tl.atomic_add(slots + rank, found, mask=inside & (found > 0))
    tl.store(member + at, tl.zeros((block,), tl.int64), mask=inside)
    tl.store(source + at, tl.zeros((block,), tl.int64), mask=at < num_places)
    tl.store(is_empty + at, tl.full((block,), 1, tl.uint8), mask=at < num_places)


@triton.jit(do_not_specialize=["num_rows"])
def places_kernel(
    marks,
    sums,
    source,
    is_empty,
    member,
    cu,
    busiest,
    num_rows,
    size,
    pair_rows,
    ranks: tl.constexpr,
    block: tl.constexpr,
):
    """Give each marked pair its place in the send buffer. ``sums`` are the inclusive sums of ``marks``."""
    at = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    pairs = tl.full((), 1, tl.int64) * num_rows * size
    inside, row, rank = at < pairs, at // size, at % size
    marked = inside & (tl.load(marks + at, mask=inside, other=0) > 0)
    by_rank = sums + pairs  # its entry -1 is the number of all marks
    begin = tl.load(by_rank + rank * num_rows - 1, mask=marked, other=0)
    place = rank * pair_rows + tl.load(by_rank + rank * num_rows + row, mask=marked, other=0) - begin - 1
    tl.store(source + place, row, mask=marked)
    tl.store(is_empty + place, tl.zeros((block,), tl.uint8), mask=marked)
    tl.store(member + tl.load(sums + at, mask=marked, other=1) - 1, place, mask=marked)
    before = tl.load(sums + at * size - 1, mask=(at > 0) & (at <= num_rows), other=0)
    tl.store(cu + at, before, mask=at <= num_rows)
    if tl.program_id(0) == 0:
        one = tl.arange(0, ranks).to(tl.int64)
        exists = (one < size) & (num_rows > 0)
        end = tl.load(by_rank + (one + 1) * num_rows - 1, mask=exists, other=0)
        tl.store(busiest, tl.max(end - tl.load(by_rank + one * num_rows - 1, mask=exists, other=0), 0))


def group_slots(
    keys_SK: Tensor,
    counts: Sequence[int],
    pad_multiple: int = 1,
    *,
    entries_per_key: int = 1,
    real_L: Tensor | None = None,
) -> SlotIndex:
    """Do what ``index.group_slots`` does, with a ``real_L`` of its own.

    Cost: a stable sort, a scan, two launches, a copy from pinned memory.
    """
    padded = [round_up(count, pad_multiple) for count in counts]
    shifts = accumulate((each - count for each, count in zip(padded[:-1], counts, strict=False)), initial=0)
    packed = to_device([*counts, *padded, *shifts, *accumulate(counts)], keys_SK.device)
    sizes, of_keys = (sum(counts), sum(padded)), packed.view(4, len(counts)).unbind()
    return _group(keys_SK, sizes, of_keys, pad_multiple, entries_per_key, counts=counts)


def group_statically(
    keys_SK: Tensor, num_keys: int, *, rows: int, buffer_rows: int, pad_multiple: int, weights_SK: Tensor | None
) -> SlotIndex:
    """Do what ``index.group_statically`` does. Cost: a sort, a scan, four launches; more to drop slots."""
    wanted = None
    if weights_SK is not None:
        kept_N, wanted = kept_keys(keys_SK, num_keys, weights_SK, rows)
        keys_SK = kept_N.view(keys_SK.shape)
    real_L = torch.zeros(num_keys, dtype=torch.int64, device=keys_SK.device)
    of_keys = (real_L, *real_L.new_empty(3, num_keys).unbind())
    index = _group(keys_SK, (keys_SK.numel(), buffer_rows), of_keys, pad_multiple, 1, counts=None)
    return index if wanted is None else replace(index, needed=wanted)


def _group(
    keys_SK: Tensor,
    sizes: tuple[int, int],
    of_keys: Sequence[Tensor],
    pad_multiple: int,
    entries_per_key: int,
    *,
    counts: Sequence[int] | None,
) -> SlotIndex:
    """Make an index.

    Args:
        keys_SK: As in ``group_slots``.
        sizes: N and R.
        of_keys: int64 (L,) each: ``real_L``, ``padded_L``, the padding before each key, and where its real rows would
            end. Without ``counts``, the first is 0 and the others may hold anything: kernels write them.
        pad_multiple: As in ``group_slots``.
        entries_per_key: As in ``group_slots``.
        counts: As in ``group_slots``; None for an index of fixed size.
    """
    (num_rows, top_k), (real, grouped), num_slots = keys_SK.shape, sizes, keys_SK.numel()
    real_L, padded_L, shifts_L, ends_L = of_keys
    is_padded, fixed, num_keys = pad_multiple > 1, counts is None, len(real_L)
    new = partial(torch.empty, dtype=torch.int64, device=keys_SK.device)
    source_R, byrow_N, cu_S, has_key = new(grouped), new(real), new(num_rows + 1), new(num_slots)
    position_N, filled_R = new(real) if is_padded or fixed else None, new(grouped) if fixed else None
    num_padding = num_keys * (pad_multiple - 1) if fixed else grouped - real
    padding, needed = new(num_padding) if is_padded else None, new(()) if fixed else None
    cleaned = torch.empty(num_slots, dtype=keys_SK.dtype, device=keys_SK.device)
    with torch.cuda.device_of(keys_SK):
        elements = max(num_slots, grouped, num_padding) if fixed else num_slots
        if elements:
            start_kernel[(triton.cdiv(elements, _BLOCK),)](
                *(keys_SK.contiguous(), cleaned, has_key),
                *((real_L, source_R, filled_R, position_N, byrow_N) if fixed else [None] * 5),
                # A pointer that no mask lets through: without padding there is no such table.
                *(padding if fixed and is_padded else has_key, num_slots, num_keys * entries_per_key),
                *(grouped, num_padding),
                fixed=fixed,
                **_OPTIONS,
            )
        slot_N, seen = cleaned.sort(stable=True).indices[:real], has_key.cumsum(0)
        if fixed:
            block = triton.next_power_of_2(num_keys)
            edges_kernel[(1,)](real_L, padded_L, shifts_L, ends_L, needed, num_keys, pad_multiple, block=block)
        place_kernel[(triton.cdiv(max(real, num_rows + 1, num_keys * (pad_multiple - 1)), _BLOCK),)](
            *(slot_N, cleaned, seen, real_L, shifts_L, ends_L, source_R, filled_R, position_N, byrow_N, cu_S),
            *(padding, real, num_keys, entries_per_key, num_rows, top_k, pad_multiple),
            is_padded=is_padded,
            fixed=fixed,
            **_OPTIONS,
        )
    return SlotIndex(
        num_rows=num_rows,
        top_k=top_k,
        num_grouped=grouped,
        pad_multiple=pad_multiple,
        source_R=source_R,
        filled_R=filled_R,
        slot_N=slot_N,
        position_N=position_N,
        byrow_N=byrow_N,
        cu_S=cu_S,
        padding=padding,
        counts=counts,
        real_L=real_L,
        padded_L=padded_L,
        needed=needed,
    )


def merge_slots(ids_TK: Tensor, weights_TK: Tensor, *, asks: bool) -> tuple[Tensor, Tensor]:
    """Do what ``index.merge_slots`` does, and never ask. Cost: one launch, and two in the backward."""
    if ids_TK.shape[1] == 1:
        return ids_TK, weights_TK
    merged: tuple[Tensor, Tensor] = _Merge.apply(ids_TK, weights_TK)  # type: ignore[no-untyped-call]
    return merged


class _Merge(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, ids_TK: Tensor, weights_TK: Tensor) -> tuple[Tensor, Tensor]:
        num_rows, top_k = ids_TK.shape
        ids_TK, weights_TK = ids_TK.contiguous(), weights_TK.contiguous()
        merged_ids, firsts, merged = (torch.empty_like(tensor) for tensor in (ids_TK, ids_TK, weights_TK))
        columns = triton.next_power_of_2(top_k)
        block = max(1, _BLOCK // columns)
        if num_rows:
            with torch.cuda.device_of(ids_TK):
                merge_kernel[(triton.cdiv(num_rows, block),)](
                    *(ids_TK, weights_TK, merged_ids, merged, firsts, num_rows),
                    top_k=top_k,
                    columns=columns,
                    block=block,
                    num_warps=4,
                    enable_fp_fusion=False,
                )
        ctx.mark_non_differentiable(merged_ids)
        ctx.save_for_backward(firsts)
        return merged_ids, merged

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (firsts,) = ctx.saved_tensors
        return None, grads[1].gather(1, firsts.clamp(min=0)).masked_fill(firsts < 0, 0)


def valid_ids(
    ids_TK: Tensor, num_experts: int, mark: int | None = None, *, valid_T: Tensor | None = None, asks: bool
) -> tuple[Tensor, Tensor]:
    """Do what ``index.valid_ids`` does. Cost: two launches."""
    outcome = torch.full((), mark or 0, dtype=torch.int64, device=ids_TK.device)
    ids_TK = ids_TK.contiguous()
    found_TK, num_ids = torch.empty_like(ids_TK), ids_TK.numel()
    if num_ids:
        with torch.cuda.device_of(ids_TK):
            valid_kernel[(triton.cdiv(num_ids, _BLOCK),)](
                *(ids_TK, valid_T, found_TK, outcome, num_ids, num_experts, ids_TK.shape[1]),
                marks=mark is not None,
                **_OPTIONS,
            )
    return found_TK, outcome


def count_owners(
    ids_TK: Tensor, num_local_experts: int, width: int, length: int, *, graph_safe: bool
) -> tuple[Tensor, Tensor]:
    """Do what ``index.count_owners`` does. Cost: two launches."""
    ids = ids_TK.contiguous()
    owners, counts = torch.empty_like(ids), torch.zeros(length, dtype=torch.int64, device=ids.device)
    if ids.numel():
        with torch.cuda.device_of(ids):
            owners_kernel[(triton.cdiv(ids.numel(), _BLOCK),)](
                *(ids, owners, counts, ids.numel(), num_local_experts, width), **_OPTIONS
            )
    return owners, counts


def send_places(ids_TK: Tensor, num_local_experts: int, size: int, pair_rows: int) -> tuple[Tensor, ...]:
    """Give each pair of a row and a destination rank a place in the send buffer, where there is room for every pair.

    Args:
        ids_TK: int64 (T, K), global expert ids; -1 for no expert.
        num_local_experts: L, the number of experts of each rank.
        size: Number of ranks.
        pair_rows: Number of places for each destination rank, at least T.

    Returns:
        The fields of a ``SendTable``, in their order; and int64 (size,), the number of slots of each rank.

    Cost: a scan and three launches.
    """
    ids, (num_rows, top_k) = ids_TK.contiguous(), ids_TK.shape
    pairs, num_places = num_rows * size, size * pair_rows
    slots, marks = torch.zeros(size, dtype=torch.int64, device=ids.device), ids.new_empty(2 * pairs)
    source_B, member_N = ids.new_empty(num_places), ids.new_empty(pairs)
    cu_T, busiest = ids.new_empty(num_rows + 1), ids.new_empty(())
    is_empty = torch.empty(num_places, dtype=torch.uint8, device=ids.device)
    with torch.cuda.device_of(ids):
        members_kernel[(triton.cdiv(max(pairs, num_places), _BLOCK),)](
            *(ids, marks, slots, source_B, is_empty, member_N, num_rows, top_k, size, num_local_experts, num_places),
            **_OPTIONS,
        )
        sums = marks.cumsum(0)
        places_kernel[(triton.cdiv(max(pairs, num_rows + 1), _BLOCK),)](
            *(marks, sums, source_B, is_empty, member_N, cu_T, busiest, num_rows, size, pair_rows),
            ranks=triton.next_power_of_2(size),
            **_OPTIONS,
        )
    return source_B, is_empty.view(torch.bool), member_N, cu_T, busiest, slots
