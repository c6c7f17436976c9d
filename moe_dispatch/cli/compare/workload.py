"""What ``compare`` sends through every backend: rows, a routing at random or of a trace, and the expected results."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import final

import torch
from torch import Tensor

from moe_dispatch.backends.base import WireDtype
from moe_dispatch.config import DispatcherConfig
from moe_dispatch.errors import TraceError
from moe_dispatch.testing.input_layouts import INPUT_LAYOUTS, DeviceKnown, InputLayout
from moe_dispatch.testing.rank_context import Call, make_call
from moe_dispatch.testing.reference import Expected, reference
from moe_dispatch.testing.scenario import Batch, DtypeName, Experts, Scenario
from moe_dispatch.traces import Call as RecordedCall
from moe_dispatch.traces import Part, Trace

# Dispatches that are taken of a trace by default: every backend computes each of them in float64, in every mode.
MOST_STEPS = 16


@final
@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Replay:
    """The first dispatches of a trace that fits a config."""

    calls: tuple[RecordedCall, ...]

    @classmethod
    def load(cls, path: Path, config: DispatcherConfig, *, ranks: int, steps: int) -> Replay:
        """Read the trace.

        Args:
            path: path of the trace.
            config: config that runs it. Backend, hidden size, padding and mode may be others than those recorded.
            ranks: number of ranks that run it.
            steps: number of dispatches to take.

        Raises:
            TraceError: the trace cannot be read, lacks ranks or dispatches, or has other sizes; or its row counts
                differ although the config promises that they are equal.
        """
        trace = Trace.load(path)
        trace.require_whole("compare")
        trace.check_ids("compare")
        if trace.ep_size != ranks:
            raise TraceError(
                f"compare: --ranks must be that of the trace {path.name}, {trace.ep_size}, got {ranks}. Leave --ranks "
                "out, or have torchrun start as many."
            )
        trace.check(_without_room(config), ep_size=ranks)
        if not trace.calls:
            raise TraceError(f"compare: {path.name} must hold a dispatch, got none. Record at least one step.")
        if steps > len(trace.calls):
            raise TraceError(
                f"compare: --steps must be at most the {len(trace.calls)} dispatches of {path.name}, got {steps}. "
                "Leave --steps out, or record more."
            )
        calls = trace.calls[:steps]
        if config.row_counts in ("assume", "check"):
            _check_equal(calls, config.row_counts)
        return cls(calls=calls)

    @property
    def most_tokens(self) -> tuple[int, ...]:
        """Tokens of each rank, in the dispatch where it has most."""
        return tuple(
            max(len(real_rows(part)) for part in of_rank)
            for of_rank in zip(*(call.parts for call in self.calls), strict=True)
        )

    @property
    def most_rows(self) -> int:
        """Most rows that any rank brings to any dispatch."""
        return max(part.num_rows for call in self.calls for part in call.parts)

    def input_layout(self, step: int, rank: int) -> InputLayout:
        """Layout of a rank's rows. A layout that only the device knew is again known to the device only."""
        part = self.calls[step].parts[rank]
        return InputLayout(
            layout=part.layout if part.on_host else DeviceKnown(part.layout),
            leading=tuple(part.shape[:-1]),
            real_T=real_rows(part),
        )

    def batch(self, scenario: Scenario, step: int, rank: int) -> Batch:
        """Draw rows and upstream gradients for the recorded ids and weights of a rank's tokens."""
        part = self.calls[step].parts[rank]
        generator = torch.Generator().manual_seed(scenario.seed * 10_000_019 + step * 10_007 + rank)
        real_T = real_rows(part)
        ids_TK, weights_TK = part.routing.topk_ids[real_T], part.routing.topk_weights[real_T].double()

        def normal() -> Tensor:
            values = torch.randn(len(real_T), scenario.hidden, generator=generator, dtype=torch.float64)
            return values.to(scenario.torch_dtype).double()

        return Batch(
            x_TD=normal(),
            ids_TK=ids_TK,
            weights_TK=torch.where(ids_TK < 0, float("nan"), weights_TK),
            upstream_TD=normal(),
        )


def real_rows(part: Part) -> Tensor:
    """Return the indices of the rows that are tokens, int64."""
    valid_T = part.layout.valid_T(part.num_rows)
    return torch.arange(part.num_rows) if valid_T is None else valid_T.nonzero().flatten()


def _without_room(config: DispatcherConfig) -> DispatcherConfig:
    """Remove the number of rows that the config was made for: a comparison makes room for those of the trace."""
    return config.replace(
        backend="auto",
        row_counts=None,
        max_tokens_per_rank=None,
        graph_safe=False,
        capacity_factor="worst",
        on_overflow=None,
    )


def _check_equal(calls: tuple[RecordedCall, ...], row_counts: str) -> None:
    for step, call in enumerate(calls):
        counts = [len(real_rows(part)) if part.on_host else part.num_rows for part in call.parts]
        if len(set(counts)) > 1:
            raise TraceError(
                f'compare: row_counts "{row_counts}" promises that all ranks bring as many rows, got '
                f'{", ".join(map(str, counts))} in dispatch {step} of the trace. Set row_counts to "agree".'
            )


# Numbers that the reference holds per expert at a time, in float64 and several times.
_REFERENCE_NUMBERS = 2**22


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Workload:
    """Random tokens, the same for every backend, and their routing: random or of a trace.

    Attributes:
        tokens: tokens of the rank with most. Of four ranks one has as many, the others 1/8, 2/8 and 3/8 fewer. Not used
            with a trace.
        steps: number of batches, each with tokens and a routing of its own; of a trace its first dispatches.
        dtype: dtype of the rows.
        routing: name in ``moe_dispatch.testing.scenario.ROUTINGS``; not used with a trace.
        seed: seed of all data.
        trace: file that ``Trace.record`` wrote. Ids, weights and layouts are those of its dispatches.
        recorded: number of dispatches in the trace.
    """

    tokens: int = 64
    steps: int = 3
    dtype: DtypeName = "bfloat16"
    routing: str = "uniform"
    seed: int = 0
    trace: Path | None = None
    recorded: int = 0

    def scenario(self, config: DispatcherConfig, ranks: int) -> Scenario:
        """Describe the workload as the conformance kit does. Counts are equal if the config promises that."""
        equal = config.row_counts in ("assume", "check")
        counts = [self.tokens - (0 if equal else rank % 4 * (self.tokens // 8)) for rank in range(ranks)]
        return Scenario(
            name="compare",
            tokens=tuple(counts),
            num_experts=config.num_experts,
            top_k=config.top_k,
            hidden=config.hidden_size,
            routing=self.routing,
            dtype=self.dtype,
            pad_multiple=config.pad_multiple_rows,
            weights=config.weights,
            wire_dtype=config.wire_dtype,
            seed=self.seed,
        )


@final
@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Step:
    """One batch on one rank and its expected results. Tensors are made when asked for: a trace has many steps."""

    scenario: Scenario
    experts: Experts
    input_layout: InputLayout
    batch: Callable[[], Batch]

    def call(self, device: torch.device) -> Call:
        """Make the tensors of the batch, with leaves that have no gradient yet."""
        return make_call(self.scenario, self.input_layout, (self.batch(),), 0, self.experts).to(str(device))

    def expected(self) -> dict[str, Tensor]:
        """Compute this rank's output and gradients, and its part of the experts' gradients, by name; float64.

        Output and gradients have the rows of x, with zeros in rows that are no tokens.
        """
        found = expect_in_parts(self.batch(), self.experts, self.scenario.wire_dtype)
        return {
            "y": self.input_layout.place(found.y_TD, 0),
            "x": self.input_layout.place(found.grad_x_TD, 0),
            "weights": self.input_layout.place(found.grad_weights_TK, 0),
            "experts": torch.cat([found.grad_matrix_EWW.flatten(), found.grad_bias_ED.flatten()]),
        }


@final
@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Material:
    """A workload on one rank.

    Attributes:
        tokens: tokens of each rank in the step where it has most.
        most_rows: most rows that any rank brings to any step, including rows that are no tokens.
    """

    scenario: Scenario
    steps: tuple[Step, ...]
    tokens: tuple[int, ...]
    most_rows: int


def make_material(workload: Workload, config: DispatcherConfig, *, rank: int, ranks: int) -> Material:
    """Make what one rank sends.

    Raises:
        TraceError: the trace cannot be read or does not fit.
    """
    scenario = workload.scenario(config, ranks)
    if workload.trace is None:
        tokens = scenario.tokens_of(ranks)
        input_layout = INPUT_LAYOUTS["rows"](tokens[rank])
        batches = [partial(_random_batch, scenario, rank, ranks, step) for step in range(workload.steps)]
        steps = tuple(_step(scenario, input_layout, batch) for batch in batches)
        return Material(scenario=scenario, steps=steps, tokens=tokens, most_rows=max(tokens))
    replay = Replay.load(workload.trace, config, ranks=ranks, steps=workload.steps)
    return Material(
        scenario=scenario,
        steps=tuple(
            _step(scenario, replay.input_layout(step, rank), partial(replay.batch, scenario, step, rank))
            for step in range(workload.steps)
        ),
        tokens=replay.most_tokens,
        most_rows=replay.most_rows,
    )


def _random_batch(scenario: Scenario, rank: int, ranks: int, step: int) -> Batch:
    return scenario.batches(ranks, step)[rank]


def _step(scenario: Scenario, input_layout: InputLayout, batch: Callable[[], Batch]) -> Step:
    return Step(scenario=scenario, experts=scenario.experts(), input_layout=input_layout, batch=batch)


def expect_in_parts(batch: Batch, experts: Experts, wire: WireDtype | None) -> Expected:
    """Compute ``reference`` for some rows at a time: it holds every expert's outputs for all rows it is given."""
    rows = max(1, _REFERENCE_NUMBERS // experts.bias_ED.numel())
    tables = (batch.x_TD, batch.ids_TK, batch.weights_TK, batch.upstream_TD)
    parts = [
        reference(Batch(x_TD=x_TD, ids_TK=ids_TK, weights_TK=weights_TK, upstream_TD=upstream_TD), experts, wire)
        for x_TD, ids_TK, weights_TK, upstream_TD in zip(*(table.split(rows) for table in tables), strict=True)
    ]
    return Expected(
        y_TD=torch.cat([part.y_TD for part in parts]),
        grad_x_TD=torch.cat([part.grad_x_TD for part in parts]),
        grad_weights_TK=torch.cat([part.grad_weights_TK for part in parts]),
        grad_matrix_EWW=torch.stack([part.grad_matrix_EWW for part in parts]).sum(0),
        grad_bias_ED=torch.stack([part.grad_bias_ED for part in parts]).sum(0),
    )
