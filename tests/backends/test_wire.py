"""Rows and packets as bytes, and quantised rows against references by other arithmetic."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from moe_dispatch.backends.wire import WireDtype, WireFormat, id_dtype_for, packet_format, row_format
from moe_dispatch.capabilities.quantised.formats import FORMATS, Mxfp8, Quantised, quantise
from moe_dispatch.capabilities.quantised.rows import widen

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


def received(form: WireFormat, packets: Tensor) -> Tensor:
    rows = form.decode(packets)
    assert isinstance(rows, Tensor)
    return rows


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_travel_as_they_are_without_a_copy(dtype: torch.dtype) -> None:
    rows = torch.randn(5, 24).to(dtype)
    form = row_format(dtype, 24)
    encoded = form.encoded(rows)
    assert (form.nbytes, encoded.shape, encoded.dtype) == (24 * dtype.itemsize, (5, form.nbytes), torch.uint8)
    assert encoded.data_ptr() == rows.data_ptr()
    assert torch.equal(received(form, encoded), rows)
    assert form.round_trip(rows) is rows


@pytest.mark.parametrize("dtype", DTYPES)
def test_bfloat16_rounds_once(dtype: torch.dtype) -> None:
    rows = torch.randn(5, 24).to(dtype)
    form = row_format(dtype, 24, "bfloat16")
    assert form.nbytes == 48
    assert torch.equal(form.round_trip(rows), rows.to(torch.bfloat16).to(dtype))
    assert form.round_trip(rows).dtype == dtype


@pytest.mark.parametrize("dtype", DTYPES)
def test_float8_has_one_scale_per_128_columns(dtype: torch.dtype) -> None:
    rows = torch.randn(3, 384).to(dtype)
    rows[0, :128] *= 1000
    rows[1, 128:256] = 0
    rows[2, 256:] /= 4096
    form = row_format(dtype, 384, "float8_e4m3fn")
    assert form.nbytes == 384 + 3 * 4
    blocks = rows.float().view(3, 3, 128)
    scales = blocks.abs().amax(-1, keepdim=True) / 448
    safe = torch.where(scales > 0, scales, 1)
    expected = ((blocks / safe).to(torch.float8_e4m3fn).float() * safe).view(3, 384).to(dtype)
    assert torch.equal(form.round_trip(rows), expected)
    encoded_scales = form.encoded(rows)[:, 384:].contiguous().view(torch.float32)
    assert torch.equal(encoded_scales, safe.squeeze(-1))


@settings(max_examples=50, deadline=None, derandomize=True)
@given(
    st.sampled_from(DTYPES),
    st.integers(1, 40),
    st.integers(1, 9),
    st.sampled_from([None, "bfloat16", "float8_e4m3fn", "mxfp8"]),
    st.sampled_from([torch.float32, torch.float64]),
    st.sampled_from([8, 40_000]),
    st.booleans(),
)
def test_packets_hold_row_weights_and_ids_apart(
    dtype: torch.dtype,
    hidden: int,
    top_k: int,
    wire: WireDtype | None,
    weight_dtype: torch.dtype,
    num_experts: int,
    note: bool,
) -> None:
    hidden *= {"float8_e4m3fn": 128, "mxfp8": 32}.get(wire or "", 1)
    rows, weights = torch.randn(4, hidden).to(dtype), torch.randn(4, top_k).to(weight_dtype)
    ids = torch.randint(-1, num_experts, (4, top_k))
    row = row_format(dtype, hidden, wire)
    form = packet_format(row, top_k, weight_dtype, id_dtype_for(num_experts), note=note)
    packets = form.pack(rows, weights, ids)
    if note:
        form.notes(packets).fill_(-7)
    unpacked_rows, unpacked_weights, unpacked_ids = form.unpack(packets)
    wide = unpacked_rows.to(dtype) if isinstance(unpacked_rows, Tensor) else unpacked_rows.decoded(dtype)
    assert torch.equal(wide, row.round_trip(rows))
    assert torch.equal(unpacked_weights, weights)
    assert torch.equal(unpacked_ids.long(), ids)
    assert torch.equal(form.weights(packets), weights)
    assert torch.equal(form.ids(packets).long(), ids)
    payload = row.nbytes + top_k * (weight_dtype.itemsize + id_dtype_for(num_experts).itemsize) + 4 * note
    multiple = max(32, 16 * row.numbers.itemsize)
    assert form.stride % multiple == 0
    assert payload <= form.stride < payload + 16 + multiple


@pytest.mark.parametrize(("count", "strides"), [(6, (1, 2)), (1, (7, 5))])
def test_a_column_with_a_stride_is_encoded(count: int, strides: tuple[int, int]) -> None:
    """Such a tensor is contiguous, but ``view`` refuses its stride."""
    rows = torch.empty_strided((count, 1), strides, dtype=torch.bfloat16).copy_(torch.arange(count).unsqueeze(1))
    assert rows.is_contiguous()
    form = row_format(torch.bfloat16, 1)
    assert torch.equal(received(form, form.encoded(rows)), rows)


@pytest.mark.parametrize(("experts", "dtype"), [(8, torch.int16), (16_000, torch.int16), (40_000, torch.int32)])
def test_ids_travel_in_the_narrowest_dtype(experts: int, dtype: torch.dtype) -> None:
    assert id_dtype_for(experts) == dtype
    assert int(torch.tensor(experts - 1).to(dtype)) == experts - 1


MXFP8 = Mxfp8


def _mx_reference(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Quantise finite rows in float64: the numbers, and the exponents of the scales."""
    blocks = rows.float().double().view(len(rows), -1, 32)
    exponents = torch.full(blocks.shape[:2], -127.0, dtype=torch.float64)
    for at, largest in enumerate(blocks.abs().amax(-1).view(-1).tolist()):
        if quotient := float(torch.tensor(largest / 448, dtype=torch.float32)):
            mantissa, exponent = math.frexp(quotient)
            exponents.view(-1)[at] = max(-127, exponent - (mantissa == 0.5))
    factors = torch.where(exponents == -127, 1, torch.exp2(-exponents))
    numbers = (blocks * factors.unsqueeze(-1)).float().to(torch.float8_e4m3fn)
    return numbers.view(rows.shape), exponents


def _bits(tensor: Tensor) -> Tensor:
    return tensor.view(torch.uint8)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("spread", [0, 12, 140])
def test_mxfp8_scales_are_rounded_up_to_a_power_of_two(dtype: torch.dtype, spread: int) -> None:
    generator = torch.Generator().manual_seed(spread)
    powers = torch.randint(-spread, spread + 1, (40, 4, 1), generator=generator)
    rows = (torch.randn(40, 4, 32, generator=generator, dtype=torch.float64) * 2.0**powers).view(40, 128).to(dtype)
    rows = torch.where(rows.float().isfinite(), rows, 0)
    numbers, scales = quantise(rows, MXFP8)
    expected, exponents = _mx_reference(rows)
    assert (scales.dtype, scales.shape) == (torch.float8_e8m0fnu, (40, 4))
    assert torch.equal(_bits(scales), (exponents + 127).to(torch.uint8))
    assert torch.equal(_bits(numbers), _bits(expected))


def test_the_first_magnitude_above_a_power_of_two_doubles_the_scale() -> None:
    for power in (-100, -3, 0, 7, 100):
        fits = torch.tensor(448 * 2.0**power)
        rows = torch.zeros(2, 32)
        rows[0, 5], rows[1, 5] = fits, -torch.nextafter(fits, torch.tensor(math.inf))
        assert _bits(quantise(rows, MXFP8)[1]).flatten().tolist() == [127 + power, 128 + power]


def test_the_largest_float16_numbers_widen_to_infinity() -> None:
    """The nearest number of e4m3 is 256 times 2**8 from 63488 on, and float16 ends at 65504."""
    rows = torch.tensor([63456.0, 63488.0, -65504.0], dtype=torch.float16).unsqueeze(1).expand(-1, 32).contiguous()
    got = widen(quantise(rows, MXFP8), torch.float16)[:, 0].tolist()
    assert got == [61440.0, math.inf, -math.inf]
    assert widen(quantise(rows, MXFP8), torch.bfloat16)[:, 0].tolist() == [61440.0, 65536.0, -65536.0]


def test_zeros_subnormals_infinities_and_nan_follow_the_rules() -> None:
    rows = torch.zeros(6, 64)
    rows[1, 3] = 2.0**-126 * 448  # its scale is the smallest but one
    rows[2, 3] = 2.0**-140
    rows[3, 3], rows[3, 4] = -math.inf, 1
    rows[4, 3], rows[4, 4] = math.nan, 1
    rows[5, 3] = torch.finfo(torch.float32).max
    numbers, scales = quantise(rows, MXFP8)
    assert _bits(scales)[:, 0].tolist() == [0, 1, 0, 254, 255, 247]
    assert _bits(scales)[:, 1].tolist() == [0] * 6  # the other block of the row is not touched
    assert numbers.float()[:, 3].nan_to_num(nan=-1).tolist() == [0, 448, 0, -448, -1, 256]
    wide = widen((numbers, scales), torch.float32)
    assert wide[0].eq(0).all()
    assert wide[2].eq(0).all()
    assert [wide[1, 3].item(), *wide[3, 3:5].tolist()] == [rows[1, 3].item(), -math.inf, 0]
    assert wide[4, :32].isnan().all()
    assert wide[4, 32:].eq(0).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("recipe", FORMATS)
def test_a_row_is_quantised_by_itself(recipe: WireDtype, dtype: torch.dtype) -> None:
    """So quantising before a dispatch gives the bits of quantising after it."""
    rows = (torch.randn(700, 512) * torch.randn(700, 1).exp()).to(dtype)  # more than the CPU quantises at a time
    order = torch.randperm(700)[:400]
    before, after = (quantise(taken, FORMATS[recipe]) for taken in (rows, rows[order]))
    for whole, part in zip(before, after, strict=True):
        assert torch.equal(_bits(whole)[order], _bits(part))


@pytest.mark.parametrize("dtype", DTYPES)
def test_mxfp8_rows_are_followed_by_a_byte_for_32_columns(dtype: torch.dtype) -> None:
    rows = torch.randn(3, 96).to(dtype)
    form = row_format(dtype, 96, "mxfp8")
    assert form.nbytes == 96 + 3
    found = form.decode(form.encoded(rows))
    assert isinstance(found, Quantised)
    for part, expected in zip(found, quantise(rows, MXFP8), strict=True):
        assert torch.equal(_bits(part.contiguous()), _bits(expected))
    assert torch.equal(form.round_trip(rows), widen(quantise(rows, MXFP8), dtype))
    assert form.round_trip(rows).dtype == dtype


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_of_any_stride_are_quantised(dtype: torch.dtype) -> None:
    rows = torch.randn(6, 64, 2).to(dtype)[::2, :, 1]
    for got, expected in zip(quantise(rows, MXFP8), quantise(rows.contiguous(), MXFP8), strict=True):
        assert torch.equal(_bits(got), _bits(expected))
    assert quantise(rows[:0], MXFP8)[1].shape == (0, 2)
