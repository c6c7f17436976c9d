"""Scenarios of the conformance kit: frozen descriptions, and the tensors that each scenario draws from its seed.

Names of tensors end in the dimensions that ``moe_dispatch.types`` lists. W is the width of an expert's matrix. Tensors
of this file are float64 and hold only real tokens, without padding.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, Literal, final

import torch
from torch import Tensor

from moe_dispatch.backends import Constraints, MoEShape
from moe_dispatch.config import RowCounts
from moe_dispatch.permutation import round_up
from moe_dispatch_testing.input_layouts import INPUT_LAYOUTS

if TYPE_CHECKING:
    from moe_dispatch.balance import ExpertPlacement

_EXPERT_WIDTH = 32

DtypeName = Literal["float64", "float32", "bfloat16", "float16"]

# Largest allowed difference, relative to the largest expected value of the same tensor. The experts of the kit compute
# in float64. So only rows and sums are rounded, which costs a few units in the last place.
TOLERANCES: dict[DtypeName, float] = {"float64": 1e-12, "float32": 2e-6, "bfloat16": 2e-2, "float16": 3e-3}

# A function that draws the expert ids of a batch: (rows, top_k, num_experts, generator) -> ids (rows, top_k).
Draw = Callable[[int, int, int, torch.Generator], Tensor]


def balanced(rows: int, top_k: int, num_experts: int, generator: torch.Generator) -> Tensor:
    """Send each slot to the next expert, so that the numbers of rows of two experts differ by one at most."""
    return torch.arange(rows * top_k).view(rows, top_k) % num_experts


def uniform(rows: int, top_k: int, num_experts: int, generator: torch.Generator) -> Tensor:
    """Draw distinct experts for each row, all equally likely."""
    return torch.rand(rows, num_experts, generator=generator).argsort(1)[:, :top_k]


def skewed(rows: int, top_k: int, num_experts: int, generator: torch.Generator) -> Tensor:
    """Draw distinct experts for each row. The first expert is drawn far more often than the last."""
    odds = torch.arange(1, num_experts + 1).double().pow(-2).expand(rows, -1)
    return torch.multinomial(odds, top_k, generator=generator) if rows else torch.empty(0, top_k, dtype=torch.int64)


def last_expert(rows: int, top_k: int, num_experts: int, generator: torch.Generator) -> Tensor:
    """Send every row to the last expert. All slots but the first are -1."""
    ids = torch.full((rows, top_k), -1)
    ids[:, 0] = num_experts - 1
    return ids


def first_half(rows: int, top_k: int, num_experts: int, generator: torch.Generator) -> Tensor:
    """Draw distinct experts from the first half. If there are several ranks, half of them receive nothing."""
    return uniform(rows, top_k, num_experts // 2, generator)


def duplicates(rows: int, top_k: int, num_experts: int, generator: torch.Generator) -> Tensor:
    """Draw experts with replacement. Every other row names its first expert in all slots."""
    ids = torch.randint(num_experts, (rows, top_k), generator=generator)
    ids[::2] = ids[::2, :1]
    return ids


def nowhere(rows: int, top_k: int, num_experts: int, generator: torch.Generator) -> Tensor:
    """Set every slot to -1."""
    return torch.full((rows, top_k), -1)


def partly_nowhere(rows: int, top_k: int, num_experts: int, generator: torch.Generator) -> Tensor:
    """Draw distinct experts, then set a third of the slots, and every fourth row, to -1."""
    ids = uniform(rows, top_k, num_experts, generator)
    ids[torch.rand(rows, top_k, generator=generator) < 1 / 3] = -1
    ids[::4] = -1
    return ids


ROUTINGS: dict[str, Draw] = {
    draw.__name__: draw
    for draw in (balanced, uniform, skewed, last_expert, first_half, duplicates, nowhere, partly_nowhere)
}


@final
@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Batch:
    """Tokens of one rank in one call: x (T, D), ids (T, K), weights (T, K), and the gradient of the output y (T, D).

    A weight is NaN where the id is -1, because nothing may read it.
    """

    x_TD: Tensor
    ids_TK: Tensor
    weights_TK: Tensor
    upstream_TD: Tensor

    def replace(self, **changes: Tensor) -> Batch:
        """Return a copy with some tensors changed."""
        return dataclasses.replace(self, **changes)


@final
@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Experts:
    """Parameters of all experts, (E, W, W) and (E, D). Experts differ, so a row at a wrong expert gives a wrong result.

    A matrix maps W columns at a time, because D by D matrices would take most of the kit's time and memory.
    """

    matrix_EWW: Tensor
    bias_ED: Tensor

    def apply(self, expert: int, rows_ND: Tensor) -> Tensor:
        """Apply one expert to rows, in float64. A row of zeros does not stay zero."""
        matrix_WW = self.matrix_EWW[expert].double()
        mixed = rows_ND.double().unflatten(1, (-1, len(matrix_WW))) @ matrix_WW
        return torch.tanh(mixed.flatten(1) + self.bias_ED[expert].double())

    def leaves(self) -> Experts:
        """Return a copy whose tensors collect gradients."""
        return Experts(
            matrix_EWW=self.matrix_EWW.clone().requires_grad_(), bias_ED=self.bias_ED.clone().requires_grad_()
        )


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Scenario:
    """One situation that a backend must handle correctly.

    Attributes:
        name: Id in test names and in the list of excuses.
        tokens: Number of real tokens by rank. A group of P ranks uses the last P entries. If there are fewer than P,
            the entries are repeated.
        num_experts: Number of experts of the whole group.
        top_k: Number of slots of a token.
        hidden: Number of columns of x.
        routing: Name in ``ROUTINGS``.
        dtype: Dtype of x.
        pad_multiple: The rows of each expert are padded to a multiple of this number.
        weights: Whether combine or the experts multiply by the weights.
        wire_dtype: Dtype in which rows travel.
        grad_wire_dtype: ``wire_dtype`` if gradient rows of combine travel in it, too.
        deliver: Form in which experts get rows, as ``wire.deliver`` in the config.
        schedule: Name in ``SCHEDULES``, which gives the order of the calls.
        row_counts: Policies of row counts. The scenario runs under each of them.
        input_layouts: Names in ``INPUT_LAYOUTS``, or "all". The default names three layouts. In the first every row is
            a token. In the second the dispatcher cuts the rows without a token. In the third it masks them.
        requires_grad: Which of "x" and "weights" collect gradients. The parameters of experts always collect them.
        spare: Number of spare expert slots of a rank. If it is not 0, a random placement with copies is in force.
        inference: Whether the case runs under ``torch.inference_mode``.
        poisons_padding: Whether experts write NaN to padding rows of their output and of their input's gradient.
        chunk_tokens: Value of ``chunks.tokens`` in the config, for the schedule "in_chunks".
        chunk_recompute: Value of ``chunks.recompute`` in the config.
        skips_empty: Whether experts that received no row return a new tensor without autograd history.
        debug: Value of ``debug`` in the config.
        graph_safe: Value of ``graph_safe`` in the config. If True, a host sync in a call or in the backward is an
            error.
        seed: Seed of all data.
    """

    name: str
    tokens: tuple[int, ...] = (9, 6, 13, 10)
    num_experts: int = 8
    top_k: int = 3
    hidden: int = 32
    routing: str = "uniform"
    dtype: DtypeName = "float32"
    pad_multiple: int = 1
    weights: Literal["combine", "experts"] = "combine"
    wire_dtype: str | None = None
    grad_wire_dtype: str | None = None
    deliver: Literal["rows", "quantised"] = "rows"
    schedule: str = "once"
    row_counts: tuple[RowCounts, ...] = ("agree",)
    input_layouts: tuple[str, ...] | Literal["all"] = ("rows", "bshd", "thd_with_gaps_on_device")
    requires_grad: frozenset[Literal["x", "weights"]] = frozenset({"x", "weights"})
    spare: int = 0
    inference: bool = False
    poisons_padding: bool = True
    chunk_tokens: int | None = None
    chunk_recompute: bool = False
    skips_empty: bool = False
    debug: bool = False
    graph_safe: bool = False
    seed: int = 0

    @property
    def torch_dtype(self) -> torch.dtype:
        """Return ``dtype`` as a ``torch.dtype``."""
        dtype: torch.dtype = getattr(torch, self.dtype)
        return dtype

    @property
    def wire(self) -> str | dict[str, Any] | None:
        """Return ``wire`` of the config."""
        if self.wire_dtype in (None, "bfloat16"):  # which have no other options
            return self.wire_dtype
        return {"dtype": self.wire_dtype, "gradients": self.grad_wire_dtype is not None, "deliver": self.deliver}

    @property
    def chunks(self) -> dict[str, Any] | None:
        """Return ``chunks`` of the config."""
        return None if self.chunk_tokens is None else {"tokens": self.chunk_tokens, "recompute": self.chunk_recompute}

    @property
    def tolerance(self) -> float:
        """Return the tolerance of the dtype in which rows, sums and gradients travel."""
        return TOLERANCES[self.dtype if self.wire_dtype is None else "bfloat16"]

    def shape(self, ep_size: int) -> MoEShape:
        """Return the sizes that constraints depend on."""
        return MoEShape(
            num_experts=self.num_experts + ep_size * self.spare,
            top_k=self.top_k,
            hidden_size=self.hidden,
            ep_size=ep_size,
            pad_multiple=self.pad_multiple,
            wire_dtype=self.wire_dtype,
            grad_wire_dtype=self.grad_wire_dtype,
            quantised=self.deliver == "quantised",
            ranks_per_node=ep_size,
            graph_safe=self.graph_safe,
            max_tokens_per_rank=self.max_tokens if self.graph_safe else None,
        )

    def placement(self, ep_size: int) -> ExpertPlacement | None:
        """Return the placement of the scenario: experts on random ranks, with copies and empty slots."""
        return _draw_placement(self.num_experts, ep_size, self.spare, self.seed) if self.spare else None

    @property
    def most_rows(self) -> int:
        """Return the largest number of rows of x on any rank in any input layout."""
        return max(map(_most_rows, self.tokens))

    @property
    def max_tokens(self) -> int:
        """Return ``max_tokens_per_rank`` of a graph-safe dispatcher. Every rank has fewer rows."""
        return self.most_rows + 3

    @property
    def drawn(self) -> Scenario:
        """Return a scenario with only the fields on which the tensors and the expected results depend.

        It is the key of the cache in which scenarios share their tensors and expected results.
        """
        shapes, wires = ("tokens", "num_experts", "top_k", "hidden"), ("dtype", "wire_dtype", "grad_wire_dtype")
        decides = (*shapes, *wires, "routing", "schedule", "seed")
        return Scenario(name="drawn", **{field: getattr(self, field) for field in decides})

    def fitted(self, needs: Constraints) -> Scenario:
        """Return the scenario with wider rows, bfloat16 on the wire or no gradients, where the backend needs them."""
        changes: dict[str, Any] = {"hidden": round_up(self.hidden, needs.hidden_multiple)}
        if needs.dtypes is not None and self.torch_dtype not in needs.dtypes and "bfloat16" in needs.wire.dtypes:
            changes["wire_dtype"] = self.wire_dtype or "bfloat16"
        if not needs.differentiable:
            forward_only = "once" if self.schedule.startswith("checkpointed") else self.schedule
            changes.update(inference=True, requires_grad=frozenset(), schedule=forward_only)
        return dataclasses.replace(self, **changes)

    def tokens_of(self, ep_size: int, turn: int = 0) -> tuple[int, ...]:
        """Return the number of real tokens by rank, rotated by ``turn`` ranks."""
        repeated = self.tokens * -(-ep_size // len(self.tokens))
        turn %= len(repeated)
        return (repeated[turn:] + repeated[:turn])[-ep_size:]

    def batches(self, ep_size: int, call: int = 0, turn: int = 0) -> tuple[Batch, ...]:
        """Return the tokens of one call by rank. All values are exact in ``dtype``."""
        tokens = enumerate(self.tokens_of(ep_size, turn))
        return tuple(self._batch(count, self._generator(call, rank)) for rank, count in tokens)

    def experts(self, call: int = 0) -> Experts:
        """Return the experts of one call."""
        generator = self._generator(call, -1)
        width = math.gcd(self.hidden, _EXPERT_WIDTH)

        def normal(*size: int) -> Tensor:
            return torch.randn(size, generator=generator, dtype=torch.float64)

        matrix_EWW = normal(self.num_experts, width, width) * width**-0.5
        return Experts(matrix_EWW=matrix_EWW, bias_ED=normal(self.num_experts, self.hidden))

    def _batch(self, tokens: int, generator: torch.Generator) -> Batch:
        def normal(*size: int) -> Tensor:
            values = torch.randn(size, generator=generator, dtype=torch.float64)
            return values.to(self.torch_dtype).double()

        ids_TK = ROUTINGS[self.routing](tokens, self.top_k, self.num_experts, generator)
        weights_TK = (torch.rand(tokens, self.top_k, generator=generator) + 0.1).double()
        return Batch(
            x_TD=normal(tokens, self.hidden),
            ids_TK=ids_TK,
            weights_TK=torch.where(ids_TK < 0, float("nan"), weights_TK),
            upstream_TD=normal(tokens, self.hidden),
        )

    def _generator(self, call: int, rank: int) -> torch.Generator:
        return torch.Generator().manual_seed(self.seed * 10_000 + call * 1_000 + rank + 1)


@cache
def _most_rows(tokens: int) -> int:
    return max(build(tokens).num_rows for build in INPUT_LAYOUTS.values())


@cache
def _draw_placement(num_experts: int, ep_size: int, spare: int, seed: int) -> ExpertPlacement:
    """Put each expert in a random slot. A third of the other slots stays empty, the others get random copies."""
    generator = torch.Generator().manual_seed(seed)
    local = num_experts // ep_size + spare
    slots = [[-1] * local for _ in range(ep_size)]
    places = torch.randperm(ep_size * local, generator=generator).tolist()
    for expert, place in enumerate(places):
        of_rank = slots[place // local]
        if expert < num_experts:
            of_rank[place % local] = expert
            continue
        wish = int(torch.randint(num_experts * 3 // 2, (), generator=generator))
        if wish < num_experts and wish not in of_rank:
            of_rank[place % local] = wish
    from moe_dispatch.balance import ExpertPlacement  # noqa: PLC0415 - the kit works without it

    return ExpertPlacement(num_experts, tuple(map(tuple, slots)))
