"""Which expert weights travel under a placement, seen from one rank. Index arithmetic without an exchange.

The home of an expert is the rank that owns its parameters: rank e // L, whatever the placement says.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import final

import torch
from torch import Tensor

from moe_dispatch.balance.placement import EMPTY, ExpertPlacement


@final
@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class HeldExperts:
    """The experts of this rank that one rank holds, in the order of its slots. Positions count in this order.

    Attributes:
        count: Number of these experts.
        alone: For experts that no other rank holds: positions, and their numbers.
        shared: For experts that other ranks hold too: positions, and their indices in ``Movement.shared_experts``.
    """

    count: int
    alone: tuple[Tensor, Tensor]
    shared: tuple[Tensor, Tensor]


@final
@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Movement:
    """The moves of weights of one rank. All tensors are int64 on the device of the weights.

    Experts are numbers in 0..L-1 among the experts whose home is this rank. Gradients of copies take the way back.

    Attributes:
        rank: This rank.
        experts_S: The expert in each slot of this rank that holds one of its own experts; 0 in other slots.
        slots_L: The slot of each expert that this rank both owns and holds; 0 for other experts.
        empty: The slots that hold no expert.
        sent: The experts to send, by destination rank.
        received: The slots to fill with weights of other ranks, by source rank.
        rows_in: Number of weights to receive from each rank.
        rows_out: Number of weights to send to each rank.
        moves: Whether any rank sends anything.
        held: The experts of this rank that each rank holds.
        shared_experts: The experts that more than one rank holds.
    """

    rank: int
    experts_S: Tensor
    slots_L: Tensor
    empty: Tensor
    sent: Tensor
    received: Tensor
    rows_in: tuple[int, ...]
    rows_out: tuple[int, ...]
    moves: bool
    held: tuple[HeldExperts, ...]
    shared_experts: Tensor


@lru_cache(maxsize=64)
def movement_of(placement: ExpertPlacement, rank: int, device: torch.device) -> Movement:
    """Return the moves of one rank. Ranks agree on the order of an exchange: by rank, then by slot of the receiver."""
    local, ranks = placement.num_experts // placement.num_ranks, range(placement.num_ranks)

    def held_of(home: int, holder: int) -> list[tuple[int, int]]:
        """Return the slots of ``holder`` with experts of ``home``, and these experts."""
        slots = enumerate(placement.slots[holder])
        return [(slot, expert - home * local) for slot, expert in slots if expert != EMPTY and expert // local == home]

    def index(numbers: list[int]) -> Tensor:
        return torch.tensor(numbers, dtype=torch.int64, device=device)

    held = [[expert for _, expert in held_of(rank, holder)] for holder in ranks]
    counts = [sum(expert in experts for experts in held) for expert in range(local)]
    shared = {expert: number for number, expert in enumerate(e for e in range(local) if counts[e] > 1)}

    def held_experts(experts: list[int]) -> HeldExperts:
        alone = [number for number, expert in enumerate(experts) if expert not in shared]
        added = [number for number, expert in enumerate(experts) if expert in shared]
        return HeldExperts(
            count=len(experts),
            alone=(index(alone), index([experts[number] for number in alone])),
            shared=(index(added), index([shared[experts[number]] for number in added])),
        )

    expert_of = dict(held_of(rank, rank))
    slot_of = {expert: slot for slot, expert in expert_of.items()}
    received = [[] if home == rank else [slot for slot, _ in held_of(home, rank)] for home in ranks]
    sent = [[] if holder == rank else experts for holder, experts in enumerate(held)]
    return Movement(
        rank=rank,
        experts_S=index([expert_of.get(slot, 0) for slot in range(placement.slots_per_rank)]),
        slots_L=index([slot_of.get(expert, 0) for expert in range(local)]),
        empty=index([slot for slot, expert in enumerate(placement.slots[rank]) if expert == EMPTY]),
        sent=index([expert for experts in sent for expert in experts]),
        received=index([slot for slots in received for slot in slots]),
        rows_in=tuple(map(len, received)),
        rows_out=tuple(map(len, sent)),
        moves=any(held_of(home, holder) for home in ranks for holder in ranks if home != holder),
        held=tuple(map(held_experts, held)),
        shared_experts=index(list(shared)),
    )
