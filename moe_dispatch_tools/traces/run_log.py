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
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TextIO, TypeVar, final

import torch
from pydantic import BaseModel, ValidationError
from torch import Tensor

from moe_dispatch.communication import raise_alike
from moe_dispatch.config import DispatcherConfig
from moe_dispatch.errors import TraceError
from moe_dispatch.versions import newer_format
from moe_dispatch_tools.traces.trace import Count, Name, config_from, first_fault, versions_here

if TYPE_CHECKING:
    from moe_dispatch.dispatchers import Dispatcher
    from moe_dispatch.dispatchers.channel import Channel

FORMAT = 1
_FILE = re.compile(r"rank(\d+)\.jsonl")
Line = TypeVar("Line", bound=BaseModel)


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
        layer_tokens: ``tokens_SE`` of each layer, by name of its dispatcher. Layers that ran in torch.compile are
            missing.
        layer_received: ``received_SP`` of each layer, by name of its dispatcher.
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
    layer_tokens: dict[str, Tensor]
    layer_received: dict[str, Tensor]
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
                    "moe_dispatch_run": FORMAT,
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
        files = {path.name: _read(path) for path in run_files(directory).values()}
        if not files:
            raise TraceError(
                f"RunLog.load: {directory} must hold rank0.jsonl and so on, got none. Name the directory that "
                "RunLog.record wrote."
            )
        headers = [header for header, _ in files.values()]
        for name, header in zip(files, headers, strict=True):
            if header.run != headers[0].run or name != f"rank{header.rank}.jsonl":
                raise TraceError(
                    f"RunLog.load: the files of {directory} must belong to one run, got {next(iter(files))} of run "
                    f"{headers[0].run} and {name} of rank {header.rank} of run {header.run}. Keep each run in its own "
                    "directory."
                )
        if [header.rank for header in headers] != [*range(len(headers))] or len(headers) != headers[0].ep_size:
            raise TraceError(
                f"RunLog.load: {directory} must hold all {headers[0].ep_size} ranks, got rank "
                f"{', '.join(str(header.rank) for header in headers)}. Copy the files of the other ranks into it."
            )
        return _run_log(directory, headers[0], [totals for _, totals in files.values()])

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
        "layers": {name: _own(tokens.tolist(), channel) for name, tokens in metrics.tokens_by_layer.items()},
        "rows": {**metrics.rows_padded, **metrics.rows_skipped},
        "sent": metrics.bytes_sent,
    }
    if metrics.slots_replayed:
        totals["replayed"], totals["drifted"] = metrics.slots_replayed, metrics.slots_drifted
    if channel.capacity is not None:
        totals["needed"] = channel.meter.needs()[:2]
        totals["room"] = [channel.capacity.rows, channel.capacity.pair_rows]
    return totals


def _own(tokens: list[int], channel: Channel) -> list[int]:
    """Leave out the experts of other ranks, which have no rows here unless there is a placement."""
    if channel.meter.placed:
        return tokens
    local, rank = channel.shape.num_local_experts, channel.communicator.rank
    return tokens[rank * local : (rank + 1) * local]


@final
class _Totals(BaseModel):
    """The result of ``_totals``."""

    dispatches: Count
    tokens: list[Count]
    layers: dict[Name, list[Count]] = {}
    rows: dict[Literal["rank", "expert", "cut", "masked"], Count]
    sent: dict[Name, Count]
    replayed: dict[Name, Count] = {}
    drifted: dict[Name, Count] = {}
    needed: tuple[Count, Count | None] | None = None
    room: tuple[Count, Count | None] | None = None


@final
class _Header(BaseModel):
    moe_dispatch_run: Literal[1]
    run: Name
    rank: Count
    ep_size: Count
    name: Name
    backend: Name
    config: dict[str, Any]
    versions: dict[str, str]
    totals: _Totals


@final
class _Step(BaseModel):
    step: int
    totals: _Totals


def run_files(directory: Path) -> dict[int, Path]:
    """Return the files of a run by rank. The result is empty if the directory has no log."""
    found = {int(match[1]): path for path in directory.iterdir() if (match := _FILE.fullmatch(path.name))}
    return dict(sorted(found.items()))


def _read(path: Path) -> tuple[_Header, list[_Totals]]:
    """Return the header of a file, and the totals before the first step and after each step."""
    first, *lines = path.read_text(encoding="utf-8", errors="replace").split("\n")
    if not lines:
        raise TraceError(
            f"RunLog.load: {path} must begin with a header, got {len(first)} characters of a header. The run ended "
            "before its first step. Log another run."
        )
    form = re.match(r'\{"moe_dispatch_run": (\d+)', first)
    if form is not None and (told := newer_format(form[1], FORMAT)):
        raise TraceError(f"RunLog.load: {path} must have format {FORMAT}, {told}")
    header = _parsed(_Header, path, 1, first)
    steps = [_parsed(_Step, path, number, line) for number, line in enumerate(lines[:-1], 2)]  # the last is incomplete
    if wrong := [(number, step.step) for number, step in enumerate(steps) if step.step != number]:
        raise TraceError(
            f"RunLog.load: {path}, line {wrong[0][0] + 2} must be of step {wrong[0][0]}, got step {wrong[0][1]}. Copy "
            "the file again."
        )
    return header, [header.totals, *(step.totals for step in steps)]


def _parsed(kind: type[Line], path: Path, number: int, line: str) -> Line:
    try:
        return kind.model_validate_json(line, strict=True)
    except ValidationError as error:
        raise TraceError(
            f"RunLog.load: {path}, line {number} must be a line of RunLog.record, got {first_fault(error)}. Use a file "
            "that RunLog.record wrote, and copy it again."
        ) from error


def _run_log(directory: Path, header: _Header, files: Sequence[list[_Totals]]) -> RunLog:
    written = tuple(len(totals) - 1 for totals in files)
    steps = min(written)
    ranks = [totals[: steps + 1] for totals in files]

    def each_step(count: Callable[[_Totals], int]) -> Tensor:
        """Return a count of every step, (S, P)."""
        return torch.tensor([[count(total) for total in rank] for rank in ranks], dtype=torch.int64).diff(dim=1).t()

    def so_far(pair: Callable[[_Totals], tuple[int, int | None] | None], index: int) -> Tensor | None:
        """Return the value after every step, (S, P), or None if a rank has no such value."""
        values = [[(pair(total) or (None, None))[index] for total in rank] for rank in ranks]
        return None if any(None in of_rank for of_rank in values) else torch.tensor(values)[:, 1:].t()

    config = config_from(header.config, header.versions, where=f"RunLog.load: the config of {directory}")
    names = dict.fromkeys(name for rank in ranks for total in rank[-1:] for name in total.layers)
    lengths = {len(each) for rank in ranks for total in rank for each in (total.tokens, *total.layers.values())}
    if config.num_experts % len(ranks) or not lengths <= {config.num_experts, config.num_experts // len(ranks)}:
        raise TraceError(
            f"RunLog.load: {directory} must have counts of {config.num_experts} experts, or of those of a rank, got "
            f"{', '.join(map(str, sorted(lengths)))}. Copy the files again."
        )

    def tokens(of: Callable[[_Totals], list[int]]) -> tuple[Tensor, Tensor]:
        """Return the rows of each expert, and the rows that each rank got, of every step: (S, E) and (S, P)."""
        tokens_SE = torch.zeros(steps + 1, config.num_experts, dtype=torch.int64)
        received_SP = torch.zeros(steps + 1, len(ranks), dtype=torch.int64)
        for rank, totals in enumerate(ranks):
            for step, total in enumerate(totals):
                rows = torch.tensor(of(total), dtype=torch.int64)
                # Without a placement, a rank has counts of its own experts.
                first = 0 if len(rows) == config.num_experts else rank * len(rows)
                tokens_SE[step, first : first + len(rows)] += rows
                received_SP[step, rank] = rows.sum()
        return tokens_SE.diff(dim=0), received_SP.diff(dim=0)

    tokens_SE, received_SP = tokens(lambda total: total.tokens)
    of_layers = {name: tokens(lambda total: total.layers.get(name, [])) for name in names}  # noqa: B023 - called at once
    layers = dict.fromkeys(name for rank in ranks for name in rank[-1].replayed)
    labels = dict.fromkeys(label for rank in ranks for label in rank[-1].sent)
    sent = {label: each_step(lambda total: total.sent.get(label, 0)) for label in labels}  # noqa: B023 - called at once
    room_SP, pairs_room_SP = (so_far(lambda total: total.room, index) for index in (0, 1))
    causes: tuple[Literal["rank", "expert", "cut", "masked"], ...] = ("rank", "expert", "cut", "masked")
    log = RunLog(
        config=config,
        backend_name=header.backend,
        name=header.name,
        ep_size=header.ep_size,
        versions=header.versions,
        written=written,
        dispatches_SP=each_step(lambda total: total.dispatches),
        tokens_SE=tokens_SE,
        received_SP=received_SP,
        layer_tokens={name: of[0] for name, of in of_layers.items()},
        layer_received={name: of[1] for name, of in of_layers.items()},
        rows={cause: each_step(lambda total: total.rows.get(cause, 0)) for cause in causes},  # noqa: B023
        sent={label: counts for label, counts in sent.items() if counts.any()},  # only collectives with bytes
        needed_SP=so_far(lambda total: total.needed, 0),
        room_S=None if room_SP is None else room_SP.amin(1),
        pairs_needed_SP=None if pairs_room_SP is None else so_far(lambda total: total.needed, 1),
        pairs_room_S=None if pairs_room_SP is None else pairs_room_SP.amin(1),
        slots_replayed={name: each_step(lambda total: total.replayed.get(name, 0)) for name in layers},  # noqa: B023
        slots_drifted={name: each_step(lambda total: total.drifted.get(name, 0)) for name in layers},  # noqa: B023
    )
    by_name = (log.layer_tokens, log.layer_received, log.rows, log.sent, log.slots_replayed, log.slots_drifted)
    counts = [log.dispatches_SP, log.tokens_SE, log.received_SP, *(of for each in by_name for of in each.values())]
    if any((count < 0).any() for count in counts):
        raise TraceError(
            f"RunLog.load: {directory} must have counts that grow from step to step, got a smaller one after a larger "
            "one. Copy the files again."
        )
    return log
