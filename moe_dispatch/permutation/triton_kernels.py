"""Triton kernels of the one-rank reorder, and their launchers. ``triton_tables`` has the kernels of tables.

A program handles a block of columns of one row, or a whole row if it adds along the row. There are no atomics, and
nothing is tuned at run time. So the order of additions depends on shapes alone, and every run gives the same bits.
Memory offsets are 64 bits wide. Masked elements are never read.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from moe_dispatch.permutation.index import accumulation_dtype
from moe_dispatch.permutation.triton_launch import cdiv, kernel, next_power_of_2

VERSION: str = triton.__version__
INTERPRETED: bool = triton.knobs.runtime.interpret
# Largest number of columns that a program handles at once. With 16-bit numbers, eight warps have 256 lanes, and each
# lane accesses 8 numbers, which are 16 bytes.
_MAX_BLOCK = 2048


@triton.jit
def _rounded(values, out):
    """Round to the dtype of ``out``. If ``out`` is narrower, float64 is rounded to float32 first.

    Torch does so too, and conversions to 16-bit types need it.
    """
    if values.dtype == tl.float64 and out.dtype.element_ty != tl.float64:
        values = values.to(tl.float32)
    return values.to(out.dtype.element_ty)


@kernel
def gather_kernel(rows, source, out, width, rows_stride, rows_step, out_stride, out_step, block: tl.constexpr):
    """Compute ``out[i] = rows[source[i]]``, or 0 where ``source[i]`` is negative."""
    at = tl.program_id(0).to(tl.int64)
    row = tl.load(source + at)
    columns = tl.program_id(1).to(tl.int64) * block + tl.arange(0, block)
    # Not `(columns < width) & (row >= 0)`: the interpreter of Triton 3.9 refuses a mask made of a block and a scalar.
    read = columns < tl.where(row >= 0, width, 0)
    values = tl.load(rows + row * rows_stride + columns * rows_step, mask=read, other=0)
    tl.store(out + at * out_stride + columns * out_step, _rounded(values, out), mask=columns < width)


@kernel(do_not_specialize=["num_rows", "num_grouped"])
def scatter_kernel(
    rows,
    places,
    edges,
    padding,
    out,
    num_rows,
    num_grouped,
    width,
    rows_stride,
    rows_step,
    out_stride,
    out_step,
    block: tl.constexpr,
):
    """Copy ``rows[s]`` to ``out[places[i]]`` for all i in ``range(edges[s], edges[s + 1])``, and set padding to 0.

    The programs behind the last row of ``rows`` each have an entry of ``padding``, a row of ``out`` or ``num_grouped``.
    """
    at = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1).to(tl.int64) * block + tl.arange(0, block)
    if at < num_rows:
        begin, end = tl.load(edges + at), tl.load(edges + at + 1)
        read = columns < tl.where(begin < end, width, 0)
        values = _rounded(tl.load(rows + at * rows_stride + columns * rows_step, mask=read, other=0), out)
        for i in range(begin, end):
            place = tl.load(places + i)
            tl.store(out + place * out_stride + columns * out_step, values, mask=read)
    elif padding is not None:
        place = tl.load(padding + (at - num_rows))
        write = columns < tl.where(place < num_grouped, width, 0)
        tl.store(out + place * out_stride + columns * out_step, tl.zeros((block,), out.dtype.element_ty), mask=write)


@kernel(do_not_specialize=["num_rows", "num_grouped"])
def scatter_weighted_kernel(
    rows,
    places,
    edges,
    padding,
    weights,
    partners,
    out,
    dots,
    num_rows,
    num_grouped,
    width,
    rows_stride,
    rows_step,
    partners_stride,
    partners_step,
    out_stride,
    most: tl.constexpr,
    accumulate: tl.constexpr,
    block: tl.constexpr,
):
    """Do what ``scatter_kernel`` does with ``rows[s] * weights[p]`` for each place p of row s, at most ``most`` places.

    Also compute ``dots[p] = dot(rows[s], partners[p])``, 0 on padding. Without ``partners``, ``dots`` is not written.
    """
    at = tl.program_id(0).to(tl.int64)
    if at < num_rows:
        begin, end = tl.load(edges + at), tl.load(edges + at + 1)
        number = tl.arange(0, most)
        exists = number < end - begin
        place = tl.load(places + (begin + number), mask=exists, other=0)
        weight = tl.load(weights + place, mask=exists, other=0).to(accumulate)[:, None]
        dot = tl.zeros((most, block), dtype=accumulate)
        for first in range(0, width, block):
            columns = first + tl.arange(0, block).to(tl.int64)
            read = columns < tl.where(begin < end, width, 0)
            values = tl.load(rows + at * rows_stride + columns * rows_step, mask=read, other=0).to(accumulate)[None, :]
            inside = exists[:, None] & read[None, :]
            to = place[:, None] * out_stride + columns[None, :]
            tl.store(out + to, _rounded(values * weight, out), mask=inside)
            if partners is not None:
                of = place[:, None] * partners_stride + columns[None, :] * partners_step
                partner = tl.load(partners + of, mask=inside, other=0).to(accumulate)
                dot = tl.fma(tl.broadcast_to(values, (most, block)), partner, dot)
        if partners is not None:
            tl.store(dots + place, tl.sum(dot, 1), mask=exists)
    elif padding is not None:
        empty = tl.load(padding + (at - num_rows))
        for first in range(0, width, block):
            columns = first + tl.arange(0, block).to(tl.int64)
            write = columns < tl.where(empty < num_grouped, width, 0)
            tl.store(out + empty * out_stride + columns, tl.zeros((block,), out.dtype.element_ty), mask=write)
        if partners is not None:
            tl.store(dots + empty, tl.zeros((), accumulate), mask=empty < num_grouped)


@kernel
def weigh_kernel(
    rows,
    is_real,
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
    clears: tl.constexpr,
    accumulate: tl.constexpr,
    block: tl.constexpr,
):
    """Compute ``out[i] = rows[i] * weights[i]`` and ``dots[i] = dot(rows[i], partners[i])``.

    Where ``is_real[i]`` is False, nothing is read: ``dots[i]`` is 0, and ``out[i]`` is 0 with ``clears``, else not
    written. Without ``partners``, ``dots`` is not written.
    """
    at = tl.program_id(0).to(tl.int64)
    exists = tl.load(is_real + at) != 0
    weight = tl.load(weights + at, mask=exists, other=0).to(accumulate)
    dot = tl.zeros((block,), dtype=accumulate)
    for begin in range(0, width, block):
        columns = begin + tl.arange(0, block).to(tl.int64)
        read = columns < tl.where(exists, width, 0)
        values = tl.load(rows + at * rows_stride + columns * rows_step, mask=read, other=0).to(accumulate)
        product = _rounded(values * weight, out)
        if clears:
            tl.store(out + at * out_stride + columns, product, mask=columns < width)
        else:
            tl.store(out + at * out_stride + columns, product, mask=read)
        if partners is not None:
            partner = tl.load(partners + at * partners_stride + columns * partners_step, mask=read, other=0)
            dot = tl.fma(values, partner.to(accumulate), dot)
    if partners is not None:
        tl.store(dots + at, tl.sum(dot))


@kernel
def sum_bags_kernel(
    rows,
    members,
    edges,
    weights,
    out,
    cleared,
    width,
    rows_stride,
    rows_step,
    out_stride,
    out_step,
    cleared_stride,
    cleared_width,
    of_rows: tl.constexpr,
    accumulate: tl.constexpr,
    cleared_block: tl.constexpr,
    block: tl.constexpr,
):
    """Compute ``out[s]``, the sum of ``rows[members[i]] * weights[i]`` over i in ``range(edges[s], edges[s + 1])``.

    The terms are added in the order of i. With ``of_rows``, the weight is ``weights[members[i]]``. Also set
    ``cleared[s]`` to 0 if it is given.
    """
    at = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1).to(tl.int64) * block + tl.arange(0, block)
    inside = columns < width
    total = tl.zeros((block,), dtype=accumulate)
    for i in range(tl.load(edges + at), tl.load(edges + at + 1)):
        row = tl.load(members + i)
        values = tl.load(rows + row * rows_stride + columns * rows_step, mask=inside, other=0).to(accumulate)
        if weights is not None:
            total = tl.fma(values, tl.load(weights + (row if of_rows else i)).to(accumulate), total)
        else:
            total += values
    tl.store(out + at * out_stride + columns * out_step, _rounded(total, out), mask=inside)
    if cleared is not None:
        column = tl.arange(0, cleared_block).to(tl.int64)
        write = column < tl.where(tl.program_id(1) == 0, cleared_width, 0)
        none = tl.zeros((cleared_block,), cleared.dtype.element_ty)
        tl.store(cleared + at * cleared_stride + column, none, mask=write)


@torch.compiler.disable  # torch.compile can trace neither ``device_of`` nor Triton's interpreter
def gather(rows: Tensor, out: Tensor, source: Tensor) -> None:
    """Launch ``gather_kernel``: rows (S, D), source int64 (n,), out (n, D)."""
    if out.numel():
        gather_kernel[_grid(out)](
            rows, source.contiguous(), out, out.shape[1], *rows.stride(), *out.stride(), **_options(out.shape[1])
        )


@torch.compiler.disable
def scatter(rows: Tensor, out: Tensor, places: Tensor, edges: Tensor, padding: Tensor | None) -> None:
    """Launch ``scatter_kernel``: rows (S, D), places int64 (N,), edges int64 (S+1,), padding int64, out (R, D)."""
    num_rows, width = rows.shape
    programs = num_rows + (0 if padding is None else padding.shape[0])
    if out.numel() and programs:
        options = _options(width)
        scatter_kernel[(programs, cdiv(width, options["block"]))](
            *(rows, places, edges, padding, out, num_rows, out.shape[0], width),
            *rows.stride(),
            *out.stride(),
            **options,
        )


@torch.compiler.disable
def scatter_weighted(
    rows: Tensor,
    places: Tensor,
    edges: Tensor,
    padding: Tensor | None,
    weights: Tensor,
    out: Tensor,
    *,
    most: int,
    partners: Tensor | None = None,
    dots: Tensor | None = None,
) -> None:
    """Launch ``scatter_weighted_kernel``: as in ``scatter``, weights (R,), partners (R, D), dots (R,)."""
    num_rows, width = rows.shape
    programs = num_rows + (0 if padding is None else padding.shape[0])
    if out.numel() and programs:
        most = next_power_of_2(most)
        # Each program keeps ``most`` blocks in registers, so that it reads a row once.
        block = min(next_power_of_2(width), _MAX_BLOCK, 8 * _MAX_BLOCK // most)
        scatter_weighted_kernel[(programs,)](
            *(rows, places, edges, padding, weights.contiguous(), partners, out, dots),
            *(num_rows, out.shape[0], width, *rows.stride()),
            *((0, 0) if partners is None else partners.stride()),
            out.stride(0),
            most=most,
            accumulate=_accumulation(out.dtype),
            block=block,
            num_warps=min(16, max(1, most * block // 1024)),
            enable_fp_fusion=False,
        )


@torch.compiler.disable
def weigh(
    rows: Tensor,
    weights: Tensor,
    is_real: Tensor,
    out: Tensor,
    *,
    partners: Tensor | None = None,
    dots: Tensor | None = None,
    clears: bool = True,
) -> None:
    """Launch ``weigh_kernel``: weights (n,), is_real bool (n,), contiguous out (n, D), partners (n, D), dots (n,)."""
    if out.numel():
        weigh_kernel[(out.shape[0],)](
            *(rows, is_real.contiguous(), weights.contiguous(), partners, out, dots, out.shape[1]),
            *rows.stride(),
            *((0, 0) if partners is None else partners.stride()),
            out.stride(0),
            clears=clears,
            accumulate=_accumulation(rows.dtype, out.dtype),
            **_options(out.shape[1]),
        )


@torch.compiler.disable
def sum_bags(
    rows: Tensor,
    members: Tensor,
    edges: Tensor,
    weights: Tensor | None,
    out: Tensor,
    *,
    of_rows: bool = False,
    cleared: Tensor | None = None,
) -> None:
    """Launch ``sum_bags_kernel``: rows (n, at least D), members int64 (N,), edges int64 (S+1,), out (S, D).

    Weights are (N,), or (n,) with ``of_rows``. ``cleared`` is (S, K), with a stride of rows.
    """
    if out.numel():
        weights = None if weights is None else weights.contiguous()
        sum_bags_kernel[_grid(out)](
            *(rows, members.contiguous(), edges.contiguous(), weights, out, cleared, out.shape[1]),
            *rows.stride(),
            *out.stride(),
            *((0, 0) if cleared is None else (cleared.stride(0), cleared.shape[1])),
            of_rows=of_rows,
            accumulate=_accumulation(rows.dtype, out.dtype),
            cleared_block=1 if cleared is None else next_power_of_2(cleared.shape[1]),
            **_options(out.shape[1]),
        )


def _grid(out: Tensor) -> tuple[int, int]:
    return out.shape[0], cdiv(out.shape[1], _options(out.shape[1])["block"])


@cache
def _options(width: int) -> dict[str, int]:
    """Return the block size, the number of warps and the compiler options of a program for rows of this width.

    The kernels call ``tl.fma`` where they want a fused multiply-add. The compiler may not fuse other products and sums:
    a fused operation rounds once instead of twice, so its bits differ from the bits of torch. The option is given by
    name because its default changes: it is on up to Triton 3.9, which announces that 3.10 turns it off.
    """
    block = min(next_power_of_2(width), _MAX_BLOCK)
    return {"block": block, "num_warps": max(1, block // 256), "enable_fp_fusion": False}


def _accumulation(*dtypes: torch.dtype) -> tl.dtype:
    return tl.float64 if accumulation_dtype(*dtypes) == torch.float64 else tl.float32
