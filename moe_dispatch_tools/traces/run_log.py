"""The log of a run: ``RunWriter`` writes it, and ``RunLog`` reads it.

Each rank writes a file with one line per step. The first line is a header: ``moe_dispatch_run``, which is the number of
the format, ``run``, ``rank``, ``ep_size``, ``name``, ``backend``, ``config``, ``versions`` and ``totals``. All other
lines have ``step`` and ``totals``, the result of ``_totals``. Totals count from the opening of the channel, so no line
depends on an earlier line.

Dimensions: ``S`` steps, ``P`` ranks of the group, ``E`` its experts.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO, final

import torch
from torch import Tensor

from moe_dispatch.communication import raise_alike
from moe_dispatch.config import DispatcherConfig
from moe_dispatch.errors import TraceError
from moe_dispatch_tools.traces.trace import config_from, versions_here

if TYPE_CHECKING:
    from moe_dispatch.dispatchers import Dispatcher

FORMAT = 1
FORMAT_KEY = "moe_dispatch_run"
_FILE = re.compile(r"rank(\d+)\.jsonl")


@final
@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class RunLog:
    """The counts of ``Dispatcher.metrics`` by step: sums over all dispatchers of one config and group.

    A step is the time between two calls of ``RunWriter.step``. Counts are int64 on the CPU, for each step alone.

    Attributes:
        config: The config of the dispatchers.
        backend_name: The name of the backend, never "auto".
        name: The name of the dispatcher in the call of ``record``, or "".
        ep_size: The number of ranks, P.
        versions: The versions of moe_dispatch, torch and Python.
        written: The number of steps in the file of each rank. It exceeds S if a rank crashed earlier than others.
        dispatches_SP: The number of calls of dispatch.
        tokens_SE: The number of rows that went to each expert.
        received_SP: The number of rows that the experts on each rank got, copies of other ranks' experts included.
        rows: The number of padding rows, each (S, P), by cause: "rank", "expert", "cut" and "masked" of ``Metrics``.
        sent: The number of bytes sent to other ranks, each (S, P), by collective.
        needed_SP: The largest number of rows that any dispatch so far needed for the experts of a rank; None if not
            graph-safe.
        room_S: The capacity for these rows; None if not graph-safe.
        pairs_needed_SP: The largest number of rows from a rank to one receiving rank in any dispatch so far; None if
            the backend does not bound this number.
        pairs_room_S: The capacity for these rows; None if the backend does not bound them.
        slots_replayed: The number of slots whose expert came from a ``RoutingTable``, each (S, P), by name of the
            dispatcher.
        slots_drifted: The number of these slots in which the router would not have chosen this expert.
    """

    config: DispatcherConfig
    backend_name: str
    name: str
    ep_size: int
    versions: dict[str, str]
    written: tuple[int, ...]
    dispatches_SP: Tensor
    tokens_SE: Tensor
    received_SP: Tensor
    rows: dict[str, Tensor]
    sent: dict[str, Tensor]
    needed_SP: Tensor | None
    room_S: Tensor | None
    pairs_needed_SP: Tensor | None
    pairs_room_S: Tensor | None
    slots_replayed: dict[str, Tensor]
    slots_drifted: dict[str, Tensor]

    @staticmethod
    @contextmanager
    def record(dispatcher: Dispatcher, directory: str | Path) -> Iterator[RunWriter]:
        """Log the counts of a dispatcher and of all others with the same channel, that is, the same config and group.

        The ``with`` statement returns a ``RunWriter``. Call its ``step()`` after each step. Each rank writes one file,
        ``rank0.jsonl`` and so on. Every step is flushed, so the log of a crashed run can be read. Dispatchers of
        another config or group need another directory.

        Args:
            dispatcher: An open dispatcher.
            directory: The directory of the files. It is created if it does not exist.

        Raises:
            TraceError: The file of this rank exists, or cannot be created. The other ranks raise PeerError.
            StateError: The dispatcher is closed.

        Cost: The start of the block is collective; its end is not. ``step()`` is local: it writes one line, and has the
        host syncs of ``metrics()``.
        """
        channel = dispatcher._lease.enter()  # raises if closed
        path = Path(directory) / f"rank{channel.communicator.rank}.jsonl"
        file, problem = _created(path)
        try:
            raise_alike(channel.control, problem, label="trace")
            # A name that is the same in the files of all ranks, and differs from the names of all other runs.
            run = channel.control.gather_json(secrets.token_hex(8), label="trace")[0]
        except BaseException:
            if file is not None:
                file.close()
                path.unlink()
            raise
        assert file is not None
        with file:
            writer = RunWriter(dispatcher, file)
            writer._write(
                {
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
            )
            yield writer

    @staticmethod
    def load(directory: str | Path) -> RunLog:
        """Read the steps of a log that all ranks have. An incomplete last line is left out.

        Raises:
            TraceError: The directory is missing or has no log, ranks are missing or belong to different runs, or a line
                is damaged or has another format.
        """
        directory = Path(directory)
        if not directory.is_dir():
            raise TraceError(f"RunLog.load: {directory} must be an existing directory, got none. Check the path.")
        files = [_read(path) for path in run_files(directory).values()]
        if not files:
            raise TraceError(
                f"RunLog.load: {directory} must hold rank0.jsonl and so on, got none. Name the directory that "
                "RunLog.record wrote."
            )
        _check_one_run(directory, files)
        try:
            return _run_log(files)
        except TraceError:  # it is also a ValueError, which the next clause would catch
            raise
        except (KeyError, IndexError, TypeError, ValueError, RuntimeError) as error:
            raise TraceError(
                f"RunLog.load: the lines of {directory} must have all parts of a log, got "
                f"{type(error).__name__}: {error}. Copy the files again."
            ) from error

    @property
    def steps(self) -> int:
        """The number of steps, S."""
        return len(self.tokens_SE)


@final
class RunWriter:
    """Write the log of one rank."""

    def __init__(self, dispatcher: Dispatcher, file: TextIO) -> None:
        self._dispatcher = dispatcher
        self._file = file
        self._steps = 0

    def step(self) -> None:
        """Write the counts of a step. Call it after each training step, or after several.

        Raises:
            TraceError: The line cannot be written.
            StateError: The dispatcher is closed.

        Cost: local; one short line in the file, and the host syncs of ``metrics()``.
        """
        self._write({"step": self._steps, "totals": _totals(self._dispatcher)})
        self._steps += 1

    def _write(self, line: dict[str, Any]) -> None:
        try:
            self._file.write(json.dumps(line, separators=(",", ":")) + "\n")
            self._file.flush()
        except (OSError, ValueError) as error:  # the disk is full, or the with block has closed the file
            raise TraceError(
                f"RunWriter.step: {self._file.name} must be open, on a disk with free space, got: {error}. Call step() "
                "inside the with block, and free space on the disk."
            ) from error


def _created(path: Path) -> tuple[TextIO | None, TraceError | None]:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return path.open("x", encoding="utf-8"), None
    except FileExistsError:
        told = f"{path} must not exist, got an existing file. Use a new directory for each run and group"
    except OSError as error:
        told = f"{path} must be in a directory that can be written, got {error.strerror}. Use another directory"
    return None, TraceError(f"RunLog.record: {told}.")


def _totals(dispatcher: Dispatcher) -> dict[str, Any]:
    """Return the counts of this rank. Graph-safe mode adds ``needed`` and ``room``, each [rows, rows of a pair]."""
    channel, metrics = dispatcher._lease.enter(), dispatcher.metrics()
    totals = {
        "dispatches": metrics.dispatches,
        "tokens": metrics.real_tokens_per_expert.tolist(),
        "rows": {**metrics.rows_padded, **metrics.rows_skipped},
        "sent": metrics.bytes_sent,
    }
    if metrics.slots_replayed:
        totals["replayed"], totals["drifted"] = metrics.slots_replayed, metrics.slots_drifted
    if channel.capacity is not None:
        totals["needed"] = channel.meter.needs()[:2]
        totals["room"] = [channel.capacity.rows, channel.capacity.pair_rows]
    return totals


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class _File:
    """The file of one rank: its header, and the totals before the first step and after each step."""

    path: Path
    header: dict[str, Any]
    totals: list[dict[str, Any]]


def run_files(directory: Path) -> dict[int, Path]:
    """Return the files of a run by rank. The result is empty if the directory has no log."""
    found = {int(match[1]): path for path in directory.iterdir() if (match := _FILE.fullmatch(path.name))}
    return dict(sorted(found.items()))


def _read(path: Path) -> _File:
    *lines, rest = path.read_text(encoding="utf-8", errors="replace").split("\n")  # rest: the incomplete last line
    if not lines:
        raise TraceError(
            f"RunLog.load: {path} must begin with a header, got {len(rest)} characters of a header. The run ended "
            "before its first step. Log another run."
        )
    header, *steps = [_parsed(path, number, line) for number, line in enumerate(lines, 1)]
    found = header.get(FORMAT_KEY)
    if found != FORMAT:
        told = "a file that is not the log of a run" if found is None else f"format {found}"
        raise TraceError(
            f"RunLog.load: {path} must have format {FORMAT}, got {told}. Use a file that RunLog.record of this "
            "version wrote."
        )
    for number, step in enumerate(steps):
        if step.get("step") != number:
            raise TraceError(
                f"RunLog.load: {path}, line {number + 2} must be step {number}, got {step.get('step')}. Copy the file "
                "again, and do not join files."
            )
    try:
        return _File(path=path, header=header, totals=[line["totals"] for line in (header, *steps)])
    except KeyError as error:
        raise TraceError(f"RunLog.load: {path} must have {error} in every line. Copy the file again.") from error


def _parsed(path: Path, number: int, line: str) -> dict[str, Any]:
    try:
        value = json.loads(line)
    except json.JSONDecodeError as error:
        value, told = None, str(error)
    else:
        told = f"a {type(value).__name__}"
    if not isinstance(value, dict):
        raise TraceError(
            f"RunLog.load: {path}, line {number} must be a JSON object, got damaged text: {told}. Copy the file again."
        )
    return value


def _check_one_run(directory: Path, files: Sequence[_File]) -> None:
    first = files[0]
    for file in files:
        if (
            file.header.get("run") != first.header.get("run")
            or file.path.name != f"rank{file.header.get('rank')}.jsonl"
        ):
            raise TraceError(
                f"RunLog.load: the files of {directory} must belong to one run, got {first.path.name} of run "
                f"{first.header.get('run')} and {file.path.name} of rank {file.header.get('rank')} of run "
                f"{file.header.get('run')}. Keep each run in its own directory."
            )
    ranks, size = [file.header["rank"] for file in files], first.header.get("ep_size")
    if ranks != list(range(size or 0)):
        raise TraceError(
            f"RunLog.load: {directory} must hold all {size} ranks, got rank {', '.join(map(str, ranks))}. Copy the "
            "files of the other ranks into it."
        )


def _run_log(files: Sequence[_File]) -> RunLog:
    header, written = files[0].header, tuple(len(file.totals) - 1 for file in files)
    steps = min(written)
    ranks = [file.totals[: steps + 1] for file in files]

    def each_step(totals_PS: list[list[int]]) -> Tensor:
        """Return the count of every step, (S, P), from totals."""
        return torch.tensor(totals_PS, dtype=torch.int64).diff(dim=1).t()

    def each_of(key: str, name: str) -> Tensor:
        return each_step([[total.get(key, {}).get(name, 0) for total in rank] for rank in ranks])

    def so_far(key: str, index: int) -> Tensor | None:
        """Return the value after every step, (S, P), or None if a rank has no such value."""
        if any(total.get(key, (None, None))[index] is None for rank in ranks for total in rank[-1:]):
            return None
        return torch.tensor([[total[key][index] for total in rank[1:]] for rank in ranks], dtype=torch.int64).t()

    config = config_from(header["config"], header["versions"], where=f"RunLog.load: the config of {files[0].path}")
    tokens = [
        torch.tensor([_by_expert(total["tokens"], number, config.num_experts) for total in rank], dtype=torch.int64)
        for number, rank in enumerate(ranks)
    ]
    layers = dict.fromkeys(name for rank in ranks for name in rank[-1].get("replayed", ()))
    labels = dict.fromkeys(label for rank in ranks for label in rank[-1]["sent"])
    sent = {label: each_of("sent", label) for label in labels}
    room_SP, pairs_room_SP = so_far("room", 0), so_far("room", 1)
    return RunLog(
        config=config,
        backend_name=header["backend"],
        name=header["name"],
        ep_size=header["ep_size"],
        versions=header["versions"],
        written=written,
        dispatches_SP=each_step([[total["dispatches"] for total in rank] for rank in ranks]),
        tokens_SE=torch.stack(tokens).sum(0).diff(dim=0),
        received_SP=torch.stack([of_rank.sum(1) for of_rank in tokens], 1).diff(dim=0),
        rows={cause: each_of("rows", cause) for cause in header["totals"]["rows"]},
        sent={label: counts for label, counts in sent.items() if counts.any()},  # only collectives with bytes
        needed_SP=so_far("needed", 0),
        room_S=None if room_SP is None else room_SP.amin(1),
        pairs_needed_SP=None if pairs_room_SP is None else so_far("needed", 1),
        pairs_room_S=None if pairs_room_SP is None else pairs_room_SP.amin(1),
        slots_replayed={name: each_of("replayed", name) for name in layers},
        slots_drifted={name: each_of("drifted", name) for name in layers},
    )


def _by_expert(tokens: list[int], rank: int, num_experts: int) -> list[int]:
    """Return the counts of all experts on one rank. Without a placement, the rank has counts of its own experts."""
    if len(tokens) == num_experts:
        return tokens
    before = rank * len(tokens)
    return [*[0] * before, *tokens, *[0] * (num_experts - before - len(tokens))]
