"""The workload of ``compare``: rows, a random or recorded routing, and the expected results."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
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
# Which experts the tokens of all ranks prefer, bool (T, E), of experts e (E,) and tokens t (T, 1), with k = top_k and w
# hot experts. "Most tokens" are three of four.
WORKLOADS: dict[str, Callable[[Tensor, Tensor, int, int, int], Tensor]] = {
    "W0_balanced": lambda e, t, k, w, step: (e - t * k) % len(e) < k,  # each expert gets equally many rows
    "W1_hot_expert_set": lambda e, t, k, w, step: (_shuffled(e) < w) & (t % 4 > 0),  # most tokens, to drawn places
    "W2_hot_rank": lambda e, t, k, w, step: (e < w) & (t % 4 > 0),  # most tokens, to the first experts
    "W3_spread_hot_experts": lambda e, t, k, w, step: (e % 2 == 0) & (t % 4 > 0),  # most tokens, to every other expert
    "W4_source_ragged": lambda e, t, k, w, step: (e < 0) & (t < 0),  # none; ranks have 1, 3, 5, ... parts of the tokens
    "W5_zero_expert_rank": lambda e, t, k, w, step: (e >= len(e) // 2) & (t >= 0),  # all tokens, to the last half
    "W6_rotating_hotspot": lambda e, t, k, w, step: ((e - step // 3 * w) % len(e) < w) & (t % 4 > 0),  # W2, which moves
    "W7_burst": lambda e, t, k, w, step: (e < w) & (t % 2 == 0) & (step % 4 == 3),  # half of them, in one step of four
}
# Each token names top_k different experts.
PLAIN_ROUTINGS = ("balanced", "uniform", "skewed", "first_half", *WORKLOADS)


def workload_ids(name: str, tokens: int, top_k: int, num_experts: int, step: int) -> Tensor:
    """Draw the experts of the tokens of all ranks, (tokens, top_k). They do not depend on the number of ranks.

    Source: the workloads of the benchmark in Megatron-LM pull request 7488. There, W1 has the hot experts of W2.
    """
    generator, hot = torch.Generator().manual_seed(step), max(top_k, num_experts // 4)
    experts_E, tokens_T1 = torch.arange(num_experts), torch.arange(tokens).unsqueeze(1)
    preferred_TE = WORKLOADS[name](experts_E, tokens_T1, top_k, hot, step)
    scores_TE = torch.rand(tokens, num_experts, generator=generator) + preferred_TE
    return scores_TE.argsort(1, descending=True)[:, :top_k]


def _shuffled(experts_E: Tensor) -> Tensor:
    return experts_E[torch.randperm(len(experts_E), generator=torch.Generator().manual_seed(0))]


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
    room = {"max_tokens_per_rank": None, "graph_safe": False}
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
        routing: Name in ``moe_dispatch_testing.scenario.ROUTINGS`` or in ``WORKLOADS``; not used with a trace. In a
            workload, ranks have ``tokens`` tokens on average.
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
        if self.routing in WORKLOADS and not equal:
            power = 2 if self.routing == "W4_source_ragged" else 1
            ends = (self.tokens * ranks * rank**power // ranks**power for rank in range(ranks + 1))
            counts = [end - begin for begin, end in pairwise(ends)]
        wire = config.wire_options
        return Scenario(
            name="compare",
            tokens=tuple(counts),
            num_experts=config.num_experts,
            top_k=config.top_k,
            hidden=config.hidden_size,
            routing="uniform" if self.routing in WORKLOADS else self.routing,
            dtype=self.dtype,
            pad_multiple=config.pad_multiple_rows,
            weights=config.weights,
            wire_dtype=None if wire is None else wire.dtype,
            grad_wire_dtype=None if wire is None else wire.of_gradients,
        )

    def batch(self, scenario: Scenario, ranks: int, step: int, rank: int) -> Batch:
        """Draw the tokens of a rank in one step."""
        batch, tokens = scenario.batches(ranks, step)[rank], scenario.tokens_of(ranks)
        if self.routing not in WORKLOADS:
            return batch
        ids_TK = workload_ids(self.routing, sum(tokens), scenario.top_k, scenario.num_experts, step)
        return batch.replace(ids_TK=ids_TK.split(tokens)[rank])


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
            steps.append(Step(scenario, experts, layout, partial(workload.batch, scenario, ranks, step, rank)))
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
