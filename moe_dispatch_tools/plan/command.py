"""Run ``plan``: make a plan from the command line, and show it as tables on a terminal."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from moe_dispatch.backends import known_backends
from moe_dispatch.config import DispatcherConfig, json_or_text
from moe_dispatch.errors import ConfigError
from moe_dispatch_tools import console
from moe_dispatch_tools.names import NamedBackend, parse_backend
from moe_dispatch_tools.plan.forecast import FACTORS, Cluster, MicroBatch, forecast, graph_safe_config
from moe_dispatch_tools.plan.models import read_model
from moe_dispatch_tools.plan.routing import random_routing, traced_routing

_DEFAULT_RANKS = 8
_GRAPH_SAFE_FIELDS = ("capacity_factor", "on_overflow")  # fields that a config in eager mode refuses


def run(
    file: Path,
    batch: MicroBatch,
    *,
    ep_size: int | None,
    nodes: int | None,
    layers: int | None,
    dtype: str | None,
    routing: str,
    seed: int,
    backends: str | None,
    factors: Sequence[float] | None,
    graph_safe: bool,
    changes: Sequence[str] | None,
    balance: bool,
    flop_per_byte: float | None,
    as_json: bool,
) -> int:
    """Make a plan and show it. The parameters are the options of the command line; None is one that is not given.

    Returns:
        The exit status: 0 if at least one backend can be used, else 1.

    Raises:
        ConfigError: The model or a number is wrong, or two numbers do not fit each other.
        TraceError: The trace cannot be read or has other sizes.
    """
    torch.set_num_threads(1)  # a second thread slows down many small operators
    fields, later = _changes(changes or ()), {}
    if graph_safe:
        later = {name: fields.pop(name) for name in _GRAPH_SAFE_FIELDS if name in fields}
    model = read_model(file, layers=layers, dtype=dtype, changes=fields)
    routing = str(file) if routing == "uniform" and file.suffix == ".safetensors" else routing
    if routing.endswith(".safetensors"):
        cut = not (graph_safe or model.config.graph_safe)
        source, ranks = traced_routing(Path(routing), model.config, ep_size=ep_size, cut=cut)
    else:
        source = random_routing(routing, seed=seed, groups=model.groups)
        ranks = ep_size or _DEFAULT_RANKS
    if graph_safe:
        rows = batch.rows(model.config, source.tokens)["rows_per_rank"]
        model = dataclasses.replace(model, config=graph_safe_config(model.config, rows, later))
    found = forecast(
        model,
        Cluster.of(ranks, nodes, flop_per_byte),
        batch,
        source,
        backends=_named(model.config, backends),
        factors=factors or FACTORS,
        balance=balance,
    )
    if as_json:
        console.document(found)
    else:
        _show(found)
    return int(all(backend["refused"] for backend in found["backends"]))


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


def _named(config: DispatcherConfig, backends: str | None) -> list[NamedBackend]:
    """Return the named backends, or all known backends. The backend of the config has the options of the config."""
    if backends is not None:
        return [parse_backend(text) for text in dict.fromkeys(backends.split(","))]
    own = {} if isinstance(config.backend, str) else {**config.backend}
    own_name = own.pop("name", None)
    return [NamedBackend(label=name, where=name, options=own if name == own_name else {}) for name in known_backends()]


def _show(found: dict[str, Any]) -> None:
    model, cluster, sequences = found["model"], found["cluster"], found["sequences"]
    limit = f" in {model['topk_groups']} of {model['num_groups']} groups" if model["num_groups"] else ""
    console.line(
        f"{model['name']}: {model['num_experts']} experts, top {model['top_k']}{limit}, hidden size "
        f"{model['hidden_size']}, {model['layers']} layers with experts, {model['dtype']}"
    )
    console.line(
        f"expert parallelism over {cluster['ep_size']} ranks, {cluster['nodes']} nodes of {cluster['ranks_per_node']}; "
        f"{'graph-safe' if model['graph_safe'] else 'eager'} mode"
    )
    if spare := model["spare_experts_per_rank"]:
        filled = "which stay empty" if model["balance"] is None else f"filled by {model['balance']} in each dispatch"
        slots = model["num_experts"] // cluster["ep_size"] + spare
        console.line(f"a rank has {slots} expert slots, {spare} of them spare, {filled}")
    console.line(f"routing {found['routing']}")
    console.line(f"sequences: pad to a multiple of {sequences['multiple']} in the data loader")
    if sequences["length"] is not None:
        console.line(
            f"sequences of {sequences['length']} tokens become {sequences['padded_length']} rows, "
            f"{sequences['padding']} of them padding; sequences in a micro-batch: {sequences['batch_size']}",
            indent=2,
        )
    console.line(f"a rank brings {sequences['rows_per_rank']} rows to each dispatch", indent=2)
    rows = {
        "at the experts of a rank": found["received"],
        "at the experts of the busiest rank": found["busiest_rank"],
        "at the busiest expert": found["busiest_expert"],
        f"padding of a rank, to {model['pad_multiple']} per expert": found["expert_padding"],
    }
    console.table(
        ["rows of one dispatch", "mean", "min", "max"],
        [[title, *(f"{of[name]:.0f}" for name in ("expected", "low", "high"))] for title, of in rows.items()],
        caption=f"{found['dispatches']} {'simulated' if found['simulated'] else 'recorded'} dispatches.",
    )
    _show_backends(found)
    if found["capacities"]:
        _show_capacities(found)
    if found["placements"]:
        _show_placements(found["placements"])


def _show_backends(found: dict[str, Any]) -> None:
    usable = [backend for backend in found["backends"] if backend["refused"] is None]
    rows = []
    for backend in usable:
        if backend["sent"] is None:
            rows.append([backend["name"], *["unknown"] * 6])
            continue
        ways = backend["forward"], backend["backward"]
        numbers = (*(way["expected"] for way in ways), *(sum(way[of] for way in ways) for of in ("expected", "high")))
        name = backend["name"] + " *" * backend["payload_only"]
        rows.append([name, backend["row_dtypes"], *map(_megabytes, (*numbers, backend["between_nodes"]))])
    if usable:
        note = " * Rows only: the library sends more beside them." * any(one["payload_only"] for one in usable)
        console.table(
            ["MB sent by a rank", "rows in", "forward", "backward", "step", "max step", "to other nodes"],
            rows,
            caption=f"Mean of one micro-batch in {found['model']['layers']} layers.{note}",
            text_columns=2,
        )
        purposes = list(dict.fromkeys(purpose for one in usable for purpose in one["buffers"]))
        rows = [
            [
                backend["name"],
                *(f"{backend[field]['high']:.0f}" for field in ("rows_per_rank", "rank_padding")),
                str(backend["sequence_multiple"]),
                *(_megabytes(backend["buffers"].get(purpose, {"high": None})["high"]) for purpose in purposes),
            ]
            for backend in usable
        ]
        if len(rows) > 1 and all(row[1:] == rows[0][1:] for row in rows):
            rows = [["each backend", *rows[0][1:]]]
        console.table(
            ["max of a dispatch, a rank", "rows", "padding", "sequence multiple", *(f"{one}, MB" for one in purposes)],
            rows,
            caption="Sequences whose lengths are a multiple of the sequence multiple need no padding. MB: the "
            + ("buffers that graph-safe mode allocates." if found["model"]["graph_safe"] else "rows of the experts."),
        )
    for backend in found["backends"]:
        if backend["refused"] is not None:
            console.line(f"{backend['name']}: {backend['refused']}", mark="-")
        elif "not usable here" in backend["rules"]:
            console.line(f"{backend['name']}: planned by the {backend['rules']}", mark="-")


def _show_capacities(found: dict[str, Any]) -> None:
    console.table(
        ["capacity_factor", "rows", "buffer MB", "overflow", "dropped", "pair_rows", "overflow"],
        [
            [
                *(str(one["factor"]), str(one["rows"]), _megabytes(one["buffer_bytes"])),
                *(f"{100 * one[share]:.3g} %" for share in ("overflow", "dropped")),
                *(str(one["pair_rows"]), f"{100 * one['pair_overflow']:.3g} %"),
            ]
            for one in found["capacities"]
        ],
        caption=f"Graph-safe mode: a capacity_factor of {found['needed_factor']:.3f} is enough for these dispatches. "
        "Overflow: dispatches in which some rank needs more rows. Dropped: share of all rows. The last two columns: "
        "pair_rows of alltoall for this factor, and dispatches in which some pair of ranks needs more.",
    )


def _show_placements(placements: Sequence[dict[str, Any]]) -> None:
    told = any(one["break_even"] is not None for one in placements)
    headings = ["placement", "spare\nslots", "busiest\n/ mean", "worst", "peak\nrows", "copied\nexperts"]
    rows = []
    for one in placements:
        even = "-" if one["break_even"] is None else f"{one['break_even']:.0f}"
        rows.append(
            [
                *(one["planner"] + " once" * one["once"], str(one["spare"]), f"{one['imbalance']:.2f}"),
                *(f"{one['worst_imbalance']:.2f}", f"{one['peak_rows']:.0f}", f"{one['copied_experts']:.0f}"),
                *(_megabytes(one["copied_bytes"]), _megabytes(one["slot_bytes"]), *[even] * told),
            ]
        )
    console.table(
        [*headings, "MB\ncopied", "MB of\nslots", *["break-\neven"] * told],
        rows,
        caption="Rows of the busiest rank, and expert weights in slots of other ranks. A planner copies for each "
        "dispatch, or once for all. At most 16 dispatches are planned. MB: of the weights of a layer. Copied: in all "
        "ranks together, in a forward, and as many gradients in a backward. Slots: of one rank."
        + " break-even: tokens per expert from which the busiest rank saves more time than the weights take."
        * told,
    )


def _megabytes(nbytes: float | None) -> str:
    if nbytes is None:
        return "unknown"
    return f"{nbytes / 1e6:.0f}" if nbytes >= 1e8 else f"{nbytes / 1e6:.3g}"
