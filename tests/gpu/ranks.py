"""Ranks over NCCL, one for each GPU: processes, or threads on simulated devices."""

from __future__ import annotations

import datetime
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from moe_dispatch_testing.ranks import run_processes
from tests.simulated_cuda.device import is_simulated


def group_sizes() -> list[int]:
    """Return the sizes of groups to run on: all GPUs of the machine first, then powers of two, down to one GPU."""
    count = max(torch.cuda.device_count(), 1)
    return [count, *(1 << power for power in reversed(range((count - 1).bit_length())))]


def run_on_gpus(body: Callable[..., Any], size: int, *args: Any, minutes: float = 5, **options: Any) -> list[Any]:
    """Run ``body(group, *args)`` on this many GPUs. Return the results by rank.

    Args:
        body: Function of a module. It is pickled, as are its arguments and its result.
        size: Number of ranks.
        *args: Further arguments of ``body``.
        minutes: Timeout of collectives.
        **options: Options of ``run_processes``, which threads ignore.
    """
    if is_simulated():
        from tests.simulated_cuda.ranks import NcclRanks  # it needs torch's NCCL

        return NcclRanks().run(lambda group: body(group, *args), size)
    timeout = datetime.timedelta(minutes=minutes)
    return run_processes(partial(_in_process, body), size, *args, backend="nccl", timeout=timeout, **options)


def _in_process(body: Callable[..., Any], rank: int, *args: Any) -> Any:
    return body(dist.group.WORLD, *args)
