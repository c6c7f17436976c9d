"""Show the results of ``compare``: tables on a terminal, and a picture with bars."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from moe_dispatch_tools import console
from moe_dispatch_tools.compare.measurement import Task
from moe_dispatch_tools.compare.results import NEEDED_STARTS, PHASES, QUANTITIES, CaseResult, VariantResult
from moe_dispatch_tools.pictures import save_bars

_COSTS = ("of\nfloor", "padded:\nranks", "padded:\nexperts", "host\nsyncs", "MB\npeak")


def show_case(case: CaseResult, task: Task, num_starts: int) -> None:
    """Print the tables of one case, joined from all starts."""
    config, workload = task.config, case.workload
    most = "" if workload.trace is None else "up to "
    console.line(
        f"{len(case.tokens)} ranks over {case.transport}, with {most}{', '.join(map(str, case.tokens))} tokens"
    )
    sizes = f"{config.num_experts} experts, top-{config.top_k}, hidden size {config.hidden_size}"
    console.line(f"{sizes}, {workload}")
    if case.ran:
        _show_differences(case)
        _show_times(case, max(task.rounds, workload.steps), num_starts)
        _show_costs(case)
        if task.width is not None:
            _show_loads(case, task.width)
    for one in case.variants:
        if one.refused is not None:
            console.line(f"{one.backend}, {one.mode}: not run: {one.refused}", mark="-")
    wrong = [f"{one.backend}, {one.mode}" for one in case.ran if not one.agrees(case.tolerance)]
    missing = {one.backend: None for one in case.variants if one.backend not in {ran.backend for ran in case.ran}}
    if case.passes(task.explicit):
        console.line("all agree with the reference", mark="ok")
    elif wrong:
        console.line(f"further from the reference than {case.tolerance:g}: {'; '.join(wrong)}", mark="failed")
    else:
        console.line(f"not run: {', '.join(missing)}", mark="failed")


def _show_differences(case: CaseResult) -> None:
    rows = []
    for one in case.ran:
        numbers = [f"{one.from_reference[name]:.1e}" for name in QUANTITIES]
        verdict = "dropped rows" if one.dropped else "ok" if one.agrees(case.tolerance) else "FAILED"
        rows.append([one.backend, one.mode, *numbers, f"{max(one.from_first.values()):.1e}", verdict])
    console.table(
        ["backend", "mode", "y", "x", "weights", "experts", "first", ""],
        rows,
        text_columns=2,
        caption="Largest difference of the output and of the gradients from a dense float64 reference, divided by the "
        f"largest value. At most {case.tolerance:g} is allowed. first: largest difference from the first line.",
    )


def _show_times(case: CaseResult, rounds: int, num_starts: int) -> None:
    rows = []
    for one in case.ran:
        if not one.starts:
            rows.append([one.backend, one.mode, "emulated", *["-"] * (len(PHASES) + 4)])
            continue
        ratio, interval = one.ratio(case.ran[0]) if case.ran[0].starts else (None, (0.0, 0.0))
        compared = ["-"] * 2 if ratio is None else [f"{ratio:.2f}", "{:.2f}..{:.2f}".format(*interval)]
        overhead = "-" if case.floor is None else f"{one.overhead(case.floor):.2f}"
        rows.append([one.backend, one.mode, *(f"{ms:.2f}" for ms in one.milliseconds.values()), *compared, overhead])
    starts = f" in each of {num_starts} starts" if num_starts > 1 else ""
    console.table(
        ["backend", "mode", *PHASES, "total", "cpu", "ratio", "95 %", "above\nfloor"],
        rows,
        text_columns=2,
        caption=f"Median milliseconds of {rounds} rounds{starts}, on the slowest rank of each round. Dispatch includes "
        "its plan. Experts cost nothing; their column has the exchange of weights. cpu: processor time. ratio: of the "
        "total to the first line, with its 95 % interval. above floor: dispatch and combine, minus the floor's.",
    )


def _show_costs(case: CaseResult) -> None:
    # A column for dtypes does not fit on 80 columns.
    dtypes = [f"{one.row_dtypes} ({one.backend})" for one in case.ran if one.row_dtypes != "unknown"]
    if dtypes:
        console.line(f"Rows travel in {'; '.join(dict.fromkeys(dtypes))}")
    least = case.floor.bytes_sent if case.floor else None
    rows = []
    for one in case.ran:
        sent = ["emulated" if one.emulated else "uncounted", *["-"] * len(PHASES)]
        if one.bytes_sent is not None:
            of_floor = f"{one.bytes_sent['dispatch'] / least['dispatch']:.2f}" if least and least["dispatch"] else "-"
            sent = [*(f"{nbytes / 1e6:.3f}" for nbytes in one.bytes_sent.values()), of_floor]
        padded = [f"{one.rows_padded[cause]:.4g}" if one.rows_padded else "-" for cause in ("rank", "expert")]
        syncs = "-" if one.host_syncs is None else str(one.host_syncs)
        peak = "-" if one.peak_bytes is None else f"{one.peak_bytes / 1e6:.1f}"
        rows.append([one.backend, one.mode, *sent, *padded, syncs, peak])
    console.table(
        ["backend", "mode", *(f"MB\n{phase}" for phase in PHASES), *_COSTS],
        rows,
        text_columns=2,
        caption="MB (1e6 bytes) sent and padded rows: sum of all ranks, mean of all steps. of floor: bytes of "
        "dispatch, divided by the floor's. Host syncs: of rank 0. peak: memory of the rank with the highest peak.",
    )


def _show_loads(case: CaseResult, width: int) -> None:
    rows = []
    for one in case.ran:
        if one.load is None:
            continue
        times = ["emulated", "-"]
        if one.load.busiest_ms is not None:
            times = [f"{one.load.busiest_ms:.1f}", f"{one.load.busiest_ratio:.2f}"]
        even = "-" if one.load.break_even is None else f"{one.load.break_even:.0f}"
        copied = f"{one.load.copied_bytes / 1e6:.3f}"
        rows.append(
            [one.backend, one.mode, f"{one.load.imbalance:.2f}", f"{one.load.peak_rows:.0f}", copied, even, *times]
        )
    console.table(
        ["backend", "mode", "busiest\n/ mean", "peak\nrows", "MB of\nweights", "break-\neven", "ms", "ratio"],
        rows,
        text_columns=2,
        caption="Rows of the busiest rank. MB of weights: of experts that travel in a forward, sum of all ranks, mean "
        "of all steps; as many gradients travel back. break-even: tokens per expert from which balancing saves time; "
        f"here are {case.tokens_per_expert:.0f}. ms, ratio: busiest rank in a step with experts of width {width}; "
        "processor time on CPUs.",
    )
    if case.flop_per_byte is not None:
        console.line(f"FLOP of the experts in the time of one byte between ranks: {case.flop_per_byte:.0f}")


def show_against(found: dict[str, Any]) -> None:
    """Print the ratios to an earlier run."""
    console.line(f"against a run of {found['date']}")
    for name, (then, now) in found["changed"].items():
        console.line(f"{name} was {then}, is {now}", mark="-")
    quantities = [*PHASES, "total", "bytes", "peak"]
    for case in dict.fromkeys(ratio["case"] for ratio in found["ratios"]):
        rows = []
        for ratio in found["ratios"]:
            if ratio["case"] == case:
                numbers = [f"{ratio['over'][name]:.2f}" if name in ratio["over"] else "-" for name in quantities]
                interval = "-" if ratio["interval"] is None else "{:.2f}..{:.2f}".format(*ratio["interval"])
                rows.append([ratio["backend"], ratio["mode"], *numbers, interval, ratio["verdict"]])
        console.line(case)
        console.table(
            ["backend", "mode", *quantities, "total, 95 %", "verdict"],
            rows,
            text_columns=2,
            caption=f"Ratio of this run to that run. A verdict needs {NEEDED_STARTS} starts of each (--starts). If the "
            "load of the machine changes between the two runs, equal code may still get a verdict.",
        )


def draw(cases: Sequence[CaseResult], path: Path) -> None:
    """Write a picture of the times by phase to ``path``: a panel for each case."""

    def bar(one: VariantResult) -> tuple[str, list[float]]:
        return f"{one.backend}, {one.mode}", [one.milliseconds[phase] for phase in PHASES]

    timed = [(case, [one for one in case.ran if one.starts]) for case in cases]
    panels = [(str(case.workload), [bar(one) for one in variants]) for case, variants in timed if variants]
    if panels:
        save_bars(panels, PHASES, path, xlabel="ms, medians")
