"""How results are told: tables on a terminal."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple

from moe_dispatch.cli import console
from moe_dispatch.cli.bench.against import Ratio, changed_facts, ratios
from moe_dispatch.cli.bench.case import Case
from moe_dispatch.cli.bench.measurement import OVERHEAD_RUNS
from moe_dispatch.cli.bench.results import CaseResult, Measured, OverheadResult, Results

_TIMES = ["dispatch", "combine", "backward", "total", "min..max", "cpu", "cold"]
_COSTS = ["MB", "dispatch", "of floor", "all", "of floor", "ratio", "peak", "ratio", "error"]
_ABOUT_COSTS = (
    "MB (1e6 bytes) sent to other ranks, a rank's mean; the floor is each token once to each rank that has one of its "
    "experts. Peak: memory of the rank that held most. Error: largest, from a dense float64 result, over its terms."
)


def show(results: Results) -> None:
    """All tables of a run; what their columns mean stands under the last."""
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
    """A line for each case, told by what differs: totals, and the others' over the first's."""
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
    """The axes along which cases differ, and where each lies on them."""
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


def show_against(now: Results, earlier: Results) -> None:
    """How this run compares with an earlier one."""
    console.line()
    console.line(f"against a run of {earlier.machine.get('date')}")
    for name, (then, new) in changed_facts(now.machine, earlier.machine).items():
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
