"""Work on expert-major rows in compiled regions: split them by expert, or multiply them by matrices."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor
from torch.library import get_ctx

from moe_dispatch.capabilities.compiling.registration import operator
from moe_dispatch.permutation.grouped_mm import real_rows, torch_grouped_mm
from moe_dispatch.permutation.strides import dense


@operator
def split(rows: Tensor, counts: Tensor) -> list[Tensor]:
    """Split rows by expert; the operator for compiled regions.

    Args:
        rows: (R, D), expert-major.
        counts: int64 (L,), rows of each expert; read on the host.

    Returns:
        L copies: an operator must not return views of its arguments.
    """
    return [part.clone() for part in rows.split(counts.tolist())]


@split.register_fake
def _(rows: Tensor, counts: Tensor) -> list[Tensor]:
    new_size = cast(Callable[[], int], get_ctx().new_dynamic_size)
    return [rows.new_empty(new_size(), rows.shape[1]) for _ in range(counts.shape[0])]


def _keep_shapes(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    ctx.shapes = [part.shape for part in output]


def _split_gradients(ctx: Any, grads: list[Tensor | None]) -> tuple[Any, ...]:
    like = next(grad for grad in grads if grad is not None)
    # An expert whose function ignores its rows gives them no gradient.
    whole = [like.new_zeros(shape) if grad is None else grad for shape, grad in zip(ctx.shapes, grads, strict=True)]
    return torch.cat(whole), None


split.register_autograd(_split_gradients, setup_context=_keep_shapes)


@operator
def aligned_mm(left: Tensor, right: Tensor, offs: Tensor) -> Tensor:
    """Run torch's grouped GEMM; the operator for compiled regions.

    Args:
        left: (R, D); for the gradient of the matrices, (D, R).
        right: (L, D, H); for the gradient of the matrices, (R, H).
        offs: int32 (L,), the ends of groups along R.

    Returns:
        (R, H); for the gradient of the matrices, (L, D, H).
    """
    if right.dim() == 3:
        left = dense(left)
    else:
        right = dense(right)
    return torch_grouped_mm(left, right, offs).contiguous()


@aligned_mm.register_fake
def _(left: Tensor, right: Tensor, offs: Tensor) -> Tensor:
    shape = (left.shape[0], right.shape[-1])
    return left.new_empty(shape if right.dim() == 3 else (offs.shape[0], *shape))


def _keep_operands(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _aligned_gradients(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
    left, right, offs = ctx.saved_tensors
    assert right.dim() == 3  # otherwise a backward of a backward, which torch.compile refuses
    grad = (
        grad.contiguous()
    )  # once for both; the operator itself takes care of an empty gradient, which traces cannot see
    return aligned_mm(grad, right.transpose(1, 2), offs), aligned_mm(left.t(), grad, offs), None


aligned_mm.register_autograd(_aligned_gradients, setup_context=_keep_operands)


def aligned_product(rows: Tensor, weights: Tensor, offs: Tensor, padding: Tensor | None) -> Tensor:
    """Run ``grouped_mm`` on aligned operands in a compiled region, where torch warns about autograd functions.

    torch's own grouped GEMM compiles in bfloat16 only, and refuses the expanded gradient of a sum.
    """
    outputs: Tensor
    if padding is None:
        outputs = aligned_mm(rows, weights, offs)
        return outputs
    real_R1 = real_rows(offs, padding, rows.shape[0])
    outputs = aligned_mm(torch.where(real_R1, rows, 0), weights, offs)
    return torch.where(real_R1, outputs, 0)  # for gradients, which may hold anything in other rows
