"""This run beside an earlier one: ratios by case and contender."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

from moe_dispatch.cli.bench.case import Case
from moe_dispatch.cli.bench.overhead import Overhead
from moe_dispatch.cli.bench.request import Request
from moe_dispatch.cli.bench.results import CaseResult, Measured, OverheadResult, Results
from moe_dispatch.errors import ConfigError

QUANTITIES = ("dispatch", "combine", "backward", "total", "cold", "bytes", "peak", "overhead")


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Ratio:
    """Now over then, of one contender in one case.

    Attributes:
        over: by ``QUANTITIES``; those are left out that one of the two runs does not know.
        apart: the two ranges of totals, shortest to longest, have nothing in common; None for overheads.
    """

    case: Case
    contender: str
    over: dict[str, float]
    apart: bool | None


def require_shared(request: Request, earlier: Results, file: Path) -> None:
    """Refuse, before anything is measured, an earlier run that has nothing in common with what is asked.

    Raises:
        ConfigError: no case, or no contender of a case, is in both.
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
    """What both runs measured, in this run's order."""
    before = _measured(earlier)
    return [
        Ratio(case=case, contender=name, over=_over(new, before[case, name]), apart=_apart(new, before[case, name]))
        for (case, name), new in _measured(now).items()
        if (case, name) in before
    ]


def changed_facts(now: Mapping[str, str], earlier: Mapping[str, str]) -> dict[str, tuple[str, str]]:
    """What is not as it was, but for the date: (then, now) by name."""
    names = dict.fromkeys([*now, *earlier])
    both = {name: (earlier.get(name, "not told"), now.get(name, "not told")) for name in names if name != "date"}
    return {name: pair for name, pair in both.items() if pair[0] != pair[1]}


def document(now: Results, earlier: Results) -> dict[str, Any]:
    """For JSON."""
    return {
        "date": earlier.machine.get("date"),
        "changed": {
            name: {"then": then, "now": new}
            for name, (then, new) in changed_facts(now.machine, earlier.machine).items()
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
