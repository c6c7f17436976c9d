"""What is compared: one MoE layer, its experts given from outside, so that only moving rows differs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor

from moe_dispatch import DispatcherConfig, Routing, build_dispatcher
from moe_dispatch.cli.bench.workload import Outcome, Shape, Tokens

# Rows (R, D) as they arrived, and a function that tells the local expert of each, int64 (R,); gives rows (R, D).
Experts = Callable[[Tensor, Callable[[], Tensor]], Tensor]


class Contender(ABC):
    """A dispatcher that was opened for one shape on one group."""

    @abstractmethod
    def layer(self, x_TD: Tensor, weights_TK: Tensor, tokens: Tokens, experts: Experts) -> Tensor:
        """Dispatch, experts, combine: (T, D). ``x_TD`` and ``weights_TK`` are the leaves that get gradients."""

    def weight_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """The dtype in which this contender's own router gives weights, for rows of ``dtype``."""
        return torch.float32

    def close(self) -> None:  # noqa: B027 - the peers keep nothing
        """Give up what outlives a call."""

    def dropped(self) -> bool:
        """Whether rows were left out for want of room, on any rank. Collective."""
        return False

    def leaves(self, tokens: Tokens) -> tuple[Tensor, Tensor]:
        """Rows and weights as leaves of a new graph."""
        weights_TK = tokens.weights_TK.to(self.weight_dtype(tokens.x_TD.dtype))
        return tokens.x_TD.detach().requires_grad_(), weights_TK.detach().requires_grad_()


@final
class Ours(Contender):
    """moe-dispatch, with its ``alltoall`` backend or as ``fields`` of its config say."""

    def __init__(
        self,
        shape: Shape,
        group: dist.ProcessGroup | None,
        control_group: dist.ProcessGroup | None = None,
        **fields: Any,
    ) -> None:
        sizes = {"num_experts": shape.experts, "top_k": shape.top_k, "hidden_size": shape.hidden}
        config = DispatcherConfig(**{"backend": "alltoall", **sizes, **fields})
        self.dispatcher = build_dispatcher(config, group=group, control_group=control_group)

    def layer(self, x_TD: Tensor, weights_TK: Tensor, tokens: Tokens, experts: Experts) -> Tensor:
        sent = self.dispatcher.dispatch(x_TD, Routing(tokens.ids_TK, weights_TK))
        rows_RD = experts(sent.rows, lambda: _experts_up_to(sent.offs, len(sent.rows)))
        return self.dispatcher.combine(rows_RD, sent)

    def close(self) -> None:
        self.dispatcher.close()

    def dropped(self) -> bool:
        return self.dispatcher.config.graph_safe and self.dispatcher.check().overflowed


def _experts_up_to(offs_L: Tensor, rows: int) -> Tensor:
    """int64 (R,): the local expert of each row; unused rows of graph-safe mode, behind the last one's, count as its."""
    experts_R = torch.searchsorted(offs_L, torch.arange(rows, dtype=offs_L.dtype, device=offs_L.device), right=True)
    return experts_R.clamp_max(len(offs_L) - 1)


def experts_of_rows(tokens_per_expert_L: Tensor) -> Tensor:
    """int64 (R,): the local expert of each expert-major row."""
    experts_L = torch.arange(len(tokens_per_expert_L), device=tokens_per_expert_L.device)
    return experts_L.repeat_interleave(tokens_per_expert_L)


def scaling_experts(scales_L: Tensor) -> Experts:
    """Experts that multiply by a number of their own."""

    def scale(rows_RD: Tensor, local_ids: Callable[[], Tensor]) -> Tensor:
        return rows_RD * scales_L[local_ids()].to(rows_RD.dtype).unsqueeze(1)

    return scale


def identity_experts(rows_RD: Tensor, local_ids: Callable[[], Tensor]) -> Tensor:
    """Experts that cost nothing."""
    return rows_RD


def run_layer(contender: Contender, tokens: Tokens, experts: Experts) -> Outcome:
    """One forward and backward."""
    x_TD, weights_TK = contender.leaves(tokens)
    y_TD = contender.layer(x_TD, weights_TK, tokens, experts)
    grad_x_TD, grad_weights_TK = torch.autograd.grad(y_TD, (x_TD, weights_TK), tokens.upstream_TD)
    return Outcome(y_TD=y_TD.detach(), grad_x_TD=grad_x_TD, grad_weights_TK=grad_weights_TK)
