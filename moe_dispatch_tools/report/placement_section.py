"""What copies of busy experts on other ranks would have saved: a section of a report about a trace."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import mean

from moe_dispatch_tools.pictures import stacked_bars
from moe_dispatch_tools.placements import (
    CHOICES,
    MOST_DISPATCHES,
    Choice,
    ExpertCost,
    PlacementPlan,
    placement_plans,
)
from moe_dispatch_tools.report.history import History
from moe_dispatch_tools.report.page import Section, Table, number


def placement_section(history: History) -> Section:
    """Show the busiest rank under several placements of the recorded dispatches."""
    config = history.trace.config
    own = None if config.balance is None else Choice(config.balance, config.spare_experts_per_rank)
    choices = dict.fromkeys([*CHOICES, *([] if own is None else [own])])
    plans = {choice: _plans_by_layer(history, choice) for choice in choices}
    labels = {choice: _label(choice, recorded=choice == own) for choice in choices}
    bars = [(labels[choice], [mean(plan.imbalance for plan in found)]) for choice, found in plans.items()]
    alt = "Bars of the rows of the busiest rank, divided by the mean: " + "; ".join(
        f"{label} {imbalance:.2f}" for label, (imbalance,) in bars
    )
    return Section(
        heading="Placements",
        text=[
            "The rows of the busiest rank if busy experts had copies on other ranks, in spare expert slots. Each "
            "dispatcher has its own placements: one for all steps (once), or one for each dispatch. A rank sends rows "
            "to its own copy, or to the copies on its node, or to all copies, in equal parts.",
            f"At most {MOST_DISPATCHES} dispatches of each dispatcher are planned, spread over the steps. A copied "
            "expert sends its weights in each forward, and gets gradients back.",
        ],
        pictures=[stacked_bars(bars, ["busiest rank"], name="placements", alt=alt, xlabel="of the mean")],
        tables=[
            Table(
                caption="Busiest rank by placement, mean of all dispatchers",
                headings=("placement", "of the mean", "worst", "peak rows", "copied experts"),
                rows=[_row(labels[choice], found) for choice, found in plans.items()],
            )
        ],
    )


def _plans_by_layer(history: History, choice: Choice) -> list[PlacementPlan]:
    found: list[PlacementPlan] = []
    for layer in range(len(history.trace.layers)):
        experts_CPE = history.loads.experts_CPE[history.layer_C == layer]
        stride = max(-(-len(experts_CPE) // MOST_DISPATCHES), 1)
        found += placement_plans(experts_CPE[::stride], history.trace.shape, [choice], ExpertCost(itemsize=1))
    return found


def _label(choice: Choice, *, recorded: bool) -> str:
    told = [choice.planner, f"{choice.spare} spare", *["once"] * choice.once, *["recorded"] * recorded]
    return ", ".join(told if choice.spare else told[:1])


def _row(label: str, plans: Sequence[PlacementPlan]) -> tuple[str, ...]:
    return (
        label,
        f"{mean(plan.imbalance for plan in plans):.2f}",
        f"{max(plan.worst_imbalance for plan in plans):.2f}",
        number(max(plan.peak_rows for plan in plans)),
        f"{mean(plan.copied_experts for plan in plans):.1f}",
    )
