"""Ranks for tests: threads of this process, or real processes, over gloo."""

from __future__ import annotations

import datetime
import os
import pickle
import socket
import threading
import traceback
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, final

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch._C._distributed_c10d import HashStore, PrefixStore, Store

Result = TypeVar("Result")

TIMEOUT = datetime.timedelta(seconds=10)


class RankFailed(AssertionError):
    """A rank raised; the text names it and holds its traceback."""


def run_ranks(
    body: Callable[[dist.ProcessGroup], Result], size: int, *, timeout: datetime.timedelta = TIMEOUT
) -> list[Result]:
    """Run ``body(group)`` on ``size`` ranks that are threads of this process; the results by rank.

    The group is a gloo ProcessGroup of its own, without ``init_process_group``, so that several may live side by side.

    Raises:
        BaseException: the first error of a rank that is no time-out caused by another rank's, with the rank as a note.
    """
    store = HashStore()
    # All groups live until the last rank is done: one that closes early breaks off peers that are still connecting.
    groups = _run_threads(lambda rank: thread_group(store, rank, size, timeout), size)
    return _run_threads(lambda rank: body(groups[rank]), size)


@final
class Ranks:
    """``run_ranks`` that keeps its groups from one run to the next: connecting them takes longer than a small test."""

    def __init__(self, timeout: datetime.timedelta = TIMEOUT) -> None:
        self.timeout = timeout
        self._idle: dict[int, list[dist.ProcessGroup]] = {}

    def run(self, body: Callable[[dist.ProcessGroup], Result], size: int) -> list[Result]:
        """As ``run_ranks``. After an error the groups, which may hold half a collective, are not used again."""
        groups = self._idle.pop(size, None) or run_ranks(lambda group: group, size, timeout=self.timeout)
        results = _run_threads(lambda rank: body(groups[rank]), size)
        self._idle[size] = groups
        return results


def _run_threads(body: Callable[[int], Result], size: int) -> list[Result]:
    results: list[Any] = [None] * size
    errors: list[BaseException | None] = [None] * size

    def run(rank: int) -> None:
        try:
            results[rank] = body(rank)
        except BaseException as error:
            error.add_note(f"on rank {rank} of {size}")
            errors[rank] = error

    threads = [threading.Thread(target=run, args=(rank,), name=f"rank-{rank}") for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    raise_first(errors)
    return results


def thread_group(store: Store, rank: int, size: int, timeout: datetime.timedelta = TIMEOUT) -> dist.ProcessGroup:
    """A gloo group for one thread; every rank of it must be given the same store."""
    prefixed = PrefixStore("ranks", store)
    group = dist.ProcessGroup(prefixed, rank, size)
    gloo = dist.ProcessGroupGloo(prefixed, rank, size, timeout)
    group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, gloo)
    group._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
    return group


def raise_first(errors: Sequence[BaseException | None]) -> None:
    """Raise the error that caused the others: the first that is no time-out or lost connection."""
    raised = [error for error in errors if error is not None]
    if not raised:
        return
    causes = [error for error in raised if not _is_consequence(str(error))]
    raise (causes or raised)[0]


def _is_consequence(told: str) -> bool:
    return any(sign in told.lower() for sign in ("timed out", "timeout", "connection", "refused:"))


def run_processes(body: Callable[..., Any], size: int, *args: Any, timeout: datetime.timedelta = TIMEOUT) -> list[Any]:
    """Run ``body(rank, *args)`` in ``size`` processes with gloo as the default group; the results, pickled, by rank.

    Processes are spawned, or forked from a server where the program has called
    ``multiprocessing.set_start_method("forkserver")``: one that has torch preloaded saves each process its import.

    Raises:
        RankFailed: with the traceback of the rank that failed first on its own account.
    """
    forks = mp.get_start_method(allow_none=True) == "forkserver"
    context: Any = mp.get_context("forkserver" if forks else "spawn")
    queue = context.SimpleQueue()
    environment = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port())}
    processes = [
        context.Process(target=_process, args=(body, rank, size, environment, timeout, queue, args), daemon=True)
        for rank in range(size)
    ]
    for process in processes:
        process.start()
    outcomes: dict[int, tuple[bool, Any]] = {}
    while len(outcomes) < size:
        if queue.empty():
            for rank, process in enumerate(processes):
                process.join(0.02)
                if rank not in outcomes and process.exitcode is not None and queue.empty():
                    outcomes[rank] = (False, f"process ended with exit code {process.exitcode}")
            continue
        rank, good, value = queue.get()
        outcomes[rank] = (good, pickle.loads(value) if good else value)
    for process in processes:
        process.join()
    failed = {rank: text for rank, (good, text) in outcomes.items() if not good}
    if failed:
        causes = {rank: text for rank, text in failed.items() if not _is_consequence(_last_line(text))} or failed
        raise RankFailed("\n".join(f"rank {rank} of {size}:\n{text}" for rank, text in sorted(causes.items())))
    return [outcomes[rank][1] for rank in range(size)]


def _process(
    body: Callable[..., Any],
    rank: int,
    size: int,
    environment: dict[str, str],
    timeout: datetime.timedelta,
    queue: Any,
    args: tuple[Any, ...],
) -> None:
    torch.set_num_threads(1)
    os.environ.clear()  # a server keeps the one that it was started with
    os.environ.update(environment)
    try:
        dist.init_process_group("gloo", rank=rank, world_size=size, timeout=timeout)
        queue.put((rank, True, pickle.dumps(body(rank, *args))))  # not torch's pickling, which leaves data behind
        dist.destroy_process_group()
    except BaseException:
        queue.put((rank, False, traceback.format_exc()))


def _last_line(text: str) -> str:
    """The error of a traceback, without the source lines above it."""
    return next((line for line in reversed(text.splitlines()) if line and not line.startswith(" ")), text)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
