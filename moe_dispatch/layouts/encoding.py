"""A layout as one vector of integers, and back."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from math import prod
from typing import Any

import torch
from torch import Tensor

from moe_dispatch.layouts.base import Layout, is_host
from moe_dispatch.layouts.bshd import BSHD, SBHD
from moe_dispatch.layouts.integers import INTEGER_DTYPES
from moe_dispatch.layouts.masked import Masked
from moe_dispatch.layouts.rows import Rows
from moe_dispatch.layouts.shard import Shard
from moe_dispatch.layouts.thd import THD

# The position in these tables is the code of a class or kind, so they only ever grow at the end.
_CLASSES: tuple[type[Any], ...] = (BSHD, SBHD, THD, Rows, Shard, Masked)
_KINDS = ("contiguous", "zigzag")
_DTYPES = (*INTEGER_DTYPES, torch.bool)
_NONE, _INTEGER, _TENSOR, _LAYOUT, _KIND = range(5)


def encodable(layout: Layout) -> bool:
    """Whether ``encode`` knows the class, and that of every layout inside."""
    return encodable(layout.base) if isinstance(layout, Shard) else type(layout) in _CLASSES


def encode(layout: Layout) -> Tensor:
    """int64 on the CPU: class and fields, each field with a tag before it.

    Cost: a host sync where the layout's tensors are on a device.
    """
    values = [_CLASSES.index(type(layout))]
    for value in arguments(layout):
        values += _encode_field(value)
    return torch.tensor(values, dtype=torch.int64, device="cpu")


def decode(message: Tensor) -> Layout:
    """The layout that ``encode`` was given; tensors of a device come to this process's current accelerator."""
    return _decode_layout(iter(message.tolist()))


def arguments(layout: Layout) -> list[Any]:
    """What the layout's class is called with to make it again."""
    return [getattr(layout, item.name) for item in fields(layout) if not item.name.startswith("_")]  # type: ignore[arg-type]


def _encode_field(value: Any) -> list[int]:
    if value is None:
        return [_NONE]
    if isinstance(value, Layout):
        return [_LAYOUT, *encode(value).tolist()]
    if isinstance(value, Tensor):
        head = [_TENSOR, _DTYPES.index(value.dtype), int(is_host(value)), value.dim(), *value.shape]
        return [*head, *value.flatten().tolist()]
    return [_KIND, _KINDS.index(value)] if isinstance(value, str) else [_INTEGER, value]


def _decode_layout(values: Iterator[int]) -> Layout:
    cls = _CLASSES[next(values)]
    count = sum(not item.name.startswith("_") for item in fields(cls))
    layout: Layout = cls(*[_decode_field(values) for _ in range(count)])
    return layout


def _decode_field(values: Iterator[int]) -> Any:
    tag = next(values)
    if tag == _NONE:
        return None
    if tag == _LAYOUT:
        return _decode_layout(values)
    if tag == _TENSOR:
        return _decode_tensor(values)
    return _KINDS[next(values)] if tag == _KIND else next(values)


def _decode_tensor(values: Iterator[int]) -> Tensor:
    dtype, on_host = _DTYPES[next(values)], bool(next(values))
    shape = [next(values) for _ in range(next(values))]
    tensor = torch.tensor([next(values) for _ in range(prod(shape))], dtype=dtype, device="cpu").view(shape)
    return tensor if on_host else tensor.to(torch.accelerator.current_accelerator())
