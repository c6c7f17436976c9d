"""What every contender is given, and what must come out.

Dimension suffixes are those of ``moe_dispatch.types``. Experts here multiply a row by one number, so that the dense
result has a closed form at any size, and a row at the wrong expert shows.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Literal, final

import torch
from torch import Generator, Tensor

from moe_dispatch.errors import MoEDispatchError

Skew = Literal["balanced", "skewed"]

# Largest error of an entry over the sum of the magnitudes of its terms. In bfloat16 the peers round each of top_k slots
# and add up in bfloat16: about top_k half units in the last place, 2e-3 each. A row at the wrong expert is off by 0.1.
TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 2.5e-2}


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
    """One rank's input, the same for all contenders.

    Attributes:
        x_TD: the rows, in the dtype that is measured.
        ids_TK: int64, distinct experts per row.
        weights_TK: float32, numbers that bfloat16 holds exactly, because the routers of some models round to it.
        tokens_per_expert_E: int64, this rank's slots by expert; routers count them, so they are not charged to anyone.
        upstream_TD: gradient of the output.
    """

    x_TD: Tensor
    ids_TK: Tensor
    weights_TK: Tensor
    tokens_per_expert_E: Tensor
    upstream_TD: Tensor

    def to(self, device: torch.device) -> Tokens:
        """The same on another device."""
        return Tokens(**{field.name: getattr(self, field.name).to(device) for field in fields(self)})


@final
@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Outcome:
    """What one forward and backward gives."""

    y_TD: Tensor
    grad_x_TD: Tensor
    grad_weights_TK: Tensor


class DisagreementError(MoEDispatchError, AssertionError):
    """Two computations of the same layer differ by more than rounding."""


def draw_tokens(shape: Shape, skew: Skew, dtype: torch.dtype, rank: int) -> Tokens:
    """Seeded rows and routing of one rank.

    "balanced" draws experts uniformly. "skewed" draws them by Zipf's law (odds 1, 1/2, 1/3, ...) in an order of
    popularity that is shuffled, so that popular experts lie on any rank.
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
    """int64 (T, K): the best of each row, by random scores."""
    scores_TE = -torch.rand(shape.tokens, shape.experts, generator=generator).log()
    if skew == "skewed":
        popularity_E = torch.randperm(shape.experts, generator=torch.Generator().manual_seed(0)) + 1
        scores_TE = scores_TE * popularity_E
    return scores_TE.topk(shape.top_k, largest=False).indices


def draw_scales(num_experts: int) -> Tensor:
    """float32 (E,): what each expert multiplies by; of either sign, 1 to 2 in size, exact in bfloat16."""
    generator = torch.Generator().manual_seed(1)
    sizes_E = 1 + torch.randint(64, (num_experts,), generator=generator) / 64
    return torch.where(torch.rand(num_experts, generator=generator) < 0.5, -sizes_E, sizes_E)


def dense_outcome(tokens: Tokens, scales_E: Tensor) -> Outcome:
    """The same layer without any dispatch, in float64."""
    x_TD, upstream_TD, weights_TK = tokens.x_TD.double(), tokens.upstream_TD.double(), tokens.weights_TK.double()
    scales_TK = scales_E.double()[tokens.ids_TK]
    share_T = (weights_TK * scales_TK).sum(1, keepdim=True)
    return Outcome(
        y_TD=x_TD * share_T,
        grad_x_TD=upstream_TD * share_T,
        grad_weights_TK=(x_TD * upstream_TD).sum(1, keepdim=True) * scales_TK,
    )


def magnitudes(tokens: Tokens, scales_E: Tensor) -> Outcome:
    """By entry, what its terms add up to without their signs: the scale of its rounding errors."""
    unsigned = replace(tokens, x_TD=tokens.x_TD.abs(), upstream_TD=tokens.upstream_TD.abs())
    return dense_outcome(unsigned, scales_E.abs())


def require_agreement(names: str, got: Outcome, want: Outcome, scale: Outcome, tolerance: float) -> float:
    """Compare two outcomes entry by entry; the largest error, relative to ``scale``.

    Raises:
        DisagreementError: an error exceeds ``tolerance``, or a result is not finite.
    """
    worst = 0.0
    for field in ("y_TD", "grad_x_TD", "grad_weights_TK"):
        error = largest_error(*(getattr(outcome, field).double() for outcome in (got, want, scale)))
        if not error <= tolerance:
            raise DisagreementError(
                f"{names}: {field} must agree within {tolerance:g} of its terms' magnitude, got {error:.3g}. "
                "Do not trust the times of either."
            )
        worst = max(worst, error)
    return worst


def largest_error(got: Tensor, want: Tensor, scale: Tensor) -> float:
    """Largest difference over ``scale``, 0 without entries; NaN where a difference is NaN."""
    return float(((got - want).abs() / scale.clamp_min(torch.finfo(scale.dtype).tiny)).max()) if got.numel() else 0.0
