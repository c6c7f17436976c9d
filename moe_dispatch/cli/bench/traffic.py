"""What one layer sends to other ranks, by phase, whichever collectives it calls."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from moe_dispatch.cli.bench.contenders import Contender
from moe_dispatch.cli.bench.interception import PHASES
from moe_dispatch.cli.bench.workload import Tokens
from moe_dispatch.testing.counting import count_collectives


def sent_by_phase(contender: Contender, tokens: Tokens) -> dict[str, int]:
    """Bytes of this rank in the phases of one forward and backward. Collective."""
    ends: list[int] = []

    def experts(rows_RD: Tensor, local_ids: Callable[[], Tensor]) -> Tensor:
        ends.append(collectives.nbytes)
        return rows_RD

    x_TD, weights_TK = contender.leaves(tokens)
    with count_collectives() as collectives:
        y_TD = contender.layer(x_TD, weights_TK, tokens, experts)
        ends.append(collectives.nbytes)
        torch.autograd.grad(y_TD, (x_TD, weights_TK), tokens.upstream_TD)
        ends.append(collectives.nbytes)
    return {phase: end - start for phase, start, end in zip(PHASES, [0, *ends], ends, strict=False)}
