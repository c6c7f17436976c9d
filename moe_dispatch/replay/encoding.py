"""How a table stores ids: each id plus 2, in the smallest integer type.

Example with 5 experts: experts 0..4 are stored as 2..6, a slot that goes nowhere (-1) as 1, and an unknown slot (-2) as
0. So a table of zeros knows nothing, and one formula, ``stored - 2``, gives the ids for every type.
"""

from __future__ import annotations

import torch
from torch import Tensor

UNKNOWN, NOWHERE = -2, -1
_TYPES = (torch.uint8, torch.int16, torch.int32)


def storage_dtype(num_experts: int) -> torch.dtype:
    """Return the smallest integer type for ids 0 to ``num_experts - 1``, for "nowhere" and for "unknown"."""
    return next(dtype for dtype in _TYPES if num_experts - 1 - UNKNOWN <= torch.iinfo(dtype).max)


def stored(ids: Tensor, num_experts: int) -> Tensor:
    """Convert ids (-2 to ``num_experts - 1``) to the form in which a table stores them."""
    return (ids.to(torch.int32) - UNKNOWN).to(storage_dtype(num_experts))


def ids_of(values: Tensor) -> Tensor:
    """Convert stored values back to ids, int64."""
    return values.to(torch.int64).add_(UNKNOWN)  # stored values are never int64, so this is a copy
