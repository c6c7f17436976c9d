"""Run ``compare``: make a task from the command line, start the ranks, and show, save and draw the results."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterable
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, cast

from moe_dispatch.backends import known_backends
from moe_dispatch.config import DispatcherConfig
from moe_dispatch.errors import BackendUnavailableError, ConfigError
from moe_dispatch.versions import how_to_install
from moe_dispatch_testing.scenario import ROUTINGS, TOLERANCES, DtypeName
from moe_dispatch_tools import console
from moe_dispatch_tools.compare.display import draw, show_case
from moe_dispatch_tools.compare.measurement import Task, Variant, measure
from moe_dispatch_tools.compare.peers import PEERS, missing_packages
from moe_dispatch_tools.compare.workload import MOST_STEPS, WORKLOADS, Workload, replayed
from moe_dispatch_tools.machine import this_machine
from moe_dispatch_tools.names import NamedBackend, load_config, own_backend, parse_backend, parse_numbers
from moe_dispatch_tools.ranks import num_ranks, on_ranks, this_rank
from moe_dispatch_tools.traces import Trace

DEFAULT_RANKS = 4
MODES = ("eager", "graph-safe")
PICTURES = (".png", ".svg")
_FIELDS = ("balance", "deliver", "graph_safe.capacity_factor", "place")
_SIZES = {"num_experts": 64, "top_k": 8, "hidden_size": 1024}  # of a comparison without a config


def make_workloads(
    *,
    tokens: str | None = None,
    steps: int | None = None,
    dtype: str = "bfloat16",
    routing: str | None = None,
    trace: Path | None = None,
) -> tuple[tuple[Workload, ...], int]:
    """Make the workloads of the command line, and their default number of ranks. An option not given is None.

    Raises:
        ConfigError: A number, the dtype or the routing is wrong, or an option contradicts the trace.
        TraceError: The trace cannot be read.
    """
    dtypes = _choices("dtype", dtype, TOLERANCES)
    base = Workload() if steps is None else Workload(steps=steps)
    if trace is not None:
        for option, given in {"tokens": tokens, "routing": routing}.items():
            if given is not None:
                raise ConfigError(
                    f"--{option} must not be given with --trace, because the trace decides it, got {given!r}. "
                    "Leave out one of the two."
                )
        found = Trace.load_whole(trace, "compare")
        recorded = len(found.calls)
        base = Workload(trace=trace, recorded=recorded, steps=min(recorded, steps or MOST_STEPS))
        return tuple(dataclasses.replace(base, dtype=cast(DtypeName, name)) for name in dtypes), found.ep_size
    numbers = parse_numbers("--tokens", tokens or str(base.tokens), "64,4096", least=0)
    cases = product(dtypes, _choices("routing", routing or base.routing, (*ROUTINGS, *WORKLOADS)), numbers)
    return tuple(
        dataclasses.replace(base, dtype=cast(DtypeName, name), routing=draw_ids, tokens=count)
        for name, draw_ids, count in cases
    ), DEFAULT_RANKS


def _choices(option: str, given: str, known: Iterable[str]) -> list[str]:
    """Split values at commas, without repetitions."""
    values = list(dict.fromkeys(given.split(",")))
    for value in values:
        if value not in known:
            raise ConfigError(f"--{option} must be one of {', '.join(known)}, got {value!r}. Use one of them.")
    return values


def make_task(
    file: Path | None,
    backends: str | None,
    modes: str,
    workloads: tuple[Workload, ...],
    *,
    peers: bool = False,
    changes: dict[str, Any] | None = None,
    **fields: Any,
) -> Task:
    """Make the task of the command line.

    Args:
        file: Path of the config; None for 64 experts, top-8 and hidden size 1024.
        backends: Names of backends and peers, separated by commas. None for the backend of the config, or all known
            backends if that is "auto" and there is a file, or ``alltoall``.
        modes: Names in ``MODES``, separated by commas.
        workloads: Cases.
        peers: Whether to add the floor and the installed peers.
        changes: Fields that replace those of the config.
        **fields: Fields of ``Task``.

    Raises:
        ConfigError: The config, the name or an option of a backend, or the mode is wrong.
        BackendUnavailableError: A peer is not installed, or a class cannot be imported.
    """
    chosen_modes = _choices("mode", modes, MODES)
    config = load_config(file, changes or {}, backends=backends, **({} if file else _SIZES))
    variants: list[Variant] = []
    for text in _names(config, backends, file is None, peers):
        if isinstance(text, str) and text in PEERS:
            if missing := missing_packages(text):
                raise BackendUnavailableError(
                    f"The peer {text!r} is not installed: no {', '.join(missing)}. {how_to_install('bench')}"
                )
            variants.append(Variant(label=text, mode="eager"))
            continue
        backend = text if isinstance(text, NamedBackend) else parse_backend(text, fields=_FIELDS)
        limited = "graph_safe.capacity_factor" in backend.fields  # which only graph-safe mode has
        modes_here = ["graph-safe"] if limited else chosen_modes
        here = [Variant(label=backend.label, mode=mode, backend=backend) for mode in modes_here]
        if backends is not None:
            backend.spec()
        if backend.fields:  # a wrong value is wrong in every mode
            dataclasses.replace(here[0], mode="graph-safe" if limited else "eager").config(config, 1)
        variants += here
    if any(one.backend is None for one in variants):
        workloads = tuple(dataclasses.replace(workload, equal=True) for workload in workloads)
    return Task(
        # A trace decides how many rows each rank has, whatever the config promises.
        config=config.replace(backend="auto", **({"row_counts": None} if workloads[0].trace else {})),
        variants=tuple(variants),
        workloads=workloads,
        explicit=backends is not None or config.backend_name != "auto",
        **fields,
    )


def _names(config: DispatcherConfig, backends: str | None, bare: bool, peers: bool) -> list[str | NamedBackend]:
    found: list[str | NamedBackend] = []
    if backends is not None:
        found += dict.fromkeys(backends.split(","))
    elif own := own_backend(config):
        found.append(own)
    else:
        found += ["alltoall"] if bare else known_backends()
    return [*found, *(name for name in PEERS if peers and name not in found and not missing_packages(name))]


def run(task: Task, ranks: int, *, peers: bool = False, picture: Path | None = None, as_json: bool = False) -> int:
    """Run the task, and show the results. Return the exit status: 0 if all backends agree, else 1.

    Args:
        task: Cases and variants.
        ranks: Number of processes to start; ignored under torchrun.
        peers: Whether the peers were asked for. Those that are not installed are named.
        picture: File to draw the times to.
        as_json: Whether to print JSON and nothing else.

    Raises:
        ConfigError: The picture cannot be written.
        TraceError: The trace does not fit the config or the number of ranks.
        RankFailed, PeerFailed: As for ``on_ranks``.
    """
    ranks, first = num_ranks(ranks), this_rank() == 0
    if picture and not (picture.suffix in PICTURES and os.access(picture.parent, os.W_OK) and not picture.is_dir()):
        raise ConfigError(
            f"--picture must be a file in a folder that can be written, and end in {' or '.join(PICTURES)}, got "
            f"{str(picture)!r}. Name, for example, compare.png."
        )
    workload = task.workloads[0]
    if workload.trace is not None:  # check the trace before ranks start
        replayed(workload.trace, task.config, ranks=ranks, steps=workload.steps)
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # or each profile of memory prints two lines per rank
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # or a line if it sees older memory freed
    document: dict[str, Any] = {
        "machine": this_machine(),
        "ranks": ranks,
        "rounds": task.rounds,
        "config": task.config.model_dump(mode="json", exclude={"backend"}),
        "cases": [],
    }
    cases, shown, done = document["cases"], first and not as_json, 0
    for name in PEERS if peers and shown else ():
        if missing := missing_packages(name):
            told = f"{name} is left out, not installed: {', '.join(missing)}. {how_to_install('bench')}"
            console.line(told, mark="-")

    def heard(message: dict[str, Any] | int) -> None:
        nonlocal done
        if isinstance(message, int):
            done += message
            show_progress(done, task.parts)
        else:
            cases.append(message)

    try:
        with console.progress("compare", visible=first) as show_progress:
            on_ranks(partial(measure, task), ranks, heard)
    finally:  # if a rank fails, the cases before are shown
        for case in cases if shown else ():
            show_case(case, task)
    if not first:  # only rank 0 may end with status 1: torchrun ends all ranks when one of them fails
        return 0
    if picture:
        draw(cases, picture)
    if as_json:
        console.document(document)
    elif picture:
        console.line(f"wrote {picture}")
    return 0 if all(case["agree"] for case in cases) else 1
