"""The backend behind a dispatcher, called by hand: beside it shows what the dispatcher itself costs."""

from __future__ import annotations

from typing import final

import torch.distributed as dist
from torch import Tensor

from moe_dispatch.cli.bench.contenders import Contender, Experts, Ours, experts_of_rows
from moe_dispatch.cli.bench.workload import Shape, Tokens
from moe_dispatch.dispatchers.planning import draft_plan, settle_plan
from moe_dispatch.layouts import Rows


@final
class ByHand(Contender):
    """``alltoall`` without checks, layouts, padding, merging of duplicates and metrics: not needed here."""

    def __init__(self, shape: Shape, group: dist.ProcessGroup) -> None:
        self._ours = Ours(shape, group)
        self._channel = self._ours.dispatcher._lease.channel

    def layer(self, x_TD: Tensor, weights_TK: Tensor, tokens: Tokens, experts: Experts) -> Tensor:
        sizes = settle_plan(self._channel, draft_plan(self._channel, Rows(), x_TD)).sizes
        arrived = self._channel.backend.dispatch(x_TD, tokens.ids_TK, weights_TK, sizes)
        rows_RD = experts(arrived.rows, lambda: experts_of_rows(arrived.tokens_per_expert))
        return self._channel.backend.combine(rows_RD, arrived.weights, arrived.state, weighted=True)

    def close(self) -> None:
        self._ours.close()
