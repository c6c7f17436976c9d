"""The conformance kit on two ranks that share one GPU. NCCL refuses this, so the rows travel over gloo."""

from __future__ import annotations

import dataclasses
import datetime
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist

from moe_dispatch_testing.case import case_config, poisoned_memory, run_rank
from moe_dispatch_testing.kit import backend_cases
from moe_dispatch_testing.ranks import run_processes
from tests.simulated_cuda.device import is_simulated
from tests.simulated_cuda.values import simulated

RANKS = 2


def run_suite(rank: int, backend: str) -> int:
    """Run every case of the backend on this rank. Return their number."""
    with simulated() if is_simulated() else nullcontext():
        torch.cuda.set_device(0)
        ran = 0
        for case in backend_cases(backend, (RANKS,)):
            with poisoned_memory():
                run_rank(case_config(backend, case), dist.group.WORLD, dataclasses.replace(case, device="cuda"))
            ran += 1
    return ran


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["alltoall", "allgather"])
def test_two_ranks_share_a_gpu(backend: str) -> None:
    counts = run_processes(run_suite, RANKS, backend, timeout=datetime.timedelta(minutes=2))
    assert counts[0] == counts[1] > 50
