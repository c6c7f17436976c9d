"""Measure a MoE layer of AutoEP, forward and backward, through its own transport and through ours, in one run.

python -m tests.integration.deepspeed.speed --ranks 4
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from moe_dispatch_testing import run_processes
from tests.integration.deepspeed.engines import Case, engine_of, on_cpu

WAYS: dict[str, Any] = {"theirs": None, "alltoall": "alltoall", "allgather": "allgather"}
SIZES = (("num_hidden_layers", 1), ("hidden_size", 512), ("moe_intermediate_size", 128), ("num_experts", 64))


def measure(rank: int, ranks: int, top_k: int, tokens: int, repeats: int) -> dict[str, float]:
    """The median of the time of a forward and backward, of the slowest rank, by way."""
    torch.set_num_threads(1)
    taken: dict[str, list[float]] = {way: [] for way in WAYS}
    with on_cpu(ranks):
        changes = (*SIZES, ("num_experts_per_tok", top_k))
        cases = {way: Case(stage=0, ep=ranks, backend=backend, changes=changes) for way, backend in WAYS.items()}
        engines = {way: engine_of(case) for way, case in cases.items()}
        x = torch.randn(1, tokens, dict(SIZES)["hidden_size"], generator=torch.Generator().manual_seed(rank))
        for _ in range(repeats + 1):  # the first one is not counted
            for way, engine in engines.items():
                dist.barrier()
                started = time.perf_counter()
                engine.module.model.layers[0].mlp(x.requires_grad_()).sum().backward()
                seconds = torch.tensor(time.perf_counter() - started, dtype=torch.float64)
                dist.all_reduce(seconds, dist.ReduceOp.MAX)
                taken[way].append(float(seconds))
                x.grad = None
    return {way: statistics.median(seconds[1:]) for way, seconds in taken.items()}


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--top-k", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=9)
    given = parser.parse_args()
    os.environ |= {"DS_ACCELERATOR": "cpu", "DS_BUILD_OPS": "0"}
    arguments = (given.ranks, given.top_k, given.tokens, given.repeats)
    found = run_processes(measure, given.ranks, *arguments, timeout=timedelta(seconds=300))[0]
    for way, seconds in found.items():
        print(f"{way}: {1000 * seconds:.0f} ms, theirs / this {found['theirs'] / seconds:.2f}")
