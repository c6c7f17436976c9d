"""Dispatches with experts in slots, as the planner of a config places them.

Dimensions are those of ``moe_dispatch_tools.loads``. S: expert slots of all ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from moe_dispatch.backends.base import MoEShape
from moe_dispatch.balance import ExpertPlacement, PlannerOptions, run_planner
from moe_dispatch.capabilities.balance.options import ExactOptions
from moe_dispatch.capabilities.balance.placement import EMPTY
from moe_dispatch.capabilities.balance.slot_table import SlotTable, slots_of
from moe_dispatch.capabilities.balance.slots import exact_planner
from moe_dispatch.config import DispatcherConfig
from moe_dispatch.permutation import count_experts, merge_slots


def count_copies(placement: ExpertPlacement) -> int:
    """Count the expert weights in slots of other ranks than their own. They travel in each forward."""
    local = placement.num_experts // placement.num_ranks
    away = [expert for rank, slots in enumerate(placement.slots) for expert in slots if expert // local != rank]
    return len(away) - away.count(EMPTY)


def in_slots(
    dispatches: Iterable[Sequence[Tensor]], config: DispatcherConfig, shape: MoEShape, used: list[ExpertPlacement]
) -> Iterator[list[Tensor]]:
    """Replace the expert ids of dispatches by numbers of expert slots, as a dispatcher with this config does.

    Args:
        dispatches: Expert ids of each rank in each dispatch, int64 (T, K).
        config: Config with spare expert slots. With ``balance="manual"`` they stay empty. Unless it has
            ``device="cpu"``, the default of ``balance.min_rows`` is that of a GPU.
        shape: Sizes of the group.
        used: List to which the placement of each dispatch is appended.
    """
    experts, per_node = config.num_experts, shape.ranks_per_node or shape.ep_size
    home = ExpertPlacement.contiguous(experts, shape.ep_size, spare=config.spare_slots(shape.ep_size))
    options, planners = config.slot_options, []
    if isinstance(options, ExactOptions):
        fewest = options.fewest_rows(config, config.device or "cuda")
        known = config.replace(balance={**options.model_dump(), "min_rows": fewest})
        planners = [exact_planner(known, shape, rank, torch.device("cpu")) for rank in range(shape.ep_size)]
    for of_ranks in dispatches:
        ids = [merge_slots(ids_TK, torch.zeros(ids_TK.shape), asks=True)[0] for ids_TK in of_ranks]
        placement = home
        if isinstance(options, (ExactOptions, PlannerOptions)):
            counts_PE = torch.stack([count_experts(ids_TK, experts) for ids_TK in ids])
            plans = [
                planner.host_plan(counts_PE) if config.graph_safe else planner.on_host(counts_PE)[0]
                for planner in planners
            ]
            if plans:
                used.append(plans[0].placement.read())
                yield [plan.slots_of(ids_TK) for plan, ids_TK in zip(plans, ids, strict=True)]
                continue
            assert isinstance(options, PlannerOptions)
            placement = run_planner(options, counts_PE, home, ranks_per_node=per_node)
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
