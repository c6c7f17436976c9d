"""What the main job shows and what it holds itself to: progress, the table of runs, the checks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table

from packed_text.training import Run, Task

MAX_DIFFERENCE = 1e-4
# Where rows travel in bfloat16: it keeps 8 bits, so rows and gradients are off by up to 2^-9 of themselves. The first
# loss shows just that. Later routers choose other experts for some bytes, and a step's loss moves by some percent, by
# how many depends on how the machine rounds its products: 3% to 5% at the worst step have been seen.
MAX_WIRE_DIFFERENCE = 1e-1
MAX_FIRST_WIRE_DIFFERENCE = 1e-3
MIN_FALL = 0.30
# The warm-up alone takes 10 steps: a shorter run shows whether things work, not whether they learn.
STEPS_TO_JUDGE = 30


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Check:
    """A claim about runs and what was measured; ``passed`` is None where too few steps were made to judge."""

    claim: str
    measured: str
    passed: bool | None


@final
class Bars:
    """A progress bar per task, in the order in which they run; use as a context."""

    def __init__(self, console: Console, tasks: Sequence[Task], *, visible: bool = True) -> None:
        columns = (
            TextColumn("{task.description:>10}"),
            BarColumn(bar_width=32),
            MofNCompleteColumn(),
            TextColumn("[bold]{task.fields[loss]}"),
            TimeElapsedColumn(),
        )
        self._progress = Progress(*columns, console=console, disable=not visible)
        self._bars: list[TaskID] = [
            self._progress.add_task(task.config.backend_name, total=task.steps, start=False, loss="") for task in tasks
        ]

    def __enter__(self) -> Bars:
        self._progress.start()
        self._progress.start_task(self._bars[0])
        return self

    def __exit__(self, *error: object) -> None:
        self._progress.stop()

    def advance(self, index: int, loss: float) -> None:
        """One step of a task is done; after its last the next task's clock runs."""
        self._progress.update(self._bars[index], advance=1, loss=f"loss {loss:.3f}")
        if self._progress.tasks[index].finished and index + 1 < len(self._bars):
            self._progress.start_task(self._bars[index + 1])


def largest_difference(run: Run, reference: Run) -> float:
    """The largest relative difference of two runs' losses at the same step; NaN counts as infinite."""
    differences = [abs(a - b) / abs(b) for a, b in zip(run.losses, reference.losses, strict=True)]
    return max(difference if difference == difference else float("inf") for difference in differences)


def allowed_difference(run: Run) -> float:
    """By what a run's losses may differ from the reference's, relative to them."""
    return MAX_DIFFERENCE if run.wire_dtype is None else MAX_WIRE_DIFFERENCE


def check_runs(runs: Sequence[Run]) -> list[Check]:
    """What must hold of the runs, the last of which is what the others are compared with."""
    return [
        *(_same_curve(run, runs[-1]) for run in runs[:-1]),
        *(_same_start(run, runs[-1]) for run in runs[:-1] if run.wire_dtype is not None),
        *(_loss_falls(run) for run in runs),
        *(_experts_work(run) for run in runs),
    ]


def _same_curve(run: Run, reference: Run) -> Check:
    difference, allowed = largest_difference(run, reference), allowed_difference(run)
    return Check(
        claim=f"{run.backend} on {run.ranks} ranks has the losses of {reference.backend}",
        measured=f"within {difference:.1e} at every step, allowed {allowed:.0e}",
        passed=difference < allowed,
    )


def _same_start(run: Run, reference: Run) -> Check:
    difference = abs(run.losses[0] - reference.losses[0]) / reference.losses[0]
    return Check(
        claim=f"{run.backend} starts with the loss of {reference.backend}",
        measured=f"within {difference:.1e}, allowed {MAX_FIRST_WIRE_DIFFERENCE:.0e}",
        passed=difference < MAX_FIRST_WIRE_DIFFERENCE,
    )


def _loss_falls(run: Run) -> Check:
    fall = 1 - run.losses[-1] / run.losses[0]
    return Check(
        claim=f"{run.backend}: the loss falls by at least {MIN_FALL:.0%}",
        measured=f"{run.losses[0]:.3f} to {run.losses[-1]:.3f}, {fall:.0%} less",
        passed=fall >= MIN_FALL if len(run.losses) >= STEPS_TO_JUDGE else None,
    )


def _experts_work(run: Run) -> Check:
    """Over the second half of the steps: what the first does is the initial router's doing."""
    second_half = run.tokens_per_expert[len(run.tokens_per_expert) // 2 :]
    totals = [[sum(tokens) for tokens in zip(*layer, strict=True)] for layer in zip(*second_half, strict=True)]
    fewest, most = min(map(min, totals)), max(map(max, totals))
    return Check(
        claim=f"{run.backend}: no expert stays idle",
        measured=f"{fewest:,} to {most:,} tokens each in the last {len(second_half)} steps",
        passed=fewest > 0,
    )


def runs_table(runs: Sequence[Run]) -> Table:
    """The runs, side by side; fits 80 columns."""
    table = Table(
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        caption="MB (1e6 bytes) that all ranks together send to others in a step, counted at the collectives: by the "
        "dispatchers in forward and backward; and for gradients and losses. Rows padded in all steps and layers: for "
        "equal counts on all ranks; and to fill experts up to pad_multiple. An emulated library does not send what the "
        "real one would, nor as fast.",
        caption_justify="left",
    )
    table.add_column("backend")
    headings = "first\nloss", "last\nloss", "tokens/s", "MB/step\ndispatch", "MB/step\nother"
    for heading in (*headings, "padded:\nranks", "padded:\nexperts"):
        table.add_column(heading, justify="right")
    for run in runs:
        table.add_row(
            run.backend,
            f"{run.losses[0]:.4f}",
            f"{run.losses[-1]:.4f}",
            "emulated" if run.emulated else f"{run.tokens_per_second:,.0f}",
            "-" if run.emulated else f"{run.bytes_per_step['model'] / 1e6:.1f}",
            f"{run.bytes_per_step['training'] / 1e6:.1f}",
            f"{run.rows_padded['rank']:,}",
            f"{run.rows_padded['expert']:,}",
        )
    return table


def show_checks(console: Console, checks: Sequence[Check]) -> None:
    """One line per check."""
    marks = {True: "[green]ok[/]    ", False: "[red]failed[/]", None: "[yellow]-[/]     "}
    for check in checks:
        note = f" (judged from {STEPS_TO_JUDGE} steps on)" if check.passed is None else ""
        console.print(f"{marks[check.passed]} {check.claim}: {check.measured}{note}", highlight=False, soft_wrap=True)
