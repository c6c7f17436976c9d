"""Passing blocks of rows around a ring of ranks, there and back, with autograd."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from moe_dispatch.communication import Communicator


def shift(block: Tensor, communicator: Communicator, label: str) -> Tensor:
    """Give ``block`` to the next rank and take the previous rank's, of the same shape."""
    size, rank, rows = communicator.size, communicator.rank, len(block)
    to_next = [rows if other == (rank + 1) % size else 0 for other in range(size)]
    from_previous = [rows if other == (rank - 1) % size else 0 for other in range(size)]
    received = torch.empty_like(block)
    work = communicator.all_to_all(received, block, from_previous, to_next, label=label)
    if work is not None:
        work.wait()
    return received


def gather(block_TD: Tensor, communicator: Communicator, label: str) -> Tensor:
    """Every rank's block: (P, T, D)."""
    size, rank = communicator.size, communicator.rank
    blocks = {rank: block_TD.contiguous()}
    for step in range(1, size):
        blocks[(rank - step) % size] = shift(blocks[(rank - step + 1) % size], communicator, label)
    return torch.stack([blocks[source] for source in range(size)])


def scatter_sum(blocks_PTD: Tensor, communicator: Communicator, label: str) -> Tensor:
    """The sum over ranks of what is meant for this rank: (T, D). Partial sums collect each rank's part on their way."""
    size, rank = communicator.size, communicator.rank
    total = blocks_PTD[(rank - 1) % size].contiguous()
    for step in range(2, size + 1):
        total = shift(total, communicator, label) + blocks_PTD[(rank - step) % size]
    return total


def gather_both(rows_TD: Tensor, weights_TK: Tensor, communicator: Communicator) -> tuple[Tensor, Tensor]:
    """``gather`` of rows and of weights, differentiable.

    Together, so that either leads back to this one backward where only the other collects gradients.
    """
    both: tuple[Tensor, Tensor] = _Gather.apply(rows_TD, weights_TK, communicator)  # type: ignore[no-untyped-call]
    return both


def sum_at_home(sums_PTD: Tensor, weights_R: Tensor, communicator: Communicator) -> Tensor:
    """``scatter_sum``, differentiable.

    Every rank takes part in its backward, also one whose experts saw no row: ``weights_R`` always requires grad. It
    leads on to the backward of the dispatch.
    """
    home_TD: Tensor = _ScatterSum.apply(sums_PTD, weights_R, communicator)  # type: ignore[no-untyped-call]
    return home_TD


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows_TD: Tensor, weights_TK: Tensor, communicator: Communicator) -> tuple[Tensor, Tensor]:
        ctx.communicator = communicator
        return gather(rows_TD, communicator, "dispatch"), gather(weights_TK, communicator, "dispatch")

    @staticmethod
    def backward(ctx: Any, grad_rows_PTD: Tensor, grad_weights_PTK: Tensor) -> Any:
        wide = grad_rows_PTD.to(torch.promote_types(grad_rows_PTD.dtype, torch.float32))
        grad_rows_TD = scatter_sum(wide, ctx.communicator, "dispatch.backward").to(grad_rows_PTD.dtype)
        return grad_rows_TD, scatter_sum(grad_weights_PTK, ctx.communicator, "dispatch.backward"), None


class _ScatterSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, sums_PTD: Tensor, weights_R: Tensor, communicator: Communicator) -> Tensor:
        ctx.communicator, ctx.num_weights = communicator, len(weights_R)
        return scatter_sum(sums_PTD, communicator, "combine")

    @staticmethod
    def backward(ctx: Any, grad_TD: Tensor) -> Any:
        none = grad_TD.new_zeros(ctx.num_weights)
        return gather(grad_TD, ctx.communicator, "combine.backward"), none, None
