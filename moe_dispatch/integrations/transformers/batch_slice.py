"""Slices of a batch for the ranks of a tensor-parallel group, which all hold the same T rows.

If each rank sent all rows, every token would be computed once per rank, and the gradients of the experts would be too
large by a factor of the group size. So each rank sends a slice, and the results are joined again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor

from moe_dispatch.communication import Communicator
from moe_dispatch.layouts import Layout, Masked, Rows


@final
class BatchSlice:
    """Contiguous slices of ceil(T / size) rows by rank; the last slices may be shorter, or empty.

    Args:
        group: Ranks that hold the same rows, or None if each rank holds its own rows.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self._group = Communicator(group)

    def span(self, num_rows: int) -> tuple[int, int]:
        """Return where this rank's slice begins and ends."""
        length = -(-num_rows // self._group.size)
        return min(self._group.rank * length, num_rows), min((self._group.rank + 1) * length, num_rows)

    def layout(self, whole: Layout, num_rows: int) -> Layout:
        """Return the layout of the slice."""
        if self._group.size == 1:
            return whole
        valid_T = whole.valid_T(num_rows)
        return Rows() if valid_T is None else Masked(self.cut(valid_T))

    def cut(self, x: Tensor) -> Tensor:
        """Return the slice of (T, ...)."""
        start, stop = self.span(len(x))
        return x[start:stop]

    def share(self, counts: Tensor) -> Tensor:
        """Return this rank's part of counts of all T rows, which every rank knows: all of them on the first rank."""
        return counts if self._group.rank == 0 else torch.zeros_like(counts)

    def take(self, x: Tensor) -> Tensor:
        """Return the slice of (T, ...), with autograd: every rank gets the gradient of all T rows.

        Cost: an all-gather in the backward.
        """
        num_rows = len(x)
        return self._linear(x, lambda x: self.cut(x).clone(), lambda grad: self._gather_slices(grad, num_rows))

    def put_together(self, y: Tensor, num_rows: int) -> Tensor:
        """Join the slices of all ranks to T rows, with autograd.

        Each rank computes the same loss from the same rows, so its slice of the gradient is already complete.

        Cost: an all-gather in the forward.
        """
        return self._linear(y, lambda y: self._gather_slices(y, num_rows), self.cut)

    def _linear(self, x: Tensor, forward: Callable[[Tensor], Tensor], backward: Callable[[Tensor], Tensor]) -> Tensor:
        if self._group.size == 1:
            return x
        y: Tensor = _Linear.apply(x, forward, backward)  # type: ignore[no-untyped-call]
        return y

    def _gather_slices(self, y: Tensor, num_rows: int) -> Tensor:
        length = -(-num_rows // self._group.size)
        mine = y.new_zeros(length, *y.shape[1:])
        mine[: len(y)] = y
        everyone = y.new_empty(length * self._group.size, *y.shape[1:])
        self._group.all_gather(everyone, mine, label="slices")
        return everyone[:num_rows]


class _Linear(torch.autograd.Function):
    """A linear function. Its backward is the transposed function."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, forward: Callable[[Tensor], Tensor], backward: Callable[[Tensor], Tensor]
    ) -> Tensor:
        ctx.transpose = backward
        return forward(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return ctx.transpose(grads[0]), None, None
