"""What this machine and its torch offer."""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass
from typing import final

import torch
import torch.distributed as dist

import moe_dispatch


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """Versions and devices.

    Attributes:
        cuda: the version of CUDA that torch was built with, None for a build without.
        nccl: of the NCCL in torch, None where it has none.
        gloo: torch can connect CPUs.
        cpu_cores: that this process may use.
        gpus: one line each.
    """

    moe_dispatch: str
    python: str
    torch: str
    cuda: str | None
    nccl: str | None
    gloo: bool
    cpu_cores: int
    gpus: tuple[str, ...]


def this_machine() -> Machine:
    """Ask torch; no device is started where torch sees none."""
    return Machine(
        moe_dispatch=moe_dispatch.__version__,
        python=platform.python_version(),
        torch=torch.__version__,
        cuda=torch.version.cuda,
        nccl=_nccl_version(),
        gloo=dist.is_gloo_available(),
        cpu_cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        gpus=tuple(map(_gpu, range(torch.cuda.device_count()))) if torch.cuda.is_available() else (),
    )


def _nccl_version() -> str | None:
    return ".".join(map(str, torch.cuda.nccl.version())) if dist.is_nccl_available() else None


def _gpu(index: int) -> str:
    found = torch.cuda.get_device_properties(index)
    return f"{found.name}, {found.total_memory / 2**30:.0f} GiB, compute capability {found.major}.{found.minor}"
