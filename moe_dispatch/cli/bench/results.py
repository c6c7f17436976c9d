"""The results of a run: what was measured, its JSON file, and its ratios to an earlier run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, final

from pydantic import TypeAdapter, ValidationError

from moe_dispatch.cli.bench.costs import Timing
from moe_dispatch.cli.bench.overhead import Overhead
from moe_dispatch.cli.bench.request import Request
from moe_dispatch.cli.bench.workload import Case
from moe_dispatch.errors import ConfigError


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """Measurements of one contender in one case. None stands for what the suite leaves out or cannot see.

    Attributes:
        timing: times of forward and backward, cold and warm.
        bytes_sent: bytes to other ranks, mean of the ranks, in "dispatch", "combine" and "backward".
        peak_bytes: most memory held at once, on the rank that held most.
        error: largest difference to the dense result, relative to the magnitude of its terms; None if it dropped rows.
        dropped: whether rows did not fit a graph-safe buffer.
    """

    timing: Timing
    bytes_sent: dict[str, float] | None = None
    peak_bytes: int | None = None
    error: float | None = None
    dropped: bool = False

    @property
    def all_bytes(self) -> float | None:
        """Bytes of all phases."""
        return None if self.bytes_sent is None else sum(self.bytes_sent.values())


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class CaseResult:
    """All contenders in one case. ``floor_bytes`` is the mean over ranks of the fewest bytes one way."""

    case: Case
    contenders: dict[str, Measured]
    floor_bytes: float | None = None


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class OverheadResult:
    """Overhead of each contender in one case."""

    case: Case
    contenders: dict[str, Overhead]


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Results:
    """One run of the command. Suite overhead fills ``overheads``, the other suites fill ``cases``.

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
        """Convert to JSON."""
        document: dict[str, Any] = _RESULTS.dump_python(self, mode="json")
        return document


_RESULTS = TypeAdapter(Results)


def load_results(path: Path) -> Results:
    """Load what ``--save`` wrote.

    Raises:
        ConfigError: the file does not exist or holds something else.
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


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Ratio:
    """Figures of this run over those of an earlier run, for one contender in one case.

    Attributes:
        over: ratios by quantity; a quantity that one of the two runs does not have is left out.
        apart: whether the two ranges of totals, shortest to longest, do not overlap; None for overheads.
    """

    case: Case
    contender: str
    over: dict[str, float]
    apart: bool | None


def require_shared(request: Request, earlier: Results, file: Path) -> None:
    """Refuse an earlier run that has nothing in common with the request, before anything is measured.

    Raises:
        ConfigError: the two have no contender of a case in common.
    """
    if request.suite != earlier.suite:
        raise ConfigError(
            f"--against must be a run of the same suite, {request.suite}, got {str(file)!r} of {earlier.suite}. "
            f"Run moe-dispatch bench {earlier.suite}, or name another file."
        )
    if not request.keys & _measured(earlier).keys():
        case, contender = next(iter(_measured(earlier)), ("no case", "nobody"))
        raise ConfigError(
            f"--against must share a case and a contender with this run, got {str(file)!r} with none of them; it has, "
            f"for example, {contender} in {case}. Ask for its cases, or name another file."
        )


def ratios(now: Results, earlier: Results) -> list[Ratio]:
    """Compare what both runs measured, in the order of this run."""
    before = _measured(earlier)
    return [
        Ratio(case=case, contender=name, over=_over(new, before[case, name]), apart=_apart(new, before[case, name]))
        for (case, name), new in _measured(now).items()
        if (case, name) in before
    ]


def changed_environment(now: Mapping[str, str], earlier: Mapping[str, str]) -> dict[str, tuple[str, str]]:
    """Return what differs about the machine, except the date: (then, now) by name."""
    names = dict.fromkeys([*now, *earlier])
    both = {name: (earlier.get(name, "not told"), now.get(name, "not told")) for name in names if name != "date"}
    return {name: pair for name, pair in both.items() if pair[0] != pair[1]}


def comparison_document(now: Results, earlier: Results) -> dict[str, Any]:
    """Convert the comparison with an earlier run to JSON."""
    return {
        "date": earlier.machine.get("date"),
        "changed": {
            name: {"then": then, "now": new}
            for name, (then, new) in changed_environment(now.machine, earlier.machine).items()
        },
        "ratios": [
            {"case": str(ratio.case), "contender": ratio.contender, "over": ratio.over, "apart": ratio.apart}
            for ratio in ratios(now, earlier)
        ],
    }


def _measured(results: Results) -> dict[tuple[Case, str], Measured | Overhead]:
    everything: list[CaseResult | OverheadResult] = [*results.cases, *results.overheads]
    return {(result.case, name): found for result in everything for name, found in result.contenders.items()}


def _over(new: Measured | Overhead, old: Measured | Overhead) -> dict[str, float]:
    now, then = _quantities(new), _quantities(old)
    return {name: value / before for name, value in now.items() if value is not None and (before := then.get(name))}


def _quantities(measured: Measured | Overhead) -> dict[str, float | None]:
    if isinstance(measured, Overhead):
        return {"overhead": measured.median_ms if measured.in_place_ms is None else measured.in_place_ms}
    warm = measured.timing.warm
    return {
        "dispatch": warm.dispatch,
        "combine": warm.combine,
        "backward": warm.backward,
        "total": warm.total,
        "cold": measured.timing.cold.total,
        "bytes": measured.all_bytes,
        "peak": measured.peak_bytes,
    }


def _apart(new: Measured | Overhead, old: Measured | Overhead) -> bool | None:
    if isinstance(new, Overhead) or isinstance(old, Overhead):
        return None
    (low, high), (old_low, old_high) = new.timing.spread, old.timing.spread
    return high < old_low or old_high < low
