"""Results of a benchmark run: its starts, their measurements, and the JSON file.

A start is a set of new processes that measures all cases once.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from statistics import median
from typing import Any, Literal, TypeVar, final

from pydantic import TypeAdapter, ValidationError

from moe_dispatch.errors import ConfigError
from moe_dispatch_tools.bench.costs import Timing, middle
from moe_dispatch_tools.bench.overhead import Overhead
from moe_dispatch_tools.bench.workload import Case


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """Measurements of one contender in one case. A value is None if the suite does not measure it or cannot see it.

    Attributes:
        timing: Times of forward and backward, cold and warm.
        bytes_sent: Bytes sent to other ranks in "dispatch", "combine" and "backward", mean of all ranks.
        peak_bytes: Peak of the allocated memory, on the rank with the highest peak.
        error: Largest difference from the dense result, relative to the magnitude of its terms. None if rows
            were dropped.
        dropped: Whether a graph-safe buffer was too small for all rows.
    """

    timing: Timing
    bytes_sent: dict[str, float] | None = None
    peak_bytes: int | None = None
    error: float | None = None
    dropped: bool = False

    @property
    def all_bytes(self) -> float | None:
        """Bytes sent in all phases together."""
        return None if self.bytes_sent is None else sum(self.bytes_sent.values())


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class CaseResult:
    """Measurements of all contenders in one case.

    ``floor_bytes`` is the number of bytes that a rank must send in dispatch, mean of all ranks.
    """

    case: Case
    contenders: dict[str, Measured]
    floor_bytes: float | None = None


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class OverheadResult:
    """Overhead of all contenders in one case."""

    case: Case
    contenders: dict[str, Overhead]


AnyResult = TypeVar("AnyResult", bound=CaseResult | OverheadResult)


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Start:
    """Results of one start. Suite overhead fills ``overheads``, the other suites fill ``cases``."""

    cases: tuple[CaseResult, ...] = ()
    overheads: tuple[OverheadResult, ...] = ()

    @property
    def measured(self) -> dict[tuple[Case, str], Measured | Overhead]:
        """Measurements by case and contender."""
        everything: list[CaseResult | OverheadResult] = [*self.cases, *self.overheads]
        return {(result.case, name): found for result in everything for name, found in result.contenders.items()}


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Results:
    """Results of one run of the command.

    ``iterations`` is the number of warm runs in a start. ``left_out`` names the peers and the cases that were not
    measured, with the reason.
    """

    format: Literal["moe-dispatch bench 2"] = "moe-dispatch bench 2"
    suite: str
    machine: dict[str, str]
    iterations: int
    left_out: tuple[str, ...] = ()
    starts: tuple[Start, ...]

    @property
    def joined(self) -> Start:
        """All starts as one."""
        cases = zip(*(start.cases for start in self.starts), strict=True)
        overheads = zip(*(start.overheads for start in self.starts), strict=True)
        return Start(cases=tuple(map(join, cases)), overheads=tuple(map(join, overheads)))

    def document(self) -> dict[str, Any]:
        """Convert to JSON."""
        document: dict[str, Any] = _RESULTS.dump_python(self, mode="json")
        return document


_RESULTS = TypeAdapter(Results)


def join(results: Sequence[AnyResult]) -> AnyResult:
    """Join the results of one case in several starts. The result of a single start is returned unchanged.

    Each run of a joined ``Timing`` is the median run of one start. Memory and errors are the largest of all starts, and
    overheads are medians. Bytes are equal in all starts.
    """
    first: Any = results[0]
    if len(results) == 1:
        return results[0]
    join_one: Callable[[Sequence[Any]], Any] = _join_measured if isinstance(first, CaseResult) else _join_overheads
    contenders = {name: join_one([result.contenders[name] for result in results]) for name in first.contenders}
    joined: AnyResult = replace(first, contenders=contenders)
    return joined


def _join_measured(starts: Sequence[Measured]) -> Measured:
    cold, runs = middle(start.timing.cold for start in starts), tuple(start.timing.warm for start in starts)
    return replace(
        starts[0],
        timing=Timing(cold=cold, runs=runs),
        peak_bytes=max((start.peak_bytes for start in starts if start.peak_bytes is not None), default=None),
        error=max((start.error for start in starts if start.error is not None), default=None),
    )


def _join_overheads(starts: Sequence[Overhead]) -> Overhead:
    def joined(name: str) -> Any:
        known = [value for start in starts if (value := getattr(start, name)) is not None]
        return median(known) if known else None

    return Overhead(**{field.name: joined(field.name) for field in fields(Overhead)})


def load_results(path: Path) -> Results:
    """Load a file that ``--save`` wrote. A file of format 1 has one start.

    Raises:
        ConfigError: The file does not exist or has other contents.
    """
    try:
        found = json.loads(path.read_bytes())
        if isinstance(found, dict) and found.get("format") == "moe-dispatch bench 1":
            start = {name: found.pop(name, ()) for name in ("cases", "overheads")}
            found = {**found, "format": "moe-dispatch bench 2", "starts": [start]}
        return _RESULTS.validate_python(found)
    except OSError as error:
        told = error.strerror
    except ValidationError as error:
        first = error.errors()[0]
        told = f"{'.'.join(map(str, first['loc'])) or 'JSON'}: {first['msg']}"
    except ValueError as error:
        told = f"JSON: {error}"
    raise ConfigError(
        f"--against must be a file that bench --save wrote, got {str(path)!r} ({told}). Name such a file."
    )
