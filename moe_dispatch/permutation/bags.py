"""Weighted sums of rows in torch: one embedding_bag where its arithmetic is ours, more passes where it is not."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from moe_dispatch.permutation.blocks import block_bytes, blocks_of, row_blocks


def sum_bags(rows: Tensor, members_N: Tensor, cu_S: Tensor, weights_N: Tensor | None, out: Tensor) -> None:
    """``out[s]`` = sum over ``i`` in ``cu_S[s]:cu_S[s+1]`` of ``rows[members_N[i]] * weights_N[i]``, in that order."""
    if members_N.shape[0] == 0 or out.numel() == 0:
        out.zero_()
    elif out.is_cpu:
        _sum_by_rows(rows, members_N, cu_S, weights_N, out)
    else:
        sum_by_columns(rows, members_N, cu_S, weights_N, out)


def _sum_by_rows(rows: Tensor, members_N: Tensor, cu_S: Tensor, weights_N: Tensor | None, out: Tensor) -> None:
    """In blocks of bags, whose edges in ``members_N`` are read on the host."""
    blocks = row_blocks(out)
    if len(blocks) == 1:
        _sum_block(rows, members_N, cu_S, weights_N, out)
        return
    edges = cu_S[torch.tensor([0, *(block.stop for block in blocks)], device="cpu")].tolist()
    for block, begin, end in zip(blocks, edges, edges[1:], strict=False):
        weights = None if weights_N is None else weights_N[begin:end]
        offsets = cu_S[block.start : block.stop + 1] - begin
        _sum_block(rows, members_N[begin:end], offsets, weights, out[block])


def _sum_block(rows: Tensor, members: Tensor, offsets: Tensor, weights: Tensor | None, out: Tensor) -> None:
    """Directly where embedding_bag, which rounds into its rows' dtype, rounds into ours; else from rows widened first.

    For bfloat16 in and out a float32 weight is written as the exact sum of three bfloat16 numbers and its row listed
    three times; once where all weights are bfloat16 numbers, as some routers give them. A part that is 0 makes NaN of
    an infinite row, so where a block's sums hold a NaN they are done again the other way; looking for one takes 3% of
    the time. Float16's range is too small for such parts.
    """
    if fits_bag(rows, weights, out):
        _write(bag(rows, members, offsets, weights), out)
        return
    if weights is not None and rows.dtype == out.dtype == torch.bfloat16:
        high = weights.bfloat16()
        if weights.equal(high.float()):
            _write(bag(rows, members, offsets, high), out)
            return
        sums = bag(rows, torch.stack((members, members, members), 1).view(-1), offsets * 3, _three_parts(weights, high))
        _write(sums, out)
        if not math.isnan(out.sum().item()):
            return
    wide = rows[:, : out.shape[1]].index_select(0, members).to(dtype_of_sums(rows, out))
    out.copy_(bag(wide, torch.arange(len(wide), device=wide.device), offsets, weights))


def _write(sums: Tensor, out: Tensor) -> None:
    """Sums of whole packets into the columns that are kept."""
    out.copy_(sums if sums.shape[1] == out.shape[1] else sums[:, : out.shape[1]])


def sum_by_columns(rows: Tensor, members_N: Tensor, cu_S: Tensor, weights_N: Tensor | None, out: Tensor) -> None:
    """In blocks of columns: the edges of bags are on a GPU, and reading them would be a host sync.

    Every column is summed by itself, so blocks change no bit.
    """
    width = out.shape[1]
    if fits_bag(rows, weights_N, out) and rows.is_contiguous():  # embedding_bag would copy others wholesale
        _write(bag(rows, members_N, cu_S, weights_N), out)
        return
    in_order = torch.arange(members_N.shape[0], device=members_N.device)
    for block in blocks_of(width, members_N.shape[0], limit=block_bytes(out)):
        wide = rows[:, block].index_select(0, members_N).to(dtype_of_sums(rows, out))
        out[:, block].copy_(bag(wide, in_order, cu_S, weights_N))


def dtype_of_sums(rows: Tensor, out: Tensor) -> torch.dtype:
    """In what sums of these rows into ``out`` are accumulated."""
    return torch.float64 if torch.float64 in (rows.dtype, out.dtype) else torch.float32


def fits_bag(rows: Tensor, weights: Tensor | None, out: Tensor) -> bool:
    """Whether embedding_bag accumulates and rounds these as they are like we promise; it does so in float32 itself."""
    exact = weights is None or weights.dtype == torch.bfloat16
    return (exact and rows.dtype == out.dtype == torch.bfloat16) or rows.dtype == dtype_of_sums(rows, out)


def bag(rows: Tensor, members: Tensor, offsets: Tensor, weights: Tensor | None) -> Tensor:
    """One fused gather-multiply-sum; it takes weights in the dtype of the rows only."""
    if weights is not None and weights.dtype != rows.dtype:
        weights = weights.to(rows.dtype)
    return torch.embedding_bag(rows, members, offsets, False, 0, False, weights, True)[0]


def _three_parts(weights: Tensor, high: Tensor) -> Tensor:
    """float32 (N,), and what bfloat16 has of them -> bfloat16 (3N,): 24 bits of mantissa in three times 8."""
    rest = weights - high
    middle = rest.bfloat16()
    return torch.stack((high, middle, (rest - middle).bfloat16()), 1).view(-1)
