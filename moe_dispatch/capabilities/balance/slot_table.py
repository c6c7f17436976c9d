"""Translate expert ids to numbers of expert slots, on the device of the ids.

E experts, L expert slots on this rank, T rows, K ids per row, C: the most copies that a row can choose from.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from moe_dispatch.capabilities.balance.placement import EMPTY, ExpertPlacement
from moe_dispatch.communication import to_device


@final
@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class SlotTable:
    """A placement as seen from one rank, as tensors.

    Attributes:
        copies_EC: int64 (E, 1+C). Row e has the number n of copies of expert e that this rank uses, then the numbers of
            their slots. Entries after the first n copies are not used.
        experts_L: int64 (L,), the expert in each slot of this rank, or E for an empty slot.
    """

    copies_EC: Tensor
    experts_L: Tensor

    @classmethod
    def make(
        cls,
        placement: ExpertPlacement,
        rank: int,
        *,
        ranks_per_node: int,
        nearest: bool = True,
        device: torch.device,
        most_copies: int | None = None,
    ) -> SlotTable:
        """Make the table of one rank.

        Args:
            placement: The placement.
            rank: This rank.
            ranks_per_node: Number of consecutive ranks that share a host.
            nearest: Whether the rank sends rows to the nearest copies, or to all copies in turns, as in a dry run.
            device: Device of the tensors.
            most_copies: C; by default the smallest C that fits. A fixed C gives tables of equal shape.
        """
        used = [
            copies_used(placement, expert, rank, ranks_per_node) if nearest else placement.slots_of_expert[expert]
            for expert in range(placement.num_experts)
        ]
        width = most_copies or max(map(len, used))
        rows = [[len(slots), *slots, *[0] * (width - len(slots))] for slots in used]
        experts = [placement.num_experts if expert == EMPTY else expert for expert in placement.slots[rank]]
        with torch.inference_mode(False):  # training must be able to write to a table that an evaluation made
            return cls(copies_EC=to_device(rows, device), experts_L=to_device(experts, device))

    def copied(self) -> SlotTable:
        """Return a table of its own memory with the same values."""
        with torch.inference_mode(False):
            return SlotTable(copies_EC=self.copies_EC.clone(), experts_L=self.experts_L.clone())

    def update(self, other: SlotTable) -> bool:
        """Copy another table into the tensors of this one. Return False, and do nothing, if shape or device differs."""
        mine, theirs = self.copies_EC, other.copies_EC
        if mine.shape != theirs.shape or mine.device != theirs.device:
            return False
        mine.copy_(theirs)
        self.experts_L.copy_(other.experts_L)
        return True


def copies_used(placement: ExpertPlacement, expert: int, rank: int, ranks_per_node: int) -> tuple[int, ...]:
    """Return the slots to which a rank sends the rows of an expert, in the order of turns.

    A rank prefers a copy on itself, then copies on its node, then all copies. Ranks start with different copies. So
    ranks with few rows load the copies evenly too.
    """
    slots, local = placement.slots_of_expert[expert], placement.slots_per_rank
    own = [slot for slot in slots if slot // local == rank]
    near = [slot for slot in slots if slot // local // ranks_per_node == rank // ranks_per_node]
    chosen = own or near or list(slots)
    start = rank % len(chosen)
    return (*chosen[start:], *chosen[:start])


def slots_of(ids_TK: Tensor, copies_EC: Tensor) -> Tensor:
    """Replace expert ids by numbers of expert slots. No host sync.

    Rows that name an expert take its copies in turns: the first row takes the first copy, the second row the second
    copy, and so on.

    Args:
        ids_TK: int64 (T, K), in -1..E-1. A row names an expert at most once.
        copies_EC: The table of this rank.

    Returns:
        int64 (T, K): the slot of each id, and -1 for -1.
    """
    width = copies_EC.shape[1]
    expert_TK = ids_TK.clamp(min=0)
    column_TK: Tensor | int = 1
    if width > 2:
        column_TK = 1 + counts_and_turns(ids_TK, copies_EC.shape[0])[1] % copies_EC[:, 0][expert_TK]
    return torch.where(ids_TK < 0, -1, copies_EC.flatten()[expert_TK * width + column_TK])


def counts_and_turns(ids_TK: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    """Count the ids of each expert, (E,), and for each id the equal ids before it, (T, K). No host sync.

    For example, the turns of [[4, 2], [2, 4]] are [[0, 0], [1, 1]].
    """
    ordered_N, places_N = ids_TK.flatten().sort(stable=True)
    begin = torch.searchsorted(ordered_N, torch.arange(num_experts + 1, device=ids_TK.device))
    turns_N = torch.arange(len(ordered_N), device=ids_TK.device) - begin[ordered_N.clamp(min=0)]
    # Turns of -1 are never used. They must not be negative, because they go through a table too.
    return begin.diff(), torch.zeros_like(turns_N).scatter_(0, places_N, turns_N.clamp_(min=0)).view_as(ids_TK)
