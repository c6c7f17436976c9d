"""A MoE layer with gated experts, drawn by seed for all ranks, and what must come of it: computed densely in float64.

Suffixes as in ``moe_dispatch.types``; F is an expert's inner width.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, final

import torch
import torch.nn.functional as F
from torch import Generator, Tensor

# What a row passes on its way is rounded to bfloat16 about eight times (projections, activation, weight, sums over
# experts and over ranks), by at most 2**-9 of its size each time; twice that for rows whose terms cancel. A
# contribution that is lost, doubled or in another's place is off by a tenth of some row and more.
TOLERANCE = 16 * 2.0**-9
EXPERTS, TOP_K, INNER = 8, 3, 48
# The output of a rank, the gradients of its rows and weights, and those of its experts from the tokens of all ranks.
TRAINING, INFERENCE = ("y", "x", "weights", "gate", "up", "down"), ("y",)
Tensors = dict[str, Tensor]


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """Sizes and routing of one layer call.

    Attributes:
        tokens: rows of each rank.
        routing: "random"; "crowded", where every token also goes to expert 1, and none to 2, 4 and 7; "starved", where
            the last rank receives nothing; "even", where every expert gets the same number of tokens from each rank;
            "holes", where random slots go nowhere, and every third token goes to no expert at all.
        options: the vendor's, by its names.
    """

    tokens: tuple[int, ...]
    routing: Literal["random", "crowded", "starved", "even", "holes"] = "random"
    hidden: int = 256
    seed: int = 0
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def ep_size(self) -> int:
        return len(self.tokens)

    def local(self, rank: int) -> slice:
        """The experts of a rank."""
        held = EXPERTS // self.ep_size
        return slice(rank * held, (rank + 1) * held)


def draw(case: Case, rank: int) -> Tensors:
    """Seeded input of one rank.

    bfloat16 rows "x" and "upstream", int64 "ids", which are distinct, -1 for a slot that goes nowhere, and float32
    "weights", 0 where the id is -1.
    """
    generator = torch.Generator().manual_seed(1000 * case.seed + rank)
    tokens = case.tokens[rank]
    ids_TK = _draw_ids(case, tokens, generator)
    weights_TK = torch.randn(tokens, TOP_K, generator=generator).softmax(1)
    x_TD, upstream_TD = torch.randn(2, tokens, case.hidden, generator=generator).bfloat16()
    return {"x": x_TD, "ids": ids_TK, "weights": weights_TK.masked_fill(ids_TK < 0, 0.0), "upstream": upstream_TD}


def _draw_ids(case: Case, tokens: int, generator: Generator) -> Tensor:
    if case.routing == "even":
        return torch.arange(tokens * TOP_K).remainder(EXPERTS).view(tokens, TOP_K)
    scores_TE = torch.rand(tokens, EXPERTS, generator=generator)
    if case.routing == "crowded":
        scores_TE[:, 1] = 2.0
        scores_TE[:, [2, 4, 7]] = -1.0
    if case.routing == "starved":
        scores_TE[:, case.local(case.ep_size - 1)] = -1.0
    ids_TK = scores_TE.topk(TOP_K).indices
    if case.routing == "holes":
        ids_TK[torch.rand(ids_TK.shape, generator=generator) < 0.3] = -1
        ids_TK[::3] = -1
    return ids_TK


def draw_weights(case: Case) -> Tensors:
    """bfloat16 weights of all experts: silu(x @ gate.T) * (x @ up.T) @ down.T."""
    generator = torch.Generator().manual_seed(case.seed + 77)
    shapes = {"gate": (INNER, case.hidden), "up": (INNER, case.hidden), "down": (case.hidden, INNER)}
    return {
        name: (torch.randn(EXPERTS, *shape, generator=generator) / shape[1] ** 0.5).bfloat16()
        for name, shape in shapes.items()
    }


def dense(case: Case) -> list[Tensors]:
    """The output and the gradients of every rank, by rank."""
    found = []
    experts = {name: weight.double().requires_grad_() for name, weight in draw_weights(case).items()}
    for rank in range(case.ep_size):
        given = draw(case, rank)
        x_TD, weights_TK = (given[name].double().requires_grad_() for name in ("x", "weights"))
        y_TD = torch.zeros_like(x_TD)
        for expert, (gate_FD, up_FD, down_DF) in enumerate(zip(*experts.values(), strict=True)):
            token, slot = (given["ids"] == expert).nonzero(as_tuple=True)
            inner_RF = F.silu(x_TD[token] @ gate_FD.T) * (x_TD[token] @ up_FD.T)
            y_TD = y_TD.index_add(0, token, inner_RF @ down_DF.T * weights_TK[token, slot, None])
        y_TD.backward(given["upstream"].double())
        found.append({"y": y_TD.detach(), "x": gradient(x_TD), "weights": gradient(weights_TK)})
    for rank, of_rank in enumerate(found):
        of_rank |= {name: gradient(weight)[case.local(rank)] for name, weight in experts.items()}
    return found


def gradient(leaf: Tensor) -> Tensor:
    """What a backward left on a leaf. AssertionError where it was cut off."""
    assert leaf.grad is not None, "no gradient came back"
    return leaf.grad


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
