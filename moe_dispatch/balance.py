"""Balance the load of ranks: place experts, and copies of busy experts, on the ranks of a group."""

from moe_dispatch.capabilities.balance.exact import ExactPlacement, exact
from moe_dispatch.capabilities.balance.options import (
    EplbOptions,
    ExactOptions,
    LeastLoadedOptions,
    ManualOptions,
    PlannerOptions,
)
from moe_dispatch.capabilities.balance.placement import ExpertPlacement
from moe_dispatch.capabilities.balance.planners import (
    Planner,
    eplb,
    expected_rows,
    known_planners,
    least_loaded,
    load_planner,
    run_planner,
)

__all__ = [
    "EplbOptions",
    "ExactOptions",
    "ExactPlacement",
    "ExpertPlacement",
    "LeastLoadedOptions",
    "ManualOptions",
    "Planner",
    "PlannerOptions",
    "eplb",
    "exact",
    "expected_rows",
    "known_planners",
    "least_loaded",
    "load_planner",
    "run_planner",
]
