"""Give tensors the strides of their shape, which views in another dtype and grouped GEMMs need."""

from __future__ import annotations

import torch
from torch import Tensor


def dense(tensor: Tensor) -> Tensor:
    """Return the tensor with the strides of its shape. It is copied only if it has others.

    ``contiguous`` is not enough. It leaves an empty tensor as it is, and any stride of a dimension of size 1, such as
    the stride 2 of ``table[:1, 0]`` if the table has two columns.
    """
    expected = 1
    for size, stride in zip(reversed(tensor.shape), reversed(tensor.stride()), strict=True):
        if stride != expected:
            return tensor.clone(memory_format=torch.contiguous_format)
        expected *= max(size, 1)
    return tensor
