"""Lengths and offsets as callers write them, made into tensors."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from moe_dispatch.errors import LayoutError

INTEGER_DTYPES = (torch.int32, torch.int64)


def integer_tensor(where: str, value: Tensor | Sequence[int]) -> Tensor:
    """A 1-D int32 or int64 tensor; a list or tuple becomes int64 on the CPU.

    Args:
        where: begins the error message.
        value: what the caller gave; a tensor is kept as it is, strides and device included.

    Raises:
        LayoutError: another dtype, number of dimensions, or not integers at all.
    """
    if not isinstance(value, Tensor):
        if not all(isinstance(item, int) for item in value):
            raise LayoutError(f"{where} must be integers, got {list(value)}. Pass ints or an int32 or int64 tensor.")
        return torch.tensor(list(value), dtype=torch.int64, device="cpu")
    if value.dtype not in INTEGER_DTYPES or value.dim() != 1:
        raise LayoutError(
            f"{where} must be a 1-D int32 or int64 tensor, got {value.dtype} {tuple(value.shape)}. Convert or "
            "reshape it."
        )
    return value


def describe(values: Tensor, limit: int = 8) -> str:
    """The first values, for an error message; reads them."""
    head = ", ".join(str(int(value)) for value in values[:limit])
    return f"[{head}{', ...' if len(values) > limit else ''}]"
