"""Balance the load of ranks: place experts, and copies of busy experts, on the ranks of a group.

- ``loads``: how many rows each rank gets under a placement.
- ``placement``: ``ExpertPlacement``, which says what expert each expert slot of each rank holds.
- ``planners``: functions that compute a placement from the rows that experts get.
- ``slot_table``: translates expert ids to expert slots, on the device.
- ``slot_weights`` and ``movement``: ``SlotWeights`` brings the weights of experts to their slots.
"""

from typing import TYPE_CHECKING

from moe_dispatch.balance.loads import expected_rows
from moe_dispatch.balance.placement import ExpertPlacement
from moe_dispatch.balance.planners import Planner, eplb, known_planners, least_loaded, load_planner, run_planner

if TYPE_CHECKING:
    from moe_dispatch.balance.slot_weights import SlotWeights

__all__ = [
    "ExpertPlacement",
    "Planner",
    "SlotWeights",
    "eplb",
    "expected_rows",
    "known_planners",
    "least_loaded",
    "load_planner",
    "run_planner",
]

if not TYPE_CHECKING:

    def __getattr__(name):
        """Import ``SlotWeights`` on first use, because its module imports dispatchers, which import this package."""
        if name == "SlotWeights":
            from moe_dispatch.balance.slot_weights import SlotWeights  # noqa: PLC0415

            return SlotWeights
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
