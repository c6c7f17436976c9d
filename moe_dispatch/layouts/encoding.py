"""A layout as JSON in a vector of integers: to write it into a trace, and to broadcast it to the ranks of a group.

Every tensor-parallel rank, on every pipeline stage, needs the packed metadata of its micro-batch. But only one rank has
a data loader that makes the metadata.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import fields
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from moe_dispatch.communication import Communicator
from moe_dispatch.errors import ConfigError, LayoutError
from moe_dispatch.layouts.base import Layout, Shard, is_host
from moe_dispatch.layouts.bshd import BSHD, SBHD
from moe_dispatch.layouts.rows import Masked, Rows
from moe_dispatch.layouts.thd import THD

_CLASSES: dict[str, type[Any]] = {cls.__name__: cls for cls in (BSHD, SBHD, THD, Rows, Shard, Masked)}
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

    Cost: an all-gather of two integers, a broadcast, and an all-gather of an integer. There are host syncs if the group
    is NCCL or the tensors are on a device. Call this once per micro-batch, not per layer.
    """
    arrived = broadcast_encoded("broadcast_layout", None if layout is None else [layout], group, src)
    return decode(arrived[0]) if layout is None else layout


def broadcast_encoded(where: str, layouts: Sequence[Layout] | None, group: dist.ProcessGroup, src: int) -> Tensor:
    """Send one or more layouts as ``broadcast_layout`` does. Return a row of ``encode`` for each, of one length."""
    communicator = Communicator(group)
    if not 0 <= src < communicator.size:
        raise ConfigError(f"{where}: src must lie in 0..{communicator.size - 1}, got {src}.")
    message = _table(layouts) if layouts and all(map(encodable, layouts)) else None
    state = message.shape if message is not None else (_FOREIGN if layouts else _ABSENT, 0)
    states = communicator.gather_integers(state, label="layout")
    givers = [rank for rank, (number, _) in enumerate(states) if number != _ABSENT]
    if givers != [src]:
        raise LayoutError(f"{where}: exactly rank {src} (src) must give a layout, got one from ranks {givers}.")
    if states[src][0] == _FOREIGN:
        known = ", ".join(_CLASSES)
        raise LayoutError(f"{where}: the layout must be one of {known}, got another class on rank {src}.")
    values = None if message is None else message.flatten()
    arrived = communicator.broadcast(values, prod(states[src]), source=src, label="layout").view(states[src])
    digest = hashlib.sha256(repr(arrived.tolist()).encode()).digest()
    digests = communicator.gather_integers([int.from_bytes(digest[:8], "little", signed=True)], label="layout")
    if wrong := [rank for rank, (found,) in enumerate(digests) if found != digests[src][0]]:
        raise LayoutError(
            f"{where}: every rank must hold the layout of rank {src}, got another one on ranks {wrong}. Does "
            "something else use this group at the same time?"
        )
    return arrived


def encodable(layout: Layout) -> bool:
    """Return whether ``encode`` knows the class of the layout, and of the layouts inside a ``Shard``."""
    return encodable(layout.base) if isinstance(layout, Shard) else type(layout) in _CLASSES.values()


def encode(layout: Layout) -> Tensor:
    """Return a layout as JSON text in int64 on the CPU, eight characters in each integer.

    ``Rows(5)`` becomes ``{"layout": "Rows", "arguments": [5]}`` and a few spaces.

    Cost: a host sync if the layout's tensors are on a device.
    """
    text = json.dumps(layout, default=_plain).encode()
    return torch.frombuffer(bytearray(text.ljust(-(-len(text) // 8) * 8)), dtype=torch.int64)


def _table(layouts: Sequence[Layout]) -> Tensor:
    """Return one row for each layout. Short rows end in spaces, which JSON leaves out."""
    rows = [encode(layout) for layout in layouts]
    table = torch.full((len(rows), max(map(len, rows))), int.from_bytes(b" " * 8, "little"), device="cpu")
    for padded, row in zip(table, rows, strict=True):
        padded[: len(row)] = row
    return table


def decode(message: Tensor) -> Layout:
    """Return the layout that ``encode`` was given. Tensors that were on a device go to this process's accelerator."""
    layout: Layout = json.loads(bytes(message.view(torch.uint8).tolist()), object_hook=_restored)
    return layout


def arguments(layout: Layout) -> list[Any]:
    """Return the arguments from which the class of the layout makes an equal layout."""
    return [getattr(layout, item.name) for item in fields(layout)]  # type: ignore[arg-type]


def _plain(value: Layout | Tensor) -> dict[str, Any]:
    if isinstance(value, Layout):
        return {"layout": type(value).__name__, "arguments": arguments(value)}
    return {"dtype": str(value.dtype).removeprefix("torch."), "on_host": is_host(value), "values": value.tolist()}


def _restored(found: dict[str, Any]) -> Layout | Tensor:
    if "layout" in found:
        layout: Layout = _CLASSES[found["layout"]](*found["arguments"])
        return layout
    tensor = torch.tensor(found["values"], dtype=getattr(torch, found["dtype"]), device="cpu")
    return tensor if found["on_host"] else tensor.to(torch.accelerator.current_accelerator())
