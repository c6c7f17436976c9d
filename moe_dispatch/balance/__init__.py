"""Balance the load of ranks: place experts, and copies of busy experts, on the ranks of a group.

- ``placement``: ``ExpertPlacement``, which says what expert each expert slot of each rank holds.
- ``planners``: functions that compute a placement from the rows that experts get, and the rows that each rank gets
  under a placement.
- ``slot_table``: translates expert ids to expert slots, on the device.
- ``movement``: which weights travel under a placement.

These modules are arithmetic: nothing in them talks to other ranks. The others plug into the dispatchers, by
``moe_dispatch._slots``:

- ``options``: the options of ``balance``. A planner with options of its own derives a class from ``PlannerOptions``.
- ``slots``: chooses the slots of a dispatch, and runs ``Dispatcher.place``.
- ``slot_weights``: ``SlotWeights``, which brings the weights of experts to their slots, and their gradients home.
"""

from moe_dispatch.balance.exact import ExactPlacement, exact
from moe_dispatch.balance.options import EplbOptions, ExactOptions, LeastLoadedOptions, ManualOptions, PlannerOptions
from moe_dispatch.balance.placement import ExpertPlacement
from moe_dispatch.balance.planners import (
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
