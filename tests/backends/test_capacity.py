"""Sizes of graph-safe buffers against counting by hand: enough for every routing, and not a row more."""

from __future__ import annotations

import itertools

import pytest

from moe_dispatch.backends import MoEShape
from moe_dispatch.backends.capacity import balanced_pair_rows, balanced_rows, capacity_of, grown, sized, worst_rows
from moe_dispatch.permutation import round_up


def shape(experts: int, ranks: int, top_k: int, tokens: int, pad_multiple: int = 1, factor: float = 0) -> MoEShape:
    return MoEShape(
        num_experts=experts,
        top_k=top_k,
        hidden_size=8,
        ep_size=ranks,
        pad_multiple=pad_multiple,
        max_tokens_per_rank=tokens,
        graph_safe=True,
        capacity_factor=factor or "worst",
    )


@pytest.mark.parametrize("pad_multiple", [1, 2, 3, 4])
@pytest.mark.parametrize("local", [1, 2, 3])
def test_buffer_rows_are_enough_and_tight(local: int, pad_multiple: int) -> None:
    """Every way to put up to so many rows into L groups, each padded; the largest fills the buffer."""
    for rows in range(1, 8):
        ways = (counts for counts in itertools.product(range(rows + 1), repeat=local) if sum(counts) <= rows)
        most = max(sum(round_up(count, pad_multiple) for count in counts) for counts in ways)
        assert sized(shape(local, 1, 1, 8, pad_multiple), rows, None).buffer_rows == most


SMALL = [(4, 2, 1), (4, 2, 2), (4, 2, 3), (4, 4, 2), (6, 2, 4), (6, 3, 2), (5, 1, 2), (8, 2, 3)]


@pytest.mark.parametrize(("experts", "ranks", "top_k"), SMALL)
def test_balanced_numbers_by_enumeration(experts: int, ranks: int, top_k: int) -> None:
    """All choices of K experts alike: rows that a pair exchanges, and rows that a rank's experts take."""
    local, tokens = experts // ranks, 7
    choices = list(itertools.combinations(range(experts), top_k))
    here = [sum(expert < local for expert in chosen) for chosen in choices]
    mine = shape(experts, ranks, top_k, tokens)
    assert balanced_pair_rows(mine) == pytest.approx(tokens * sum(map(bool, here)) / len(choices))
    assert balanced_rows(mine) == pytest.approx(ranks * tokens * sum(here) / len(choices))


@pytest.mark.parametrize(("experts", "ranks", "top_k"), SMALL)
def test_the_worst_case_is_reached_and_never_exceeded(experts: int, ranks: int, top_k: int) -> None:
    """One token a rank; each may choose up to K experts, all ranks alike at worst."""
    local = experts // ranks
    choices = [chosen for size in range(top_k + 1) for chosen in itertools.combinations(range(experts), size)]
    most = max(ranks * sum(expert < local for expert in chosen) for chosen in choices)
    mine = shape(experts, ranks, top_k, 1)
    assert worst_rows(mine) == most
    assert capacity_of(mine).rows == most
    assert capacity_of(mine, pair_factor="worst").pair_rows == 1
    assert capacity_of(mine).pair_rows is None


@pytest.mark.parametrize(
    ("factor", "rows"), [(1, 20), (1.01, 21), (1.25, 25), (0.01, 1), (1e-9, 1), (3.99, 40), (4, 40), (1024, 40)]
)
def test_capacity_factor_is_over_the_balanced_load(factor: float, rows: int) -> None:
    """Tmax 10, K 2: 20 rows balanced, 40 at worst on two ranks."""
    assert capacity_of(shape(8, 2, 2, 10, factor=factor)).rows == rows


@pytest.mark.parametrize(("factor", "rows"), [(1, 8), (1.2, 10), (1.27, 10), (0.5, 4), (1e-9, 1), (1024, 10)])
def test_pair_rows_are_over_the_expected_distinct_rows(factor: float, rows: int) -> None:
    """8 experts, 4 here, K 2: of 28 pairs 6 lie elsewhere, so 10 * 22/28 = 7.86 of 10 rows are expected.

    Two ranks can then send two slots of each.
    """
    capacity = capacity_of(shape(8, 2, 2, 10), pair_factor=factor)
    assert (capacity.pair_rows, capacity.rows) == (rows, 2 * 2 * rows)


@pytest.mark.parametrize(
    ("before", "rows", "pair_rows", "headroom", "wanted"),
    [
        ((4, 2), 4, 2, 8, (4, 2)),  # nothing was short
        ((4, 2), 5, 2, 1, (5, 2)),
        ((4, 2), 5, 3, 1.5, (8, 5)),
        ((4, 2), 5, 3, 100, (40, 10)),  # never beyond the worst case
        ((4, 2), 1, 3, 1, (4, 3)),  # never less
        ((4, None), 5, 0, 1, (5, None)),
        ((12, 3), 20, 5, 1, (20, 5)),  # only pairs bounded the rows: 2 * 2 of each, and so they do afterwards
        ((12, 3), 12, 3, 1, (12, 3)),
        ((11, 3), 20, 5, 1, (20, 5)),  # rows had a bound of their own, and grow by what was needed
        ((11, 3), 14, 4, 1, (14, 4)),
    ],
)
def test_grown(
    before: tuple[int, int | None], rows: int, pair_rows: int, headroom: float, wanted: tuple[int, int | None]
) -> None:
    mine = shape(8, 2, 2, 10)
    after = grown(mine, sized(mine, *before), rows=rows, pair_rows=pair_rows, headroom=headroom)
    assert (after.rows, after.pair_rows) == wanted
