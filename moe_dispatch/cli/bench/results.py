"""Results of a benchmark run: its measurements, its JSON file, and its ratios to an earlier run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, final

from pydantic import TypeAdapter, ValidationError

from moe_dispatch.cli.bench.costs import Timing
from moe_dispatch.cli.bench.intervals import ratio_interval, verdict_of
from moe_dispatch.cli.bench.overhead import Overhead
from moe_dispatch.cli.bench.request import Request
from moe_dispatch.cli.bench.workload import Case
from moe_dispatch.errors import ConfigError


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


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Results:
    """Results of one run of the command.

    Suite overhead fills ``overheads``, the other suites fill ``cases``. ``left_out`` names the peers and the cases that
    were not measured, with the reason.
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
    """Load a file that ``--save`` wrote.

    Raises:
        ConfigError: The file does not exist or has other contents.
    """
    try:
        return _RESULTS.validate_json(path.read_bytes())
    except OSError as error:
        told = error.strerror
    except ValidationError as error:
        first = error.errors()[0]
        told = f"{'.'.join(map(str, first['loc'])) or 'JSON'}: {first['msg']}"
    raise ConfigError(
        f"--against must be a file that bench --save wrote, got {str(path)!r} ({told}). Name such a file."
    )


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Ratio:
    """Ratios of this run to an earlier run, for one contender in one case.

    Attributes:
        over: Ratio by quantity. A quantity is left out if one of the two runs did not measure it.
        interval: 95 % confidence interval of the ratio of the total; None for too few runs, and for suite overhead.
        verdict: "slower", "faster", "no difference seen" or "too few runs to tell"; "" for suite overhead, which does
            not save single runs.
    """

    case: Case
    contender: str
    over: dict[str, float]
    interval: tuple[float, float] | None = None
    verdict: str = ""


def require_shared(request: Request, earlier: Results, file: Path) -> None:
    """Refuse an earlier run that shares no measurement with the request, before the command measures.

    Raises:
        ConfigError: The suites differ, or no contender was measured in a case of this request.
    """
    if request.suite != earlier.suite:
        raise ConfigError(
            f"--against must be a run of the same suite, {request.suite}, got {str(file)!r} of {earlier.suite}. "
            f"Run moe-dispatch bench {earlier.suite}, or name another file."
        )
    if not request.keys & _measured(earlier).keys():
        case, contender = next(iter(_measured(earlier)), ("no case", "nobody"))
        raise ConfigError(
            f"--against must share a case and a contender with this run, got {str(file)!r}, which shares none. It has, "
            f"for example, {contender} in {case}. Ask for its cases, or name another file."
        )


def ratios(now: Results, earlier: Results) -> list[Ratio]:
    """Compare the measurements that both runs have, in the order of this run."""
    before = _measured(earlier)
    return [
        _compared(case, name, new, before[case, name])
        for (case, name), new in _measured(now).items()
        if (case, name) in before
    ]


def _compared(case: Case, contender: str, new: Measured | Overhead, old: Measured | Overhead) -> Ratio:
    over = _over(new, old)
    if isinstance(new, Overhead) or isinstance(old, Overhead):
        return Ratio(case=case, contender=contender, over=over)
    interval = ratio_interval(new.timing.totals.times, old.timing.totals.times)
    return Ratio(case=case, contender=contender, over=over, interval=interval, verdict=verdict_of(interval))


def changed_environment(now: Mapping[str, str], earlier: Mapping[str, str]) -> dict[str, tuple[str, str]]:
    """Return the facts about the machine that differ, as (then, now) by name. The date is left out."""
    names = dict.fromkeys([*now, *earlier])
    both = {name: (earlier.get(name, "not recorded"), now.get(name, "not recorded")) for name in names}
    return {name: pair for name, pair in both.items() if pair[0] != pair[1] and name != "date"}


def comparison_document(now: Results, earlier: Results) -> dict[str, Any]:
    """Convert the comparison with an earlier run to JSON."""
    return {
        "date": earlier.machine.get("date"),
        "changed": {
            name: {"then": then, "now": new}
            for name, (then, new) in changed_environment(now.machine, earlier.machine).items()
        },
        "ratios": [
            {
                "case": str(ratio.case),
                "contender": ratio.contender,
                "over": ratio.over,
                "interval": ratio.interval,
                "verdict": ratio.verdict,
            }
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
