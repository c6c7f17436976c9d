"""Functions between the two products of experts that the backward computes again, so that their result is not saved."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
import torch.nn.functional as F
from torch import Tensor

from moe_dispatch.errors import InputError


@final
@dataclass(frozen=True, slots=True)
class Activation:
    """A function of the results of first products, with a backward of its own.

    ``last_mm`` takes any function as ``activation``, and lets autograd find its backward. A function whose backward is
    written out needs less memory.

    Attributes:
        forward: Takes the inputs, each (R, H) or wider, and returns (R, H).
        backward: Takes the gradient of the result, (R, H), and the inputs; returns a gradient for each input.
    """

    forward: Callable[..., Tensor]
    backward: Callable[..., tuple[Tensor, ...]]

    def __call__(self, *inputs: Tensor) -> Tensor:
        """Compute the function, so that autograd sees it."""
        return self.forward(*inputs)


def compute(activation: Callable[..., Tensor] | None, inputs: Sequence[Tensor]) -> Tensor:
    """Return the result of an activation, without a graph. Without an activation the one input is the result.

    Raises:
        InputError: The activation uses a tensor that requires grad and is none of its inputs.
    """
    if activation is None:
        (rows,) = inputs
        return rows
    if isinstance(activation, Activation):
        with torch.no_grad():
            return activation.forward(*inputs)
    with torch.enable_grad():
        rows = activation(*(each.detach() for each in inputs))
    if rows.requires_grad:
        raise InputError(
            "last_mm: activation must be a function of its inputs alone, got one that uses another tensor that "
            "requires grad, whose gradient would be lost. Apply it before last_mm, and leave activation out."
        )
    return rows


def gradients(
    activation: Callable[..., Tensor] | None, grad: Tensor, inputs: Sequence[Tensor]
) -> tuple[Tensor | None, ...]:
    """Return the gradient of each input from that of the result, (R, H)."""
    if activation is None:
        return (grad,)
    if isinstance(activation, Activation):
        return activation.backward(grad, *inputs)
    with torch.enable_grad():
        leaves = [each.detach().requires_grad_() for each in inputs]
        return torch.autograd.grad(activation(*leaves), leaves, grad, allow_unused=True)


def _swiglu(gate: Tensor, *up: Tensor) -> Tensor:
    gate, linear = (gate, *up) if up else gate.chunk(2, 1)
    return F.silu(gate) * linear


def _swiglu_backward(grad: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
    if len(inputs) == 2:
        gate, linear = inputs
        found = [torch.empty_like(each) for each in inputs]
        of_gate, of_linear = found
    else:
        gate, linear = inputs[0].chunk(2, 1)
        found = [torch.empty_like(inputs[0])]
        of_gate, of_linear = found[0].chunk(2, 1)
    torch.mul(grad, F.silu(gate), out=of_linear)
    silu_backward: Any = torch.ops.aten.silu_backward
    of_gate.copy_(silu_backward(grad * linear, gate))
    return tuple(found)


swiglu = Activation(_swiglu, _swiglu_backward)
"""``silu(gate) * up``, of (R, 2H) with the gates in the first H columns, or of two tensors (R, H)."""
