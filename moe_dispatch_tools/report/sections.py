"""The sections of a report: the load of experts and ranks over steps, padding, bytes, capacities, replay.

A section is plain data for the template, which explains it. Dimensions are those of ``loads``; ``S``: steps of a run.
The first dimension of ``Counts`` is C: dispatches of a trace, or steps of a run.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor

from moe_dispatch.backends import load_backend
from moe_dispatch.backends.capacity import balanced_rows
from moe_dispatch.dispatchers.requirements import shape_of
from moe_dispatch_tools.loads import Traffic, count_traffic, padded_rows
from moe_dispatch_tools.pictures import curves, load_map
from moe_dispatch_tools.plan.forecast import Dispatches
from moe_dispatch_tools.traces import RunLog, Trace

_MOST_COLUMNS = 400  # of a picture; a column then stands for several steps
_MAPPED_LAYERS = 8

Section = dict[str, Any]


def _section(heading: str, text: Sequence[str], pictures: Sequence[str] = (), tables: Sequence[Any] = ()) -> Section:
    return {"heading": heading, "text": text, "pictures": pictures, "tables": tables}


def _table(caption: str, headings: Sequence[str], rows: Sequence[Sequence[Any]], *, folded: bool = False) -> Any:
    """Make a table. A folded table is opened by the reader."""
    return {"caption": caption, "headings": headings, "rows": rows, "folded": folded}


def _numbered(columns: Iterable[Tensor]) -> list[tuple[Any, ...]]:
    """Return the rows of columns of numbers, each with its index in front."""
    return [(str(index), *cells) for index, cells in enumerate(zip(*(of.tolist() for of in columns), strict=True))]


def _rank_table(caption: str, columns: Mapping[str, Tensor]) -> Any:
    """Make a table of numbers (P,) by rank, with their sums in the last line."""
    return _table(
        caption,
        ("rank", *columns),
        [*_numbered(columns.values()), ("all", *(of.sum().item() for of in columns.values()))],
    )


@final
@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Counts:
    """Numbers in the order of the recording.

    Attributes:
        names: Names of the dispatchers, or one name for all of them together.
        layer_C: Index of the name, int64.
        step_C: Number of earlier dispatches or steps with the same name, int64.
        tokens_CE: Rows that went to each expert, int64.
        received_CP: Rows that the experts on each rank got, int64, copies of other ranks' experts included.
        padding_CP: Padding rows of each rank by cause: "left out", "masked", "for ranks" and "for experts".
        sent_CP: Bytes that each rank sent to other ranks, by collective.
    """

    names: Sequence[str]
    layer_C: Tensor
    step_C: Tensor
    tokens_CE: Tensor
    received_CP: Tensor
    padding_CP: Mapping[str, Tensor]
    sent_CP: Mapping[str, Tensor]

    @property
    def steps(self) -> int:
        """Number of steps."""
        return int(self.step_C.max()) + 1

    @property
    def stride(self) -> int:
        """Number of steps that one column of a picture shows."""
        return -(-self.steps // _MOST_COLUMNS)

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


def load_section(counts: Counts) -> Section:
    """Show the rows per expert: a map for each of the first dispatchers, and a table for each dispatcher."""
    names, pictures, tables = counts.names, [], []
    text = []
    if len(names) > _MAPPED_LAYERS:
        text.append(f"The pictures show the first {_MAPPED_LAYERS} of {len(names)} dispatchers, the tables all.")
    if counts.stride > 1:
        text.append(f"A column of a picture is the sum of {counts.stride} steps. The tables count single steps.")
    for layer, name in enumerate(names):
        tokens_SE = counts.tokens_CE[counts.layer_C == layer]
        total_E, means_E = tokens_SE.sum(0), tokens_SE.double().mean(0)
        columns = (total_E, total_E / max(float(total_E.double().mean()), 1e-9), means_E, *tokens_SE.aminmax(dim=0))
        heads = ("expert", "rows", "of the mean", "per step", "min", "max")
        tables.append(_table(f"Rows per expert, {name}", heads, _numbered(columns), folded=True))
        if layer < _MAPPED_LAYERS:
            blocks = torch.stack([block.sum(0) for block in tokens_SE.split(counts.stride)])
            alt = (
                f"Heat map of {name}: rows per expert over {len(tokens_SE)} steps. Expert {int(total_E.argmax())} got "
            )
            pictures.append(load_map(blocks, title=name, alt=alt + "the most rows.", stride=counts.stride))
    return _section("Expert load over steps", text, pictures, tables)


def imbalance_section(counts: Counts) -> Section:
    """Show the load of the busiest expert and of the busiest rank, relative to the mean."""
    kinds = counts.imbalances
    text = []
    if "busiest rank without placements" in kinds:
        placed, home = kinds["busiest rank"].mean(), kinds["busiest rank without placements"].mean()
        text.append(
            f"Experts were placed on other ranks. The busiest rank got {placed:.2f} times the mean on average. If "
            f"every rank had computed its own experts, it would have got {home:.2f} times the mean."
        )
    rows = []
    for layer, name in enumerate(counts.names):
        cells: list[Any] = [name]
        for values_C in kinds.values():
            values = values_C[counts.layer_C == layer]
            cells += [float(values.mean()), float(values.max()), int(values.argmax())]
        rows.append(cells)
    alt = "Lines over steps: " + "; ".join(f"{kind}, {of.mean():.2f} times the mean" for kind, of in kinds.items())
    heads = (
        "dispatcher",
        *(f"{kind.removeprefix('busiest ')}: {of}" for kind in kinds for of in ("mean", "max", "in step")),
    )
    return _section(
        "Imbalance over steps",
        text,
        [curves(counts.lines(kinds), alt=alt, stride=counts.stride, ylabel="of the mean", bottom=1.0)],
        [_table("Load of the busiest, divided by the mean load", heads, rows)],
    )


def padding_section(counts: Counts) -> Section:
    """Show the padding rows of ranks by cause."""
    real, padding = int(counts.tokens_CE.sum()), int(counts.padding_CP["for experts"].sum())
    share = 100 * padding / max(real + padding, 1)
    drawn = {cause: of for cause, of in counts.padding_CP.items() if cause != "left out" and of.any()}
    means = "; ".join(f"{of.double().mean():.1f} {cause}" for cause, of in drawn.items())
    alt = f"Lines over steps: padding rows of a rank, on average {means}"
    pictures = [curves(counts.lines(drawn), alt=alt, stride=counts.stride, ylabel="rows of a rank")] if drawn else []
    return _section(
        "Padding",
        [f"The experts got {real} rows. Padding for experts is {share:.1f} % of all rows."],
        pictures,
        [_rank_table("Padding rows by rank", {cause: of.sum(0) for cause, of in counts.padding_CP.items()})],
    )


def bytes_section(counts: Counts, text: Sequence[str] = ()) -> Section:
    """Show the bytes that ranks send to other ranks."""
    sent_P = {label: of_CP.sum(0) / counts.steps / 1e6 for label, of_CP in counts.sent_CP.items()}
    if not sent_P:
        return _section("Bytes between ranks", ["No bytes between ranks were counted."])
    sent_P["total"] = torch.stack([*sent_P.values()]).sum(0)
    return _section("Bytes between ranks", text, tables=[_rank_table("MB per step to other ranks", sent_P)])


def trace_content(name: str, trace: Trace) -> dict[str, Any]:
    """Make the content of the page about a whole trace."""
    counts, traffic = counts_of(trace)
    text = []
    if traffic is not None and trace.ep_size > 1:
        text.append(
            f"Bytes that {trace.backend_name} sends in a step, forward and backward. Rows travel in "
            f"{traffic.row_dtypes}."
            + " Only rows are counted. The library sends more beside them."
            * traffic.payload_only
        )
    return {
        "title": f"Routing of {name}",
        "trace": name,
        "intro": [_summary(counts)],
        "settings": _settings(trace, {"dispatchers": len(trace.layers), "steps": trace.steps}),
        "sections": [
            load_section(counts),
            imbalance_section(counts),
            padding_section(counts),
            bytes_section(counts, text),
        ],
    }


def counts_of(trace: Trace) -> tuple[Counts, Traffic | None]:
    """Count the dispatches of a trace, their padding, and the bytes of the recorded backend if it can say them.

    The backend has the needs of the recorded run. Planners are pure, so a config with ``balance`` gives the placements
    of the run again.
    """
    shape = shape_of(trace.config, trace.ep_size, trace.ranks_per_node)
    sent = ([part.sent_ids(cut=trace.cuts(part)) for part in call.parts] for call in trace.calls)
    found = Dispatches.count(trace.config, shape, sent, [call.parts[0].dtype for call in trace.calls])
    options = trace.config.backend_options or load_backend(trace.backend_name)()
    padded_CP = padded_rows(found.loads.rows_CP, trace.needs, trace.config)
    traffic = count_traffic(options, shape, found.loads, padded_CP, found.dtypes)
    idle_CP = torch.zeros(2, *padded_CP.shape, dtype=torch.int64)
    for number, call in enumerate(trace.calls):
        for rank, part in enumerate(call.parts):
            real = part.layout.num_real(part.num_rows)
            idle_CP[int(trace.cuts(part)), number, rank] = 0 if real is None else part.num_rows - real
    counts = Counts(
        names=trace.layers,
        layer_C=torch.tensor([call.layer for call in trace.calls]),
        step_C=torch.tensor([call.step for call in trace.calls]),
        tokens_CE=found.experts_CPE.sum(1),
        received_CP=found.loads.received_CP,
        padding_CP={
            "left out": idle_CP[1],
            "masked": idle_CP[0],
            "for ranks": padded_CP - found.loads.rows_CP,
            "for experts": found.loads.expert_padding_CP(shape.pad_multiple),
        },
        sent_CP={} if traffic is None or trace.ep_size == 1 else traffic.sent_CP,
    )
    return counts, traffic


def _summary(counts: Counts) -> str:
    imbalance_C = counts.imbalances["busiest expert"]
    worst = int(imbalance_C.argmax())
    where = f"{counts.names[int(counts.layer_C[worst])]}, step {int(counts.step_C[worst])}"
    return (
        f"The busiest expert got {imbalance_C.mean():.2f} times the mean of all experts on average, and at most "
        f"{imbalance_C[worst]:.2f} times ({where})."
    )


def _written(value: Any) -> str:
    """Write the value of a field: ``exact``, or ``name=exact, bound=1.05`` for a mapping."""
    return ", ".join(f"{name}={each}" for name, each in value.items()) if isinstance(value, dict) else str(value)


def _settings(of: Trace | RunLog, more: dict[str, Any]) -> dict[str, Any]:
    config = of.config
    fields = ["num_experts", "top_k", "hidden_size", "pad_multiple", "graph_safe"]
    fields += ["balance"] if config.balance else []
    named = {field: _written(getattr(config, field)) for field in fields}
    versions = {f"{name} version": version for name, version in of.versions.items()}
    return {"backend": of.backend_name, "ranks": of.ep_size, **named, **more, **versions}


def run_content(name: str, run: RunLog) -> dict[str, Any]:
    """Make the content of the page about the log of a run with at least one step."""
    causes = {"left out": "cut", "masked": "masked", "for ranks": "rank", "for experts": "expert"}
    counts = Counts(
        names=["all dispatchers"],
        layer_C=torch.zeros(run.steps, dtype=torch.int64),
        step_C=torch.arange(run.steps),
        tokens_CE=run.tokens_SE,
        received_CP=run.received_SP,
        padding_CP={label: run.rows[cause] for label, cause in causes.items()},
        sent_CP=run.sent,
    )
    layers = counts
    # A log of an earlier version has no counts of layers, and no log has those of compiled layers.
    if any(run.layer_tokens) and sum(run.layer_tokens.values()).equal(run.tokens_SE):  # type: ignore[union-attr]
        layers = dataclasses.replace(
            counts,
            names=[name or "without a name" for name in run.layer_tokens],
            layer_C=torch.arange(len(run.layer_tokens)).repeat_interleave(run.steps),
            step_C=counts.step_C.repeat(len(run.layer_tokens)),
            tokens_CE=torch.cat([*run.layer_tokens.values()]),
            received_CP=torch.cat([*run.layer_received.values()]),
        )
    intro = [_summary(layers)]
    if len(set(run.written)) > 1:
        intro.append(
            f"Ranks ended after different numbers of steps, from {min(run.written)} to {max(run.written)}. This page "
            f"has the {run.steps} steps that all ranks have."
        )
    more = {"steps": run.steps, "dispatches of a rank": int(run.dispatches_SP[:, 0].sum())}
    return {
        "title": f"Counts of {name}",
        "trace": None,
        "intro": intro,
        "settings": {**({"dispatcher": run.name} if run.name else {}), **_settings(run, more)},
        "sections": [
            load_section(layers),
            imbalance_section(layers),
            padding_section(counts),
            bytes_section(counts),
            *_run_overflow(run, counts),
            *([_replay_section(run, counts)] if run.slots_replayed else []),
        ],
    }


def _run_overflow(run: RunLog, counts: Counts) -> list[Section]:
    if run.needed_SP is None or run.room_S is None:  # nothing can overflow in eager mode
        return []
    kinds = [("rows of a rank's experts", run.needed_SP, run.room_S)]
    if run.pairs_needed_SP is not None and run.pairs_room_S is not None:
        kinds.append(("rows from a rank to a rank", run.pairs_needed_SP, run.pairs_room_S))
    rows = []
    for label, needed_SP, room_S in kinds:
        above, most_P = (needed_SP.amax(1) > room_S).nonzero().flatten().tolist(), needed_SP.amax(0)
        rows.append((label, int(most_P.max()), str(int(most_P.argmax())), int(room_S[-1]), above[0] if above else None))
    overflowed = any(row[-1] is not None for row in rows)
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
    told = (
        f"{fate if overflowed else 'No rows were dropped.'} A graph_safe.capacity_factor of {enough:.3f} would have "
        "been enough."
    )
    picture = curves(counts.lines(lines), alt=alt, stride=counts.stride, ylabel="rows")
    heads = ("need", "rows", "on rank", "capacity", "first overflow in step")
    return [_section("Overflow", [told], [picture], [_table("Largest need of a dispatch", heads, rows)])]


def _replay_section(run: RunLog, counts: Counts) -> Section:
    """Show the share of replayed slots in which the router would have chosen another expert."""
    slots_SL = torch.stack([of.sum(1) for of in run.slots_replayed.values()], 1)
    drifted_SL = torch.stack([of.sum(1) for of in run.slots_drifted.values()], 1)
    share_SL = 100 * drifted_SL / slots_SL.clamp(min=1)
    columns = (slots_SL.sum(0), drifted_SL.sum(0), 100 * drifted_SL.sum(0) / slots_SL.sum(0), share_SL.amax(0))
    names = [name or "without a name" for name in run.slots_replayed]
    alt = f"Line over steps: percent of replayed slots that drifted, at most {float(share_SL.max()):.4g}."
    picture = curves(counts.lines({"drift": share_SL}), alt=alt, stride=counts.stride, ylabel="% of slots")
    heads = ("dispatcher", "replayed", "drifted", "%", "largest % of a step")
    rows = list(zip(names, *(of.tolist() for of in columns), strict=True))
    return _section("Routing replay", [], [picture], [_table("Replayed slots by dispatcher", heads, rows)])
