"""What was measured: values that a JSON file holds, and reads back for a later comparison."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, final

from pydantic import TypeAdapter, ValidationError

from moe_dispatch.cli.bench.case import Case
from moe_dispatch.cli.bench.overhead import Overhead
from moe_dispatch.cli.bench.timing import Timing
from moe_dispatch.errors import ConfigError


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """What one contender did in one case; None is what the suite leaves out, or cannot see.

    Attributes:
        timing: forward and backward, cold and warm.
        bytes_sent: to other ranks, a rank's mean, in "dispatch", "combine" and "backward".
        peak_bytes: most memory held at once, of the rank that held most.
        error: largest difference to the dense result, relative to the magnitude of its terms; None if it dropped rows.
        dropped: rows did not fit a graph-safe buffer.
    """

    timing: Timing
    bytes_sent: dict[str, float] | None = None
    peak_bytes: int | None = None
    error: float | None = None
    dropped: bool = False

    @property
    def all_bytes(self) -> float | None:
        """Of all phases."""
        return None if self.bytes_sent is None else sum(self.bytes_sent.values())


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class CaseResult:
    """All contenders in one case, in their order; ``floor_bytes`` is a rank's mean of the fewest bytes one way."""

    case: Case
    contenders: dict[str, Measured]
    floor_bytes: float | None = None


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class OverheadResult:
    """What a call costs beside its collectives, by contender."""

    case: Case
    contenders: dict[str, Overhead]


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Results:
    """One run of the command. Of "overhead" there are ``overheads``, of the other suites ``cases``.

    ``left_out`` says which peers and cases were not measured, and why.
    """

    format: Literal["moe-dispatch bench 1"] = "moe-dispatch bench 1"
    suite: str
    machine: dict[str, str]
    iterations: int
    left_out: tuple[str, ...] = ()
    cases: tuple[CaseResult, ...] = ()
    overheads: tuple[OverheadResult, ...] = ()

    def document(self) -> dict[str, Any]:
        """For JSON."""
        document: dict[str, Any] = _RESULTS.dump_python(self, mode="json")
        return document


_RESULTS = TypeAdapter(Results)


def load_results(path: Path) -> Results:
    """What ``--save`` wrote.

    Raises:
        ConfigError: there is no such file, or it holds something else.
    """
    try:
        return _RESULTS.validate_json(path.read_bytes())
    except OSError as error:
        told = error.strerror
    except ValidationError as error:
        first = error.errors()[0]
        told = f"{'.'.join(map(str, first['loc'])) or 'JSON'}: {first['msg']}"
    raise ConfigError(
        f"--against must be a file that bench --save wrote, got {str(path)!r} ({told}). Name one of these."
    )
