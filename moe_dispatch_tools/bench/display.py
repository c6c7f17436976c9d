"""Show the results of ``bench``: tables on a terminal, and a picture with bars."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import astuple
from pathlib import Path

from moe_dispatch_tools import console
from moe_dispatch_tools.bench.comparison import Ratio, changed_environment, ratios
from moe_dispatch_tools.bench.intervals import NEEDED_STARTS
from moe_dispatch_tools.bench.measurement import OVERHEAD_RUNS
from moe_dispatch_tools.bench.overhead import Overhead
from moe_dispatch_tools.bench.request import Request
from moe_dispatch_tools.bench.results import CaseResult, Measured, OverheadResult, Results
from moe_dispatch_tools.bench.workload import Case
from moe_dispatch_tools.pictures import Bar, Panel, save_panels

PICTURES = (".png", ".svg")
_TIMES = ["dispatch", "combine", "backward", "total", "IQR", "cpu", "cold"]
_COSTS = ["MB", "dispatch", "of floor", "all", "of floor", "ratio", "peak", "ratio", "error"]
_ABOUT_TIMES = (
    "The run with the median total, of {runs} runs after a cold run, on the slowest rank of each run. IQR: "
    "interquartile range of the totals. cpu: processor time. Ratios are to the first line."
)
_ABOUT_STARTS = (
    "The start with the median total, of {starts} starts. The total of a start is the median of {runs} runs after a "
    "cold run, on the slowest rank of each run. IQR: interquartile range of the totals of the starts. cpu: processor "
    "time. Ratios are to the first line."
)
_ABOUT_COSTS = (
    "MB (1e6 bytes) that a rank sends to other ranks, mean of all ranks. The floor sends each token once to each rank "
    "that owns one of its experts. Peak: memory of the rank with the highest peak. Error: largest difference from a "
    "dense float64 result, relative to the magnitude of its terms."
)


def show_setting(machine: Mapping[str, str], left_out: Sequence[str]) -> None:
    """Print the machine, and the peers and cases that are left out."""
    for name, value in machine.items():
        console.line(f"{name}: {value}")
    for reason in left_out:
        console.line(reason, mark="-")


def show_case_of_start(result: CaseResult | OverheadResult, start: int, num_starts: int) -> None:
    """Print one case of one of several starts, in one line."""
    console.line(f"start {start} of {num_starts}: {_in_a_line(result)}")


def _in_a_line(result: CaseResult | OverheadResult) -> str:
    if isinstance(result, OverheadResult):
        times = [f"{name} {cost.median_ms:.3f}" for name, cost in result.contenders.items()]
    else:
        times = [f"{name} {_ms(measured.timing.warm.total)}" for name, measured in result.contenders.items()]
    return f"{result.case}: {', '.join(times)} ms"


def show_case(result: CaseResult | OverheadResult, request: Request, num_starts: int, *, first: bool) -> None:
    """Print one case, joined from all starts. The tables of the first case have captions that explain the columns."""
    if isinstance(result, OverheadResult):
        _show_overheads(result, request.iterations * OVERHEAD_RUNS, num_starts)
    elif request.suite == "growth":
        console.line(_in_a_line(result))
    else:
        about = _ABOUT_TIMES if num_starts == 1 else _ABOUT_STARTS
        _show_times(result, about.format(runs=request.iterations, starts=num_starts) if first else "")
        _show_costs(result, _ABOUT_COSTS if first else "")


def show_conclusion(results: Results, earlier: Results | None) -> None:
    """Print one table of all cases, and the ratios to an earlier run if there is one."""
    if len(cases := results.joined.cases) > 1:
        _show_summary(cases)
    if earlier is not None:
        _show_ratios(results, earlier)


def _show_times(result: CaseResult, caption: str) -> None:
    base = next(iter(result.contenders.values())).timing
    rows = []
    for name, measured in result.contenders.items():
        warm, cold = measured.timing.warm, measured.timing.cold
        rows.append(
            [
                name,
                *map(_ms, (warm.dispatch, warm.combine, warm.backward, warm.total, measured.timing.totals.iqr)),
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


def _show_overheads(result: OverheadResult, runs: int, num_starts: int) -> None:
    several = "" if num_starts == 1 else f" Each number is the median of {num_starts} starts."
    console.line()
    console.line(str(result.case))
    console.table(
        ["ms", "median", "fastest", "cpu", "in place:\nmedian", "in place:\nfastest"],
        [
            [name, *("-" if ms is None else f"{ms:.3f}" for ms in astuple(cost))]
            for name, cost in result.contenders.items()
        ],
        caption=f"Forward time of one dispatch and combine, minus the time of the same collectives alone, of {runs} "
        "runs. In place: minus the time of the collectives inside the call, if they can be timed there." + several,
    )


def _show_summary(results: Sequence[CaseResult]) -> None:
    """Print one line per case: the axes on which cases differ, totals, and ratios to the first contender."""
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
        caption="Median time of forward and backward." + (" Ratios are to the first contender." if names[1:] else ""),
    )


def _places(cases: Sequence[Case]) -> tuple[list[str], list[list[str]]]:
    """Return the axes on which the cases differ, and the values of each case on these axes."""
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
        [*axes, "contender", *quantities, "total, 95 %", "verdict"],
        [[*place, *_ratio_row(ratio, quantities)] for place, ratio in zip(places, shared, strict=True)],
        text_columns=len(axes) + 1,
        caption="Ratio of this run to that run, with a 95 % confidence interval for the total. The two runs have "
        f"{len(now.starts)} and {len(earlier.starts)} starts. A verdict needs {NEEDED_STARTS} of each (--starts). "
        "The interval knows the scatter between starts. If the load of the machine changes between the two runs, equal "
        "code may still get a verdict.",
    )


def _ratio_row(ratio: Ratio, quantities: Sequence[str]) -> list[str]:
    numbers = [f"{ratio.over[name]:.2f}" if name in ratio.over else "-" for name in quantities]
    interval = "-" if ratio.interval is None else "{:.2f}..{:.2f}".format(*ratio.interval)
    return [ratio.contender, *numbers, interval, ratio.verdict or "-"]


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.1f}"


def _mb(nbytes: float | None, digits: int) -> str:
    return "-" if nbytes is None else f"{nbytes / 1e6:.{digits}f}"


def _ratio(value: float | None, base: float | None) -> str:
    return f"{value / base:.2f}" if value is not None and base else "-"


def draw(results: Results, path: Path) -> None:
    """Write a picture of the results to ``path``, which ends in one of ``PICTURES``."""
    joined, starts = results.joined, len(results.starts)
    if joined.overheads:
        save_panels(
            [_overheads(result.case, result.contenders) for result in joined.overheads],
            ["median; the black line starts at the fastest run"],
            path,
            xlabel="ms",
            title="One dispatch and combine, forward, minus its collectives",
        )
        return
    one, total = ("run", f"{results.iterations} runs") if starts == 1 else ("start", f"{starts} starts")
    save_panels(
        [_phases(result.case, result.contenders) for result in joined.cases],
        ["dispatch", "combine", "backward"],
        path,
        xlabel="\u00b5s per token of a rank",
        title=f"One forward and backward: the {one} with the median total, of {total}\n"
        "black line: the middle half of the totals",
    )


def _phases(case: Case, contenders: Mapping[str, Measured]) -> Panel:
    """Make the bars of a case: time per token, so that cases of any number of tokens fit one scale."""
    bars, scale = [], 1e6 / case.shape.tokens
    for name, measured in contenders.items():
        warm, (low, high) = measured.timing.warm, measured.timing.quartiles
        parts = tuple(scale * seconds for seconds in (warm.dispatch, warm.combine, warm.backward))
        bars.append(
            Bar(
                label=name,
                parts=parts,
                low=scale * low,
                high=scale * high,
                note=f"{_ms(warm.total)} ms",
            )
        )
    return Panel(title=_title(case), bars=tuple(bars))


def _overheads(case: Case, contenders: Mapping[str, Overhead]) -> Panel:
    """Make the bars of a case. A difference may fall below 0 by chance; its bar then has no length."""
    bars = tuple(
        Bar(
            label=name,
            parts=(max(cost.median_ms, 0.0),),
            low=max(cost.fastest_ms, 0.0),
            high=max(cost.median_ms, 0.0),
            note=f"{cost.median_ms:.2f} ms",
        )
        for name, cost in contenders.items()
    )
    return Panel(title=_title(case), bars=bars)


def _title(case: Case) -> str:
    kind, _, sizes = str(case).partition(": ")
    return f"{kind}\n{sizes}"
