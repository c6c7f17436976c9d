"""The broadcast of one rank's layout to every rank of a group.

Every tensor-parallel rank, on every pipeline stage, needs the packed metadata of its micro-batch. But only one rank has
a data loader that makes the metadata.
"""

from __future__ import annotations

import hashlib

import torch
import torch.distributed as dist
from torch import Tensor

from moe_dispatch.communication import Communicator
from moe_dispatch.errors import ConfigError, LayoutError
from moe_dispatch.layouts.base import Layout
from moe_dispatch.layouts.encoding import decode, encodable, encode

_ABSENT, _PRESENT, _FOREIGN = 0, 1, 2


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

    Cost: an all-gather of 2 integers, a broadcast, and an all-gather of 4 integers. There are host syncs if the group
    is NCCL or the tensors are on a device. Call this once per micro-batch, not per layer.
    """
    if not 0 <= src < group.size():
        raise ConfigError(
            f"broadcast_layout: src must lie in 0..{group.size() - 1}, got {src}. Pass a rank of the group."
        )
    communicator = Communicator(group)
    message = (
        encode(layout) if layout is not None and encodable(layout) else torch.empty(0, dtype=torch.int64, device="cpu")
    )
    length = _check_givers(layout, message, communicator, src)
    mine = message if communicator.rank == src else None
    arrived = communicator.broadcast(mine, length, source=src, label="layout")
    received = layout if layout is not None else decode(arrived)
    _verify(received, communicator, src)
    return received


def _check_givers(layout: Layout | None, message: Tensor, communicator: Communicator, src: int) -> int:
    """Return the length of the message. All ranks see the same states, so all ranks raise the same error."""
    state = _ABSENT if layout is None else _PRESENT if encodable(layout) else _FOREIGN
    states = communicator.gather_integers([state, len(message)], label="layout")
    givers = [rank for rank, (state, _) in enumerate(states) if state != _ABSENT]
    if givers != [src]:
        raise LayoutError(
            f"broadcast_layout: exactly rank {src} (src) must give a layout, got one from ranks {givers}. Pass None "
            "on the others."
        )
    if states[src][0] == _FOREIGN:
        raise LayoutError(
            f"broadcast_layout: the layout must be BSHD, SBHD, THD, Rows, Masked or a Shard of one, got another class "
            f"on rank {src}. Broadcast a layout of these classes, and build the other layout from it."
        )
    return states[src][1]


def _verify(received: Layout, communicator: Communicator, src: int) -> None:
    digests = communicator.gather_integers(_digest(encode(received)), label="layout")
    wrong = [rank for rank, digest in enumerate(digests) if digest != digests[src]]
    if wrong:
        raise LayoutError(
            f"broadcast_layout: every rank must hold the layout of rank {src}, got another one on ranks {wrong}. Check "
            "that these ranks run the same version and that nothing else uses this group at the same time."
        )


def _digest(message: Tensor) -> list[int]:
    digest = hashlib.sha256(repr(message.tolist()).encode()).digest()
    return [int.from_bytes(digest[start : start + 8], "little", signed=True) for start in range(0, 32, 8)]
