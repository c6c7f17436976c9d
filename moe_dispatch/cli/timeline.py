"""Rows of experts over steps, of a trace's dispatches or of a run: what pictures of load and imbalance are drawn from.

Dimensions: ``C`` dispatches or steps, ``E`` experts in the whole group, ``P`` its ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

_MOST_COLUMNS = 400


@final
@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Timeline:
    """Loads, one after another.

    Attributes:
        names: of dispatchers, or of what is counted together.
        ep_size: P.
        layer_C: int64, which of the names; ``step_C`` how many it had before.
        tokens_CE: int64, rows that went to each expert.
    """

    names: Sequence[str]
    ep_size: int
    layer_C: Tensor
    step_C: Tensor
    tokens_CE: Tensor

    @property
    def steps(self) -> int:
        """The most of any name."""
        return int(self.step_C.max()) + 1 if len(self.step_C) else 0

    @property
    def stride(self) -> int:
        """How many steps a picture shows as one: more columns than pixels would only make it heavy."""
        return max(-(-self.steps // _MOST_COLUMNS), 1)

    @property
    def imbalance_C(self) -> Tensor:
        """The busiest expert's rows over the mean, float64; 1 where nothing was dispatched."""
        return _over_mean(self.tokens_CE)

    @property
    def rank_imbalance_C(self) -> Tensor:
        """The same of ranks: what the slowest one waits for."""
        return _over_mean(self.tokens_CE.unflatten(1, (self.ep_size, -1)).sum(2))

    def blocks(self, values_C: Tensor) -> list[Tensor]:
        """Values of all names, by what a picture shows as one step."""
        block_C = self.step_C // self.stride
        return [values_C[block_C == block] for block in range(-(-self.steps // self.stride))]


def _over_mean(counts: Tensor) -> Tensor:
    mean = counts.double().mean(1)
    return torch.where(mean > 0, counts.amax(1) / mean.clamp(min=1e-9), 1.0)
