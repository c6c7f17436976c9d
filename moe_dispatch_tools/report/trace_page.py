"""The page about a trace: loads, padding, bytes, and the rows that a capacity would drop."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from moe_dispatch.backends.capacity import CapacityFactor, balanced_rows, worst_rows
from moe_dispatch.config import PAD_MULTIPLES
from moe_dispatch_tools.loads import dtype_names
from moe_dispatch_tools.pictures import rank_matrix, shares_over, stacked_bars
from moe_dispatch_tools.report.history import (
    History,
    Overflow,
    Share,
    capacity_shape,
    history_of,
    needed_factor,
    other_shares,
    overflows,
    recorded_share,
)
from moe_dispatch_tools.report.load_sections import imbalance_section, load_section
from moe_dispatch_tools.report.page import PADDING_CAUSES, Section, Table, figure, number, percent, render, unit_of
from moe_dispatch_tools.report.placement_section import placement_section
from moe_dispatch_tools.traces import Trace

_MATRIX_RANKS = 16
_FACTORS = (1.0, 1.1, 1.25, 1.5, 2.0, 3.0, 4.0)
_CURVE_POINTS = 81
_WAYS = ("counts", "dispatch", "combine", "combine.backward", "dispatch.backward")
_NO_PLACEMENT = (
    "A trace has no placement. So padding, bytes and overflow are those of a run in which every rank computes its own "
    "experts. If the config has balance, the busiest rank is that of the run, because the planner gives the same "
    "placements again."
)
_CAUSES = ("masked", "for ranks", "for experts")


def trace_page(name: str, trace: Trace) -> str:
    """Make the page about a trace, as HTML.

    Args:
        name: Name of the file.
        trace: Trace with at least one dispatch.

    Raises:
        TraceError: Some ranks are missing, or an expert id is out of range.
    """
    history = history_of(trace)
    recorded, others = recorded_share(history), other_shares(history)
    sections = [
        load_section(history.timeline),
        imbalance_section(history.timeline),
        *([placement_section(history)] if trace.ep_size > 1 else []),
        padding_section(history, [recorded, *others]),
        bytes_section(history, recorded, others),
        overflow_section(history),
    ]
    intro = [_summary(history), *([_NO_PLACEMENT] if trace.config.spare_experts_per_rank else [])]
    return render(f"Routing of {name}", intro, _settings(history), sections)


def _summary(history: History) -> str:
    imbalance_C = history.timeline.imbalance_C
    worst = int(imbalance_C.argmax())
    where = f"{history.trace.layers[history.layer_C[worst]]}, step {int(history.step_C[worst])}"
    return (
        f"The busiest expert got {float(imbalance_C.mean()):.2f} times the mean of all experts on average, and at most "
        f"{float(imbalance_C[worst]):.2f} times ({where})."
    )


def _settings(history: History) -> list[tuple[str, str]]:
    trace, config = history.trace, history.trace.config
    return [
        ("backend", trace.backend_name),
        ("ranks", str(trace.ep_size)),
        ("num_experts", str(config.num_experts)),
        ("top_k", str(config.top_k)),
        ("hidden_size", str(config.hidden_size)),
        ("pad_multiple", str(config.pad_multiple)),
        ("graph_safe", str(config.graph_safe)),
        *((("balance", f"{config.balance}, spare slots: {config.spare_experts_per_rank}"),) if config.balance else ()),
        ("dispatchers", str(len(trace.layers))),
        ("steps", str(trace.steps)),
        ("tokens dispatched", number((history.loads.rows_CP - history.masked_CP).sum())),
        *((f"{name} version", version) for name, version in trace.versions.items()),
    ]


def padding_section(history: History, shares: Sequence[Share]) -> Section:
    """Show the padding rows by backend and cause. The recorded backend comes first."""
    steps, kept, real = history.trace.steps, int(history.loads.rows_CP.sum()), int(history.loads.tokens_CE.sum())
    bars = {
        share.name: (int(history.masked_CP.sum()), share.rank_padding, share.expert_padding)
        for share in shares
        if not share.refused
    }
    alt = "Bars of padding rows per step: " + "; ".join(
        f"{name} " + ", ".join(f"{rows / steps:.0f} {cause}" for cause, rows in zip(_CAUSES, parts, strict=True))
        for name, parts in bars.items()
    )
    by_backend = [
        (name, *map(number, parts), percent(parts[0] + parts[1], kept + parts[1]), percent(parts[2], real + parts[2]))
        for name, parts in bars.items()
    ]
    per_step = [(name, [rows / steps for rows in parts]) for name, parts in bars.items()]
    return Section(
        heading="Padding by cause",
        text=[
            f"The backend got {number(kept)} rows, and the experts got {number(real)} rows. The dispatchers left out "
            f"{number(history.cut_CP.sum())} padding rows of the layout, which cost nothing.",
            f"The first backend, {history.trace.backend_name}, was recorded. Its numbers follow the rules that it had "
            "in the recorded run. The other backends were not run. Their numbers follow their rules on this machine.",
            PADDING_CAUSES,
        ],
        pictures=[stacked_bars(per_step, _CAUSES, name="padding", alt=alt, xlabel="padding rows per step")],
        tables=[
            Table(
                caption="Padding rows of all steps",
                headings=("backend", *_CAUSES, "share of rows of ranks", "share of rows at experts"),
                rows=by_backend,
            ),
            _multiples_table(history, real),
            *_refused_table(shares),
        ],
    )


def _multiples_table(history: History, real: int) -> Table:
    own, labels = history.trace.config.pad_multiple_rows, {value: name for name, value in PAD_MULTIPLES.items()}
    rows = []
    for value in sorted({own, *labels}):
        padding = int(history.loads.expert_padding_CP(value).sum())
        told = [str(value), labels.get(value, ""), "recorded" if value == own else ""]
        rows.append((", ".join(filter(None, told)), number(padding), percent(padding, real + padding)))
    return Table(
        caption="Padding for experts, by pad_multiple",
        headings=("pad_multiple", "rows", "share of rows at experts"),
        rows=rows,
    )


def _refused_table(shares: Sequence[Share]) -> list[Table]:
    rows = [(share.name, share.refused) for share in shares if share.refused]
    heads = ("backend", "why")
    return (
        [Table(caption="Backends that refuse this run", headings=heads, rows=rows, text_columns=(1,))] if rows else []
    )


def bytes_section(history: History, recorded: Share, others: Sequence[Share]) -> Section:
    """Show the bytes from rank to rank of the recorded backend, and the totals of all backends."""
    steps, telling = history.trace.steps, [share for share in (recorded, *others) if share.sent]
    tables = [_bytes_table(telling, steps)] if telling else []
    heading = "Bytes by pair of ranks"
    if recorded.bytes_PP is None or history.trace.ep_size == 1:
        return Section(heading=heading, text=["No bytes between ranks were recorded."], tables=tables)
    unit, scale = unit_of(float(recorded.bytes_PP.max()) / steps)
    matrix_PP = recorded.bytes_PP / steps / scale
    text = [f"Bytes that {recorded.name} sends in a step, forward and backward, by sender and receiver."]
    if recorded.name == "alltoall":
        text.append("In dispatch, a row goes once to each other rank that owns at least one of its experts.")
    if any(share.payload_only for share in telling):
        names = ", ".join(share.name for share in telling if share.payload_only)
        text.append(f"Only rows are counted for {names}. Their library sends more bytes beside the rows.")
    source, target = divmod(int(matrix_PP.argmax()), len(matrix_PP))
    away = matrix_PP[~torch.eye(len(matrix_PP), dtype=torch.bool)]
    alt = (
        f"Matrix of {unit} per step from each rank to each other rank: from {float(away.min()):.3g} to "
        f"{float(away.max()):.3g}, the most from rank {source} to rank {target}."
    )
    picture = rank_matrix(matrix_PP.tolist(), name="pairs", unit=f"{unit} per step", alt=alt)
    return Section(heading=heading, text=text, pictures=[picture], tables=[_pair_table(matrix_PP, unit), *tables])


def _bytes_table(shares: Sequence[Share], steps: int) -> Table:
    unit, scale = unit_of(max(sum(share.sent.values()) for share in shares) / steps)
    rows = [
        (
            share.name,
            dtype_names(share.row_dtypes),
            *(figure(share.sent.get(way, 0) / steps / scale) for way in _WAYS),
            figure(sum(share.sent.values()) / steps / scale),
        )
        for share in shares
    ]
    return Table(
        caption=f"{unit} per step to other ranks",
        headings=("backend", "rows in", *_WAYS, "total"),
        text_columns=(1,),
        rows=rows,
    )


def _pair_table(matrix_PP: Tensor, unit: str) -> Table:
    size = len(matrix_PP)
    if size > _MATRIX_RANKS:
        rows = [(str(r), *map(figure, (matrix_PP[r].sum(), matrix_PP[:, r].sum()))) for r in range(size)]
        return Table(
            caption=f"{unit} per step of each rank", headings=("rank", "sent", "received"), rows=rows, folded=True
        )
    rows = []
    for rank, sent_P in enumerate(matrix_PP):
        cells = ["-" if rank == other else figure(sent) for other, sent in enumerate(sent_P)]
        rows.append((f"from {rank}", *cells, figure(sent_P.sum())))
    heads = ("", *(f"to {rank}" for rank in range(size)), "total")
    return Table(caption=f"{unit} per step from rank to rank", headings=heads, rows=rows)


def overflow_section(history: History) -> Section:
    """Show the rows that graph-safe buffers of each capacity would have dropped."""
    shape, enough = capacity_shape(history), needed_factor(history)
    worst = worst_rows(shape) / balanced_rows(shape)
    last = max(min(worst, max(1.25 * enough, 1.5)), 1.0)
    grid = [1 + (last - 1) * point / (_CURVE_POINTS - 1) for point in range(_CURVE_POINTS)]
    curve = overflows(history, grid)
    factors: list[CapacityFactor] = [factor for factor in _FACTORS if factor < worst]
    listed = overflows(history, [*factors, "worst"])
    alt = "Lines over capacity_factor: " + "; ".join(
        f"with {found.factor}, {_share(found.steps, 0)} of steps overflow, and {_share(found.dropped, 2)} of rows drop"
        for found in listed
    )
    lines = [
        ("steps that overflow", grid, [found.steps for found in curve]),
        ("rows dropped", grid, [found.dropped for found in curve]),
    ]
    return Section(
        heading="Overflow",
        text=[
            "A graph-safe buffer holds capacity_factor times the balanced load of a rank, which is "
            f"{number(balanced_rows(shape))} rows here. A factor of {enough:.3f} would have been enough for all "
            f"recorded steps. The worst possible routing needs {worst:.3g}.",
            "A step overflows if some rank of some dispatcher needs more rows than its buffer holds. The other rows "
            "are dropped, and shown as a share of all rows at experts.",
        ],
        pictures=[shares_over(lines, mark=enough, name="overflow", alt=alt, xlabel="capacity_factor")],
        tables=[_overflow_table(listed)],
    )


def _overflow_table(listed: Sequence[Overflow]) -> Table:
    rows = [
        (str(found.factor), number(found.rows), _share(found.steps, 1), _share(found.dropped, 3)) for found in listed
    ]
    return Table(
        caption="Overflow by capacity",
        headings=("capacity_factor", "rows of a rank", "steps that overflow", "rows dropped"),
        rows=rows,
    )


def _share(value: float, digits: int) -> str:
    return f"{100 * value:.{digits}f} %"
