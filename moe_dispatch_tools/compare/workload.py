"""The workload of ``compare``: rows, a random or recorded routing, and the expected results."""

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
from moe_dispatch_testing.input_layouts import INPUT_LAYOUTS, DeviceKnown, InputLayout
from moe_dispatch_testing.rank_context import Call, make_call
from moe_dispatch_testing.reference import Expected, reference
from moe_dispatch_testing.scenario import Batch, DtypeName, Experts, Scenario
from moe_dispatch_tools.traces import Call as RecordedCall
from moe_dispatch_tools.traces import Part, Trace

# Default number of dispatches from a trace: every backend computes each of them in float64, in every mode.
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
            path: Path of the trace.
            config: Config of this run. Its backend, hidden size, padding and mode may differ from the recorded run.
            ranks: Number of ranks of this run.
            steps: Number of dispatches to use.

        Raises:
            TraceError: The trace cannot be read, lacks ranks or dispatches, or has other sizes. Or its row counts
                differ although the config promises equal row counts.
        """
        trace = Trace.load(path)
        trace.require_whole("compare")
        trace.check_ids("compare")
        if trace.ep_size != ranks:
            raise TraceError(
                f"compare: --ranks must be {trace.ep_size}, as in the trace {path.name}, got {ranks}. Leave out "
                f"--ranks, or start {trace.ep_size} ranks with torchrun."
            )
        trace.check(_without_room(config), ep_size=ranks)
        if not trace.calls:
            raise TraceError(f"compare: {path.name} must hold a dispatch, got none. Record at least one step.")
        if steps > len(trace.calls):
            raise TraceError(
                f"compare: --steps must be at most the {len(trace.calls)} dispatches of {path.name}, got {steps}. "
                "Leave out --steps, or record more dispatches."
            )
        calls = trace.calls[:steps]
        if config.row_counts in ("assume", "check"):
            _check_equal(calls, config.row_counts)
        return cls(calls=calls)

    @property
    def most_tokens(self) -> tuple[int, ...]:
        """Largest number of tokens of each rank in a dispatch."""
        return tuple(
            max(len(real_rows(part)) for part in of_rank)
            for of_rank in zip(*(call.parts for call in self.calls), strict=True)
        )

    @property
    def most_rows(self) -> int:
        """Largest number of rows of any rank in any dispatch."""
        return max(part.num_rows for call in self.calls for part in call.parts)

    def input_layout(self, step: int, rank: int) -> InputLayout:
        """Return the layout of the rows of a rank. If only the device knew it, only the device knows it again."""
        part = self.calls[step].parts[rank]
        return InputLayout(
            layout=part.layout if part.on_host else DeviceKnown(part.layout),
            leading=tuple(part.shape[:-1]),
            real_T=real_rows(part),
        )

    def batch(self, scenario: Scenario, step: int, rank: int) -> Batch:
        """Draw rows and upstream gradients for the recorded ids and weights of the tokens of a rank."""
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
    """Remove the limits of the config on row counts. A comparison makes room for the rows of the trace."""
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
                f'compare: row_counts "{row_counts}" promises that all ranks bring the same number of rows, got '
                f'{", ".join(map(str, counts))} in dispatch {step} of the trace. Set row_counts to "agree".'
            )


# Numbers that the reference holds at a time, in float64 and in several copies.
_REFERENCE_NUMBERS = 2**22


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Workload:
    """Random tokens, the same for every backend, with a random or a recorded routing.

    Attributes:
        tokens: Largest number of tokens of a rank. Ranks 0, 4, 8 have this number; ranks 1, 2 and 3 have 1/8, 2/8 and
            3/8 fewer. Not used with a trace.
        steps: Number of batches, each with its own tokens and routing. With a trace: number of dispatches.
        dtype: Dtype of the rows.
        routing: Name in ``moe_dispatch_testing.scenario.ROUTINGS``; not used with a trace.
        seed: Seed of all data.
        trace: File that ``Trace.record`` wrote. Its dispatches decide ids, weights and layouts.
        recorded: Number of dispatches in the trace.
    """

    tokens: int = 64
    steps: int = 3
    dtype: DtypeName = "bfloat16"
    routing: str = "uniform"
    seed: int = 0
    trace: Path | None = None
    recorded: int = 0

    def scenario(self, config: DispatcherConfig, ranks: int) -> Scenario:
        """Make the scenario of the conformance kit. Row counts are equal if the config promises equal row counts."""
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
    """One batch on one rank, with its expected results. Tensors are made on request, because a trace has many steps."""

    scenario: Scenario
    experts: Experts
    input_layout: InputLayout
    batch: Callable[[], Batch]

    def call(self, device: torch.device) -> Call:
        """Make the tensors of the batch. Its leaves have no gradient yet."""
        return make_call(self.scenario, self.input_layout, (self.batch(),), 0, self.experts).to(str(device))

    def expected(self) -> dict[str, Tensor]:
        """Compute the output and the gradients of this rank by name, in float64.

        Output and gradients have the rows of x; padding rows are 0. "experts" is this rank's part of the gradients.
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
    """The data of a workload on one rank.

    Attributes:
        tokens: Largest number of tokens of each rank in a step.
        most_rows: Largest number of rows of any rank in any step, including padding rows.
    """

    scenario: Scenario
    steps: tuple[Step, ...]
    tokens: tuple[int, ...]
    most_rows: int


def make_material(workload: Workload, config: DispatcherConfig, *, rank: int, ranks: int) -> Material:
    """Make the data of one rank.

    Raises:
        TraceError: The trace cannot be read or does not fit.
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
    """Compute ``reference`` for a few rows at a time, because it holds the outputs of all experts for its rows."""
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
