"""Moving the rows of a one-rank reorder: the plain torch implementation, and the reference for every other.

Each function is one pass over its rows. On the CPU the passes run in blocks that stay in the cache, and write into
memory the caller already has: clearing the pages of fresh memory costs several times the copy itself.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from moe_dispatch.backends.permutation.index import SlotIndex

# Bytes of float32 a block may hold: a share of a CPU core's L2 cache, and on a GPU a bound on temporary memory.
_BLOCK_BYTES = {"cpu": 2 << 20, "cuda": 256 << 20}


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """``max(float32, dtype)``: in what sums over experts are accumulated before they are rounded once."""
    return torch.promote_types(dtype, torch.float32)


def expand(rows_SD: Tensor, index: SlotIndex, dtype: torch.dtype) -> Tensor:
    """Copy each row to all its grouped positions.

    Args:
        rows_SD: (S, D), rows may be strided and of another dtype.
        index: where they go.
        dtype: of the result.

    Returns:
        (R, D), zero on padding.
    """
    out = torch.empty(index.num_grouped, rows_SD.shape[1], dtype=dtype, device=rows_SD.device)
    for block in _blocks(out) if rows_SD.dtype != dtype else [slice(None)]:
        gather_rows(rows_SD, index.source_R[block], out[block])
    return _clear_padding(out, index)


def gather_rows(rows_SD: Tensor, source: Tensor, out: Tensor) -> None:
    """``out[i] = rows_SD[source[i]]``, converting where the dtypes differ."""
    if rows_SD.dtype == out.dtype and out.is_contiguous():
        torch.index_select(rows_SD, 0, source, out=out)
    else:
        out.copy_(rows_SD.index_select(0, source))


def expand_weighted(
    rows_SD: Tensor, index: SlotIndex, weights_R: Tensor | None, partners_RD: Tensor | None, dtype: torch.dtype
) -> tuple[Tensor, Tensor | None]:
    """The backward of ``reduce``: each row times the weight of its grouped position, and the gradient of the weights.

    Args:
        rows_SD: (S, D), the incoming gradient by row.
        index: of the reduce.
        weights_R: (R,), or None for weights of 1.
        partners_RD: (R, D), what ``reduce`` was given; None when the gradient of the weights is not wanted. On padding
            it may hold anything.
        dtype: of the result.

    Returns:
        (R, D) gradient of the grouped rows, zero on padding, and (R,) gradient of the weights, zero on padding, or
        None.
    """
    if weights_R is None:
        return expand(rows_SD, index, dtype), None
    accumulate = accumulation_dtype(dtype)
    weights = weights_R.to(accumulate).unsqueeze(1)
    out = torch.empty(index.num_grouped, rows_SD.shape[1], dtype=dtype, device=rows_SD.device)
    dots = None if partners_RD is None else torch.empty(index.num_grouped, dtype=accumulate, device=rows_SD.device)
    for block in _blocks(out):
        gradient = rows_SD.index_select(0, index.source_R[block]).to(accumulate)
        if dots is not None and partners_RD is not None:
            torch.linalg.vecdot(gradient, partners_RD[block].to(accumulate), out=dots[block])
        out[block].copy_(torch.mul(gradient, weights[block], out=gradient))
    return _clear_padding(out, index), None if dots is None else _clear_padding(dots, index).to(weights_R.dtype)


def reduce(rows_RD: Tensor, index: SlotIndex, weights_R: Tensor | None, out: Tensor) -> None:
    """``out[s]`` = the sum of the grouped rows of row s, in slot order, each times its weight.

    Accumulated in ``max(float32, dtype)`` and rounded once into ``out``. Grouped rows that are padding are never read.

    Args:
        rows_RD: (R, D).
        index: which rows to sum.
        weights_R: (R,) in the accumulation dtype, or None for weights of 1.
        out: (S, D), rows may be strided, any floating dtype.
    """
    weights_N = None if weights_R is None else weights_R.index_select(0, index.byrow_N)
    sum_bags(rows_RD, index.byrow_N, index.cu_S, weights_N, out)


def sum_bags(rows: Tensor, members_N: Tensor, cu_S: Tensor, weights_N: Tensor | None, out: Tensor) -> None:
    """``out[s]`` = sum over ``i`` in ``cu_S[s]:cu_S[s+1]`` of ``rows[members_N[i]] * weights_N[i]``, in that order.

    Columns of ``rows`` beyond those of ``out`` are ignored. A gather: no atomics, so the same bits in every run.
    """
    if members_N.shape[0] == 0:
        out.zero_()
        return
    width = out.shape[1]
    if out.device.type != "cpu" or out.shape[0] <= _block_rows(out):  # on a GPU, reading cu_S would be a sync
        out.copy_(_bag_sums(rows, members_N, cu_S, weights_N, out.dtype)[:, :width])
        return
    for bags, members in _bag_blocks(out, cu_S):
        weights = None if weights_N is None else weights_N[members]
        offsets = cu_S[bags.start : bags.stop + 1] - members.start
        out[bags].copy_(_bag_sums(rows, members_N[members], offsets, weights, out.dtype)[:, :width])


def _bag_sums(rows: Tensor, members: Tensor, bags: Tensor, weights: Tensor | None, dtype: torch.dtype) -> Tensor:
    """One fused gather-multiply-sum, exact up to one rounding into ``dtype``.

    embedding_bag accumulates in float32, but wants weights in the dtype of its rows and rounds into it. For bfloat16 in
    and out a float32 weight is written as the exact sum of three bfloat16 numbers and its row listed three times; where
    the dtypes differ, and for float16, whose range is too small for such parts, the rows are gathered and widened
    first.
    """
    if rows.dtype == dtype == torch.bfloat16:
        if weights is not None:
            members, bags, weights = members.repeat_interleave(3), bags * 3, _three_parts(weights)
    elif rows.dtype != (wide := accumulation_dtype(torch.promote_types(rows.dtype, dtype))):
        rows, members = rows.index_select(0, members).to(wide), torch.arange(members.shape[0], device=rows.device)
    if weights is not None:
        weights = weights.to(rows.dtype)
    return torch.embedding_bag(rows, members, bags, False, 0, False, weights, True)[0]


def _three_parts(weights: Tensor) -> Tensor:
    """float32 (N,) -> bfloat16 (3N,): 24 bits of mantissa in three times 8."""
    high = weights.bfloat16()
    rest = weights - high
    middle = rest.bfloat16()
    return torch.stack((high, middle, (rest - middle).bfloat16()), 1).view(-1)


def _blocks(out: Tensor) -> Iterator[slice]:
    """Slices of the rows of ``out`` whose float32 copies fit the block size."""
    size = _block_rows(out)
    for begin in range(0, out.shape[0], size):
        yield slice(begin, begin + size)


def _bag_blocks(out: Tensor, cu_S: Tensor) -> Iterator[tuple[slice, slice]]:
    """Blocks of bags, each with its range of members."""
    begins = [*range(0, out.shape[0], _block_rows(out)), out.shape[0]]
    edges = cu_S[begins].tolist()
    for i in range(len(begins) - 1):
        yield slice(begins[i], begins[i + 1]), slice(edges[i], edges[i + 1])


def _block_rows(out: Tensor) -> int:
    bytes_per_row = 4 * max(1, out.shape[1])
    return max(1, _BLOCK_BYTES.get(out.device.type, 256 << 20) // bytes_per_row)


def _clear_padding(out: Tensor, index: SlotIndex) -> Tensor:
    return out if index.padding is None else out.index_fill_(0, index.padding, 0)
