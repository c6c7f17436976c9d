"""Logging a run: a line for each step, in a file of each rank.

The first line is a header: ``moe_dispatch_run``, which is the number of the format, ``run``, ``rank``, ``ep_size``,
``name``, ``backend``, ``config``, ``versions`` and ``totals``. Every other line has ``step`` and ``totals``: of
``_totals``, counted since the channel was opened, so that no step depends on the one before being read.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO, final

from moe_dispatch.dispatchers.channel import Channel
from moe_dispatch.errors import TraceError
from moe_dispatch.traces.provenance import versions_here
from moe_dispatch.traces.recording import agree

if TYPE_CHECKING:
    from moe_dispatch.dispatchers import Dispatcher

FORMAT = 1
FORMAT_KEY = "moe_dispatch_run"


@final
class RunWriter:
    """Appends to the log of one rank. Counts its steps."""

    def __init__(self, dispatcher: Dispatcher, file: TextIO) -> None:
        self._dispatcher = dispatcher
        self._file = file
        self._steps = 0

    def step(self) -> None:
        """Write what was counted since the last call, after a training step or after several.

        Raises:
            TraceError: it cannot be written. StateError: the dispatcher is closed.

        Cost: local; one short line, and the host syncs of ``metrics()``.
        """
        self._write({"step": self._steps, "totals": _totals(self._dispatcher)})
        self._steps += 1

    def _write(self, line: dict[str, Any]) -> None:
        try:
            self._file.write(json.dumps(line, separators=(",", ":")) + "\n")
            self._file.flush()
        except (OSError, ValueError) as error:  # a full disk; a file that was closed with its block
            raise TraceError(
                f"RunWriter.step: {self._file.name} must be open and on a disk with room, got: {error}. Call step() "
                "inside the with block, and make room."
            ) from error


@contextmanager
def record(dispatcher: Dispatcher, directory: Path) -> Iterator[RunWriter]:
    """``RunLog.record``."""
    channel = dispatcher._lease.channel  # raises where closed
    path = directory / f"rank{channel.communicator.rank}.jsonl"
    file, problem = _made(path)
    try:
        agree(channel, problem)
        # A name that the files of all ranks share, and those of no other run.
        run = channel.control.gather_json(secrets.token_hex(8), label="trace")[0]
    except BaseException:
        if file is not None:
            file.close()
            path.unlink()
        raise
    assert file is not None
    with file:
        writer = RunWriter(dispatcher, file)
        writer._write(_header(dispatcher, channel, run))
        yield writer


def _made(path: Path) -> tuple[TextIO | None, TraceError | None]:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return path.open("x", encoding="utf-8"), None
    except FileExistsError:
        told = f"{path} must not be there yet, got one. Use a directory for each run and group"
    except OSError as error:
        told = f"{path} must be in a directory that can be written, got {error.strerror}. Use another directory"
    return None, TraceError(f"RunLog.record: {told}.")


def _header(dispatcher: Dispatcher, channel: Channel, run: str) -> dict[str, Any]:
    return {
        FORMAT_KEY: FORMAT,
        "run": run,
        "rank": channel.communicator.rank,
        "ep_size": channel.communicator.size,
        "name": dispatcher.name,
        "backend": channel.backend_name,
        "config": channel.config.model_dump(mode="json"),
        "versions": versions_here(),
        "totals": _totals(dispatcher),
    }


def _totals(dispatcher: Dispatcher) -> dict[str, Any]:
    """What this rank has counted; with ``needed`` and ``room``, rows and rows of a pair, where graph-safe."""
    channel, metrics = dispatcher._lease.channel, dispatcher.metrics()
    totals = {
        "dispatches": metrics.dispatches,
        "tokens": metrics.real_tokens_per_expert.tolist(),
        "rows": {**metrics.rows_padded, **metrics.rows_skipped},
        "sent": metrics.bytes_sent,
    }
    if channel.capacity is not None:
        totals["needed"] = channel.high_water.read()
        totals["room"] = [channel.capacity.rows, channel.capacity.pair_rows]
    return totals
