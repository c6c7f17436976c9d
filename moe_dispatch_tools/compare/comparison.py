"""The task of ``compare`` and its outcomes, as plain data for tables and for JSON."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from typing import Any, final

from moe_dispatch.config import DispatcherConfig
from moe_dispatch_tools.compare.load import Load
from moe_dispatch_tools.compare.workload import Workload
from moe_dispatch_tools.names import NamedBackend

MODES = ("eager", "graph-safe")
QUANTITIES = ("y", "x", "weights", "experts")


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Variant:
    """One backend in one mode."""

    backend: NamedBackend
    mode: str

    def config(self, base: DispatcherConfig, max_tokens: int) -> DispatcherConfig:
        """Make the config of this variant. In graph-safe mode, its buffers fit the worst possible routing.

        Raises:
            ConfigError, BackendUnavailableError: The backend has no such options, or cannot be loaded.
        """
        graph_safe = self.mode == "graph-safe"
        return base.replace(
            backend=self.backend.spec(),
            graph_safe=graph_safe,
            row_counts=None if graph_safe else base.row_counts,
            max_tokens_per_rank=max_tokens,
            capacity_factor="worst",
            on_overflow=None,
            **self.backend.fields,
        )


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """The task of one comparison.

    Attributes:
        config: Config without options of a backend.
        variants: Pairs of a backend and a mode.
        workload: Tokens and routing.
        explicit: Whether the user named the backends. A named backend that cannot run is a failure.
        tolerance: Largest allowed difference from the reference; None for the tolerance of the dtype.
        expert_width: Width of the experts whose time is measured if experts are placed; None for twice the hidden size.
    """

    config: DispatcherConfig
    variants: tuple[Variant, ...]
    workload: Workload
    explicit: bool = True
    tolerance: float | None = None
    expert_width: int | None = None

    @property
    def places_experts(self) -> bool:
        """Whether any variant has spare expert slots. Loads and the time of experts are then measured."""
        return any(
            one.backend.fields.get("spare_experts_per_rank", self.config.spare_experts_per_rank)
            for one in self.variants
        )

    @property
    def width(self) -> int:
        """Width of the timed experts."""
        return self.expert_width or 2 * self.config.hidden_size


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """The outcome of one variant. A difference is the largest of all steps and ranks. A cost is that of one step.

    Attributes:
        refused: Why the variant could not run. Then all other attributes are empty.
        emulated: Whether its library is an emulation. Bytes and times of an emulation say nothing about the library.
        from_reference: Largest difference from the dense float64 reference by name in ``QUANTITIES``, divided by the
            largest value.
        from_first: Largest difference from the first variant that ran, divided by the largest value.
        bytes_sent: Bytes of the collectives of torch.distributed, sum of all ranks, mean of all steps. None if another
            library sends the rows.
        row_dtypes: Names of the dtypes of the rows on the wire, dispatch first; "unknown" if the backend cannot say.
        rows_padded: Padding rows by cause, sum of all ranks, mean of all steps.
        host_syncs: Host syncs of rank 0 in the first step, including the plan; None for an emulation.
        milliseconds: Median time of plan, dispatch, combine and backward on the slowest rank. Experts cost nothing.
        time_ratio: ``milliseconds``, divided by ``milliseconds`` of the first variant that ran.
        predicted: Load of the ranks, predicted from the routing; None if no variant has spare expert slots.
        measured: The same, measured.
        busiest_ms: Milliseconds of the busiest rank in a step with experts, as in ``Times``; None as above, and for an
            emulation.
        busiest_ratio: ``busiest_ms``, divided by that of the first variant that ran.
    """

    backend: str
    mode: str
    refused: str | None = None
    emulated: bool = False
    from_reference: dict[str, float] = field(default_factory=dict)
    from_first: dict[str, float] = field(default_factory=dict)
    bytes_sent: float | None = None
    row_dtypes: str = ""
    rows_padded: dict[str, float] = field(default_factory=dict)
    host_syncs: int | None = None
    milliseconds: float | None = None
    time_ratio: float | None = None
    predicted: Load | None = None
    measured: Load | None = None
    busiest_ms: float | None = None
    busiest_ratio: float | None = None

    def agrees(self, tolerance: float) -> bool:
        """Return whether it ran and differs from the reference by at most the tolerance. NaN does not agree."""
        return self.refused is None and all(value <= tolerance for value in self.from_reference.values())


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """All outcomes of a task.

    Attributes:
        tolerance: Largest allowed value in ``from_reference``.
        transport: "nccl" or "gloo".
        tokens: Largest number of tokens of each rank in a step.
        most_rows: Largest number of rows of any rank in any step: ``max_tokens_per_rank`` of the dispatchers.
        tokens_per_expert: Rows at experts divided by the number of experts, mean of all steps.
        flop_per_byte: FLOP of the experts in the time of one byte between ranks, measured; None if it was not.
    """

    task: Task
    tolerance: float
    transport: str
    tokens: tuple[int, ...]
    most_rows: int
    outcomes: tuple[Outcome, ...]
    tokens_per_expert: float = 0.0
    flop_per_byte: float | None = None

    @property
    def passes(self) -> bool:
        """Whether at least one variant ran, all of these agree, and every named backend ran in at least one mode."""
        ran = [outcome for outcome in self.outcomes if outcome.refused is None]
        missing = {outcome.backend for outcome in self.outcomes} - {outcome.backend for outcome in ran}
        return bool(ran) and all(map(self.agrees, ran)) and not (self.task.explicit and missing)

    @property
    def notes(self) -> tuple[str, ...]:
        """Sentences about differences between the dispatchers and the config, with the reasons."""
        config, notes = self.task.config, []
        if config.capacity_factor != "worst" and any(one.mode == "graph-safe" for one in self.outcomes):
            notes.append(
                'graph-safe mode runs with capacity_factor "worst" instead of '
                f"{config.capacity_factor:g}, because dropped rows would change the results"
            )
        if config.max_tokens_per_rank not in (None, self.most_rows):
            notes.append(
                f"max_tokens_per_rank is {self.most_rows}, the rows of this comparison, instead of "
                f"{config.max_tokens_per_rank}"
            )
        return tuple(notes)

    def agrees(self, outcome: Outcome) -> bool:
        """Return whether an outcome is within the tolerance."""
        return outcome.agrees(self.tolerance)

    def document(self) -> dict[str, Any]:
        """Convert to JSON. A difference that is not finite becomes null."""
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
            "tokens_per_expert": self.tokens_per_expert,
            "flop_per_byte": self.flop_per_byte,
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
            "row_dtypes": outcome.row_dtypes,
            "rows_padded": outcome.rows_padded,
            "host_syncs": outcome.host_syncs,
            "milliseconds": outcome.milliseconds,
            "time_ratio": outcome.time_ratio,
            "predicted": outcome.predicted and asdict(outcome.predicted),
            "measured": outcome.measured and asdict(outcome.measured),
            "busiest_ms": outcome.busiest_ms,
            "busiest_ratio": outcome.busiest_ratio,
        }


def _finite(values: dict[str, float]) -> dict[str, float | None]:
    return {name: value if math.isfinite(value) else None for name, value in values.items()}
