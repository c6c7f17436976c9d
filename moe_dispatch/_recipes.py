"""The 8-bit forms in which rows can travel: values of 8 bits, and scales that are each shared by a block of columns.

Each row is quantised by itself. So a row has the same bits whether it is quantised before or after it is dispatched,
and results do not depend on the number of ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, final

import torch
from torch import Tensor

RecipeName = Literal["float8_e4m3fn", "mxfp8"]

_MOST = torch.finfo(torch.float8_e4m3fn).max  # 448
_AT_A_TIME = 1 << 18  # values that are quantised at a time on the CPU, so that their float32 copy stays in the cache


@final
@dataclass(frozen=True, slots=True)
class Recipe:
    """How a row becomes float8_e4m3fn values and scales. A value stands for its product with the scale of its block.

    Attributes:
        name: Name of the recipe, as in ``wire_dtype``.
        block: Number of consecutive columns that share a scale. The number of columns must be a multiple of it.
        scale_dtype: Dtype of the scales.
        row_multiple: The grouped GEMMs that take such rows need a multiple of this number of rows for each expert.
        scales_of: Function of the largest magnitudes of blocks, float32. It returns the scales, and float32 numbers by
            which the columns of the blocks are divided.
    """

    name: RecipeName
    block: int
    scale_dtype: torch.dtype
    row_multiple: int
    scales_of: Callable[[Tensor], tuple[Tensor, Tensor]]

    def scale_bytes(self, hidden: int) -> int:
        """Return the bytes of the scales of a row of ``hidden`` columns."""
        return hidden // self.block * self.scale_dtype.itemsize


def _by_largest(largest: Tensor) -> tuple[Tensor, Tensor]:
    """Return the largest magnitude / 448 as scale, or 1 if all columns of the block are zero."""
    scales = largest / _MOST
    scales = torch.where(scales > 0, scales, 1)
    return scales, scales


def _by_power_of_two(largest: Tensor) -> tuple[Tensor, Tensor]:
    """Return the largest magnitude / 448, rounded up to a power of two, as e8m0 scale.

    The smallest scale is 2**-127, whose byte is 0. Blocks with this scale are divided by 1, so that all their values
    become 0. The largest scale is 2**127. Infinity has it and becomes the value 448, which widens to infinity again. A
    NaN makes the scale NaN, and so all columns of the block.

    Source: the instruction ``cvt.rp.satfinite.ue8m0x2.f32`` of PTX, and the division by its result in
    TransformerEngine (``ptx.cuh``, b7598aa). torchao calls this rule RCEIL.
    """
    bits = (largest / _MOST).view(torch.int32)
    exponents = (bits.clamp(max=254 << 23) + ((1 << 23) - 1)).bitwise_right_shift(23)
    exponents = torch.where(bits <= 1 << 22, 0, exponents)  # 1 << 22 are the bits of 2**-127
    exponents = torch.where(bits > 255 << 23, 255, exponents)  # NaN
    scales = exponents.to(torch.uint8).view(torch.float8_e8m0fnu)
    return scales, torch.where(exponents == 0, 1, scales.float())


# By ``wire_dtype``. Other wire dtypes, and None, have no recipe.
RECIPES: dict[str | None, Recipe] = {
    recipe.name: recipe
    for recipe in (
        Recipe("float8_e4m3fn", 128, torch.float32, 128, _by_largest),
        Recipe("mxfp8", 32, torch.float8_e8m0fnu, 32, _by_power_of_two),
    )
}


@final
class Quantised(NamedTuple):
    """Quantised rows: their values, float8_e4m3fn (T, D), and their scales, (T, D / block)."""

    values: Tensor
    scales: Tensor


def quantise(rows_TD: Tensor, recipe: Recipe) -> Quantised:
    """Quantise rows. D must be a multiple of the block. float64 rows are rounded to float32 first."""
    count, hidden = rows_TD.shape
    values = torch.empty(count, hidden, dtype=torch.float8_e4m3fn, device=rows_TD.device)
    scales = torch.empty(count, hidden // recipe.block, dtype=recipe.scale_dtype, device=rows_TD.device)
    quantise_into(rows_TD, recipe, Quantised(values, scales))
    return Quantised(values, scales)


def quantise_into(rows_TD: Tensor, recipe: Recipe, out: Quantised) -> None:
    """Quantise rows as ``quantise`` does, and write to tensors of any row stride."""
    count, hidden = rows_TD.shape
    step = max(1, _AT_A_TIME // hidden) if rows_TD.is_cpu else max(1, count)
    for begin in range(0, count, step):
        rows = rows_TD[begin : begin + step]
        rows = rows.float() if rows.dtype == torch.float64 else rows
        blocks = rows.reshape(rows.shape[0], hidden // recipe.block, recipe.block)
        scales, divisors = recipe.scales_of(_largest(blocks))
        values = torch.div(blocks, divisors.unsqueeze(-1)).clamp_(-_MOST, _MOST)
        out.values[begin : begin + step].copy_(values.view(rows.shape))
        out.scales[begin : begin + step].copy_(scales)


def _largest(blocks: Tensor) -> Tensor:
    """Return the largest magnitude of each block in float32; NaN if a value is NaN.

    The bits of magnitudes are ordered as the magnitudes are, and those of NaN come last. Integers take a quarter of the
    time that ``abs`` and ``amax`` take on the CPU.
    """
    integer = torch.int16 if blocks.dtype.itemsize == 2 else torch.int32
    return blocks.view(integer).bitwise_and(torch.iinfo(integer).max).amax(-1).view(blocks.dtype).float()


def widen(rows: Tensor | Quantised, dtype: torch.dtype) -> Tensor:
    """Return quantised rows in ``dtype``, and other rows as they are. Products are computed in float32."""
    if isinstance(rows, Tensor):
        return rows
    values, scales = rows
    blocks = values.float().view(*scales.shape, values.shape[1] // max(scales.shape[1], 1))
    return blocks.mul_(scales.float().unsqueeze(-1)).view(values.shape).to(dtype)


def widened_gradient(rows: Quantised, dtype: torch.dtype) -> Tensor:
    """Widen gradient rows that arrived, for autograd. ``quantised_form`` finds them again in the next backward."""
    return _with_form(widen(rows, dtype), rows)


def _with_form(gradient: Any, rows: Quantised) -> Tensor:
    gradient.quantised_form = rows, gradient._version
    return gradient  # type: ignore[no-any-return]


def quantised_form(gradient: Tensor) -> Quantised | None:
    """Return the rows that ``widened_gradient`` widened; None if this is another tensor, or was changed in place."""
    rows, version = getattr(gradient, "quantised_form", (None, None))
    return rows if version == gradient._version else None


class Joined(torch.autograd.Function):
    """Concatenate the outputs of parts of the experts. The backward splits a gradient with its ``quantised_form``."""

    @staticmethod
    def forward(ctx: Any, *parts: Tensor) -> Tensor:
        ctx.sizes = [len(part) for part in parts]
        return torch.cat(parts)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        grads, rows = grad.split(ctx.sizes), quantised_form(grad)
        if rows is None:
            return grads
        return tuple(map(_with_form, grads, map(Quantised, *(each.split(ctx.sizes) for each in rows))))


class Widen(torch.autograd.Function):
    """``widen`` as a function of the edge of the rows in the autograd graph, which gets the gradient unchanged."""

    @staticmethod
    def forward(ctx: Any, edge_RD: Tensor, values: Tensor, scales: Tensor) -> Tensor:
        return widen(Quantised(values, scales), edge_RD.dtype).data  # no view, so experts may change it in place

    @staticmethod
    def backward(ctx: Any, grad_RD: Tensor) -> Any:
        return grad_RD, None, None
