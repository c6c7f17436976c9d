"""Ranks as processes of this machine: started, listened to, and never left behind."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, final

import torch.distributed as dist

from moe_dispatch import MoEDispatchError
from packed_text.place import Place, joined

Send = Callable[[Any], None]
Body = Callable[[Place, Send], Any]

# A rank that dies without a word brings down its peers, whose complaints may arrive before its death is seen.
LAST_WORDS_SECONDS = 1.0


class RankFailed(RuntimeError):
    """A rank raised or died; the text is that rank's, not that of the peers it took along."""


def run_ranks(body: Body, size: int, on_message: Callable[[Any], None]) -> Any:
    """Run ``body(place, send)`` in ``size`` processes over one store.

    Args:
        body: importable by name in a new process (a function, or a ``functools.partial`` of one).
        size: number of processes.
        on_message: called here with what rank 0 passes to its ``send``; other ranks' messages are dropped.

    Returns:
        What rank 0's body returned.

    Raises:
        RankFailed: with the error of the rank that failed first. However this function ends, no process is left.
    """
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    context = multiprocessing.get_context("spawn")
    pipes = [context.Pipe(duplex=False) for _ in range(size)]
    processes = [
        context.Process(target=_rank, args=(body, rank, size, store.port, writer), name=f"rank {rank}", daemon=True)
        for rank, (_, writer) in enumerate(pipes)
    ]
    try:
        with _interrupts_deferred():
            for process, (_, writer) in zip(processes, pipes, strict=True):
                process.start()
                writer.close()  # so that the end of the process is the end of the pipe
        return _Listener(processes, [reader for reader, _ in pipes], on_message).listen()
    finally:
        _end(processes)


@contextmanager
def _interrupts_deferred() -> Iterator[None]:
    """Ctrl-C reaches every process of a terminal, but only this one shall act: those started inside never see it.

    They inherit the mask. Here an interrupt, which another thread may take in spite of it, waits for the end of block:
    a start that is broken off leaves a process that nobody knows.
    """
    resource_tracker.ensure_running()  # its start would lift the mask (Python 3.11)
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
    """Reads what ranks send until all have returned, or one has failed."""

    def __init__(
        self, processes: Sequence[BaseProcess], readers: list[Connection], on_message: Callable[[Any], None]
    ) -> None:
        self._processes = processes
        self._open = dict(zip(readers, range(len(readers)), strict=True))
        self._on_message = on_message
        self._results: dict[int, Any] = {}
        self._failures: dict[int, str] = {}

    def listen(self) -> Any:
        """The result of rank 0."""
        while self._open and not self._failures:
            self._read(timeout=None)
        while self._open and self._failures and self._read(timeout=LAST_WORDS_SECONDS):
            pass
        if self._failures:
            raise RankFailed(self._cause())
        return self._results[0]

    def _read(self, timeout: float | None) -> bool:
        """Read one message of each rank that sent one; whether there was any."""
        ready = [reader for reader in wait(list(self._open), timeout) if isinstance(reader, Connection)]
        for reader in ready:
            rank = self._open[reader]
            try:
                self._receive(rank, *reader.recv())
            except EOFError:
                del self._open[reader]
                self._ended(rank)
        return bool(ready)

    def _receive(self, rank: int, kind: str, value: Any) -> None:
        if kind == "result":
            self._results[rank] = value
        elif kind == "failure":
            self._failures[rank] = f"rank {rank} of {len(self._processes)}: {value}"
        elif rank == 0:
            self._on_message(value)

    def _ended(self, rank: int) -> None:
        if rank in self._results or rank in self._failures:
            return
        self._processes[rank].join()
        code, size = self._processes[rank].exitcode, len(self._processes)
        silent = f"rank {rank} of {size} ended without an error of its own, exit code {code}."
        self._failures = {rank: silent, **self._failures}

    def _cause(self) -> str:
        return next(iter(self._failures.values()))


def _rank(body: Body, rank: int, size: int, port: int, writer: Connection) -> None:
    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        store = dist.TCPStore("127.0.0.1", port, is_master=False)
        with joined(local_rank=rank, ranks_here=size, store=store, rank=rank, world_size=size) as place:
            result = body(place, lambda value: writer.send(("message", value)))
        writer.send(("result", result))
    except Exception as error:
        writer.send(("failure", str(error) if isinstance(error, MoEDispatchError) else traceback.format_exc()))


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
