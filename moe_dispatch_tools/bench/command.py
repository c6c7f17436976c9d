"""Run ``bench``: start the ranks, once or several times, print each case as it ends, and save and draw the results."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import final

from moe_dispatch.errors import ConfigError
from moe_dispatch_tools import console
from moe_dispatch_tools.bench.comparison import comparison_document, require_shared
from moe_dispatch_tools.bench.display import (
    PICTURES,
    draw,
    show_case,
    show_case_of_start,
    show_conclusion,
    show_setting,
)
from moe_dispatch_tools.bench.intervals import NEEDED_STARTS
from moe_dispatch_tools.bench.measurement import measure
from moe_dispatch_tools.bench.request import Request
from moe_dispatch_tools.bench.results import CaseResult, OverheadResult, Results, Start, join, load_results
from moe_dispatch_tools.machine import describe_machine
from moe_dispatch_tools.place import describe
from moe_dispatch_tools.ranks import on_ranks, ranks_here, this_rank, under_torchrun

SAVED_STARTS = 6  # starts of a run with --save: enough for a verdict on a difference of about 1.5 times


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Files:
    """Files to write the results to, and the file with earlier results to compare with."""

    save: Path | None = None
    picture: Path | None = None
    against: Path | None = None


def run(request: Request, files: Files, *, starts: int | None, as_json: bool) -> int:
    """Measure, and show the results. Return the exit status.

    Args:
        request: Cases and contenders.
        files: Files, which are checked before the measurement and written after it.
        starts: Number of starts. None for the largest of 1, ``SAVED_STARTS`` if there is a file to save, and the number
            of starts of the earlier run if there is one.
        as_json: Whether to print JSON and nothing else.

    Raises:
        ConfigError: A file cannot be read, written or compared with, or there are several starts under torchrun.
        RankFailed, PeerFailed: As for ``on_ranks``.
    """
    if under_torchrun():
        if starts is not None and starts > 1:
            raise ConfigError(
                f"--starts must be 1 under torchrun, which starts the processes only once, got {starts}. Leave it out, "
                "or use --ranks without torchrun."
            )
        starts = 1
    first = this_rank() == 0
    earlier = _check_files(request, files) if first else None
    if starts is None:
        starts = max(1, SAVED_STARTS if files.save else 1, len(earlier.starts) if earlier else 1)
    results = _measured(request, starts, visible=first and not as_json)
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
    show_conclusion(results, earlier)
    for file in (files.save, files.picture):
        if file is not None:
            console.line(f"wrote {file}")
    if files.save and starts < NEEDED_STARTS:
        console.line(f"starts: {starts}. A verdict of --against needs {NEEDED_STARTS} or more: --starts", mark="-")
    return 0


def _check_files(request: Request, files: Files) -> Results | None:
    """Check that the files can be written. Return the earlier run to compare with, if the user named one."""
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


def _measured(request: Request, num_starts: int, *, visible: bool) -> Results:
    """Measure all cases in every start. If ``visible``, print the machine first, and each case when it ends.

    The first starts print one line for a case. The last start prints the tables, which are about all starts.
    """
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # or each profile of memory prints two lines per rank
    machine = describe_machine(f"{describe(ranks_here(request.tasks[0][0]))}, one thread each")
    parts, done = num_starts * sum(task.parts for _, task in request.tasks), 0
    starts: list[list[CaseResult | OverheadResult]] = []
    if visible:
        show_setting(machine, request.left_out)
    with ExitStack() as bar:

        def show_bar() -> Callable[[int, int], None]:
            return bar.enter_context(console.progress(f"bench {request.suite}", visible=this_rank() == 0))

        show = show_bar()

        def heard(message: CaseResult | OverheadResult | int) -> None:
            nonlocal done, show
            if isinstance(message, int):
                done += message
                show(done, parts)
                return
            starts[-1].append(message)
            if visible:
                bar.close()  # the bar and the tables share a terminal
                index = len(starts[-1]) - 1
                if len(starts) < num_starts:
                    show_case_of_start(message, len(starts), num_starts)
                else:
                    joined = join([start[index] for start in starts])
                    show_case(joined, request, num_starts, first=index == 0)
                show = show_bar()

        for _ in range(num_starts):
            starts.append([])
            for ranks, task in request.tasks:
                on_ranks(partial(measure, task), ranks, heard)
    return Results(
        suite=request.suite,
        machine=machine,
        iterations=request.iterations,
        left_out=request.left_out,
        starts=tuple(
            Start(
                cases=tuple(one for one in found if isinstance(one, CaseResult)),
                overheads=tuple(one for one in found if isinstance(one, OverheadResult)),
            )
            for found in starts
        ),
    )
