"""The table of runs, and the checks that the demo holds them to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

from packed_text.training import Run

MAX_DIFFERENCE = 1e-4
# Rows that travel in bfloat16 keep 8 bits, so rows and gradients have relative errors of up to 2^-9. The first loss
# shows this rounding alone. In later steps, routers choose other experts for some bytes, and the loss moves by some
# percent. The amount depends on how the machine rounds its products: 3% to 5% have been seen at the worst step.
MAX_WIRE_DIFFERENCE = 1e-1
MAX_FIRST_WIRE_DIFFERENCE = 1e-3
MIN_FALL = 0.30
# The warm-up alone takes 10 steps. A run with fewer steps than this cannot show whether the model learns.
STEPS_TO_JUDGE = 30
EXPLANATION = """\
MB/step dispatch: 1e6 bytes that the dispatchers of all ranks send to other
ranks in a step, forward and backward. padded: rows without a token, over all
steps and layers; "ranks" gives every rank the same number of rows, "experts"
fills the rows of each expert up to pad_multiple. An emulated library does not
send the bytes that the real library sends, and its speed says nothing."""


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Check:
    """A claim about runs and its measurement. ``passed`` is None if the runs have too few steps to judge."""

    claim: str
    measured: str
    passed: bool | None


def largest_difference(run: Run, reference: Run) -> float:
    """Return the largest relative difference of the losses of two runs at the same step. NaN counts as infinite."""
    differences = [abs(a - b) / abs(b) for a, b in zip(run.losses, reference.losses, strict=True)]
    return max(difference if difference == difference else float("inf") for difference in differences)


def allowed_difference(run: Run) -> float:
    """Return the largest relative difference from the reference that the losses of a run may have."""
    return MAX_DIFFERENCE if run.wire is None else MAX_WIRE_DIFFERENCE


def check_runs(runs: Sequence[Run]) -> list[Check]:
    """Check the runs. The last run is the reference for the others."""
    return [
        *(_same_curve(run, runs[-1]) for run in runs[:-1]),
        *(_same_start(run, runs[-1]) for run in runs[:-1] if run.wire is not None),
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
    """Check the second half of the steps: in the first half, the initial weights of the router decide."""
    second_half = run.tokens_per_expert[len(run.tokens_per_expert) // 2 :]
    totals = [[sum(tokens) for tokens in zip(*layer, strict=True)] for layer in zip(*second_half, strict=True)]
    fewest, most = min(map(min, totals)), max(map(max, totals))
    return Check(
        claim=f"{run.backend}: no expert stays idle",
        measured=f"{fewest:,} to {most:,} tokens each in the last {len(second_half)} steps",
        passed=fewest > 0,
    )


def table(runs: Sequence[Run]) -> str:
    """Return the runs as a table of 80 columns, with an explanation."""
    lines = [f"{'':10}{'first':>8}{'last':>8}{'':>11}{'MB/step':>10}{'padded:':>11}{'padded:':>11}"]
    lines += [f"{'backend':10}{'loss':>8}{'loss':>8}{'tokens/s':>11}{'dispatch':>10}{'ranks':>11}{'experts':>11}"]
    for run in runs:
        speed = "emulated" if run.emulated else f"{run.tokens_per_second:,.0f}"
        sent = "-" if run.emulated else f"{run.bytes_per_step / 1e6:.1f}"
        lines.append(
            f"{run.backend:10}{run.losses[0]:>8.4f}{run.losses[-1]:>8.4f}{speed:>11}{sent:>10}"
            f"{run.rows_padded['rank']:>11,}{run.rows_padded['expert']:>11,}"
        )
    return "\n".join(["", *lines, "", EXPLANATION, ""])


def checks_text(checks: Sequence[Check]) -> str:
    """Return one line for each check."""
    marks = {True: "ok", False: "failed", None: "-"}
    notes = {True: "", False: "", None: f" (judged from {STEPS_TO_JUDGE} steps on)"}
    return "\n".join(
        f"{marks[check.passed]:6} {check.claim}: {check.measured}{notes[check.passed]}" for check in checks
    )
