"""Runs ``bench``: starts the ranks, and shows, draws and saves the results."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, final

from moe_dispatch.cli import console
from moe_dispatch.cli.bench.display import PICTURES, draw, show
from moe_dispatch.cli.bench.measurement import measure
from moe_dispatch.cli.bench.request import Request
from moe_dispatch.cli.bench.results import Results, comparison_document, load_results, require_shared
from moe_dispatch.cli.machine import describe_machine
from moe_dispatch.cli.place import describe
from moe_dispatch.cli.ranks import on_ranks, ranks_here, this_rank
from moe_dispatch.errors import ConfigError


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Files:
    """Files that results are written to, and the earlier results to compare with."""

    save: Path | None = None
    picture: Path | None = None
    against: Path | None = None


def run(request: Request, files: Files, *, as_json: bool) -> int:
    """Measure and show the results; the exit status.

    Args:
        request: cases and contenders.
        files: checked before anything is measured, written at the end.
        as_json: whether to print JSON and nothing else.

    Raises:
        ConfigError: a file cannot be read, written or compared with.
        RankFailed, PeerFailed: as for ``on_ranks``.
    """
    first = this_rank() == 0
    earlier = _check_files(request, files) if first else None
    results = _measured(request, first)
    if not first:
        return 0
    if files.save:
        files.save.write_text(json.dumps(results.document(), indent=2) + "\n", encoding="utf-8")
    if files.picture:
        draw(results, files.picture)
    if as_json:
        compared = {} if earlier is None else {"against": comparison_document(results, earlier)}
        console.document({**results.document(), **compared})
        return 0
    show(results, earlier)
    for file in (files.save, files.picture):
        if file is not None:
            console.line(f"wrote {file}")
    return 0


def _check_files(request: Request, files: Files) -> Results | None:
    """Check that files can be written; the earlier run to compare with, if one is given."""
    if files.picture and files.picture.suffix not in PICTURES:
        raise ConfigError(
            f"--picture must end in {' or '.join(PICTURES)}, got {str(files.picture)!r}. Name the file bench.png."
        )
    for option, file in {"save": files.save, "picture": files.picture}.items():
        if file is not None and not (os.access(file.parent, os.W_OK) and not file.is_dir()):
            raise ConfigError(f"--{option} must be a file in a folder that can be written, got {str(file)!r}. Make it.")
    if files.against is None:
        return None
    earlier = load_results(files.against)
    require_shared(request, earlier, files.against)
    return earlier


def _measured(request: Request, first: bool) -> Results:
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # without it each profile of memory prints two lines per rank
    parts, done, measured = sum(task.parts for _, task in request.tasks), 0, []
    with console.progress(f"bench {request.suite}", visible=first) as show:

        def heard(more: int) -> None:
            nonlocal done
            done += more
            show(done, parts)

        for ranks, task in request.tasks:
            measured += on_ranks(partial(measure, task), ranks, heard)
    kind = "overheads" if request.suite == "overhead" else "cases"
    found: dict[str, Any] = {kind: tuple(measured)}
    machine = describe_machine(f"{describe(ranks_here(request.tasks[0][0]))}, one thread each")
    return Results(
        suite=request.suite, machine=machine, iterations=request.iterations, left_out=request.left_out, **found
    )
