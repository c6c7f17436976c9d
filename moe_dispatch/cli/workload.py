"""What ``compare`` sends through every backend: seeded random tokens and routing, and what must come of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from moe_dispatch.backends.base import WireDtype
from moe_dispatch.config import DispatcherConfig
from moe_dispatch.testing.forms import FORMS
from moe_dispatch.testing.reference import Expected, reference
from moe_dispatch.testing.scenario import Batch, DtypeName, Experts, Scenario
from moe_dispatch.testing.seat import Call, make_call

# Numbers that the reference holds per expert at a time, in float64 and several times over.
_REFERENCE_NUMBERS = 2**22


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Workload:
    """Random tokens, alike for every backend.

    Attributes:
        tokens: of the rank with most; of four ranks one has as many, the others 1/8, 2/8, 3/8 fewer.
        steps: batches, each with tokens and a routing of its own.
        dtype: of the rows.
        routing: a name of ``moe_dispatch.testing.routings.ROUTINGS``.
        seed: of all data.
    """

    tokens: int = 64
    steps: int = 3
    dtype: DtypeName = "bfloat16"
    routing: str = "uniform"
    seed: int = 0

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
    """One batch on one rank, and what must come of it."""

    scenario: Scenario
    batches: tuple[Batch, ...]
    experts: Experts
    rank: int

    def call(self, device: torch.device) -> Call:
        """Its tensors, with leaves that have no gradient yet."""
        form = FORMS["rows"](len(self.batches[self.rank].x_TD))
        return make_call(self.scenario, form, self.batches, self.rank, self.experts).to(str(device))

    def expected(self) -> dict[str, Tensor]:
        """By name: this rank's output and gradients, and its part of the experts' gradients; float64."""
        found = expect_in_parts(self.batches[self.rank], self.experts, self.scenario.wire_dtype)
        return {
            "y": found.y_TD,
            "x": found.grad_x_TD,
            "weights": found.grad_weights_TK,
            "experts": torch.cat([found.grad_matrix_EWW.flatten(), found.grad_bias_ED.flatten()]),
        }


def make_step(scenario: Scenario, step: int, *, rank: int, ranks: int) -> Step:
    """Batch number ``step``."""
    return Step(scenario=scenario, batches=scenario.batches(ranks, step), experts=scenario.experts(), rank=rank)


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
