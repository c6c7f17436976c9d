"""Triton kernels of the one-rank reorder, and their launchers. The one module that imports triton.

A program handles a block of columns of one row, or a whole row if it sums along the row. There are no atomics and no
tuning at run time: the order of additions depends on shapes alone, so every run gives the same bits. Offsets are 64
bits wide. Masked elements are never read.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from moe_dispatch.permutation.base import accumulation_dtype

VERSION: str = triton.__version__
INTERPRETED: bool = triton.knobs.runtime.interpret
# The most columns that a program handles at once. For 16-bit numbers, each lane of eight warps accesses 16 bytes.
_MAX_BLOCK = 2048


@triton.jit
def _rounded(values, out):
    """Round to the dtype of ``out``; float64 goes through float32, as in torch and as 16-bit types need it."""
    if values.dtype == tl.float64 and out.dtype.element_ty != tl.float64:
        values = values.to(tl.float32)
    return values.to(out.dtype.element_ty)


@triton.jit
def gather_kernel(rows, source, out, width, rows_stride, rows_step, out_stride, out_step, block: tl.constexpr):
    """``out[i] = rows[source[i]]``, or 0 where ``source[i]`` is negative."""
    at = tl.program_id(0).to(tl.int64)
    row = tl.load(source + at)
    columns = tl.program_id(1).to(tl.int64) * block + tl.arange(0, block)
    inside = columns < width
    values = tl.load(rows + row * rows_stride + columns * rows_step, mask=inside & (row >= 0), other=0)
    tl.store(out + at * out_stride + columns * out_step, _rounded(values, out), mask=inside)


@triton.jit
def gather_weighted_kernel(
    rows,
    source,
    weights,
    partners,
    out,
    dots,
    width,
    rows_stride,
    rows_step,
    partners_stride,
    partners_step,
    out_stride,
    accumulate: tl.constexpr,
    block: tl.constexpr,
):
    """``out[i] = rows[source[i]] * weights[i]``, and its dot product with ``partners[i]``; 0 where there is no row."""
    at = tl.program_id(0).to(tl.int64)
    row = tl.load(source + at)
    exists = row >= 0
    weight = tl.load(weights + at, mask=exists, other=0).to(accumulate)
    dot = tl.zeros((block,), dtype=accumulate)
    for begin in range(0, width, block):
        columns = begin + tl.arange(0, block).to(tl.int64)
        inside = columns < width
        read = inside & exists
        values = tl.load(rows + row * rows_stride + columns * rows_step, mask=read, other=0).to(accumulate)
        tl.store(out + at * out_stride + columns, _rounded(values * weight, out), mask=inside)
        if partners is not None:
            partner = tl.load(partners + at * partners_stride + columns * partners_step, mask=read, other=0)
            dot = tl.fma(values, partner.to(accumulate), dot)
    if partners is not None:
        tl.store(dots + at, tl.sum(dot))


@triton.jit
def sum_bags_kernel(
    rows,
    members,
    edges,
    weights,
    out,
    width,
    rows_stride,
    rows_step,
    out_stride,
    out_step,
    accumulate: tl.constexpr,
    block: tl.constexpr,
):
    """``out[s]`` = the sum of ``rows[members[i]] * weights[i]`` from ``edges[s]`` to ``edges[s+1]``, in that order."""
    at = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1).to(tl.int64) * block + tl.arange(0, block)
    inside = columns < width
    total = tl.zeros((block,), dtype=accumulate)
    for i in range(tl.load(edges + at), tl.load(edges + at + 1)):
        row = tl.load(members + i)
        values = tl.load(rows + row * rows_stride + columns * rows_step, mask=inside, other=0).to(accumulate)
        if weights is not None:
            total = tl.fma(values, tl.load(weights + i).to(accumulate), total)
        else:
            total += values
    tl.store(out + at * out_stride + columns * out_step, _rounded(total, out), mask=inside)


@torch.compiler.disable  # torch.compile can trace neither the choice of a device nor the interpreter of Triton
def gather(rows: Tensor, source: Tensor, out: Tensor) -> None:
    """Launch ``gather_kernel``: rows (S, D), source int64 (n,), out (n, D)."""
    if out.numel():
        with torch.cuda.device_of(out):
            gather_kernel[_grid(out)](
                rows, source.contiguous(), out, out.shape[1], *rows.stride(), *out.stride(), **_by_width(out.shape[1])
            )


@torch.compiler.disable
def gather_weighted(
    rows: Tensor,
    source: Tensor,
    weights: Tensor,
    out: Tensor,
    *,
    partners: Tensor | None = None,
    dots: Tensor | None = None,
) -> None:
    """Launch ``gather_weighted_kernel``: weights (n,), out (n, D) with contiguous rows, partners (n, D), dots (n,)."""
    if out.numel():
        with torch.cuda.device_of(out):
            gather_weighted_kernel[(out.shape[0],)](
                *(rows, source.contiguous(), weights.contiguous(), partners, out, dots, out.shape[1]),
                *rows.stride(),
                *((0, 0) if partners is None else partners.stride()),
                out.stride(0),
                accumulate=_accumulation(out),
                **_by_width(out.shape[1]),
            )


@torch.compiler.disable
def sum_bags(rows: Tensor, members: Tensor, edges: Tensor, weights: Tensor | None, out: Tensor) -> None:
    """Launch ``sum_bags_kernel``: rows (n, at least D), members int64 (N,), edges int64 (S+1,), out (S, D)."""
    if out.numel():
        weights = None if weights is None else weights.contiguous()
        with torch.cuda.device_of(out):
            sum_bags_kernel[_grid(out)](
                *(rows, members.contiguous(), edges.contiguous(), weights, out, out.shape[1]),
                *rows.stride(),
                *out.stride(),
                accumulate=_accumulation(rows, out),
                **_by_width(out.shape[1]),
            )


def _grid(out: Tensor) -> tuple[int, int]:
    return out.shape[0], triton.cdiv(out.shape[1], _by_width(out.shape[1])["block"])


def _by_width(width: int) -> dict[str, int]:
    """The block and the warps of a program, from the row's width alone."""
    block = min(triton.next_power_of_2(width), _MAX_BLOCK)
    return {"block": block, "num_warps": max(1, block // 256)}


def _accumulation(*tensors: Tensor) -> tl.dtype:
    dtype = accumulation_dtype(*(tensor.dtype for tensor in tensors))
    return tl.float64 if dtype == torch.float64 else tl.float32
