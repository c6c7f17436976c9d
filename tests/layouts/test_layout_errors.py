"""Every malformed layout, and every tensor that does not fit one, is refused by name with its numbers."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from moe_dispatch.errors import ConfigError, LayoutError
from moe_dispatch.layouts import (
    BSHD,
    SBHD,
    THD,
    Masked,
    Rows,
    bshd_to_thd,
    padded_length,
    sequence_multiple,
    shard_for_context_parallel,
    thd_to_bshd,
    unshard_from_context_parallel,
)

zeros, ones = torch.zeros, torch.ones
BATCH, PACKED = zeros(2, 4, 3), zeros(8, 3)

Refusal = tuple[Callable[[], object], str]

MALFORMED: list[Refusal] = [
    (lambda: BSHD(ones(2)), r"BSHD: lengths must be a 1-D int32 or int64 tensor, got torch.float32 \(2,\)"),
    (lambda: BSHD(ones(2, 3) > 0), r"got torch.bool \(2, 3\)\. Pass a mask as Masked"),
    (lambda: BSHD([2, 1.5]), r"BSHD: lengths\[1\] must be an integer of at most 64 bits, got 1.5"),  # type: ignore[list-item]
    (lambda: SBHD([10**30]), r"SBHD: lengths\[0\] must be an integer of at most 64 bits, got 10000"),
    (lambda: BSHD(3), r"BSHD: lengths must be a list or a tensor, got 3"),  # type: ignore[arg-type]
    (lambda: BSHD([torch.tensor(1)]), r"lengths\[0\] must be an integer of at most 64 bits, got tensor\(1\)"),  # type: ignore[list-item]
    (lambda: THD(None), r"THD: cu_seqlens must be a list or a tensor, got None"),  # type: ignore[arg-type]
    (lambda: THD([0, 2], max_seqlen=2.5), r"THD: max_seqlen must be an integer of at most 64 bits, got 2.5"),  # type: ignore[arg-type]
    (lambda: Rows(3.5), r"Rows: num_real must be an integer of at most 64 bits, got 3.5"),  # type: ignore[arg-type]
    (lambda: Rows(3, count=2), r"num_real and count are the same number, got 3 and 2\. Pass one"),
    (lambda: Masked(np.ones(2, bool)), r"Masked: valid must be bool \(T,\), got \[ True  True\]"),  # type: ignore[arg-type]
    (lambda: Masked(ones(2)), r"Masked: valid must be bool \(T,\), got torch.float32 \(2,\)"),
    (lambda: BSHD().shard(0.5, 2), r"shard: index must be an integer of at most 64 bits, got 0.5"),  # type: ignore[arg-type]
    (lambda: THD(zeros(2, 2, dtype=torch.int32)), r"THD: cu_seqlens must be a 1-D .*, got torch.int32 \(2"),
    (lambda: THD([]), r"THD: cu_seqlens must have n\+1 entries for n sequences, got none"),
    (lambda: THD([0, 2], [0, 2, 4]), r"must have the same length and device, got 2 entries on cpu and 3 on cpu"),
    (lambda: THD([0, 2], max_seqlen=-1), r"THD: max_seqlen must be 0 or more, got -1"),
    (lambda: Rows(ones(2, dtype=torch.int32)), r"num_real must be an int or one int32 or int64, got"),
]
ROWS_THAT_DO_NOT_FIT: list[Refusal] = [
    (lambda: BSHD([1, 5]).check(8), r"BSHD: lengths must lie in 0..4 \(S\), got 5"),
    (lambda: SBHD([-1, 3]).check(8), r"SBHD: lengths must lie in 0..4 \(S\), got -1"),
    (lambda: BSHD([1, 2, 3]).check(8), r"the rows \(8\) must be a multiple of the number of lengths \(3\)"),
    (lambda: THD([1, 8]).check(8), r"THD: cu_seqlens must start at 0, got \[1, 8\]"),
    (lambda: THD([0, 6, 4, 8]).check(8), r"THD: cu_seqlens must not decrease, got \[0, 6, 4, 8\]"),
    (lambda: THD([0, 2**62, -(2**62) - 5, 8]).check(8), r"THD: cu_seqlens must not decrease, got \[0, 46"),
    (lambda: THD([0, 3, 7]).check(8), r"THD: cu_seqlens must end at the number of rows, got 7 and 8 rows"),
    (lambda: THD([0, 3, 7], [0, 4, 9]).check(8), r"cu_seqlens_padded must end at the number of rows, got 9 and 8 rows"),
    (lambda: THD([0, 5, 7], [0, 4, 8]).check(8), r"sequence 0 has 5 rows, but only 4 with padding"),
    (lambda: THD([0, 3, 8], max_seqlen=4).check(8), r"max_seqlen must be at least the longest sequence \(5\), got 4"),
    (lambda: Rows(9).check(8), r"Rows: num_real must lie in 0..8 \(rows\), got 9"),
    (lambda: Rows(-1).check(8), r"Rows: num_real must lie in 0..8 \(rows\), got -1"),
    (lambda: BSHD([3, 2]).shard(0, 2, "zigzag").check(3), r"S \(3\) must be divisible by 4 to be split zigzag over 2"),
    (lambda: THD([0, 3, 5], [0, 6, 8]).shard(1, 2, "zigzag").check(4), r"sequence 0 \(6\) must be divisible by 4"),
    (lambda: THD([0, 3, 7], [0, 4, 8]).shard(1, 2, "zigzag").check(3), r"must end at .* rows, got 8 and 6 rows"),
    (lambda: THD([0, 12]).shard(0, 2, "zigzag").shard(0, 4).check(2), r"must end at .* rows, got 12 and 16 rows"),
    (lambda: THD([0, 7]).shard(0, 2).num_rows(), r"\(7\) must be divisible by 2 to be split contiguous over 2 ranks"),
]
TENSORS_THAT_DO_NOT_FIT: list[Refusal] = [
    (lambda: BSHD().flatten(BATCH[0]), r"BSHD: x must be \[B, S, D\], got shape \(4, 3\)"),
    (lambda: BSHD([1]).flatten(BATCH), r"must hold one sequence per length, got \[B, S, D\] = \(2, 4, 3\) and 1"),
    (lambda: BSHD([1, 2]).positions((3, 4, 1)), r"must hold one sequence per length, got \[B, S, D\] = \(3, "),
    (lambda: THD([0, 8]).flatten(BATCH), r"x must be \[T, D\], \[1, T, D\] or \[T, 1, D\], got shape \(2, 4, 3\)"),
    (lambda: THD([0, 3]).flatten(BATCH[0]), r"cu_seqlens must end at the number of rows, got 3 and 4 rows"),
    (lambda: THD([0, 6]).shard(0, 2).flatten(BATCH[0]), r"must end at the number of rows, got 6 and 8 rows"),
    (lambda: BSHD().shard(0, 2, "zigzag").flatten(BATCH[:, :3]), r"'zigzag'\): .* two equal chunks, got 3 positions"),
    (lambda: Masked(ones(7).bool()).flatten(BATCH), r"the mask must have an entry per row, got 7 and 8 rows"),
    (lambda: Rows().flatten(torch.tensor(1.0)), r"Rows: x must be \[..., D\], got no dimension"),
    (lambda: BSHD().unflatten(zeros(7, 3), BATCH), r"BSHD.unflatten: y must be 2-D with 8 rows, got"),
    (lambda: BSHD().unflatten(BATCH, BATCH), r"BSHD.unflatten: y must be 2-D with 8 rows, got"),
    (lambda: shard_for_context_parallel(BATCH[:, :3], BSHD(), 0, 2), r"S \(3\) must be divisible by 4"),
    (lambda: shard_for_context_parallel(PACKED, THD([0, 2, 8]), 0, 2), r"sequence 0 \(2\) must be divisible by 4"),
    (lambda: shard_for_context_parallel(PACKED, THD([0, 8]), 0, 3, "contiguous"), r"\(8\) must be divisible by 3"),
    (lambda: shard_for_context_parallel(PACKED, THD([0, 12, 8]), 0, 2), "must not decrease"),
    (lambda: unshard_from_context_parallel([], SBHD()), "shards must be tensors of one shape, got shapes"),
    (lambda: unshard_from_context_parallel([BATCH, BATCH[:, :2]], SBHD()), "must be tensors of one shape, got shapes"),
    (lambda: thd_to_bshd(PACKED, [0, 1, 5]), "must end at the number of rows, got 5 and 8 rows"),
    (lambda: thd_to_bshd(PACKED, [0, 1, 8], max_seqlen=3), r"at least the longest sequence \(7\), got 3"),
    (lambda: bshd_to_thd(BATCH, [0, 1, 8]), r"max_seqlen must be at least the longest sequence \(7\), got 4"),
    (lambda: bshd_to_thd(BATCH[:1], [0, 1, 5]), r"cu_seqlens must have B\+1 entries, got 3 for B = 1"),
    (lambda: bshd_to_thd(zeros(5), [0, 5]), r"bshd_to_thd: x must be \(B, S, ...\), got shape \(5,\)"),
    (lambda: padded_length(200, 64, seq_length=199), r"seq_length \(199\) must be at least the length \(200\)"),
    (lambda: padded_length(-1, 64), "length must be 0 or more, got -1"),
]


@pytest.mark.parametrize(("call", "told"), MALFORMED + ROWS_THAT_DO_NOT_FIT + TENSORS_THAT_DO_NOT_FIT)
def test_what_does_not_fit_is_refused(call: Callable[[], object], told: str) -> None:
    with pytest.raises(LayoutError, match=told):
        call()


@pytest.mark.parametrize(
    ("call", "told"),
    [
        (lambda: BSHD().shard(2, 2), r"shard: index must lie in 0..size-1, got index 2 and size 2"),
        (lambda: BSHD().shard(0, 2, "ring"), r"shard: kind must be one of contiguous, zigzag, got 'ring'"),  # type: ignore[arg-type]
        (lambda: Rows().shard(0, 2, "zigzag"), r"Rows.shard: kind must be one of contiguous, got 'zigzag'"),
        (
            lambda: BSHD().shard(0, 2).shard(0, 2, "zigzag"),
            r"BSHD.shard\(0, 2, 'contiguous'\).shard: kind must be .*, got",
        ),
        (lambda: sequence_multiple(batch_size=0), "batch_size must be 1 or more, got 0"),
        (lambda: sequence_multiple(tp=0), "tp must be 1 or more, got 0"),
        (lambda: sequence_multiple(cp=0), "cp must be 1 or more, got 0"),
        (lambda: sequence_multiple(row_multiple=0), "row_multiple must be 1 or more, got 0"),
        (lambda: padded_length(1, 0), "multiple must be 1 or more, got 0"),
    ],
)
def test_settings_that_name_nothing_are_refused(call: Callable[[], object], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        call()


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
