"""A small layer around a registered operator, with places where tests plant host syncs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def harmless(x: Tensor) -> None:
    """Run operations that look like host syncs but are none, such as an index of integers."""
    order = x.detach()[:, 0].argsort()
    x.detach()[order].index_put_((order,), x.detach())
    x.detach().repeat_interleave(order, dim=0, output_size=6)
    torch.nonzero_static(x > 0, size=4)
    torch.tensor([1, 2]).to(x.device, non_blocking=True)
    x.detach().to(torch.float64)


PLANTS: dict[str, Callable[[Tensor], object]] = {
    "value": lambda x: x.detach().sum().tolist(),
    "shape": lambda x: x.detach()[x.detach() > 0],
    "size": lambda x: x.detach().repeat_interleave(torch.arange(len(x)), dim=0),
}
NAMES = {"value": "tolist", "shape": "aten::index", "size": "aten::repeat_interleave"}
PLACES = ("operator", "backward", "plain")

planted: dict[str, Callable[[Tensor], object]] = dict.fromkeys(PLACES, harmless)
groups: dict[int, dist.ProcessGroup] = {}


@torch.library.custom_op("moe_dispatch::planted_forward", mutates_args=())
def operator(x: Tensor, rank: int) -> Tensor:
    out = torch.empty_like(x)
    if rank in groups:
        groups[rank].alltoall_base(out, x.contiguous(), [], []).wait()
    planted["operator"](x)
    return out.copy_(x)


@operator.register_fake
def _(x: Tensor, rank: int) -> Tensor:
    return torch.empty_like(x)


def _backward(ctx: Any, grad: Tensor) -> Any:
    planted["backward"](grad)
    return operator(grad, ctx.rank), None


def _setup(ctx: Any, inputs: Any, output: Tensor) -> None:
    ctx.rank = inputs[1]


operator.register_autograd(_backward, setup_context=_setup)


def program(rank: int = -1) -> None:
    x = torch.arange(12.0).view(4, 3).requires_grad_()
    y = operator(x * 2, rank)
    planted["plain"](y)
    (y * y).sum().backward()
