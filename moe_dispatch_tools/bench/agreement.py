"""Check that all contenders compute the same layer, forward and backward, as a dense float64 reference.

Each expert multiplies its rows by a number of its own. The dense result therefore has a closed form at any size, and a
row at the wrong expert changes the result.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor

from moe_dispatch.errors import MoEDispatchError
from moe_dispatch_tools.bench.contenders import Contender, Outcome, run_layer, scaling_experts
from moe_dispatch_tools.bench.workload import Tokens

# Largest allowed error of an entry, divided by the sum of the magnitudes of its terms. In bfloat16 the peers round each
# of the top_k slots, and add the slots up in bfloat16. The error is then about top_k half units in the last place, 2e-3
# each. A row at the wrong expert makes an error of 0.1 or more.
TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 2.5e-2}


class DisagreementError(MoEDispatchError, AssertionError):
    """Two computations of the same layer differ by more than rounding."""


def check_agreement(contenders: dict[str, Contender], tokens: Tokens, group: dist.ProcessGroup) -> dict[str, float]:
    """Run every contender with experts that differ from each other, and compare the outcomes. Collective.

    Returns:
        The largest difference from the dense result by contender, relative to the magnitude of its terms.

    Raises:
        DisagreementError: A contender differs from the dense result or from the first contender.
    """
    outcomes = {name: _outcome(contender, tokens, group) for name, contender in contenders.items()}
    scales_E, tolerance = _scales(tokens), TOLERANCES[tokens.x_TD.dtype]
    dense, scale = dense_outcome(tokens, scales_E), magnitudes(tokens, scales_E)
    errors = {
        name: require_agreement(f"{name} and the dense result", outcome, dense, scale, tolerance)
        for name, outcome in outcomes.items()
    }
    (first, base), *others = outcomes.items()
    for name, outcome in others:
        require_agreement(f"{name} and {first}", outcome, base, scale, tolerance)
    return errors


def _outcome(contender: Contender, tokens: Tokens, group: dist.ProcessGroup) -> Outcome:
    scales_E = _scales(tokens)
    return run_layer(contender, tokens, scaling_experts(scales_E, group.rank() * len(scales_E) // group.size()))


def _scales(tokens: Tokens) -> Tensor:
    return draw_scales(len(tokens.tokens_per_expert_E)).to(tokens.x_TD.device)


def draw_scales(num_experts: int) -> Tensor:
    """Draw the factor of each expert, float32 (E,): 1 to 2 in size, of either sign, exact in bfloat16."""
    generator = torch.Generator().manual_seed(1)
    sizes_E = 1 + torch.randint(64, (num_experts,), generator=generator) / 64
    return torch.where(torch.rand(num_experts, generator=generator) < 0.5, -sizes_E, sizes_E)


def dense_outcome(tokens: Tokens, scales_E: Tensor) -> Outcome:
    """Compute the layer in float64, without a dispatch."""
    x_TD, upstream_TD, weights_TK = tokens.x_TD.double(), tokens.upstream_TD.double(), tokens.weights_TK.double()
    scales_TK = scales_E.double()[tokens.ids_TK]
    share_T = (weights_TK * scales_TK).sum(1, keepdim=True)
    return Outcome(
        y_TD=x_TD * share_T,
        grad_x_TD=upstream_TD * share_T,
        grad_weights_TK=(x_TD * upstream_TD).sum(1, keepdim=True) * scales_TK,
    )


def magnitudes(tokens: Tokens, scales_E: Tensor) -> Outcome:
    """Sum the absolute values of the terms of each entry. Rounding errors are relative to this sum."""
    unsigned = replace(tokens, x_TD=tokens.x_TD.abs(), upstream_TD=tokens.upstream_TD.abs())
    return dense_outcome(unsigned, scales_E.abs())


def require_agreement(names: str, got: Outcome, want: Outcome, scale: Outcome, tolerance: float) -> float:
    """Compare two outcomes entry by entry, and return the largest error, relative to ``scale``.

    Raises:
        DisagreementError: An error exceeds ``tolerance``, or a result is not finite.
    """
    worst = 0.0
    for field in ("y_TD", "grad_x_TD", "grad_weights_TK"):
        error = largest_error(*(getattr(outcome, field).double() for outcome in (got, want, scale)))
        if not error <= tolerance:
            raise DisagreementError(
                f"{names}: {field} must agree within {tolerance:g} of its terms' magnitude, got {error:.3g}. "
                "Do not trust the times of either one."
            )
        worst = max(worst, error)
    return worst


def largest_error(got: Tensor, want: Tensor, scale: Tensor) -> float:
    """Return the largest difference, divided by ``scale``: 0 without entries, NaN if a difference is NaN."""
    return float(((got - want).abs() / scale.clamp_min(torch.finfo(scale.dtype).tiny)).max()) if got.numel() else 0.0
