"""Planners: balance, limits, equal sizes, and planners that cannot be used."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from moe_dispatch.balance import (
    ExpertPlacement,
    eplb,
    expected_rows,
    known_planners,
    least_loaded,
    run_planner,
)
from moe_dispatch.errors import ConfigError


def zipf(num_experts: int, exponent: float, seed: int) -> Tensor:
    """Rows of each expert, int64 (E,), in random order."""
    shares = 1 / torch.arange(1, num_experts + 1, dtype=torch.float64) ** exponent
    order = torch.randperm(num_experts, generator=torch.Generator().manual_seed(seed))
    return (shares[order] / shares.sum() * 1e6).round().long()


def busiest_over_mean(counts: Tensor, placement: ExpertPlacement, ranks_per_node: int) -> float:
    rows = expected_rows(counts, placement, ranks_per_node=ranks_per_node)
    return float(rows.max() / rows.mean())


def test_expected_rows_follow_every_row() -> None:
    """The closed form against a walk over all rows: own copy, else copies on the node, else all copies, in turns."""
    placement = ExpertPlacement(4, ((0, 1, 2), (2, 0, -1), (3, 0, -1), (1, -1, -1)))
    counts = torch.tensor([[12, 6, 0, 6], [0, 12, 6, 0], [6, 6, 12, 0], [12, 0, 0, 18]])
    rows = torch.zeros(4, dtype=torch.float64)
    for source, of_rank in enumerate(counts.tolist()):
        for expert, count in enumerate(of_rank):
            holders = [rank for rank, slots in enumerate(placement.slots) if expert in slots]
            near = [rank for rank in holders if rank // 2 == source // 2]
            chosen = [source] if source in holders else near or holders
            for row in range(count):
                rows[chosen[row % len(chosen)]] += 1
    torch.testing.assert_close(expected_rows(counts, placement, ranks_per_node=2), rows)


@pytest.mark.parametrize(("num_ranks", "num_experts", "seed"), [(4, 64, 0), (8, 64, 1), (16, 128, 2), (64, 256, 0)])
def test_eplb_balances_zipf_loads(num_ranks: int, num_experts: int, seed: int) -> None:
    counts, home = zipf(num_experts, 1.0, seed), ExpertPlacement.contiguous(num_experts, num_ranks, spare=1)
    found = eplb(counts, home, ranks_per_node=num_ranks)
    assert busiest_over_mean(counts, found, num_ranks) < 1.03 < busiest_over_mean(counts, home, num_ranks)


@pytest.mark.parametrize(
    ("num_ranks", "num_experts", "bound"), [(4, 64, 1.05), (8, 64, 1.2), (16, 128, 1.05), (64, 256, 1.2)]
)
def test_least_loaded_reaches_its_bound_with_few_copies(num_ranks: int, num_experts: int, bound: float) -> None:
    counts, home = zipf(num_experts, 1.0, 0), ExpertPlacement.contiguous(num_experts, num_ranks, spare=2)
    found = least_loaded(counts, home, ranks_per_node=num_ranks, bound=bound)
    assert busiest_over_mean(counts, found, num_ranks) <= bound
    stays = sum(
        expert in new for new, old in zip(found.slots, home.slots, strict=True) for expert in old if expert >= 0
    )
    assert stays > 0.8 * num_experts


@pytest.mark.parametrize("seed", range(6))
def test_least_loaded_makes_no_copy_that_it_can_do_without(seed: int) -> None:
    counts, home = zipf(16, 0.5, seed), ExpertPlacement.contiguous(16, 8, spare=1)
    found = least_loaded(counts, home, ranks_per_node=8)
    limit = max(1.05, busiest_over_mean(counts, found, 8))
    for rank, slots in enumerate(found.slots):
        for expert in set(slots) - set(home.slots[rank]):
            if len(found.slots_of_expert[expert]) > 1:
                fewer = tuple(-1 if expert == held else held for held in slots)
                without = ExpertPlacement(16, (*found.slots[:rank], fewer, *found.slots[rank + 1 :]))
                assert busiest_over_mean(counts, without, 8) > limit


@pytest.mark.parametrize("planner", [eplb, least_loaded])
@pytest.mark.parametrize("exponent", [0.0, 1.0])
@pytest.mark.parametrize(
    ("num_ranks", "num_local", "spare"),
    [(4, 1, 2), (4, 4, 1), (4, 16, 0), (4, 16, 2), (16, 1, 1), (16, 4, 0), (16, 16, 2), (64, 1, 0), (64, 4, 2)],
)
def test_no_plan_is_worse_than_none_if_few_ranks_have_rows(
    num_ranks: int, num_local: int, spare: int, exponent: float, planner: Any
) -> None:
    """A rank sends rows to its own copies, so copies on the ranks that have rows get more than an even share."""
    home, on_node = ExpertPlacement.contiguous(num_ranks * num_local, num_ranks, spare=spare), min(num_ranks, 8)
    few = zipf(home.num_experts, exponent, 0) // 10 + torch.arange(home.num_experts) % 7
    counts = torch.zeros(num_ranks, home.num_experts, dtype=torch.int64)
    counts[: max(1, num_ranks // 8)] = few
    found = planner(counts, home, ranks_per_node=on_node)
    before = busiest_over_mean(counts, home, on_node)
    assert busiest_over_mean(counts, found, on_node) <= before
    if exponent and num_ranks == 4 and num_local > 1 and spare:
        assert busiest_over_mean(counts, found, on_node) < 1.1 < before


def test_experts_that_may_stay_at_home_do() -> None:
    home = ExpertPlacement.contiguous(8, 4, spare=1)
    for counts in (torch.full((8,), 5), torch.zeros(8, dtype=torch.int64), torch.zeros(4, 8)):
        assert least_loaded(counts, home, ranks_per_node=4) == home
    home, counts = ExpertPlacement.contiguous(16, 4, spare=2), torch.zeros(4, 16, dtype=torch.int64)
    counts[0] = 5
    assert eplb(counts, home, ranks_per_node=2, num_groups=4) == home  # groups would be worse
    found = least_loaded(
        torch.tensor([90, 1, 1, 1, 1, 1, 1, 1]), ExpertPlacement.contiguous(8, 2, spare=2), ranks_per_node=2
    )
    assert found.slots == ((0, 1, 2, 3, -1, -1), (4, 5, 6, 7, 0, -1))  # all others keep their slots
    for home in (ExpertPlacement.contiguous(4, 1), ExpertPlacement.contiguous(4, 2)):  # one rank; no spare slot
        for planner in (eplb, least_loaded):
            placed = planner(torch.tensor([9, 9, 1, 1]), home, ranks_per_node=1)
            assert sorted(expert for of_rank in placed.slots for expert in of_rank) == [0, 1, 2, 3]


def test_experts_of_a_group_stay_on_a_node() -> None:
    home = ExpertPlacement.contiguous(16, 4, spare=1)
    found = eplb(zipf(16, 1.0, 0), home, ranks_per_node=2, num_groups=4)
    for node in (0, 1):
        held = {expert for of_rank in found.slots[2 * node : 2 * node + 2] for expert in of_rank if expert >= 0}
        assert {expert // 4 * 4 + i for expert in held for i in range(4)} == held


COUNTS: list[tuple[Tensor, dict[str, Any], str]] = [
    (torch.ones(3), {}, r"counts must have shape \(2, 4\) or \(4,\), got \(3,\)"),
    (torch.ones(4, 2), {}, r"got \(4, 2\)"),
    (torch.tensor([1.0, -1.0, 0.0, 0.0]), {}, r"finite and at least 0, got -1\.0 to 1\.0"),
    (torch.tensor([1.0, float("nan"), 0.0, 0.0]), {}, r"finite and at least 0"),
    (torch.ones(4), {"ranks_per_node": 3}, r"ranks_per_node must divide the number of ranks \(2\), got 3"),
]


@pytest.mark.parametrize(
    ("planner", "counts", "options", "told"),
    [
        *((planner, *row) for planner in (eplb, least_loaded) for row in COUNTS),
        (least_loaded, torch.ones(4), {"bound": 0.9}, r"bound must be at least 1, got 0\.9"),
        (eplb, torch.ones(4), {"num_groups": 3}, r"num_groups must divide the number of experts \(4\), got 3"),
    ],
)
def test_counts_and_options_that_do_not_fit_are_refused(planner: Any, counts: Tensor, options: Any, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        planner(counts, ExpertPlacement.contiguous(4, 2), **{"ranks_per_node": 2, **options})


def _raises(counts: Tensor, home: ExpertPlacement, *, ranks_per_node: int) -> ExpertPlacement:
    raise IndexError("list index out of range")


def __getattr__(name: str) -> None:
    if name == "ends_the_program":  # as an entry point whose import does
        raise SystemExit(2)
    raise AttributeError(name)


def _none(counts: Tensor, home: ExpertPlacement, *, ranks_per_node: int) -> None:
    return None


def _too_large(counts: Tensor, home: ExpertPlacement, *, ranks_per_node: int) -> ExpertPlacement:
    return ExpertPlacement.contiguous(home.num_experts, home.num_ranks, spare=5)


@pytest.mark.parametrize(
    ("function", "told"),
    [
        ("_raises", r"Planner 'other' must return a placement, but it raised IndexError: list index out of range"),
        ("_none", r"Planner 'other' must return an ExpertPlacement, got NoneType"),
        ("_too_large", r"must return a placement of .* with 2 slots each, got one of .* with 7 slots each"),
        ("ends_the_program", r"Planner 'other' cannot be used here: its import raised SystemExit: 2"),
        ("_missing", r"Planner 'other' cannot be used here: its import raised AttributeError"),
    ],
)
def test_planners_of_other_packages(install_planner: Callable[[str], None], function: str, told: str) -> None:
    install_planner(f"{__name__}:{function}")
    assert known_planners() == ["eplb", "exact", "least_loaded", "other"]
    with pytest.raises(ConfigError, match=told):
        run_planner("other", torch.ones(4), ExpertPlacement.contiguous(4, 2), ranks_per_node=2)


def test_unknown_planner() -> None:
    home = ExpertPlacement.contiguous(4, 2, spare=1)
    with pytest.raises(ConfigError, match=r"Unknown planner 'eplp'\. Known planners: .*\. Did you mean 'eplb'\?"):
        run_planner("eplp", torch.ones(4), home, ranks_per_node=2)
    assert run_planner("eplb", torch.ones(4), home, ranks_per_node=2).num_slots == 6
