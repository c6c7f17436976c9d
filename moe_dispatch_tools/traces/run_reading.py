"""Read the log of a run, and convert the lines of all ranks to the tensors of a ``RunLog``."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor

from moe_dispatch.errors import TraceError
from moe_dispatch_tools.traces.provenance import config_from
from moe_dispatch_tools.traces.run_log import FORMAT, FORMAT_KEY, RunLog

_FILE = re.compile(r"rank(\d+)\.jsonl")


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


def load(directory: Path) -> RunLog:
    """Do the work of ``RunLog.load``."""
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
