"""Devices and software versions of the machine."""

from __future__ import annotations

import os
import platform
from datetime import UTC, datetime
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import moe_dispatch
from moe_dispatch.versions import loaded_nccl

PEER_PACKAGES = ("torchtitan", "transformers")


def this_machine() -> dict[str, Any]:
    """Read versions and devices.

    The version of CUDA is that of torch. The version of NCCL is that of the library that this process has loaded. They
    are None without them. The cores are those that this process may use. HybridEP compiles its kernels with the files
    of the toolkit, in "/" if CUDA_HOME is not set.
    """
    home, nccl = Path(os.environ.get("CUDA_HOME", "/")), loaded_nccl()
    gpus = map(torch.cuda.get_device_properties, range(torch.cuda.device_count() * torch.cuda.is_available()))
    processors = Path("/proc/cpuinfo").read_text(encoding="utf-8") if Path("/proc/cpuinfo").exists() else ""
    models = [line.partition(": ")[2] for line in processors.splitlines() if line.startswith("model name")]
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "moe_dispatch": moe_dispatch.__version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "peers": {name: next((it.version for it in distributions(name=name)), None) for name in PEER_PACKAGES},
        "cuda": torch.version.cuda,
        "cuda_toolkit": {
            "home": os.environ.get("CUDA_HOME"),
            **{file: any(home.glob(file)) for file in ("bin/nvcc", "lib64/libcudart*")},
        },
        "nccl": None if nccl is None else ".".join(map(str, nccl)),
        "gloo": dist.is_gloo_available(),
        "processor": models[0] if models else platform.processor(),
        "cpu_cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        "gpus": [
            f"{gpu.name}, {gpu.total_memory / 2**30:.0f} GiB, compute capability {gpu.major}.{gpu.minor}"
            for gpu in gpus
        ],
    }
