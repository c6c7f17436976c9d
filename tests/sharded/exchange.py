"""What tensor and context parallelism exchange: rows of a group, gathered or summed and divided, differentiable."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

Group = dist.ProcessGroup | None


def gather_rows(part: Tensor, group: Group) -> Tensor:
    """Rows of all ranks, in rank order; the gradient of a rank's rows is summed over all that used them."""
    result: Tensor = part if group is None else _Gather.apply(part, group)  # type: ignore[no-untyped-call]
    return result


def sum_rows(whole: Tensor, group: Group) -> Tensor:
    """This rank's part of the rows, summed over ranks; the reverse of ``gather_rows``."""
    result: Tensor = whole if group is None else _Sum.apply(whole, group)  # type: ignore[no-untyped-call]
    return result


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _gathered(part, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _summed(grads[0], ctx.group), None


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, whole: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _summed(whole, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _gathered(grads[0], ctx.group), None


def _gathered(part: Tensor, group: dist.ProcessGroup) -> Tensor:
    parts = [torch.empty_like(part) for _ in range(group.size())]
    dist.all_gather(parts, part.detach().contiguous(), group=group)
    return torch.cat(parts)


def _summed(whole: Tensor, group: dist.ProcessGroup) -> Tensor:
    total = whole.detach().clone()
    dist.all_reduce(total, group=group)
    return total.chunk(group.size())[group.rank()].clone()
