"""What one layer sends to other ranks, by phase, whichever collectives it calls, and the least that it must send."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from moe_dispatch.cli.bench.contenders import Contender
from moe_dispatch.cli.bench.workload import Tokens
from moe_dispatch.testing.counting import count_collectives

PHASES = ("dispatch", "combine", "backward")


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


def floor_bytes(tokens: Tokens, group: dist.ProcessGroup) -> int:
    """The fewest bytes of this rank one way: each token once to each other rank that owns one of its experts.

    A row is its numbers, and 6 bytes per slot for a float32 weight and an int16 expert id.
    """
    ranks_TK = tokens.ids_TK // (len(tokens.tokens_per_expert_E) // group.size())
    members_TP = torch.zeros(len(ranks_TK), group.size(), dtype=torch.bool, device=ranks_TK.device).scatter_(
        1, ranks_TK, True
    )
    members_TP[:, group.rank()] = False
    row_bytes = tokens.x_TD.shape[1] * tokens.x_TD.itemsize
    return int(members_TP.sum()) * (row_bytes + 6 * ranks_TK.shape[1])
