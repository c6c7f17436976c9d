"""The arithmetic of v2's ElasticBuffer: which choice stands for a rank, which slot a token takes, where rows lie.

No process group here. A token goes once to each rank; of its choices that lead there, the last one is the master.
"""

from __future__ import annotations

import torch
from torch import Generator, Tensor


def owners(topk_idx: Tensor, num_experts: int, num_ranks: int) -> Tensor:
    """int64 (T, K): the rank of each choice, -1 for no selection."""
    return torch.where(topk_idx >= 0, topk_idx // (num_experts // num_ranks), -1)


def masters(keys: Tensor) -> Tensor:
    """bool (T, K): the last of all choices of a token with the same key; none where the key is negative.

    Source: deep_ep/include/deep_ep/common/ptx.cuh:412-421 of v2 (the highest lane).
    """
    num_topk = keys.shape[1]
    later = torch.ones(num_topk, num_topk, dtype=torch.bool).triu(diagonal=1)
    has_later = ((keys[:, :, None] == keys[:, None, :]) & later).any(2)
    return ~has_later & (keys >= 0)


def has_duplicates(topk_idx: Tensor, num_experts: int, num_ranks: int) -> list[bool]:
    """By rank: does a token name one of its experts twice?"""
    repeated = ~masters(topk_idx) & (topk_idx >= 0)
    of = owners(topk_idx, num_experts, num_ranks)
    return [bool((repeated & (of == rank)).any()) for rank in range(num_ranks)]


def new_slots(owner: Tensor, *, rank: int, num_ranks: int, capacity: int, generator: Generator) -> Tensor:
    """int32 (T, K): the slot that a token takes on the rank of each master choice, counted from this rank's first.

    Slots are handed out by an atomic counter (deep_ep/include/deep_ep/impls/dispatch.cuh:344-349 of v2): any order.
    """
    slots = torch.full(owner.shape, -1, dtype=torch.int32)
    leads = masters(owner)
    for peer in range(num_ranks):
        goes = leads & (owner == peer)
        taken = torch.randperm(int(goes.sum()), generator=generator).int()
        slots[goes] = rank * capacity + taken
    return slots


def tokens_by_slot(owner: Tensor, slots: Tensor, num_ranks: int) -> list[Tensor]:
    """The tokens for each rank, in the order of their slots there."""
    found = []
    for peer in range(num_ranks):
        tokens, choices = ((slots >= 0) & (owner == peer)).nonzero(as_tuple=True)
        found.append(tokens[slots[tokens, choices].argsort()])
    return found


def expanded_places(local_ids: Tensor, starts: list[int], generator: Generator) -> Tensor:
    """int32 (R, K): the row of each (token, expert) of this rank, in any order within an expert; -1 elsewhere.

    Source: the atomic counter in deep_ep/include/deep_ep/impls/dispatch_copy_epilogue.cuh:121 of v2.
    """
    places = torch.full(local_ids.shape, -1, dtype=torch.int32)
    for expert, start in enumerate(starts):
        mine = local_ids == expert
        places[mine] = start + torch.randperm(int(mine.sum()), generator=generator).int()
    return places


def gaps(starts: list[int], counts: list[int], aligned_counts: list[int]) -> Tensor:
    """Rows between an expert's last row and the next expert's first."""
    spans = zip(starts, counts, aligned_counts, strict=True)
    return torch.cat([torch.arange(start + real, start + padded) for start, real, padded in spans])
