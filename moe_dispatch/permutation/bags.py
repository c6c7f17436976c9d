"""Weighted sums of rows in torch, in blocks that bound the memory of a pass.

Each function computes ``Permutation.sum_bags``. They use one ``embedding_bag`` per block where it accumulates and
rounds as we promise, and widen the rows first where it does not.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from moe_dispatch.permutation.base import accumulation_dtype
from moe_dispatch.permutation.index import front, running_total

# Bytes of float32 that one block of a pass may hold. On the CPU it is a share of a core's L2 cache, so that a block is
# read back before it is evicted. Elsewhere it bounds the temporary memory of a pass, which holds at most three blocks.
CPU_BLOCK_BYTES = 2 << 20
_GPU_BLOCK_BYTES = 256 << 20
_CONVERTED_BYTES = 24 << 20
_TAIL_BAGS = 256


def row_blocks(out: Tensor) -> list[slice]:
    """Cut the rows of ``out`` into blocks."""
    return _blocks(out.shape[0], out.shape[1], _block_bytes(out))


def _blocks(length: int, width: int, nbytes: int) -> list[slice]:
    """Cut a dimension into slices of at most ``nbytes`` of float32, where one step is ``width`` numbers."""
    size = max(1, nbytes // (4 * max(1, width)))
    return [slice(begin, min(begin + size, length)) for begin in range(0, length, size)]


def _block_bytes(out: Tensor) -> int:
    return CPU_BLOCK_BYTES if out.is_cpu else _GPU_BLOCK_BYTES


def sum_by_rows(rows: Tensor, members_N: Tensor, cu_S: Tensor, weights_N: Tensor | None, out: Tensor) -> None:
    """Sum in blocks of bags. Their edges in ``members_N`` are read on the host, so this is for the CPU."""
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
    """Sum directly if embedding_bag, which rounds to the dtype of its rows, rounds to ours; else widen the rows first.

    For bfloat16 rows and sums, a float32 weight is written as the exact sum of three bfloat16 numbers, and its row is
    listed three times. If all weights are bfloat16 numbers, as some routers produce them, once is enough. A part that
    is 0 turns an infinite row into NaN. So if the sums of a block hold a NaN, they are computed again from widened
    rows; looking for a NaN takes 3% of the time. The range of float16 is too small for such parts.
    """
    if _fits_bag(rows, weights, out):
        bag(rows, members, offsets, weights, out)
        return
    if weights is not None and rows.dtype == out.dtype == torch.bfloat16:
        high = weights.bfloat16()
        if weights.equal(high.float()):
            bag(rows, members, offsets, high, out)
            return
        rest = weights - high
        middle = rest.bfloat16()
        parts = torch.stack((high, middle, (rest - middle).bfloat16()), 1)  # 24 bits of mantissa in three times 8
        bag(rows, torch.stack((members, members, members), 1).view(-1), offsets * 3, parts.view(-1), out)
        if not math.isnan(out.sum().item()):
            return
    wide = rows[:, : out.shape[1]].index_select(0, members).to(accumulation_dtype(rows.dtype, out.dtype))
    bag(wide, torch.arange(len(wide), device=wide.device), offsets, weights, out)


def sum_by_columns(rows: Tensor, members_N: Tensor, cu_S: Tensor, weights_N: Tensor | None, out: Tensor) -> None:
    """Sum in blocks of columns. This is for GPUs, where reading the edges of bags would be a host sync.

    Each column is summed by itself, so the blocks do not change the sums in any bit.
    """
    if _fits_bag(rows, weights_N, out) and rows.is_contiguous():  # embedding_bag would copy strided rows as a whole
        bag(rows, members_N, cu_S, weights_N, out)
        return
    in_order = torch.arange(members_N.shape[0], device=members_N.device)
    for block in _blocks(out.shape[1], members_N.shape[0], _block_bytes(out)):
        wide = rows[:, block].index_select(0, members_N).to(accumulation_dtype(rows.dtype, out.dtype))
        bag(wide, in_order, cu_S, weights_N, out[:, block])


def sum_statically(rows: Tensor, members_N: Tensor, cu_S: Tensor, weights_N: Tensor | None, out: Tensor) -> None:
    """Sum where only the device knows how many members there are: no shape depends on ``cu_S``.

    N is S times the most members that a bag can have. Members behind the last edge are not summed, but must be valid.
    """
    in_parts = rows.dtype == out.dtype == torch.bfloat16
    if rows.stride(1) == 1 and (in_parts or _fits_bag(rows, weights_N, out)):
        _sum_windows(rows, members_N, cu_S, weights_N, out)
        return
    # Each column is converted once. A window of members would be converted again for each block, unused members too.
    for columns in _blocks(out.shape[1], len(rows), _CONVERTED_BYTES):
        wide = rows[:, columns].to(accumulation_dtype(rows.dtype, out.dtype)).contiguous()
        _sum_windows(wide, members_N, cu_S, weights_N, out[:, columns])


def _sum_windows(rows: Tensor, members_N: Tensor, cu_S: Tensor, weights_N: Tensor | None, out: Tensor) -> None:
    """Sum in blocks of bags; each block takes a window of as many members as its bags can have."""
    count, bags = len(members_N), len(cu_S) - 1
    for block in row_blocks(out):
        members, edges, weights = members_N, cu_S, weights_N
        if block.stop - block.start < bags:
            begin = cu_S[block.start]
            most = (block.stop - block.start) * (count // bags)
            at = (torch.arange(most, device=cu_S.device) + begin).clamp_(max=count - 1)
            members, edges = members_N.index_select(0, at), cu_S[block.start : block.stop + 1] - begin
            weights = None if weights_N is None else weights_N.index_select(0, at)
        if weights is not None and rows.dtype == torch.bfloat16:
            members, edges, weights = in_bfloat16_parts(members, edges, weights)
        if not (rows.is_cpu and rows.dtype in (torch.float32, torch.bfloat16)):
            edges = _with_tail(edges, len(members))
        bag(rows, members, edges, weights, out[block])


def _with_tail(edges: Tensor, num_members: int) -> Tensor:
    """Append bags that take the members behind the last edge; ``bag`` discards their sums.

    Except in its fast path on the CPU, embedding_bag sums the last bag up to the last member, whatever its edge says.
    The tail has many bags, because a GPU adds up one bag in sequence.
    """
    steps = torch.arange(1, _TAIL_BAGS + 1, device=edges.device) * -(-num_members // _TAIL_BAGS)
    return torch.cat([edges, (edges[-1] + steps).clamp(max=num_members)])


def in_bfloat16_parts(members_N: Tensor, cu_S: Tensor, weights_N: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Rewrite the sums for bfloat16 weights: each weight is cut into its leading, middle and last 8 bits.

    The parts add up to the weight exactly. A row is listed once for each part that is not 0, and at least once: 0 times
    an infinite row would be NaN. All parts have the sign of their weight, so infinite terms agree.

    Returns:
        Members int64 (3N,), edges (S+1,), weights bfloat16 (3N,).
    """
    high_N = _cut(weights_N.float())
    rest_N = torch.where(weights_N.isfinite(), weights_N.float() - high_N, 0)
    middle_N = _cut(rest_N)
    parts = torch.stack([high_N, middle_N, rest_N - middle_N], 1)
    kept = parts != 0
    kept[:, 0] = True
    edges = running_total(kept.sum(1)).index_select(0, cu_S)
    members = members_N.repeat_interleave(3)
    return front(members, kept.view(-1)), edges, front(parts.view(-1), kept.view(-1)).bfloat16()


def _cut(values: Tensor) -> Tensor:
    """Cut, not round, float32 numbers to the 8 bits of a bfloat16 mantissa."""
    return (values.view(torch.int32) & -(1 << 16)).view(torch.float32)


def bag(rows: Tensor, members: Tensor, offsets: Tensor, weights: Tensor | None, out: Tensor) -> None:
    """Gather, multiply and sum in one fused operation. Bags and columns beyond those of ``out`` are discarded."""
    if weights is not None and weights.dtype != rows.dtype:
        weights = weights.to(rows.dtype)  # it takes no others
    sums = torch.embedding_bag(rows, members, offsets, False, 0, False, weights, True)[0]
    out.copy_(sums if sums.shape == out.shape else sums[: out.shape[0], : out.shape[1]])


def _fits_bag(rows: Tensor, weights: Tensor | None, out: Tensor) -> bool:
    """Whether embedding_bag, which itself accumulates in float32, accumulates and rounds as we promise."""
    exact = weights is None or weights.dtype == torch.bfloat16
    in_bfloat16 = exact and rows.dtype == out.dtype == torch.bfloat16
    return in_bfloat16 or rows.dtype == accumulation_dtype(rows.dtype, out.dtype)
