"""Copy rows of any dtype, and make the uninitialised memory of the emulated buffers."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from moe_dispatch.permutation.strides import dense


def uninitialised(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Make a CPU tensor whose values stand out: NaN in floating types, the smallest value in signed integers.

    A uint8 tensor is full of 255, which is NaN in every float8 type. A bool tensor is full of True.
    """
    if dtype.itemsize == 1 and dtype != torch.int8:
        return torch.full(tuple(shape), 1 if dtype == torch.bool else 255, dtype=torch.uint8).view(dtype)
    poison = torch.nan if dtype.is_floating_point else torch.iinfo(dtype).min
    return torch.full(tuple(shape), poison, dtype=dtype)


def torch_fills_memory() -> bool:
    """Return whether torch fills fresh memory. It does so on another stream than the one of deep_ep's kernels.

    So the fill may overwrite what a kernel has written.
    """
    filled: bool = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    return torch.are_deterministic_algorithms_enabled() and filled


def grown(rows: Tensor, num_rows: int) -> Tensor:
    """Append uninitialised rows up to ``num_rows`` rows."""
    return stacked([rows, uninitialised((num_rows - rows.shape[0], *rows.shape[1:]), rows.dtype)])


def take(rows: Tensor, index: Tensor) -> Tensor:
    """Return ``rows[index]``. Rows may be float8, which torch cannot index, because their bytes are indexed."""
    return _of_bytes(_as_bytes(rows)[index], rows)


def stacked(parts: Sequence[Tensor]) -> Tensor:
    """Concatenate rows like ``torch.cat``. Rows may be float8."""
    return _of_bytes(torch.cat([_as_bytes(part) for part in parts]), parts[0])


def _as_bytes(rows: Tensor) -> Tensor:
    num_bytes = rows.shape[1:].numel() * rows.element_size()
    return dense(rows.detach()).flatten().view(torch.uint8).view(rows.shape[0], num_bytes)


def _of_bytes(payload: Tensor, like: Tensor) -> Tensor:
    return payload.flatten().view(like.dtype).view(payload.shape[0], *like.shape[1:])
