"""Which rows a layout takes from a tensor, which of them it calls real, and the sequence and position of each."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from moe_dispatch.errors import LayoutError
from moe_dispatch.layouts import BSHD, SBHD, THD, Layout, Masked, Rows
from tests.layouts.written_batches import on_device


@pytest.mark.parametrize(
    ("layout", "shape"),
    [
        (BSHD(), (2, 3, 4)),
        (SBHD(), (2, 3, 4)),
        (THD([0, 2, 6]), (6, 4)),
        (THD([0, 2, 6]), (1, 6, 4)),
        (THD([0, 2, 6]), (6, 1, 4)),
        (Rows(), (6, 4)),
        (Rows(), (1, 2, 3, 4)),
        (Rows(), (4,)),
        (BSHD(), (0, 3, 4)),
    ],
)
def test_without_padding_every_row_is_real(layout: Layout, shape: tuple[int, ...]) -> None:
    x = torch.randn(shape)
    x_TD = layout.flatten(x)
    rows = layout.num_rows(shape)
    assert rows == len(x_TD) == x.numel() // 4
    assert torch.equal(x_TD, x.reshape(-1, 4))
    assert x_TD.data_ptr() == x.data_ptr()
    assert layout.on_host
    assert layout.valid_T(rows) is None
    assert layout.real_rows(rows) is None
    assert layout.num_real(rows) == rows


def test_rows_are_known_from_the_layout_only_where_the_host_knows() -> None:
    assert BSHD([1, 2]).num_rows() is None
    assert BSHD().num_real(None) is None
    assert THD([0, 2, 6]).num_rows() == 6
    assert THD([0, 2, 5], [0, 4, 8]).num_rows() == 8
    assert THD(torch.empty(3, dtype=torch.int32, device="meta")).num_rows() is None


@pytest.mark.parametrize("count", [3, torch.tensor(3), torch.tensor([3], dtype=torch.int32)])
def test_rows_counts_from_the_first(count: Any) -> None:
    layout = Rows(num_real=count)
    layout.check(5)
    assert layout.on_host
    assert layout.num_real(5) == 3
    assert layout.valid_T(5).tolist() == [True] * 3 + [False] * 2  # type: ignore[union-attr]
    assert layout.real_rows(5).tolist() == [0, 1, 2]  # type: ignore[union-attr]
    assert layout.real_rows(3) is None


def test_a_mask_says_of_each_row_whether_it_is_real() -> None:
    layout = Masked(torch.tensor([0, 1, 0, 1, 1, 0]).bool())
    for shape in ((6, 4), (2, 3, 4)):
        assert layout.flatten(torch.zeros(shape)).shape == (6, 4)
    assert layout.num_rows() == 6
    assert layout.num_real(6) == 3
    assert layout.valid_T(6).tolist() == [False, True, False, True, True, False]  # type: ignore[union-attr]
    assert layout.real_rows(6).tolist() == [1, 3, 4]  # type: ignore[union-attr]
    assert Masked(torch.ones(6).bool()).real_rows(6) is None


def test_malformed_lengths_on_a_device_never_index_out_of_bounds() -> None:
    with on_device():
        assert THD([0, 2, 4], [0, 3, 5]).valid_T(9) is not None
        assert THD([0, 2, 4], [0, 3, 5]).shard(1, 2, "zigzag").valid_T(8) is not None
        assert THD([0, 80], [0, 80]).shard(1, 2, "zigzag").valid_T(8) is not None


@pytest.mark.parametrize(
    "layout",
    [
        BSHD(torch.empty(2, dtype=torch.int32, device="meta")),
        SBHD(torch.empty(2, dtype=torch.int64, device="meta")),
        THD(torch.empty(3, dtype=torch.int32, device="meta"), torch.empty(3, dtype=torch.int32, device="meta")),
        Rows(torch.empty((), dtype=torch.int32, device="meta")),
        Masked(torch.empty(8, dtype=torch.bool, device="meta")),
    ],
)
def test_a_device_without_values_is_enough_for_the_mask(layout: Layout) -> None:
    layout.check(8)
    assert not layout.on_host
    assert layout.num_real(8) is None
    part = layout.shard(1, 2)
    for mask, rows in ((layout.valid_T(8), 8), (part.valid_T(4), 4)):
        assert mask is not None
        assert mask.device.type == "meta"
        assert mask.shape == (rows,)
        assert mask.dtype == torch.bool
    with pytest.raises(LayoutError, match=r"real_rows: the lengths are on meta. Use valid_T"):
        layout.real_rows(8)


def test_values_on_a_device_are_checked_on_request() -> None:
    with on_device():
        layout = THD([0, 5, 3])
        layout.check(3)
    with on_device(may_sync=True), pytest.raises(LayoutError, match="must not decrease"):
        layout.check(3, values=True)


@pytest.mark.parametrize(
    ("layout", "shape", "sequences", "positions"),
    [
        (BSHD(), (2, 3, 1), [0, 0, 0, 1, 1, 1], [0, 1, 2, 0, 1, 2]),
        (SBHD(), (3, 2, 1), [0, 1, 0, 1, 0, 1], [0, 0, 1, 1, 2, 2]),
        (BSHD().shard(1, 2, "zigzag"), (1, 4, 1), [0, 0, 0, 0], [2, 3, 4, 5]),
        (THD([0, 1, 3]), (3, 1, 4), [0, 1, 1], [0, 0, 1]),
        (THD([0, 2, 3], [0, 3, 3 + 1]), (1, 4, 4), [0, 0, -1, 1], [0, 1, -1, 0]),
        (Rows(), (4, 1), [0, 0, 0, 0], [0, 1, 2, 3]),
        (Rows(3), (2, 2, 1), [0, 0, 1, -1], [0, 1, 0, -1]),
        (Rows().shard(1, 2), (2, 1), [0, 0], [2, 3]),
        (Masked(torch.tensor([0, 1, 1, 1, 0, 1]).bool()), (2, 3, 1), [-1, 0, 0, 1, -1, 1], [-1, 0, 1, 0, -1, 1]),
        (Masked(torch.tensor([0, 1, 1, 1]).bool()).shard(1, 2), (2, 1), [0, 0], [1, 2]),
        (THD([0]), (0, 1), [], []),
        (Masked(torch.zeros(0).bool()), (0, 3, 1), [], []),
    ],
)
def test_positions_written_out(
    layout: Layout, shape: tuple[int, ...], sequences: list[int], positions: list[int]
) -> None:
    assert layout.positions(shape).tolist() == [sequences, positions]
    assert layout.num_sequences(shape) >= len(set(sequences) - {-1})


@pytest.mark.parametrize(
    ("layout", "shape", "count"),
    [
        (BSHD([0, 0]), (2, 4, 1), 2),
        (SBHD().shard(0, 2), (2, 5, 1), 5),
        (THD([0, 0, 0]), (0, 1), 2),
        (Masked(torch.zeros(6).bool()), (2, 3, 1), 2),
        (Masked(torch.zeros(6).bool()), (6, 1), 1),
    ],
)
def test_sequences_without_tokens_count(layout: Layout, shape: tuple[int, ...], count: int) -> None:
    assert layout.num_sequences(shape) == count
