"""Devices and software versions of the machine, and settings that change the times of a benchmark."""

from __future__ import annotations

import os
import platform
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import moe_dispatch

_PACKAGES = ("torch", "torchtitan", "transformers")
_ALLOCATOR_VARIABLES = ("LD_PRELOAD", "MALLOC_", "GLIBC_TUNABLES", "PYTORCH_")


def this_machine() -> dict[str, Any]:
    """Read versions and devices.

    Versions of CUDA and NCCL are those of torch, and None for a build without them. The cores are those that this
    process may use.
    """
    gpus = map(torch.cuda.get_device_properties, range(torch.cuda.device_count() * torch.cuda.is_available()))
    return {
        "moe_dispatch": moe_dispatch.__version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if dist.is_nccl_available() else None,
        "gloo": dist.is_gloo_available(),
        "cpu_cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        "gpus": [
            f"{gpu.name}, {gpu.total_memory / 2**30:.0f} GiB, compute capability {gpu.major}.{gpu.minor}"
            for gpu in gpus
        ],
    }


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
        "cores": str(machine["cpu_cores"]),
        "gpus": "; ".join(machine["gpus"]) or "none",
        "ranks on": transport,
        "system": f"{platform.system()} {platform.machine()}, Python {machine['python']}",
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
