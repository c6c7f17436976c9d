"""The conformance kit on the installed deep_ep and NCCL EP: on one rank, and on as many as there are GPUs.

What it needs is in README.md beside this file. Where the library cannot be used, the reason is that of ``probe``.
"""

from __future__ import annotations

import datetime

import pytest
import torch
import torch.distributed as dist

from moe_dispatch.backends import Rejected, load_backend
from moe_dispatch_testing.case import case_config, poisoned_memory, run_rank
from moe_dispatch_testing.kit import backend_cases
from moe_dispatch_testing.ranks import run_processes
from tests.gpu.vendor_cases import vendor_cases

NAMES = ("deepep", "hybridep", "nccl_ep")


def usable_or_skip(name: str, ep_size: int) -> None:
    verdict = load_backend(name)().probe()
    if isinstance(verdict, Rejected):
        pytest.skip(f"{name}: {verdict.reason}")
    if not any(True for _ in backend_cases(name, (ep_size,), device="cuda")):
        pytest.skip(f"{name}: its constraints rule out {ep_size} ranks")


def run_suite(rank: int, name: str, ep_size: int) -> int:
    """Run the cases on this rank. Return their number. Sums of gradients over ranks are not compared."""
    torch.cuda.set_device(rank % torch.cuda.device_count())
    on_own_gpus = torch.cuda.device_count() >= ep_size
    group = dist.new_group(backend="nccl") if on_own_gpus else dist.group.WORLD
    ran = 0
    for case in vendor_cases(name, ep_size, "cuda"):
        with poisoned_memory():
            run_rank(case_config(name, case), group, case)
        ran += 1
    return ran


@pytest.mark.gpu
@pytest.mark.parametrize("ep_size", [8, 4, 2, 1], ids=lambda size: f"{size}_gpus")
@pytest.mark.parametrize("name", NAMES)
def test_conforms_on_gpus(name: str, ep_size: int) -> None:
    usable_or_skip(name, ep_size)
    if ep_size > 1 and torch.cuda.device_count() < ep_size:
        pytest.skip(f"{ep_size} ranks need as many GPUs, there are {torch.cuda.device_count()}")
    counts = run_processes(run_suite, ep_size, name, ep_size, timeout=datetime.timedelta(minutes=10))
    assert len(set(counts)) == 1
    assert counts[0] > 100
