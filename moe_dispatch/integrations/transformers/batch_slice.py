"""The rows that one rank takes of a batch that its tensor-parallel group shares.

Each rank of the group holds all T rows. Sent by each, a token would be computed once per rank and its experts' gradient
be as many times too large; so each sends its slice, and the results are put together again.
"""

from __future__ import annotations

from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor

from moe_dispatch.communication import Communicator
from moe_dispatch.layouts import Layout, Masked, Rows


@final
class BatchSlice:
    """Contiguous slices of ceil(T / size) rows by rank; the last ones may be shorter, or empty.

    Args:
        group: the ranks that hold the same rows, or None for a rank that holds its own.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self._group = Communicator(group)

    def span(self, num_rows: int) -> tuple[int, int]:
        """Where this rank's slice begins and ends."""
        length = -(-num_rows // self._group.size)
        return min(self._group.rank * length, num_rows), min((self._group.rank + 1) * length, num_rows)

    def layout(self, whole: Layout, num_rows: int) -> Layout:
        """The layout of the slice."""
        start, stop = self.span(num_rows)
        valid_T = whole.valid_T(num_rows) if self._group.size > 1 else None
        if self._group.size == 1:
            return whole
        return Rows() if valid_T is None else Masked(valid_T[start:stop])

    def take(self, x: Tensor) -> Tensor:
        """The slice of (T, ...). Differentiable: every rank gets the gradient of all T rows.

        Cost: nothing; an all-gather in the backward.
        """
        if self._group.size == 1:
            return x
        taken: Tensor = _Take.apply(x, self)  # type: ignore[no-untyped-call]
        return taken

    def put_together(self, y: Tensor, num_rows: int) -> Tensor:
        """All T rows, of each rank's slice. Differentiable.

        Cost: an all-gather; nothing in the backward.
        """
        if self._group.size == 1:
            return y
        whole: Tensor = _PutTogether.apply(y, self, num_rows)  # type: ignore[no-untyped-call]
        return whole

    def cut(self, x: Tensor) -> Tensor:
        """``take`` without autograd."""
        start, stop = self.span(len(x))
        return x[start:stop]

    def gather(self, y: Tensor, num_rows: int) -> Tensor:
        """``put_together`` without autograd."""
        length = -(-num_rows // self._group.size)
        mine = y.new_zeros(length, *y.shape[1:])
        mine[: len(y)] = y
        everyone = y.new_empty(length * self._group.size, *y.shape[1:])
        self._group.all_gather(everyone, mine, label="slices")
        return everyone[:num_rows]


class _Take(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, slices: BatchSlice) -> Tensor:
        ctx.slices, ctx.num_rows = slices, len(x)
        return slices.cut(x).clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return ctx.slices.gather(grads[0], ctx.num_rows), None


class _PutTogether(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, slices: BatchSlice, num_rows: int) -> Tensor:
        ctx.slices = slices
        return slices.gather(y, num_rows)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        # Each rank computes the same loss of the same rows, so its own part of the gradient is the whole of it.
        return ctx.slices.cut(grads[0]), None, None
