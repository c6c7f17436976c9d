"""That contenders compute the same layer, forward and backward: with the dense result, and with each other."""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor

from moe_dispatch.cli.bench.contenders import Contender, run_layer, scaling_experts
from moe_dispatch.cli.bench.workload import (
    TOLERANCES,
    Outcome,
    Tokens,
    dense_outcome,
    draw_scales,
    magnitudes,
    require_agreement,
)


def check_agreement(contenders: dict[str, Contender], tokens: Tokens, group: dist.ProcessGroup) -> dict[str, float]:
    """Run every contender on ``tokens`` with experts that differ. Collective.

    Returns:
        By contender, the largest difference to the dense result, relative to the magnitude of its terms.

    Raises:
        DisagreementError: a contender is wrong, or differs from the first.
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
    scales_PL = _scales(tokens).view(group.size(), -1)
    return run_layer(contender, tokens, scaling_experts(scales_PL[group.rank()]))


def _scales(tokens: Tokens) -> Tensor:
    return draw_scales(len(tokens.tokens_per_expert_E)).to(tokens.x_TD.device)
