"""What placements save and cost: rows of the busiest rank with and without copies of busy experts, and weights to move.

Dimensions are those of ``moe_dispatch_tools.loads``. S: expert slots of all ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, final

import torch
from torch import Tensor

from moe_dispatch.backends.base import MoEShape
from moe_dispatch.balance import ExpertPlacement, expected_rows, run_planner
from moe_dispatch.balance.placement import EMPTY
from moe_dispatch.balance.slot_table import SlotTable, slots_of
from moe_dispatch.config import DispatcherConfig
from moe_dispatch.permutation import count_values, merge_slots

UNPLACED = "none"
"""Stands for a planner that leaves every expert on its own rank."""
MOST_DISPATCHES = 16
"""Dispatches to plan placements for: a planner takes milliseconds for a large group."""


@final
@dataclass(frozen=True, slots=True)
class Choice:
    """A way to place experts.

    Attributes:
        planner: Name of the planner, or ``UNPLACED``.
        spare: Spare expert slots of each rank.
        once: Whether one placement, for the rows of all dispatches, stays. Otherwise each dispatch has its own.
    """

    planner: str = UNPLACED
    spare: int = 0
    once: bool = False


CHOICES = (Choice(), Choice("eplb", 1, once=True), Choice("least_loaded", 1), Choice("least_loaded", 2))


def choices_for(config: DispatcherConfig, *, others: bool) -> list[Choice]:
    """Return no placement and that of the config, if it has spare expert slots, and other placements if ``others``."""
    if not (others or config.spare_experts_per_rank):
        return []
    own = Choice(config.balance or UNPLACED, config.spare_experts_per_rank)
    return list(dict.fromkeys([*(CHOICES if others else CHOICES[:1]), own]))


def placement_plans(
    experts_CPE: Tensor, shape: MoEShape, choices: Iterable[Choice], expert_bytes: int | None
) -> Iterator[dict[str, Any]]:
    """Plan placements for recorded or simulated dispatches, each as plain data.

    - planner, spare, once: As in ``Choice``.
    - imbalance: Rows of the busiest rank divided by the mean, as a mean over dispatches.
    - worst_imbalance: The largest of these numbers.
    - peak_rows: Most rows of a rank in any dispatch.
    - copied_experts: Number of expert weights in slots of other ranks than their own, as a mean over dispatches.
    - copied_bytes: Bytes of these weights in the dtype of the rows; None if the size of an expert is not known.
    - slot_bytes: Bytes of the weights in all expert slots of one rank; None if the size of an expert is not known.

    Args:
        experts_CPE: Rows of each rank for each expert.
        shape: Sizes of the group, without spare expert slots.
        choices: Ways to place experts.
        expert_bytes: Bytes of all weights of an expert; None if its width is not known.
    """
    per_node, local = shape.ranks_per_node or shape.ep_size, shape.num_experts // shape.ep_size
    for choice in choices:
        placements = _placements(choice, experts_CPE, shape)
        pairs = zip(experts_CPE, placements, strict=True)
        rows_CP = torch.stack(
            [expected_rows(counts_PE, placed, ranks_per_node=per_node) for counts_PE, placed in pairs]
        )
        imbalance_C = rows_CP.amax(1) / rows_CP.mean(1).clamp(min=1)
        copied = sum(
            expert not in (EMPTY, *range(rank * local, (rank + 1) * local))
            for placement in placements
            for rank, slots in enumerate(placement.slots)
            for expert in slots
        ) / len(placements)
        yield {
            **asdict(choice),
            "imbalance": float(imbalance_C.mean()),
            "worst_imbalance": float(imbalance_C.max()),
            "peak_rows": float(rows_CP.max()),
            "copied_experts": copied,
            "copied_bytes": None if expert_bytes is None else copied * expert_bytes,
            "slot_bytes": None if expert_bytes is None else (local + choice.spare) * expert_bytes,
        }


def _placements(choice: Choice, experts_CPE: Tensor, shape: MoEShape) -> list[ExpertPlacement]:
    """Return a placement for each dispatch."""
    per_node = shape.ranks_per_node or shape.ep_size
    home = ExpertPlacement.contiguous(shape.num_experts, shape.ep_size, spare=choice.spare)
    if choice.planner == UNPLACED:
        return [home] * len(experts_CPE)
    if choice.once:
        return [run_planner(choice.planner, experts_CPE.sum(0), home, ranks_per_node=per_node)] * len(experts_CPE)
    return [run_planner(choice.planner, counts_PE, home, ranks_per_node=per_node) for counts_PE in experts_CPE]


def in_slots(
    dispatches: Iterable[Sequence[Tensor]], config: DispatcherConfig, shape: MoEShape, used: list[ExpertPlacement]
) -> Iterator[list[Tensor]]:
    """Replace the expert ids of dispatches by numbers of expert slots, as a dispatcher with this config does.

    Args:
        dispatches: Expert ids of each rank in each dispatch, int64 (T, K).
        config: Config with spare expert slots. Without ``balance`` they stay empty.
        shape: Sizes of the group.
        used: List to which the placement of each dispatch is appended.
    """
    experts, per_node = config.num_experts, shape.ranks_per_node or shape.ep_size
    home = ExpertPlacement.contiguous(experts, shape.ep_size, spare=config.spare_experts_per_rank)
    for of_ranks in dispatches:
        ids = [merge_slots(ids_TK, torch.zeros(ids_TK.shape), asks=True)[0] for ids_TK in of_ranks]
        placement = home
        if config.balance is not None:
            counts_PE = torch.stack([count_values(ids_TK.flatten() + 1, experts + 1)[1:] for ids_TK in ids])
            placement = run_planner(config.balance, counts_PE, home, ranks_per_node=per_node)
        used.append(placement)
        tables = (
            SlotTable.make(placement, rank, ranks_per_node=per_node, device=torch.device("cpu"))
            for rank in range(shape.ep_size)
        )
        yield [slots_of(ids_TK, table.copies_EC) for ids_TK, table in zip(ids, tables, strict=True)]


def rows_of_experts(slots_CPS: Tensor, placements: Sequence[ExpertPlacement]) -> Tensor:
    """Add up the rows of the copies of each expert, int64 (C, P, E).

    Args:
        slots_CPS: Rows of each rank for each expert slot.
        placements: Placement of each dispatch.
    """
    found = []
    for slots_PS, placement in zip(slots_CPS, placements, strict=True):
        counts_PE = slots_PS.new_zeros(len(slots_PS), placement.num_experts + 1)  # the last column is for empty slots
        experts_S = torch.tensor(placement.slots).flatten() % (placement.num_experts + 1)
        found.append(counts_PE.index_add_(1, experts_S, slots_PS)[:, :-1])
    return torch.stack(found)
