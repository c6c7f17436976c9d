"""The proxy set-up of Megatron-LM #4816: tp 2 with sequence parallelism, pp 2, cp 2, ep 2, here with dp 2 around it."""

from __future__ import annotations

import os
import resource
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from moe_dispatch_testing import run_processes
from tests.sharded.grid import Grid
from tests.sharded.model import Sizes
from tests.sharded.packing import Packed
from tests.sharded.run import Outcome, run_job
from tests.sharded.stage import Job

GRID = Grid(tp=2, cp=2, dp=2, pp=2)
# 256 columns are the fewest that deep_ep v1 takes; two layers in each stage.
SIZES = Sizes(layers=4, hidden=256, heads=2, head=8, inner=16)
# Ranks bring other counts in each micro-batch. In the second, half of the ranks have rows and no token among them; in
# the third, half of the ranks have no row at all.
STEP = (
    (Packed(lengths=(13, 5, 30), padded=(16, 8, 32), seed=0), Packed(lengths=(7,), padded=(8,), seed=1)),
    (Packed(lengths=(0, 0), padded=(8, 16), seed=2), Packed(lengths=(21, 3, 1), padded=(24, 8, 16), seed=3)),
    (Packed(lengths=(9,), padded=(16,), seed=4), Packed(lengths=(), padded=(), seed=5)),
)
MOST_ROWS = 16  # per rank

BACKENDS: dict[str, dict[str, Any]] = {
    "alltoall": {"backend": "alltoall"},
    "deepep v1": {"backend": {"name": "deepep", "emulate": "v1.2.1"}, "wire_dtype": "bfloat16"},
    "deepep v2": {"backend": {"name": "deepep", "emulate": "v2-2.1.0"}, "wire_dtype": "bfloat16"},
    "hybridep, equal rows": {"backend": {"name": "hybridep", "emulate": "hybridep-94a9f8f"}, "wire_dtype": "bfloat16"},
    "hybridep, any rows": {"backend": {"name": "hybridep", "emulate": "hybridep-744"}, "wire_dtype": "bfloat16"},
}
AGREEING = ("deepep v2", "hybridep, equal rows", "hybridep, any rows")

# Where experts lie: over neighbours, as Megatron lays them out with expert tensor parallelism 1 (a tensor-parallel
# pair) and 2 (a context-parallel pair, each expert cut in two; what #4816 tests); and over the halves of the data.
PLACEMENTS: dict[str, dict[str, Any]] = {
    "etp 1": {"expert_groups": GRID.expert_groups(ep=2)},
    "etp 2": {"expert_groups": GRID.expert_groups(ep=2, etp=2), "etp": 2},
    "over data": {"expert_groups": GRID.groups("dp")},
}
RUN = [
    ("alltoall", "etp 1"),
    ("alltoall", "etp 2"),
    ("deepep v1", "over data"),
    ("deepep v2", "etp 2"),
    ("hybridep, equal rows", "etp 1"),
    ("hybridep, any rows", "etp 2"),
]
RUN_STATIC = ("deepep v2", "hybridep, equal rows")

# Of one process, all of which the limits count: 30 are seen with torch 2.13, most of them of the many gloo groups.
_THREADS = 32
# Sixteen processes import torch, and may do so on two cores that others use too.
TIMEOUT = timedelta(minutes=10)


def jobs() -> dict[tuple[str, str], Job]:
    """One training step each, by backend and placement; and with static counts."""
    static = {"row_counts": "static", "max_tokens_per_rank": MOST_ROWS}
    return {(backend, placement): _job(backend, placement) for backend, placement in RUN} | {
        (backend, "static"): _job(backend, "over data", **static) for backend in RUN_STATIC
    }


def _job(backend: str, placement: str, **more: Any) -> Job:
    fields = {"pad_multiple": 16, **BACKENDS[backend], **more}
    return Job(grid=GRID, sizes=SIZES, step=STEP, fields=fields, **PLACEMENTS[placement])


def run_jobs() -> list[Mapping[tuple[str, str], Outcome]]:
    """What came of every job, by rank."""
    return run_processes(_on_rank, GRID.size, jobs(), timeout=TIMEOUT)


def _on_rank(rank: int, work: Mapping[tuple[str, str], Job]) -> dict[tuple[str, str], Outcome]:
    outcomes = {name: run_job(rank, job) for name, job in work.items()}
    dist.barrier()  # as ``count_collectives`` asks for
    return outcomes


def allowed_ranks(environment: Mapping[str, str] = os.environ) -> int:
    """Processes that a test may start here: what TEST_MAX_RANKS says, else what the system's limits leave room for."""
    said = environment.get("TEST_MAX_RANKS")
    if said is not None:
        return int(said)
    soft, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    limits = [soft] if soft != resource.RLIM_INFINITY else []
    for path in (Path("/sys/fs/cgroup/pids.max"), Path("/sys/fs/cgroup/pids/pids.max")):
        text = path.read_text().strip() if path.exists() else "max"
        limits += [int(text)] if text != "max" else []
    return min(limits, default=GRID.size * _THREADS) // _THREADS


def reason_to_skip(allowed: int) -> str | None:
    """Why the sixteen processes are not run; None where they are."""
    if allowed >= GRID.size:
        return None
    return f"tp 2 x cp 2 x dp 2 x pp 2 needs {GRID.size} ranks, fewer than {GRID.size} are allowed here: {allowed}"
