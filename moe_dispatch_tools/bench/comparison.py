"""Compare a benchmark run with an earlier run: ratios, intervals over starts, and verdicts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

from moe_dispatch.errors import ConfigError
from moe_dispatch_tools.bench.intervals import NEEDED_STARTS, ratio_interval, verdict_of
from moe_dispatch_tools.bench.overhead import Overhead
from moe_dispatch_tools.bench.request import Request
from moe_dispatch_tools.bench.results import Measured, Results
from moe_dispatch_tools.bench.workload import Case


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Ratio:
    """Ratios of this run to an earlier run, for one contender in one case.

    Attributes:
        over: Ratio by quantity. A quantity is left out if one of the two runs did not measure it.
        interval: 95 % confidence interval of the ratio of the total; None for too few starts, and for suite overhead.
        verdict: "slower", "faster" or "no difference seen"; "cannot say: 1 of 4 starts" if the side with fewer starts
            has too few; "" for suite overhead.
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
    measured = earlier.joined.measured
    if not request.keys & measured.keys():
        case, contender = next(iter(measured), ("no case", "nobody"))
        raise ConfigError(
            f"--against must share a case and a contender with this run, got {str(file)!r}, which shares none. It has, "
            f"for example, {contender} in {case}. Ask for its cases, or name another file."
        )


def ratios(now: Results, earlier: Results) -> list[Ratio]:
    """Compare the measurements that both runs have, in the order of this run."""
    before, found = earlier.joined.measured, []
    few = min(len(now.starts), len(earlier.starts))
    for (case, contender), new in now.joined.measured.items():
        if (case, contender) not in before:
            continue
        interval, verdict = None, ""
        if isinstance(new, Measured):
            interval = ratio_interval(_totals(now, case, contender), _totals(earlier, case, contender))
            verdict = f"cannot say: {few} of {NEEDED_STARTS} starts" if interval is None else verdict_of(interval)
        over = _over(new, before[case, contender])
        found.append(Ratio(case=case, contender=contender, over=over, interval=interval, verdict=verdict))
    return found


def _totals(results: Results, case: Case, contender: str) -> list[float]:
    """Return the median total of each start."""
    return [
        one.timing.warm.total
        for start in results.starts
        if isinstance(one := start.measured.get((case, contender)), Measured)
    ]


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
