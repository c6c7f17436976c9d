"""Moving rows by an index and its inverse, so that the backward is a gather too."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def gather_rows(x: Tensor, index: Tensor, inverse: Tensor) -> Tensor:
    """Rows of ``x`` in another order: row ``i`` is ``x[index[i]]``, zero where ``index[i]`` is -1.

    Args:
        x: (n, ...).
        index: int64 (m,), each row of ``x`` at most once.
        inverse: int64 (n,), where each row of ``x`` went, -1 where nowhere.

    Returns:
        (m, ...), differentiable any number of times. Rows that went nowhere get zero gradient, and neither they nor
        gradients of zero rows are ever multiplied, so they may hold NaN.

    Cost: one pass each way, without atomics; no host sync.
    """
    moved: Tensor = _GatherRows.apply(x, index, inverse)  # type: ignore[no-untyped-call]
    return moved


def invert(index: Tensor, num_rows: int) -> Tensor:
    """The inverse that ``gather_rows`` takes: int64 (num_rows,), for an index without -1."""
    inverse = torch.full((num_rows,), -1, device=index.device)
    return inverse.scatter_(0, index, torch.arange(len(index), device=index.device))


class _GatherRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, index: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(index, inverse)
        if not len(x):
            return x.new_zeros(len(index), *x.shape[1:])
        rows = x.index_select(0, index.clamp(min=0))
        return rows.masked_fill_((index < 0).view(-1, *[1] * (x.dim() - 1)), 0)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        index, inverse = ctx.saved_tensors
        return gather_rows(grads[0], inverse, index), None, None
