"""Ranks of a command: this process if a launcher started it, otherwise processes that the command starts.

The launcher is torchrun, or another program that sets the same variables, such as an operator of Kubernetes.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from moe_dispatch.errors import ConfigError
from moe_dispatch_testing import RankFailed, run_processes
from moe_dispatch_testing.ranks import GRACE_SECONDS, failure_text
from moe_dispatch_tools.place import TIMEOUT, Place, joined, place_of_rank, use_gpus

Send = Callable[[Any], None]
Body = Callable[[Place, Send], Any]


class PeerFailed(RuntimeError):
    """Another rank of torchrun failed before this one. That rank reports its error."""


def under_torchrun() -> bool:
    """Return whether torchrun started this process as a rank."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def this_rank() -> int:
    """Return the rank that torchrun gave this process, or 0 without torchrun."""
    return int(os.environ["RANK"]) if under_torchrun() else 0


def num_ranks(size: int) -> int:
    """Return the number of ranks: torchrun's, or ``size`` without torchrun."""
    return int(os.environ["WORLD_SIZE"]) if under_torchrun() else size


def _place_here() -> tuple[int, int]:
    """Return the rank of this process on its machine, and the number of ranks there.

    torchrun sets both. Operators of Kubernetes set neither: they start one process in each pod, which is its machine.

    Raises:
        ConfigError: Only one of them is set.
    """
    given = [name for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE") if name in os.environ]
    if len(given) == 1:
        raise ConfigError(
            f"Environment: LOCAL_RANK and LOCAL_WORLD_SIZE must be set together, got only {given[0]}. Set both; or set "
            "neither if this machine has one rank."
        )
    return (int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])) if given else (0, 1)


def on_ranks(body: Body, size: int, on_message: Callable[[Any], None]) -> Any:
    """Run ``body(place, send)`` in ``size`` new processes or, under torchrun, in this process.

    Args:
        body: Function that a new process can import by name, or a ``functools.partial`` of one.
        size: Number of processes to start; ignored under torchrun.
        on_message: Function that gets each message that rank 0 passes to ``send``. Messages of other ranks are dropped.

    Returns:
        The result of ``body`` on rank 0. Under torchrun, each rank returns its own result.

    Raises:
        RankFailed: A rank raised or died, or cannot reach the others. Under torchrun only the rank that failed first
            raises it.
        PeerFailed: Under torchrun, on the ranks that failed later.
    """
    if not under_torchrun():
        backend = "nccl" if use_gpus(size) else "gloo"
        return run_processes(
            _run_in_process, size, body, size, timeout=TIMEOUT, backend=backend, on_message=on_message
        )[0]
    local_rank, here = _place_here()
    with joined(local_rank=local_rank, ranks_here=here) as place:
        try:
            return body(place, on_message if place.rank == 0 else lambda message: None)
        except Exception as error:
            if not _is_first_to_fail():
                wait_for_failed_peer()
                raise PeerFailed from error
            raise RankFailed(failure_text(place.rank, place.size, error)) from error


def wait_for_failed_peer() -> None:
    """Wait until the rank that failed first has reported its error. Torchrun ends all ranks when one rank ends."""
    if under_torchrun():
        time.sleep(GRACE_SECONDS)


def _run_in_process(rank: int, body: Body, size: int, *, send: Send) -> Any:
    with place_of_rank(local_rank=rank, ranks_here=size) as place:
        return body(place, send)


def _is_first_to_fail() -> bool:
    """Count this failure in the store of the default group, and return whether it is the first."""
    try:
        return int(dist.distributed_c10d._get_default_store().add("moe_dispatch/failed", 1)) == 1
    except RuntimeError:  # the rank that hosts the store has ended, so it failed first
        return False
