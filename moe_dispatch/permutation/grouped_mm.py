"""Work on expert-major rows: split them by expert, or multiply each expert's rows by the expert's matrix."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from moe_dispatch.permutation.strides import dense
from moe_dispatch.seams.tracing import real_tensors, traced_calls

# torch's grouped GEMM wants every row of both operands to start at a multiple of 16 bytes.
ALIGNED_BYTES = 16


def grouped_mm(rows: Tensor, weights: Tensor, offs: Tensor, padding: Tensor | None = None) -> Tensor:
    """Multiply each expert's rows by the expert's matrix; see ``Dispatched.grouped_mm``.

    Args:
        rows: (R, D), expert-major.
        weights: (L, D, H), in the dtype of ``rows``.
        offs: int32 (L,), the end of each expert's rows.
        padding: int64 (L,), how many of each expert's last rows are padding; None if there are none.

    Returns:
        (R, H). Rows behind ``offs[-1]`` may hold any value.
    """
    if rows.dtype == torch.float64:
        return _masked_mm(rows, weights, offs, padding)
    multiple, width = ALIGNED_BYTES // rows.element_size(), weights.shape[2]
    pad_D, pad_H = -weights.shape[1] % multiple, -width % multiple
    if pad_D or pad_H:  # zero columns add nothing to a product
        rows, weights = F.pad(rows, (0, pad_D)), F.pad(weights, (0, pad_H, 0, pad_D))
    if torch.compiler.is_compiling():
        y = traced_calls().aligned_product(rows.contiguous(), weights, offs, padding)
    else:
        y = _GroupedMM.apply(dense(rows), weights, offs, padding)  # type: ignore[no-untyped-call]
    return y[:, :width] if pad_H else y


def experts_of_rows(offs: Tensor, padding: Tensor | None, num_rows: int) -> Tensor:
    """Return the expert of each row, int64 (R,): L for rows of padding and behind ``offs[-1]``."""
    positions_R = torch.arange(num_rows, dtype=offs.dtype, device=offs.device)
    expert_R = torch.searchsorted(offs, positions_R, right=True)
    if padding is None:
        return expert_R
    end_R = F.pad(offs - padding, (0, 1)).index_select(0, expert_R)  # 0 behind the last expert
    return torch.where(positions_R < end_R, expert_R, offs.shape[0])


def _masked_mm(rows: Tensor, weights: Tensor, offs: Tensor, padding: Tensor | None) -> Tensor:
    """Run ``grouped_mm`` in float64, which torch's grouped GEMM does not support. Computes L products of all rows."""
    expert_R1 = experts_of_rows(offs, padding, rows.shape[0]).unsqueeze(1)
    y = rows.new_zeros(rows.shape[0], weights.shape[2])
    for index in range(weights.shape[0]):
        mine_R1 = expert_R1 == index
        y = y + torch.where(mine_R1, torch.where(mine_R1, rows, 0) @ weights[index], 0)  # the outer one for gradients
    return y


def real_rows(offs: Tensor, padding: Tensor, num_rows: int) -> Tensor:
    """Return whether each row is a real one of an expert, bool (R, 1)."""
    return (experts_of_rows(offs, padding, num_rows) < offs.shape[0]).unsqueeze(1)


def torch_grouped_mm(left: Tensor, right: Tensor, offs: Tensor) -> Tensor:
    """Run torch's grouped GEMM on aligned operands. The product of two matrices is 0 for groups without rows."""
    product: Tensor = F.grouped_mm(left, right, offs=offs)
    if right.dim() == 2 and leaves_idle_groups(left.device):
        return product.masked_fill(_is_idle(offs, product), 0)
    return product


def _is_idle(offs: Tensor, like: Tensor) -> Tensor:
    """Return whether each group has no rows, bool (L, 1, ...) with the dimensions of ``like``."""
    return (torch.diff(offs, prepend=offs.new_zeros(1)) == 0).view(-1, *[1] * (like.dim() - 1))


def leaves_idle_groups(device: torch.device) -> bool:
    """Return whether torch's grouped GEMM leaves garbage in the gradient of matrices without rows on a device.

    It does on Blackwell. Building a dispatcher asks first, so that later calls know the answer.

    Source: pytorch issue 172439, open with torch 2.13.

    Cost: a small product and a host sync, once for each device.
    """
    functions = (F.grouped_mm, torch._grouped_mm)  # a program may replace one, for example by one that is right
    if (found := _idle_groups.get((device, *functions))) is None:
        if device.type == "meta" or (device.type == "cuda" and not torch.cuda.is_available()):
            return False
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            return True
        with real_tensors(), torch.inference_mode(False), torch.enable_grad():
            found = _idle_groups[device, *functions] = _garbage_in_idle_groups(device)
    return found


# What torch.compiler.assume_constant_result sets; calling it would import the compiler.
leaves_idle_groups._dynamo_marked_constant = True  # type: ignore[attr-defined]
_idle_groups: dict[tuple[Any, ...], bool] = {}


def _garbage_in_idle_groups(device: torch.device) -> bool:
    counts = torch.tensor([0, 64, 0, 0, 64, 0], dtype=torch.int32, device=device)
    offs, rows = counts.cumsum(0, dtype=torch.int32), torch.ones(128, 256, dtype=torch.bfloat16, device=device)
    matrices = torch.ones(6, 256, 128, dtype=torch.bfloat16, device=device, requires_grad=True)
    grad = torch.ones(128, 128, dtype=torch.bfloat16, device=device)
    # The products are likely to get this memory, which is freed at once, so that a matrix that is not written is NaN.
    poison = [torch.full_like(matrices, torch.nan) for _ in range(4)]
    del poison
    try:
        found = F.grouped_mm(rows.t(), grad, offs=offs)
        (of_autograd,) = torch.autograd.grad(F.grouped_mm(rows, matrices, offs=offs), matrices, grad)
    except RuntimeError:  # this device has no grouped GEMM
        return False
    return bool((torch.stack([found, of_autograd])[:, counts == 0] != 0).any())


def without_idle_garbage(weights: Tensor, offs: Tensor) -> Tensor:
    """Return weights of experts, (L, ...), whose gradient is 0 for experts without rows. They share their memory.

    It is for experts that call torch's grouped GEMM themselves, where ``leaves_idle_groups`` is True.
    """
    same: Tensor = _WithoutIdleGarbage.apply(weights, offs)  # type: ignore[no-untyped-call]
    return same


class _WithoutIdleGarbage(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weights: Tensor, offs: Tensor) -> Tensor:
        ctx.save_for_backward(offs)
        return weights.view_as(weights)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        (offs,) = ctx.saved_tensors
        return grad.masked_fill(_is_idle(offs, grad), 0), None


def wanted(ctx: Any, number: int) -> bool:
    """Return whether this pass of the backward goes on behind an argument of an autograd function, a tensor.

    ``ctx.needs_input_grad`` is that of the forward in every pass. Schedules of pipelines compute the gradients of
    inputs in one pass and those of weights in another.

    Args:
        ctx: Context of the function, in its backward.
        number: Number of the argument. The arguments before it must be tensors too.
    """
    if not ctx.needs_input_grad[number]:
        return False
    try:
        return bool(torch._C._will_engine_execute_node(ctx.next_functions[number][0]))
    except RuntimeError:  # a leaf whose gradient torch.autograd.grad was asked for
        return True


class _GroupedMM(torch.autograd.Function):
    """Torch's grouped GEMM, with a gradient of the matrices that reads no padding: 0 times NaN would be NaN."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weights: Tensor, offs: Tensor, padding: Tensor | None) -> Tensor:
        of_rows, of_weights, *_ = ctx.needs_input_grad
        ctx.save_for_backward(rows if of_weights else None, weights if of_rows else None, offs, padding)
        return torch_grouped_mm(rows, weights, offs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        rows, weights, offs, padding = ctx.saved_tensors
        grad = dense(grad)  # torch's grouped GEMM refuses the expanded gradient of a sum
        grad_rows = grad_weights = None
        if wanted(ctx, 0):
            grad_rows = torch_grouped_mm(grad, weights.transpose(1, 2), offs)
        if wanted(ctx, 1):
            grad_weights = matrix_gradient(rows, grad, offs, padding)
        return grad_rows, grad_weights, None, None


def matrix_gradient(rows: Tensor, grad: Tensor, offs: Tensor, padding: Tensor | None) -> Tensor:
    """Return the gradient of the matrices, (L, D, H), from real rows only.

    Args:
        rows: (R, D), as in ``grouped_mm``. Rows start at multiples of 16 bytes.
        grad: (R, H), the gradient of the products; likewise.
        offs: As in ``grouped_mm``.
        padding: As in ``grouped_mm``.

    Cost: with padding, a copy of ``rows`` and one of ``grad``, which live inside this call.
    """
    if padding is not None:
        real_R1 = real_rows(offs, padding, rows.shape[0])
        rows, grad = torch.where(real_R1, rows, 0), torch.where(real_R1, grad, 0)
    return torch_grouped_mm(rows.t(), grad, offs)
