"""The page on the log of a run."""

from __future__ import annotations

import torch

from moe_dispatch.cli import loads_over_time, run_costs
from moe_dispatch.cli.page import Table, number, render
from moe_dispatch.cli.timeline import Timeline
from moe_dispatch.traces import RunLog


def run_page(name: str, run: RunLog) -> str:
    """HTML.

    Args:
        name: of the directory.
        run: with a step.
    """
    timeline = Timeline(
        names=["all dispatchers"],
        ep_size=run.ep_size,
        layer_C=torch.zeros(run.steps, dtype=torch.int64),
        step_C=torch.arange(run.steps),
        tokens_CE=run.tokens_SE,
    )
    sections = [
        loads_over_time.load_section(timeline),
        loads_over_time.imbalance_section(timeline),
        run_costs.padding_section(run, timeline),
        run_costs.bytes_section(run),
        run_costs.overflow_section(run, timeline),
    ]
    return render(f"Run {name}", _intro(run, timeline), _facts(run), sections)


def _intro(run: RunLog, timeline: Timeline) -> list[str]:
    imbalance_S = timeline.imbalance_C
    intro = [
        f"The busiest expert got {float(imbalance_S.mean()):.2f} times the mean of all experts on average, and "
        f"{float(imbalance_S.max()):.2f} times at worst (step {int(imbalance_S.argmax())}).",
        "Counted are all dispatchers of one config and group together; a step is what lies between two calls of "
        "step().",
    ]
    if len(set(run.written)) > 1:
        intro.append(
            f"Ranks ended at different steps, from {min(run.written)} to {max(run.written)}: shown are the "
            f"{run.steps} that all have."
        )
    return intro


def _facts(run: RunLog) -> Table:
    config = run.config
    rows = [
        *((("dispatcher given", run.name),) if run.name else ()),
        ("backend", run.backend_name),
        ("ranks", str(run.ep_size)),
        *((field, str(getattr(config, field))) for field in ("num_experts", "top_k", "hidden_size", "pad_multiple")),
        ("graph_safe", str(config.graph_safe)),
        *((("capacity_factor", str(config.capacity_factor)),) if config.graph_safe else ()),
        ("steps", number(run.steps)),
        ("dispatches of a rank", number(run.dispatches_SP[:, 0].sum())),
        *((f"{name} version", version) for name, version in run.versions.items()),
    ]
    return Table(caption="What was logged", headings=("", "value"), rows=rows)
