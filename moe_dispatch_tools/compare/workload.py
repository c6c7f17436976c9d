"""The workload of ``compare``: rows, a random or recorded routing, and the expected results."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import final

import torch
from torch import Tensor

from moe_dispatch.config import DispatcherConfig
from moe_dispatch_testing.input_layouts import INPUT_LAYOUTS, DeviceKnown, InputLayout
from moe_dispatch_testing.rank_context import LayerCall, make_call
from moe_dispatch_testing.reference import reference
from moe_dispatch_testing.scenario import Batch, DtypeName, Experts, Scenario
from moe_dispatch_tools.traces import Call as RecordedCall
from moe_dispatch_tools.traces import Part, Trace

# Default number of dispatches from a trace: every backend computes each of them in float64, in every mode.
MOST_STEPS = 16
PLAIN_ROUTINGS = ("balanced", "uniform", "skewed", "first_half")  # each token names top_k different experts


def replayed(path: Path, config: DispatcherConfig, *, ranks: int, steps: int) -> tuple[RecordedCall, ...]:
    """Read the first dispatches of a trace.

    Args:
        path: Path of the trace.
        config: Config of this run. Its backend, hidden size, padding and mode may differ from the recorded run.
        ranks: Number of ranks of this run.
        steps: Number of dispatches to use.

    Raises:
        TraceError: The trace cannot be read, lacks ranks or dispatches, or has other sizes.
    """
    trace = Trace.load_whole(path, "compare")
    room = {"max_tokens_per_rank": None, "graph_safe": False, "capacity_factor": "worst", "on_overflow": None}
    trace.check(config.replace(backend="auto", row_counts=None, **room), ep_size=ranks)  # compare makes its own room
    return trace.calls[:steps]


def recorded_batch(scenario: Scenario, part: Part, step: int, rank: int) -> Batch:
    """Draw rows and upstream gradients for the recorded ids and weights of the tokens of a rank."""
    generator = torch.Generator().manual_seed(step * 10_007 + rank)
    real_T = real_rows(part)
    ids_TK, weights_TK = part.routing.topk_ids[real_T], part.routing.topk_weights[real_T].double()
    x_TD, upstream_TD = (
        torch.randn(len(real_T), scenario.hidden, generator=generator, dtype=torch.float64)
        .to(scenario.torch_dtype)
        .double()
        for _ in range(2)
    )
    weights_TK = torch.where(ids_TK < 0, float("nan"), weights_TK)
    return Batch(x_TD=x_TD, ids_TK=ids_TK, weights_TK=weights_TK, upstream_TD=upstream_TD)


def real_rows(part: Part) -> Tensor:
    """Return the indices of the rows that are tokens, int64."""
    valid_T = part.layout.valid_T(part.num_rows)
    return torch.arange(part.num_rows) if valid_T is None else valid_T.nonzero().flatten()


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
        trace: File that ``Trace.record`` wrote. Its dispatches decide ids, weights and layouts.
        recorded: Number of dispatches in the trace.
        equal: Whether all ranks have ``tokens`` tokens.
    """

    tokens: int = 64
    steps: int = 3
    dtype: DtypeName = "bfloat16"
    routing: str = "uniform"
    trace: Path | None = None
    recorded: int = 0
    equal: bool = False

    def __str__(self) -> str:
        if self.trace is None:
            return (
                f"{self.dtype}, {self.routing} routing, {self.tokens} tokens{' each' * self.equal}, {self.steps} steps"
            )
        return f"{self.dtype}, routing of {self.trace}, the first {self.steps} of {self.recorded} dispatches"

    def scenario(self, config: DispatcherConfig, ranks: int) -> Scenario:
        """Make the scenario of the conformance kit. Row counts are equal if the config promises equal row counts."""
        equal = self.equal or config.row_counts in ("assume", "check")
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
            grad_wire_dtype=config.grad_wire_dtype,
        )


@final
@dataclass(frozen=True, slots=True, eq=False)
class Step:
    """One batch on one rank, with its expected results. Tensors are made on request, because a trace has many steps."""

    scenario: Scenario
    experts: Experts
    input_layout: InputLayout
    batch: Callable[[], Batch]

    def call(self, device: torch.device) -> LayerCall:
        """Make the tensors of the batch. Its leaves have no gradient yet."""
        return make_call(self.scenario, self.input_layout, (self.batch(),), 0, self.experts).to(str(device))

    def expected(self) -> dict[str, Tensor]:
        """Compute the output and the gradients of this rank by name, in float64.

        Output and gradients have the rows of x; padding rows are 0. "experts" is this rank's part of the gradients.
        """
        # In parts, because the reference holds the outputs of all experts for its rows.
        rows, batch = max(1, _REFERENCE_NUMBERS // self.experts.bias_ED.numel()), self.batch()
        tables = (table.split(rows) for table in (batch.x_TD, batch.ids_TK, batch.weights_TK, batch.upstream_TD))
        names = ("x_TD", "ids_TK", "weights_TK", "upstream_TD")
        wires = self.scenario.wire_dtype, self.scenario.grad_wire_dtype
        parts = [
            reference(Batch(**dict(zip(names, part, strict=True))), self.experts, *wires)
            for part in zip(*tables, strict=True)
        ]
        gradients = (torch.cat([one.grad_matrix_EWW.flatten(), one.grad_bias_ED.flatten()]) for one in parts)
        return {
            "y": self.input_layout.place(torch.cat([one.y_TD for one in parts]), 0),
            "x": self.input_layout.place(torch.cat([one.grad_x_TD for one in parts]), 0),
            "weights": self.input_layout.place(torch.cat([one.grad_weights_TK for one in parts]), 0),
            "experts": torch.stack(list(gradients)).sum(0),
        }


@final
@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Material:
    """The data of a workload on one rank.

    Attributes:
        tokens: Largest number of tokens of each rank in a step.
        room: ``max_tokens_per_rank`` of the dispatchers: the largest number of rows of any rank in any step, including
            padding rows, and at least 1.
        plain: Whether every row of every rank is a token that names ``top_k`` different experts, as peers need it. Not
            said of a trace.
    """

    scenario: Scenario
    steps: tuple[Step, ...]
    tokens: tuple[int, ...]
    room: int
    plain: bool


def make_material(workload: Workload, config: DispatcherConfig, *, rank: int, ranks: int) -> Material:
    """Make the data of one rank.

    Raises:
        TraceError: The trace cannot be read or does not fit.
    """
    scenario = workload.scenario(config, ranks)
    experts, tokens, steps = scenario.experts(), scenario.tokens_of(ranks), list[Step]()
    if workload.trace is None:
        layout = INPUT_LAYOUTS["rows"](tokens[rank])
        for step in range(workload.steps):
            steps.append(Step(scenario, experts, layout, lambda step=step: scenario.batches(ranks, step)[rank]))  # type: ignore[misc]
        room, plain = max(1, *tokens), min(tokens) > 0 and workload.routing in PLAIN_ROUTINGS
    else:
        calls = replayed(workload.trace, config, ranks=ranks, steps=workload.steps)
        for step, part in enumerate(call.parts[rank] for call in calls):
            known = (
                part.layout if part.on_host else DeviceKnown(part.layout)
            )  # what only the device knew, it knows again
            layout = InputLayout(layout=known, leading=tuple(part.shape[:-1]), real_T=real_rows(part))
            steps.append(Step(scenario, experts, layout, partial(recorded_batch, scenario, part, step, rank)))
        tokens = tuple(max(len(real_rows(call.parts[peer])) for call in calls) for peer in range(ranks))
        room, plain = max(1, *(part.num_rows for call in calls for part in call.parts)), False
    return Material(scenario=scenario, steps=tuple(steps), tokens=tokens, room=room, plain=plain)
