"""Conversions of tensors: whole to context-parallel parts and back, packed sequences to a padded batch and back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from moe_dispatch.communication import to_device
from moe_dispatch.errors import LayoutError
from moe_dispatch.layouts.base import Layout, is_host
from moe_dispatch.layouts.shard import ShardKind
from moe_dispatch.layouts.thd import THD, locate

CuSeqlens = Tensor | Sequence[int]


def shard_for_context_parallel(x: Tensor, layout: Layout, index: int, size: int, kind: ShardKind = "zigzag") -> Tensor:
    """Return the part of ``x`` that one context-parallel rank works on. Its layout is ``layout.shard(...)``.

    Args:
        x: A tensor of whole sequences.
        layout: The layout of ``x``.
        index: Number of this rank in the context-parallel group.
        size: Number of ranks in that group.
        kind: ``"zigzag"`` or ``"contiguous"``.

    Returns:
        ``x`` with its sequence dimension divided by ``size``. Rows of other ranks get zero gradient.

    Raises:
        ConfigError: The layout cannot be divided that way; see ``Layout.shard``.
        LayoutError: ``x`` does not fit the layout, or a length does not divide. The error names both numbers.

    Cost: one gather in each direction; no host sync.
    """
    if layout.shard(index, size, kind) is layout:
        return x
    x_TD = layout.flatten(x)
    layout.check(len(x_TD))
    layout.check_shard(len(x_TD), size, kind, values=all(map(is_host, layout.metadata)))
    rows = layout.shard_rows(x.shape[:-1], index, size, kind)
    shape = list(x.shape)
    shape[layout.sequence_dim(shape)] //= size
    return _gather(x_TD, rows).view(shape)


def unshard_from_context_parallel(shards: Sequence[Tensor], layout: Layout, kind: ShardKind = "zigzag") -> Tensor:
    """Join the parts of all ranks to the whole tensor. This is the inverse of ``shard_for_context_parallel``.

    Args:
        shards: One tensor per rank, in rank order, all of the same shape.
        layout: The layout of the whole.
        kind: How the parts were made.

    Raises:
        ConfigError: The layout cannot be divided that way.
        LayoutError: There are no shards, their shapes differ, or they do not fit the layout.

    Cost: one copy and one gather in each direction; no host sync.
    """
    size = len(shards)
    if not size or any(shard.shape != shards[0].shape for shard in shards):
        shapes = [tuple(shard.shape) for shard in shards]
        raise LayoutError(f"unshard_from_context_parallel: shards must be tensors of one shape, got shapes {shapes}.")
    if size == 1:
        return shards[0]
    shape = list(shards[0].shape)
    shape[layout.sequence_dim(shape)] *= size
    parts = [layout.shard(index, size, kind).flatten(shard) for index, shard in enumerate(shards)]
    rows = torch.cat([layout.shard_rows(shape[:-1], index, size, kind) for index in range(size)])
    return _gather(torch.cat(parts), _inverse(rows, len(rows))).view(shape)


def thd_to_bshd(
    x: Tensor, cu_seqlens: CuSeqlens, *, max_seqlen: int | None = None, cu_seqlens_padded: CuSeqlens | None = None
) -> Tensor:
    """Turn packed sequences into a batch, each sequence padded with zeros at its end.

    Args:
        x: (T, ...), sequences one after another.
        cu_seqlens: int32 or int64 (B+1,), or a list: the positions at which sequences begin and end.
        max_seqlen: S of the result. By default the longest sequence; then ``cu_seqlens`` must be on the host.
        cu_seqlens_padded: The positions at which sequences with their padding begin and end, if there is padding. The
            padding is dropped.

    Returns:
        (B, S, ...), differentiable. Its layout is ``BSHD(lengths)``, where the lengths are the differences of
        ``cu_seqlens``.

    Raises:
        LayoutError: ``cu_seqlens`` are malformed or do not fit, or ``max_seqlen`` is missing and ``cu_seqlens`` are on
            a device. Values on a device are not checked.

    Cost: one gather in each direction; no host sync.
    """
    layout = THD(cu_seqlens, cu_seqlens_padded, max_seqlen)
    layout.check(len(x))
    if max_seqlen is None:
        if not is_host(layout.real):
            raise LayoutError(f"thd_to_bshd: give max_seqlen, because cu_seqlens are on {layout.real.device}.")
        max_seqlen = max(layout.real.diff().tolist(), default=0)
    lengths_B, starts_B = layout.real.diff(), layout.owned[:-1]
    positions_S = torch.arange(max_seqlen, device=starts_B.device)
    rows_BS = torch.where(positions_S < lengths_B[:, None], starts_B[:, None] + positions_S, -1)
    return _gather(x, rows_BS.flatten()).view(*rows_BS.shape, *x.shape[1:])


def bshd_to_thd(
    x: Tensor, cu_seqlens: CuSeqlens, *, num_rows: int | None = None, cu_seqlens_padded: CuSeqlens | None = None
) -> Tensor:
    """Pack the real positions of a padded batch, one sequence after another. This is the inverse of ``thd_to_bshd``.

    Args:
        x: (B, S, ...). Positions past the end of a sequence are dropped and may hold anything.
        cu_seqlens: int32 or int64 (B+1,), or a list, as in ``thd_to_bshd``.
        num_rows: T of the result. By default the last of the cu_seqlens; then they must be on the host.
        cu_seqlens_padded: As in ``thd_to_bshd``. Padding becomes zero.

    Returns:
        (T, ...), differentiable.

    Raises:
        LayoutError: ``cu_seqlens`` are malformed or do not fit, or ``num_rows`` is missing and ``cu_seqlens`` are on a
            device. Values on a device are not checked.

    Cost: one gather in each direction; no host sync.
    """
    if x.dim() < 2:
        raise LayoutError(f"bshd_to_thd: x must be (B, S, ...), got shape {tuple(x.shape)}. Keep the batch dimension.")
    layout = THD(cu_seqlens, cu_seqlens_padded, x.shape[1])
    rows = layout.known_rows() if num_rows is None else num_rows
    if rows is None:
        raise LayoutError(f"bshd_to_thd: give num_rows, because cu_seqlens are on {layout.owned.device}.")
    if len(layout.real) != len(x) + 1:
        raise LayoutError(f"bshd_to_thd: cu_seqlens must have B+1 entries, got {len(layout.real)} for B = {len(x)}.")
    layout.check(rows)
    sequence_T, offset_T = locate(layout.owned, torch.arange(rows, device=layout.owned.device))
    positions_T = torch.where(offset_T < layout.real.diff()[sequence_T], sequence_T * x.shape[1] + offset_T, -1)
    return _gather(x.flatten(0, 1), positions_T)


def _inverse(index: Tensor, num_rows: int) -> Tensor:
    """Return the position of each of ``num_rows`` rows in ``index``, or -1 for rows that are not in it.

    Entries of -1 name no row. With 4 rows, the inverse of [2, -1, 0] is [2, -1, 0, -1].
    """
    inverse = torch.full((num_rows + 1,), -1, device=index.device)  # entries of -1 write to the last position
    return inverse.scatter_(0, index.where(index >= 0, num_rows), torch.arange(len(index), device=index.device))[:-1]


def _gather(x: Tensor, index: Tensor) -> Tensor:
    """Gather rows of ``x``, each at most once: row ``i`` is ``x[index[i]]``, or zero if ``index[i]`` is -1.

    The result is differentiable any number of times. The backward is a gather too, without atomics. Rows of ``x`` that
    were not gathered get zero gradient. These rows, and the gradients of zero rows, are never multiplied, so they may
    hold NaN.
    """
    index = to_device(index, x.device)
    gathered: Tensor = _Gather.apply(x, index, _inverse(index, len(x)))  # type: ignore[no-untyped-call]
    return gathered


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, index: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(index, inverse)
        if not len(x):
            return x.new_zeros(len(index), *x.shape[1:])
        rows = x.index_select(0, index.clamp(min=0))
        return rows.masked_fill_((index < 0).view(-1, *[1] * (x.dim() - 1)), 0)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        index, inverse = ctx.saved_tensors
        return _Gather.apply(grads[0], inverse, index), None, None  # type: ignore[no-untyped-call]
