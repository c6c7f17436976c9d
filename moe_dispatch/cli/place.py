"""Where a rank works: its device and process groups, and the sums over ranks that its work needs."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor

TIMEOUT = timedelta(minutes=2)


@final
@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Place:
    """A device, and the group of all ranks.

    Attributes:
        device: of the model.
        group: data- and expert-parallel at once; None for a process alone.
        control: a CPU group of the same ranks where ``group`` is on GPUs, for the dispatchers' agreement on sizes.
    """

    device: torch.device
    group: dist.ProcessGroup | None = None
    control: dist.ProcessGroup | None = None

    @property
    def rank(self) -> int:
        """Of this process."""
        return 0 if self.group is None else self.group.rank()

    @property
    def size(self) -> int:
        """How many ranks there are."""
        return 1 if self.group is None else self.group.size()

    def sum(self, x: Tensor) -> Tensor:
        """The sum over ranks, a new tensor without gradient."""
        total = x.detach().clone(memory_format=torch.contiguous_format)
        if self.group is not None:
            self.group.allreduce([total]).wait()
        return total

    def differentiable_sum(self, x: Tensor) -> Tensor:
        """The sum over ranks, for losses of which every rank computes its share from the sum."""
        total: Tensor = _SumOverRanks.apply(x, self)  # type: ignore[no-untyped-call]  # torch leaves it untyped
        return total

    def lengths(self, length: int) -> list[int]:
        """``length`` of every rank, by rank. Cost: one small all-gather and a host sync."""
        if self.group is None:
            return [length]
        everyone = torch.empty(self.size, dtype=torch.int64, device=self.device)
        self.group._allgather_base(everyone, torch.full_like(everyone[:1], length)).wait()
        result: list[int] = everyone.tolist()
        return result


class _SumOverRanks(torch.autograd.Function):
    """What depends on the sum depends on every rank's part: gradients are summed as well."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, place: Place) -> Tensor:
        ctx.place = place
        return place.sum(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.place.sum(grad), None


def use_gpus(ranks_here: int) -> bool:
    """Whether every rank of this machine can have a GPU of its own."""
    return torch.cuda.is_available() and torch.cuda.device_count() >= ranks_here


def describe(ranks_here: int) -> str:
    """Where that many ranks of this machine work, and why not on its GPUs if there are any."""
    if use_gpus(ranks_here):
        return "GPUs (NCCL)"
    few = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return "CPUs (gloo)" + (f", for {few} GPUs are not enough for {ranks_here} ranks" if few else "")


def alone() -> Place:
    """A process without others: on a GPU where there is one, else on one thread.

    A second thread would halve the time of an idle machine, and on a busy one make it many times as long: operators of
    well under a millisecond then wait for the thread that is not running.
    """
    torch.set_num_threads(1)
    return Place(device=torch.device("cuda" if use_gpus(1) else "cpu"))


@contextmanager
def joined(*, local_rank: int, ranks_here: int, **rendezvous: Any) -> Iterator[Place]:
    """Join the other ranks: NCCL where each has a GPU, else gloo.

    Args:
        local_rank: of this process on this machine.
        ranks_here: ranks on this machine.
        **rendezvous: for ``init_process_group``; none under torchrun, whose environment tells.
    """
    gpu = use_gpus(ranks_here)
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // ranks_here))
    device = torch.device("cuda", local_rank) if gpu else torch.device("cpu")
    if gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if gpu else "gloo", timeout=TIMEOUT, **rendezvous)
    try:
        control = dist.new_group(backend="gloo", timeout=TIMEOUT) if gpu else None
        yield Place(device=device, group=dist.group.WORLD, control=control)
        # In torch 2.13 a TorchDispatchMode, which counts collectives, leaks references to the group, so that its
        # threads outlive it. One that still holds a tensor when the interpreter ends aborts the process: let it finish.
        dist.barrier()
    finally:
        dist.destroy_process_group()
