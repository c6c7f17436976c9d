"""Where and with what numbers came about."""

from __future__ import annotations

import os
import platform
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import moe_dispatch
from moe_dispatch.cli.machine import this_machine

_PACKAGES = ("torch", "torchtitan", "transformers")
_ALLOCATOR_VARIABLES = ("LD_PRELOAD", "MALLOC_", "GLIBC_TUNABLES", "PYTORCH_")


def facts(transport: str) -> dict[str, str]:
    """Date, machine and packages; ``transport`` is what ranks talk over."""
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
