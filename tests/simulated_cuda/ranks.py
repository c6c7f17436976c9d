"""Ranks as threads over the simulated NCCL: rank r uses device r."""

from __future__ import annotations

import datetime
from collections.abc import Callable
from typing import Any, TypeVar, final

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, PrefixStore

from moe_dispatch_testing.ranks import _run_threads

Result = TypeVar("Result")
TIMEOUT = datetime.timedelta(minutes=5)


@final
class NcclRanks:
    """Runs functions as ``moe_dispatch_testing.ranks.Ranks`` does, on groups of NCCL."""

    def __init__(self) -> None:
        self._groups: dict[int, list[dist.ProcessGroup]] = {}

    def run(self, body: Callable[[dist.ProcessGroup], Result], size: int) -> list[Result]:
        """Run ``body(group)`` on ``size`` threads. Return the results by rank."""
        if size not in self._groups:
            store = HashStore()
            self._groups[size] = _run_threads(lambda rank: _group(store, rank, size), size)
        groups = self._groups[size]

        def on_device(rank: int) -> Result:
            torch.cuda.set_device(rank)
            return body(groups[rank])

        try:
            return _run_threads(on_device, size)
        except BaseException:
            del self._groups[size]  # a collective may be half done in them
            raise


def _group(store: Any, rank: int, size: int) -> dist.ProcessGroup:
    torch.cuda.set_device(rank)
    prefixed = PrefixStore(f"{size} ranks", store)
    group = dist.ProcessGroup(prefixed, rank, size)
    options: Any = dist.ProcessGroupNCCL.Options()
    options._timeout = TIMEOUT
    nccl = dist.ProcessGroupNCCL(prefixed, rank, size, options)
    group._register_backend(torch.device("cuda"), dist.ProcessGroup.BackendType.NCCL, nccl)
    group._set_default_backend(dist.ProcessGroup.BackendType.NCCL)
    return group
