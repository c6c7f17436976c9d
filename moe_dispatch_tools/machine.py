"""Devices and software versions of the machine, and settings that change the times of a benchmark."""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import final

import torch
import torch.distributed as dist

import moe_dispatch

_PACKAGES = ("torch", "torchtitan", "transformers")
_ALLOCATOR_VARIABLES = ("LD_PRELOAD", "MALLOC_", "GLIBC_TUNABLES", "PYTORCH_")


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """Versions and devices.

    Attributes:
        moe_dispatch: Version of this package.
        python: Version of Python.
        torch: Version of torch.
        cuda: Version of CUDA that torch was built with; None for a build without CUDA.
        nccl: Version of the NCCL in torch; None for a build without NCCL.
        gloo: Whether torch was built with gloo.
        cpu_cores: Number of cores that this process may use.
        gpus: Description of each GPU.
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
    """Read versions and devices."""
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


def describe_machine(transport: str) -> dict[str, str]:
    """Describe the machine, date and software versions of a benchmark run.

    Args:
        transport: Devices of the ranks, and the library that connects them.
    """
    model = [line for line in _lines("/proc/cpuinfo") if line.startswith("model name")]
    machine = this_machine()
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "processor": model[0].partition(": ")[2] if model else platform.processor(),
        "cores": str(machine.cpu_cores),
        "gpus": "; ".join(machine.gpus) or "none",
        "ranks on": transport,
        "system": f"{platform.system()} {platform.machine()}, Python {machine.python}",
        "packages": ", ".join(
            [f"moe-dispatch {moe_dispatch.__version__}", *(f"{name} {_version(name)}" for name in _PACKAGES)]
        ),
        "allocator": _allocator(),
    }


def _allocator() -> str:
    changed = [f"{name}={value}" for name, value in os.environ.items() if name.startswith(_ALLOCATOR_VARIABLES)]
    pages = " ".join(_lines("/sys/kernel/mm/transparent_hugepage/enabled"))
    return f"{', '.join(changed) or 'defaults of ' + ' '.join(platform.libc_ver())}; huge pages: {pages or 'unknown'}"


def _lines(path: str) -> list[str]:
    return Path(path).read_text(encoding="utf-8").splitlines() if Path(path).exists() else []


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"
