"""A MoE layer with gated experts, drawn by seed for all ranks, and what must come of it: computed densely in float64.

Suffixes as in ``moe_dispatch.types``; F is an expert's inner width.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, final

import torch
import torch.nn.functional as F
from torch import Generator, Tensor

# What a row passes on its way is rounded to bfloat16 about eight times (projections, activation, weight, sums over
# experts and over ranks), by at most 2**-9 of its size each time; twice that for rows whose terms cancel. A
# contribution that is lost, doubled or in another's place is off by a tenth of some row and more.
TOLERANCE = 16 * 2.0**-9


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """Sizes and routing of one layer call.

    Attributes:
        tokens: rows of each rank.
        routing: "random"; "crowded", where every token also goes to expert 1, and none to 2, 4 and 7; "starved", where
            the last rank receives nothing; "even", where every expert gets the same number of tokens from each rank;
            "holes", where random slots go nowhere, and every third token goes to no expert at all.
    """

    tokens: tuple[int, ...]
    routing: Literal["random", "crowded", "starved", "even", "holes"] = "random"
    experts: int = 8
    top_k: int = 3
    hidden: int = 256
    inner: int = 32
    seed: int = 0

    @property
    def ep_size(self) -> int:
        return len(self.tokens)

    def local(self, rank: int) -> slice:
        """The experts of a rank."""
        held = self.experts // self.ep_size
        return slice(rank * held, (rank + 1) * held)


@final
@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Given:
    """What one rank's layer is called with.

    Attributes:
        x_TD: bfloat16.
        ids_TK: int64, distinct, -1 for a slot that goes nowhere.
        weights_TK: float32, 0 where the id is -1.
        upstream_TD: gradient of the output.
    """

    x_TD: Tensor
    ids_TK: Tensor
    weights_TK: Tensor
    upstream_TD: Tensor


@final
@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Weights:
    """silu(x @ gate.T) * (x @ up.T) @ down.T of each expert."""

    gate_EFD: Tensor
    up_EFD: Tensor
    down_EDF: Tensor

    def of(self, experts: slice) -> Weights:
        return Weights(gate_EFD=self.gate_EFD[experts], up_EFD=self.up_EFD[experts], down_EDF=self.down_EDF[experts])


@final
@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Outcome:
    """What a rank has after a forward and a backward; its experts' gradients come from the tokens of all ranks.

    After inference only y_TD.
    """

    y_TD: Tensor
    grad_x_TD: Tensor | None = None
    grad_weights_TK: Tensor | None = None
    grad_gate_LFD: Tensor | None = None
    grad_up_LFD: Tensor | None = None
    grad_down_LDF: Tensor | None = None


TRAINING = tuple(Outcome.__dataclass_fields__)


def draw(case: Case, rank: int) -> Given:
    """Seeded input of one rank."""
    generator = torch.Generator().manual_seed(1000 * case.seed + rank)
    tokens = case.tokens[rank]
    ids_TK = _draw_ids(case, tokens, generator)
    weights_TK = torch.randn(tokens, case.top_k, generator=generator).softmax(1)
    return Given(
        x_TD=torch.randn(tokens, case.hidden, generator=generator).bfloat16(),
        ids_TK=ids_TK,
        weights_TK=weights_TK.masked_fill(ids_TK < 0, 0.0),
        upstream_TD=torch.randn(tokens, case.hidden, generator=generator).bfloat16(),
    )


def _draw_ids(case: Case, tokens: int, generator: Generator) -> Tensor:
    if case.routing == "even":
        in_turn_N: Tensor = torch.arange(tokens * case.top_k) % case.experts
        return in_turn_N.view(tokens, case.top_k)
    scores_TE = torch.rand(tokens, case.experts, generator=generator)
    if case.routing == "crowded":
        scores_TE[:, 1] = 2.0
        scores_TE[:, [2, 4, 7]] = -1.0
    if case.routing == "starved":
        scores_TE[:, case.local(case.ep_size - 1)] = -1.0
    ids_TK: Tensor = scores_TE.topk(case.top_k).indices
    if case.routing == "holes":
        ids_TK[torch.rand(ids_TK.shape, generator=generator) < 0.3] = -1
        ids_TK[::3] = -1
    return ids_TK


def draw_weights(case: Case) -> Weights:
    """bfloat16 weights of all experts, the same on every rank."""
    generator = torch.Generator().manual_seed(case.seed + 77)

    def drawn(rows: int, columns: int) -> Tensor:
        values: Tensor = torch.randn(case.experts, rows, columns, generator=generator) / columns**0.5
        return values.bfloat16()

    return Weights(
        gate_EFD=drawn(case.inner, case.hidden),
        up_EFD=drawn(case.inner, case.hidden),
        down_EDF=drawn(case.hidden, case.inner),
    )


def dense_outcomes(case: Case) -> list[Outcome]:
    """The outcome of every rank, by rank."""
    given = [draw(case, rank) for rank in range(case.ep_size)]
    weights = draw_weights(case)
    gate_EFD, up_EFD, down_EDF = (_leaf(part) for part in (weights.gate_EFD, weights.up_EFD, weights.down_EDF))
    inputs = [(_leaf(one.x_TD), _leaf(one.weights_TK)) for one in given]
    outputs = [
        _layer(x_TD, one.ids_TK, weights_TK, Weights(gate_EFD=gate_EFD, up_EFD=up_EFD, down_EDF=down_EDF))
        for one, (x_TD, weights_TK) in zip(given, inputs, strict=True)
    ]
    torch.autograd.backward(outputs, [one.upstream_TD.double() for one in given])
    return [
        Outcome(
            y_TD=y_TD.detach(),
            grad_x_TD=gradient(x_TD),
            grad_weights_TK=gradient(weights_TK),
            grad_gate_LFD=gradient(gate_EFD)[case.local(rank)],
            grad_up_LFD=gradient(up_EFD)[case.local(rank)],
            grad_down_LDF=gradient(down_EDF)[case.local(rank)],
        )
        for rank, (y_TD, (x_TD, weights_TK)) in enumerate(zip(outputs, inputs, strict=True))
    ]


def _leaf(tensor: Tensor) -> Tensor:
    return tensor.double().requires_grad_()


def gradient(leaf: Tensor) -> Tensor:
    """What a backward left on a leaf. AssertionError where it was cut off."""
    assert leaf.grad is not None, "no gradient came back"
    return leaf.grad


def _layer(x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor, weights: Weights) -> Tensor:
    y_TD = torch.zeros_like(x_TD)
    for expert in range(weights.gate_EFD.shape[0]):
        token, slot = (ids_TK == expert).nonzero(as_tuple=True)
        rows_RD = x_TD[token]
        inner_RF = F.silu(rows_RD @ weights.gate_EFD[expert].T) * (rows_RD @ weights.up_EFD[expert].T)
        y_TD = y_TD.index_add(0, token, inner_RF @ weights.down_EDF[expert].T * weights_TK[token, slot, None])
    return y_TD


def errors(got: Outcome, want: Outcome) -> dict[str, float]:
    """``worst_row`` by name, for what ``got`` has."""
    return {
        name: worst_row(tensor, getattr(want, name))
        for name in Outcome.__dataclass_fields__
        if (tensor := getattr(got, name)) is not None
    }


def worst_row(got: Tensor, want: Tensor) -> float:
    """The error of the worst row, as a part of the row's length, or of the usual length (root mean square) if more.

    NaN where anything is not a number. AssertionError where shapes differ.
    """
    assert got.shape == want.shape, f"got shape {tuple(got.shape)}, want {tuple(want.shape)}"
    if want.numel() == 0:
        return 0.0
    lengths = want.norm(dim=-1)
    usual = lengths.square().mean().sqrt().clamp_min(1e-12)
    worst: float = ((got.double() - want).norm(dim=-1) / lengths.clamp_min(usual)).max().item()
    return worst
