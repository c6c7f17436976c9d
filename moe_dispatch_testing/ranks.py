"""Run a function on several ranks, which are threads of this process or processes of this machine."""

from __future__ import annotations

import datetime
import multiprocessing
import os
import pickle
import signal
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, TypeVar, final

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, PrefixStore, Store

from moe_dispatch.errors import MoEDispatchError

Result = TypeVar("Result")

# Ranks that share busy cores may wait for tens of seconds for each other, although nothing is wrong.
TIMEOUT = datetime.timedelta(seconds=60)
# If a rank dies without an error, its peers raise. Their errors may arrive before this process notices the death.
GRACE_SECONDS = 1.0


class RankFailed(RuntimeError):
    """A rank raised or died. The text names the rank that failed first and holds its error."""


def run_ranks(
    body: Callable[[dist.ProcessGroup], Result], size: int, *, timeout: datetime.timedelta = TIMEOUT
) -> list[Result]:
    """Run ``body(group)`` on ``size`` ranks, each a thread of this process. Return the results by rank.

    The gloo group of a rank is made without ``init_process_group``, so several sets of ranks can exist at the same
    time.

    Raises:
        BaseException: The error of the rank that failed first, with the rank as a note. Time-outs and lost connections
            are raised only if no rank raised anything else.
    """
    store = HashStore()
    # Keep all groups until the last rank is done. A group that closes early disconnects peers that are still
    # connecting.
    groups = _run_threads(lambda rank: thread_group(store, rank, size, timeout), size)
    return _run_threads(lambda rank: body(groups[rank]), size)


@final
class Ranks:
    """Runs functions as ``run_ranks`` does, and keeps the groups, because connecting takes longer than a small test."""

    def __init__(self, timeout: datetime.timedelta = TIMEOUT) -> None:
        self.timeout = timeout
        self._idle: dict[int, list[dist.ProcessGroup]] = {}

    def run(self, body: Callable[[dist.ProcessGroup], Result], size: int) -> list[Result]:
        """Run ``body`` as ``run_ranks`` does. If it raises, drop the groups: a collective may be half done in them."""
        groups = self._idle.pop(size, None) or run_ranks(lambda group: group, size, timeout=self.timeout)
        results = _run_threads(lambda rank: body(groups[rank]), size)
        self._idle[size] = groups
        return results


def thread_group(store: Store, rank: int, size: int, timeout: datetime.timedelta = TIMEOUT) -> dist.ProcessGroup:
    """Make a gloo group for one thread. Every rank of the group must be given the same store."""
    prefixed = PrefixStore("ranks", store)
    group = dist.ProcessGroup(prefixed, rank, size)
    options: Any = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._timeout = timeout
    options._threads = 2
    options._devices = [_device()]
    gloo = dist.ProcessGroupGloo(prefixed, rank, size, options)
    group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, gloo)
    group._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
    return group


@cache
def _device() -> Any:
    """Return the device of gloo that all threads share. The end of a device waits 10 ms for its loop."""
    return dist.ProcessGroupGloo.create_default_device()


def _run_threads(body: Callable[[int], Result], size: int) -> list[Result]:
    results: list[Any] = [None] * size
    errors: dict[int, BaseException] = {}

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
    by_rank = [errors[rank] for rank in sorted(errors)]
    if by_rank:
        raise next((error for error in by_rank if not _is_consequence(str(error))), by_rank[0])
    return results


def _is_consequence(text: str) -> bool:
    """Return whether the text reports a time-out or a lost connection, which the failure of another rank causes."""
    return any(sign in text.lower() for sign in ("timed out", "timeout", "connection", "refused:"))


def run_processes(
    body: Callable[..., Any],
    size: int,
    *args: Any,
    timeout: datetime.timedelta = TIMEOUT,
    backend: str = "gloo",
    on_message: Callable[[Any], None] | None = None,
    grace_seconds: float = GRACE_SECONDS,
) -> list[Any]:
    """Run ``body(rank, *args)`` in ``size`` processes of this machine. Return the results by rank.

    Processes are spawned. If the program has called ``multiprocessing.set_start_method("forkserver")``, they are forked
    from a server instead. A server that has preloaded torch saves each process the import. No process is left when this
    function ends by an error or by Ctrl-C, or when this process dies.

    ``torch.multiprocessing.spawn`` and the ``start_processes`` of torchrun cannot replace this function. They do not
    pass messages while ranks run, and they do not keep Ctrl-C from the ranks. They also report the failed process that
    they see first, which may be a peer that only lost its connection.

    Args:
        body: Function that a new process can import by name, or a ``functools.partial`` of such a function. It returns
            a value that can be pickled.
        size: Number of ranks.
        *args: Further arguments of ``body``. They are pickled.
        timeout: Timeout of collectives in the default group.
        backend: Backend of the default group. With "nccl", rank r uses GPU r.
        on_message: Function that is called in this process with each message of rank 0, while the ranks run. If given,
            ``body`` is called with a keyword ``send``, a function that sends a message. Messages of other ranks are
            dropped.
        grace_seconds: Seconds without a report after which ranks are killed, once a rank has failed.

    Raises:
        RankFailed: A rank raised or died.
    """
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    forks = multiprocessing.get_start_method(allow_none=True) == "forkserver"
    context: Any = multiprocessing.get_context("forkserver" if forks else "spawn")
    pipes = [context.Pipe(duplex=False) for _ in range(size)]
    job = _Job(
        body=body, args=args, size=size, timeout=timeout, backend=backend, port=store.port, sends=on_message is not None
    )
    processes = [
        context.Process(target=_run_rank, args=(job, rank, dict(os.environ), writer), name=f"rank {rank}", daemon=True)
        for rank, (_, writer) in enumerate(pipes)
    ]
    try:
        with _interrupts_deferred():
            for process, (_, writer) in zip(processes, pipes, strict=True):
                process.start()
                writer.close()  # so that the pipe ends when the process ends
        listener = _Listener(processes, [reader for reader, _ in pipes], on_message)
        return listener.listen(grace_seconds)
    finally:
        _end(processes)


def failure_text(rank: int, size: int, error: BaseException) -> str:
    """Describe the error of a rank: an error of this library by its message, any other error by its traceback."""
    if isinstance(error, MoEDispatchError):
        described = "\n".join([str(error), *getattr(error, "__notes__", ())])
    else:
        described = "".join(traceback.format_exception(error))
    return f"rank {rank} of {size}: {described}"


@contextmanager
def _interrupts_deferred() -> Iterator[None]:
    """Delay Ctrl-C until the block ends. Processes that are started inside the block never see it.

    A terminal sends Ctrl-C to all its processes, but only this process should act on it. Processes that are started
    inside the block inherit the signal mask. Another thread of this process may still receive the signal, so a handler
    records it. The handler does not raise, because that could lose track of a process that has just started.
    """
    if threading.current_thread() is not threading.main_thread():  # only the main thread receives signals
        yield
        return
    resource_tracker.ensure_running()  # its start unblocks SIGINT (Python 3.11), so it must not start inside
    received: list[int] = []
    handler = signal.signal(signal.SIGINT, lambda number, frame: received.append(number))
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        signal.signal(signal.SIGINT, handler)
    for number in received:
        signal.raise_signal(number)


def _end(processes: Sequence[BaseProcess]) -> None:
    started = [process for process in processes if process.pid is not None]
    for process in started:
        process.kill()
    for process in started:
        process.join()


@final
class _Listener:
    """Reads the messages of all ranks until every rank has ended or one has failed."""

    def __init__(
        self,
        processes: Sequence[BaseProcess],
        readers: Sequence[Connection],
        on_message: Callable[[Any], None] | None,
    ) -> None:
        self._processes = processes
        self._open = {reader: rank for rank, reader in enumerate(readers)}
        self._on_message = on_message
        self._results: dict[int, Any] = {}
        self._deaths: list[str] = []
        self._errors: dict[int, tuple[str, str]] = {}

    def listen(self, grace_seconds: float) -> list[Any]:
        """Return the results by rank, or raise RankFailed for the rank that failed first."""
        while self._open and not self._has_failed:
            self._read(timeout=None)
        while self._open and self._has_failed and self._read(timeout=grace_seconds):
            pass
        if self._has_failed:
            raise self._failure()
        return [self._results[rank] for rank in range(len(self._processes))]

    @property
    def _has_failed(self) -> bool:
        return bool(self._deaths or self._errors)

    def _read(self, timeout: float | None) -> bool:
        """Read one message from each rank that has sent one. Return whether any rank has."""
        ready = [reader for reader in wait(list(self._open), timeout) if isinstance(reader, Connection)]
        for reader in ready:
            rank = self._open[reader]
            try:
                sent = reader.recv_bytes()
            except (EOFError, OSError):  # OSError: the rank died while it sent a message
                del self._open[reader]
                self._ended(rank)
            else:
                self._receive(rank, *pickle.loads(sent))
        return bool(ready)

    def _receive(self, rank: int, kind: str, value: Any) -> None:
        if kind == "result":
            self._results[rank] = value
        elif kind == "error":
            self._errors[rank] = value
        elif rank == 0 and self._on_message is not None:
            self._on_message(value)

    def _ended(self, rank: int) -> None:
        if rank in self._results or rank in self._errors:
            return
        process = self._processes[rank]
        process.join()
        self._deaths.append(
            f"rank {rank} of {len(self._processes)} ended without an error of its own, exit code {process.exitcode}."
        )

    def _failure(self) -> RankFailed:
        """Return the cause: the death of a rank without an error, else the first error that no other rank caused."""
        if self._deaths:
            return RankFailed(self._deaths[0])
        errors = list(self._errors.values())
        text, trace = next((error for error in errors if not _is_consequence(_last_line(error[1]))), errors[0])
        failure = RankFailed(text)
        if trace not in text:
            failure.add_note(trace)
        return failure


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class _Job:
    """Arguments of ``run_processes`` that each process needs, and the port of the store that they share."""

    body: Callable[..., Any]
    args: tuple[Any, ...]
    size: int
    timeout: datetime.timedelta
    backend: str
    port: int
    sends: bool


def _run_rank(job: _Job, rank: int, environment: dict[str, str], writer: Connection) -> None:
    """Run the body of one rank, in the process of this rank."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    os.environ.clear()  # a forked process has the environment with which the fork server was started
    os.environ.update(environment)
    torch.set_num_threads(1)

    def send(kind: str, value: Any) -> None:
        writer.send_bytes(pickle.dumps((kind, value)))  # torch's pickler would keep tensors in this process's memory

    keywords = {"send": lambda message: send("message", message)} if job.sends else {}
    try:
        if job.backend == "nccl":
            torch.cuda.set_device(rank)
        store = dist.TCPStore("127.0.0.1", job.port, is_master=False)
        dist.init_process_group(job.backend, store=store, rank=rank, world_size=job.size, timeout=job.timeout)
        # Wait until all ranks have connected. A body that returns at once would disconnect peers that still connect.
        store.set(f"connected/{rank}", "")
        store.wait([f"connected/{peer}" for peer in range(job.size)])
        send("result", job.body(rank, *job.args, **keywords))
        dist.destroy_process_group()
    except BaseException as error:
        send("error", (failure_text(rank, job.size, error), "".join(traceback.format_exception(error))))


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _last_line(text: str) -> str:
    """Return the error of a traceback, without the source lines above it."""
    return next((line for line in reversed(text.splitlines()) if line and not line.startswith(" ")), text)
