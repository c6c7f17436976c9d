"""Which rows travel to which rank in ``alltoall``'s buffers of fixed size, against plain Python."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from moe_dispatch.backends.alltoall.backend import rank_members
from moe_dispatch.backends.alltoall.fixed import SendTable, send_table

SIZE = 3
FIXED = settings(max_examples=50, deadline=None, derandomize=True)


@st.composite
def ways(draw: Any) -> tuple[Tensor, Tensor, int]:
    """Ranks of slots, -1 for none, their weights, and places for a pair of ranks."""
    rows, top_k = draw(st.integers(1, 7)), draw(st.integers(1, 3))
    count = rows * top_k
    ranks = draw(st.lists(st.integers(-1, SIZE - 1), min_size=count, max_size=count))
    weight = st.sampled_from([0.0, 0.25, 0.5, -0.5, float("inf"), float("nan")])
    weights = draw(st.lists(weight, min_size=count, max_size=count))
    return torch.tensor(ranks).view(rows, top_k), torch.tensor(weights).view(rows, top_k), draw(st.integers(1, 5))


def sent_by_hand(rank_TK: Tensor, weights_TK: Tensor, pair_rows: int) -> list[list[int]]:
    """By destination, the rows that travel, in their order."""
    known = torch.where(weights_TK.isnan(), float("inf"), weights_TK).tolist()
    sent = []
    for there in range(SIZE):
        heaviest = {}
        for row, ranks in enumerate(rank_TK.tolist()):
            weights = [weight for rank, weight in zip(ranks, known[row], strict=True) if rank == there]
            if weights:
                heaviest[row] = max(weights)
        sent.append(sorted(sorted(heaviest, key=lambda row: -heaviest[row])[:pair_rows]))
    return sent


def table(rank_TK: Tensor, weights_TK: Tensor, pair_rows: int, *, may_overflow: bool = True) -> SendTable:
    owner_TK = rank_TK + 1
    return send_table(rank_members(owner_TK, SIZE), owner_TK, weights_TK, pair_rows, may_overflow=may_overflow)


@FIXED
@given(ways())
def test_the_heaviest_rows_have_a_place_and_the_busiest_rank_is_counted(case: tuple[Tensor, Tensor, int]) -> None:
    rank_TK, weights_TK, pair_rows = case
    got, wanted = table(*case), sent_by_hand(*case)
    empty, source = got.is_empty_B.view(SIZE, pair_rows), got.source_B.view(SIZE, pair_rows)
    for there, rows in enumerate(wanted):
        assert empty[there].tolist() == [False] * len(rows) + [True] * (pair_rows - len(rows))
        assert source[there, : len(rows)].tolist() == rows
        assert not source[there, len(rows) :].any()
    # The way home: the places of a row, by destination.
    place = {(row, there): there * pair_rows + at for there, rows in enumerate(wanted) for at, row in enumerate(rows)}
    members = [place[pair] for pair in sorted(place)]
    assert got.member_N[: len(members)].tolist() == members
    assert got.cu_T.tolist() == [sum(row < t for row, _ in place) for t in range(len(rank_TK) + 1)]
    assert got.member_N.min() >= 0
    assert got.member_N.max() < SIZE * pair_rows
    assert int(got.busiest) == max(map(len, sent_by_hand(rank_TK, weights_TK, len(rank_TK))))


@FIXED
@given(ways())
def test_where_nothing_can_overflow_nothing_is_sorted_and_all_travels(case: tuple[Tensor, Tensor, int]) -> None:
    rank_TK, weights_TK, _ = case
    sorted_, plain = (table(rank_TK, weights_TK, len(rank_TK), may_overflow=may) for may in (True, False))
    for one, other in zip(sorted_, plain, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("first", [True, False])
def test_of_equal_rows_the_last_stay_behind(first: bool) -> None:
    """Enough rows that a sort which is not stable would show: 600 of equal weight go to one rank, 200 of them fit."""
    rank_TK, weights_TK = torch.zeros(600, 2, dtype=torch.int64), torch.full((600, 2), 0.5)
    rank_TK[:, int(first)] = -1
    got = table(rank_TK, weights_TK, 200)
    assert got.source_B[:200].tolist() == list(range(200))
