"""Work on expert-major rows: split them by expert, or multiply each expert's rows by the expert's matrix."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.library import get_ctx

from moe_dispatch._custom_operators import operator

# torch's grouped GEMM wants every row of both operands to start at a multiple of 16 bytes.
ALIGNED_BYTES = 16


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


def grouped_mm(rows: Tensor, weights: Tensor, offs: Tensor) -> Tensor:
    """Multiply each expert's rows by the expert's matrix; see ``Dispatched.grouped_mm``.

    Args:
        rows: (R, D), expert-major.
        weights: (L, D, H), in the dtype of ``rows``.
        offs: int32 (L,), the end of each expert's rows.

    Returns:
        (R, H). Rows behind ``offs[-1]`` may hold any value.
    """
    if rows.dtype == torch.float64:
        return _masked_mm(rows, weights, offs)
    multiple, width = ALIGNED_BYTES // rows.element_size(), weights.shape[2]
    pad_D, pad_H = -weights.shape[1] % multiple, -width % multiple
    if pad_D or pad_H:  # zero columns add nothing to a product
        rows, weights = F.pad(rows, (0, pad_D)), F.pad(weights, (0, pad_H, 0, pad_D))
    rows = rows.contiguous()
    if not torch.compiler.is_compiling():
        y: Tensor = _ContiguousGradient.apply(_aligned_mm(rows, weights, offs))  # type: ignore[no-untyped-call]
    elif rows.dtype == torch.bfloat16:
        y = _aligned_mm(rows, weights, offs)
    else:  # torch's fake kernel takes bfloat16 only
        y = aligned_mm(rows, weights, offs)
    return y[:, :width] if pad_H else y


def _masked_mm(rows: Tensor, weights: Tensor, offs: Tensor) -> Tensor:
    """Run ``grouped_mm`` in float64, which torch's grouped GEMM does not support. Computes L products of all rows."""
    positions_R = torch.arange(rows.shape[0], dtype=offs.dtype, device=offs.device)
    expert_R1 = torch.searchsorted(offs, positions_R, right=True).unsqueeze(1)
    y = rows.new_zeros(rows.shape[0], weights.shape[2])
    for index in range(weights.shape[0]):
        y = y + torch.where(expert_R1 == index, rows, 0) @ weights[index]
    return y


def _aligned_mm(left: Tensor, right: Tensor, offs: Tensor) -> Tensor:
    product: Tensor = F.grouped_mm(left, right, offs=offs)
    return product


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
    return _aligned_mm(left, right, offs).contiguous()


@aligned_mm.register_fake
def _(left: Tensor, right: Tensor, offs: Tensor) -> Tensor:
    shape = (left.shape[0], right.shape[-1])
    return left.new_empty(shape if right.dim() == 3 else (offs.shape[0], *shape))


def _keep_operands(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _aligned_gradients(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
    left, right, offs = ctx.saved_tensors
    assert right.dim() == 3  # otherwise a backward of a backward, which torch.compile refuses
    grad = grad.contiguous()
    return aligned_mm(grad, right.transpose(1, 2), offs), aligned_mm(left.t(), grad, offs), None


aligned_mm.register_autograd(_aligned_gradients, setup_context=_keep_operands)


class _ContiguousGradient(torch.autograd.Function):
    """Make the gradient contiguous, because torch's grouped GEMM refuses the expanded gradient of a sum."""

    @staticmethod
    def forward(ctx: Any, y: Tensor) -> Tensor:
        return y.view_as(y)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return contiguous_gradient(grad)


def contiguous_gradient(grad: Tensor) -> Tensor:
    """Return a contiguous gradient. ``contiguous`` leaves an empty one as it is, also if it is expanded."""
    return grad.contiguous() if grad.numel() else grad.clone(memory_format=torch.contiguous_format)
