"""Run ``compare``: make a task from the command line, and show the comparison as tables on a terminal."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, cast

from moe_dispatch.backends import known_backends
from moe_dispatch.config import DispatcherConfig
from moe_dispatch.errors import ConfigError
from moe_dispatch_testing.scenario import ROUTINGS, TOLERANCES, DtypeName
from moe_dispatch_tools import console
from moe_dispatch_tools.compare.comparison import MODES, QUANTITIES, Comparison, Outcome, Task, Variant
from moe_dispatch_tools.compare.measurement import measure
from moe_dispatch_tools.compare.workload import MOST_STEPS, Replay, Workload
from moe_dispatch_tools.names import PLACEMENT_FIELDS, NamedBackend, parse_backend
from moe_dispatch_tools.ranks import num_ranks, on_ranks, this_rank
from moe_dispatch_tools.traces import Trace

DEFAULT_RANKS = 4


def make_workload(
    *,
    tokens: int | None,
    steps: int | None,
    dtype: str,
    routing: str | None,
    seed: int,
    trace: Path | None,
) -> tuple[Workload, int]:
    """Make the workload of the command line, and its default number of ranks. An option that is not given is None.

    Raises:
        ConfigError: The dtype or the routing is wrong, or an option contradicts the trace.
        TraceError: The trace cannot be read.
    """
    _check_choice("dtype", dtype, TOLERANCES)
    if routing is not None:
        _check_choice("routing", routing, ROUTINGS)
    given = {"tokens": tokens, "steps": steps, "routing": routing}
    chosen: dict[str, Any] = {option: value for option, value in given.items() if value is not None}
    workload = Workload(dtype=cast(DtypeName, dtype), seed=seed, trace=trace, **chosen)
    if trace is None:
        return workload, DEFAULT_RANKS
    for option in ("tokens", "routing"):
        if option in chosen:
            raise ConfigError(
                f"--{option} must not be given with --trace, because the trace decides it, got {chosen[option]!r}. "
                "Leave out one of the two."
            )
    found = Trace.load(trace)
    recorded = len(found.calls)
    steps = min(recorded, MOST_STEPS) if steps is None else steps
    return dataclasses.replace(workload, steps=steps, recorded=recorded), found.ep_size


def make_task(
    file: Path,
    backends: str | None,
    modes: Sequence[str],
    workload: Workload,
    *,
    tolerance: float | None = None,
    expert_width: int | None = None,
) -> Task:
    """Make the task of the command line.

    Args:
        file: Path of the config. Without ``backends``, the backend of the config is compared, and for "auto" all known
            backends.
        backends: Names separated by commas.
        modes: Names in ``MODES``.
        workload: Tokens and routing.
        tolerance: Tolerance; None for the tolerance of the dtype.
        expert_width: As in ``Task``.

    Raises:
        ConfigError: The config, the name or an option of a backend, the mode or the tolerance is wrong.
        BackendUnavailableError: A backend given by its path cannot be imported.
    """
    for mode in modes:
        _check_choice("mode", mode, MODES)
    if tolerance is not None and not 0 < tolerance < math.inf:
        raise ConfigError(f"--tolerance must be a number above 0, got {tolerance:g}. Leave it out for the default.")
    config = DispatcherConfig.load(file)
    named = _named(config, backends)
    return Task(
        config=config.replace(backend="auto"),
        variants=tuple(Variant(backend=backend, mode=mode) for backend in named for mode in modes),
        workload=workload,
        explicit=backends is not None or config.backend_name != "auto",
        tolerance=tolerance,
        expert_width=expert_width,
    )


def _check_choice(option: str, value: str, known: Iterable[str]) -> None:
    if value not in known:
        raise ConfigError(f"--{option} must be one of {', '.join(known)}, got {value!r}. Use one of them.")


def _named(config: DispatcherConfig, backends: str | None) -> list[NamedBackend]:
    if backends is not None:
        named = [parse_backend(text, fields=PLACEMENT_FIELDS) for text in dict.fromkeys(backends.split(","))]
        for backend in named:
            backend.spec()
            if backend.fields:  # a wrong value is wrong in every mode
                Variant(backend=backend, mode="eager").config(config, 1)
        return named
    if config.backend_name == "auto":
        return [parse_backend(name) for name in known_backends()]
    options = {} if isinstance(config.backend, str) else {**config.backend}
    options.pop("name", None)
    return [NamedBackend(label=config.backend_name, where=config.backend_name, options=options)]


def run(task: Task, ranks: int, *, as_json: bool) -> int:
    """Run the task, and show the comparison. Return the exit status: 0 if all backends agree, else 1.

    Raises:
        TraceError: The trace does not fit the config or the number of ranks.
        RankFailed, PeerFailed: As for ``on_ranks``.
    """
    if task.workload.trace is not None:  # check the trace before ranks start
        Replay.load(task.workload.trace, task.config, ranks=num_ranks(ranks), steps=task.workload.steps)
    first = this_rank() == 0
    with console.progress("compare", visible=first) as show:
        comparison: Comparison = on_ranks(partial(measure, task), ranks, lambda message: show(*message))
    if not first:  # only rank 0 may end with status 1: torchrun ends all ranks when one of them fails
        return 0
    if as_json:
        console.document(comparison.document())
    else:
        _show(comparison)
    return 0 if comparison.passes else 1


def _show(comparison: Comparison) -> None:
    workload, config = comparison.task.workload, comparison.task.config
    tokens, most = ", ".join(map(str, comparison.tokens)), "" if workload.trace is None else "up to "
    routing = f"{workload.routing} routing, {workload.steps} steps"
    if workload.trace is not None:
        routing = f"routing of {workload.trace}, the first {workload.steps} of {workload.recorded} dispatches"
    console.line(f"{len(comparison.tokens)} ranks over {comparison.transport}, with {most}{tokens} tokens")
    console.line(
        f"{config.num_experts} experts, top-{config.top_k}, hidden size {config.hidden_size}, {workload.dtype}, "
        f"{routing}"
    )
    for note in comparison.notes:
        console.line(note, mark="-")
    ran = [outcome for outcome in comparison.outcomes if outcome.refused is None]
    if ran:
        _show_differences(comparison, ran)
        _show_costs(ran)
        _show_loads(comparison, ran)
    for outcome in comparison.outcomes:
        if outcome.refused is not None:
            console.line(f"{outcome.backend}, {outcome.mode}: not run: {outcome.refused}", mark="-")
    if comparison.passes:
        console.line("all agree with the reference", mark="ok")
    else:
        console.line(_complaint(comparison, ran), mark="failed")


def _show_differences(comparison: Comparison, ran: Sequence[Outcome]) -> None:
    rows = []
    for outcome in ran:
        numbers = [f"{outcome.from_reference[name]:.1e}" for name in QUANTITIES]
        verdict = "ok" if comparison.agrees(outcome) else "FAILED"
        rows.append([outcome.backend, outcome.mode, *numbers, f"{max(outcome.from_first.values()):.1e}", verdict])
    console.table(
        ["backend", "mode", "y", "x", "weights", "experts", "first", ""],
        rows,
        text_columns=2,
        caption="Largest difference of the output and of the gradients from a dense float64 reference, divided by the "
        f"largest value. At most {comparison.tolerance:g} is allowed. first: largest difference from the first line.",
    )


def _show_costs(ran: Sequence[Outcome]) -> None:
    # A column for dtypes does not fit on 80 columns.
    dtypes = [f"{outcome.row_dtypes} ({outcome.backend})" for outcome in ran if outcome.row_dtypes != "unknown"]
    if dtypes:
        console.line(f"Rows travel in {'; '.join(dict.fromkeys(dtypes))}")
    rows = []
    for outcome in ran:
        sent = "emulated" if outcome.emulated else "uncounted"
        if outcome.bytes_sent is not None:
            sent = f"{outcome.bytes_sent / 1e6:.3f}"
        rows.append(
            [
                outcome.backend,
                outcome.mode,
                sent,
                f"{outcome.rows_padded['rank']:.4g}",
                f"{outcome.rows_padded['expert']:.4g}",
                "-" if outcome.host_syncs is None else str(outcome.host_syncs),
                "emulated" if outcome.emulated else f"{outcome.milliseconds:.1f}",
                "-" if outcome.emulated else f"{outcome.time_ratio:.2f}",
            ]
        )
    console.table(
        ["backend", "mode", "MB sent", "padded:\nranks", "padded:\nexperts", "host\nsyncs", "ms", "ratio"],
        rows,
        text_columns=2,
        caption="One plan, dispatch, combine and backward. MB (1e6 bytes) and padded rows: sum of all ranks, mean of "
        "all steps. Host syncs: of rank 0. ms: median time. ratio: to the first line.",
    )


def _show_loads(comparison: Comparison, ran: Sequence[Outcome]) -> None:
    rows = []
    for outcome in ran:
        if outcome.predicted is None or outcome.measured is None:
            continue
        for kind, load in (("predicted", outcome.predicted), ("measured", outcome.measured)):
            measured = load is outcome.measured
            rows.append(
                [
                    *([outcome.backend, outcome.mode] if not measured else ["", ""]),
                    kind,
                    f"{load.imbalance:.2f}",
                    f"{load.peak_rows:.0f}",
                    f"{load.copied_bytes / 1e6:.3f}",
                    "-" if load.break_even is None else f"{load.break_even:.0f}",
                    *(_times(outcome) if measured else ["", ""]),
                ]
            )
    if not rows:
        return
    console.table(
        ["backend", "mode", "", "busiest\n/ mean", "peak\nrows", "MB of\nweights", "break-\neven", "ms", "ratio"],
        rows,
        text_columns=3,
        caption="Rows of the busiest rank. MB of weights: of experts that travel in a forward, sum of all ranks, mean "
        "of all steps; as many gradients travel back. break-even: tokens per expert from which balancing saves time; "
        f"here are {comparison.tokens_per_expert:.0f}. ms, ratio: busiest rank in a step with experts of width "
        f"{comparison.task.width}; processor time on CPUs.",
    )
    if comparison.flop_per_byte is not None:
        console.line(f"FLOP of the experts in the time of one byte between ranks: {comparison.flop_per_byte:.0f}")


def _times(outcome: Outcome) -> list[str]:
    if outcome.busiest_ms is None:
        return ["emulated", "-"]
    return [f"{outcome.busiest_ms:.1f}", f"{outcome.busiest_ratio:.2f}"]


def _complaint(comparison: Comparison, ran: Sequence[Outcome]) -> str:
    wrong = [f"{outcome.backend}, {outcome.mode}" for outcome in ran if not comparison.agrees(outcome)]
    if wrong:
        return f"further from the reference than {comparison.tolerance:g}: {'; '.join(wrong)}"
    missing = dict.fromkeys(outcome.backend for outcome in comparison.outcomes)
    for outcome in ran:
        missing.pop(outcome.backend, None)
    return f"not run: {', '.join(missing)}"
