"""What ``compare`` sends through every backend: seeded random tokens, a routing, and what must come of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import final

import torch
from torch import Tensor

from moe_dispatch.backends.base import WireDtype
from moe_dispatch.cli.replay import Replay
from moe_dispatch.config import DispatcherConfig
from moe_dispatch.testing.forms import FORMS, Form
from moe_dispatch.testing.reference import Expected, reference
from moe_dispatch.testing.scenario import Batch, DtypeName, Experts, Scenario
from moe_dispatch.testing.seat import Call, make_call

# Numbers that the reference holds per expert at a time, in float64 and several times over.
_REFERENCE_NUMBERS = 2**22


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Workload:
    """Random tokens, alike for every backend, and where they go: at random, or as a trace says.

    Attributes:
        tokens: of the rank with most; of four ranks one has as many, the others 1/8, 2/8, 3/8 fewer. Of a trace its
            own.
        steps: batches, each with tokens and a routing of its own; of a trace its first dispatches.
        dtype: of the rows.
        routing: a name of ``moe_dispatch.testing.routings.ROUTINGS``, where there is no trace.
        seed: of all data.
        trace: what ``Trace.record`` wrote: ids, weights and layouts are those of its dispatches.
        recorded: how many dispatches it has.
    """

    tokens: int = 64
    steps: int = 3
    dtype: DtypeName = "bfloat16"
    routing: str = "uniform"
    seed: int = 0
    trace: Path | None = None
    recorded: int = 0

    def scenario(self, config: DispatcherConfig, ranks: int) -> Scenario:
        """The workload as the conformance kit describes one. Counts are equal where the config promises that."""
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
    """One batch on one rank, and what must come of it. Its tensors are made when asked for: a trace has many steps."""

    scenario: Scenario
    experts: Experts
    form: Form
    batch: Callable[[], Batch]

    def call(self, device: torch.device) -> Call:
        """Its tensors, with leaves that have no gradient yet."""
        return make_call(self.scenario, self.form, (self.batch(),), 0, self.experts).to(str(device))

    def expected(self) -> dict[str, Tensor]:
        """By name: this rank's output and gradients, and its part of the experts' gradients; float64.

        The output and gradients of rows are in rows of x; those that are no tokens have zeros.
        """
        found = expect_in_parts(self.batch(), self.experts, self.scenario.wire_dtype)
        return {
            "y": self.form.place(found.y_TD, 0),
            "x": self.form.place(found.grad_x_TD, 0),
            "weights": self.form.place(found.grad_weights_TK, 0),
            "experts": torch.cat([found.grad_matrix_EWW.flatten(), found.grad_bias_ED.flatten()]),
        }


@final
@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Material:
    """A workload on one rank.

    Attributes:
        tokens: of each rank in the step where it has most.
        most_rows: that any rank brings to any step, those that are no tokens included.
    """

    scenario: Scenario
    steps: tuple[Step, ...]
    tokens: tuple[int, ...]
    most_rows: int


def make_material(workload: Workload, config: DispatcherConfig, *, rank: int, ranks: int) -> Material:
    """What one rank is to send.

    Raises:
        TraceError: a trace that cannot be read, or does not fit.
    """
    scenario = workload.scenario(config, ranks)
    if workload.trace is None:
        tokens = scenario.tokens_of(ranks)
        form = FORMS["rows"](tokens[rank])
        batches = [partial(_random_batch, scenario, rank, ranks, step) for step in range(workload.steps)]
        steps = tuple(_step(scenario, form, batch) for batch in batches)
        return Material(scenario=scenario, steps=steps, tokens=tokens, most_rows=max(tokens))
    replay = Replay.load(workload.trace, config, ranks=ranks, steps=workload.steps)
    return Material(
        scenario=scenario,
        steps=tuple(
            _step(scenario, replay.form(step, rank), partial(replay.batch, scenario, step, rank))
            for step in range(workload.steps)
        ),
        tokens=replay.most_tokens,
        most_rows=replay.most_rows,
    )


def _random_batch(scenario: Scenario, rank: int, ranks: int, step: int) -> Batch:
    return scenario.batches(ranks, step)[rank]


def _step(scenario: Scenario, form: Form, batch: Callable[[], Batch]) -> Step:
    return Step(scenario=scenario, experts=scenario.experts(), form=form, batch=batch)


def expect_in_parts(batch: Batch, experts: Experts, wire: WireDtype | None) -> Expected:
    """``reference``, some rows at a time: it holds every expert's outputs for all of them."""
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
