"""The page on the log of a run: loads, padding, bytes and graph-safe room, step by step and by rank."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from moe_dispatch.backends.capacity import balanced_rows
from moe_dispatch.cli.pictures import curves, stacked_bars
from moe_dispatch.cli.report.load_sections import Timeline, imbalance_section, load_section
from moe_dispatch.cli.report.page import Section, Table, figure, number, percent, render, unit_of
from moe_dispatch.dispatchers.requirements import shape_of
from moe_dispatch.traces import RunLog


def run_page(name: str, run: RunLog) -> str:
    """Make the page on the log of a run, HTML.

    Args:
        name: name of the directory.
        run: log with at least one step.
    """
    timeline = Timeline(
        names=["all dispatchers"],
        ep_size=run.ep_size,
        layer_C=torch.zeros(run.steps, dtype=torch.int64),
        step_C=torch.arange(run.steps),
        tokens_CE=run.tokens_SE,
    )
    sections = [
        load_section(timeline),
        imbalance_section(timeline),
        padding_section(run, timeline),
        bytes_section(run),
        overflow_section(run, timeline),
    ]
    return render(f"Run {name}", _intro(run, timeline), _settings_table(run), sections)


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


def _settings_table(run: RunLog) -> Table:
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


_CAUSES = {"masked": "masked", "rank": "for ranks", "expert": "for experts"}
_MOST_BARS = 16
_BACKWARD = ".backward"

Line = tuple[str, list[float], list[float], list[float]]


def padding_section(run: RunLog, timeline: Timeline) -> Section:
    """Show rows without a token, by cause, step and rank."""
    totals = {cause: int(counts.sum()) for cause, counts in run.rows.items()}
    alt = "Lines over steps of a rank's rows that hold no token, on average: " + "; ".join(
        f"{float(run.rows[cause].double().mean()):.1f} {label}" for cause, label in _CAUSES.items()
    )
    lines = [_line(label, run.rows[cause], timeline) for cause, label in _CAUSES.items()]
    return Section(
        heading="Padding by cause",
        text=[
            f"{number(run.tokens_SE.sum())} rows went to experts. {number(totals['cut'])} rows that are no tokens were "
            "left out before, at no cost.",
            "Masked rows are no tokens, sent nowhere; rows for ranks make counts equal or aligned; rows for experts "
            "round each expert's rows up to pad_multiple. Lines are means of ranks, bands reach from the least to the "
            "most of any rank.",
        ],
        pictures=[curves(lines, name="padding", alt=alt, stride=timeline.stride, ylabel="rows of a rank", bottom=0.0)],
        tables=[_padding_table(run, totals), _padding_by_rank(run)],
    )


def _padding_table(run: RunLog, totals: dict[str, int]) -> Table:
    real = int(run.tokens_SE.sum())
    rows = [
        (label, number(totals[cause]), figure(totals[cause] / max(run.steps, 1))) for cause, label in _CAUSES.items()
    ]
    share = percent(totals["expert"], real + totals["expert"])
    return Table(
        caption=f"Rows without a token, all ranks; those for experts are {share} of the rows at experts",
        headings=("cause", "rows", "per step"),
        rows=rows,
    )


def _padding_by_rank(run: RunLog) -> Table:
    rows = [
        (str(rank), *(number(run.rows[cause][:, rank].sum()) for cause in ("cut", *_CAUSES)))
        for rank in range(run.ep_size)
    ]
    return Table(
        caption="Rows without a token, by rank",
        headings=("rank", "cut", *_CAUSES.values()),
        rows=rows,
        folded=True,
    )


def bytes_section(run: RunLog) -> Section:
    """Show the bytes that ranks sent, by collective."""
    heading, steps = "Bytes by rank and collective", max(run.steps, 1)
    note = (
        "A run counts no pairs of ranks, and no other backend's bytes: record some steps with Trace.record for these. "
        "What a library of its own sends, such as deep_ep, is not counted."
    )
    if not run.sent:
        return Section(heading=heading, text=["Nothing was counted that ranks sent each other.", note])
    total_P = torch.stack(list(run.sent.values())).sum((0, 1)).double() / steps
    unit, scale = unit_of(float(total_P.max()))
    parts = {label: counts.sum(0).double() / steps / scale for label, counts in run.sent.items()}
    kinds = {"dispatch": "dispatch", "combine": "combine", "other": "other"}
    bars_KP = {kind: torch.zeros(run.ep_size, dtype=torch.float64) for kind in kinds}
    for label, sent_P in parts.items():
        verb = label.removesuffix(_BACKWARD)
        bars_KP[verb if verb in kinds else "other"] += sent_P
    shown = range(min(run.ep_size, _MOST_BARS))
    bars = [(f"rank {rank}", [float(bars_KP[kind][rank]) for kind in kinds]) for rank in shown]
    alt = (
        f"Bars of {unit} per step that each rank sends: from {figure(total_P.min() / scale)} to "
        f"{figure(total_P.max() / scale)}, most by rank {int(total_P.argmax())}."
    )
    text = ["What ranks sent to others in a step, forward and backward."]
    if run.ep_size > _MOST_BARS:
        text.append(f"The picture has the first {_MOST_BARS} of {run.ep_size} ranks; the table has all.")
    return Section(
        heading=heading,
        text=[*text, note],
        pictures=[stacked_bars(bars, list(kinds), name="bytes", alt=alt, xlabel=f"{unit} per step")],
        tables=[_bytes_table(parts, total_P / scale, unit)],
    )


def _bytes_table(parts: dict[str, Tensor], total_P: Tensor, unit: str) -> Table:
    rows = [
        (str(rank), *(figure(sent_P[rank]) for sent_P in parts.values()), figure(total))
        for rank, total in enumerate(total_P)
    ]
    rows.append(("all", *(figure(sent_P.sum()) for sent_P in parts.values()), figure(total_P.sum())))
    return Table(
        caption=f"{unit} per step to other ranks, by collective", headings=("rank", *parts, "in all"), rows=rows
    )


def overflow_section(run: RunLog, timeline: Timeline) -> Section:
    """Show the rows that graph-safe dispatches needed, and those that they had room for."""
    heading = "Overflow"
    if run.needed_SP is None or run.room_S is None:
        return Section(
            heading=heading,
            text=[
                "Nothing can overflow in eager mode, where sizes follow the routing. A trace of some steps tells what "
                "a capacity_factor would have come to."
            ],
        )
    kinds = [("rows of a rank's experts", run.needed_SP, run.room_S)]
    if run.pairs_needed_SP is not None and run.pairs_room_S is not None:
        kinds.append(("rows from a rank to a rank", run.pairs_needed_SP, run.pairs_room_S))
    most, enough = int(run.needed_SP.max()), _factor(run)
    over = [_first_above(needed_SP, room_S) for _, needed_SP, room_S in kinds]
    fate = "What did not fit was dropped; the loads above are of what did."
    said = "There was room for all of them." if over == [None] * len(over) else fate
    alt = f"Lines over steps: the most rows that a rank has needed so far, in the end {most}, and its room."
    most_S1, mean_S1 = run.needed_SP.amax(1, keepdim=True), run.needed_SP.double().mean(1, keepdim=True)
    lines = [
        _line(label, values, timeline)
        for label, values in (
            ("rank that needs most", most_S1),
            ("mean of ranks", mean_S1),
            ("room", run.room_S.unsqueeze(1)),
        )
    ]
    return Section(
        heading=heading,
        text=[
            f"The most rows that any dispatch so far needed for a rank's experts, and the room for them. {said} "
            f"capacity_factor {enough:.3f} would have been enough.",
            "Counted is the largest number, so a line that goes level hides dispatches that needed less, or as much "
            "again; how many rows were dropped is not counted.",
        ],
        pictures=[curves(lines, name="overflow", alt=alt, stride=timeline.stride, ylabel="rows", bottom=0.0)],
        tables=[_overflow_table(kinds)],
    )


def _factor(run: RunLog) -> float:
    """Return the least ``capacity_factor`` that would have dropped nothing."""
    assert run.needed_SP is not None
    return max(int(run.needed_SP.max()), 1) / balanced_rows(shape_of(run.config, run.ep_size))


def _first_above(needed_SP: Tensor, room_S: Tensor) -> int | None:
    """Return the first step in which more rows were needed than there was room for; None if there is none."""
    above = (needed_SP.amax(1) > room_S).nonzero()
    return int(above[0]) if len(above) else None


def _overflow_table(kinds: Sequence[tuple[str, Tensor, Tensor]]) -> Table:
    rows = []
    for label, needed_SP, room_S in kinds:
        first = _first_above(needed_SP, room_S)
        most = needed_SP.amax(0)
        rows.append(
            (
                label,
                number(most.max()),
                str(int(most.argmax())),
                number(room_S[-1]),
                "-" if first is None else str(first),
            )
        )
    return Table(
        caption="What was needed at most",
        headings=("of a dispatch", "rows", "on rank", "room", "first overflow in step"),
        rows=rows,
    )


def _line(label: str, values_SP: Tensor, timeline: Timeline) -> Line:
    """Make a line of the mean, least and most of ranks, over the steps that a picture shows as one."""
    blocks = timeline.blocks(values_SP)
    return (
        label,
        [float(block.double().mean()) for block in blocks],
        [float(block.min()) for block in blocks],
        [float(block.max()) for block in blocks],
    )
