"""What must come out: a dense float64 computation, without permutation, exchange, padding or grouped products."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from moe_dispatch.backends.base import WireDtype
from moe_dispatch.testing.scenario import Batch, Experts


@final
@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Expected:
    """One rank's share: y (T, D), gradients of x (T, D), of weights (T, K), and of the experts (E, W, W), (E, D)."""

    y_TD: Tensor
    grad_x_TD: Tensor
    grad_weights_TK: Tensor
    grad_matrix_EWW: Tensor
    grad_bias_ED: Tensor


def reference(batch: Batch, experts: Experts, wire: WireDtype | None = None) -> Expected:
    """Every expert on every row, weighted by the slots that name it.

    Args:
        batch: one rank's tokens.
        experts: of the whole group.
        wire: what rows are rounded to before experts see them; the gradient goes straight through.
    """
    x_TD = batch.x_TD.clone().requires_grad_()
    weights_TK = torch.where(batch.ids_TK < 0, 0, batch.weights_TK).requires_grad_()
    leaves = experts.leaves()
    seen_TD = x_TD + (round_to_wire(batch.x_TD, wire) - batch.x_TD)
    y_TD = torch.zeros_like(seen_TD)
    for expert in range(len(experts.bias_ED)):
        share_T = torch.where(batch.ids_TK == expert, weights_TK, 0).sum(1, keepdim=True)
        y_TD = y_TD + share_T * leaves.apply(expert, seen_TD)
    inputs = (x_TD, weights_TK, leaves.matrix_EWW, leaves.bias_ED)
    grads = torch.autograd.grad(y_TD, inputs, batch.upstream_TD)
    return Expected(
        y_TD=y_TD.detach(),
        grad_x_TD=grads[0],
        grad_weights_TK=torch.where(batch.ids_TK < 0, 0, grads[1]),
        grad_matrix_EWW=grads[2],
        grad_bias_ED=grads[3],
    )


def round_to_wire(x_TD: Tensor, wire: WireDtype | None) -> Tensor:
    """The values that arrive when rows travel in ``wire``: for float8, one scale (largest / 448) per 128 columns."""
    if wire is None:
        return x_TD
    if wire == "bfloat16":
        return x_TD.bfloat16().double()
    blocks = x_TD.float().view(len(x_TD), -1, 128)
    largest = blocks.abs().amax(2, keepdim=True)
    scale = torch.where(largest > 0, largest / 448, 1)
    return ((blocks / scale).to(torch.float8_e4m3fn).float() * scale).double().view_as(x_TD)


def merged_weights(batch: Batch, expert: int) -> Tensor:
    """(T,): the weight with which each row goes to an expert, summed over the slots that name it."""
    return torch.where(batch.ids_TK == expert, batch.weights_TK, 0).sum(1)


def goes_to(batch: Batch, expert: int) -> Tensor:
    """bool (T,): the rows that name an expert."""
    return (batch.ids_TK == expert).any(1)
