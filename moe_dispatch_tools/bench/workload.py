"""The cases of a benchmark, with the tokens and the routing of every contender.

Dimension suffixes are those of ``moe_dispatch.types``.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Literal, final

import torch
from torch import Generator, Tensor

from moe_dispatch_tools.place import Place

Skew = Literal["balanced", "skewed"]
Dtype = Literal["bfloat16", "float32"]


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """Sizes of a layer: rows of each rank, D, E and K."""

    tokens: int
    hidden: int
    experts: int
    top_k: int


@final
@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Tokens:
    """The input of one rank, the same for all contenders.

    Attributes:
        x_TD: Rows in the measured dtype.
        ids_TK: Experts of each row without repetitions, int64.
        weights_TK: Weights, float32, rounded to bfloat16 as in the routers of some models.
        tokens_per_expert_E: Number of slots of this rank by expert, int64. It is not timed, because routers count it.
        upstream_TD: Gradient of the output.
    """

    x_TD: Tensor
    ids_TK: Tensor
    weights_TK: Tensor
    tokens_per_expert_E: Tensor
    upstream_TD: Tensor

    def to(self, device: torch.device) -> Tokens:
        """Copy to another device."""
        return Tokens(**{field.name: getattr(self, field.name).to(device) for field in fields(self)})


def draw_tokens(shape: Shape, skew: Skew, dtype: torch.dtype, rank: int) -> Tokens:
    """Draw the rows and the routing of one rank. The rank is the seed.

    "balanced" draws experts uniformly. "skewed" draws experts by Zipf's law: the odds of the most popular expert, the
    second and the third are 1, 1/2 and 1/3. The order of popularity is random, so popular experts are on any rank.
    """
    generator = torch.Generator().manual_seed(rank)
    ids_TK = draw_experts(shape, skew, generator)
    weights_TK = torch.randn(shape.tokens, shape.top_k, generator=generator).softmax(1).bfloat16().float()
    return Tokens(
        x_TD=torch.randn(shape.tokens, shape.hidden, generator=generator).to(dtype),
        ids_TK=ids_TK,
        weights_TK=weights_TK,
        tokens_per_expert_E=torch.bincount(ids_TK.flatten(), minlength=shape.experts),
        upstream_TD=torch.randn(shape.tokens, shape.hidden, generator=generator).to(dtype),
    )


def draw_experts(shape: Shape, skew: Skew, generator: Generator) -> Tensor:
    """Draw the experts of each row, int64 (T, K)."""
    scores_TE = -torch.rand(shape.tokens, shape.experts, generator=generator).log()
    if skew == "skewed":
        popularity_E = torch.randperm(shape.experts, generator=torch.Generator().manual_seed(0)) + 1
        scores_TE = scores_TE * popularity_E
    return scores_TE.topk(shape.top_k, largest=False).indices


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """One case of the benchmark: a shape, dtype, routing and number of ranks for all contenders."""

    shape: Shape
    dtype: Dtype
    routing: Skew
    ranks: int

    def __str__(self) -> str:
        shape = self.shape
        return (
            f"{self.dtype}, {self.routing}: {shape.tokens} tokens a rank, hidden {shape.hidden}, "
            f"{shape.experts} experts, top-{shape.top_k}, {self.ranks} rank{'s' * (self.ranks > 1)}"
        )

    def tokens(self, place: Place) -> Tokens:
        """Draw the input of this rank, on its device."""
        return draw_tokens(self.shape, self.routing, getattr(torch, self.dtype), place.rank).to(place.device)
