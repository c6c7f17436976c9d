"""What the torch implementation does in blocks: no seam between them may show."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from moe_dispatch.permutation import TorchPermutation
from moe_dispatch.permutation import rows as bags
from moe_dispatch.permutation.rows import as_words, sum_by_columns
from tests.backends.tables import EXAMPLE, FLOATS, many_slots, reduced, rows_of

TORCH = TorchPermutation()


def passes(dtype: torch.dtype) -> list[Tensor]:
    index = EXAMPLE.index
    rows_RD, weights_R, grad_SD = rows_of(index.num_grouped, dtype=dtype), torch.rand(index.num_grouped), rows_of(4)
    grad_RD, dots_R = TORCH.expand_weighted(grad_SD, index, weights_R, rows_RD, dtype)
    assert dots_R is not None
    sums = [reduced(TORCH, rows_RD, index, weights) for weights in (None, weights_R)]
    return [*sums, grad_RD, dots_R, TORCH.expand(grad_SD, index, dtype)]


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("rows_per_block", [1, 2, 3])
def test_blocks_change_no_bit(dtype: torch.dtype, rows_per_block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    whole = passes(dtype)
    monkeypatch.setattr(bags, "CPU_BLOCK_BYTES", 4 * 6 * rows_per_block)
    torch.manual_seed(0)
    assert all(map(torch.equal, passes(dtype), whole))


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("columns", [1, 4, 100])
def test_sums_by_columns_are_those_by_rows(
    dtype: torch.dtype, weighted: bool, columns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a GPU does, run here: weighted bfloat16 is widened there instead of written in three parts."""
    index = many_slots()
    members_N, num_members = index.byrow_N, index.byrow_N.shape[0]
    packets = rows_of(index.num_grouped, 9, dtype)
    weights_N = torch.rand(num_members, generator=torch.Generator().manual_seed(1)) if weighted else None
    by_rows, by_columns = torch.empty(2, 40, 6, dtype=dtype)
    TORCH.sum_bags(packets, members_N, index.cu_S, weights_N, by_rows)
    monkeypatch.setattr(bags, "CPU_BLOCK_BYTES", 4 * num_members * columns)
    sum_by_columns(packets[:, :6], members_N, index.cu_S, weights_N, by_columns)
    torch.testing.assert_close(by_columns, by_rows, rtol=torch.finfo(dtype).eps, atol=1e-6)
    contiguous = torch.empty_like(by_columns)
    sum_by_columns(packets, members_N, index.cu_S, weights_N, contiguous)
    torch.testing.assert_close(contiguous, by_rows, rtol=torch.finfo(dtype).eps, atol=1e-6)


@pytest.mark.parametrize(
    ("width", "stride", "offset", "expected"),
    [
        (16, 16, 0, torch.int64),
        (16, 24, 8, torch.int64),
        (12, 16, 0, torch.int32),
        (16, 20, 0, torch.int32),
        (16, 16, 2, torch.int16),
        (15, 16, 0, torch.uint8),
    ],
)
def test_bytes_are_copied_in_the_widest_words(width: int, stride: int, offset: int, expected: torch.dtype) -> None:
    packets = torch.zeros(200, dtype=torch.uint8).as_strided((4, width), (stride, 1), offset)
    out = torch.empty(4, width, dtype=torch.uint8)
    assert [words.dtype for words in as_words(packets, out)] == [expected] * 2
