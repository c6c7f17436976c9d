"""What a conformance case sends: a frozen, seeded description, and the data it stands for.

Dimensions as in ``moe_dispatch.types``; tensors of this file are float64 and hold real tokens only, rank by rank.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, final

import torch
from torch import Tensor

from moe_dispatch.backends import Constraints, MoEShape
from moe_dispatch.backends.base import WireDtype
from moe_dispatch.config import RowCounts
from moe_dispatch.permutation import round_up
from moe_dispatch.testing.forms import FORMS
from moe_dispatch.testing.routings import ROUTINGS

_EXPERT_WIDTH = 32

DtypeName = Literal["float64", "float32", "bfloat16", "float16"]

# Largest allowed difference, relative to the largest expected value of the same tensor. The experts of the kit compute
# in float64, so what is left is the rounding of rows and sums: a few units in the last place.
TOLERANCES: dict[DtypeName, float] = {"float64": 1e-12, "float32": 2e-6, "bfloat16": 2e-2, "float16": 3e-3}


@final
@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Batch:
    """One rank's tokens of one call: x (T, D), ids (T, K), weights (T, K), and the gradient that y receives (T, D).

    Weights are NaN where the id is -1: nobody may read them.
    """

    x_TD: Tensor
    ids_TK: Tensor
    weights_TK: Tensor
    upstream_TD: Tensor

    def replace(self, **changes: Tensor) -> Batch:
        """A copy with some tensors changed."""
        return dataclasses.replace(self, **changes)


@final
@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Experts:
    """Parameters of all experts, (E, W, W) and (E, D): each a map of its own, so that a wrong expert shows.

    The matrix maps W columns at a time; whole matrices would cost most of the kit's time and memory at large D.
    """

    matrix_EWW: Tensor
    bias_ED: Tensor

    def apply(self, expert: int, rows_ND: Tensor) -> Tensor:
        """What one expert makes of rows; float64. A zero row does not become zero."""
        matrix_WW = self.matrix_EWW[expert].double()
        mixed = rows_ND.double().unflatten(1, (-1, len(matrix_WW))) @ matrix_WW
        return torch.tanh(mixed.flatten(1) + self.bias_ED[expert].double())

    def leaves(self) -> Experts:
        """A copy whose tensors collect gradients."""
        return Experts(
            matrix_EWW=self.matrix_EWW.clone().requires_grad_(), bias_ED=self.bias_ED.clone().requires_grad_()
        )


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Scenario:
    """One thing that a backend must do right.

    Attributes:
        name: its id in test names and in the excused list.
        tokens: real tokens per rank; a group of P ranks takes the last P entries, a larger one repeats them.
        num_experts: E.
        top_k: K.
        hidden: D.
        routing: a name of ``ROUTINGS``.
        dtype: of x.
        pad_multiple: rows per expert are rounded up to this.
        weights: who multiplies by the weights.
        wire_dtype: what rows travel in.
        program: a name of ``PROGRAMS``: what is called, in which order.
        row_counts: the policies it is run under.
        forms: names of ``FORMS`` it is run in; by default one each where every row is a token, where the others are cut
            out, and where they are masked. "all" for every one.
        requires_grad: which of "x" and "weights" collect gradients; the experts' parameters always do.
        inference: the case runs under ``torch.inference_mode``.
        poisons_padding: the experts write NaN to padding rows of their output, and to their gradients of padding rows.
        skips_empty: experts that saw no row return a fresh tensor without autograd history.
        debug: the dispatcher's ``debug``.
        graph_safe: the dispatcher's; verbs and backwards then run where every host sync is refused.
        seed: of all data.
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
    wire_dtype: WireDtype | None = None
    program: str = "once"
    row_counts: tuple[RowCounts, ...] = ("agree",)
    forms: tuple[str, ...] | Literal["all"] = ("rows", "bshd", "thd_with_gaps_on_device")
    requires_grad: frozenset[Literal["x", "weights"]] = frozenset({"x", "weights"})
    inference: bool = False
    poisons_padding: bool = True
    skips_empty: bool = False
    debug: bool = False
    graph_safe: bool = False
    seed: int = 0

    @property
    def torch_dtype(self) -> torch.dtype:
        """``dtype`` as torch has it."""
        dtype: torch.dtype = getattr(torch, self.dtype)
        return dtype

    @property
    def tolerance(self) -> float:
        """``TOLERANCES`` of what rows, sums and gradients travel in."""
        return TOLERANCES[self.dtype if self.wire_dtype is None else "bfloat16"]

    def shape(self, ep_size: int) -> MoEShape:
        """The sizes that constraints depend on."""
        return MoEShape(
            num_experts=self.num_experts,
            top_k=self.top_k,
            hidden_size=self.hidden,
            ep_size=ep_size,
            pad_multiple=self.pad_multiple,
            wire_dtype=self.wire_dtype,
            ranks_per_node=ep_size,
            graph_safe=self.graph_safe,
            max_tokens_per_rank=self.max_tokens if self.graph_safe else None,
        )

    @property
    def most_rows(self) -> int:
        """The most rows that a rank brings, in whatever form."""
        return max(map(_rows_in_any_form, self.tokens))

    @property
    def max_tokens(self) -> int:
        """``max_tokens_per_rank`` where graph-safe: no rank ever brings as many."""
        return self.most_rows + 3

    @property
    def drawn(self) -> Scenario:
        """What data and expectation depend on, and defaults elsewhere: equal for all scenarios that may share them."""
        decides = ("tokens", "num_experts", "top_k", "hidden", "routing", "dtype", "wire_dtype", "program", "seed")
        return Scenario(name="drawn", **{field: getattr(self, field) for field in decides})

    def fitted(self, needs: Constraints) -> Scenario:
        """The scenario as a backend can carry it: rows made wider, bfloat16 on the wire, without gradients."""
        changes: dict[str, Any] = {"hidden": round_up(self.hidden, needs.hidden_multiple)}
        if needs.dtypes is not None and self.torch_dtype not in needs.dtypes and "bfloat16" in needs.wire_dtypes:
            changes["wire_dtype"] = self.wire_dtype or "bfloat16"
        if not needs.differentiable:
            forward_only = "once" if self.program.startswith("checkpointed") else self.program
            changes.update(inference=True, requires_grad=frozenset(), program=forward_only)
        return dataclasses.replace(self, **changes)

    def tokens_of(self, ep_size: int, turn: int = 0) -> tuple[int, ...]:
        """Real tokens by rank; ``turn`` moves them by so many ranks."""
        repeated = self.tokens * -(-ep_size // len(self.tokens))
        turn %= len(repeated)
        return (repeated[turn:] + repeated[:turn])[-ep_size:]

    def batches(self, ep_size: int, call: int = 0, turn: int = 0) -> tuple[Batch, ...]:
        """The data of one call, by rank; values are exact in ``dtype``."""
        tokens = enumerate(self.tokens_of(ep_size, turn))
        return tuple(self._batch(count, self._generator(call, rank)) for rank, count in tokens)

    def experts(self, call: int = 0) -> Experts:
        """The experts of one call."""
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
def _rows_in_any_form(tokens: int) -> int:
    return max(build(tokens).num_rows for build in FORMS.values())
