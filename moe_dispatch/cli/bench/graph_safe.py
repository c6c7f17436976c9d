"""What graph-safe mode costs beside the eager mode of the same backend, on the same routing, in one group.

Prints, for several capacities, times (seconds, of the slowest rank), bytes sent to
other ranks and the most memory held, each also over that of eager. Capacities bound rows per rank and, on ``alltoall``,
rows per pair; what does not fit is dropped, so a row that needed more than its capacity is marked.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, final

import torch
import torch.distributed as dist

from moe_dispatch.cli.bench.case import Case, gather
from moe_dispatch.cli.bench.contenders import Ours, identity_experts, run_layer
from moe_dispatch.cli.bench.interception import bytes_by_phase, record_layer
from moe_dispatch.cli.bench.memory import peak_bytes
from moe_dispatch.cli.bench.report import describe, machine, table
from moe_dispatch.cli.bench.timing import Timing, time_in_turn
from moe_dispatch.cli.bench.workload import Shape, Skew, Tokens
from moe_dispatch.testing.ranks import run_processes

_TIMEOUT = timedelta(minutes=10)
_DTYPES = (torch.bfloat16, torch.float32)
_SKEWS: tuple[Skew, ...] = ("balanced", "skewed")
_FACTORS: tuple[float | str, ...] = (1.25, 2.0, "worst")


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Cost:
    """What one mode took.

    Attributes:
        timing: forward and backward, cold and warm.
        bytes_sent: to other ranks, a rank's mean, both directions.
        peak_bytes: most memory held at once, of the rank that held most.
        dropped: whether some rank had more rows than fit.
    """

    timing: Timing
    bytes_sent: float
    peak_bytes: int
    dropped: bool


def main(arguments: Sequence[str] | None = None) -> None:
    """Run what the command line asks for."""
    options = _parse(arguments)
    shape = Shape(tokens=options.tokens, hidden=options.hidden, experts=options.experts, top_k=options.top_k)
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # else each profile prints two lines per rank
    about = machine()
    print("\n".join(f"{name}: {value}" for name, value in about.items()))
    print(f"{options.ranks} gloo ranks, {options.backend}, {options.iterations} warm iterations, medians", flush=True)
    cases = [Case(shape=shape, dtype=dtype, skew=skew) for dtype in _DTYPES for skew in _SKEWS]
    results = run_processes(
        compare_on_rank, options.ranks, cases, options.backend, options.iterations, timeout=_TIMEOUT
    )[0]
    if options.json:
        options.json.write_text(json.dumps({"machine": about, "cases": results}, indent=2) + "\n")


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m moe_dispatch.cli.bench.graph_safe", description=__doc__)
    parser.add_argument("--tokens", type=int, default=4096, help="rows of each rank, and max_tokens_per_rank")
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--experts", type=int, default=64, help="of the whole group")
    parser.add_argument("--top-k", type=int, default=8)
    parser.add_argument("--ranks", type=int, default=4, help="gloo processes")
    parser.add_argument("--backend", choices=["alltoall", "allgather"], default="alltoall")
    parser.add_argument("--iterations", type=int, default=5, help="warm runs of each mode")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there too")
    return parser.parse_args(arguments)


def compare_on_rank(rank: int, cases: list[Case], backend: str, iterations: int) -> list[dict[str, Any]]:
    """All cases; rank 0 prints as it goes."""
    group = dist.group.WORLD
    assert group is not None
    results = []
    for case in cases:
        costs = run_case(case, backend, iterations, group)
        if rank == 0:
            print(f"\n{describe(case)}\n{cost_table(costs)}", flush=True)
        results.append({"case": describe(case), "costs": {name: asdict(cost) for name, cost in costs.items()}})
    return results


def run_case(case: Case, backend: str, iterations: int, group: dist.ProcessGroup) -> dict[str, Cost]:
    """Measure all modes, eager first; the same result on all ranks. Collective."""
    tokens = case.tokens(group.rank())
    fields = {"eager": {"backend": backend}, **{_name(factor): _fields(backend, factor, case) for factor in _FACTORS}}
    modes = {name: Ours(case.shape, group, **given) for name, given in fields.items()}
    timings = time_in_turn(modes, tokens, iterations, group)
    sent = {name: sum(bytes_by_phase(record_layer(mode, tokens)).values()) for name, mode in modes.items()}
    dropped = {name: name != "eager" and mode.dispatcher.check().overflowed for name, mode in modes.items()}
    for mode in modes.values():
        mode.close()
    peaks = {name: measure_peak(case.shape, given, tokens, group) for name, given in fields.items()}
    all_sent, all_peaks = zip(*gather((sent, peaks), group), strict=True)
    return {
        name: Cost(
            timing=timings[name],
            bytes_sent=sum(rank[name] for rank in all_sent) / group.size(),
            peak_bytes=max(rank[name] for rank in all_peaks),
            dropped=dropped[name],
        )
        for name in modes
    }


def _name(factor: float | str) -> str:
    return f"capacity {factor}"


def _fields(backend: str, factor: float | str, case: Case) -> dict[str, Any]:
    return {
        "backend": {"name": backend, "pair_rows": factor} if backend == "alltoall" else backend,
        "graph_safe": True,
        "max_tokens_per_rank": case.shape.tokens,
        "capacity_factor": factor,
        "on_overflow": None if factor == "worst" else "drop",
    }


def measure_peak(shape: Shape, fields: dict[str, Any], tokens: Tokens, group: dist.ProcessGroup) -> int:
    """Most bytes held in the life of a dispatcher that runs twice. Collective."""

    def live() -> None:
        mode = Ours(shape, group, **fields)
        for _ in range(2):
            run_layer(mode, tokens, identity_experts)
        mode.close()

    return peak_bytes(live, lives=3)


def cost_table(costs: dict[str, Cost]) -> str:
    """One row per mode, its ratios to eager behind each number."""
    eager, *_ = costs.values()
    header = ("", "dispatch", "combine", "backward", "total", "min..max", "x", "MB sent", "x", "peak MB", "x", "drops")
    return table([header, *(_row(name, cost, eager) for name, cost in costs.items())])


def _row(name: str, cost: Cost, eager: Cost) -> tuple[str, ...]:
    warm, (low, high) = cost.timing.warm, cost.timing.spread
    return (
        name,
        *(f"{seconds:.3f}" for seconds in (warm.dispatch, warm.combine, warm.backward, warm.total)),
        f"{low:.3f}..{high:.3f}",
        f"{warm.total / eager.timing.warm.total:.2f}",
        f"{cost.bytes_sent / 1e6:.1f}",
        f"{cost.bytes_sent / eager.bytes_sent:.2f}",
        f"{cost.peak_bytes / 1e6:.0f}",
        f"{cost.peak_bytes / eager.peak_bytes:.2f}",
        "yes" if cost.dropped else "no",
    )


if __name__ == "__main__":
    main()
