"""Triton kernels that quantise rows while they copy them to packets, and widen them while they copy them to experts.

The codes of e4m3 are computed with integers: GPUs before compute capability 8.9 have no instruction for them. Divisions
are rounded correctly. So codes and scales have the bits that the operators of torch in ``formats`` give on a CPU, but
for the sign of NaN. (On a GPU, torch divides by a number by a multiplication with its inverse, and scales may differ in
their last bit.) As in ``triton_kernels`` of the reorder, a program handles a block of columns of one row, nothing is
tuned at run time, and masked elements are never read.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from moe_dispatch.permutation.triton_launch import cdiv, kernel, next_power_of_2

# Largest number of columns that a program handles at once: with eight warps, each lane has 8 of them.
_MAX_BLOCK = 2048


@triton.jit
def _codes(values):
    """Round float32 numbers of magnitudes up to 448 to the codes of e4m3, to even. NaN becomes 0x7F or 0xFF."""
    bits = values.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    # 20 of 23 bits of the mantissa are dropped, and the bias of the exponent falls from 127 to 7.
    normal = ((magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20) - (120 << 3)
    # Below 2**-6 codes are multiples of 2**-9, which is what float32 numbers from 2**14 to 2**15 are multiples of.
    small = (magnitude.to(tl.float32, bitcast=True) + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
    code = tl.where(magnitude < 121 << 23, small, normal)
    code = tl.where(magnitude > 255 << 23, 0x7F, code)
    return (code | ((bits >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def _values(codes):
    """Widen codes of e4m3 to float32."""
    wide = codes.to(tl.int32)
    # As bits of a float32, subnormal ones included, a code stands for its value times 2**-120.
    bits = ((wide & 0x80) << 24) | ((wide & 0x7F) << 20)
    values = bits.to(tl.float32, bitcast=True) * 1.329227995784916e36  # 2**120
    return tl.where((wide & 0x7F) == 0x7F, float("nan"), values)


@triton.jit
def _power(exponents):
    """Return the float32 numbers of the codes of e8m0, given as int32."""
    bits = tl.where(exponents == 0, 1 << 22, exponents << 23)  # 2**-127 is subnormal
    return tl.where(exponents == 255, float("nan"), bits.to(tl.float32, bitcast=True))


@kernel
def quantise_kernel(
    rows,
    places,
    edges,
    codes,
    scales,
    width,
    rows_stride,
    rows_step,
    codes_stride,
    scales_stride,
    powers: tl.constexpr,
    size: tl.constexpr,
    count: tl.constexpr,
):
    """Quantise row s, and write it to row ``places[i]`` for all i in ``range(edges[s], edges[s + 1])``.

    Without ``places``, write it to row s. A program handles ``count`` blocks of ``size`` columns, which share a scale.
    ``powers`` says whether scales are powers of two.
    """
    at = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1).to(tl.int64) * count + tl.arange(0, count)
    columns = block[:, None] * size + tl.arange(0, size)[None, :]
    begin, end = at, at + 1
    if places is not None:
        begin, end = tl.load(edges + at), tl.load(edges + at + 1)
    inside = columns < tl.where(begin < end, width, 0)
    write = block * size < tl.where(begin < end, width, 0)
    values = tl.load(rows + at * rows_stride + columns * rows_step, mask=inside, other=0).to(tl.float32)
    # The bits of magnitudes are ordered as the magnitudes are, and those of NaN come last.
    largest = tl.max(values.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 1).to(tl.float32, bitcast=True)
    scale = tl.div_rn(largest, tl.full((count,), 448.0, tl.float32))
    if powers:
        bits = scale.to(tl.int32, bitcast=True)
        exponent = (tl.minimum(bits, 254 << 23) + ((1 << 23) - 1)) >> 23  # rounded up
        exponent = tl.where(bits <= 1 << 22, 0, tl.where(bits > 255 << 23, 255, exponent))
        divisor, kept = tl.where(exponent == 0, 1.0, _power(exponent)), exponent.to(tl.uint8)
    else:
        divisor = tl.where(scale > 0, scale, 1.0)
        kept = divisor
    values = tl.div_rn(values, tl.broadcast_to(divisor[:, None], (count, size)))
    code = _codes(tl.where(values > 448, 448.0, tl.where(values < -448, -448.0, values)))
    for i in range(begin, end):
        place = i
        if places is not None:
            place = tl.load(places + i)
        tl.store(codes + place * codes_stride + columns, code, mask=inside)
        tl.store(scales + place * scales_stride + block, kept, mask=write)


@kernel(do_not_specialize=["num_rows", "num_grouped"])
def expand_kernel(
    codes,
    scales,
    places,
    edges,
    padding,
    out,
    out_scales,
    num_rows,
    num_grouped,
    width,
    codes_stride,
    scales_stride,
    out_stride,
    out_scales_stride,
    powers: tl.constexpr,
    size: tl.constexpr,
    count: tl.constexpr,
):
    """Do what ``scatter_kernel`` of the reorder does with quantised rows.

    With ``out_scales``, ``out`` gets codes, and padding has codes of 0 and scales of 1. Without, ``out`` gets wide
    rows. Without ``places``, row s is written to row s.
    """
    at = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1).to(tl.int64) * count + tl.arange(0, count)
    columns = block[:, None] * size + tl.arange(0, size)[None, :]
    if at < num_rows:
        begin, end = at, at + 1
        if places is not None:
            begin, end = tl.load(edges + at), tl.load(edges + at + 1)
        inside = columns < tl.where(begin < end, width, 0)
        in_scales = block * size < tl.where(begin < end, width, 0)
        code = tl.load(codes + at * codes_stride + columns, mask=inside, other=0)
        scale = tl.load(scales + at * scales_stride + block, mask=in_scales, other=0)
        values = code
        if out_scales is None:
            factor = scale
            if powers:
                factor = _power(scale.to(tl.int32))
            values = (_values(code) * factor[:, None]).to(out.dtype.element_ty)
        for i in range(begin, end):
            place = i
            if places is not None:
                place = tl.load(places + i)
            tl.store(out + place * out_stride + columns, values, mask=inside)
            if out_scales is not None:
                tl.store(out_scales + place * out_scales_stride + block, scale, mask=in_scales)
    elif padding is not None:
        empty = tl.load(padding + (at - num_rows))
        inside = columns < tl.where(empty < num_grouped, width, 0)
        tl.store(out + empty * out_stride + columns, tl.zeros((count, size), out.dtype.element_ty), mask=inside)
        if out_scales is not None:
            one = tl.full((count,), 127 if powers else 1, out_scales.dtype.element_ty)
            to = block * size < tl.where(empty < num_grouped, width, 0)
            tl.store(out_scales + empty * out_scales_stride + block, one, mask=to)


@kernel(do_not_specialize=["num_rows", "num_grouped"])
def expand_weighted_kernel(
    codes,
    scales,
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
    codes_stride,
    scales_stride,
    partners_stride,
    partners_step,
    out_stride,
    powers: tl.constexpr,
    size: tl.constexpr,
    most: tl.constexpr,
    accumulate: tl.constexpr,
    block: tl.constexpr,
):
    """Do what ``scatter_weighted_kernel`` of the reorder does with quantised rows, widened to the dtype of ``out``."""
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
            factor = tl.load(scales + at * scales_stride + columns // size, mask=read, other=0)
            if powers:
                factor = _power(factor.to(tl.int32))
            values = _values(tl.load(codes + at * codes_stride + columns, mask=read, other=0)) * factor
            values = values.to(out.dtype.element_ty).to(accumulate)[None, :]
            inside = exists[:, None] & read[None, :]
            product = (values * weight).to(out.dtype.element_ty)
            tl.store(out + (place[:, None] * out_stride + columns[None, :]), product, mask=inside)
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


@torch.compiler.disable  # torch.compile can trace neither ``device_of`` nor Triton's interpreter
def quantise(
    rows: Tensor, codes: Tensor, scales: Tensor, places: Tensor | None = None, edges: Tensor | None = None
) -> None:
    """Launch ``quantise_kernel``.

    Args:
        rows: (S, D), of any floating dtype and with any strides.
        codes: uint8 (R, D).
        scales: (R, D / block): float32, or uint8 for e8m0. As in ``codes``, rows may have a stride.
        places: int64, rows of ``codes``; None for row s itself.
        edges: int64 (S+1,), where the places of each row begin.
    """
    if rows.numel():
        grid, options = _launch(rows.shape[0], scales, rows.shape[1])
        quantise_kernel[grid](
            *(rows, places, edges, codes, scales, rows.shape[1], *rows.stride(), codes.stride(0), scales.stride(0)),
            **options,
        )


@torch.compiler.disable
def expand(
    codes: Tensor,
    scales: Tensor,
    out: Tensor,
    out_scales: Tensor | None = None,
    places: Tensor | None = None,
    edges: Tensor | None = None,
    padding: Tensor | None = None,
) -> None:
    """Launch ``expand_kernel``.

    Args:
        codes: uint8 (S, D). Rows may have a stride, also those of ``scales``.
        scales: (S, D / block): float32, or uint8 for e8m0.
        out: (R, D), rows of any floating dtype; or codes, uint8, with ``out_scales``. Each row is contiguous.
        out_scales: (R, D / block) in the dtype of ``scales``.
        places: int64, rows of ``out``; None for row s itself.
        edges: int64 (S+1,), where the places of each row begin.
        padding: int64, rows of ``out`` without a row; R for none.
    """
    num_rows, width = codes.shape
    programs = num_rows + (0 if padding is None else padding.shape[0])
    if out.numel() and programs:
        grid, options = _launch(programs, scales, width)
        expand_kernel[grid](
            *(codes, scales, places, edges, padding, out, out_scales, num_rows, out.shape[0], width),
            *(codes.stride(0), scales.stride(0), out.stride(0), 0 if out_scales is None else out_scales.stride(0)),
            **options,
        )


@torch.compiler.disable
def expand_weighted(
    codes: Tensor,
    scales: Tensor,
    out: Tensor,
    dots: Tensor | None,
    places: Tensor,
    edges: Tensor,
    padding: Tensor | None,
    *,
    weights: Tensor,
    partners: Tensor | None,
    most: int,
) -> None:
    """Launch ``expand_weighted_kernel``: as in ``expand``, and weights (R,), partners (R, D), dots (R,).

    ``most`` is the largest number of places of a row. Blocks are those of ``scatter_weighted``, and so are the sums.
    """
    num_rows, width = codes.shape
    programs = num_rows + (0 if padding is None else padding.shape[0])
    if out.numel() and programs:
        most = next_power_of_2(most)
        block = min(next_power_of_2(width), _MAX_BLOCK, 8 * _MAX_BLOCK // most)
        expand_weighted_kernel[(programs,)](
            *(codes, scales, places, edges, padding, weights.contiguous(), partners, out, dots),
            *(num_rows, out.shape[0], width, codes.stride(0), scales.stride(0)),
            *((0, 0) if partners is None else partners.stride()),
            out.stride(0),
            powers=scales.dtype == torch.uint8,
            size=width // scales.shape[1],
            most=most,
            accumulate=tl.float64 if out.dtype == torch.float64 else tl.float32,
            block=block,
            num_warps=min(16, max(1, most * block // 1024)),
            enable_fp_fusion=False,
        )


def _launch(programs: int, scales: Tensor, width: int) -> tuple[tuple[int, int], dict[str, int | bool]]:
    """Return the grid and the options of a launch with ``programs`` programs for each block of columns."""
    size = width // scales.shape[1]
    count = max(1, min(next_power_of_2(width), _MAX_BLOCK) // size)
    options: dict[str, int | bool] = {"powers": scales.dtype == torch.uint8, "size": size, "count": count}
    options |= {"num_warps": max(1, count * size // 512), "enable_fp_fusion": False}
    return (programs, cdiv(width, count * size)), options
