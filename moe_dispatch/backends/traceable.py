"""What a backend offers beside the contract so that its verbs can be operators, which ``torch.compile`` traces.

An operator takes and gives tensors only, and brings its own backward. So such a backend can turn the state of a
dispatch into tensors and back, run both backwards outside autograd, and say what a dispatch gives without running it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from moe_dispatch.backends.base import Arrived, BackendContext
from moe_dispatch.backends.capacity import Capacity
from moe_dispatch.backends.rank_major import Route, combine_backward, dispatch_backward


class Traceable(ABC):
    """To be inherited beside ``Backend`` where ``constraints.compilable``.

    All methods are raw: autograd is the caller's. Those of ``Backend`` are called with gradients off.
    """

    @abstractmethod
    def flatten(self, state: Any) -> list[Tensor]:
        """The state of a dispatch as tensors, none of which shares memory with another or with what was dispatched.

        What lives on the host, such as the sizes of messages, becomes int64 tensors on the CPU.
        """

    @abstractmethod
    def restore(self, tensors: Sequence[Tensor]) -> Any:
        """The state whose ``flatten`` these are; no device is read."""

    @abstractmethod
    def blank(
        self,
        rows_TD: Tensor,
        weights_TK: Tensor,
        num_rows: int | None,
        new_size: Callable[[], int],
        capacity: Capacity | None,
    ) -> Arrived:
        """What a dispatch gives, as tensors without values: shapes, dtypes and devices, for fake kernels.

        Args:
            rows_TD: what is dispatched, not yet padded: its dtype and device count. It may be wrong in all else, which
                running it refuses.
            weights_TK: likewise.
            num_rows: how many rows the rank brings, padded; None where only running tells.
            new_size: makes a symbol for a size that only running tells. Each must be the length of some tensor of the
                state or of the rows; sizes that are static need none.
            capacity: of a graph-safe dispatch, whose sizes are all static.
        """

    @abstractmethod
    def rows_brought(self, state: Any) -> int:
        """How many rows this rank brought to that dispatch, padded."""

    @abstractmethod
    def dispatch_backward(self, grad_RD: Tensor, grad_R: Tensor | None, state: Any) -> tuple[Tensor, Tensor | None]:
        """Gradients of the rows dispatched, (Tp, D), and where ``grad_R`` is given of their weights, (Tp, K).

        Collective. What the gradients hold on padding is never read.
        """

    @abstractmethod
    def combine_backward(
        self, grad_TD: Tensor, rows_RD: Tensor | None, weights_R: Tensor, state: Any, *, weighted: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Gradients of the combined rows, (R, D), and where ``rows_RD`` is given of their weights, (R,).

        Collective.
        """


class TraceableRoute(Route):
    """A route that is made of tensors, and of what its backend knows."""

    __slots__ = ()

    @abstractmethod
    def tensors(self) -> list[Tensor]:
        """What ``Traceable.flatten`` gives for it."""

    @property
    @abstractmethod
    def num_home_rows(self) -> int:
        """Tp, rows this rank sent and gets back."""


class TracedRoutes(Traceable):
    """``Traceable`` for a backend whose state is a ``TraceableRoute``; left to it are two ways of making one."""

    context: BackendContext

    @abstractmethod
    def blank_route(
        self, num_rows: int | None, weights_TK: Tensor, new_size: Callable[[], int], capacity: Capacity | None
    ) -> TraceableRoute:
        """The route of a dispatch of so many rows, with tensors that have no values; see ``Traceable.blank``."""

    def flatten(self, state: Any) -> list[Tensor]:
        """The route's own tensors."""
        tensors: list[Tensor] = state.tensors()
        return tensors

    def rows_brought(self, state: Any) -> int:
        """What the route knows."""
        count: int = state.num_home_rows
        return count

    def blank(
        self,
        rows_TD: Tensor,
        weights_TK: Tensor,
        num_rows: int | None,
        new_size: Callable[[], int],
        capacity: Capacity | None,
    ) -> Arrived:
        """The sizes of the blank route."""
        route = self.blank_route(num_rows, weights_TK, new_size, capacity)
        counts_L = torch.empty(self.context.shape.num_local_experts, dtype=torch.int64, device=rows_TD.device)
        return Arrived(
            rows=rows_TD.new_empty(route.index.num_grouped, self.context.shape.hidden_size),
            weights=weights_TK.new_empty(route.index.num_grouped),
            tokens_per_expert=counts_L,
            real_tokens_per_expert=counts_L,
            tokens_per_expert_list=None,
            state=route,
        )

    def dispatch_backward(self, grad_RD: Tensor, grad_R: Tensor | None, state: Any) -> tuple[Tensor, Tensor | None]:
        """Collected like a combine."""
        return dispatch_backward(grad_RD, grad_R, state)

    def combine_backward(
        self, grad_TD: Tensor, rows_RD: Tensor | None, weights_R: Tensor, state: Any, *, weighted: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Spread like a dispatch."""
        return combine_backward(grad_TD, rows_RD, weights_R if weighted else None, state)
