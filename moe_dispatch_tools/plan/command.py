"""Run ``plan``: make a plan from the command line, and show it as tables on a terminal."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import torch

from moe_dispatch.backends import known_backends
from moe_dispatch.config import DispatcherConfig, json_or_text
from moe_dispatch.errors import ConfigError
from moe_dispatch_tools import console
from moe_dispatch_tools.names import NamedBackend, parse_backend
from moe_dispatch_tools.placements import PlacementPlan
from moe_dispatch_tools.plan.figures import BackendPlan, CapacityPlan
from moe_dispatch_tools.plan.forecast import FACTORS, Forecast, forecast, graph_safe_config
from moe_dispatch_tools.plan.job import cluster_of
from moe_dispatch_tools.plan.models import Model, read_model
from moe_dispatch_tools.plan.routing import Source, random_routing, traced_routing
from moe_dispatch_tools.plan.sequences import Batch, Parallelism, sequences_of

_DEFAULT_RANKS = 8
_LEAST_SHARE = 1e-6  # smaller shares are shown as "< 1e-6", because the normal distribution is wrong there
_TRACE_ENDING = ".safetensors"
_BREAK_EVEN = " break-even: tokens per expert from which the busiest rank saves more time than the weights take."
_GRAPH_SAFE_FIELDS = ("capacity_factor", "on_overflow")  # fields that a config in eager mode refuses


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """Options of the command line. An option that is not given is None."""

    file: Path
    ep_size: int | None
    nodes: int | None
    parallelism: Parallelism
    batch: Batch
    layers: int | None
    dtype: str | None
    routing: str
    seed: int
    backends: str | None
    factors: Sequence[float]
    graph_safe: bool
    changes: Sequence[str]
    balance: bool = False
    flop_per_byte: float | None = None


def make_forecast(request: Request) -> Forecast:
    """Make the plan of a request.

    Raises:
        ConfigError: The model or a number is wrong, or two numbers do not fit each other.
        TraceError: The trace cannot be read or has other sizes.
    """
    torch.set_num_threads(1)  # a second thread slows down many small operators
    fields, later = _changes(request.changes), {}
    if request.graph_safe:
        later = {name: fields.pop(name) for name in _GRAPH_SAFE_FIELDS if name in fields}
    model = read_model(request.file, layers=request.layers, dtype=request.dtype, changes=fields)
    config = model.config
    source, ranks = _source(request, model)
    cluster = cluster_of(ranks, request.nodes, request.flop_per_byte)
    sequences = sequences_of(config, request.parallelism, request.batch, recorded=source.tokens)
    if request.graph_safe:
        model = dataclasses.replace(model, config=graph_safe_config(config, sequences.rows_per_rank, later))
    backends = _named(config, request.backends)
    factors = request.factors or FACTORS
    return forecast(model, cluster, sequences, source, backends=backends, factors=factors, balance=request.balance)


def _changes(pairs: Sequence[str]) -> dict[str, Any]:
    """Parse FIELD=VALUE. Values are written as in environment variables."""
    found = {}
    for pair in pairs:
        field, separator, value = pair.partition("=")
        if not separator or field not in DispatcherConfig.model_fields:
            raise ConfigError(
                f"--set must be FIELD=VALUE, got {pair!r}. Fields: {', '.join(DispatcherConfig.model_fields)}."
            )
        found[field] = json_or_text(value)
    return found


def _source(request: Request, model: Model) -> tuple[Source, int]:
    """Make the routing, and the number of ranks."""
    if request.routing.endswith(_TRACE_ENDING):
        cut = not (request.graph_safe or model.config.graph_safe)
        return traced_routing(Path(request.routing), model.config, ep_size=request.ep_size, cut=cut)
    source = random_routing(request.routing, seed=request.seed, groups=model.groups)
    return source, request.ep_size or _DEFAULT_RANKS


def _named(config: DispatcherConfig, backends: str | None) -> list[NamedBackend]:
    """Return the named backends, or all known backends. The backend of the config has the options of the config."""
    if backends is not None:
        return [parse_backend(text) for text in dict.fromkeys(backends.split(","))]
    own = {} if isinstance(config.backend, str) else {**config.backend}
    own_name = own.pop("name", None)
    return [NamedBackend(label=name, where=name, options=own if name == own_name else {}) for name in known_backends()]


def run(found: Forecast, *, as_json: bool) -> int:
    """Show a plan. Return the exit status: 0 if at least one backend can be used, else 1."""
    if as_json:
        console.document(found.as_json())
    else:
        _show(found)
    return int(all(backend.refused for backend in found.backends))


def _show(found: Forecast) -> None:
    _show_question(found)
    _show_loads(found)
    usable = [backend for backend in found.backends if backend.refused is None]
    if usable:
        _show_bytes(usable, found.model["layers"])
        _show_rows(usable, graph_safe=found.model["graph_safe"])
    for backend in found.backends:
        if backend.refused is not None:
            console.line(f"{backend.name}: {backend.refused}", mark="-")
        elif "not usable here" in backend.rules:
            console.line(f"{backend.name}: planned by the {backend.rules}", mark="-")
    if found.capacities:
        _show_capacities(found.capacities, simulated=found.simulated)
    if found.placements:
        _show_placements(found.placements)


def _show_question(found: Forecast) -> None:
    model, cluster, sequences = found.model, found.cluster, found.sequences
    limit = f" in {model['topk_groups']} of {model['num_groups']} groups" if model["num_groups"] else ""
    console.line(
        f"{model['name']}: {model['num_experts']} experts, top {model['top_k']}{limit}, hidden size "
        f"{model['hidden_size']}, {model['layers']} layers with experts, {model['dtype']}"
    )
    console.line(
        f"expert parallelism over {cluster.ep_size} ranks, {cluster.nodes} nodes of {cluster.ranks_per_node}; "
        f"{'graph-safe' if model['graph_safe'] else 'eager'} mode"
    )
    if model["spare_experts_per_rank"]:
        local = model["num_experts"] // cluster.ep_size
        planner = "which stay empty" if model["balance"] is None else f"filled by {model['balance']} in each dispatch"
        console.line(
            f"a rank has {local + model['spare_experts_per_rank']} expert slots, "
            f"{model['spare_experts_per_rank']} of them spare, {planner}"
        )
    console.line(f"routing {found.routing}")
    console.line(f"sequences: pad to a multiple of {sequences.multiple} in the data loader")
    if sequences.length is not None:
        console.line(
            f"sequences of {sequences.length} tokens become {sequences.padded_length} rows, {sequences.padding} of "
            f"them padding; sequences in a micro-batch: {sequences.batch_size}",
            indent=2,
        )
    console.line(f"a rank brings {sequences.rows_per_rank} rows to each dispatch", indent=2)


def _show_loads(found: Forecast) -> None:
    multiple = found.model["pad_multiple"]
    rows = [
        ("at the experts of a rank", found.received),
        ("at the experts of the busiest rank", found.busiest_rank),
        ("at the busiest expert", found.busiest_expert),
        (f"padding of a rank, to {multiple} per expert", found.expert_padding),
    ]
    columns = {"mean": "expected", "\u00b1": "error", "min": "low", "max": "high"}
    caption = f"{found.dispatches} simulated dispatches. \u00b1 is the standard error of the mean."
    if not found.simulated:
        columns.pop("\u00b1")
        caption = f"{found.dispatches} recorded dispatches."
    console.table(
        ["rows of one dispatch", *columns],
        [[title, *(f"{getattr(figure, field):.0f}" for field in columns.values())] for title, figure in rows],
        caption=caption,
    )


def _show_bytes(backends: Sequence[BackendPlan], layers: int) -> None:
    rows = []
    for backend in backends:
        if backend.forward is None or backend.backward is None or backend.between_nodes is None:
            rows.append([backend.name, *["unknown"] * 6])
            continue
        step = backend.forward.expected + backend.backward.expected
        most = backend.forward.high + backend.backward.high
        name = backend.name + (" *" if backend.payload_only else "")
        numbers = (backend.forward.expected, backend.backward.expected, step, most, backend.between_nodes)
        rows.append([name, backend.row_dtypes, *map(_megabytes, numbers)])
    note = " * Rows only: the library sends more beside them." if any(one.payload_only for one in backends) else ""
    console.table(
        ["MB sent by a rank", "rows in", "forward", "backward", "step", "max step", "to other nodes"],
        rows,
        caption=f"Mean of one micro-batch in {layers} layers.{note}",
        text_columns=2,
    )


def _show_rows(backends: Sequence[BackendPlan], *, graph_safe: bool) -> None:
    purposes = list(dict.fromkeys(purpose for one in backends for purpose in one.buffers or {}))
    rows = []
    for backend in backends:
        assert backend.rows_per_rank is not None
        assert backend.rank_padding is not None
        buffers = [(backend.buffers or {}).get(purpose) for purpose in purposes]
        rows.append(
            [
                backend.name,
                f"{backend.rows_per_rank.high:.0f}",
                f"{backend.rank_padding.high:.0f}",
                str(backend.sequence_multiple),
                *("" if of is None else _megabytes(of.high) for of in buffers),
            ]
        )
    if len(rows) > 1 and all(row[1:] == rows[0][1:] for row in rows):
        rows = [["each backend", *rows[0][1:]]]
    console.table(
        ["max of a dispatch, a rank", "rows", "padding", "sequence multiple", *(f"{one}, MB" for one in purposes)],
        rows,
        caption="Sequences whose lengths are a multiple of the sequence multiple need no padding. MB: "
        + ("the buffers that graph-safe mode allocates." if graph_safe else "the rows that the experts get."),
    )


def _show_capacities(capacities: Sequence[CapacityPlan], *, simulated: bool) -> None:
    bounds = " Two numbers are bounds of two standard errors." if simulated else ""
    console.table(
        ["capacity", "rows", "buffer MB", "overflow", "in a step", "pair_rows", "overflow"],
        [
            [
                f"{one.factor}",
                str(one.rows),
                _megabytes(one.buffer_bytes),
                _share(one.overflow),
                _share(one.step_overflow),
                str(one.pair_rows),
                _share(one.pair_overflow),
            ]
            for one in capacities
        ],
        caption="For a graph-safe capacity_factor: the share of dispatches, and of steps, in which some rank needs "
        f"more rows. The last two columns: pair_rows of alltoall for this factor, and its share of dispatches.{bounds}",
    )


def _show_placements(placements: Sequence[PlacementPlan]) -> None:
    told = any(one.break_even is not None for one in placements)
    console.table(
        [
            "placement",
            *(
                "spare\nslots",
                "busiest\n/ mean",
                "worst",
                "peak\nrows",
                "copied\nexperts",
                "MB\ncopied",
                "MB of\nslots",
            ),
            *(["break-\neven"] if told else []),
        ],
        [
            [
                f"{one.planner} once" if one.once else one.planner,
                str(one.spare),
                f"{one.imbalance:.2f}",
                f"{one.worst_imbalance:.2f}",
                f"{one.peak_rows:.0f}",
                f"{one.copied_experts:.0f}",
                *("unknown" if nbytes is None else _megabytes(nbytes) for nbytes in (one.copied_bytes, one.slot_bytes)),
                *(["-" if one.break_even is None else f"{one.break_even:.0f}"] if told else []),
            ]
            for one in placements
        ],
        caption="Rows of the busiest rank, and expert weights in slots of other ranks. A planner copies for each "
        "dispatch, or once for all. At most 16 dispatches are planned. MB: of the weights of a layer. Copied: in all "
        f"ranks together, in a forward, and as many gradients in a backward. Slots: of one rank.{_BREAK_EVEN * told}",
    )


def _megabytes(nbytes: float) -> str:
    return f"{nbytes / 1e6:.0f}" if nbytes >= 1e8 else f"{nbytes / 1e6:.3g}"


def _share(bounds: tuple[float, float]) -> str:
    """Format two bounds, as one number if their digits are the same."""
    low, high = (f"{share:.2g}" if share == 0 or share >= _LEAST_SHARE else "< 1e-6" for share in bounds)
    return low if low == high else f"{low} to {high}"
