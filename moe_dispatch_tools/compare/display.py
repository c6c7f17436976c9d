"""Show the results of ``compare``: tables on a terminal, and a picture with bars. A case is plain data."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from moe_dispatch_tools import console
from moe_dispatch_tools.compare.measurement import PHASES, QUANTITIES, Task
from moe_dispatch_tools.pictures import save_bars


def show_case(case: dict[str, Any], task: Task) -> None:
    """Print the tables of one case."""
    config, tokens, outcomes = task.config, case["tokens"], case["outcomes"]
    most = "" if case["trace"] is None else "up to "
    ranks = console.counted(len(tokens), "rank")
    console.line(f"{ranks} over {case['transport']}, with {most}{', '.join(map(str, tokens))} tokens")
    sizes = f"{config.num_experts} experts, top-{config.top_k}, hidden size {config.hidden_size}"
    console.line(f"{sizes}, {case['case']}")
    ran = [one for one in outcomes if one["refused"] is None]
    if ran:
        _show_tables(case, ran, task)
    for one in outcomes:
        if one["refused"] is not None:
            console.line(f"{one['backend']}, {one['mode']}: not run: {one['refused']}", mark="-")
    for one in outcomes:
        if one["uneven"]:
            console.line(
                f"{one['backend']}, {one['mode']}: {console.counted(one['uneven'], 'dispatch', 'dispatches')} in "
                f"{console.counted(case['steps'], 'step')} left out copies of experts that would have had fewer than "
                "balance.min_rows rows. balance.min_rows=0 makes every copy.",
                mark="-",
            )
    if case["agree"]:
        console.line("all agree with the reference", mark="ok")
    else:
        failed = "; ".join(f"{one['backend']}, {one['mode']}" for one in outcomes if not one["agrees"])
        console.line(f"not run, or further from the reference than {case['tolerance']:g}: {failed}", mark="failed")


def _show_tables(case: dict[str, Any], ran: Sequence[dict[str, Any]], task: Task) -> None:
    names = [[one["backend"], one["mode"]] for one in ran]
    phases = [f"MB\n{phase}" for phase in PHASES]
    differences = [
        [
            *_cells("{:.1e}", one["from_reference"].values()),
            *_cells("{:.1e}", [None if None in one["from_first"].values() else max(one["from_first"].values())]),
            "dropped rows" if one["dropped"] else "ok" if one["agrees"] else "FAILED",
        ]
        for one in ran
    ]
    _table(
        [*QUANTITIES, "first", ""],
        names,
        differences,
        "Largest difference of the output and of the gradients from a dense float64 reference, divided by the largest "
        f"value. At most {case['tolerance']:g} is allowed. first: largest difference from the first line.",
    )
    times = [
        [
            *_cells("{:.2f}", one["milliseconds"].values()),
            *(form.format(*one["ratio"]) if one["ratio"] else "-" for form in ("{1:.2f}", "{0:.2f}..{2:.2f}")),
            *_cells("{:.2f}", [one["overhead_ms"]]),
        ]
        for one in ran
    ]
    experts = "cost nothing" if task.width is None else f"have the width {task.width}"
    _table(
        [*PHASES, "total", "cpu", "ratio", "quartiles", "above\nfloor"],
        names,
        times,
        f"Median milliseconds of {max(task.rounds, case['steps'])} rounds, on the slowest rank of each round. Dispatch "
        f"includes its plan. Experts {experts}. cpu: processor time of the busiest rank. ratio: of the total to the "
        "first line, with the quartiles of the rounds. above floor: dispatch and combine, minus the floor's.",
    )
    costs = [
        [
            *_cells("{:.3f}", [nbytes / 1e6 for nbytes in (one["bytes_sent"] or {}).values()] or [None] * len(PHASES)),
            *_cells("{:.4g}", [(one["rows_padded"] or {}).get(cause) for cause in ("rank", "expert")]),
            *_cells("{:.2f}", [one["imbalance"]]),
            *_cells("{}", [one["peak_rows"], one["host_syncs"]]),
        ]
        for one in ran
    ]
    _table(
        [*phases, "padded:\nranks", "padded:\nexperts", "busiest\n/ mean", "most\nrows", "syncs"],
        names,
        costs,
        "MB (1e6 bytes) sent and padded rows: sum of all ranks, mean of all steps. busiest / mean: rows of the rank "
        "with most rows, mean of all steps. most rows: of a rank in a step. syncs: host syncs of rank 0. -: not "
        "counted, because another library sends the rows, or emulates one.",
    )
    kinds = ("saved_bytes", "peak_bytes")
    memory = [
        [
            *_cells("{:.2f}", [one[kind] and one[kind] / 1e6 for kind in kinds]),
            *_cells("{:.2f}", [one[kind] and ran[0][kind] and one[kind] / ran[0][kind] for kind in kinds]),
        ]
        for one in ran
    ]
    _table(
        ["MB\nsaved", "MB\npeak", "ratio\nsaved", "ratio\npeak"],
        names,
        memory,
        "Memory of a step on the rank with most of it. saved: what autograd saves in the forward, without the matrices "
        "of experts. peak: of what a step allocates, gradients of experts too, with the backend's pool of CPU memory. "
        "ratio: to the first line.",
    )


def _table(headings: Sequence[str], names: Sequence[list[str]], rows: Sequence[list[str]], caption: str) -> None:
    lines = [name + row for name, row in zip(names, rows, strict=True)]
    console.table(["backend", "mode", *headings], lines, text_columns=2, caption=caption)


def _cells(form: str, values: Iterable[Any]) -> list[str]:
    return ["-" if value is None else form.format(value) for value in values]


def draw(cases: Sequence[dict[str, Any]], path: Path) -> None:
    """Write a picture of the times to ``path``: a panel for each case, and bars as long as the totals of the tables.

    A median of totals is no sum of medians of phases, so the medians only say how a bar is divided.
    """
    panels = [
        (
            case["case"],
            [
                (f"{one['backend']}, {one['mode']}", _parts_of_total(one["milliseconds"]))
                for one in case["outcomes"]
                if one["rounds"]
            ],
        )
        for case in cases
    ]
    if panels := [(title, bars) for title, bars in panels if bars]:
        save_bars(panels, PHASES, path, xlabel="time of a step in ms: the median, divided among its phases")


def _parts_of_total(milliseconds: dict[str, float]) -> list[float]:
    phases = [milliseconds[phase] for phase in PHASES]
    return [milliseconds["total"] * phase / sum(phases) for phase in phases]
