"""One dispatch of the library in flight, and the backwards that transformer-engine's own autograd computes for it.

Only public functions are called. Their backwards have no public names, but autograd runs them: each call is made with
gradients on, and the edges of its graph are kept. An edge holds a node of the graph and no rows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, final

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from moe_dispatch.errors import StateError

if TYPE_CHECKING:
    from moe_dispatch.backends.nccl_ep.backend import NcclEP


class _Tracked(torch.autograd.Function):
    """Return a tensor as if it were computed from ``anchor``, which requires grad. The node keeps neither of them."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, given: Tensor) -> Tensor:
        return given.detach()


_track: Any = _Tracked.apply


@final
class Exchange:
    """The library's buffer of one dispatch, with the edges of the graphs of its calls.

    The library keeps the routing in memory of the buffer, for one size of its group. If the group was made anew since
    (``NcclEP.reserve``), the ranks send their ids again before the next call of an eager dispatch, which gives every
    row the same place. This happens on all ranks alike, because a group is made anew on all ranks.

    Args:
        backend: The backend, whose group must be ready.
        ids_TK: int64 (T, K), -1 for no expert.
    """

    def __init__(self, backend: NcclEP, ids_TK: Tensor) -> None:
        self._backend = backend
        self._ids_TK = ids_TK.contiguous()
        self._there: tuple[GradientEdge, ...] = ()
        self._back: tuple[GradientEdge, ...] = ()
        self._open()

    def _open(self) -> None:
        self._group = self._backend.group_number
        self.buffer = self._backend.make_buffer(self._ids_TK.device)
        self._there = self._back = ()

    def dispatch(self, rows_TD: Tensor, weights_TK: Tensor) -> tuple[Tensor, Tensor]:
        """Send bfloat16 rows and float32 weights to the experts. Returns (R, D) and (R,), and 0 on padding."""
        ep = self._backend.ep
        if rows_TD.is_inference() or torch.is_inference_mode_enabled():  # no backward can follow
            got: tuple[Tensor, Tensor] = ep.ep_dispatch(self.buffer, rows_TD, self._ids_TK, weights_TK)[:2]
            return got
        with torch.enable_grad():
            given = tuple(_track(self._backend.anchor, tensor) for tensor in (rows_TD, weights_TK))
            rows_RD, weights_R, _ = ep.ep_dispatch(self.buffer, given[0], self._ids_TK, given[1])
        self._there = tuple(map(get_gradient_edge, (rows_RD, weights_R, *given)))
        return rows_RD.detach(), weights_R.detach()

    def send(self, rows_TD: Tensor) -> Tensor:
        """Send other rows to the same places: (R, D)."""
        self._renew()
        weights_TK = torch.zeros(self._ids_TK.shape, device=rows_TD.device)
        rows_RD: Tensor = self._backend.ep.ep_dispatch(self.buffer, rows_TD, self._ids_TK, weights_TK)[0]
        return rows_RD

    def combine(self, rows_RD: Tensor) -> Tensor:
        """Bring bfloat16 expert rows back, and add the rows of each token: (T, D)."""
        self._renew()
        ep, tokens = self._backend.ep, len(self._ids_TK)
        if rows_RD.is_inference() or torch.is_inference_mode_enabled():
            plain: Tensor = ep.ep_combine(self.buffer, rows_RD, num_local_tokens=tokens)
            return plain
        with torch.enable_grad():
            given = _track(self._backend.anchor, rows_RD)
            out = ep.ep_combine(self.buffer, given, num_local_tokens=tokens)
        self._back = get_gradient_edge(out), get_gradient_edge(given)
        result: Tensor = out.detach()
        return result

    def dispatch_backward(self, grad_RD: Tensor, grad_R: Tensor) -> tuple[Tensor, Tensor]:
        """Bring bfloat16 gradients of expert rows and float32 ones of their weights back: (T, D) and (T, K)."""
        self._renew()
        rows, weights, *given = self._there
        grad_TD, grad_TK = _backward((rows, weights), given, (grad_RD, grad_R))
        return grad_TD, grad_TK

    def combine_backward(self, grad_TD: Tensor, num_grouped: int) -> Tensor:
        """Send bfloat16 gradients of the sums to the expert rows: (R, D), 0 on padding."""
        self._renew()
        if not self._back:  # nothing was combined since the group was made anew
            self.combine(grad_TD.new_zeros(num_grouped, grad_TD.shape[1]))
        out, given = self._back
        return _backward((out,), (given,), (grad_TD,))[0]

    def _renew(self) -> None:
        """Send the ids again if the group was made anew since the last call. Collective if it was."""
        if self._group == self._backend.group_number:
            return
        if not self._backend.is_open:
            raise StateError(
                "Backend 'nccl_ep': its group must be open, got a call after close(). Close the dispatcher after the "
                "last backward."
            )
        if self._backend.context.shape.graph_safe:
            raise StateError(
                "Backend 'nccl_ep': its buffers have grown since this dispatch, got a combine or a backward of it. Run "
                "the step again, forward and backward."
            )
        self._open()
        width = self._backend.context.shape.hidden_size
        rows_TD = torch.zeros(len(self._ids_TK), width, dtype=torch.bfloat16, device=self._ids_TK.device)
        self.dispatch(rows_TD, torch.zeros(self._ids_TK.shape, device=self._ids_TK.device))


def _backward(outputs: tuple[GradientEdge, ...], inputs: Any, grads: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return torch.autograd.grad(outputs, tuple(inputs), grads, retain_graph=True)
