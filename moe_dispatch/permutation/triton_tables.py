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
from moe_dispatch.permutation import index
from moe_dispatch.permutation.index import SlotIndex, kept_keys, round_up
from moe_dispatch.permutation.triton_launch import cdiv, kernel, next_power_of_2

_BLOCK = 1024
_MOST_BLOCKS = 128  # up to here, each program adds up the counts of all blocks
_MOST_COLUMNS = 1024  # a program compares slots with so many keys at most; with more, a sort costs less
_OPTIONS: Any = {"block": _BLOCK, "num_warps": 4, "enable_fp_fusion": False}


@triton.jit
def _columns(keys, slot, end, row_stride, top_k, first, num_entries, columns: tl.constexpr):
    """Return the entry of the key of each slot, ``num_entries`` without a key, and a 1 in the column of the entry."""
    inside = slot < end
    key = tl.load(keys + slot // top_k * row_stride + slot % top_k, mask=inside, other=-1).to(tl.int64) - first
    has_key = inside & (key >= 0) & (key < num_entries)
    entry = tl.where(has_key, key, num_entries)
    is_its = (entry[:, None] == tl.arange(0, columns)[None, :]) & inside[:, None]
    return has_key, is_its.to(tl.int32)


@kernel(do_not_specialize=["num_blocks"])
def running_kernel(table, num_blocks, width, columns: tl.constexpr, block: tl.constexpr):
    """Replace the counts of each block by their sums over the blocks before it. The row behind gets the totals."""
    column = (tl.program_id(0) * columns + tl.arange(0, columns)).to(tl.int64)[None, :]
    total = tl.zeros((columns,), tl.int32)
    for begin in range(0, num_blocks + 1, block):
        number = begin + tl.arange(0, block)[:, None]
        at = table + number * width + column
        count = tl.load(at, mask=number < num_blocks, other=0)
        tl.store(at, total[None, :] + tl.cumsum(count, 0) - count, mask=number <= num_blocks)
        total += tl.sum(count, 0)


@triton.jit
def _sums(table, num_blocks, is_running, width: tl.constexpr, columns: tl.constexpr):
    """Return the sums of a table of counts over the blocks before this one, and over all, int64 (columns,) each."""
    column = tl.arange(0, columns)
    before, total = tl.zeros((columns,), tl.int64), tl.zeros((columns,), tl.int64)
    if is_running:
        before += tl.load(table + tl.minimum(tl.program_id(0), num_blocks) * width + column)
        total += tl.load(table + num_blocks * width + column)
    else:
        for begin in range(0, num_blocks, 16):
            number = begin + tl.arange(0, 16)[:, None]
            count = tl.load(table + number * width + column[None, :], mask=number < num_blocks, other=0).to(tl.int64)
            total += tl.sum(count, 0)
            before += tl.sum(tl.where(number < tl.program_id(0), count, 0), 0)
    return before, total


@kernel(do_not_specialize=["num_slots", "first"])
def count_kernel(
    keys,
    table,
    num_slots,
    row_stride,
    top_k,
    first,
    num_entries,
    columns: tl.constexpr,
    step: tl.constexpr,
    block: tl.constexpr,
):
    """Count how many slots of each block have each entry, and how many have no key."""
    begin = tl.program_id(0).to(tl.int64) * block
    end = tl.minimum(begin + block, num_slots)
    count = tl.zeros((columns,), tl.int32)
    for at in range(begin, end, step):
        slot = at + tl.arange(0, step)
        _, is_its = _columns(keys, slot, end, row_stride, top_k, first, num_entries, columns)
        count += tl.sum(is_its, 0)
    tl.store(table + tl.program_id(0) * columns + tl.arange(0, columns), count)


@kernel(do_not_specialize=["num_slots", "first", "num_blocks", "is_running", "num_rows", "grouped"])
def place_kernel(
    keys,
    table,
    given_shifts,
    slots,
    source,
    filled,
    place,
    byrow,
    cu,
    padding,
    real,
    padded,
    needed,
    num_slots,
    row_stride,
    top_k,
    first,
    num_entries,
    num_blocks,
    is_running,
    num_rows,
    grouped,
    entries,
    multiple,
    is_padded: tl.constexpr,
    fixed: tl.constexpr,
    columns: tl.constexpr,
    gaps: tl.constexpr,
    step: tl.constexpr,
    block: tl.constexpr,
):
    """Write the tables of a ``SlotIndex``, from the counts of ``count_kernel`` or the sums of ``running_kernel``.

    The first programs place a block of slots each. The programs behind them write the padding of 8 keys each. With a
    fixed size, all of them write what stands where no slot is placed.
    """
    column = tl.arange(0, columns)
    before, total = _sums(table, num_blocks, is_running, columns, columns)
    is_key = column < num_entries
    num_real = tl.sum(tl.where(is_key, total, 0))
    gap = tl.where(is_key, (multiple - total % multiple) % multiple, 0)
    if given_shifts is None:
        shift = tl.cumsum(gap, 0) - gap
    else:
        shift = tl.load(given_shifts + column // entries, mask=is_key, other=0)
    end_of_key = tl.cumsum(total, 0)
    start, seen = end_of_key - total + before, tl.sum(tl.where(is_key, before, 0))
    begin = tl.program_id(0).to(tl.int64) * block
    end = tl.minimum(begin + block, num_slots)
    for at in range(begin, end, step):
        slot = at + tl.arange(0, step)
        has_key, is_its = _columns(keys, slot, end, row_stride, top_k, first, num_entries, columns)
        in_order = tl.sum(is_its * (start[None, :] + tl.cumsum(is_its, 0) - is_its), 1)
        to, row = in_order + tl.sum(is_its * shift[None, :], 1), slot // top_k
        marked = has_key.to(tl.int64)
        earlier = seen + tl.cumsum(marked, 0) - marked
        tl.store(source + to, row, mask=has_key)
        tl.store(byrow + earlier, to, mask=has_key)
        if fixed:
            tl.store(slots + in_order, slot, mask=slot < end)
            tl.store(place + in_order, tl.where(has_key, to, grouped), mask=slot < end)
            tl.store(filled + to, row, mask=has_key)
            tl.store(byrow + in_order, tl.zeros((step,), tl.int64), mask=(slot < end) & (has_key == 0))
        else:
            tl.store(slots + in_order, slot, mask=has_key)
            if is_padded:
                tl.store(place + in_order, to, mask=has_key)
        tl.store(cu + row, earlier, mask=(slot < end) & (slot % top_k == 0))
        start += tl.sum(is_its, 0)
        seen += tl.sum(marked)
    is_first = tl.program_id(0) == 0
    tl.store(cu + num_rows, num_real, mask=is_first)
    if real is not None:
        tl.store(real + column, total, mask=is_key & is_first)
        tl.store(padded + column, total + gap, mask=is_key & is_first)
    if fixed:
        tl.store(needed, num_real, mask=is_first)
        for at in range(num_real + tl.sum(gap) + begin, grouped, tl.num_programs(0) * block):
            slack = at + tl.arange(0, block)
            tl.store(source + slack, tl.zeros((block,), tl.int64), mask=slack < grouped)
            tl.store(filled + slack, tl.full((block,), -1, tl.int64), mask=slack < grouped)
    if is_padded:
        key = (tl.program_id(0) - num_blocks) * 8
        for owner in range(key, tl.where(key < 0, key, tl.minimum(key + 8, num_entries // entries))):
            is_owner = (column // entries == owner) & is_key
            count = tl.sum(tl.where(is_owner, total, 0))
            missing = (multiple - count % multiple) % multiple
            moved = tl.max(tl.where(is_owner, shift, 0))
            position = tl.max(tl.where(is_owner, end_of_key, 0)) + moved + tl.arange(0, gaps)
            exists = tl.arange(0, gaps) < missing
            tl.store(source + position, tl.zeros((gaps,), tl.int64), mask=exists)
            if fixed:
                tl.store(filled + position, tl.full((gaps,), -1, tl.int64), mask=exists)
                to = padding + owner * (multiple - 1) + tl.arange(0, gaps)
                tl.store(to, tl.where(exists, position, grouped), mask=tl.arange(0, gaps) < multiple - 1)
            else:
                tl.store(padding + moved + tl.arange(0, gaps), position, mask=exists)


@kernel(do_not_specialize=["num_rows"])
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


@kernel(do_not_specialize=["num_slots"])
def merge_backward_kernel(grads, firsts, out, num_slots, top_k, block: tl.constexpr):
    """Give each slot the gradient of the slot whose weight has its sum, 0 where that is -1."""
    at = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    first = tl.load(firsts + at, mask=at < num_slots, other=-1)
    grad = tl.load(grads + at // top_k * top_k + first, mask=first >= 0, other=0)
    tl.store(out + at, grad, mask=at < num_slots)


@kernel(do_not_specialize=["num_slots", "num_grouped", "num_padding"])
def to_grouped_kernel(
    values,
    slots,
    place,
    padding,
    filled,
    out,
    num_slots,
    num_grouped,
    num_padding,
    row_stride,
    top_k,
    block: tl.constexpr,
):
    """Copy the value of each slot to its place, and write 0 to padding and slack."""
    at = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    slot, to = tl.load(slots + at, mask=at < num_slots, other=0), at
    if place is not None:
        to = tl.load(place + at, mask=at < num_slots, other=0)
    placed = (at < num_slots) & (to < num_grouped)
    value = tl.load(values + slot // top_k * row_stride + slot % top_k, mask=placed, other=0)
    tl.store(out + to, value, mask=placed)
    none = tl.zeros((block,), out.dtype.element_ty)
    if filled is not None:
        is_empty = tl.load(filled + at, mask=at < num_grouped, other=0) < 0
        tl.store(out + at, none, mask=(at < num_grouped) & is_empty)
    elif padding is not None:
        tl.store(out + tl.load(padding + at, mask=at < num_padding, other=0), none, mask=at < num_padding)


@kernel(do_not_specialize=["num_slots", "num_grouped"])
def to_slots_kernel(values, slots, place, out, num_slots, num_grouped, row_stride, top_k, block: tl.constexpr):
    """Copy the value at each place back to its slot. Other slots are not written."""
    at = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    slot, source = tl.load(slots + at, mask=at < num_slots, other=0), at
    if place is not None:
        source = tl.load(place + at, mask=at < num_slots, other=0)
    placed = (at < num_slots) & (source < num_grouped)
    value = tl.load(values + source, mask=placed, other=0)
    tl.store(out + slot // top_k * row_stride + slot % top_k, value, mask=placed)


@kernel(do_not_specialize=["num_ids"])
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


@kernel(do_not_specialize=["num_ids"])
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


@kernel(do_not_specialize=["num_rows", "first"])
def pairs_kernel(
    ids,
    table,
    counts,
    mark,
    num_rows,
    row_stride,
    top_k,
    first,
    experts,
    size,
    width,
    fixed: tl.constexpr,
    targets: tl.constexpr,
    block: tl.constexpr,
):
    """Count, for each block of rows and each rank, the rows that have an expert there.

    With a fixed size, the columns behind these counts get the slots that have an expert there.
    With ``counts``, also add the slots of each expert to its column of the row of its rank, and the rows of the rank to
    the column behind them. ``mark`` is added there once, times 2**40.
    """
    row = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    found = _pairs(ids, row, num_rows, row_stride, top_k, first, experts, size, targets, block)
    target, rows = tl.arange(0, targets), tl.sum((found > 0).to(tl.int32), 0)
    to = tl.program_id(0).to(tl.int64) * (2 * targets if fixed else targets) + target
    tl.store(table + to, rows)
    if fixed:
        tl.store(table + to + targets, tl.sum(found, 0))
    if counts is not None:
        for k in range(top_k):
            expert = tl.load(ids + row * row_stride + k, mask=row < num_rows, other=-1).to(tl.int64) - first
            counted = (row < num_rows) & (expert >= 0) & (expert < size * experts)
            place = expert // experts * width + expert % experts
            tl.atomic_add(counts + place, tl.full((block,), 1, tl.int64), mask=counted)
        added = rows.to(tl.int64)
        if mark is not None:
            added += tl.where(tl.program_id(0) == 0, tl.load(mark) << 40, 0)
        tl.atomic_add(counts + target * width + experts, added, mask=(target < size) & (added != 0))


@kernel(do_not_specialize=["num_rows", "first", "num_blocks", "is_running", "pair_rows"])
def places_kernel(
    ids,
    table,
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
    is_running,
    pair_rows,
    fixed: tl.constexpr,
    targets: tl.constexpr,
    block: tl.constexpr,
):
    """Give each pair of a row and a rank its place among the packets, from the counts of ``pairs_kernel``.

    Or from their sums, if ``running_kernel`` has put these in their place.

    With a fixed size, a rank has ``pair_rows`` places, and ``source`` gets -1 for those that stay empty.
    """
    row = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    target = tl.arange(0, targets)
    columns: tl.constexpr = 2 * targets if fixed else targets
    before, total = _sums(table, num_blocks, is_running, columns, targets)
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
        if tl.program_id(0) == 0:
            _, of_slots = _sums(table + targets, num_blocks, is_running, columns, targets)
            tl.store(slots_of + target, of_slots, mask=target < size)


@kernel(do_not_specialize=["num_places", "pair_rows"])
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
    first: int = 0,
    entries_per_key: int = 1,
    real_L: Tensor | None = None,
) -> SlotIndex:
    """Do what ``index.group_slots`` does. Cost: two launches; three for many slots; a sort for 1024 or more entries.

    With ``entries_per_key``, also a copy from pinned memory.
    """
    if len(counts) * entries_per_key >= _MOST_COLUMNS:
        given: Any = {"first": first, "entries_per_key": entries_per_key, "real_L": real_L}
        return index.group_slots(keys_SK, counts, pad_multiple, **given)
    sizes, of_keys, shifts = (sum(counts), sum(round_up(count, pad_multiple) for count in counts)), None, None
    if entries_per_key > 1:
        padded = [round_up(count, pad_multiple) for count in counts]
        before = accumulate((each - count for each, count in zip(padded[:-1], counts, strict=False)), initial=0)
        *of_keys, shifts = to_device([*counts, *padded, *before], keys_SK.device).view(3, len(counts)).unbind()
    keys = (keys_SK, first, len(counts), entries_per_key)
    return _group(keys, sizes, pad_multiple, counts=counts, of_keys=of_keys, shifts=shifts)


def group_statically(
    keys_SK: Tensor,
    num_keys: int,
    *,
    rows: int,
    buffer_rows: int,
    pad_multiple: int,
    weights_SK: Tensor | None,
    first: int = 0,
) -> SlotIndex:
    """Do what ``index.group_statically`` does. Cost: as in ``group_slots``; more, and a sort, to drop slots."""
    if num_keys >= _MOST_COLUMNS:
        sizes = {"rows": rows, "buffer_rows": buffer_rows, "pad_multiple": pad_multiple}
        return index.group_statically(keys_SK, num_keys, weights_SK=weights_SK, first=first, **sizes)
    wanted = None
    if weights_SK is not None:
        kept_N, wanted = kept_keys(keys_SK - first, num_keys, weights_SK, rows)
        keys_SK, first = kept_N.view(keys_SK.shape), 0
    found = _group((keys_SK, first, num_keys, 1), (keys_SK.numel(), buffer_rows), pad_multiple)
    return found if wanted is None else replace(found, needed=wanted)


def _group(
    keys: tuple[Tensor, int, int, int],
    sizes: tuple[int, int],
    pad_multiple: int,
    *,
    counts: Sequence[int] | None = None,
    of_keys: Sequence[Tensor] | None = None,
    shifts: Tensor | None = None,
) -> SlotIndex:
    """Make an index.

    Args:
        keys: The keys (S, K), the number that stands for key 0, L, and the entries of a key, as in ``group_slots``.
        sizes: N and R.
        pad_multiple: As in ``group_slots``.
        counts: As in ``group_slots``; None for an index of fixed size.
        of_keys: ``real_L`` and ``padded_L`` of the index; None if kernels count them, which needs one entry for a key.
        shifts: int64 (L,), the padding before each key, if ``of_keys`` is given.
    """
    (keys_SK, first, num_keys, entries), (real, grouped), fixed = keys, sizes, counts is None
    (num_rows, top_k), num_slots, is_padded = keys_SK.shape, keys_SK.numel(), pad_multiple > 1
    if keys_SK.stride(1) != 1:
        keys_SK = keys_SK.contiguous()
    new = partial(torch.empty, dtype=torch.int64, device=keys_SK.device)
    slot_N, source_R, byrow_N, cu_S = new(real), new(grouped), new(real), new(num_rows + 1)
    position_N, filled_R = new(real) if is_padded or fixed else None, new(grouped) if fixed else None
    padding = new(num_keys * (pad_multiple - 1) if fixed else grouped - real) if is_padded else None
    needed, counted = new(()) if fixed else None, of_keys is None
    real_L, padded_L = new(2, num_keys).unbind() if of_keys is None else of_keys
    columns, num_blocks = next_power_of_2(num_keys * entries + 1), max(1, cdiv(num_slots, _BLOCK))
    table = torch.empty(num_blocks + 1, columns, dtype=torch.int32, device=keys_SK.device)
    given = (num_slots, keys_SK.stride(0), top_k, first, num_keys * entries)
    # A step compares each of its slots with each column.
    step = min(128, max(16, 2048 // columns))
    shapes: Any = {"columns": columns, "step": step, **_OPTIONS, "num_warps": _warps(step * columns)}
    count_kernel[(num_blocks,)](keys_SK, table, *given, **shapes)
    is_running = _sum_over_blocks(table)
    place_kernel[(num_blocks + (cdiv(num_keys, 8) if is_padded else 0),)](
        *(keys_SK, table, shifts, slot_N, source_R, filled_R, position_N, byrow_N, cu_S, padding),
        *((real_L, padded_L) if counted else (None, None)),
        *(needed, *given, num_blocks, is_running, num_rows, grouped, entries, pad_multiple),
        is_padded=is_padded,
        fixed=fixed,
        gaps=next_power_of_2(pad_multiple),
        **shapes,
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


def _sum_over_blocks(table: Tensor) -> int:
    """Launch ``running_kernel`` if there are many blocks, (B + 1, columns). Return 1 if it was launched, else 0.

    Else each program adds up the table, which reads B**2 rows of it but saves the launch.
    """
    num_blocks, width = table.shape[0] - 1, table.shape[1]
    if num_blocks <= _MOST_BLOCKS:
        return 0
    columns = min(16, width)
    options: Any = {"columns": columns, **_OPTIONS, "block": 128}
    running_kernel[(width // columns,)](table, num_blocks, width, **options)
    return 1


def _warps(numbers: int) -> int:
    """Return the number of warps of a program whose largest table has so many numbers, 16 for each lane."""
    return min(16, max(4, numbers // 512))


def merge_slots(ids_TK: Tensor, weights_TK: Tensor, *, asks: bool) -> tuple[Tensor, Tensor]:
    """Do what ``index.merge_slots`` does, and never ask. Cost: one launch, and one in the backward."""
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
        columns = next_power_of_2(top_k)
        block = max(1, _BLOCK // columns)
        if num_rows:
            merge_kernel[(cdiv(num_rows, block),)](
                *(ids_TK, weights_TK, merged_ids, merged, firsts, num_rows),
                top_k=top_k,
                columns=columns,
                block=block,
                num_warps=4,
                enable_fp_fusion=False,
            )
        ctx.mark_non_differentiable(merged_ids)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(firsts)
        return merged_ids, merged

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (firsts,), grad = ctx.saved_tensors, grads[1]
        if grad is None:
            return None, None
        out = torch.empty(grad.shape, dtype=grad.dtype, device=grad.device)
        if out.numel():
            merge_backward_kernel[(cdiv(out.numel(), _BLOCK),)](
                grad.contiguous(), firsts, out, out.numel(), out.shape[1], **_OPTIONS
            )
        return None, out


def to_grouped(index: SlotIndex, values_SK: Tensor) -> Tensor:
    """Do what ``SlotIndex.to_grouped`` does. Cost: one launch."""
    values_SK = values_SK if values_SK.stride(1) == 1 else values_SK.contiguous()
    out = torch.empty(index.num_grouped, dtype=values_SK.dtype, device=values_SK.device)
    num_slots, num_padding = len(index.slot_N), 0 if index.padding is None else len(index.padding)
    if programs := cdiv(max(num_slots, num_padding, index.num_grouped if index.fixed_size else 0), _BLOCK):
        to_grouped_kernel[(programs,)](
            *(values_SK, index.slot_N, index.position_N, index.padding, index.filled_R, out),
            *(num_slots, index.num_grouped, num_padding, values_SK.stride(0), index.top_k),
            **_OPTIONS,
        )
    return out


def to_slots(index: SlotIndex, values_R: Tensor, out: Tensor) -> None:
    """Write one value per grouped row to the slots, (S, K) with a stride. Slots without a key are not written."""
    if len(index.slot_N):
        to_slots_kernel[(cdiv(len(index.slot_N), _BLOCK),)](
            *(values_R.contiguous(), index.slot_N, index.position_N, out, len(index.slot_N), index.num_grouped),
            *(out.stride(0), index.top_k),
            **_OPTIONS,
        )


def valid_ids(
    ids_TK: Tensor, num_experts: int, mark: int | None = None, *, valid_T: Tensor | None = None, asks: bool
) -> tuple[Tensor, Tensor]:
    """Do what ``index.valid_ids`` does. Cost: two launches."""
    outcome = torch.full((), mark or 0, dtype=torch.int64, device=ids_TK.device)
    ids_TK = ids_TK.contiguous()
    found_TK, num_ids = torch.empty_like(ids_TK), ids_TK.numel()
    if num_ids:
        valid_kernel[(cdiv(num_ids, _BLOCK),)](
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
        owners_kernel[(cdiv(ids.numel(), _BLOCK),)](
            *(ids, owners, counts, ids.numel(), num_local_experts, width), **_OPTIONS
        )
    return owners, counts


def send_places(
    ids_TK: Tensor,
    experts: int,
    size: int,
    *,
    first: int = 0,
    pair_rows: int | None = None,
    counts: Tensor | None = None,
    mark: Tensor | None = None,
) -> tuple[Tensor, ...]:
    """Give each pair of a row and a rank that owns one of its experts a place among the packets.

    Args:
        ids_TK: Integer (T, K), expert ids; -1 for no expert. Rows may be strided.
        experts: Number of experts of each rank.
        size: P, the number of ranks.
        first: Number of the first expert of the first rank. Experts before it, and behind those of the last rank, are
            ignored.
        pair_rows: Number of places for each rank, at least T; None for as many as its rows need.
        counts: int64 (P, at least L + 1), contiguous, gets the slots of each expert and the rows of each rank added, in
            its first columns. None if they are not wanted.
        mark: int64 (). 2**40 times this is added to the rows of each rank. None for 0.

    Returns:
        ``source_B``, ``member_B`` and ``cu_T`` of a ``Leg``; with ``pair_rows`` also the most rows of a rank, int64 (),
        and the number of slots of each rank, int64 (P,). ``source_B`` is -1 in places that stay empty. Without
        ``pair_rows``, the first two are as long as if all slots of a row had experts on different ranks.

    Cost: two launches; three for many rows.
    """
    (num_rows, top_k), new = ids_TK.shape, partial(torch.empty, dtype=torch.int64, device=ids_TK.device)
    targets, fixed = next_power_of_2(size), pair_rows is not None
    block = max(1, min(128, 4096 // targets))
    num_blocks = cdiv(max(num_rows + 1, pair_rows or 0), block)
    table = torch.empty(num_blocks + 1, (1 + fixed) * targets, dtype=torch.int32, device=ids_TK.device)
    source_B = new(num_rows * min(size, top_k) if pair_rows is None else size * pair_rows)
    member_B, cu_T = new(num_rows * (size if fixed else min(size, top_k))), new(num_rows + 1)
    busiest, slots_P = (new(()), new(size)) if fixed else (None, None)
    shapes: Any = {"fixed": fixed, "targets": targets, "block": block, "num_warps": _warps(2 * targets * block)}
    shapes["enable_fp_fusion"] = False
    if ids_TK.stride(1) != 1:
        ids_TK = ids_TK.contiguous()
    given = (num_rows, ids_TK.stride(0), top_k, first, experts, size)
    width = 0 if counts is None else counts.shape[1]
    pairs_kernel[(num_blocks,)](ids_TK, table, counts, mark, *given, width, **shapes)
    is_running = _sum_over_blocks(table)
    places_kernel[(num_blocks,)](
        *(ids_TK, table, source_B, member_B, cu_T, busiest, slots_P, *given, num_blocks, is_running),
        pair_rows or 0,
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
    columns = next_power_of_2(top_k)
    block = max(1, _BLOCK // columns)
    if num_places:
        slots_kernel[(cdiv(num_places, block),)](
            *(weights_TK.contiguous(), ids_TK.contiguous(), source_B, of_notes, *out_BK, out_notes, num_places),
            *(1 if of_notes is None else num_places // len(of_notes), top_k, *(out.stride(0) for out in out_BK)),
            0 if out_notes is None else out_notes.stride(0),
            columns=columns,
            block=block,
            num_warps=4,
            enable_fp_fusion=False,
        )
