"""``plan``: a model on a cluster that need not exist, as tables on a terminal."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from moe_dispatch.backends import known_backends
from moe_dispatch.cli import console
from moe_dispatch.cli.forecast import FACTORS, BackendPlan, CapacityPlan, Forecast, forecast
from moe_dispatch.cli.models import read_model
from moe_dispatch.cli.names import NamedBackend, json_or_text, parse_backend
from moe_dispatch.cli.sequences import Batch, Parallelism
from moe_dispatch.cli.sources import Source, random_routing, traced_routing
from moe_dispatch.config import DispatcherConfig
from moe_dispatch.errors import ConfigError

_DEFAULT_RANKS = 8
_TRACE_ENDING = ".safetensors"
_ROOM = ("capacity_factor", "on_overflow")  # that only graph-safe mode has: set with it, once rows are known


def make_forecast(
    file: Path,
    *,
    ep_size: int | None,
    nodes: int | None,
    parallelism: Parallelism,
    batch: Batch,
    layers: int | None,
    dtype: str | None,
    routing: str,
    seed: int,
    backends: str | None,
    factors: Sequence[float],
    graph_safe: bool,
    changes: Sequence[str],
) -> Forecast:
    """What the command line asks for.

    Raises:
        ConfigError: the model, or a number, or two that do not fit each other.
        TraceError: the routing is a trace that cannot be read, or of other sizes.
    """
    torch.set_num_threads(1)  # many small operators, which a second thread would slow down
    fields = _changes(changes)
    room: dict[str, Any] = {name: fields.pop(name) for name in _ROOM if graph_safe and name in fields}
    model = read_model(file, layers=layers, dtype=dtype, changes=fields)
    source, ranks = _source(routing, model.config, ep_size, seed, cut=not (graph_safe or model.config.graph_safe))
    return forecast(
        model,
        ep_size=ranks,
        nodes=nodes,
        parallelism=parallelism,
        batch=batch,
        source=source,
        graph_safe=room if graph_safe else None,
        factors=factors or FACTORS,
        backends=_named(model.config, backends),
    )


def _changes(pairs: Sequence[str]) -> dict[str, Any]:
    """Fields of the config from FIELD=VALUE, values as in environment variables."""
    found = {}
    for pair in pairs:
        field, separator, value = pair.partition("=")
        if not separator or field not in DispatcherConfig.model_fields:
            raise ConfigError(
                f"--set must be FIELD=VALUE, got {pair!r}. Fields: {', '.join(DispatcherConfig.model_fields)}."
            )
        found[field] = json_or_text(value)
    return found


def _source(routing: str, config: DispatcherConfig, ep_size: int | None, seed: int, *, cut: bool) -> tuple[Source, int]:
    if routing.endswith(_TRACE_ENDING):
        return traced_routing(Path(routing), config, ep_size=ep_size, cut=cut)
    return random_routing(routing, seed=seed), _DEFAULT_RANKS if ep_size is None else ep_size


def _named(config: DispatcherConfig, backends: str | None) -> list[NamedBackend]:
    """Those named, or all that are known, the config's own with its options."""
    if backends is not None:
        return [parse_backend(text) for text in dict.fromkeys(backends.split(","))]
    own = {} if isinstance(config.backend, str) else {**config.backend}
    own_name = own.pop("name", None)
    return [NamedBackend(label=name, where=name, options=own if name == own_name else {}) for name in known_backends()]


def run(found: Forecast, *, as_json: bool) -> int:
    """Tell it, and answer: 0 where some backend can be used."""
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
    _show_capacities(found.capacities)


def _show_question(found: Forecast) -> None:
    model, cluster, sequences = found.model, found.cluster, found.sequences
    console.line(
        f"{model['name']}: {model['num_experts']} experts, top {model['top_k']}, hidden size {model['hidden_size']}, "
        f"{model['layers']} layers with experts, {model['dtype']}"
    )
    console.line(
        f"expert parallelism over {cluster['ep_size']} ranks, {cluster['nodes']} nodes of {cluster['ranks_per_node']}; "
        f"{'graph-safe' if model['graph_safe'] else 'eager'} mode"
    )
    console.line(f"routing {found.routing}")
    console.line(f"sequences: pad to a multiple of {sequences.multiple} in the data loader")
    if sequences.length is not None:
        console.line(
            f"a sequence of {sequences.length} tokens becomes {sequences.padded_length}, {sequences.padding} of them "
            f"padding; with {sequences.batch_size} to a micro-batch",
            indent=2,
        )
    console.line(f"a rank brings {sequences.rows_per_rank} rows to each dispatch", indent=2)


def _show_loads(found: Forecast) -> None:
    multiple = found.model["pad_multiple"]
    rows = [
        ("rows of a rank's experts", found.received),
        ("of the busiest rank", found.busiest_rank),
        ("of the busiest expert", found.busiest_expert),
        (f"padding to {multiple} rows per expert, a rank", found.expert_padding),
    ]
    console.table(
        ["one dispatch", "expected", "least", "most"],
        [[title, *(f"{number:.0f}" for number in (of.expected, of.low, of.high))] for title, of in rows],
    )


def _show_bytes(backends: Sequence[BackendPlan], layers: int) -> None:
    rows = []
    for backend in backends:
        if backend.forward is None or backend.backward is None or backend.between_nodes is None:
            rows.append([backend.name, *["not told"] * 5])
            continue
        step = backend.forward.expected + backend.backward.expected
        most = backend.forward.high + backend.backward.high
        name = backend.name + (" *" if backend.payload_only else "")
        numbers = (backend.forward.expected, backend.backward.expected, step, most, backend.between_nodes)
        rows.append([name, *map(_megabytes, numbers)])
    note = " * rows only, not what its library sends beside them." if any(one.payload_only for one in backends) else ""
    console.table(
        ["MB sent by a rank", "forward", "backward", "step", "at most", "to other nodes"],
        rows,
        caption=f"{layers} layers, one micro-batch, expected.{note}",
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
    console.table(
        ["one dispatch of a rank", "rows", "padding", "sequence multiple", *(f"{purpose}, MB" for purpose in purposes)],
        rows,
        caption="At most. Sequences padded to the multiple leave this padding none to do. "
        + ("The bytes are what graph-safe mode allocates." if graph_safe else "The bytes are what experts are given."),
    )


def _show_capacities(capacities: Sequence[CapacityPlan]) -> None:
    console.table(
        ["capacity", "rows", "buffer MB", "overflow", "in a step", "pair_rows", "overflow"],
        [
            [
                f"{one.factor}",
                str(one.rows),
                _megabytes(one.buffer_bytes),
                _odds(one.overflow),
                _odds(one.step_overflow),
                str(one.pair_rows),
                _odds(one.pair_overflow),
            ]
            for one in capacities
        ],
        caption="A graph-safe capacity_factor, and how likely some rank needs more rows in a dispatch, and in a step; "
        "and the same factor as alltoall's pair_rows.",
    )


def _megabytes(nbytes: float) -> str:
    return f"{nbytes / 1e6:.0f}" if nbytes >= 1e8 else f"{nbytes / 1e6:.3g}"


def _odds(bounds: tuple[float, float]) -> str:
    """One number where the bounds agree to the digits shown."""
    low, high = (_chance(odds) for odds in bounds)
    return low if low == high else f"{low} to {high}"


def _chance(odds: float) -> str:
    if odds in (0.0, 1.0):
        return f"{odds:.0f}"
    return "< 1e-12" if odds < 1e-12 else f"{odds:.2g}"
