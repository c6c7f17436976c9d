"""Triton kernels for ``ExactPlanner`` of ``exact.py`` in graph-safe mode: the same plan, bit by bit, in few launches.

Nothing is sorted: a kernel compares every rank, or every expert of a rank, with each of the others in a loop, and adds
up what comes before. All numbers are int64, so each run gives the same bits.

Legend: as in ``exact.py``. N ids, which are T * K.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

LARGEST = 4096
"""Most experts whose numbers fit into the registers of one program."""

_BLOCK = 256
_OPTIONS: Any = {"num_warps": 4, "enable_fp_fusion": False}


@triton.jit
def first_at_least(ordered, value, num_ids, steps: tl.constexpr):
    """Return the number of entries of ``ordered`` that are smaller than ``value``, by bisection."""
    low = tl.zeros_like(value)
    high = low + num_ids
    for _ in range(steps):
        middle = (low + high) // 2
        open_ = low < high
        smaller = tl.load(ordered + middle, mask=open_, other=0) < value
        low = tl.where(open_ & smaller, middle + 1, low)
        high = tl.where(open_ & (smaller == 0), middle, high)
    return low


@triton.jit
def turns_kernel(ordered, places, counts, turns, num_ids, num_experts, steps: tl.constexpr, block: tl.constexpr):
    """Count the ids of each expert, and write the number of equal ids before each id, which is 0 or more for -1 too."""
    at = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    begin = first_at_least(ordered, at, num_ids, steps)
    end = first_at_least(ordered, at + 1, num_ids, steps)
    tl.store(counts + at, end - begin, mask=at < num_experts)
    inside = at < num_ids
    mine = tl.load(ordered + at, mask=inside, other=0)
    turn = at - first_at_least(ordered, mine, num_ids, steps)
    tl.store(turns + tl.load(places + at, mask=inside, other=0), turn, mask=inside)


@triton.jit
def slots_kernel(ids, turns, ends, slots, found, num_ids, size, block: tl.constexpr):
    """Replace each id by its slot on the first rank whose rows end behind the turn of the id."""
    at = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    inside = at < num_ids
    expert = tl.load(ids + at, mask=inside, other=-1)
    exists = expert >= 0
    turn = tl.load(turns + at, mask=exists, other=0)
    rank = tl.zeros((block,), tl.int64)
    for other in range(size):
        rank += (tl.load(ends + expert * size + other, mask=exists, other=0) <= turn).to(tl.int64)
    slot = tl.load(slots + expert * size + tl.minimum(rank, size - 1), mask=exists, other=-1)
    tl.store(found + at, slot, mask=inside)


@triton.jit
def loads_kernel(counts, totals, blocks, inner, loads, size, own, multiple, block: tl.constexpr):
    """Write rows and blocks of the experts of one rank, and where the blocks of each end if small experts are first."""
    rank, number = tl.program_id(0), tl.arange(0, block)
    inside = number < own
    expert = rank * own + number
    total = tl.zeros((block,), tl.int64)
    for source in range(size):
        total += tl.load(counts + source * size * own + expert, mask=inside, other=0)
    mine = (total + multiple - 1) // multiple
    tl.store(totals + expert, total, mask=inside)
    tl.store(blocks + expert, mine, mask=inside)
    tl.debug_barrier()  # the loop reads what other threads have written
    until = tl.zeros((block,), tl.int64)
    for other in range(own):
        theirs = tl.load(blocks + rank * own + other)
        until += tl.where((theirs < mine) | ((theirs == mine) & (other <= number)), theirs, 0)
    tl.store(inner + expert, until, mask=inside)
    tl.store(loads + rank, tl.sum(mine, 0))


@triton.jit
def balance_of(rank, load, total, bound, size, is_exact: tl.constexpr):
    """Return the blocks of a rank above its cap, and the key by which ranks are sorted."""
    if is_exact:
        cap = total // size + (rank < total % size).to(tl.int64)
    else:
        cap = tl.ceil(total.to(tl.float64) * tl.load(bound) / size).to(tl.int64)
    balance = load - cap
    return balance, tl.where(balance < 0, balance, 0x7FFFFFFFFFFFFFFF - balance)


@triton.jit
def ranks_kernel(loads, bound, starts, keeps, begins, amounts, size, is_exact: tl.constexpr, block: tl.constexpr):
    """Write where the blocks of each rank start on the line, which of them it keeps, and which others it takes over.

    Names are those of ``ExactPlanner._copied``. Ranks keep their places here, and ``place`` is their place in the order
    there. The outputs hold what the loops read of other ranks, until the results are stored.
    """
    rank = tl.arange(0, block)
    inside = rank < size
    load = tl.load(loads + rank, mask=inside, other=0)
    total = tl.sum(load, 0)
    balance, key = balance_of(rank, load, total, bound, size, is_exact)
    balance = tl.where(inside, balance, 0)
    has_room, excess = balance < 0, tl.maximum(balance, 0)
    most = tl.sum(excess, 0)
    place, gone, rooms, sums = excess * 0, excess * 0, excess * 0, excess * 0
    for other in range(size):
        their_load = tl.load(loads + other)
        theirs, their_key = balance_of(other, their_load, total, bound, size, is_exact)
        until = (their_key < key) | ((their_key == key) & (other <= rank))
        place += (until & (other != rank)).to(tl.int64)
        gone += tl.where(until, tl.maximum(theirs, 0), 0)
        rooms += tl.where(until, tl.maximum(-theirs, 0), 0)
        sums += tl.where(until, their_load, 0)
    taken, before = tl.minimum(rooms, most), tl.minimum(rooms - (excess - balance), most)
    start = tl.where(has_room, before, gone)
    tl.store(starts + rank, taken, mask=inside)
    tl.store(keeps + rank, gone, mask=inside)
    tl.debug_barrier()  # the loop reads what other threads have written
    dry, donor = most + excess * 0, excess * 0
    for other in range(size):
        theirs = tl.load(starts + other)
        dry = tl.where(theirs >= gone, tl.minimum(theirs, dry), dry)
        donor += (tl.load(keeps + other) <= start).to(tl.int64)
    donor = tl.minimum(donor, size - 1)
    lack = tl.where(excess > 0, dry - gone, 0)
    tl.store(begins + rank, place, mask=inside)
    tl.store(amounts + rank, sums - lack - gone, mask=inside)
    tl.debug_barrier()
    begin = start
    for other in range(size):
        begin += tl.where(tl.load(begins + other) == donor, tl.load(amounts + other), 0)
    tl.debug_barrier()
    tl.store(starts + rank, sums - load, mask=inside)
    tl.store(keeps + rank, sums - excess - lack, mask=inside)
    tl.store(begins + rank, begin, mask=inside)
    tl.store(amounts + rank, tl.where(has_room, taken - before, lack), mask=inside)


@triton.jit
def copies_kernel(
    blocks,
    inner,
    starts,
    keeps,
    begins,
    amounts,
    copied,
    wanted,
    copies,
    slots,
    held,
    size,
    own,
    spare,
    mine,
    few: tl.constexpr,
    block: tl.constexpr,
):
    """Write the copies on one rank, the blocks that they take over, and the slot of each expert.

    With ``few`` slots some shares have none. ``wanted`` then says how many blocks more of its first copy the rank would
    take. ``held`` are the experts in the slots of rank ``mine``.
    """
    rank, expert = tl.program_id(0), tl.arange(0, block)
    num_experts = size * own
    inside = expert < num_experts
    home = expert // own
    is_home = inside & (home == rank)
    high = tl.load(inner + expert, mask=inside, other=0) + tl.load(starts + home, mask=inside, other=0)
    low = high - tl.load(blocks + expert, mask=inside, other=0)
    begin = tl.load(begins + rank)
    overlap = tl.minimum(high, begin + tl.load(amounts + rank)) - tl.maximum(low, begin)
    overlap = tl.where(inside, tl.maximum(overlap, 0), 0)
    planned, reach = tl.sum(overlap, 0), overlap
    if few:
        at_home = tl.minimum(high, tl.load(keeps + home, mask=inside, other=0)) - low
        reach = tl.where(overlap > 0, tl.minimum(overlap + tl.maximum(at_home, 0), planned), 0)
    key = tl.where(reach > 0, reach * num_experts + num_experts - 1 - expert, -1)
    slot = tl.where(is_home, expert + rank * spare, 0).to(tl.int64)
    tl.store(held + expert - rank * own, expert.to(tl.int64), mask=is_home & (rank == mine))
    largest = tl.max(key, 0)
    for number in range(spare):
        best = tl.max(key, 0)
        chosen = (key == best) & (best >= 0)
        kept = tl.where(best >= 0, num_experts - 1 - best % num_experts, num_experts)
        tl.store(copies + rank * spare + number, kept)
        tl.store(held + own + number, kept, mask=rank == mine)
        slot = tl.where(chosen, rank * (own + spare) + own + number, slot)
        key = tl.where(chosen, -1, key)
    tl.store(slots + expert * size + rank, slot, mask=inside)
    if few:
        overlap = tl.where(key >= 0, 0, overlap)
        is_largest = (overlap > 0) & (reach * num_experts + num_experts - 1 - expert == largest)
        more = tl.where(is_largest, planned - tl.sum(overlap, 0), 0)
        tl.store(wanted + rank * num_experts + expert, more, mask=inside)
    tl.store(copied + rank * num_experts + expert, overlap, mask=inside)


@triton.jit
def sums_until(values):
    """Return inclusive sums over the ranks. A table is (experts, nodes, ranks of a node)."""
    of_node = tl.sum(values, 2)
    return tl.cumsum(values, 2) + (tl.cumsum(of_node, 1) - of_node)[:, :, None]


@triton.jit
def whole(values):
    """Return the sums over all ranks."""
    return tl.sum(tl.sum(values, 2), 1)[:, None, None]


@triton.jit
def split_kernel(
    counts,
    totals,
    blocks,
    copied,
    wanted,
    ends,
    size,
    own,
    per_node,
    multiple,
    mine,
    few: tl.constexpr,
    experts: tl.constexpr,
    nodes: tl.constexpr,
    places: tl.constexpr,
):
    """Write how many rows of each expert rank ``mine`` sends to each rank, as inclusive sums over the ranks."""
    expert = (tl.program_id(0) * experts + tl.arange(0, experts))[:, None, None]
    node, place = tl.arange(0, nodes)[None, :, None], tl.arange(0, places)[None, None, :]
    num_experts, rank = size * own, node * per_node + place
    exists = expert < num_experts
    inside = exists & (place < per_node) & (rank < size)
    total, in_blocks = tl.load(totals + expert, mask=exists, other=0), tl.load(blocks + expert, mask=exists, other=0)
    taken = tl.load(copied + rank * num_experts + expert, mask=inside, other=0)
    if few:
        more = tl.load(wanted + rank * num_experts + expert, mask=inside, other=0)
        at_home, sums = in_blocks - whole(taken), sums_until(more)
        taken += tl.minimum(sums, at_home) - tl.minimum(sums - more, at_home)
    share = tl.where(inside, tl.where(rank == expert // own, in_blocks - whole(taken), taken), 0)
    sums = sums_until(share)
    demand = tl.minimum(sums * multiple, total) - tl.minimum((sums - share) * multiple, total)
    supply = tl.load(counts + rank * num_experts + expert, mask=inside, other=0)
    # Rows of a rank that stay there.
    is_mine, both = inside & (rank == mine), tl.minimum(supply, demand)
    flow = tl.where(is_mine, both, 0)
    supply, demand = supply - both, demand - both
    # Rows that stay on their node. Ends are cut to what the node can keep.
    kept = tl.minimum(tl.sum(supply, 2), tl.sum(demand, 2))[:, :, None]
    sent, received = tl.cumsum(supply, 2), tl.cumsum(demand, 2)
    low, high = tl.minimum(sent - supply, kept), tl.minimum(sent, kept)
    lows, highs = tl.minimum(received - demand, kept), tl.minimum(received, kept)
    begin, end = whole(tl.where(is_mine, low, 0)), whole(tl.where(is_mine, high, 0))
    overlap = tl.maximum(tl.minimum(end, highs) - tl.maximum(begin, lows), 0)
    flow += tl.where(inside & (node == mine // per_node), overlap, 0)
    supply, demand = supply - (high - low), demand - (highs - lows)
    # The others.
    sent, received = sums_until(supply), sums_until(demand)
    begin, end = whole(tl.where(is_mine, sent - supply, 0)), whole(tl.where(is_mine, sent, 0))
    overlap = tl.maximum(tl.minimum(end, received) - tl.maximum(begin, received - demand), 0)
    flow += tl.where(inside, overlap, 0)
    tl.store(ends + expert * size + rank, sums_until(flow), mask=inside)


def counts_and_turns(ids_TK: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    """Do what ``slot_table.counts_and_turns`` does. Turns of -1 may differ. Cost: a stable sort, one launch."""
    ordered_N, places_N = ids_TK.flatten().sort(stable=True)
    counts_E, turns_TK = ordered_N.new_empty(num_experts), ordered_N.new_empty(ids_TK.shape)
    num_ids = len(ordered_N)
    with torch.cuda.device_of(ids_TK):
        turns_kernel[(triton.cdiv(max(num_ids, num_experts), _BLOCK),)](
            *(ordered_N, places_N, counts_E, turns_TK, num_ids, num_experts),
            steps=num_ids.bit_length(),
            block=_BLOCK,
            **_OPTIONS,
        )
    return counts_E, turns_TK


def slots_of(ends_EP: Tensor, slots_EP: Tensor, ids_TK: Tensor, turns_TK: Tensor) -> Tensor:
    """Do what ``ExactPlan.slots_of`` does. Cost: one launch."""
    found_TK = torch.empty_like(turns_TK)
    if ids_TK.numel():
        with torch.cuda.device_of(ids_TK):
            slots_kernel[(triton.cdiv(ids_TK.numel(), _BLOCK),)](
                *(ids_TK.contiguous(), turns_TK, ends_EP, slots_EP, found_TK, ids_TK.numel(), ends_EP.shape[1]),
                block=_BLOCK,
                **_OPTIONS,
            )
    return found_TK


def plan(
    counts_PE: Tensor, rank: int, *, spare: int, bound: Tensor | None, pad_multiple: int, per_node: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Do what ``ExactPlanner`` does, without ``min_rows``. Cost: four launches.

    Args:
        counts_PE: As in ``ExactPlanner``.
        rank: As in ``ExactPlanner``.
        spare: As in ``ExactPlanner``.
        bound: float64 (), on the device, or None for 1.
        pad_multiple: As in ``ExactPlanner``.
        per_node: Number of ranks of a node, at most P.

    Returns:
        ``copies_PS``, ``ends_EP``, ``slots_EP`` and ``experts_L`` of the plan.
    """
    counts_PE = counts_PE.contiguous()
    size, num_experts = counts_PE.shape
    own, few = num_experts // size, spare < num_experts // size
    totals_E, blocks_E, inner_E = counts_PE.new_empty(3, num_experts).unbind()
    loads_P, starts_P, keeps_P, begins_P, amounts_P = counts_PE.new_empty(5, size).unbind()
    copied_PE, wanted_PE = torch.empty_like(counts_PE), torch.empty_like(counts_PE) if few else None
    copies_PS, experts_L = counts_PE.new_empty(size, spare), counts_PE.new_empty(own + spare)
    ends_EP, slots_EP = counts_PE.new_empty(2, num_experts, size).unbind()
    with torch.cuda.device_of(counts_PE):
        loads_kernel[(size,)](
            *(counts_PE, totals_E, blocks_E, inner_E, loads_P, size, own, pad_multiple),
            block=triton.next_power_of_2(own),
            **_OPTIONS,
        )
        ranks_kernel[(1,)](
            *(loads_P, bound, starts_P, keeps_P, begins_P, amounts_P, size),
            is_exact=bound is None,
            block=triton.next_power_of_2(size),
            **_OPTIONS,
        )
        copies_kernel[(size,)](
            *(blocks_E, inner_E, starts_P, keeps_P, begins_P, amounts_P),
            *(copied_PE, wanted_PE, copies_PS, slots_EP, experts_L),
            *(size, own, spare, rank),
            few=few,
            block=triton.next_power_of_2(num_experts),
            **_OPTIONS,
        )
        nodes, places = triton.next_power_of_2(size // per_node), triton.next_power_of_2(per_node)
        experts = max(1, _BLOCK // (nodes * places))
        split_kernel[(triton.cdiv(num_experts, experts),)](
            *(counts_PE, totals_E, blocks_E, copied_PE, wanted_PE, ends_EP, size, own, per_node, pad_multiple, rank),
            few=few,
            experts=experts,
            nodes=nodes,
            places=places,
            **_OPTIONS,
        )
    return copies_PS, ends_EP, slots_EP, experts_L
