"""Rows and packets as bytes: sizes, alignment, round trips and float8 scales."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_dispatch._recipes import widen
from moe_dispatch.backends.base import WireDtype
from moe_dispatch.backends.wire import id_dtype_for, packet_format, row_format

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_travel_as_they_are_without_a_copy(dtype: torch.dtype) -> None:
    rows = torch.randn(5, 24).to(dtype)
    form = row_format(dtype, 24)
    encoded = form.encode(rows)
    assert (form.nbytes, encoded.shape, encoded.dtype) == (24 * dtype.itemsize, (5, form.nbytes), torch.uint8)
    assert encoded.data_ptr() == rows.data_ptr()
    assert torch.equal(form.read(encoded), rows)
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
    encoded_scales = form.encode(rows)[:, 384:].contiguous().view(torch.float32)
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
    assert torch.equal(widen(unpacked_rows, dtype).to(dtype), row.round_trip(rows))
    assert torch.equal(unpacked_weights, weights)
    assert torch.equal(unpacked_ids.long(), ids)
    assert torch.equal(form.weights(packets), weights)
    assert torch.equal(form.ids(packets).long(), ids)
    payload = row.nbytes + top_k * (weight_dtype.itemsize + id_dtype_for(num_experts).itemsize) + 4 * note
    assert payload <= form.stride < payload + 16


@pytest.mark.parametrize(("count", "strides"), [(6, (1, 2)), (1, (7, 5))])
def test_a_column_with_a_stride_is_encoded(count: int, strides: tuple[int, int]) -> None:
    """Such a tensor is contiguous, but ``view`` refuses its stride."""
    rows = torch.empty_strided((count, 1), strides, dtype=torch.bfloat16).copy_(torch.arange(count).unsqueeze(1))
    assert rows.is_contiguous()
    form = row_format(torch.bfloat16, 1)
    assert torch.equal(form.read(form.encode(rows)), rows)


@pytest.mark.parametrize(("experts", "dtype"), [(8, torch.int16), (16_000, torch.int16), (40_000, torch.int32)])
def test_ids_travel_in_the_narrowest_dtype(experts: int, dtype: torch.dtype) -> None:
    assert id_dtype_for(experts) == dtype
    assert int(torch.tensor(experts - 1).to(dtype)) == experts - 1
