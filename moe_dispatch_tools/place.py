"""Place of a rank: its device and process groups, and sums over all ranks."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import final

import torch
import torch.distributed as dist
from torch import Tensor

from moe_dispatch_testing import RankFailed

TIMEOUT = timedelta(minutes=2)


@final
@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Place:
    """Device and process groups of a rank.

    Attributes:
        device: Device of the model.
        group: Group of all ranks, data- and expert-parallel at once.
        control: CPU group of the same ranks if ``group`` is on GPUs, on which dispatchers agree on sizes.
    """

    device: torch.device
    group: dist.ProcessGroup
    control: dist.ProcessGroup | None = None

    @property
    def rank(self) -> int:
        """Rank of this process."""
        return self.group.rank()

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self.group.size()

    def sum(self, x: Tensor) -> Tensor:
        """Sum a tensor over ranks, into a new tensor without gradient."""
        total = x.detach().clone(memory_format=torch.contiguous_format)
        self.group.allreduce([total]).wait()
        return total


def use_gpus(ranks_here: int) -> bool:
    """Return whether every rank of this machine can have a GPU of its own."""
    return torch.cuda.is_available() and torch.cuda.device_count() >= ranks_here


@contextmanager
def joined(*, local_rank: int, ranks_here: int) -> Iterator[Place]:
    """Join the default group of torchrun, whose environment names the other ranks, and leave it at the end.

    Args:
        local_rank: Rank of this process on this machine.
        ranks_here: Number of ranks on this machine.

    Raises:
        RankFailed: The environment does not say where ranks meet, or they did not all come within ``TIMEOUT``.
    """
    if use_gpus(ranks_here):
        torch.cuda.set_device(local_rank)
    try:
        dist.init_process_group("nccl" if use_gpus(ranks_here) else "gloo", timeout=TIMEOUT)
    except (ValueError, dist.DistError) as error:
        raise RankFailed(
            f"rank {os.environ['RANK']} of {os.environ['WORLD_SIZE']} cannot join the other ranks: "
            f"{str(error).rstrip('.')}. "
            "Start all of them, with MASTER_ADDR and MASTER_PORT set; or unset RANK, and the command starts ranks here."
        ) from error
    try:
        with place_of_rank(local_rank=local_rank, ranks_here=ranks_here) as place:
            yield place
    finally:
        dist.destroy_process_group()


@contextmanager
def place_of_rank(*, local_rank: int, ranks_here: int) -> Iterator[Place]:
    """Make the place of a rank whose default group exists, and wait for all ranks at the end.

    Args:
        local_rank: Rank of this process on this machine.
        ranks_here: Number of ranks on this machine.
    """
    gpu = use_gpus(ranks_here)
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // ranks_here))
    assert dist.group.WORLD is not None
    yield Place(
        device=torch.device("cuda", local_rank) if gpu else torch.device("cpu"),
        group=dist.group.WORLD,
        control=dist.new_group(backend="gloo", timeout=TIMEOUT) if gpu else None,
    )
    # In torch 2.13 a TorchDispatchMode, which counts collectives, leaks references to the group, so the threads of the
    # group live on. A thread that still holds a tensor when the interpreter ends aborts the process: wait for them.
    dist.barrier()
