"""Every malformed layout, and every tensor that does not fit one, is refused by name with its numbers."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from moe_dispatch.errors import ConfigError, LayoutError
from moe_dispatch.layouts import BSHD, SBHD, THD, Layout, Masked, Rows

X = torch.zeros(2, 4, 3)


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: BSHD(torch.ones(2)), r"BSHD: lengths must be a 1-D int32 or int64 tensor, got torch.float32 \(2,\)"),
        (lambda: BSHD(torch.ones(2, 3) > 0), r"got torch.bool \(2, 3\)\. Pass a mask as Masked\(mask\.flatten\(\)\)"),
        (lambda: BSHD([2, 1.5]), r"BSHD: lengths\[1\] must be an integer of at most 64 bits, got 1.5"),  # type: ignore[list-item]
        (lambda: SBHD([10**30]), r"SBHD: lengths\[0\] must be an integer of at most 64 bits, got 10000"),
        (lambda: BSHD(3), r"BSHD: lengths must be a list or a tensor, got 3. Pass integers."),  # type: ignore[arg-type]
        (lambda: BSHD([torch.tensor(1)]), r"BSHD: lengths\[0\] must be an integer of at most 64 bits, got tensor\(1\)"),  # type: ignore[list-item]
        (lambda: THD(None), r"THD: cu_seqlens must be a list or a tensor, got None"),  # type: ignore[arg-type]
        (lambda: THD([0, 2], max_seqlen=2.5), r"THD: max_seqlen must be an integer of at most 64 bits, got 2.5"),  # type: ignore[arg-type]
        (lambda: Rows(3.5), r"Rows: num_real must be an integer of at most 64 bits, got 3.5"),  # type: ignore[arg-type]
        (lambda: Masked(np.ones(2, bool)), r"Masked: valid must be bool \(T,\), got \[ True  True\]"),  # type: ignore[arg-type]
        (lambda: BSHD().shard(0.5, 2), r"shard: index must be an integer of at most 64 bits, got 0.5"),  # type: ignore[arg-type]
        (lambda: THD(torch.zeros(2, 2, dtype=torch.int32)), r"THD: cu_seqlens must be a 1-D .*, got torch.int32 \(2"),
        (lambda: THD([]), r"THD: cu_seqlens must have n\+1 entries for n sequences, got none"),
        (lambda: THD([0, 2], [0, 2, 4]), r"must have the same length and device, got 2 entries on cpu and 3 on cpu"),
        (lambda: THD([0, 2], max_seqlen=-1), r"THD: max_seqlen must be 0 or more, got -1"),
        (lambda: Rows(torch.ones(2, dtype=torch.int32)), r"num_real must be an int or one int32 or int64, got"),
        (lambda: Masked(torch.ones(2)), r"Masked: valid must be bool \(T,\), got torch.float32 \(2,\)"),
    ],
)
def test_refused_when_made(make: Callable[[], Layout], text: str) -> None:
    with pytest.raises(LayoutError, match=text):
        make()


@pytest.mark.parametrize(
    ("layout", "rows", "text"),
    [
        (BSHD([1, 5]), 8, r"BSHD: lengths must lie in 0..4 \(S\), got 5"),
        (SBHD([-1, 3]), 8, r"SBHD: lengths must lie in 0..4 \(S\), got -1"),
        (BSHD([1, 2, 3]), 8, r"BSHD: the rows \(8\) must be a multiple of the number of lengths \(3\)"),
        (THD([1, 8]), 8, r"THD: cu_seqlens must start at 0, got \[1, 8\]"),
        (THD([0, 6, 4, 8]), 8, r"THD: cu_seqlens must not decrease, got \[0, 6, 4, 8\]"),
        (THD([0, 2**62, -(2**62) - 5, 8]), 8, r"THD: cu_seqlens must not decrease, got \[0, 46"),
        (THD([0, 3, 7]), 8, r"THD: cu_seqlens must end at the number of rows, got 7 and 8 rows. Pass"),
        (THD([0, 3, 7], [0, 4, 9]), 8, r"THD: cu_seqlens_padded must end at the number of rows, got 9 and 8 rows"),
        (THD([0, 5, 7], [0, 4, 8]), 8, r"sequence 0 has 5 rows, but only 4 with padding"),
        (THD([0, 3, 8], max_seqlen=4), 8, r"max_seqlen must be at least the longest sequence \(5\), got 4"),
        (THD(list(range(10))), 8, r"got 9 and 8 rows"),
        (Rows(9), 8, r"Rows: num_real must lie in 0..8 \(rows\), got 9"),
        (Rows(-1), 8, r"Rows: num_real must lie in 0..8 \(rows\), got -1"),
    ],
)
def test_refused_by_check(layout: Layout, rows: int, text: str) -> None:
    with pytest.raises(LayoutError, match=text):
        layout.check(rows)


@pytest.mark.parametrize(
    ("layout", "x", "text"),
    [
        (BSHD(), X[0], r"BSHD: x must be \[B, S, D\], got shape \(4, 3\)"),
        (BSHD([1]), X, r"BSHD: x must hold one sequence per length, got \[B, S, D\] = \(2, 4, 3\) and 1"),
        (THD([0, 8]), X, r"THD: x must be \[T, D\], \[1, T, D\] or \[T, 1, D\], got shape \(2, 4, 3\)"),
        (THD([0, 3]), X[0], r"THD: cu_seqlens must end at the number of rows, got 3 and 4 rows"),
        (THD([0, 6]).shard(0, 2), X[0], r"THD: cu_seqlens must end at the number of rows, got 6 and 8 rows"),
        (BSHD().shard(0, 2, "zigzag"), X[:, :3], r"BSHD.shard\(0, 2, 'zigzag'\): .* two equal chunks, got 3 positions"),
        (Masked(torch.ones(7).bool()), X, r"Masked: the mask must have an entry per row, got 7 and 8 rows"),
        (Rows(), torch.tensor(1.0), r"Rows: x must be \[..., D\], got no dimension"),
    ],
)
def test_refused_by_flatten(layout: Layout, x: torch.Tensor, text: str) -> None:
    with pytest.raises(LayoutError, match=text):
        layout.flatten(x)


@pytest.mark.parametrize("y", [torch.zeros(7, 3), torch.zeros(2, 4, 3)])
def test_unflatten_refuses_other_rows(y: torch.Tensor) -> None:
    with pytest.raises(LayoutError, match=r"BSHD.unflatten: y must be 2-D with 8 rows, got"):
        BSHD().unflatten(y, X)


@pytest.mark.parametrize(
    ("layout", "arguments", "text"),
    [
        (BSHD(), (2, 2), r"shard: index must lie in 0..size-1, got index 2 and size 2"),
        (BSHD(), (0, 2, "ring"), r"shard: kind must be one of contiguous, zigzag, got 'ring'"),
        (Rows(), (0, 2, "zigzag"), r"Rows.shard: kind must be one of contiguous, got 'zigzag'"),
        (BSHD().shard(0, 2), (0, 2, "zigzag"), r"BSHD.shard\(0, 2, 'contiguous'\).shard: kind must be .*, got"),
    ],
)
def test_shard_refuses_what_names_no_part(layout: Layout, arguments: tuple[int, int], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        layout.shard(*arguments)


@pytest.mark.parametrize(
    ("layout", "rows", "text"),
    [
        (BSHD([3, 2]).shard(0, 2, "zigzag"), 3, r"S \(3\) must be divisible by 4 to be split zigzag over 2 ranks"),
        (THD([0, 3, 5], [0, 6, 8]).shard(1, 2, "zigzag"), 4, r"rows of sequence 0 \(6\) must be divisible by 4"),
        (THD([0, 3, 7], [0, 4, 8]).shard(1, 2, "zigzag"), 3, r"must end at the number of rows, got 8 and 6 rows"),
        (THD([0, 12]).shard(0, 2, "zigzag").shard(0, 4), 2, r"must end at the number of rows, got 12 and 16 rows"),
    ],
)
def test_shards_of_what_does_not_divide_are_refused(layout: Layout, rows: int, text: str) -> None:
    with pytest.raises(LayoutError, match=text):
        layout.check(rows)


def test_row_counts_of_undividable_shards_are_refused() -> None:
    with pytest.raises(LayoutError, match=r"the rows \(7\) must be divisible by 2 to be split contiguous over 2 ranks"):
        THD([0, 7]).shard(0, 2).num_rows()


@pytest.mark.parametrize("whole", [np.int32, np.int64, np.uint8])
def test_integers_of_numpy_are_integers(whole: Callable[[int], int]) -> None:
    """A data loader's lengths: a list of numpy's integers, or an array of them."""
    for layout in (BSHD([whole(3), whole(1)]), BSHD(np.array([whole(3), whole(1)])), BSHD(iter([whole(3), whole(1)]))):  # type: ignore[arg-type]
        assert layout.num_real(8) == 4
    packed = THD([whole(0), whole(3)], [whole(0), whole(4)], max_seqlen=whole(3))
    packed.check(4)
    assert (packed.num_rows(), packed.max_seqlen) == (4, 3)
    assert type(packed.max_seqlen) is int
    assert type(Rows(whole(3)).count) is int
    assert Rows(whole(3)).num_real(4) == 3
    assert BSHD().shard(whole(1), whole(2)).num_rows((1, 4, 8)) == 4
