"""The picture of a run: bars by case and contender, made of phases."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from moe_dispatch.cli.bench.case import Case
from moe_dispatch.cli.bench.overhead import Overhead
from moe_dispatch.cli.bench.results import Measured, Results
from moe_dispatch.cli.pictures import Bar, Panel, save_panels

PICTURES = (".png", ".svg")


def draw(results: Results, path: Path) -> None:
    """Write it to ``path``, which ends in one of ``PICTURES``."""
    if results.overheads:
        panels = [_overheads(result.case, result.contenders) for result in results.overheads]
        save_panels(
            panels,
            ["median; black: from the fastest"],
            path,
            xlabel="ms",
            title="One dispatch and combine, forward, above its collectives",
        )
        return
    panels = [_phases(result.case, result.contenders) for result in results.cases]
    save_panels(
        panels,
        ["dispatch", "combine", "backward"],
        path,
        xlabel="ms",
        title=f"One forward and backward, medians of {results.iterations} runs\nblack: shortest to longest",
    )


def _phases(case: Case, contenders: Mapping[str, Measured]) -> Panel:
    bars = []
    for name, measured in contenders.items():
        warm, (low, high) = measured.timing.warm, measured.timing.spread
        parts = tuple(1e3 * seconds for seconds in (warm.dispatch, warm.combine, warm.backward))
        bars.append(Bar(label=name, parts=parts, low=1e3 * low, high=1e3 * high))
    return Panel(title=_title(case), bars=tuple(bars))


def _overheads(case: Case, contenders: Mapping[str, Overhead]) -> Panel:
    """Collectives that took longer by chance can bring a difference below 0; a bar then has no length."""
    bars = tuple(
        Bar(label=name, parts=(max(cost.median_ms, 0.0),), low=max(cost.fastest_ms, 0.0), high=max(cost.median_ms, 0.0))
        for name, cost in contenders.items()
    )
    return Panel(title=_title(case), bars=bars)


def _title(case: Case) -> str:
    kind, _, sizes = str(case).partition(": ")
    return f"{kind}\n{sizes}"
