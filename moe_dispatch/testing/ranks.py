"""Ranks for tests, examples and the command: threads of this process, or processes of this machine."""

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
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, TypeVar, final

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, PrefixStore, Store

from moe_dispatch.errors import MoEDispatchError

Result = TypeVar("Result")

TIMEOUT = datetime.timedelta(seconds=10)
# A rank that dies silently makes its peers raise, and their errors may arrive before its death is seen.
GRACE_SECONDS = 1.0


class RankFailed(RuntimeError):
    """A rank raised or died. The text names the rank that failed first and holds its error."""


def run_ranks(
    body: Callable[[dist.ProcessGroup], Result], size: int, *, timeout: datetime.timedelta = TIMEOUT
) -> list[Result]:
    """Run ``body(group)`` on ``size`` ranks that are threads of this process; return the results by rank.

    Each rank gets a gloo group made without ``init_process_group``, so several sets of ranks can exist side by side.

    Raises:
        BaseException: The error of the rank that failed first, with the rank as a note. Time-outs and lost connections
            are raised only if no rank raised anything else.
    """
    store = HashStore()
    # All groups live until the last rank is done: closing one early would disconnect peers that still connect.
    groups = _run_threads(lambda rank: thread_group(store, rank, size, timeout), size)
    return _run_threads(lambda rank: body(groups[rank]), size)


@final
class Ranks:
    """``run_ranks`` that keeps its groups from one run to the next: connecting them takes longer than a small test."""

    def __init__(self, timeout: datetime.timedelta = TIMEOUT) -> None:
        self.timeout = timeout
        self._idle: dict[int, list[dist.ProcessGroup]] = {}

    def run(self, body: Callable[[dist.ProcessGroup], Result], size: int) -> list[Result]:
        """Run as ``run_ranks`` does. Groups of a run that raised are dropped: a collective may be half done in them."""
        groups = self._idle.pop(size, None) or run_ranks(lambda group: group, size, timeout=self.timeout)
        results = _run_threads(lambda rank: body(groups[rank]), size)
        self._idle[size] = groups
        return results


def thread_group(store: Store, rank: int, size: int, timeout: datetime.timedelta = TIMEOUT) -> dist.ProcessGroup:
    """Make a gloo group for one thread. Every rank of the group must be given the same store."""
    prefixed = PrefixStore("ranks", store)
    group = dist.ProcessGroup(prefixed, rank, size)
    gloo = dist.ProcessGroupGloo(prefixed, rank, size, timeout)
    group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, gloo)
    group._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
    return group


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
    """Return whether an error tells of another rank's failure: a time-out or a lost connection."""
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
    """Run ``body(rank, *args)`` in ``size`` processes of this machine and return the results, pickled, by rank.

    Processes are spawned, or forked from a server if the program has called
    ``multiprocessing.set_start_method("forkserver")``: a server that has preloaded torch saves each process the import.
    No process is left however this function ends: by an error, by Ctrl-C, or because this process dies.

    ``torch.multiprocessing.spawn`` and the ``start_processes`` of torchrun cannot serve here. Neither passes messages
    while ranks run or keeps Ctrl-C from the ranks, and both name the failed process that they see first, which may be a
    peer that only lost its connection.

    Args:
        body: Function that a new process can import by name, or a ``functools.partial`` of one.
        size: Number of ranks.
        *args: Further arguments of ``body``, pickled.
        timeout: Timeout of collectives in the default group.
        backend: Backend of the default group. With "nccl", each rank takes the GPU of its number.
        on_message: If given, ``body`` is also called with a keyword ``send``. Whatever rank 0 passes to its ``send``
            while it runs, this process passes to ``on_message``; messages of other ranks are dropped.
        grace_seconds: After a failure, ranks that report nothing for this long are killed.

    Raises:
        RankFailed: A rank raised or died.
    """
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    forks = multiprocessing.get_start_method(allow_none=True) == "forkserver"
    context: Any = multiprocessing.get_context("forkserver" if forks else "spawn")
    pipes = [context.Pipe(duplex=False) for _ in range(size)]
    call = _Call(
        body=body, args=args, size=size, timeout=timeout, backend=backend, port=store.port, sends=on_message is not None
    )
    processes = [
        context.Process(target=_run_rank, args=(call, rank, dict(os.environ), writer), name=f"rank {rank}", daemon=True)
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
    """Describe the error of a rank: errors of this library by their message, any other by its traceback."""
    if isinstance(error, MoEDispatchError):
        described = "\n".join([str(error), *getattr(error, "__notes__", ())])
    else:
        described = "".join(traceback.format_exception(error))
    return f"rank {rank} of {size}: {described}"


@contextmanager
def _interrupts_deferred() -> Iterator[None]:
    """Hold back Ctrl-C until the block ends, and for good from processes that are started inside.

    Ctrl-C reaches every process of a terminal, but only this one may act on it. Processes started inside inherit the
    signal mask. Another thread of this process may still receive the signal, so a handler records it. Raising inside
    the block could lose track of a process that has just started.
    """
    if threading.current_thread() is not threading.main_thread():  # only the main thread receives signals
        yield
        return
    resource_tracker.ensure_running()  # starting it inside would lift the mask (Python 3.11)
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
    """Reads what ranks send until all of them have ended, or one has failed."""

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
        """Read one message of each rank that sent one; return whether there was any."""
        ready = [reader for reader in wait(list(self._open), timeout) if isinstance(reader, Connection)]
        for reader in ready:
            rank = self._open[reader]
            try:
                sent = reader.recv_bytes()
            except (EOFError, OSError):  # OSError: the rank died within a message
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
        """Name the cause: a silent death, else the first error that is no consequence of another rank's failure."""
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
class _Call:
    """Arguments of ``run_processes`` for its processes, with the port of the store at which they meet."""

    body: Callable[..., Any]
    args: tuple[Any, ...]
    size: int
    timeout: datetime.timedelta
    backend: str
    port: int
    sends: bool


def _run_rank(call: _Call, rank: int, environment: dict[str, str], writer: Connection) -> None:
    """Run the body as one rank, in its process."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    os.environ.clear()  # a server that processes are forked from keeps the environment that it was started with
    os.environ.update(environment)
    torch.set_num_threads(1)

    def send(kind: str, value: Any) -> None:
        writer.send_bytes(pickle.dumps((kind, value)))  # torch's own pickling leaves tensors in memory of this process

    keywords = {"send": lambda message: send("message", message)} if call.sends else {}
    try:
        if call.backend == "nccl":
            torch.cuda.set_device(rank)
        store = dist.TCPStore("127.0.0.1", call.port, is_master=False)
        dist.init_process_group(call.backend, store=store, rank=rank, world_size=call.size, timeout=call.timeout)
        # Wait until all ranks have connected: a body that returns at once would disconnect peers that still connect.
        store.set(f"connected/{rank}", "")
        store.wait([f"connected/{peer}" for peer in range(call.size)])
        send("result", call.body(rank, *call.args, **keywords))
        dist.destroy_process_group()
    except BaseException as error:
        send("error", (failure_text(rank, call.size, error), "".join(traceback.format_exception(error))))


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _last_line(text: str) -> str:
    """Return the error of a traceback, without the source lines above it."""
    return next((line for line in reversed(text.splitlines()) if line and not line.startswith(" ")), text)
