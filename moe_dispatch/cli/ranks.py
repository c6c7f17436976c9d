"""The ranks of a command: torchrun's, or processes of this machine, started, listened to, and never left behind."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, final

import torch.distributed as dist

from moe_dispatch.cli.place import Place, joined
from moe_dispatch.errors import MoEDispatchError

Send = Callable[[Any], None]
Body = Callable[[Place, Send], Any]

# A rank that dies without a word brings down its peers, whose complaints may arrive before its death is seen.
LAST_WORDS_SECONDS = 1.0


class RankFailed(RuntimeError):
    """A rank raised or died; the text is that rank's, not that of the peers it took along."""


class PeerFailed(RuntimeError):
    """Under torchrun: another rank failed before this one, and says so itself."""


def under_torchrun() -> bool:
    """Whether this process is itself a rank."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def this_rank() -> int:
    """Of this process among torchrun's; 0 where there are none."""
    return int(os.environ["RANK"]) if under_torchrun() else 0


def num_ranks(size: int) -> int:
    """Ranks that take part: torchrun's, or as many processes as are to be started."""
    return int(os.environ["WORLD_SIZE"]) if under_torchrun() else size


def ranks_here(size: int) -> int:
    """Of those, the ones on this machine."""
    return int(os.environ["LOCAL_WORLD_SIZE"]) if under_torchrun() else size


def on_ranks(body: Body, size: int, on_message: Callable[[Any], None]) -> Any:
    """``run_ranks``, or where torchrun started this process, ``body`` as the rank that it is.

    Args:
        body: as for ``run_ranks``.
        size: of processes to start; torchrun knows its own.
        on_message: called on rank 0 with what its body sends; elsewhere messages are dropped.

    Returns:
        What rank 0's body returned; on torchrun's other ranks what their own did.

    Raises:
        RankFailed: as for ``run_ranks``; under torchrun on the rank that failed first, and PeerFailed on the others.
    """
    if not under_torchrun():
        return run_ranks(body, size, on_message)
    with joined(local_rank=int(os.environ["LOCAL_RANK"]), ranks_here=ranks_here(size)) as place:
        try:
            return body(place, on_message if place.rank == 0 else _drop)
        except Exception as error:
            if not _is_first_to_fail():
                let_others_speak()
                raise PeerFailed from error
            raise RankFailed(f"rank {place.rank} of {place.size}: {_told(error)}") from error


def let_others_speak() -> None:
    """Before a rank ends with an error in silence: torchrun then ends them all, also the one that tells."""
    if under_torchrun():
        time.sleep(LAST_WORDS_SECONDS)


def _drop(message: Any) -> None:
    """What ranks but 0 send."""


def _is_first_to_fail() -> bool:
    """Whether no other rank has asked this yet, as far as the store that all ranks met at still tells."""
    try:
        return int(dist.distributed_c10d._get_default_store().add("moe_dispatch/failed", 1)) == 1
    except RuntimeError:  # it went with the rank that held it, which failed before
        return False


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
        writer.send(("failure", _told(error)))


def _told(error: Exception) -> str:
    """An error of this library says what is to be done; of any other, one wants to know where it came from."""
    if not isinstance(error, MoEDispatchError):
        return "".join(traceback.format_exception(error))
    return "\n".join([str(error), *getattr(error, "__notes__", ())])


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
