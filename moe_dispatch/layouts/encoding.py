"""The conversion of a layout to one vector of integers, and back."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from itertools import chain
from math import prod
from typing import Any

import torch
from torch import Tensor

from moe_dispatch.layouts.base import INTEGER_DTYPES, Layout, is_host
from moe_dispatch.layouts.bshd import BSHD, SBHD
from moe_dispatch.layouts.rows import Masked, Rows
from moe_dispatch.layouts.shard import Shard
from moe_dispatch.layouts.thd import THD

# The position in these tables is the code of a class, dtype or kind, so new entries must be added at the end.
_CLASSES: tuple[type[Any], ...] = (BSHD, SBHD, THD, Rows, Shard, Masked)
_DTYPES = (*INTEGER_DTYPES, torch.bool)
_KINDS = ("contiguous", "zigzag")
# The tag before each field tells its type.
_NONE, _INTEGER, _TENSOR, _LAYOUT, _KIND = range(5)


def encodable(layout: Layout) -> bool:
    """Return whether ``encode`` knows the class of the layout, and of the layouts inside a ``Shard``."""
    return encodable(layout.base) if isinstance(layout, Shard) else type(layout) in _CLASSES


def encode(layout: Layout) -> Tensor:
    """Return the class and the fields of a layout as int64 on the CPU.

    ``Rows(5)`` becomes [3, 1, 5]: class 3, then the tag of an integer, then the integer.

    Cost: a host sync if the layout's tensors are on a device.
    """
    return torch.tensor(_integers(layout)[1:], dtype=torch.int64, device="cpu")


def decode(message: Tensor) -> Layout:
    """Return the layout that ``encode`` was given. Tensors that were on a device go to this process's accelerator."""
    return _decode_layout(iter(message.tolist()))


def arguments(layout: Layout) -> list[Any]:
    """Return the arguments from which the class of the layout makes an equal layout."""
    return [getattr(layout, item.name) for item in fields(layout) if item.init]  # type: ignore[arg-type]


def _integers(value: Any) -> list[int]:
    """Return a tag and the integers that follow it.

    Nothing follows the tag of None. Other tags are followed by one number, by the dtype, device, shape and entries of a
    tensor, or by the class and the fields of a layout.
    """
    if value is None:
        return [_NONE]
    if isinstance(value, Layout):
        return [_LAYOUT, _CLASSES.index(type(value)), *chain.from_iterable(map(_integers, arguments(value)))]
    if isinstance(value, Tensor):
        head = [_TENSOR, _DTYPES.index(value.dtype), int(is_host(value)), value.dim(), *value.shape]
        return [*head, *value.flatten().tolist()]
    return [_KIND, _KINDS.index(value)] if isinstance(value, str) else [_INTEGER, value]


def _decode_layout(values: Iterator[int]) -> Layout:
    cls = _CLASSES[next(values)]
    layout: Layout = cls(*[_decode_field(values) for item in fields(cls) if item.init])
    return layout


def _decode_field(values: Iterator[int]) -> Any:
    tag = next(values)
    if tag == _NONE:
        return None
    if tag == _LAYOUT:
        return _decode_layout(values)
    if tag == _KIND:
        return _KINDS[next(values)]
    if tag != _TENSOR:
        return next(values)
    dtype, on_host = _DTYPES[next(values)], bool(next(values))
    shape = [next(values) for _ in range(next(values))]
    tensor = torch.tensor([next(values) for _ in range(prod(shape))], dtype=dtype, device="cpu").view(shape)
    return tensor if on_host else tensor.to(torch.accelerator.current_accelerator())
