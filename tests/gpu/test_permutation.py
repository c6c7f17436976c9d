"""The one-rank reorder on a GPU: every implementation that can be used there against torch on the CPU."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from moe_dispatch.permutation import (
    Permutation,
    SlotIndex,
    TorchPermutation,
    accumulation_dtype,
    choose_permutation,
    group_slots,
    known_permutations,
    probe_permutation,
)
from moe_dispatch.seams.plug_ins import Rejected
from tests.gpu.first_hour.kernels import milliseconds
from tests.gpu.syncs import refused_syncs
from tests.simulated_cuda.device import is_simulated

pytestmark = pytest.mark.gpu
TORCH = TorchPermutation()
DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float64]
WIDTHS = [1, 33, 2048, 4104]
# Simulated devices compute on the CPU. There, more rows take more time and show nothing more.
ROWS = 50 if is_simulated() else 500


@pytest.fixture(params=known_permutations())
def permutation(request: pytest.FixtureRequest) -> Permutation:
    verdict = probe_permutation(request.param, "cuda")
    if isinstance(verdict, Rejected):
        pytest.skip(verdict.reason)
    return choose_permutation(request.param, "cuda")


def index_on(device: str, *, num_rows: int = ROWS, num_keys: int = 16, pad_multiple: int = 16) -> SlotIndex:
    """Eight of the keys for every row but each seventh, which goes nowhere."""
    keys = torch.rand(num_rows, num_keys, generator=torch.Generator().manual_seed(0)).argsort(1)[:, :8]
    keys[::7] = -1
    counts = torch.bincount(keys[keys >= 0], minlength=num_keys).tolist()
    return group_slots(keys.to(device), counts, pad_multiple)


def inputs(index: SlotIndex, width: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """On the CPU: rows, grouped rows with NaN in their padding, and weights likewise."""
    generator = torch.Generator().manual_seed(1)
    rows_SD = torch.randn(index.num_rows, width, generator=generator).to(dtype)
    rows_RD = torch.randn(index.num_grouped, width, generator=generator).to(dtype)
    weights_R = torch.rand(index.num_grouped, generator=generator).to(accumulation_dtype(dtype))
    if index.padding is not None:
        rows_RD[index.padding] = weights_R[index.padding] = float("nan")
    return rows_SD, rows_RD, weights_R


def passes(
    permutation: Permutation, index: SlotIndex, rows_SD: Tensor, rows_RD: Tensor, weights_R: Tensor
) -> list[Tensor]:
    grad_RD, dots_R = permutation.expand_weighted(rows_SD, index, weights_R, rows_RD, rows_RD.dtype)
    assert dots_R is not None
    sums_SD, weighted_SD = torch.empty_like(rows_SD), torch.empty_like(rows_SD)
    permutation.reduce(rows_RD, index, None, sums_SD)
    permutation.reduce(rows_RD, index, weights_R, weighted_SD)
    copies_RD = permutation.expand(rows_SD, index, rows_SD.dtype)
    is_real_R, weights = weights_R == weights_R, weights_R.nan_to_num(0)
    products_RD, more_R = permutation.weigh(
        copies_RD, weights, lambda: is_real_R, rows_RD.dtype, partners_RD=rows_RD, clears=True
    )
    assert more_R is not None
    return [copies_RD, grad_RD, products_RD, dots_R, more_R, sums_SD, weighted_SD]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("deterministic", [True, False])
def test_equals_torch_on_the_cpu(permutation: Permutation, dtype: torch.dtype, width: int, deterministic: bool) -> None:
    torch.use_deterministic_algorithms(deterministic)
    expected = passes(TORCH, index_on("cpu"), *inputs(index_on("cpu"), width, dtype))
    cuda = [tensor.cuda() for tensor in inputs(index_on("cpu"), width, dtype)]
    found = [tensor.cpu() for tensor in passes(permutation, index_on("cuda"), *cuda)]
    assert all(map(torch.equal, found[:3], expected[:3]))
    tolerance = 2 * torch.finfo(dtype).eps
    for mine, theirs in zip(found[3:], expected[3:], strict=True):
        torch.testing.assert_close(mine, theirs, rtol=tolerance, atol=tolerance * width**0.5)


def test_same_bits_again(permutation: Permutation) -> None:
    index = index_on("cuda")
    cuda = [tensor.cuda() for tensor in inputs(index_on("cpu"), 2048, torch.bfloat16)]
    first = passes(permutation, index, *cuda)
    for _ in range(5):
        assert all(map(torch.equal, passes(permutation, index, *cuda), first))


@pytest.mark.parametrize("dtype", DTYPES)
def test_no_pass_waits_for_the_gpu(permutation: Permutation, dtype: torch.dtype) -> None:
    index = index_on("cuda")
    cuda = [tensor.cuda() for tensor in inputs(index_on("cpu"), 256, dtype)]
    passes(permutation, index, *cuda)  # kernels are loaded, and theirs tuned, at first use
    with refused_syncs():
        passes(permutation, index, *cuda)


@pytest.mark.real_gpu
def test_offsets_beyond_32_bits(permutation: Permutation) -> None:
    """The last of 2**31 numbers and more, read and written."""
    num_rows, width = (1 << 31) // 4096 + 8, 4096
    index = group_slots(torch.zeros(num_rows, 1, dtype=torch.int64, device="cuda"), [num_rows])
    rows_SD = torch.zeros(num_rows, width, dtype=torch.bfloat16, device="cuda")
    rows_SD[-1] = 3
    rows_RD = permutation.expand(rows_SD, index, torch.bfloat16)
    assert rows_RD[-1].eq(3).all()
    rows_SD.fill_(7)
    permutation.reduce(rows_RD, index, None, rows_SD)
    assert rows_SD[-1].eq(3).all()
    assert not rows_SD[:-1].any()


@pytest.mark.real_gpu
def test_triton_moves_bytes_at_half_the_speed_of_a_copy_or_more() -> None:
    """Each pass reads or writes all grouped rows; it is held against copying as many."""
    verdict = probe_permutation("triton", "cuda")
    if isinstance(verdict, Rejected):
        pytest.skip(verdict.reason)
    permutation, index = choose_permutation("triton", "cuda"), index_on("cuda", num_rows=16384, num_keys=64)
    rows_SD = torch.randn(index.num_rows, 4096, dtype=torch.bfloat16, device="cuda")
    rows_RD = torch.randn(index.num_grouped, 4096, dtype=torch.bfloat16, device="cuda")
    weights_R, copied = torch.rand(index.num_grouped, device="cuda"), torch.empty_like(rows_RD)
    torch.use_deterministic_algorithms(False)  # which fills fresh memory; conftest.py restores it
    copy_ms = milliseconds("cuda", lambda: copied.copy_(rows_RD))
    assert milliseconds("cuda", lambda: permutation.expand(rows_SD, index, rows_SD.dtype)) < 2 * copy_ms
    assert milliseconds("cuda", lambda: permutation.reduce(rows_RD, index, weights_R, rows_SD)) < 2 * copy_ms
    # This one reads the grouped rows and writes as many.
    backward = lambda: permutation.expand_weighted(rows_SD, index, weights_R, rows_RD, rows_RD.dtype)  # noqa: E731
    assert milliseconds("cuda", backward) < 2 * copy_ms
