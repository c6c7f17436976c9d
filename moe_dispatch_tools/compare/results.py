"""Results of ``compare``, as plain data for tables, a picture and JSON, and the comparison with an earlier run.

A start is a set of new processes that measures all cases once. A round is one run of every contender, in turn.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import median, quantiles
from typing import Any, final

from moe_dispatch.config import DispatcherConfig
from moe_dispatch.errors import ConfigError
from moe_dispatch_tools.compare.workload import Workload

QUANTITIES = ("y", "x", "weights", "experts")
PHASES = ("dispatch", "experts", "combine", "backward")
FORMAT = "moe-dispatch compare 1"
NEEDED_STARTS = 6
_RESAMPLES = 1000


def ratio_interval(now: Sequence[float], then: Sequence[float]) -> tuple[float, float]:
    """Return the 95 % bootstrap interval of the ratio of two medians.

    Args:
        now: Times, of units that do not depend on each other.
        then: Times to compare them with, or ``[1]`` if ``now`` has ratios.
    """
    chance = random.Random(0)

    def middle(values: Sequence[float]) -> float:
        return median(chance.choices(values, k=len(values)))

    edges = quantiles((middle(now) / middle(then) for _ in range(_RESAMPLES)), n=40)
    return edges[0], edges[-1]


def verdict_of(interval: tuple[float, float]) -> str:
    """Say in words what the interval of a ratio shows."""
    low, high = interval
    return "slower" if low > 1 else "faster" if high < 1 else "no difference seen"


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Load:
    """The load of the ranks under the placement of a variant, as measured.

    Attributes:
        imbalance: Rows of the busiest rank divided by the mean of all ranks, mean of all steps.
        peak_rows: Most rows of a rank in any step.
        copied_bytes: Bytes of expert weights that travel in a forward, sum of all ranks, mean of all steps. As many
            bytes of gradients travel in the backward.
        busiest_ms: Median milliseconds of the busiest rank in a step with experts: processor time on CPUs, elapsed time
            on GPUs. None for an emulation.
        busiest_ratio: ``busiest_ms``, divided by that of the first variant that ran.
        break_even: Tokens per expert from which balancing saves time on the busiest rank. None for a variant without
            balancing, or if balancing saves no time with any number of tokens.
    """

    imbalance: float
    peak_rows: float
    copied_bytes: float
    busiest_ms: float | None = None
    busiest_ratio: float | None = None
    break_even: float | None = None


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class VariantResult:
    """The result of one variant. A difference is the largest of all steps and ranks. A cost is that of one step.

    Attributes:
        refused: Why the variant could not run. Then all other attributes are empty.
        emulated: Whether its library is an emulation. Bytes and times of an emulation say nothing about the library.
        dropped: Whether rows were dropped because a buffer was too small. Then the differences say nothing.
        from_reference: Largest difference from the dense float64 reference by name in ``QUANTITIES``, divided by the
            largest value.
        from_first: Largest difference from the first variant that ran, divided by the largest value.
        bytes_sent: Bytes of the collectives of torch.distributed by phase, sum of all ranks, mean of all steps. None if
            another library sends the rows.
        row_dtypes: Names of the dtypes of the rows on the wire, dispatch first; "unknown" if the backend cannot say.
        rows_padded: Padding rows by cause, sum of all ranks, mean of all steps.
        host_syncs: Host syncs of rank 0 in the first step, including the plan; None for an emulation.
        peak_bytes: Peak of the allocated memory, on the rank with the highest peak; None for an emulation.
        starts: For each start and each round: milliseconds of the phases, and processor time, of the slowest rank.
            Experts cost nothing. Phase "experts" has the exchange of weights, if experts are placed.
        load: None if experts are not timed.
    """

    backend: str
    mode: str
    refused: str | None = None
    emulated: bool = False
    dropped: bool = False
    from_reference: dict[str, float] = field(default_factory=dict)
    from_first: dict[str, float] = field(default_factory=dict)
    bytes_sent: dict[str, float] | None = None
    row_dtypes: str = "unknown"
    rows_padded: dict[str, float] = field(default_factory=dict)
    host_syncs: int | None = None
    peak_bytes: int | None = None
    starts: tuple[tuple[tuple[float, ...], ...], ...] = ()
    load: Load | None = None

    def agrees(self, tolerance: float) -> bool:
        """Return whether it ran and differs from the reference by at most the tolerance. NaN does not agree."""
        return self.refused is None and (
            self.dropped or all(value <= tolerance for value in self.from_reference.values())
        )

    @property
    def milliseconds(self) -> dict[str, float]:
        """Median times of all rounds: of each phase, of all phases together ("total"), and of the processor."""
        rounds = [(*one[:-1], sum(one[:-1]), one[-1]) for start in self.starts for one in start]
        return dict(zip((*PHASES, "total", "processor"), map(median, zip(*rounds, strict=True)), strict=False))

    def ratio(self, base: VariantResult) -> tuple[float, tuple[float, float]]:
        """Return the ratio of the total to that of ``base``, and its 95 % interval. Each round gives one ratio.

        Several starts give one ratio each, because the rounds of a start share the placement of their memory.
        """
        ratios = [
            [sum(mine[:-1]) / sum(other[:-1]) for mine, other in zip(*pair, strict=True)]
            for pair in zip(self.starts, base.starts, strict=True)
        ]
        units = [median(start) for start in ratios] if len(ratios) > 1 else ratios[0]
        return median(units), ratio_interval(units, [1.0])

    def overhead(self, floor: VariantResult) -> float:
        """Return how many milliseconds of dispatch and combine are above the floor's, median of all rounds."""
        rounds = ([one for start in result.starts for one in start] for result in (self, floor))
        above = [mine[0] + mine[2] - least[0] - least[2] for mine, least in zip(*rounds, strict=True)]
        return float(median(above))


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class CaseResult:
    """The results of all variants on one workload.

    Attributes:
        tolerance: Largest allowed value in ``from_reference``.
        transport: "nccl" or "gloo".
        tokens: Largest number of tokens of each rank in a step.
        tokens_per_expert: Rows at experts divided by the number of experts, mean of all steps; 0 if not counted.
        flop_per_byte: FLOP of the experts in the time of one byte between ranks, measured; None if it was not.
    """

    workload: Workload
    tolerance: float
    transport: str
    tokens: tuple[int, ...]
    variants: tuple[VariantResult, ...]
    tokens_per_expert: float = 0.0
    flop_per_byte: float | None = None

    @property
    def ran(self) -> list[VariantResult]:
        """The variants that ran."""
        return [one for one in self.variants if one.refused is None]

    @property
    def floor(self) -> VariantResult | None:
        """The result of the floor, if it ran."""
        return next((one for one in self.ran if one.backend == "floor"), None)

    def passes(self, explicit: bool) -> bool:
        """Return whether a variant ran, all that ran agree, and, if ``explicit``, every backend ran in some mode."""
        missing = {one.backend for one in self.variants} - {one.backend for one in self.ran}
        agree = all(one.agrees(self.tolerance) for one in self.ran)
        return bool(self.ran) and agree and not (explicit and missing)

    def document(self, config: DispatcherConfig) -> dict[str, Any]:
        """Convert to JSON. A difference that is not finite becomes null."""
        workload = self.workload
        return {
            "case": case_name(workload, config, len(self.tokens)),
            "tolerance": self.tolerance,
            "tokens": list(self.tokens),
            "steps": workload.steps,
            "dtype": workload.dtype,
            "routing": workload.routing if workload.trace is None else None,
            "trace": workload.trace and {"file": str(workload.trace), "dispatches": workload.recorded},
            "tokens_per_expert": self.tokens_per_expert,
            "flop_per_byte": self.flop_per_byte,
            "outcomes": [self._described(one) for one in self.variants],
        }

    def _described(self, one: VariantResult) -> dict[str, Any]:
        ratio, interval = one.ratio(self.ran[0]) if one.starts and self.ran[0].starts else (None, None)
        return {
            **asdict(one),
            "agrees": one.agrees(self.tolerance),
            "from_reference": _finite(one.from_reference),
            "from_first": _finite(one.from_first),
            "milliseconds": one.milliseconds,
            "time_ratio": ratio,
            "ratio_interval": interval,
            "overhead_ms": one.overhead(self.floor) if self.floor and one.starts else None,
        }


def _finite(values: dict[str, float]) -> dict[str, float | None]:
    return {name: value if math.isfinite(value) else None for name, value in values.items()}


def join(starts: Sequence[CaseResult]) -> CaseResult:
    """Join the results of one case in several starts. Differences and memory are the largest, times those of all."""

    def joined(found: Sequence[VariantResult]) -> VariantResult:
        first = found[0]
        return replace(
            first,
            from_reference={name: max(one.from_reference[name] for one in found) for name in first.from_reference},
            from_first={name: max(one.from_first[name] for one in found) for name in first.from_first},
            peak_bytes=first.peak_bytes and max(one.peak_bytes or 0 for one in found),
            starts=tuple(start for one in found for start in one.starts),
        )

    together = zip(*(start.variants for start in starts), strict=True)
    return replace(starts[0], variants=tuple(map(joined, together)))


def case_name(workload: Workload, config: DispatcherConfig, ranks: int) -> str:
    """Describe a case. Two runs compare the cases of the same name."""
    sizes = f"{config.num_experts} experts, top-{config.top_k}, hidden size {config.hidden_size}"
    return f"{sizes}, {ranks} ranks; {workload}"


Saved = dict[str, Any]
"""JSON of a run."""


def load_run(path: Path) -> Saved:
    """Load a file that ``--save`` wrote.

    Raises:
        ConfigError: The file does not exist or has other contents.
    """
    try:
        found: Saved = json.loads(path.read_bytes())
        if isinstance(found, dict) and found.get("format") == FORMAT:
            return found
        told = f"its format is not {FORMAT!r}"
    except OSError as error:
        told = str(error.strerror)
    except ValueError as error:
        told = f"JSON: {error}"
    raise ConfigError(
        f"--against must be a file that compare --save wrote, got {str(path)!r} ({told}). Name such a file."
    )


def measured(run: Saved) -> dict[tuple[str, str, str], Saved]:
    """Return the outcomes of a run that have times, by case, backend and mode."""
    return {
        (case["case"], one["backend"], one["mode"]): one
        for case in run["cases"]
        for one in case["outcomes"]
        if one["starts"]
    }


def against(now: Saved, then: Saved) -> dict[str, Any]:
    """Compare a run with an earlier run, as JSON.

    Each ratio is this run's number divided by the earlier one. The interval is that of the total, over starts.
    """
    facts = {name: (then["machine"].get(name, "not recorded"), value) for name, value in now["machine"].items()}
    before, ratios = measured(then), []
    for key, one in measured(now).items():
        if (old := before.get(key)) is None:
            continue
        sides = [[median(sum(run[:-1]) for run in start) for start in side["starts"]] for side in (one, old)]
        few = min(map(len, sides))
        interval = ratio_interval(*sides) if few >= NEEDED_STARTS else None
        values, old_values = ({**side["milliseconds"], "peak": side["peak_bytes"]} for side in (one, old))
        values["bytes"], old_values["bytes"] = (sum((side["bytes_sent"] or {}).values()) for side in (one, old))
        ratios.append(
            {
                **dict(zip(("case", "backend", "mode"), key, strict=True)),
                "over": {
                    name: value / old_values[name] for name, value in values.items() if value and old_values[name]
                },
                "interval": interval,
                "verdict": verdict_of(interval) if interval else f"cannot say: {few} of {NEEDED_STARTS} starts",
            }
        )
    return {
        "date": then["machine"].get("date"),
        "changed": {name: pair for name, pair in facts.items() if pair[0] != pair[1] and name != "date"},
        "ratios": ratios,
    }
