"""The 8-bit formats of rows: values of 8 bits, and scales that are each shared by a block of columns.

Each row is quantised by itself. So a row has the same bits whether it is quantised before or after it is dispatched,
and results do not depend on the number of ranks. ``load_format`` finds these formats, and those of other packages.
"""

from __future__ import annotations

import dataclasses
from abc import abstractmethod
from collections.abc import Sequence
from importlib.metadata import EntryPoint
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, final

import torch
from torch import Tensor

from moe_dispatch.backends.wire import WireFormat
from moe_dispatch.capabilities.quantised.rows import (
    QuantisedRows,
    as_bytes,
    kernels_for,
    load_kernels,
    widen,
    with_form,
)
from moe_dispatch.errors import ConfigError, did_you_mean
from moe_dispatch.permutation import accumulation_dtype
from moe_dispatch.seams.extension_points import declared, derives, load_declared, takes

if TYPE_CHECKING:
    from moe_dispatch.dispatched import Dispatched
    from moe_dispatch.permutation import Permutation, SlotIndex

ENTRY_POINT_GROUP = "moe_dispatch.wire_formats"

_MOST = torch.finfo(torch.float8_e4m3fn).max  # 448
_AT_A_TIME = 1 << 18  # values that are quantised at a time on the CPU, so that their float32 copy stays in the cache


class ScaledFormat(WireFormat):
    """Rows of float8_e4m3fn values, followed by their scales. A value stands for its product with its block's scale.

    Attributes:
        block: Number of consecutive columns that share a scale.
        scale_dtype: Dtype of the scales.
        row_multiple: The grouped GEMMs that take such rows need a multiple of this number of rows for each expert.
    """

    block: ClassVar[int]
    scale_dtype: ClassVar[torch.dtype]
    row_multiple: ClassVar[int]
    tolerance = 0.08
    numbers = torch.float8_e4m3fn

    def __init__(self, dtype: torch.dtype, hidden: int) -> None:
        super().__init__(dtype, hidden)
        self.nbytes = sum(self.part_bytes())

    @staticmethod
    @abstractmethod
    def scales_of(largest: Tensor) -> tuple[Tensor, Tensor]:
        """Return the scales of blocks, and the float32 numbers by which their columns are divided.

        Args:
            largest: float32, the largest magnitude of each block.
        """

    @final
    def encode(self, rows_TD: Tensor, out: Tensor) -> None:
        quantise_into(rows_TD, type(self), self.decode(out))

    @final
    def scatter(
        self, permutation: Permutation, rows_TD: Tensor, tables: tuple[Tensor, Tensor, Tensor], out: Tensor
    ) -> None:
        if permutation.name == "triton":
            load_kernels().quantise(rows_TD, *as_bytes(self.decode(out)), *tables[1:])
        else:
            super().scatter(permutation, rows_TD, tables, out)

    @final
    def decode(self, packets: Tensor) -> Quantised:
        return self.restored((packets[:, : self.hidden], packets[:, self.hidden : self.nbytes]))

    @final
    def part_bytes(self) -> tuple[int, int]:
        return self.hidden, self.hidden // self.block * self.scale_dtype.itemsize

    @final
    @classmethod
    def restored(cls, parts: Sequence[Tensor]) -> Quantised:
        values, scales = parts
        return Quantised(values.view(torch.float8_e4m3fn), scales.view(cls.scale_dtype))


@final
class Float8(ScaledFormat):
    """``float8_e4m3fn``: one float32 scale for 128 columns, as in DeepEP's fp8 dispatch.

    A row of 256 columns has 256 bytes of values and 8 bytes of scales.
    """

    hidden_multiple = block = row_multiple = 128
    scale_dtype = torch.float32

    @staticmethod
    def scales_of(largest: Tensor) -> tuple[Tensor, Tensor]:
        """Return the largest magnitude / 448 as scale, or 1 if all columns of the block are zero."""
        scales = largest / _MOST
        scales = torch.where(scales > 0, scales, 1)
        return scales, scales


@final
class Mxfp8(ScaledFormat):
    """``mxfp8``: one power of two (e8m0) for 32 columns.

    A row of 256 columns has 256 bytes of values and 8 bytes of scales.
    """

    hidden_multiple = block = row_multiple = 32
    scale_dtype = torch.float8_e8m0fnu

    @staticmethod
    def scales_of(largest: Tensor) -> tuple[Tensor, Tensor]:
        """Return the largest magnitude / 448, rounded up to a power of two, as e8m0 scale.

        The smallest scale is 2**-127, whose byte is 0. Blocks with this scale are divided by 1, so that all their
        values become 0. The largest scale is 2**127. Infinity has it and becomes the value 448, which widens to
        infinity again. A NaN makes the scale NaN, and so all columns of the block.

        Source: the instruction ``cvt.rp.satfinite.ue8m0x2.f32`` of PTX, and the division by its result in
        TransformerEngine (``ptx.cuh``, b7598aa). torchao calls this rule RCEIL.
        """
        bits = (largest / _MOST).view(torch.int32)
        exponents = (bits.clamp(max=254 << 23) + ((1 << 23) - 1)).bitwise_right_shift(23)
        exponents = torch.where(bits <= 1 << 22, 0, exponents)  # 1 << 22 are the bits of 2**-127
        exponents = torch.where(bits > 255 << 23, 255, exponents)  # NaN
        scales = exponents.to(torch.uint8).view(torch.float8_e8m0fnu)
        return scales, torch.where(exponents == 0, 1, scales.float())


FORMATS: dict[str, type[ScaledFormat]] = {"float8_e4m3fn": Float8, "mxfp8": Mxfp8}
"""The formats of this package, by ``wire.dtype``."""


@final
class Quantised(NamedTuple):
    """Quantised rows: their values, float8_e4m3fn (T, D), and their scales, (T, D / block). An ``Encoded``."""

    values: Tensor
    scales: Tensor

    def decoded(self, dtype: torch.dtype) -> Tensor:
        return widen(self, dtype)

    def expand(
        self, permutation: Permutation, index: SlotIndex, dtype: torch.dtype, *, as_sent: bool
    ) -> Tensor | Quantised:
        """Copy the rows to their experts. The padding of quantised rows has values of 0 and scales of 1.

        Cost: one launch with kernels. With operators of torch, for rows as they travelled, one pass over their values
        and one over their scales.
        """
        if permutation.name == "triton":
            codes, scales = as_bytes(self)
            grouped = codes.new_empty(index.num_grouped, codes.shape[1], dtype=torch.uint8 if as_sent else dtype)
            of_grouped = scales.new_empty(index.num_grouped, scales.shape[1]) if as_sent else None
            tables = index.byrow_N, index.cu_S, index.padding
            load_kernels().expand(codes, scales, grouped, of_grouped, *tables)
            if of_grouped is None:
                return grouped
            return Quantised(grouped.view(self.values.dtype), of_grouped.view(self.scales.dtype))
        if not as_sent:
            return permutation.expand(widen(self, dtype), index, dtype)
        values, scales = (permutation.expand(part.view(torch.uint8), index, torch.uint8) for part in self)
        found = Quantised(values.view(self.values.dtype), scales.view(self.scales.dtype))
        if index.filled_R is not None:
            found.scale_by_one(index.filled_R < 0)
        elif index.padding is not None:
            scales, one = found._scales_and_one()
            scales.index_fill_(0, index.padding, one)
        return found

    def expand_weighted(self, permutation: Permutation, *given: Any, as_sent: bool) -> tuple[Tensor, Tensor | None]:
        """Do what ``Permutation.expand_weighted`` does with the rows. Cost: one launch with kernels."""
        index, weights_R, partners_RD, dtype = given
        if weights_R is None:
            found = self.expand(permutation, index, dtype, as_sent=as_sent)
            return found if isinstance(found, Tensor) else found.gradient(dtype), None
        if permutation.name != "triton":
            return permutation.expand_weighted(widen(self, dtype), *given)
        codes, scales = as_bytes(self)
        grads = codes.new_empty(index.num_grouped, codes.shape[1], dtype=dtype)
        dots = None if partners_RD is None else grads.new_empty(index.num_grouped, dtype=accumulation_dtype(dtype))
        tables = index.byrow_N, index.cu_S, index.padding
        load_kernels().expand_weighted(
            codes, scales, grads, dots, *tables, weights=weights_R, partners=partners_RD, most=index.top_k
        )
        return grads, None if dots is None else dots.to(weights_R.dtype)

    def gradient(self, dtype: torch.dtype) -> Tensor:
        """Return gradient rows that arrived, for autograd. ``quantised_form`` finds them again in the next backward."""
        return with_form(widen(self, dtype), self)

    def stand_in(self, dtype: torch.dtype) -> Tensor:
        """Return one NaN in memory, at which all strides of 0 point: a quantised row has no gradient of its dtype."""
        found = torch.empty_strided(self.values.shape, (0, 0), dtype=dtype, device=self.values.device)
        found[:1, :1].fill_(float("nan"))
        return found

    def added_to(self, sent: Dispatched, wire: str | None) -> Dispatched:
        assert wire is not None
        quantised = QuantisedRows(
            values=self.values,
            scales=self.scales,
            recipe=wire,
            tokens_per_expert=sent.tokens_per_expert,
            edge=sent.in_graph,
        )
        return dataclasses.replace(sent, quantised=quantised)

    def tensors(self) -> list[Tensor]:
        return [part.view(torch.uint8) for part in self]

    def scale_by_one(self, is_padding_R: Tensor) -> None:
        """Set the scales of some rows to 1, in place."""
        scales, one = self._scales_and_one()
        scales.masked_fill_(is_padding_R.unsqueeze(1), one)

    def _scales_and_one(self) -> tuple[Tensor, int]:
        """Return the scales in a dtype that torch can write to, and the number that stands for 1 in it."""
        _, scales = as_bytes(self)
        return scales, 127 if scales.dtype == torch.uint8 else 1


def quantise(rows_TD: Tensor, form: type[ScaledFormat]) -> Quantised:
    """Quantise rows. D must be a multiple of the block. float64 rows are rounded to float32 first."""
    count, hidden = rows_TD.shape
    values = torch.empty(count, hidden, dtype=torch.float8_e4m3fn, device=rows_TD.device)
    scales = torch.empty(count, hidden // form.block, dtype=form.scale_dtype, device=rows_TD.device)
    quantise_into(rows_TD, form, Quantised(values, scales))
    return Quantised(values, scales)


def quantise_into(rows_TD: Tensor, form: type[ScaledFormat], out: Quantised) -> None:
    """Quantise rows as ``quantise`` does, and write to tensors of any row stride.

    Cost: one launch on a GPU with Triton. Without it, torch multiplies by the inverse of 448 on a GPU, so that the last
    bit of a float32 scale may differ.
    """
    if (kernels := kernels_for(rows_TD)) is not None:
        kernels.quantise(rows_TD, *as_bytes(out))
        return
    count, hidden = rows_TD.shape
    step = max(1, _AT_A_TIME // hidden) if rows_TD.is_cpu else max(1, count)
    for begin in range(0, count, step):
        rows = rows_TD[begin : begin + step]
        rows = rows.float() if rows.dtype == torch.float64 else rows
        blocks = rows.reshape(rows.shape[0], hidden // form.block, form.block)
        scales, divisors = form.scales_of(_largest(blocks))
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


def known_formats() -> list[str]:
    """Return the names of all formats beside bfloat16, those of other packages included."""
    return sorted({*FORMATS, *_declared_formats()})


def load_format(name: str) -> type[WireFormat]:
    """Return a format by its name.

    Raises:
        ConfigError: The name is unknown, the package of the format fails to import, or its object is no format.
    """
    if name in FORMATS:
        return FORMATS[name]
    point = _declared_formats().get(name)
    if point is None:
        known = ["bfloat16", *known_formats()]
        raise ConfigError(f"Unknown wire {name!r}.{did_you_mean(name, known)} Known ones: None, {', '.join(known)}.")
    found: type[WireFormat] = load_declared(
        point,
        "Wire format",
        must_be="a subclass of moe_dispatch.backends.wire.WireFormat with encode and decode",
        fits=lambda cls: derives(cls, WireFormat) and takes(cls, torch.float32, 128),
        others=list(FORMATS),
    )
    return found


def _declared_formats() -> dict[str, EntryPoint]:
    return declared(ENTRY_POINT_GROUP, built_in=FORMATS)
