"""The sections of a report: the load of experts and ranks over steps, padding, bytes, capacities, placements, replay.

A section is plain data for the template. Dimensions are those of ``loads``; ``S``: steps of a run.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import mean
from typing import Any, final

import torch
from torch import Tensor

from moe_dispatch.backends import known_backends, load_backend
from moe_dispatch.backends.capacity import balanced_rows, worst_rows
from moe_dispatch.backends.requirements import shape_of
from moe_dispatch.config import PAD_MULTIPLES, DispatcherConfig
from moe_dispatch_tools.loads import Traffic, count_traffic, padded_rows
from moe_dispatch_tools.names import NamedBackend
from moe_dispatch_tools.pictures import curves, load_map, rank_matrix
from moe_dispatch_tools.placements import MOST_DISPATCHES, ExpertCost, choices_for, placement_plans
from moe_dispatch_tools.plan.forecast import (
    FACTORS,
    Dispatches,
    PlannedBackend,
    capacity_plans,
    needed_factor,
    planned_backends,
)
from moe_dispatch_tools.traces import RunLog, Trace

_MOST_COLUMNS = 400  # of a picture; a column then stands for several steps
_MAPPED_LAYERS = 8
_MATRIX_RANKS = 16
_CAUSES = {"masked": "masked", "rank": "for ranks", "expert": "for experts"}
_PADDING = (
    "Masked rows are padding rows of a layout that are kept, but go to no expert. Rows for ranks make the row counts "
    "of ranks equal or aligned. Rows for experts round the rows of each expert up to pad_multiple."
)
_BANDS = "A line is the mean, and the band around it goes from the smallest to the largest value."

Section = dict[str, Any]


def _section(heading: str, text: Sequence[str], pictures: Sequence[str] = (), tables: Sequence[Any] = ()) -> Section:
    return {"heading": heading, "text": text, "pictures": pictures, "tables": tables}


def _table(caption: str, headings: Sequence[str], rows: Sequence[Sequence[Any]], *, folded: bool = False) -> Any:
    """Make a table. A folded table is opened by the reader."""
    return {"caption": caption, "headings": headings, "rows": rows, "folded": folded}


@final
@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Timeline:
    """Loads in the order of the recording.

    Attributes:
        names: Names of the dispatchers, or one name for all of them together.
        layer_C: Index of the name, int64.
        step_C: Number of earlier dispatches or steps with the same name, int64.
        tokens_CE: Rows that went to each expert, int64.
        received_CP: Rows that the experts on each rank got, int64, copies of other ranks' experts included.
    """

    names: Sequence[str]
    layer_C: Tensor
    step_C: Tensor
    tokens_CE: Tensor
    received_CP: Tensor

    @property
    def stride(self) -> int:
        """Number of steps that one column of a picture shows."""
        return -(-(int(self.step_C.max()) + 1) // _MOST_COLUMNS)

    @property
    def imbalances(self) -> dict[str, Tensor]:
        """The largest load of each step divided by the mean, float64 (C,), by kind of load; 1 without rows."""
        size = self.received_CP.shape[1]
        home_CP = self.tokens_CE.unflatten(1, (size, -1)).sum(2)
        kinds = {"busiest expert": self.tokens_CE}
        if size > 1:
            kinds["busiest rank"] = self.received_CP
        if not home_CP.equal(self.received_CP):
            kinds["busiest rank without placements"] = home_CP
        return {
            kind: torch.where(counts.any(1), counts.amax(1) / counts.double().mean(1), 1.0)
            for kind, counts in kinds.items()
        }

    def lines(self, values: Mapping[str, Tensor]) -> dict[str, list[Tensor]]:
        """Split the values of each line into blocks of ``stride`` steps."""
        block_C = self.step_C // self.stride
        blocks = range(int(block_C.max()) + 1)
        return {label: [of[block_C == block] for block in blocks] for label, of in values.items()}


def load_section(timeline: Timeline) -> Section:
    """Show the rows per expert: a map for each of the first dispatchers, and a table for each dispatcher."""
    names, pictures, tables = timeline.names, [], []
    text = [
        "Rows that went to each expert, divided by the mean of all experts in the step. Red experts got more than the "
        "mean, blue experts got less."
    ]
    if len(names) > _MAPPED_LAYERS:
        text.append(f"The pictures show the first {_MAPPED_LAYERS} of {len(names)} dispatchers, the tables all.")
    if timeline.stride > 1:
        text.append(f"A column of a picture is the sum of {timeline.stride} steps. The tables count single steps.")
    for layer, name in enumerate(names):
        tokens_SE = timeline.tokens_CE[timeline.layer_C == layer]
        total_E, means_E = tokens_SE.sum(0), tokens_SE.double().mean(0)
        columns = (total_E, total_E / max(float(total_E.double().mean()), 1e-9), means_E, *tokens_SE.aminmax(dim=0))
        rows = [
            (str(expert), *cells) for expert, cells in enumerate(zip(*(of.tolist() for of in columns), strict=True))
        ]
        heads = ("expert", "rows", "of the mean", "per step", "min", "max")
        tables.append(_table(f"Rows per expert, {name}", heads, rows, folded=True))
        if layer < _MAPPED_LAYERS:
            blocks = torch.stack([block.sum(0) for block in tokens_SE.split(timeline.stride)])
            alt = (
                f"Heat map of {name}: rows per expert over {len(tokens_SE)} steps. Expert {int(total_E.argmax())} got "
            )
            pictures.append(load_map(blocks, title=name, alt=alt + "the most rows.", stride=timeline.stride))
    return _section("Expert load over steps", text, pictures, tables)


def imbalance_section(timeline: Timeline) -> Section:
    """Show the load of the busiest expert and of the busiest rank, relative to the mean."""
    kinds = timeline.imbalances
    text = [
        "Rows of the busiest expert and of the busiest rank, divided by the mean of all. 1 is balanced. The busiest "
        "rank decides the time of a step, because the other ranks wait for it in combine.",
        _BANDS,
    ]
    if "busiest rank without placements" in kinds:
        placed, home = kinds["busiest rank"].mean(), kinds["busiest rank without placements"].mean()
        text.append(
            f"Experts were placed on other ranks. The busiest rank got {placed:.2f} times the mean on average. If "
            f"every rank had computed its own experts, it would have got {home:.2f} times the mean."
        )
    rows = []
    for layer, name in enumerate(timeline.names):
        cells: list[Any] = [name]
        for values_C in kinds.values():
            values = values_C[timeline.layer_C == layer]
            cells += [float(values.mean()), float(values.max()), int(values.argmax())]
        rows.append(cells)
    alt = "Lines over steps: " + "; ".join(f"{kind}, {of.mean():.2f} times the mean" for kind, of in kinds.items())
    heads = ("dispatcher", *(f"{kind}, {of}" for kind in kinds for of in ("mean", "max", "max in step")))
    return _section(
        "Imbalance over steps",
        text,
        [curves(timeline.lines(kinds), alt=alt, stride=timeline.stride, ylabel="of the mean", bottom=1.0)],
        [_table("Largest load, divided by the mean load", heads, rows)],
    )


def trace_content(name: str, trace: Trace) -> dict[str, Any]:
    """Make the content of the page about a trace with at least one dispatch.

    Raises:
        TraceError: Some ranks are missing, or an expert id is out of range.
    """
    found = dispatches_of(trace)
    timeline = Timeline(
        names=trace.layers,
        layer_C=torch.tensor([call.layer for call in trace.calls]),
        step_C=torch.tensor([call.step for call in trace.calls]),
        tokens_CE=found.experts_CPE.sum(1),
        received_CP=found.loads.received_CP,
    )
    return {
        "title": f"Routing of {name}",
        "intro": [_summary(timeline)],
        "settings": _settings(trace, {"dispatchers": len(trace.layers), "steps": trace.steps}),
        "sections": [
            load_section(timeline),
            imbalance_section(timeline),
            *([_placement_section(found, timeline)] if trace.ep_size > 1 else []),
            _trace_padding(trace, found),
            _traffic_section(trace, found),
            _capacity_section(found),
        ],
    }


def dispatches_of(trace: Trace) -> Dispatches:
    """Count the dispatches of a trace. Planners are pure, so a config with ``balance`` gives the placements again.

    Raises:
        TraceError: Some ranks are missing, or an expert id is out of range.
    """
    trace.require_whole("report")
    trace.check_ids("report")
    shape = shape_of(trace.config, trace.ep_size, trace.ranks_per_node)
    shape = dataclasses.replace(shape, max_tokens_per_rank=shape.max_tokens_per_rank or max(trace.max_rows, 1))
    sent = ([part.sent_ids(cut=trace.cuts(part)) for part in call.parts] for call in trace.calls)
    return Dispatches.count(trace.config, shape, sent, [call.parts[0].dtype for call in trace.calls])


def recorded_backend(trace: Trace) -> PlannedBackend:
    """Return the recorded backend, with the needs that it had in the recorded run."""
    options = trace.config.backend_options or load_backend(trace.backend_name)()
    return PlannedBackend(label=trace.backend_name, rules="recorded", options=options, needs=trace.needs)


def traffic_of(found: Dispatches, backend: PlannedBackend) -> tuple[int, Traffic | None]:
    """Count the padding rows that a backend needs for ranks, and its bytes; None if it cannot say."""
    assert backend.needs is not None
    assert backend.options is not None
    padded_CP = padded_rows(found.loads.rows_CP, backend.needs, found.config)
    padding = int((padded_CP - found.loads.rows_CP).sum())
    return padding, count_traffic(backend.options, found.shape, found.loads, padded_CP, found.dtypes)


def _summary(timeline: Timeline) -> str:
    imbalance_C = timeline.imbalances["busiest expert"]
    worst = int(imbalance_C.argmax())
    where = f"{timeline.names[int(timeline.layer_C[worst])]}, step {int(timeline.step_C[worst])}"
    return (
        f"The busiest expert got {imbalance_C.mean():.2f} times the mean of all experts on average, and at most "
        f"{imbalance_C[worst]:.2f} times ({where})."
    )


def _settings(of: Trace | RunLog, more: dict[str, Any]) -> dict[str, Any]:
    config: DispatcherConfig = of.config
    fields = ["num_experts", "top_k", "hidden_size", "pad_multiple", "graph_safe"]
    fields += ["balance", "spare_experts_per_rank"] if config.spare_experts_per_rank else []
    fields += ["capacity_factor"] if config.graph_safe else []
    named = {field: str(getattr(config, field)) for field in fields}
    versions = {f"{name} version": version for name, version in of.versions.items()}
    return {"backend": of.backend_name, "ranks": of.ep_size, **named, **more, **versions}


def _placement_section(found: Dispatches, timeline: Timeline) -> Section:
    """Show the busiest rank if busy experts had copies on other ranks."""
    choices = choices_for(found.config, others=True)
    plans = []
    for layer in range(len(timeline.names)):
        experts_CPE = found.experts_CPE[timeline.layer_C == layer]
        some_CPE = experts_CPE[:: -(-len(experts_CPE) // MOST_DISPATCHES)]
        plans.append(list(placement_plans(some_CPE, found.home_shape, choices, ExpertCost(itemsize=1))))
    rows = [
        (
            f"{choice.planner}, {choice.spare} spare{', once' * choice.once}",
            mean(plan.imbalance for plan in of_layers),
            max(plan.worst_imbalance for plan in of_layers),
            int(max(plan.peak_rows for plan in of_layers)),
            mean(plan.copied_experts for plan in of_layers),
        )
        for choice, of_layers in zip(choices, zip(*plans, strict=True), strict=True)
    ]
    return _section(
        "Placements",
        [
            "The rows of the busiest rank if busy experts had copies on other ranks, in spare expert slots. Each "
            "dispatcher has its own placements: one for all steps (once), or one for each dispatch. At most "
            f"{MOST_DISPATCHES} dispatches of each are planned, spread over the steps. A copied expert sends its "
            "weights in each forward, and gets gradients back.",
        ],
        tables=[
            _table(
                "Busiest rank by placement, mean of all dispatchers",
                ("placement", "of the mean", "worst", "peak rows", "copied experts"),
                rows,
            )
        ],
    )


def _trace_padding(trace: Trace, found: Dispatches) -> Section:
    idle = {True: 0, False: 0}
    for part in (part for call in trace.calls for part in call.parts):
        real = part.layout.num_real(part.num_rows)
        idle[trace.cuts(part)] += 0 if real is None else part.num_rows - real
    real, own = int(found.loads.tokens_CE.sum()), found.config.pad_multiple_rows
    labels, rows = {value: name for name, value in PAD_MULTIPLES.items()}, []
    for value in sorted({own, *labels}):
        padding = int(found.loads.expert_padding_CP(value).sum())
        told = ", ".join(filter(None, [str(value), labels.get(value, ""), "recorded" * (value == own)]))
        rows.append((told, padding, 100 * padding / max(real + padding, 1)))
    return _section(
        "Padding",
        [
            f"The backend got {int(found.loads.rows_CP.sum())} rows, {idle[False]} of them masked, and the experts got "
            f"{real} rows. The dispatchers left out {idle[True]} padding rows of the layout, which cost nothing.",
            _PADDING,
        ],
        tables=[_table("Padding for experts, by pad_multiple", ("pad_multiple", "rows", "% of rows at experts"), rows)],
    )


def _traffic_section(trace: Trace, found: Dispatches) -> Section:
    """Show padding for ranks and bytes of all backends, and bytes by pair of ranks of the recorded backend."""
    backends = [recorded_backend(trace)]
    for name in known_backends():
        if name != trace.backend_name:
            backends += planned_backends(NamedBackend(label=name, where=name), found)
    usable = {one.label: traffic_of(found, one) for one in backends if one.refused is None}
    labels = dict.fromkeys(label for _, traffic in usable.values() if traffic for label in traffic.sent_CP)
    scale, rows = trace.steps * 1e6, []
    for name, (padding, traffic) in usable.items():
        cells: list[Any] = [name, padding]
        if traffic is None:
            cells += ["unknown", *[None] * (len(labels) + 1)]
        else:
            sent = {label: float(of.sum()) / scale for label, of in traffic.sent_CP.items()}
            dtypes = traffic.row_dtypes + ", only rows are counted" * traffic.payload_only
            cells += [dtypes, *(sent.get(label, 0.0) for label in labels), sum(sent.values())]
        rows.append(cells)
    heads = ("backend", "padding rows for ranks", "rows in", *labels, "total")
    tables = [_table("Backends: padding of all steps, and MB per step to other ranks", heads, rows)]
    if refused := [(one.label, one.refused) for one in backends if one.refused is not None]:
        tables.append(_table("Backends that refuse this run", ("backend", "why"), refused))
    text = [
        "Bytes that ranks send to each other in a step, forward and backward. The first backend was recorded. Its "
        "numbers follow the rules that it had in the recorded run. The other backends were not run. Their numbers "
        "follow their rules on this machine."
    ]
    recorded, pictures = usable[trace.backend_name][1], []
    if recorded is not None and trace.ep_size > 1:
        matrix_PP = recorded.pairs_PP / scale
        alt = f"Matrix of MB per step from each rank to each other rank, at most {float(matrix_PP.max()):.3g}."
        pictures = [rank_matrix(matrix_PP, unit="MB per step", alt=alt)]
        totals = [(str(rank), float(of.sum()), float(matrix_PP[:, rank].sum())) for rank, of in enumerate(matrix_PP)]
        if trace.ep_size <= _MATRIX_RANKS:
            totals = [(*row, *of.tolist()) for row, of in zip(totals, matrix_PP, strict=True)]
        to = [f"to {rank}" for rank in range(len(totals[0]) - 3)]
        tables.append(_table("MB per step of each rank", ("rank", "sent", "received", *to), totals, folded=True))
    return _section("Bytes between ranks", text, pictures, tables)


def _capacity_section(found: Dispatches) -> Section:
    if found.config.balance is not None:
        return _section("Overflow", ["Graph-safe mode, which has capacities, refuses balance."])
    shape = found.capacity_shape
    return _section(
        "Overflow",
        [
            "A graph-safe buffer holds capacity_factor times the balanced load of a rank, which is "
            f"{balanced_rows(shape)} rows here. A factor of {needed_factor(found):.3f} would have been enough for all "
            f"recorded steps. The worst possible routing needs {worst_rows(shape) / balanced_rows(shape):.3g}.",
            "A dispatch overflows if some rank needs more rows than its buffer holds. The other rows are dropped, and "
            "shown as a share of all rows at experts.",
        ],
        tables=[
            _table(
                "Overflow by capacity",
                ("capacity_factor", "rows of a rank", "% of dispatches that overflow", "% of rows dropped"),
                [
                    (str(one["factor"]), one["rows"], 100 * one["overflow"], 100 * one["dropped"])
                    for one in capacity_plans(found, (*FACTORS, 3.0, 4.0))
                ],
            )
        ],
    )


def run_content(name: str, run: RunLog) -> dict[str, Any]:
    """Make the content of the page about the log of a run with at least one step."""
    timeline = Timeline(
        names=["all dispatchers"],
        layer_C=torch.zeros(run.steps, dtype=torch.int64),
        step_C=torch.arange(run.steps),
        tokens_CE=run.tokens_SE,
        received_CP=run.received_SP,
    )
    intro = [
        _summary(timeline),
        "The numbers are sums over all dispatchers of one config and group. A step is the time between two calls of "
        "step().",
    ]
    if len(set(run.written)) > 1:
        intro.append(
            f"Ranks ended after different numbers of steps, from {min(run.written)} to {max(run.written)}. This page "
            f"has the {run.steps} steps that all ranks have."
        )
    more = {"steps": run.steps, "dispatches of a rank": int(run.dispatches_SP[:, 0].sum())}
    return {
        "title": f"Run {name}",
        "intro": intro,
        "settings": {**({"dispatcher": run.name} if run.name else {}), **_settings(run, more)},
        "sections": [
            load_section(timeline),
            imbalance_section(timeline),
            _run_padding(run, timeline),
            _run_bytes(run),
            _run_overflow(run, timeline),
            *([_replay_section(run, timeline)] if run.slots_replayed else []),
        ],
    }


def _run_padding(run: RunLog, timeline: Timeline) -> Section:
    rows_SP = {label: run.rows[cause] for cause, label in _CAUSES.items()}
    real, padding = int(run.tokens_SE.sum()), int(run.rows["expert"].sum())
    alt = "Lines over steps: padding rows of a rank, on average " + "; ".join(
        f"{of.double().mean():.1f} {label}" for label, of in rows_SP.items()
    )
    columns = [of.sum(0).tolist() for of in (run.rows["cut"], *rows_SP.values())]
    rows = [(str(rank), *cells) for rank, cells in enumerate(zip(*columns, strict=True))]
    return _section(
        "Padding",
        [
            f"The experts got {real} rows. Rows for experts are {100 * padding / max(real + padding, 1):.1f} % of all "
            f"rows at experts. The dispatchers left out {sum(columns[0])} padding rows of the layout, which cost "
            "nothing.",
            _PADDING,
        ],
        [curves(timeline.lines(rows_SP), alt=alt, stride=timeline.stride, ylabel="rows of a rank")],
        [_table("Padding rows by rank", ("rank", "left out", *rows_SP), [*rows, ("all", *map(sum, columns))])],
    )


def _run_bytes(run: RunLog) -> Section:
    note = (
        "Bytes by pair of ranks, and the bytes of other backends, need a trace: record some steps with Trace.record. "
        "Bytes that another library such as deep_ep sends are not counted."
    )
    if not run.sent:
        return _section("Bytes between ranks", ["No bytes between ranks were counted.", note])
    sent_LP = torch.stack([of.sum(0) for of in run.sent.values()]).double() / run.steps / 1e6
    columns_PL = torch.cat([sent_LP, sent_LP.sum(0, keepdim=True)]).t()
    rows = [(str(rank), *of.tolist()) for rank, of in enumerate(columns_PL)]
    caption = "MB per step to other ranks, forward and backward"
    table = _table(caption, ("rank", *run.sent, "total"), [*rows, ("all", *columns_PL.sum(0).tolist())])
    return _section("Bytes between ranks", [note], tables=[table])


def _run_overflow(run: RunLog, timeline: Timeline) -> Section:
    if run.needed_SP is None or run.room_S is None:
        text = "Nothing can overflow in eager mode, because buffers grow with the routing. A report about a trace shows"
        return _section("Overflow", [f"{text} the overflow of each capacity_factor."])
    kinds = [("rows of a rank's experts", run.needed_SP, run.room_S)]
    if run.pairs_needed_SP is not None and run.pairs_room_S is not None:
        kinds.append(("rows from a rank to a rank", run.pairs_needed_SP, run.pairs_room_S))
    rows, overflowed = [], False
    for label, needed_SP, room_S in kinds:
        above, most_P = (needed_SP.amax(1) > room_S).nonzero().flatten().tolist(), needed_SP.amax(0)
        overflowed |= bool(above)
        first = above[0] if above else None
        rows.append((label, int(most_P.max()), str(int(most_P.argmax())), int(room_S[-1]), first))
    enough = max(int(run.needed_SP.max()), 1) / balanced_rows(shape_of(run.config, run.ep_size))
    fate = "Rows beyond the capacity were dropped, and the loads above do not count them."
    lines = {
        "rank with most rows": run.needed_SP.amax(1),
        "mean of ranks": run.needed_SP.double().mean(1),
        "capacity": run.room_S,
    }
    alt = (
        f"Lines over steps: the rows that a rank has needed so far at most, {rows[0][1]} at the end, and its capacity."
    )
    return _section(
        "Overflow",
        [
            "The largest number of rows that the experts of a rank have needed in any dispatch so far, and the "
            f"capacity. {fate if overflowed else 'No rows were dropped.'} A capacity_factor of {enough:.3f} would have "
            "been enough. If a line is level, later dispatches needed the same number or fewer.",
        ],
        [curves(timeline.lines(lines), alt=alt, stride=timeline.stride, ylabel="rows")],
        [_table("Largest need of a dispatch", ("need", "rows", "on rank", "capacity", "first overflow in step"), rows)],
    )


def _replay_section(run: RunLog, timeline: Timeline) -> Section:
    """Show the share of replayed slots in which the router would have chosen another expert."""
    slots_SL = torch.stack([of.sum(1) for of in run.slots_replayed.values()], 1)
    drifted_SL = torch.stack([of.sum(1) for of in run.slots_drifted.values()], 1)
    share_SL = 100 * drifted_SL / slots_SL.clamp(min=1)
    columns = (slots_SL.sum(0), drifted_SL.sum(0), 100 * drifted_SL.sum(0) / slots_SL.sum(0), share_SL.amax(0))
    names = [name or "without a name" for name in run.slots_replayed]
    alt = f"Line over steps: percent of replayed slots that drifted, at most {float(share_SL.max()):.4g}."
    return _section(
        "Routing replay",
        [
            "The share of replayed slots in which the router would not have chosen the replayed expert. If it grows "
            "from step to step, the model moves away from the pass that was recorded.",
            _BANDS,
        ],
        [curves(timeline.lines({"drift": share_SL}), alt=alt, stride=timeline.stride, ylabel="% of slots")],
        [
            _table(
                "Replayed slots by dispatcher",
                ("dispatcher", "replayed", "drifted", "%", "largest % of a step"),
                list(zip(names, *(of.tolist() for of in columns), strict=True)),
            )
        ],
    )
