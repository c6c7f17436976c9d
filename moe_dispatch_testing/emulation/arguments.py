"""Helpers for the arguments of the buffers: default values, pairs of tensors, and handles."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

X = Tensor | tuple[Tensor, Tensor]  # rows, or float8 rows with their scales


def value_or(value: int | None, default: int) -> int:
    """Return ``value``, or ``default`` if it is None."""
    return default if value is None else value


def agreed(given: int | None, of_handle: int) -> int:
    """Return the number of the handle. An argument may repeat this number, but not change it."""
    assert given is None or given == of_handle
    return of_handle


def unpack_bias(bias: Tensor | tuple[Tensor, Tensor] | None) -> list[Tensor]:
    """Return None, one bias or two biases as a list."""
    if bias is None:
        return []
    if isinstance(bias, Tensor):
        return [bias]
    assert len(bias) == 2
    return list(bias)


def unpack_rows(x: X) -> tuple[Tensor, Tensor | None]:
    """Return the rows, and their scales or None."""
    return x if isinstance(x, tuple) else (x, None)


def pack_rows(x: Tensor, scales: Tensor | None) -> X:
    """Return the rows alone, or with their scales if there are any."""
    return x if scales is None else (x, scales)


def unpacked(names: Sequence[str], handle: Sequence[Any]) -> dict[str, Any]:
    """Name the items of a handle.

    Raises:
        ValueError: The handle has another length. The text is Python's text for the unpacking of a tuple.
    """
    if len(handle) < len(names):
        raise ValueError(f"not enough values to unpack (expected {len(names)}, got {len(handle)})")
    if len(handle) > len(names):
        raise ValueError(f"too many values to unpack (expected {len(names)})")
    return dict(zip(names, handle, strict=True))
