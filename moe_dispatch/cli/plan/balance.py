"""What placements would save: the busiest rank with and without copies of busy experts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from moe_dispatch.backends.base import MoEShape
from moe_dispatch.balance import ExpertPlacement, expected_rows, run_planner

_MOST_DISPATCHES = 16  # which are planned, because a plan of a large group takes milliseconds
_CHOICES = (("none", 0), ("eplb", 1), ("least_loaded", 1), ("least_loaded", 2))


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class PlacementPlan:
    """The plan of one way to place experts.

    Attributes:
        planner: Name of the planner; "none" if every rank computes its own experts.
        spare: Spare expert slots of each rank.
        imbalance: Rows of the busiest rank divided by the mean, as a mean over dispatches.
        worst_imbalance: The largest of these numbers.
        peak_rows: Most rows of a rank in any dispatch.
        copied_experts: Number of expert weights in slots of other ranks than their own, as a mean over dispatches.
        copied_bytes: Bytes of these weights in the dtype of the rows; None if the size of an expert is not known.
    """

    planner: str
    spare: int
    imbalance: float
    worst_imbalance: float
    peak_rows: float
    copied_experts: float
    copied_bytes: float | None


def placement_plans(experts_CPE: Tensor, shape: MoEShape, expert_bytes: int | None) -> Iterator[PlacementPlan]:
    """Plan placements for recorded or simulated dispatches.

    "eplb" places experts once, for the rows of all dispatches. "least_loaded" places them for each dispatch.

    Args:
        experts_CPE: Rows of each rank for each expert.
        shape: Sizes of the group.
        expert_bytes: Bytes of the weights of one expert, if known.
    """
    per_node = shape.ranks_per_node or shape.ep_size
    some_CPE = experts_CPE[:_MOST_DISPATCHES]
    for planner, spare in _CHOICES:
        home = ExpertPlacement.contiguous(shape.num_experts, shape.ep_size, spare=spare)
        if planner == "none":
            placements = [home] * len(some_CPE)
        elif planner == "eplb":
            placements = [run_planner(planner, some_CPE.sum(0), home, ranks_per_node=per_node)] * len(some_CPE)
        else:
            placements = [run_planner(planner, counts_PE, home, ranks_per_node=per_node) for counts_PE in some_CPE]
        rows_CP = torch.stack(
            [
                expected_rows(counts_PE, placement, ranks_per_node=per_node)
                for counts_PE, placement in zip(some_CPE, placements, strict=True)
            ]
        )
        imbalance_C = rows_CP.amax(1) / rows_CP.mean(1).clamp(min=1)
        copied = sum(_away(placement, home) for placement in placements) / len(placements)
        yield PlacementPlan(
            planner=planner,
            spare=spare,
            imbalance=float(imbalance_C.mean()),
            worst_imbalance=float(imbalance_C.max()),
            peak_rows=float(rows_CP.max()),
            copied_experts=copied,
            copied_bytes=None if expert_bytes is None else copied * expert_bytes,
        )


def _away(placement: ExpertPlacement, home: ExpertPlacement) -> int:
    """Count the slots that hold an expert of another rank."""
    pairs = zip(placement.slots, home.slots, strict=True)
    return sum(len({*slots} - {*own, -1}) for slots, own in pairs)
