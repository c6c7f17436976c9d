"""Forward and backward of dispatch and combine: this library, torchtitan and transformers, in one group.

Checks that all agree, and prints times (seconds, of the slowest rank), bytes sent to other ranks against the fewest
possible, the most memory held, and what a call costs beside its collectives.
``--growth`` prints how the times grow over each dimension instead.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from moe_dispatch.cli.bench.case import Case, overhead_case, run_case, time_case
from moe_dispatch.cli.bench.overhead import Overhead
from moe_dispatch.cli.bench.peers import CONTENDERS, missing_packages
from moe_dispatch.cli.bench.report import (
    case_table,
    describe,
    growth_header,
    growth_row,
    machine,
    overhead_table,
    plain,
    table,
)
from moe_dispatch.cli.bench.timing import Timing
from moe_dispatch.cli.bench.workload import Shape, Skew
from moe_dispatch.testing.ranks import run_processes

_DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
_SKEWS: tuple[Skew, ...] = ("balanced", "skewed")
_TIMEOUT = timedelta(minutes=10)
_OVERHEAD_TOKENS = 16
# Each axis of Shape with its points; the others keep the given shape, with fewer tokens.
_GROWTH = {
    "tokens": (256, 512, 1024, 2048, 4096),
    "hidden": (256, 512, 1024, 2048, 4096),
    "top_k": (1, 2, 4, 8, 16),
    "experts": (16, 32, 64, 128, 256),
}
_GROWTH_TOKENS = 1024
_GROWTH_RANKS = (1, 2, 4, 8)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run what the command line asks for."""
    options = _parse(arguments)
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # else each profile prints two lines per rank
    shape = Shape(tokens=options.tokens, hidden=options.hidden, experts=options.experts, top_k=options.top_k)
    about = machine()
    print("\n".join(f"{name}: {value}" for name, value in about.items()))
    for name in CONTENDERS:
        if missing := missing_packages(name):
            print(f"{name}: left out, not installed: {', '.join(missing)}. Install moe-dispatch[bench].")
    cases = [Case(shape=shape, dtype=_DTYPES[dtype], skew=skew) for dtype in options.dtype for skew in _SKEWS]
    results = _grow(cases[0], options) if options.growth else _compare(cases, options)
    if options.json:
        options.json.write_text(json.dumps({"machine": about, **results}, indent=2) + "\n")


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m moe_dispatch.cli.bench.dispatch", description=__doc__)
    parser.add_argument("--tokens", type=_positive, default=4096, help="rows of each rank")
    parser.add_argument("--hidden", type=_positive, default=1024)
    parser.add_argument("--experts", type=_positive, default=64, help="of the whole group")
    parser.add_argument("--top-k", type=_positive, default=8)
    parser.add_argument("--ranks", type=_positive, default=4, help="gloo processes")
    parser.add_argument("--dtype", choices=list(_DTYPES), nargs="+", default=list(_DTYPES))
    parser.add_argument("--iterations", type=_positive, default=5, help="warm runs of each contender")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there too")
    parser.add_argument("--quick", action="store_true", help="256 tokens, 2 iterations: does everything run?")
    parser.add_argument("--growth", action="store_true", help="times over tokens, hidden, top_k, experts and ranks")
    options = parser.parse_args(arguments)
    if options.experts % options.ranks or options.top_k > options.experts:
        parser.error(
            f"--experts must be a multiple of --ranks and at least --top-k, got {options.experts} experts, "
            f"{options.ranks} ranks, top-{options.top_k}. Change one of them."
        )
    if options.quick:
        options.tokens, options.iterations = 256, 2
    return options


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number of at least 1, got {text!r}")
    return int(text)


def _compare(cases: list[Case], options: argparse.Namespace) -> dict[str, Any]:
    print(f"{options.ranks} gloo ranks, {options.iterations} warm iterations, medians", flush=True)
    results = run_processes(compare_on_rank, options.ranks, cases, options.iterations, timeout=_TIMEOUT)[0]
    return {"ranks": options.ranks, "cases": results, "overhead": _compare_overheads(cases[0], options)}


def compare_on_rank(rank: int, cases: list[Case], iterations: int) -> list[dict[str, Any]]:
    """All cases; rank 0 prints as it goes."""
    group = _world()
    _warm_process(cases, group)
    results = []
    for case in cases:
        result = run_case(case, iterations, group)
        if rank == 0:
            print(f"\n{describe(case)}\n{case_table(result)}", flush=True)
        results.append(plain(case, result))
    return results


def _compare_overheads(case: Case, options: argparse.Namespace) -> list[dict[str, Any]]:
    """On one rank, which has its core to itself, and on all."""
    small = replace(case, shape=replace(case.shape, tokens=_OVERHEAD_TOKENS))
    print(f"\ndispatch + combine, forward, above the bare collectives: {describe(small)}")
    results = []
    for ranks in sorted({1, options.ranks}):
        overheads = run_processes(overhead_on_rank, ranks, small, 40 * options.iterations, timeout=_TIMEOUT)[0]
        print(f"{ranks} gloo rank{'s' * (ranks > 1)}\n{overhead_table(overheads)}", flush=True)
        results.append({"ranks": ranks, **{name: asdict(cost) for name, cost in overheads.items()}})
    return results


def overhead_on_rank(rank: int, case: Case, runs: int) -> dict[str, Overhead]:
    """What a call costs beside its collectives."""
    return overhead_case(case, runs, _world())


def _world() -> dist.ProcessGroup:
    group = dist.group.WORLD
    assert group is not None
    return group


def _warm_process(cases: list[Case], group: dist.ProcessGroup) -> None:
    """Connect ranks and load code with a few tokens, so that "cold" is a contender's first call, not a process's."""
    for case in cases:
        time_case(replace(case, shape=replace(case.shape, tokens=_OVERHEAD_TOKENS)), 1, group)


def _grow(case: Case, options: argparse.Namespace) -> dict[str, Any]:
    base = replace(case, shape=replace(case.shape, tokens=min(options.tokens, _GROWTH_TOKENS)))
    print(f"Growth around {describe(base)}, {options.ranks} ranks; medians of the total", flush=True)
    points = list(_points(base, options.ranks))
    grown = _time_points(points, options.ranks, options.iterations)
    for ranks in _GROWTH_RANKS:
        if base.shape.experts % ranks == 0:
            grown += _time_points([("ep_size", ranks, base)], ranks, options.iterations)
    names = list(grown[0][2])
    print(table([growth_header(names), *(growth_row(*point) for point in grown)]))
    return {
        "growth": [
            {"axis": axis, "value": value, "seconds": {name: timing.warm.total for name, timing in timings.items()}}
            for axis, value, timings in grown
        ]
    }


_Point = tuple[str, int, Case]
_TimedPoint = tuple[str, int, dict[str, Timing]]


def _points(base: Case, ranks: int) -> Iterator[_Point]:
    for axis, values in _GROWTH.items():
        for value in values:
            shape = replace(base.shape, **{axis: value})
            if shape.top_k <= shape.experts and shape.experts % ranks == 0:
                yield axis, value, replace(base, shape=shape)


def _time_points(points: list[_Point], ranks: int, iterations: int) -> list[_TimedPoint]:
    first: list[_TimedPoint] = run_processes(grow_on_rank, ranks, points, iterations, timeout=_TIMEOUT)[0]
    return first


def grow_on_rank(rank: int, points: list[_Point], iterations: int) -> list[_TimedPoint]:
    """Times of every point."""
    group = _world()
    _warm_process([points[0][2]], group)
    return [(axis, value, time_case(case, iterations, group)) for axis, value, case in points]


if __name__ == "__main__":
    main()
