"""What both ends of experts share: checks of their matrices, the gradient of a matrix, and the joint of two nodes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from moe_dispatch.backends.wire import Encoded
from moe_dispatch.capabilities.lean.packets import Copies
from moe_dispatch.dispatched import Dispatched, check_plain
from moe_dispatch.errors import InputError
from moe_dispatch.permutation.grouped_mm import ALIGNED_BYTES, experts_of_rows, grouped_mm, matrix_gradient, real_rows
from moe_dispatch.permutation.strides import dense


def checked(
    where: str, sent: Dispatched, dtype: torch.dtype, columns: int, *weights: Tensor
) -> tuple[torch.dtype, tuple[Tensor, ...]]:
    """Return the dtype of a product and its matrices in this dtype, which is that of autocast if it is on.

    Args:
        where: Name of the caller, for errors.
        sent: Result of the dispatch.
        dtype: Dtype of the rows.
        columns: Number of their columns.
        *weights: The matrices.

    Raises:
        InputError: A matrix does not fit the rows.
    """
    if not weights:
        raise InputError(f"{where}: pass at least one matrix for each expert, (L, D, H), got none.")
    check_plain(where, **{f"weights[{number}]": matrix for number, matrix in enumerate(weights)})
    device = sent.in_graph.device.type
    if torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device) and dtype != torch.float64:
        dtype = torch.get_autocast_dtype(device)
        weights = tuple(matrix.to(dtype) for matrix in weights)
    num_experts = sent.tokens_per_expert.shape[0]
    for matrix in weights:
        if matrix.dim() != 3 or matrix.shape[:2] != (num_experts, columns) or matrix.dtype != dtype:
            advice = " Rows are grouped by expert slots: run experts with SlotWeights." if sent.placement else ""
            raise InputError(
                f"{where}: weights must be (L={num_experts}, D={columns}, H) in {dtype}, like the rows, got "
                f"{matrix.dtype} {tuple(matrix.shape)}. nn.Linear stores (H, D): pass weights.transpose(1, 2).{advice}"
            )
    return dtype, weights


def check_sent(where: str, sent: object) -> None:
    """Raise InputError if ``sent`` is no result of a dispatch."""
    if not isinstance(sent, Dispatched):
        raise InputError(f"{where}: sent must be the result of a dispatch, got {type(sent).__name__}.")


def product_of(
    copies: Copies, arrived: Tensor | Encoded, matrices: Sequence[Tensor], offs: Tensor, padding: Tensor | None
) -> list[Tensor]:
    """Return the products of the copies of what arrived with matrices, (R, H) each, 0 on padding."""
    dtype, experts = matrices[0].dtype, copies.by_expert(arrived)
    if experts is None or not isinstance(arrived, Tensor) or len(experts) != len(offs):
        rows_RD = copies.of(arrived, dtype)
        return [grouped_mm(rows_RD, matrix, offs, padding) for matrix in matrices]
    shapes = [(copies.num_copies, matrix.shape[2]) for matrix in matrices]
    empty = matrices[0].new_empty if padding is None else matrices[0].new_zeros
    found = [empty(shape) for shape in shapes]
    for expert, rows in enumerate(experts):
        if rows.stop > rows.start:
            copied = copies.of_expert(arrived, rows, dtype)
            for product, matrix in zip(found, matrices, strict=True):
                torch.mm(copied, matrix[expert], out=product[rows])
    return found


def gradient_from(
    copies: Copies, arrived: Tensor | Encoded, other_RH: Tensor, offs: Tensor, *, swapped: bool
) -> Tensor:
    """Return the gradient of matrices, (L, D, H), from copies of what arrived and other rows, which are 0 on padding.

    With ``swapped`` it is (L, H, D).
    """
    dtype, experts = other_RH.dtype, copies.by_expert(arrived)
    if experts is None or not isinstance(arrived, Tensor) or len(experts) != len(offs):
        copied = copies.of(arrived, dtype)
        return gradient_of(other_RH, copied, offs, None) if swapped else gradient_of(copied, other_RH, offs, None)
    shape = (len(experts), other_RH.shape[1], arrived.shape[1])
    found = other_RH.new_empty(shape if swapped else (shape[0], shape[2], shape[1]))
    for expert, rows in enumerate(experts):
        pair = copies.of_expert(arrived, rows, dtype), other_RH[rows]
        left, right = reversed(pair) if swapped else pair
        torch.mm(left.t(), right, out=found[expert])
    return found


def gradient_of(rows: Tensor, grad: Tensor, offs: Tensor, padding: Tensor | None) -> Tensor:
    """Return the gradient of the matrices, (L, D, H). Experts without rows have zeros.

    Args:
        rows: (R, D), in the forward.
        grad: (R, H), the gradient of the product. On padding both may hold anything.
        offs: int32 (L,), the end of each expert's rows.
        padding: int64 (L,), how many of each expert's last rows are padding; None if there are none.
    """
    if rows.dtype == torch.float64:
        expert_R1 = experts_of_rows(offs, padding, len(rows)).unsqueeze(1)
        masks = (expert_R1 == expert for expert in range(len(offs)))
        return torch.stack([torch.where(mine, rows, 0).t() @ torch.where(mine, grad, 0) for mine in masks])
    (columns, width), multiple = (rows.shape[1], grad.shape[1]), ALIGNED_BYTES // rows.element_size()
    if (more := -columns % multiple) or -width % multiple:
        rows, grad = F.pad(rows, (0, more)), F.pad(grad, (0, -width % multiple))
    found = matrix_gradient(dense(rows), dense(grad), offs, padding)
    return found if found.shape[1:] == (columns, width) else found[:, :columns, :width].contiguous()


def joined(product: Tensor, token: Tensor | None) -> Tensor:
    """Return a product as a function of its rows and its matrix, each of which has a node of its own.

    ``ctx.needs_input_grad`` of one node would be that of the forward in every backward. So a schedule that computes
    the gradients of inputs first and those of weights later would compute both twice.

    Args:
        product: The product as a function of its rows.
        token: The product as a function of its matrix; None if that requires no grad.
    """
    if token is None:
        return product
    both: Tensor = _Joint.apply(product, token)  # type: ignore[no-untyped-call]
    return both


class _Joint(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, product: Tensor, token: Tensor) -> Tensor:
        return product.data  # no view, so experts may change it in place

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad, grad


def real_flags(offs: Tensor, padding: Tensor | None, rows: Tensor) -> Tensor:
    """Return whether each row is no padding, bool (R,)."""
    if padding is None:
        return torch.ones(len(rows), dtype=torch.bool, device=rows.device)
    return real_rows(offs, padding, len(rows)).squeeze(1)
