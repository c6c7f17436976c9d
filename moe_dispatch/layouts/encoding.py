"""A layout as one vector of integers: to write it into a trace, and to broadcast it to the ranks of a group.

Every tensor-parallel rank, on every pipeline stage, needs the packed metadata of its micro-batch. But only one rank has
a data loader that makes the metadata.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import fields
from itertools import chain
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from moe_dispatch.communication import Communicator
from moe_dispatch.errors import ConfigError, LayoutError
from moe_dispatch.layouts.base import INTEGER_DTYPES, Layout, Shard, is_host
from moe_dispatch.layouts.bshd import BSHD, SBHD
from moe_dispatch.layouts.rows import Masked, Rows
from moe_dispatch.layouts.thd import THD

# The position in these tables is the code of a class, dtype or kind, so new entries must be added at the end.
_CLASSES: tuple[type[Any], ...] = (BSHD, SBHD, THD, Rows, Shard, Masked)
_DTYPES = (*INTEGER_DTYPES, torch.bool)
_KINDS = ("contiguous", "zigzag")
# The tag before each field tells its type.
_NONE, _INTEGER, _TENSOR, _LAYOUT, _KIND = range(5)
# What a rank says in place of the length of its layout.
_ABSENT, _FOREIGN = -1, -2


def broadcast_layout(layout: Layout | None, group: dist.ProcessGroup, src: int = 0) -> Layout:
    """Send the layout of rank ``src`` to every rank of the group, and return it there.

    The whole layout arrives: lengths, both ``cu_seqlens``, ``max_seqlen``, and the base of a ``Shard``. Tensors keep
    their dtype and values, and may be strided at the source. CPU tensors arrive on the CPU; other tensors arrive on the
    accelerator of the receiver.

    Args:
        layout: The layout on rank ``src``; None on every other rank.
        group: All ranks that need the layout. Each of them must call this function.
        src: Rank in the group that has the layout.

    Raises:
        ConfigError: ``src`` is not a rank of the group.
        LayoutError: Rank ``src`` gives no layout or a layout of an unknown class, another rank gives a layout too, or
            the layout that arrived on some rank is not the layout that was sent. All ranks raise the same error, which
            names the ranks at fault.

    Cost: an all-gather of an integer, a broadcast, and an all-gather of an integer. There are host syncs if the group
    is NCCL or the tensors are on a device. Call this once per micro-batch, not per layer.
    """
    if not 0 <= src < group.size():
        raise ConfigError(
            f"broadcast_layout: src must lie in 0..{group.size() - 1}, got {src}. Pass a rank of the group."
        )
    communicator = Communicator(group)
    message = torch.empty(0, dtype=torch.int64, device="cpu")
    state = _ABSENT
    if layout is not None:
        message = encode(layout) if encodable(layout) else message
        state = len(message) or _FOREIGN
    states = [state for (state,) in communicator.gather_integers([state], label="layout")]
    givers = [rank for rank, state in enumerate(states) if state != _ABSENT]
    if givers != [src]:
        raise LayoutError(
            f"broadcast_layout: exactly rank {src} (src) must give a layout, got one from ranks {givers}. Pass None "
            "on the others."
        )
    if states[src] == _FOREIGN:
        raise LayoutError(
            f"broadcast_layout: the layout must be BSHD, SBHD, THD, Rows, Masked or a Shard of one, got another class "
            f"on rank {src}. Broadcast a layout of these classes, and build the other layout from it."
        )
    mine = message if communicator.rank == src else None
    arrived = communicator.broadcast(mine, states[src], source=src, label="layout")
    received = decode(arrived) if layout is None else layout
    digest = hashlib.sha256(repr(encode(received).tolist()).encode()).digest()
    digests = communicator.gather_integers([int.from_bytes(digest[:8], "little", signed=True)], label="layout")
    if wrong := [rank for rank, found in enumerate(digests) if found != digests[src]]:
        raise LayoutError(
            f"broadcast_layout: every rank must hold the layout of rank {src}, got another one on ranks {wrong}. Check "
            "that these ranks run the same version and that nothing else uses this group at the same time."
        )
    return received


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
