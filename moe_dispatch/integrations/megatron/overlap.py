"""Tensors under ``overlap_moe_expert_parallel_comm``, which runs a forward beside the backward of another micro-batch.

Megatron's schedule calls each phase of a dispatcher as a node, cuts the autograd graph between nodes, and frees the
memory of what a node was given. So a phase passes a stand-in without memory to the next one, which puts the real
tensor in its place. Nothing is copied, and no tensor lives longer than in an ordinary call.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def stand_in(tensor: Tensor) -> Tensor:
    """Return a tensor with the shape of ``tensor`` and memory for one number. Its gradient is that of ``tensor``."""
    empty = torch.empty_strided(tensor.shape, [0] * tensor.dim(), dtype=tensor.dtype, device=tensor.device)
    return put_in_place(tensor, empty)


def put_in_place(tensor: Tensor, other: Tensor) -> Tensor:
    """Return ``other``, which must be detached, in the place of ``tensor``, which gets its gradient."""
    placed: Tensor = _PutInPlace.apply(tensor, (other,))  # type: ignore[no-untyped-call]
    return placed


class _PutInPlace(torch.autograd.Function):
    """``other`` is in a tuple, because autograd turns a tensor that is both an argument and a result into a view."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, other: tuple[Tensor]) -> Tensor:
        return other[0]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


def use_on_current_stream(*tensors: Tensor | None) -> None:
    """Keep the memory of tensors that another stream made until the current stream has used them."""
    for tensor in tensors:
        if tensor is not None:
            tensor.record_stream(torch.cuda.current_stream())
