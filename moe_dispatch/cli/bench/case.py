"""One case of the benchmark: a shape, a dtype, a routing and a group, on which every contender is measured."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, final

import torch

from moe_dispatch.cli.bench.workload import Shape, Skew, Tokens, draw_tokens
from moe_dispatch.cli.place import Place

Dtype = Literal["bfloat16", "float32"]


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """What is measured, on ``ranks`` ranks."""

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
        """A rank's input, on its device."""
        return draw_tokens(self.shape, self.routing, getattr(torch, self.dtype), place.rank).to(place.device)
