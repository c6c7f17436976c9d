"""Triton kernels for ``ExactPlanner`` of ``exact.py`` in graph-safe mode: the same plan, bit by bit, in few launches.

Nothing is sorted. All numbers are integers, so each run gives the same bits.

Legend: as in ``exact.py``. B blocks of the T * K ids.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from moe_dispatch.permutation.triton_launch import cdiv, kernel, next_power_of_2

LARGEST = 4096
"""Most ranks, and most experts of a rank, whose numbers fit into the registers of one program."""

_BLOCK = 256
_TALLIED = 128
"""Ids that one program compares with each other."""
_OPTIONS: Any = {"num_warps": 4, "enable_fp_fusion": False}


@kernel(do_not_specialize=["num_ids"])
def tally_kernel(ids, turns, tallies, num_ids, num_experts, block: tl.constexpr):
    """Count the ids of each expert in one block of ids, and the equal ids of the block before each id."""
    program, place = tl.program_id(0).to(tl.int64), tl.arange(0, block)
    mine = tallies + program * num_experts
    for begin in range(0, num_experts, block):
        tl.store(mine + begin + place, tl.zeros((block,), tl.int32), mask=begin + place < num_experts)
    at = program * block + place
    inside = at < num_ids
    expert = tl.load(ids + at, mask=inside, other=-1).to(tl.int32)
    again = tl.load(ids + at, mask=inside, other=-1).to(tl.int32)
    equal = (expert[:, None] == again[None, :]).to(tl.int32)
    turn = tl.sum(tl.where(place[None, :] < place[:, None], equal, 0), 1)
    after = tl.sum(tl.where(place[None, :] > place[:, None], equal, 0), 1)
    tl.store(turns + at, turn, mask=inside)
    tl.debug_barrier()  # other threads have written the zeros
    tl.store(mine + expert, turn + 1, mask=inside & (expert >= 0) & (after == 0))


@kernel(do_not_specialize=["num_blocks"])
def totals_kernel(tallies, counts, num_blocks, num_experts, blocks: tl.constexpr, experts: tl.constexpr):
    """Replace the counts of each block of ids by those of all blocks before it, and write the counts of all blocks."""
    expert = tl.program_id(0) * experts + tl.arange(0, experts)
    total = tl.zeros((experts,), tl.int64)
    for begin in range(0, num_blocks, blocks):
        row = begin + tl.arange(0, blocks)
        inside = (row < num_blocks)[:, None] & (expert < num_experts)[None, :]
        to = tallies + row.to(tl.int64)[:, None] * num_experts + expert[None, :]
        here = tl.load(to, mask=inside, other=0)
        tl.store(to, total.to(tl.int32)[None, :] + tl.cumsum(here, 0) - here, mask=inside)
        total += tl.sum(here, 0)
    tl.store(counts + expert, total, mask=expert < num_experts)


@kernel(do_not_specialize=["num_ids"])
def slots_kernel(
    ids, turns, tallies, ends, slots, found, num_ids, num_experts, size, tallied: tl.constexpr, block: tl.constexpr
):
    """Replace each id by its slot on the first rank whose rows end behind the turn of the id."""
    at = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    inside = at < num_ids
    expert = tl.load(ids + at, mask=inside, other=-1)
    exists = expert >= 0
    turn = tl.load(turns + at, mask=exists, other=0)
    turn += tl.load(tallies + at // tallied * num_experts + expert, mask=exists, other=0)
    rank = tl.zeros((block,), tl.int64)
    for other in range(size):
        rank += (tl.load(ends + expert * size + other, mask=exists, other=0) <= turn).to(tl.int64)
    slot = tl.load(slots + expert * size + tl.minimum(rank, size - 1), mask=exists, other=-1)
    tl.store(found + at, slot, mask=inside)


@kernel
def loads_kernel(
    counts,
    totals,
    blocks,
    loads,
    given,
    taken,
    copied,
    copies,
    held,
    num_copies,
    size,
    own,
    spare,
    multiple,
    mine,
    block: tl.constexpr,
):
    """Write rows and blocks of the experts of one rank, and of a plan without copies what the other kernels change."""
    rank, number = tl.program_id(0), tl.arange(0, block)
    inside, num_experts = number < own, size * own
    expert = rank * own + number
    total = tl.zeros((block,), tl.int64)
    for other in range(size):
        to = other * num_experts + expert
        total += tl.load(counts + to, mask=inside, other=0)
        tl.store(copied + to, tl.zeros((block,), tl.int64), mask=inside)
    in_blocks = (total + multiple - 1) // multiple
    tl.store(totals + expert, total, mask=inside)
    tl.store(blocks + expert, in_blocks, mask=inside)
    tl.store(loads + rank, tl.sum(in_blocks, 0))
    tl.store(given + rank, 0)
    tl.store(taken + rank, 0)
    empty = tl.zeros((block,), tl.int64) + num_experts
    tl.store(copies + rank * spare + number, empty, mask=number < spare)
    tl.store(held + number, expert.to(tl.int64), mask=inside & (rank == mine))
    tl.store(held + own + number, empty, mask=(number < spare) & (rank == mine))
    tl.store(num_copies, 0, mask=rank == mine)


@kernel
def take_kernel(
    loads,
    blocks,
    bound,
    given,
    taken,
    copied,
    numbers,
    size,
    own,
    spare,
    is_exact: tl.constexpr,
    few: tl.constexpr,
    ranks: tl.constexpr,
    experts: tl.constexpr,
):
    """Write which blocks the other ranks take over from one rank, and the numbers of the slots of these copies.

    Does what ``taken_over`` does. Every program pairs all ranks, and keeps what others take from its own rank. A key
    has a number and a place. The largest key is that of the largest number, and of the first of equal ones.
    """
    donor, rank, number = tl.program_id(0), tl.arange(0, ranks), tl.arange(0, experts)
    exists = rank < size
    load = tl.load(loads + rank, mask=exists, other=0)
    total = tl.sum(load, 0)
    if is_exact:
        cap = total // size + (rank < total % size).to(tl.int64)
    else:
        cap = tl.ceil(total.to(tl.float64) * tl.load(bound) / size).to(tl.int64)
    balance = tl.where(exists, load - cap, 0)
    slack = -tl.sum(balance, 0)
    quota = balance * 0
    last = tl.where(exists, size - 1 - rank, -1)
    most = tl.max(balance * size + last, 0)
    while most >= size:
        excess, giver = most // size, size - 1 - most % size
        least = tl.max(last - balance * size, 0)
        room, taker = least // size, size - 1 - least % size
        spared = tl.minimum(tl.maximum(room - excess, 0), slack)
        slack -= spared
        quota = tl.where((rank == taker) & (giver == donor), room - spared, quota)
        balance = tl.where(rank == taker, 0, tl.where(rank == giver, balance - room + spared, balance))
        most = tl.max(balance * size + last, 0)
    left = tl.load(blocks + donor * own + number, mask=number < own, other=0)
    back, used, gone = tl.where(number < own, own - 1 - number, -1), quota * 0, quota * 0
    most = tl.max(quota * size + last, 0)
    while most >= size:
        taker, largest = size - 1 - most % size, tl.max(left * own + back, 0)
        expert, is_taker = own - 1 - largest % own, rank == taker
        moved = tl.minimum(most // size, largest // own)
        to = taker * size * own + donor * own + expert
        tl.store(copied + to, moved)
        tl.store(numbers + to, tl.sum(tl.where(is_taker, used, 0), 0))
        left = tl.where(number == expert, left - moved, left)
        used += is_taker.to(tl.int64)
        gone += tl.where(is_taker, moved, 0)
        quota = tl.where(is_taker, quota - moved, quota)
        if few:
            quota = tl.where(used >= spare, 0, quota)
        most = tl.max(quota * size + last, 0)
    tl.store(given + donor, tl.sum(gone, 0))
    tl.store(taken + rank, gone, mask=gone > 0)


@triton.jit
def sums_until(values):
    """Return inclusive sums over the ranks. A table is (experts, nodes, ranks of a node)."""
    of_node = tl.sum(values, 2)
    return tl.cumsum(values, 2) + (tl.cumsum(of_node, 1) - of_node)[:, :, None]


@triton.jit
def whole(values):
    """Return the sums over all ranks."""
    return tl.sum(tl.sum(values, 2), 1)[:, None, None]


@kernel
def split_kernel(
    counts,
    totals,
    blocks,
    loads,
    given,
    taken,
    copied,
    numbers,
    copies,
    ends,
    slots,
    held,
    num_copies,
    size,
    own,
    spare,
    per_node,
    multiple,
    mine,
    few: tl.constexpr,
    experts: tl.constexpr,
    nodes: tl.constexpr,
    places: tl.constexpr,
):
    """Write the slots, and how many rows of each expert rank ``mine`` sends to each rank, as inclusive sums over these.

    With ``few`` slots, does what ``ExactPlanner._relieving`` does first.
    """
    expert = (tl.program_id(0) * experts + tl.arange(0, experts))[:, None, None]
    node, place = tl.arange(0, nodes)[None, :, None], tl.arange(0, places)[None, None, :]
    num_experts, rank = size * own, node * per_node + place
    exists, is_rank = expert < num_experts, (place < per_node) & (rank < size)
    inside = exists & is_rank
    total, in_blocks = tl.load(totals + expert, mask=exists, other=0), tl.load(blocks + expert, mask=exists, other=0)
    share = tl.load(copied + rank * num_experts + expert, mask=inside, other=0)
    if few:
        load = tl.load(loads + rank, mask=is_rank, other=0)
        after = load - tl.load(given + rank, mask=is_rank, other=0) + tl.load(taken + rank, mask=is_rank, other=0)
        is_worse = tl.max(tl.max(after, 2), 1) > tl.max(tl.max(load, 2), 1)
        share = tl.where(is_worse[:, None, None] & (load * size > whole(load)), 0, share)
    is_copy, is_mine = share > 0, inside & (rank == mine)
    number = tl.load(numbers + rank * num_experts + expert, mask=is_copy, other=0)
    tl.store(copies + rank * spare + number, expert.to(tl.int64), mask=is_copy)
    tl.store(held + own + number, expert.to(tl.int64), mask=is_copy & is_mine)
    tl.atomic_add(num_copies, tl.sum((is_copy & is_mine).to(tl.int64)))
    slot = tl.where(is_copy, own + number, expert % own) + rank * (own + spare)
    tl.store(slots + expert * size + rank, tl.where(is_copy | (rank == expert // own), slot, 0), mask=inside)
    share = tl.where(inside & (rank == expert // own), in_blocks - whole(share), share)
    sums = sums_until(share)
    demand = tl.minimum(sums * multiple, total) - tl.minimum((sums - share) * multiple, total)
    supply = tl.load(counts + rank * num_experts + expert, mask=inside, other=0)
    # Rows of a rank that stay there.
    both = tl.minimum(supply, demand)
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


def counts_and_turns(ids_TK: Tensor, num_experts: int) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """Count the ids of each expert, (E,). Cost: two launches.

    Also return for each id the equal ids before it in its block of ids, int32 (T, K), and for each block the ids of
    each expert before the block, int32 (B, E), for ``slots_of``.
    """
    ids_TK, num_ids = ids_TK.contiguous(), ids_TK.numel()
    num_blocks = cdiv(num_ids, _TALLIED)
    turns_TK = torch.empty_like(ids_TK, dtype=torch.int32)
    tallies_BE = turns_TK.new_empty(num_blocks, num_experts)
    counts_E = torch.empty(num_experts, dtype=torch.int64, device=ids_TK.device)
    if num_ids:
        tally_kernel[(num_blocks,)](ids_TK, turns_TK, tallies_BE, num_ids, num_experts, block=_TALLIED, **_OPTIONS)
    totals_kernel[(cdiv(num_experts, 16),)](
        *(tallies_BE, counts_E, num_blocks, num_experts), blocks=_BLOCK, experts=16, **_OPTIONS
    )
    return counts_E, (turns_TK, tallies_BE)


def slots_of(ends_EP: Tensor, slots_EP: Tensor, ids_TK: Tensor, turns: tuple[Tensor, Tensor]) -> Tensor:
    """Do what ``ExactPlan.slots_of`` does. Cost: one launch."""
    found_TK = torch.empty_like(ids_TK, memory_format=torch.contiguous_format)
    if ids_TK.numel():
        slots_kernel[(cdiv(ids_TK.numel(), _BLOCK),)](
            *(ids_TK.contiguous(), *turns, ends_EP, slots_EP, found_TK, ids_TK.numel(), *ends_EP.shape),
            tallied=_TALLIED,
            block=_BLOCK,
            **_OPTIONS,
        )
    return found_TK


def plan(
    counts_PE: Tensor, rank: int, *, spare: int, bound: Tensor | None, pad_multiple: int, per_node: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Do what ``ExactPlanner`` does. Cost: three launches.

    Args:
        counts_PE: As in ``ExactPlanner``.
        rank: As in ``ExactPlanner``.
        spare: As in ``ExactPlanner``.
        bound: float64 (), on the device, or None for 1.
        pad_multiple: As in ``ExactPlanner``.
        per_node: Number of ranks of a node, at most P.

    Returns:
        ``copies_PS``, ``ends_EP``, ``slots_EP``, ``experts_L`` and ``num_copies`` of the plan.
    """
    counts_PE = counts_PE.contiguous()
    size, num_experts = counts_PE.shape
    own, few = num_experts // size, spare < num_experts // size
    totals_E, blocks_E = counts_PE.new_empty(2, num_experts).unbind()
    loads_P, given_P, taken_P = counts_PE.new_empty(3, size).unbind()
    copied_PE, numbers_PE = counts_PE.new_empty(2, size, num_experts).unbind()
    copies_PS, experts_L = counts_PE.new_empty(size, spare), counts_PE.new_empty(own + spare)
    ends_EP, slots_EP = counts_PE.new_empty(2, num_experts, size).unbind()
    num_copies = counts_PE.new_empty(())
    of_rank = next_power_of_2(own)
    loads_kernel[(size,)](
        *(counts_PE, totals_E, blocks_E, loads_P, given_P, taken_P, copied_PE, copies_PS, experts_L, num_copies),
        *(size, own, spare, pad_multiple, rank),
        block=of_rank,
        **_OPTIONS,
    )
    ranks = next_power_of_2(size)
    take_kernel[(size,)](
        *(loads_P, blocks_E, bound, given_P, taken_P, copied_PE, numbers_PE, size, own, spare),
        is_exact=bound is None,
        few=few,
        ranks=ranks,
        experts=of_rank,
        # One warp finds a largest number without waiting for others.
        num_warps=1 if max(ranks, of_rank) <= 128 else 4,
        enable_fp_fusion=False,
    )
    nodes, places = next_power_of_2(size // per_node), next_power_of_2(per_node)
    experts = max(1, _BLOCK // (nodes * places))
    split_kernel[(cdiv(num_experts, experts),)](
        *(counts_PE, totals_E, blocks_E, loads_P, given_P, taken_P, copied_PE, numbers_PE),
        *(copies_PS, ends_EP, slots_EP, experts_L, num_copies),
        *(size, own, spare, per_node, pad_multiple, rank),
        few=few,
        experts=experts,
        nodes=nodes,
        places=places,
        **_OPTIONS,
    )
    return copies_PS, ends_EP, slots_EP, experts_L, num_copies
