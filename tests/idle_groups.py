"""A grouped GEMM of torch as on Blackwell: the gradient of matrices whose group has no rows is garbage."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor

GARBAGE = 7.0
product: Any = torch._grouped_mm


def _left_idle(found: Tensor, offs: Tensor) -> Tensor:
    idle = torch.diff(offs, prepend=offs.new_zeros(1)) == 0
    return torch.where(idle.view(-1, 1, 1), GARBAGE, found)


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, left: Tensor, right: Tensor, offs: Tensor) -> Tensor:
        ctx.save_for_backward(left, right, offs)
        found: Tensor = product(left, right, offs=offs)
        return found

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        left, right, offs = ctx.saved_tensors
        of_right = _left_idle(product(left.t(), grad.contiguous(), offs=offs), offs)
        return product(grad.contiguous(), right.transpose(1, 2), offs=offs), of_right, None


def _faulty(left: Tensor, right: Tensor, *, offs: Tensor, **unused: Any) -> Tensor:
    if right.dim() == 3:
        return _Product.apply(left, right, offs)  # type: ignore[no-any-return, no-untyped-call]
    return _left_idle(product(left, right, offs=offs), offs)


@contextmanager
def garbage_in_idle_groups() -> Iterator[None]:
    """A block in which torch's grouped GEMM has the fault. ``torch.nn.functional.grouped_mm`` calls this function."""
    with mock.patch.object(torch, "_grouped_mm", _faulty):
        yield
