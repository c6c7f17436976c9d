"""The kernels of quantised rows against operators of torch, in Triton's interpreter.

``test_permutation_triton.py`` starts a process for them, and compiles them for GPUs.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from moe_dispatch.backends.wire import row_format
from moe_dispatch.capabilities.quantised.formats import FORMATS, Quantised, ScaledFormat, quantise
from moe_dispatch.capabilities.quantised.rows import as_bytes, load_kernels, widen
from moe_dispatch.permutation import SlotIndex, TorchPermutation, choose_permutation
from tests.backends.permutations import INTERPRETED, implementations
from tests.backends.tables import EXAMPLE, FLOATS, Table, many_slots, static_index

pytestmark = [
    pytest.mark.skipif(not INTERPRETED, reason="test_permutation_triton.py runs these in the interpreter"),
    pytest.mark.filterwarnings("ignore:(invalid value|overflow) encountered:RuntimeWarning"),  # of numpy
]
# Blocks of a row: one; a number that is no power of two; more than a program handles.
BLOCKS = [1, 3, 67]


@pytest.fixture(scope="module")
def kernels() -> Any:
    implementations()  # which makes the interpreter round as hardware does
    return load_kernels()


def rows_of(form: type[ScaledFormat], blocks: int, dtype: torch.dtype) -> Tensor:
    """Rows of many magnitudes, and with zeros, subnormal numbers, infinities and NaN."""
    generator = torch.Generator().manual_seed(blocks)
    rows = torch.randn(14, blocks * form.block, generator=generator, dtype=torch.float64)
    rows *= torch.randn(14, 1, generator=generator).mul_(8).exp_()
    rows[1] = 0
    rows[2] *= torch.finfo(dtype).tiny / rows[2].abs().max()
    rows[3] *= torch.finfo(torch.float32).tiny / rows[3].abs().max()
    rows[4] = 2.0**-149
    rows[5] = rows[5].sign() * min(torch.finfo(dtype).max, torch.finfo(torch.float32).max)
    rows[6, 3], rows[7, 0], rows[8, -1], rows[9, 5] = math.inf, -math.inf, math.nan, -0.0
    return rows.to(dtype)


def expect_bits(found: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor]) -> None:
    """Compare codes and scales. The sign of a NaN depends on the machine."""
    (codes, scales), (of_torch, scales_of_torch) = found, as_bytes(expected)
    is_nan = of_torch & 0x7F == 0x7F
    assert torch.equal(codes & 0x7F == 0x7F, is_nan)
    assert torch.equal(codes[~is_nan], of_torch[~is_nan])
    assert torch.equal(scales.view(torch.uint8), scales_of_torch.contiguous().view(torch.uint8))


def expect_rows(found: Tensor, expected: Tensor) -> None:
    """Compare bits of rows but for those of NaN."""
    assert found.dtype == expected.dtype
    assert torch.equal(found.isnan(), expected.isnan())
    integer = {2: torch.int16, 4: torch.int32, 8: torch.int64}[found.itemsize]
    assert torch.equal(found.nan_to_num(nan=1).view(integer), expected.nan_to_num(nan=1).view(integer))


def room(form: type[ScaledFormat], rows: int, width: int) -> tuple[Tensor, Tensor]:
    """Codes and scales in packets, which end in bytes of 77."""
    row = row_format(torch.bfloat16, width, next(name for name, each in FORMATS.items() if each is form))
    packets = torch.full((rows, row.nbytes + 12), 77, dtype=torch.uint8)
    found = row.decode(packets)
    assert isinstance(found, Quantised)
    return as_bytes(found)


@pytest.mark.parametrize("recipe", FORMATS)
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("blocks", BLOCKS)
def test_kernels_give_the_bits_of_torch(kernels: Any, recipe: str, dtype: torch.dtype, blocks: int) -> None:
    form = FORMATS[recipe]
    rows = rows_of(form, blocks, dtype)
    expected, found = quantise(rows, form), room(form, *rows.shape)
    kernels.quantise(rows, *found)
    expect_bits(found, expected)
    for out_dtype in FLOATS:
        out = torch.empty(rows.shape, dtype=out_dtype)
        kernels.expand(*as_bytes(expected), out)
        expect_rows(out, widen(expected, out_dtype))


@pytest.mark.parametrize("recipe", FORMATS)
def test_every_number_is_rounded_to_the_code_of_torch(kernels: Any, recipe: str) -> None:
    """With a scale of 1: all bfloat16 numbers up to 448, and the float32 numbers around the middles of codes."""
    form = FORMATS[recipe]
    codes = torch.arange(0x7F, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    middles = (codes[1:] + codes[:-1]) / 2
    numbers = torch.arange(1 << 16).to(torch.uint16).view(torch.bfloat16).float()
    near = [torch.nextafter(middles, torch.tensor(to)) for to in (0.0, 1e9)]
    numbers = torch.cat([numbers[numbers.abs() <= 448], codes, middles, *near])
    numbers = torch.cat([numbers, -numbers])
    others = form.block - 1  # each block begins with 448
    blocks = F.pad(numbers, (0, -len(numbers) % (40 * others))).view(-1, others)
    wide = F.pad(blocks, (1, 0), value=448).view(-1, 40 * form.block)
    found = room(form, *wide.shape)
    kernels.quantise(wide, *found)
    of_torch = quantise(wide, form)
    assert of_torch.scales.float().eq(1).all()
    expect_bits(found, of_torch)


@pytest.mark.parametrize("recipe", FORMATS)
def test_every_code_and_scale_is_widened_as_torch_does(kernels: Any, recipe: str) -> None:
    form = FORMATS[recipe]
    codes = torch.arange(256, dtype=torch.uint8).repeat(256, 1).view(256, 256)
    scales = torch.arange(256, dtype=torch.uint8).unsqueeze(1).expand(256, 256 // form.block).contiguous()
    if form.scale_dtype == torch.float32:
        scales = (scales.float() - 127).exp2() * 1.7
    expected = widen((codes.view(torch.float8_e4m3fn), scales.view(form.scale_dtype)), torch.float32)
    found = torch.empty(256, 256)
    kernels.expand(codes, scales, found)
    expect_rows(found, expected)


@pytest.mark.parametrize("recipe", FORMATS)
def test_a_row_is_written_to_all_its_packets_and_no_byte_beside_them(kernels: Any, recipe: str) -> None:
    """Row 1 goes nowhere, and packet 3 is of no row. Rows have any strides."""
    form = FORMATS[recipe]
    rows = rows_of(form, 3, torch.bfloat16)
    rows = torch.stack([rows, rows], 2)[9:13, :, 1]
    edges, places = torch.tensor([0, 2, 2, 3, 6]), torch.tensor([5, 0, 1, 6, 2, 4, 3, 3])
    codes, scales = room(form, 7, rows.shape[1])
    kernels.quantise(rows, codes, scales, places, edges)
    used = torch.tensor([5, 0, 1, 6, 2, 4])
    source = torch.tensor([0, 0, 2, 3, 3, 3])
    values, of_torch = quantise(rows, form)
    expect_bits((codes[used], scales[used].contiguous()), (values[source], of_torch[source]))
    packets = codes.as_strided((7, codes.stride(0)), (codes.stride(0), 1))
    assert packets[3].eq(77).all()
    assert packets[:, -12:].eq(77).all()


INDICES = [EXAMPLE.index, many_slots(), Table([[1, 0], [0, 2]], 2, 3, 1).index, static_index(EXAMPLE, 5)]


@pytest.mark.parametrize("recipe", FORMATS)
@pytest.mark.parametrize("index", INDICES, ids=["padded", "many", "plain", "static"])
def test_rows_are_expanded_as_torch_does(kernels: Any, recipe: str, index: SlotIndex) -> None:
    form = FORMATS[recipe]
    arrived = quantise(rows_of(form, 3, torch.bfloat16).repeat(3, 1)[: index.num_rows], form)
    packets = room(form, *arrived.values.shape)
    for part, values in zip(packets, as_bytes(arrived), strict=True):
        part.copy_(values)
    encoded = Quantised(packets[0].view(torch.float8_e4m3fn), packets[1].view(form.scale_dtype))
    reference, permutation = TorchPermutation(fixed_size=index.fixed_size), choose_permutation("triton", "cpu")
    known = torch.zeros(index.num_grouped, dtype=torch.bool).index_fill_(0, index.byrow_N[: int(index.cu_S[-1])], True)
    if index.padding is not None:
        known[index.padding[index.padding < index.num_grouped]] = True
    for dtype in (torch.bfloat16, torch.float32):
        rows, expected = (encoded.expand(each, index, dtype, as_sent=False) for each in (permutation, reference))
        assert isinstance(rows, Tensor)
        assert isinstance(expected, Tensor)
        assert rows.shape == expected.shape
        expect_rows(rows[known], expected[known])
    sent, expected = (encoded.expand(each, index, torch.float32, as_sent=True) for each in (permutation, reference))
    assert isinstance(sent, Quantised)
    assert isinstance(expected, Quantised)
    for part, other in zip(sent, expected, strict=True):
        assert part.is_contiguous()
        assert (part.dtype, part.shape) == (other.dtype, other.shape)
        assert torch.equal(part[known].view(torch.uint8), other[known].view(torch.uint8))


@pytest.mark.parametrize("recipe", FORMATS)
@pytest.mark.parametrize("index", INDICES, ids=["padded", "many", "plain", "static"])
@pytest.mark.parametrize("blocks", [1, 67])
def test_gradients_are_those_of_widened_rows(kernels: Any, recipe: str, index: SlotIndex, blocks: int) -> None:
    """Bit for bit what the kernel of the reorder gives, with NaN on the padding of partners."""
    form, permutation = FORMATS[recipe], choose_permutation("triton", "cpu")
    arrived = quantise(rows_of(form, blocks, torch.bfloat16)[:6].repeat(7, 1)[: index.num_rows], form)
    weights_R = torch.rand(index.num_grouped)
    for dtype in (torch.bfloat16, torch.float64):
        partners = torch.randn(index.num_grouped, blocks * form.block).to(dtype)
        if index.padding is not None:
            partners[index.padding[index.padding < index.num_grouped]] = math.nan
        known = torch.zeros(index.num_grouped, dtype=torch.bool)
        known[index.byrow_N[: int(index.cu_S[-1])]] = True
        if index.padding is not None:
            known[index.padding[index.padding < index.num_grouped]] = True
        for given in (None, partners):
            rows, dots = arrived.expand_weighted(permutation, index, weights_R, given, dtype, as_sent=False)
            wide = widen(arrived, dtype)
            expected, of_widened = permutation.expand_weighted(wide, index, weights_R, given, dtype)
            expect_rows(rows[known], expected[known])
            assert (dots is None) == (of_widened is None) == (given is None)
            if dots is not None and of_widened is not None:
                expect_rows(dots[known], of_widened[known])


@pytest.mark.parametrize("recipe", FORMATS)
def test_nothing_is_launched_without_rows(kernels: Any, recipe: str) -> None:
    form = FORMATS[recipe]
    rows = torch.zeros(0, 2 * form.block)
    kernels.quantise(rows, *room(form, *rows.shape))
    kernels.expand(*room(form, *rows.shape), rows)
