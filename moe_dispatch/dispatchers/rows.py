"""What the dispatcher does to rows on their way to a backend and back: cut, mask, merge, pad; trim, restore."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Size, Tensor

from moe_dispatch.backends.rank_major import refuse_double_backward
from moe_dispatch.layouts import Layout


@final
@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Home:
    """The way back to the shape that came in: of T model rows ``count`` were kept, then padded to ``padded``."""

    layout: Layout
    shape: Size
    num_rows: int
    real_rows: Tensor | None
    count: int
    padded: int

    def restore(self, rows_TD: Tensor) -> Tensor:
        """(Tp, D) -> the model's shape; rows that were cut are zero."""
        if self.count != self.padded:
            rows_TD = rows_TD[: self.count]
        if self.real_rows is not None:
            rows_TD = put_rows(rows_TD, self.real_rows, self.num_rows)
        return self.layout.unflatten(rows_TD, self.shape)


def merge_duplicates(ids_TK: Tensor, weights_TK: Tensor, *, asks: bool = True) -> tuple[Tensor, Tensor]:
    """Give an expert that a row names twice one slot with the sum of the weights; the gradient reaches each.

    The later slots become -1. Weights of -1 slots are never read, and come out as 0. Only ``asks``, the CPU and a call
    that is not traced let it look whether it is needed at all, because elsewhere that would be a sync; it holds
    (T, K, K) at once.
    """
    if ids_TK.shape[1] == 1:
        return ids_TK, weights_TK
    same_TKK = ids_TK.unsqueeze(2) == ids_TK.unsqueeze(1)
    known = asks and not torch.compiler.is_compiling() and ids_TK.is_cpu
    if known and not _has_duplicates(ids_TK, same_TKK):
        return ids_TK, weights_TK
    slots_K = torch.arange(ids_TK.shape[1], device=ids_TK.device)
    is_first = (same_TKK.to(torch.uint8).argmax(2) == slots_K) & (ids_TK >= 0)
    merged = torch.where(same_TKK, weights_TK.unsqueeze(1), 0).sum(2)
    return torch.where(is_first, ids_TK, -1), torch.where(is_first, merged, 0)


def _has_duplicates(ids_TK: Tensor, same_TKK: Tensor) -> bool:
    """Whether a slot that goes somewhere equals more than itself; asked of all slots first, which is cheaper."""
    if int(same_TKK.count_nonzero()) == ids_TK.numel():
        return False
    real_TK = ids_TK >= 0
    return bool((same_TKK & real_TK.unsqueeze(2)).count_nonzero() > real_TK.count_nonzero())


def pad_rows(tensor: Tensor, rows: int, value: float) -> Tensor:
    """Append rows of ``value`` up to ``rows``; differentiable."""
    missing = rows - tensor.shape[0]
    return tensor if missing == 0 else torch.nn.functional.pad(tensor, (0, 0, 0, missing), value=value)


def take_rows(rows_TD: Tensor, chosen: Tensor) -> Tensor:
    """``rows_TD[chosen]`` for distinct ``chosen``; its backward writes each gradient row once instead of adding."""
    result: Tensor = _Take.apply(rows_TD, chosen)  # type: ignore[no-untyped-call]
    return result


def put_rows(rows: Tensor, chosen: Tensor, num_rows: int) -> Tensor:
    """(num_rows, D) zeros with ``rows`` at ``chosen``, distinct; the reverse of ``take_rows``."""
    result: Tensor = _Put.apply(rows, chosen, num_rows)  # type: ignore[no-untyped-call]
    return result


_ANCHOR = torch.empty(0, device="cpu", requires_grad=True)


def anchor(tensor: Tensor, ep_size: int) -> Tensor:
    """``tensor``, requiring grad wherever gradients are recorded.

    Which of x, the weights and the experts require grad may differ between ranks. What goes through a verb always does,
    so that every rank takes part in every backward: one that skipped it would leave its peers waiting. A rank alone has
    none, and ranks that compile the same layer have the same backward anyway.
    """
    if ep_size == 1 or tensor.requires_grad or not torch.is_grad_enabled() or torch.compiler.is_compiling():
        return tensor
    return tie(tensor, _ANCHOR)


def tie(tensor: Tensor, other: Tensor) -> Tensor:
    """``tensor``, behind which autograd also reaches where ``other`` came from, with no gradient for it.

    Rows sent again come back by the weights of the first dispatch; untied, a rank whose experts detach would skip the
    backward of the second.
    """
    result: Tensor = _Tie.apply(tensor, other)  # type: ignore[no-untyped-call]
    return result


def _put(rows: Tensor, chosen: Tensor, num_rows: int) -> Tensor:
    return rows.new_zeros(num_rows, *rows.shape[1:]).index_copy_(0, chosen, rows)


class _Take(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows_TD: Tensor, chosen: Tensor) -> Tensor:
        ctx.chosen, ctx.num_rows = chosen, len(rows_TD)
        return rows_TD.index_select(0, chosen)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        refuse_double_backward("dispatch")
        return _put(grad, ctx.chosen, ctx.num_rows), None


class _Put(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, chosen: Tensor, num_rows: int) -> Tensor:
        ctx.chosen = chosen
        return _put(rows, chosen, num_rows)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        refuse_double_backward("combine")
        return grad.index_select(0, ctx.chosen), None, None


class _Tie(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, other: Tensor) -> Tensor:
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        refuse_double_backward("dispatch")
        return grad, None
