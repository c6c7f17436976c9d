"""The page about the log of a run: loads, padding, bytes and graph-safe capacity, by step and by rank."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from moe_dispatch.backends.capacity import balanced_rows
from moe_dispatch.dispatchers.requirements import shape_of
from moe_dispatch_tools.pictures import curves, stacked_bars
from moe_dispatch_tools.report.load_sections import Timeline, imbalance_section, load_section
from moe_dispatch_tools.report.page import PADDING_CAUSES, Section, Table, figure, number, percent, render, unit_of
from moe_dispatch_tools.traces import RunLog


def run_page(name: str, run: RunLog) -> str:
    """Make the page about the log of a run, as HTML.

    Args:
        name: Name of the directory.
        run: Log with at least one step.
    """
    timeline = Timeline(
        names=["all dispatchers"],
        ep_size=run.ep_size,
        layer_C=torch.zeros(run.steps, dtype=torch.int64),
        step_C=torch.arange(run.steps),
        tokens_CE=run.tokens_SE,
        received_CP=run.received_SP,
    )
    sections = [
        load_section(timeline),
        imbalance_section(timeline),
        padding_section(run, timeline),
        bytes_section(run),
        overflow_section(run, timeline),
        *([replay_section(run, timeline)] if run.slots_replayed else []),
    ]
    return render(f"Run {name}", _intro(run, timeline), _settings(run), sections)


def _intro(run: RunLog, timeline: Timeline) -> list[str]:
    imbalance_S = timeline.imbalance_C
    intro = [
        f"The busiest expert got {float(imbalance_S.mean()):.2f} times the mean of all experts on average, and at most "
        f"{float(imbalance_S.max()):.2f} times (step {int(imbalance_S.argmax())}).",
        "The numbers are sums over all dispatchers of one config and group. A step is the time between two calls of "
        "step().",
    ]
    if len(set(run.written)) > 1:
        intro.append(
            f"Ranks ended after different numbers of steps, from {min(run.written)} to {max(run.written)}. This page "
            f"has the {run.steps} steps that all ranks have."
        )
    return intro


def _settings(run: RunLog) -> list[tuple[str, str]]:
    config = run.config
    return [
        *((("dispatcher", run.name),) if run.name else ()),
        ("backend", run.backend_name),
        ("ranks", str(run.ep_size)),
        *((field, str(getattr(config, field))) for field in ("num_experts", "top_k", "hidden_size", "pad_multiple")),
        ("graph_safe", str(config.graph_safe)),
        *((("balance", f"{config.balance}, spare slots: {config.spare_experts_per_rank}"),) if config.balance else ()),
        *((("capacity_factor", str(config.capacity_factor)),) if config.graph_safe else ()),
        ("steps", number(run.steps)),
        ("dispatches of a rank", number(run.dispatches_SP[:, 0].sum())),
        *((f"{name} version", version) for name, version in run.versions.items()),
    ]


_CAUSES = {"masked": "masked", "rank": "for ranks", "expert": "for experts"}
_MOST_BARS = 16
_BACKWARD = ".backward"

Line = tuple[str, list[float], list[float], list[float]]


def padding_section(run: RunLog, timeline: Timeline) -> Section:
    """Show the padding rows by cause, step and rank."""
    totals = {cause: int(counts.sum()) for cause, counts in run.rows.items()}
    alt = "Lines over steps: padding rows of a rank, on average " + "; ".join(
        f"{float(run.rows[cause].double().mean()):.1f} {label}" for cause, label in _CAUSES.items()
    )
    lines = [_line(label, run.rows[cause], timeline) for cause, label in _CAUSES.items()]
    return Section(
        heading="Padding by cause",
        text=[
            f"The experts got {number(run.tokens_SE.sum())} rows. The dispatchers left out {number(totals['cut'])} "
            "padding rows of the layout, which cost nothing.",
            PADDING_CAUSES,
            "A line is the mean of all ranks. The band around it goes from the smallest to the largest value.",
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
        caption=f"Padding rows of all ranks. Rows for experts are {share} of all rows at experts.",
        headings=("cause", "rows", "per step"),
        rows=rows,
    )


def _padding_by_rank(run: RunLog) -> Table:
    rows = [
        (str(rank), *(number(run.rows[cause][:, rank].sum()) for cause in ("cut", *_CAUSES)))
        for rank in range(run.ep_size)
    ]
    return Table(
        caption="Padding rows by rank",
        headings=("rank", "cut", *_CAUSES.values()),
        rows=rows,
        folded=True,
    )


def bytes_section(run: RunLog) -> Section:
    """Show the bytes that each rank sent, by collective."""
    heading, steps = "Bytes by rank and collective", max(run.steps, 1)
    note = (
        "Bytes by pair of ranks, and the bytes of other backends, need a trace: record some steps with Trace.record. "
        "Bytes that another library such as deep_ep sends are not counted."
    )
    if not run.sent:
        return Section(heading=heading, text=["No bytes between ranks were counted.", note])
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
        f"{figure(total_P.max() / scale)}, the most by rank {int(total_P.argmax())}."
    )
    text = ["Bytes that each rank sends to other ranks in a step, forward and backward."]
    if run.ep_size > _MOST_BARS:
        text.append(f"The picture shows the first {_MOST_BARS} of {run.ep_size} ranks. The table shows all of them.")
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
        caption=f"{unit} per step to other ranks, by collective", headings=("rank", *parts, "total"), rows=rows
    )


def overflow_section(run: RunLog, timeline: Timeline) -> Section:
    """Show the rows that graph-safe dispatches needed, and their capacity."""
    heading = "Overflow"
    if run.needed_SP is None or run.room_S is None:
        return Section(
            heading=heading,
            text=[
                "Nothing can overflow in eager mode, because buffers grow with the routing. A report about a trace "
                "shows the overflow of each capacity_factor."
            ],
        )
    kinds = [("rows of a rank's experts", run.needed_SP, run.room_S)]
    if run.pairs_needed_SP is not None and run.pairs_room_S is not None:
        kinds.append(("rows from a rank to a rank", run.pairs_needed_SP, run.pairs_room_S))
    most, enough = int(run.needed_SP.max()), _factor(run)
    over = [_first_above(needed_SP, room_S) for _, needed_SP, room_S in kinds]
    fate = "Rows beyond the capacity were dropped, and the loads above do not count them."
    said = "No rows were dropped." if over == [None] * len(over) else fate
    alt = f"Lines over steps: the rows that a rank has needed so far at most, {most} at the end, and its capacity."
    most_S1, mean_S1 = run.needed_SP.amax(1, keepdim=True), run.needed_SP.double().mean(1, keepdim=True)
    lines = [
        _line(label, values, timeline)
        for label, values in (
            ("rank with most rows", most_S1),
            ("mean of ranks", mean_S1),
            ("capacity", run.room_S.unsqueeze(1)),
        )
    ]
    return Section(
        heading=heading,
        text=[
            "The largest number of rows that the experts of a rank have needed in any dispatch so far, and the "
            f"capacity. {said} A capacity_factor of {enough:.3f} would have been enough.",
            "The log has the largest number only. If a line is level, later dispatches needed the same number or "
            "fewer. The log does not count dropped rows.",
        ],
        pictures=[curves(lines, name="overflow", alt=alt, stride=timeline.stride, ylabel="rows", bottom=0.0)],
        tables=[_overflow_table(kinds)],
    )


def replay_section(run: RunLog, timeline: Timeline) -> Section:
    """Show the share of replayed slots in which the router would have chosen another expert."""
    drifted_LS = {name: counts.sum(1) for name, counts in run.slots_drifted.items()}
    slots_LS = {name: counts.sum(1) for name, counts in run.slots_replayed.items()}
    share_SL = torch.stack([100 * drifted_LS[name] / slots.clamp(min=1) for name, slots in slots_LS.items()], 1)
    alt = (
        "Line over steps: percent of replayed slots whose expert the router would not have chosen, the mean of all "
        f"dispatchers, at most {figure(share_SL.max())}."
    )
    return Section(
        heading="Routing replay",
        text=[
            "The share of replayed slots in which the router would not have chosen the replayed expert. If it grows "
            "from step to step, the model moves away from the pass that was recorded.",
            "The line is the mean of all dispatchers. The band around it goes from the smallest to the largest value.",
        ],
        pictures=[
            curves(
                [_line("drift", share_SL, timeline)],
                name="replay",
                alt=alt,
                stride=timeline.stride,
                ylabel="% of slots",
                bottom=0.0,
            )
        ],
        tables=[
            Table(
                caption="Replayed slots by dispatcher",
                headings=("dispatcher", "replayed", "drifted", "share", "largest share of a step"),
                rows=[
                    (
                        name or "without a name",
                        number(slots.sum()),
                        number(drifted_LS[name].sum()),
                        percent(int(drifted_LS[name].sum()), int(slots.sum())),
                        f"{float(share_SL[:, column].max()):.1f} %",
                    )
                    for column, (name, slots) in enumerate(slots_LS.items())
                ],
            )
        ],
    )


def _factor(run: RunLog) -> float:
    """Return the smallest ``capacity_factor`` that would have dropped no row."""
    assert run.needed_SP is not None
    return max(int(run.needed_SP.max()), 1) / balanced_rows(shape_of(run.config, run.ep_size))


def _first_above(needed_SP: Tensor, room_S: Tensor) -> int | None:
    """Return the first step that needed more rows than its capacity; None if there is none."""
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
        caption="Largest need of a dispatch",
        headings=("need", "rows", "on rank", "capacity", "first overflow in step"),
        rows=rows,
    )


def _line(label: str, values_SP: Tensor, timeline: Timeline) -> Line:
    """Make a line: the mean, the smallest and the largest value of all ranks, by block of steps."""
    blocks = timeline.blocks(values_SP)
    return (
        label,
        [float(block.double().mean()) for block in blocks],
        [float(block.min()) for block in blocks],
        [float(block.max()) for block in blocks],
    )
