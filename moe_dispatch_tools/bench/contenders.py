"""Contenders: implementations of one MoE layer.

All contenders use the same experts, so they differ only in how they move rows.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor

from moe_dispatch import DispatcherConfig, Routing, build_dispatcher
from moe_dispatch.dispatchers.autograd import Selection, State, attach, combine
from moe_dispatch.layouts import Rows
from moe_dispatch.types import Dispatched
from moe_dispatch_tools.bench.workload import Shape, Tokens

# A function from rows (R, D) to rows (R, D). Its second argument is a function that returns the expert of each row,
# int64 (R,), counted from the first expert of this rank. It is not in 0..L-1 if a slot holds an expert of another rank.
Experts = Callable[[Tensor, Callable[[], Tensor]], Tensor]


@final
@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Outcome:
    """Output and gradients of one forward and backward."""

    y_TD: Tensor
    grad_x_TD: Tensor
    grad_weights_TK: Tensor


class Contender(ABC):
    """An implementation of the layer, for one shape on one group."""

    @abstractmethod
    def layer(self, x_TD: Tensor, weights_TK: Tensor, tokens: Tokens, experts: Experts) -> Tensor:
        """Dispatch, run the experts and combine; return (T, D). The leaves are ``x_TD`` and ``weights_TK``."""

    def weight_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Return the dtype of the weights that the router of this library gives for rows of ``dtype``."""
        return torch.float32

    def close(self) -> None:  # noqa: B027 - optional: the peers have nothing to close
        """Release buffers and groups that outlive a call."""

    def dropped(self) -> bool:
        """Return whether any rank dropped rows because a buffer was full. Collective."""
        return False

    def leaves(self, tokens: Tokens) -> tuple[Tensor, Tensor]:
        """Return the rows and the weights as leaves of a new graph."""
        weights_TK = tokens.weights_TK.to(self.weight_dtype(tokens.x_TD.dtype))
        return tokens.x_TD.detach().requires_grad_(), weights_TK.detach().requires_grad_()


@final
class Ours(Contender):
    """A dispatcher of moe-dispatch. Its backend is ``alltoall`` unless ``fields`` of its config name another."""

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
        rows_RD = experts(sent.rows, lambda: self._experts_of_rows(sent))
        return self.dispatcher.combine(rows_RD, sent)

    def _experts_of_rows(self, sent: Dispatched) -> Tensor:
        slots_R = _experts_up_to(sent.offs, len(sent.rows))
        if sent.placement is None:
            return slots_R
        ranks = self.dispatcher._channel.communicator
        first = ranks.rank * self.dispatcher.config.num_experts // ranks.size
        return torch.tensor(sent.placement.slots[ranks.rank], device=slots_R.device)[slots_R] - first

    def close(self) -> None:
        self.dispatcher.close()

    def dropped(self) -> bool:
        return self.dispatcher.config.graph_safe and self.dispatcher.check().overflowed


def _experts_up_to(offs_L: Tensor, rows: int) -> Tensor:
    """Return the local expert of each row, int64 (R,). Unused rows of graph-safe mode belong to the last expert."""
    experts_R = torch.searchsorted(offs_L, torch.arange(rows, dtype=offs_L.dtype, device=offs_L.device), right=True)
    return experts_R.clamp_max(len(offs_L) - 1)


def experts_of_rows(tokens_per_expert_L: Tensor) -> Tensor:
    """Return the local expert of each row, for rows in the order of experts: int64 (R,)."""
    experts_L = torch.arange(len(tokens_per_expert_L), device=tokens_per_expert_L.device)
    return experts_L.repeat_interleave(tokens_per_expert_L)


def scaling_experts(scales_E: Tensor, first: int) -> Experts:
    """Make experts that multiply each row by the number of its expert. This rank's experts begin with ``first``."""

    def scale(rows_RD: Tensor, local_ids: Callable[[], Tensor]) -> Tensor:
        return rows_RD * scales_E[first + local_ids()].to(rows_RD.dtype).unsqueeze(1)

    return scale


def identity_experts(rows_RD: Tensor, local_ids: Callable[[], Tensor]) -> Tensor:
    """Return the rows unchanged: experts that cost nothing."""
    return rows_RD


def run_layer(contender: Contender, tokens: Tokens, experts: Experts) -> Outcome:
    """Run one forward and backward."""
    x_TD, weights_TK = contender.leaves(tokens)
    y_TD = contender.layer(x_TD, weights_TK, tokens, experts)
    grad_x_TD, grad_weights_TK = torch.autograd.grad(y_TD, (x_TD, weights_TK), tokens.upstream_TD)
    return Outcome(y_TD=y_TD.detach(), grad_x_TD=grad_x_TD, grad_weights_TK=grad_weights_TK)


@final
class ByHand(Contender):
    """The backend ``alltoall`` without the dispatcher: no checks, layouts, padding, merging or metrics.

    The difference from ``Ours`` is the cost of the dispatcher itself.
    """

    def __init__(self, shape: Shape, group: dist.ProcessGroup) -> None:
        self._ours = Ours(shape, group)
        self._channel = self._ours.dispatcher._channel

    def layer(self, x_TD: Tensor, weights_TK: Tensor, tokens: Tokens, experts: Experts) -> Tensor:
        sizes = self._ours.dispatcher.plan(Rows(), like=x_TD).sizes
        arrived = self._channel.backend.dispatch(x_TD.detach(), tokens.ids_TK, weights_TK.detach(), sizes)
        selection = Selection(num_rows=len(x_TD), real_rows=None, padded=len(x_TD))
        state = State(
            lease=self._ours.dispatcher._lease,
            layout=Rows(),
            shape=x_TD.shape,
            selection=selection,
            wants_weights=True,
            route=arrived.route,
        )
        arrived_RD, weights_R = attach(x_TD, weights_TK, state, (arrived.rows, arrived.weights))
        rows_RD = experts(arrived_RD, lambda: experts_of_rows(arrived.tokens_per_expert))
        return combine(rows_RD, weights_R, state, self._channel)

    def close(self) -> None:
        self._ours.close()
