"""The log of a run: how it is written, one line per step in a file of each rank, and the value it is read into.

The first line of a file is a header: ``moe_dispatch_run``, which is the number of the format, ``run``, ``rank``,
``ep_size``, ``name``, ``backend``, ``config``, ``versions`` and ``totals``. Every other line has ``step`` and
``totals``, the result of ``_totals``. Totals count since the channel was opened, so that no line needs the one before.

Dimensions: ``S`` steps, ``P`` ranks of the group, ``E`` its experts.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO, final

from torch import Tensor

from moe_dispatch.communication import raise_alike
from moe_dispatch.config import DispatcherConfig
from moe_dispatch.dispatchers.channel import Channel
from moe_dispatch.errors import TraceError
from moe_dispatch.traces.provenance import versions_here

if TYPE_CHECKING:
    from moe_dispatch.dispatchers import Dispatcher

FORMAT = 1
FORMAT_KEY = "moe_dispatch_run"


@final
@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class RunLog:
    """The results of ``Dispatcher.metrics`` step by step: counts of all dispatchers of one config, all layers together.

    A step lies between two calls of ``RunWriter.step``. Counts are int64 on the CPU, each of one step.

    Attributes:
        config: The config of the dispatchers.
        backend_name: The backend; "auto" is resolved.
        name: The name of the dispatcher that was given, or "".
        ep_size: P.
        versions: The versions of moe_dispatch, torch and Python.
        written: The number of steps in each rank's file; more than S if a crash came between.
        dispatches_SP: Calls of dispatch.
        tokens_SE: Rows that went to each expert.
        rows: Rows without a token, each (S, P), by cause: "rank", "expert", "cut" and "masked" of ``Metrics``.
        sent: Bytes sent to other ranks, each (S, P), by collective.
        needed_SP: The most rows that any dispatch so far needed for a rank's experts; None if not graph-safe.
        room_S: The number of rows for which there was room; None if not graph-safe.
        pairs_needed_SP: As ``needed_SP``, for rows from one rank to one rank; None if there is no such bound.
        pairs_room_S: As ``room_S``, for rows from one rank to one rank; None if there is no such bound.
    """

    config: DispatcherConfig
    backend_name: str
    name: str
    ep_size: int
    versions: dict[str, str]
    written: tuple[int, ...]
    dispatches_SP: Tensor
    tokens_SE: Tensor
    rows: dict[str, Tensor]
    sent: dict[str, Tensor]
    needed_SP: Tensor | None
    room_S: Tensor | None
    pairs_needed_SP: Tensor | None
    pairs_room_S: Tensor | None

    @staticmethod
    @contextmanager
    def record(dispatcher: Dispatcher, directory: str | Path) -> Iterator[RunWriter]:
        """Log the counts of a dispatcher's channel, one step per call of ``step()`` on the result of ``with``.

        Each rank writes one file, ``rank0.jsonl`` and so on, and flushes every step, so that a run that crashes leaves
        its record. Dispatchers that share the channel (config and group) are counted together, as in ``metrics()``;
        dispatchers of another config or group need a directory of their own.

        Args:
            dispatcher: An open dispatcher.
            directory: Created if missing.

        Raises:
            TraceError: The file of this rank cannot be created, or exists already; PeerError on the other ranks.
            StateError: The dispatcher is closed.

        Cost: entering is collective; leaving is not. ``step()`` is local: one line written, and the host syncs of
        ``metrics()``.
        """
        channel = dispatcher._lease.channel  # raises if closed
        path = Path(directory) / f"rank{channel.communicator.rank}.jsonl"
        file, problem = _created(path)
        try:
            raise_alike(channel.control, problem, label="trace")
            # A name that the files of all ranks share, and no other run has.
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

    @staticmethod
    def load(directory: str | Path) -> RunLog:
        """Read a log, as many steps as every rank has; a last line that was cut off is left out.

        Raises:
            TraceError: The directory is missing or holds no log, ranks are missing or of different runs, or a line is
                damaged or of another format.
        """
        from moe_dispatch.traces.run_reading import load  # noqa: PLC0415 - it makes a RunLog

        return load(Path(directory))

    @property
    def steps(self) -> int:
        """S."""
        return len(self.tokens_SE)


@final
class RunWriter:
    """Appends to the log of one rank, and counts its steps."""

    def __init__(self, dispatcher: Dispatcher, file: TextIO) -> None:
        self._dispatcher = dispatcher
        self._file = file
        self._steps = 0

    def step(self) -> None:
        """Write the counts since the last call, after one training step or several.

        Raises:
            TraceError: The line cannot be written. StateError: the dispatcher is closed.

        Cost: local; one short line, and the host syncs of ``metrics()``.
        """
        self._write({"step": self._steps, "totals": _totals(self._dispatcher)})
        self._steps += 1

    def _write(self, line: dict[str, Any]) -> None:
        try:
            self._file.write(json.dumps(line, separators=(",", ":")) + "\n")
            self._file.flush()
        except (OSError, ValueError) as error:  # the disk is full, or the with block has closed the file
            raise TraceError(
                f"RunWriter.step: {self._file.name} must be open and on a disk with room, got: {error}. Call step() "
                "inside the with block, and make room."
            ) from error


def _created(path: Path) -> tuple[TextIO | None, TraceError | None]:
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
    """Return the counts of this rank; in graph-safe mode also ``needed`` and ``room``: [rows, rows of a pair]."""
    channel, metrics = dispatcher._lease.channel, dispatcher.metrics()
    totals = {
        "dispatches": metrics.dispatches,
        "tokens": metrics.real_tokens_per_expert.tolist(),
        "rows": {**metrics.rows_padded, **metrics.rows_skipped},
        "sent": metrics.bytes_sent,
    }
    if channel.capacity is not None:
        totals["needed"] = channel.high_water.read()[:2]
        totals["room"] = [channel.capacity.rows, channel.capacity.pair_rows]
    return totals
