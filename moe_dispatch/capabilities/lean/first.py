"""The first product of experts, from rows as they arrived."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from moe_dispatch.capabilities.lean.matrices import (
    check_sent,
    checked,
    gradient_from,
    gradient_of,
    joined,
    product_of,
    real_flags,
)
from moe_dispatch.capabilities.lean.packets import Packets, restored, without_memory
from moe_dispatch.dispatched import Dispatched
from moe_dispatch.dispatchers.autograd import State, double_backward
from moe_dispatch.permutation.grouped_mm import grouped_mm


def first_mm(sent: Dispatched, *weights: Tensor) -> Any:
    """Multiply the rows of a dispatch by each expert's matrices, and save the rows as they arrived.

    It takes the place of ``sent.grouped_mm(sent.rows, weights)``. With ``deliver="packets"`` in the config, autograd
    saves what arrived, each token once, and the backward copies it to the experts again. Where the backend delivers
    rows of experts (``hybridep``, ``nccl_ep``, ``deepep`` with ``expand``), without ``deliver``, and in a compiled
    region, the rows are saved as ``grouped_mm`` does. If no matrix requires grad, no rows are saved.

    Args:
        sent: Result of a dispatch.
        *weights: (L, D, H), a matrix for each of this rank's experts. With several, such as a gate and an up
            projection, the rows are copied once for all products. Under autocast, rows and weights are converted to its
            dtype.

    Returns:
        (R, H), or a tuple with one for each of ``weights``. In graph-safe mode, rows behind those of the last expert
        may hold any value.

    Raises:
        InputError: The shape or the dtype of a matrix does not fit.
        StateError: The rows that arrived were changed in place before this call.

    Cost: those of ``sent.grouped_mm``; and in the backward of each matrix, the copy of the rows to their experts.
    """
    check_sent("first_mm", sent)
    dtype, matrices = checked("first_mm", sent, sent.in_graph.dtype, sent.in_graph.shape[1], *weights)
    if not isinstance(sent.state, State):
        return _one_or_all([sent.grouped_mm(sent.rows.to(dtype), matrix) for matrix in matrices])
    edge, offs, padding = sent.in_graph if sent.packets is not None else sent.rows, sent.offs, sent._padding
    rows_RD = None if sent.packets is not None else sent.rows.detach().to(dtype)
    if sent.packets is not None:
        sent.packets.check()
    products = _OfRows.apply(edge, rows_RD, sent.packets, offs, padding, *(matrix.detach() for matrix in matrices))  # type: ignore[no-untyped-call]
    results = []
    for matrix, product in zip(matrices, products, strict=True):
        token = None
        if torch.is_grad_enabled() and matrix.requires_grad:
            kept, tensors = (None, [rows_RD]) if sent.packets is None else sent.packets.saved()
            token = _OfMatrix.apply(matrix, product.detach(), offs, padding, kept, *tensors)  # type: ignore[no-untyped-call]
        results.append(joined(product, token))
    return _one_or_all(results)


def _one_or_all(results: list[Tensor]) -> Any:
    return results[0] if len(results) == 1 else tuple(results)


class _OfRows(torch.autograd.Function):
    """The products as functions of the rows. ``edge`` is the place of the rows in the graph."""

    @staticmethod
    def forward(
        ctx: Any,
        edge: Tensor,
        rows_RD: Tensor | None,
        packets: Packets | None,
        offs: Tensor,
        padding: Tensor | None,
        *matrices: Tensor,
    ) -> tuple[Tensor, ...]:
        ctx.dtype = edge.dtype
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(offs, padding, *(matrices if ctx.needs_input_grad[0] else ()))
        if packets is not None:
            return tuple(product_of(packets.copies, packets.rows_SD, matrices, offs, padding))
        assert rows_RD is not None
        return tuple(grouped_mm(rows_RD, matrix, offs, padding) for matrix in matrices)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        if torch.is_grad_enabled():
            raise double_backward("dispatch")
        offs, padding, *matrices = ctx.saved_tensors
        found: Tensor | None = None
        for grad, matrix in zip(grads, matrices, strict=True):
            if grad is not None:
                of_rows = grouped_mm(grad, matrix.transpose(1, 2), offs, padding)
                found = of_rows if found is None else found.add_(of_rows)
        found = None if found is None else found.to(ctx.dtype)
        return found, None, None, None, None, *[None] * len(grads)


class _OfMatrix(torch.autograd.Function):
    """A product as a function of the matrix. Its result only has a place in the graph, and no memory."""

    @staticmethod
    def forward(
        ctx: Any, matrix: Tensor, product: Tensor, offs: Tensor, padding: Tensor | None, kept: Any, *tensors: Tensor
    ) -> Tensor:
        ctx.kept, ctx.dtype = kept, product.dtype
        ctx.save_for_backward(offs, padding, *tensors)
        return without_memory(product, product.shape[0], product.shape[1], product.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        if torch.is_grad_enabled():
            raise double_backward("dispatch")
        offs, padding, *tensors = ctx.saved_tensors
        if ctx.kept is None:
            return gradient_of(tensors[0], grad, offs, padding), *[None] * (4 + len(tensors))
        if padding is not None:  # copies are zero there
            grad = torch.where(real_flags(offs, padding, grad).unsqueeze(1), grad, 0)
        grad = gradient_from(*restored(ctx.kept, tensors), grad.to(ctx.dtype), offs, swapped=False)
        return grad, *[None] * (4 + len(tensors))
