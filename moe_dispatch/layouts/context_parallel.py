"""Dividing a tensor of whole sequences among context-parallel ranks, and putting it together again."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from moe_dispatch.errors import LayoutError
from moe_dispatch.layouts.base import Layout, ShardKind, is_host
from moe_dispatch.layouts.gather import gather_rows, invert


def shard_for_context_parallel(x: Tensor, layout: Layout, index: int, size: int, kind: ShardKind = "zigzag") -> Tensor:
    """The part of ``x`` that one context-parallel rank works on; ``layout.shard(index, size, kind)`` is its layout.

    Args:
        x: a tensor of whole sequences, as ``layout`` says.
        layout: of the whole.
        index: this rank in the context-parallel group.
        size: ranks in that group.
        kind: ``"zigzag"`` or ``"contiguous"``.

    Returns:
        ``x`` with its sequence dimension divided by ``size``; differentiable, zero gradient for what other ranks hold.

    Raises:
        ConfigError: index, size or kind are out of range, or the layout cannot be split that way.
        LayoutError: ``x`` does not fit the layout, or a length does not divide; the error names both numbers.

    Cost: one gather each way; no host sync.
    """
    if layout.shard(index, size, kind) is layout:
        return x
    x_TD = layout.flatten(x)
    layout.check(len(x_TD))
    layout.check_shard(len(x_TD), size, kind, values=all(map(is_host, layout.metadata)))
    rows = layout.shard_rows(x.shape[:-1], index, size, kind).to(x.device, non_blocking=True)
    return gather_rows(x_TD, rows, invert(rows, len(x_TD))).view(_scaled(x.shape, layout, 1, size))


def unshard_from_context_parallel(shards: Sequence[Tensor], layout: Layout, kind: ShardKind = "zigzag") -> Tensor:
    """The inverse of ``shard_for_context_parallel``: the whole tensor from every rank's part, in rank order.

    Args:
        shards: one tensor per rank, all of one shape.
        layout: of the whole.
        kind: as the parts were made.

    Raises:
        ConfigError: the layout cannot be split that way.
        LayoutError: there are no shards, their shapes differ, or they do not fit the layout.

    Cost: one copy and one gather each way; no host sync.
    """
    size = len(shards)
    if not size or any(shard.shape != shards[0].shape for shard in shards):
        raise LayoutError(
            "unshard_from_context_parallel: shards must be tensors of one shape, one per rank, got shapes "
            f"{[tuple(shard.shape) for shard in shards]}. Gather every rank's part."
        )
    if size == 1:
        return shards[0]
    shape = _scaled(shards[0].shape, layout, size, 1)
    parts = [layout.shard(index, size, kind).flatten(shard) for index, shard in enumerate(shards)]
    rows = torch.cat([layout.shard_rows(shape[:-1], index, size, kind) for index in range(size)])
    rows = rows.to(shards[0].device, non_blocking=True)
    return gather_rows(torch.cat(parts), invert(rows, len(rows)), rows).view(shape)


def _scaled(shape: Sequence[int], layout: Layout, times: int, over: int) -> list[int]:
    dim = layout.sequence_dim(shape)
    return [length * times // over if axis == dim else length for axis, length in enumerate(shape)]
