"""Shows results: tables on a terminal, and a picture of bars."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import astuple
from pathlib import Path

from moe_dispatch.cli import console
from moe_dispatch.cli.bench.measurement import OVERHEAD_RUNS
from moe_dispatch.cli.bench.overhead import Overhead
from moe_dispatch.cli.bench.results import (
    CaseResult,
    Measured,
    OverheadResult,
    Ratio,
    Results,
    changed_environment,
    ratios,
)
from moe_dispatch.cli.bench.workload import Case
from moe_dispatch.cli.pictures import Bar, Panel, save_panels

PICTURES = (".png", ".svg")
_TIMES = ["dispatch", "combine", "backward", "total", "min..max", "cpu", "cold"]
_COSTS = ["MB", "dispatch", "of floor", "all", "of floor", "ratio", "peak", "ratio", "error"]
_ABOUT_COSTS = (
    "MB (1e6 bytes) sent to other ranks, a rank's mean; the floor is each token once to each rank that has one of its "
    "experts. Peak: memory of the rank that held most. Error: largest, from a dense float64 result, over its terms."
)


def show(results: Results, earlier: Results | None) -> None:
    """Print the machine, what was left out, and all tables; ``earlier`` is a run to compare with."""
    for name, value in results.machine.items():
        console.line(f"{name}: {value}")
    for reason in results.left_out:
        console.line(reason, mark="-")
    _show_tables(results)
    if earlier is not None:
        _show_ratios(results, earlier)


def _show_tables(results: Results) -> None:
    """The captions that explain columns stand under the last table of each kind."""
    for result in results.overheads:
        _show_overheads(result, results.iterations * OVERHEAD_RUNS)
    about_times = (
        f"Medians of {results.iterations} runs after a cold one, of the rank that took longest; cpu is its processor "
        "time. Ratios are to the first line."
    )
    shown = () if results.suite == "growth" else results.cases
    for case in shown:
        last = case is shown[-1]
        _show_times(case, about_times if last else "")
        _show_costs(case, _ABOUT_COSTS if last else "")
    if len(results.cases) > 1:
        _show_summary(results.cases)


def _show_times(result: CaseResult, caption: str) -> None:
    base = next(iter(result.contenders.values())).timing
    rows = []
    for name, measured in result.contenders.items():
        warm, cold, (low, high) = measured.timing.warm, measured.timing.cold, measured.timing.spread
        rows.append(
            [
                name,
                *map(_ms, (warm.dispatch, warm.combine, warm.backward, warm.total)),
                f"{_ms(low)}..{_ms(high)}",
                *map(_ms, (warm.processor, cold.total)),
                _ratio(warm.total, base.warm.total),
                _ratio(cold.total, base.cold.total),
            ]
        )
    console.line()
    console.line(str(result.case))
    console.table(["ms", *_TIMES, "ratio", "cold\nratio"], rows, caption=caption)


def _show_costs(result: CaseResult, caption: str) -> None:
    base, floor = next(iter(result.contenders.values())), result.floor_bytes
    rows = []
    for name, measured in result.contenders.items():
        out = None if measured.bytes_sent is None else measured.bytes_sent["dispatch"]
        rows.append(
            [
                name,
                _mb(out, 2),
                _ratio(out, floor),
                _mb(measured.all_bytes, 2),
                _ratio(measured.all_bytes, floor and 4 * floor),
                _ratio(measured.all_bytes, base.all_bytes),
                _mb(measured.peak_bytes, 1),
                _ratio(measured.peak_bytes, base.peak_bytes),
                _error(measured),
            ]
        )
    console.table(_COSTS, rows, caption=caption)


def _error(measured: Measured) -> str:
    if measured.dropped:
        return "dropped rows"
    return "-" if measured.error is None else f"{measured.error:.1e}"


def _show_overheads(result: OverheadResult, runs: int) -> None:
    console.line()
    console.line(str(result.case))
    console.table(
        ["ms", "median", "fastest", "cpu", "in place:\nmedian", "in place:\nfastest"],
        [
            [name, *("-" if ms is None else f"{ms:.3f}" for ms in astuple(cost))]
            for name, cost in result.contenders.items()
        ],
        caption=f"One dispatch and combine, forward, above its collectives run bare, of {runs} runs; in place, above "
        "its collectives timed where they stand, where that can be done.",
    )


def _show_summary(results: Sequence[CaseResult]) -> None:
    """One line for each case: the axes on which cases differ, totals, and their ratios to the first contender."""
    axes, places = _places([result.case for result in results])
    names = list(results[0].contenders)
    rows = []
    for result, place in zip(results, places, strict=True):
        totals = [measured.timing.warm.total for measured in result.contenders.values()]
        rows.append([*place, *map(_ms, totals), *(_ratio(x, totals[0]) for x in totals[1:])])
    console.line()
    console.table(
        [*axes, *(f"{name}\nms" for name in names), *(f"{name}\nratio" for name in names[1:])],
        rows,
        text_columns=len(axes),
        caption="Medians of forward and backward" + (", and ratios to the first contender." if names[1:] else "."),
    )


def _places(cases: Sequence[Case]) -> tuple[list[str], list[list[str]]]:
    """Return the axes on which cases differ, and the values of each case on them."""
    described = [_description(case) for case in cases]
    axes = [axis for axis in described[0] if len({values[axis] for values in described}) > 1]
    return axes, [[values[axis] for axis in axes] for values in described]


def _description(case: Case) -> dict[str, str]:
    shape = case.shape
    return {
        "dtype": case.dtype,
        "routing": case.routing,
        **{"ranks": str(case.ranks), "tokens": str(shape.tokens), "hidden": str(shape.hidden)},
        **{"experts": str(shape.experts), "top-k": str(shape.top_k)},
    }


def _show_ratios(now: Results, earlier: Results) -> None:
    console.line()
    console.line(f"against a run of {earlier.machine.get('date')}")
    for name, (then, new) in changed_environment(now.machine, earlier.machine).items():
        console.line(f"{name} was {then}, is {new}", mark="-")
    shared = ratios(now, earlier)
    axes, places = _places([ratio.case for ratio in shared])
    quantities = list(dict.fromkeys(name for ratio in shared for name in ratio.over))
    console.table(
        [*axes, "contender", *quantities, "apart"],
        [[*place, *_ratio_row(ratio, quantities)] for place, ratio in zip(places, shared, strict=True)],
        text_columns=len(axes) + 1,
        caption="Now over then. Apart: the ranges of the totals, min..max, have nothing in common.",
    )


def _ratio_row(ratio: Ratio, quantities: Sequence[str]) -> list[str]:
    apart = "-" if ratio.apart is None else "yes" if ratio.apart else "no"
    numbers = [f"{ratio.over[name]:.2f}" if name in ratio.over else "-" for name in quantities]
    return [ratio.contender, *numbers, apart]


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.1f}"


def _mb(nbytes: float | None, digits: int) -> str:
    return "-" if nbytes is None else f"{nbytes / 1e6:.{digits}f}"


def _ratio(value: float | None, base: float | None) -> str:
    return f"{value / base:.2f}" if value is not None and base else "-"


def draw(results: Results, path: Path) -> None:
    """Write a picture of the results to ``path``, which ends in one of ``PICTURES``."""
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
    """A difference can fall below 0 by chance; its bar then has no length."""
    bars = tuple(
        Bar(label=name, parts=(max(cost.median_ms, 0.0),), low=max(cost.fastest_ms, 0.0), high=max(cost.median_ms, 0.0))
        for name, cost in contenders.items()
    )
    return Panel(title=_title(case), bars=bars)


def _title(case: Case) -> str:
    kind, _, sizes = str(case).partition(": ")
    return f"{kind}\n{sizes}"
