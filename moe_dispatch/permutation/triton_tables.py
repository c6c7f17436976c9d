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


@triton.jit
def _pairs(ids, row, num_rows, row_stride, top_k, first, experts, size, targets: tl.constexpr, block: tl.constexpr):
    """Return how many slots of each of ``block`` rows belong to each of ``targets`` ranks, int32 (block, targets)."""
    target = tl.arange(0, targets)[None, :]
    found = tl.zeros((block, targets), tl.int32)
    for k in range(top_k):
        expert = tl.load(ids + row * row_stride + k, mask=row < num_rows, other=-1).to(tl.int64) - first
        owner = tl.where((row < num_rows) & (expert >= 0), expert // experts, size)
        found += ((owner[:, None] == target) & (target < size)).to(tl.int32)
    return found


@triton.jit(do_not_specialize=["num_rows", "first"])
def pairs_kernel(
    ids, pairs, slots, num_rows, row_stride, top_k, first, experts, size, targets: tl.constexpr, block: tl.constexpr
):
    """Count, for each block of rows and each rank, the rows that have an expert there, and their slots there."""
    row = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    found = _pairs(ids, row, num_rows, row_stride, top_k, first, experts, size, targets, block)
    to = tl.program_id(0).to(tl.int64) * targets + tl.arange(0, targets)
    tl.store(pairs + to, tl.sum((found > 0).to(tl.int32), 0))
    tl.store(slots + to, tl.sum(found, 0))


@triton.jit(do_not_specialize=["num_rows", "first", "num_blocks", "pair_rows"])
def places_kernel(
    ids,
    pairs,
    slots,
    source,
    member,
    cu,
    busiest,
    slots_of,
    num_rows,
    row_stride,
    top_k,
    first,
    experts,
    size,
    num_blocks,
    pair_rows,
    fixed: tl.constexpr,
    targets: tl.constexpr,
    block: tl.constexpr,
):
    """Give each pair of a row and a rank its place among the packets, from the counts of ``pairs_kernel``.

    With a fixed size, a rank has ``pair_rows`` places, and ``source`` gets -1 for those that stay empty.
    """
    row = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    target, step = tl.arange(0, targets), tl.arange(0, 16)[:, None]
    before, total = tl.zeros((targets,), tl.int64), tl.zeros((targets,), tl.int64)
    of_slots = tl.zeros((targets,), tl.int64)
    for begin in range(0, num_blocks, 16):
        number = begin + step
        at, inside = number * targets + target[None, :], number < num_blocks
        count = tl.load(pairs + at, mask=inside, other=0).to(tl.int64)
        total += tl.sum(count, 0)
        before += tl.sum(tl.where(number < tl.program_id(0), count, 0), 0)
        if fixed:
            of_slots += tl.sum(tl.load(slots + at, mask=inside, other=0).to(tl.int64), 0)
    if fixed:
        begins = target.to(tl.int64) * pair_rows
        empty = (row[:, None] >= total[None, :]) & (row[:, None] < pair_rows) & (target[None, :] < size)
        tl.store(source + begins[None, :] + row[:, None], tl.full((block, targets), -1, tl.int64), mask=empty)
    else:
        begins = tl.cumsum(total, 0) - total
    marked = _pairs(ids, row, num_rows, row_stride, top_k, first, experts, size, targets, block) > 0
    mark = marked.to(tl.int64)
    place = begins[None, :] + before[None, :] + tl.cumsum(mark, 0) - mark
    tl.store(source + place, tl.broadcast_to(row[:, None], (block, targets)), mask=marked)
    of_row = tl.sum(mark, 1)
    edge = tl.sum(before) + tl.cumsum(of_row, 0) - of_row
    tl.store(member + edge[:, None] + tl.cumsum(mark, 1) - mark, place, mask=marked)
    tl.store(cu + row, edge, mask=row <= num_rows)
    if fixed:
        tl.store(busiest, tl.max(total, 0), mask=tl.program_id(0) == 0)
        tl.store(slots_of + target, of_slots, mask=(target < size) & (tl.program_id(0) == 0))


@triton.jit(do_not_specialize=["num_places", "pair_rows"])
def slots_kernel(
    weights,
    ids,
    source,
    notes,
    out_weights,
    out_ids,
    out_notes,
    num_places,
    pair_rows,
    top_k,
    weights_stride,
    ids_stride,
    notes_stride,
    columns: tl.constexpr,
    block: tl.constexpr,
):
    """Write the weights and ids of row ``source[i]`` to packet i, ids of -1 where the source is negative.

    With ``notes``, the first of each ``pair_rows`` packets gets one of them.
    """
    at = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    row = tl.load(source + at, mask=at < num_places, other=-1)
    column = tl.arange(0, columns)[None, :]
    inside = (at[:, None] < num_places) & (column < top_k)
    exists = inside & (row[:, None] >= 0)
    weight = tl.load(weights + row[:, None] * top_k + column, mask=exists, other=0)
    tl.store(out_weights + at[:, None] * weights_stride + column, weight, mask=inside)
    expert = tl.load(ids + row[:, None] * top_k + column, mask=exists, other=-1)
    tl.store(out_ids + at[:, None] * ids_stride + column, expert.to(out_ids.dtype.element_ty), mask=inside)
    if notes is not None:
        first = (at < num_places) & (at % pair_rows == 0)
        note = tl.load(notes + at // pair_rows, mask=first, other=0)
        tl.store(out_notes + at * notes_stride, note.to(tl.int32), mask=first)


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


def send_places(
    ids_TK: Tensor, experts: int, size: int, *, first: int = 0, pair_rows: int | None = None
) -> tuple[Tensor, ...]:
    """Give each pair of a row and a rank that owns one of its experts a place among the packets.

    Args:
        ids_TK: Integer (T, K), expert ids; -1 for no expert. Rows may be strided.
        experts: Number of experts of each rank.
        size: P, the number of ranks.
        first: Number of the first expert of the first rank. Experts before it, and behind those of the last rank, are
            ignored.
        pair_rows: Number of places for each rank, at least T; None for as many as its rows need.

    Returns:
        ``source_B``, ``member_B`` and ``cu_T`` of a ``Leg``; with ``pair_rows`` also the most rows of a rank, int64 (),
        and the number of slots of each rank, int64 (P,). ``source_B`` is -1 in places that stay empty. Without
        ``pair_rows``, the first two are as long as if all slots of a row had experts on different ranks.

    Cost: two launches.
    """
    (num_rows, top_k), new = ids_TK.shape, partial(torch.empty, dtype=torch.int64, device=ids_TK.device)
    targets, fixed = triton.next_power_of_2(size), pair_rows is not None
    block = min(128, max(16, 4096 // targets))
    num_blocks = triton.cdiv(max(num_rows + 1, pair_rows or 0), block)
    pairs, slots = torch.empty(2, num_blocks, targets, dtype=torch.int32, device=ids_TK.device).unbind()
    source_B = new(num_rows * min(size, top_k) if pair_rows is None else size * pair_rows)
    member_B, cu_T = new(num_rows * (size if fixed else min(size, top_k))), new(num_rows + 1)
    busiest, slots_P = (new(()), new(size)) if fixed else (None, None)
    shapes: Any = {"targets": targets, "block": block, "num_warps": 4, "enable_fp_fusion": False}
    given = (num_rows, ids_TK.stride(0), top_k, first, experts, size)
    assert ids_TK.stride(1) == 1 or top_k == 1
    with torch.cuda.device_of(ids_TK):
        pairs_kernel[(num_blocks,)](ids_TK, pairs, slots, *given, **shapes)
        places_kernel[(num_blocks,)](
            *(ids_TK, pairs, slots, source_B, member_B, cu_T, busiest, slots_P, *given, num_blocks, pair_rows or 0),
            fixed=fixed,
            **shapes,
        )
    found = source_B, member_B, cu_T
    return (*found, busiest, slots_P) if busiest is not None and slots_P is not None else found


def pack_slots(
    weights_TK: Tensor,
    ids_TK: Tensor,
    source_B: Tensor,
    out_BK: tuple[Tensor, Tensor],
    notes: tuple[Tensor, Tensor] | None = None,
) -> None:
    """Write weights and ids into packets.

    Args:
        weights_TK: Weights of the rows.
        ids_TK: int64, expert ids of the rows.
        source_B: int64, the row of each packet; negative for a packet without one, which gets ids of -1.
        out_BK: Strided views of the weights and of the ids in the packets.
        notes: A note for each of P ranks, int64 (P,); and a strided view of the notes in the packets, int32 (B, 1). The
            first packet of each rank gets one. None if there are no notes.

    Cost: one launch.
    """
    (num_places, top_k), (of_notes, out_notes) = out_BK[0].shape, notes or (None, None)
    columns = triton.next_power_of_2(top_k)
    block = max(1, _BLOCK // columns)
    if num_places:
        with torch.cuda.device_of(ids_TK):
            slots_kernel[(triton.cdiv(num_places, block),)](
                *(weights_TK.contiguous(), ids_TK.contiguous(), source_B, of_notes, *out_BK, out_notes, num_places),
                *(1 if of_notes is None else num_places // len(of_notes), top_k, *(out.stride(0) for out in out_BK)),
                0 if out_notes is None else out_notes.stride(0),
                columns=columns,
                block=block,
                num_warps=4,
                enable_fp_fusion=False,
            )
