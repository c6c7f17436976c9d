"""The task of ``compare`` and its outcomes: plain data, for people and for JSON."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, final

from moe_dispatch.cli.compare.workload import Workload
from moe_dispatch.cli.names import NamedBackend
from moe_dispatch.config import DispatcherConfig

MODES = ("eager", "graph-safe")
QUANTITIES = ("y", "x", "weights", "experts")


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Variant:
    """One backend in one mode."""

    backend: NamedBackend
    mode: str

    def config(self, base: DispatcherConfig, max_tokens: int) -> DispatcherConfig:
        """Make its config from ``base`` with this backend and mode; graph-safe mode has room for the worst routing.

        Raises:
            ConfigError, BackendUnavailableError: the backend has no such options, or cannot be loaded.
        """
        graph_safe = self.mode == "graph-safe"
        return base.replace(
            backend=self.backend.spec(),
            graph_safe=graph_safe,
            row_counts=None if graph_safe else base.row_counts,
            max_tokens_per_rank=max_tokens,
            capacity_factor="worst",
            on_overflow=None,
        )


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """What to compare.

    Attributes:
        config: config without options of a backend.
        variants: backends in modes.
        workload: tokens and routing.
        explicit: whether the backends were named; then a backend that cannot run is a failure.
        tolerance: largest difference from the reference; None for the tolerance of the dtype.
    """

    config: DispatcherConfig
    variants: tuple[Variant, ...]
    workload: Workload
    explicit: bool = True
    tolerance: float | None = None


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """The outcome of one variant. Differences are the largest of all steps and ranks; costs are those of one step.

    Attributes:
        refused: why the variant could not run; then the rest is empty.
        emulated: whether its library is an emulation, whose bytes and times say nothing of the real library.
        from_reference: largest difference of ``QUANTITIES`` from the dense float64 reference, over the largest value.
        from_first: largest difference from the first variant that ran, over the largest value.
        bytes_sent: bytes of torch.distributed's collectives, all ranks together, mean of all steps; None if the
            backend sends by a library of its own.
        rows_padded: rows without a token by cause, all ranks together, mean of all steps.
        host_syncs: host syncs of rank 0 in the first step, with those of the plan; None for an emulation.
        milliseconds: median of plan, dispatch, combine and backward around experts that cost nothing; slowest rank.
        time_ratio: ``milliseconds`` over those of the first variant that ran.
    """

    backend: str
    mode: str
    refused: str | None = None
    emulated: bool = False
    from_reference: dict[str, float] = field(default_factory=dict)
    from_first: dict[str, float] = field(default_factory=dict)
    bytes_sent: float | None = None
    rows_padded: dict[str, float] = field(default_factory=dict)
    host_syncs: int | None = None
    milliseconds: float | None = None
    time_ratio: float | None = None

    def agrees(self, tolerance: float) -> bool:
        """Whether it ran and is as near to the reference as the tolerance; NaN is not near."""
        return self.refused is None and all(value <= tolerance for value in self.from_reference.values())


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """All outcomes.

    Attributes:
        tolerance: largest difference that ``from_reference`` may have.
        transport: "nccl" or "gloo".
        tokens: tokens of each rank, in the step where it has most.
        most_rows: most rows that any rank brings to any step: the dispatchers' ``max_tokens_per_rank``.
    """

    task: Task
    tolerance: float
    transport: str
    tokens: tuple[int, ...]
    most_rows: int
    outcomes: tuple[Outcome, ...]

    @property
    def passes(self) -> bool:
        """Whether something ran, all that ran agrees, and every named backend ran in some mode."""
        ran = [outcome for outcome in self.outcomes if outcome.refused is None]
        missing = {outcome.backend for outcome in self.outcomes} - {outcome.backend for outcome in ran}
        return bool(ran) and all(map(self.agrees, ran)) and not (self.task.explicit and missing)

    @property
    def notes(self) -> tuple[str, ...]:
        """Say where the dispatchers differ from the config, and why."""
        config, notes = self.task.config, []
        if config.capacity_factor != "worst" and any(one.mode == "graph-safe" for one in self.outcomes):
            notes.append(
                f'graph-safe with capacity_factor "worst", not the config\'s {config.capacity_factor:g}: without the '
                "rows that it drops, results are none to be held against the reference"
            )
        if config.max_tokens_per_rank not in (None, self.most_rows):
            notes.append(
                f"max_tokens_per_rank is {self.most_rows}, what is sent here, not the config's "
                f"{config.max_tokens_per_rank}"
            )
        return tuple(notes)

    def agrees(self, outcome: Outcome) -> bool:
        """Whether an outcome is within the tolerance."""
        return outcome.agrees(self.tolerance)

    def document(self) -> dict[str, Any]:
        """Convert to JSON; a difference that is not finite becomes null."""
        workload = self.task.workload
        return {
            "agree": self.passes,
            "tolerance": self.tolerance,
            "ranks": len(self.tokens),
            "transport": self.transport,
            "tokens": list(self.tokens),
            "steps": workload.steps,
            "dtype": workload.dtype,
            "routing": workload.routing if workload.trace is None else None,
            "trace": workload.trace and {"file": str(workload.trace), "dispatches": workload.recorded},
            "notes": list(self.notes),
            "config": self.task.config.model_dump(mode="json", exclude={"backend"}),
            "outcomes": [self._described(outcome) for outcome in self.outcomes],
        }

    def _described(self, outcome: Outcome) -> dict[str, Any]:
        return {
            "backend": outcome.backend,
            "mode": outcome.mode,
            "refused": outcome.refused,
            "agrees": self.agrees(outcome),
            "emulated": outcome.emulated,
            "from_reference": _finite(outcome.from_reference),
            "from_first": _finite(outcome.from_first),
            "bytes_sent": outcome.bytes_sent,
            "rows_padded": outcome.rows_padded,
            "host_syncs": outcome.host_syncs,
            "milliseconds": outcome.milliseconds,
            "time_ratio": outcome.time_ratio,
        }


def _finite(values: dict[str, float]) -> dict[str, float | None]:
    return {name: value if math.isfinite(value) else None for name, value in values.items()}
