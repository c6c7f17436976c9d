"""Defaults and pairs among the arguments of both generations of buffers."""

from __future__ import annotations

from torch import Tensor

X = Tensor | tuple[Tensor, Tensor]  # rows, or float8 rows with their scales


def value_or(value: int | None, default: int) -> int:
    """``value`` unless it is None."""
    return default if value is None else value


def unpack_bias(bias: Tensor | tuple[Tensor, Tensor] | None) -> list[Tensor]:
    """None, one or two biases, as a list."""
    if bias is None:
        return []
    if isinstance(bias, Tensor):
        return [bias]
    assert len(bias) == 2
    return list(bias)


def unpack_rows(x: X) -> tuple[Tensor, Tensor | None]:
    """Rows and scales, or None."""
    return x if isinstance(x, tuple) else (x, None)


def pack_rows(x: Tensor, scales: Tensor | None) -> X:
    """The form in which rows came: alone, or with their scales."""
    return x if scales is None else (x, scales)
