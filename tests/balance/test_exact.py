"""``balance="exact"``: the plan against a sequential oracle, the split of rows, and what graph-safe mode promises."""

from __future__ import annotations

import random
import re
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

from moe_dispatch import DispatcherConfig, Routing, build_dispatcher
from moe_dispatch.balance import ExactPlacement
from moe_dispatch.capabilities.balance.exact import ExactPlan, ExactPlanner
from moe_dispatch.dispatchers import SlotWeights
from moe_dispatch.dispatchers.requirements import shape_of
from moe_dispatch_testing import allow_host_syncs, refuse_host_syncs
from tests.balance.test_slot_weights import experts
from tests.dispatchers.layer import Group, on_ranks, small_config


def draw(generator: torch.Generator, ranks: int, per_rank: int, rows: int, skew: float) -> Tensor:
    """Random rows of each rank for each expert, (P, E). A large ``skew`` leaves few experts and few ranks with rows."""
    experts = torch.rand(ranks * per_rank, generator=generator).double().pow(skew) + 1e-12
    sources = torch.rand(ranks, generator=generator).double().pow(skew) + 1e-12
    odds = (sources.unsqueeze(1) * experts).flatten()
    drawn = torch.multinomial(odds, rows, replacement=True, generator=generator) if rows else torch.zeros(0).long()
    return torch.bincount(drawn, minlength=len(odds)).view(ranks, -1)


def in_turns(totals: list[int], ranks: int) -> list[list[int]]:
    """Return the rows of each expert on each rank, (E, P), by the greedy pairing of MoonEP and Megatron #7450.

    The rank with the fewest rows is filled up by the rank with the most, and is then done. Of the ranks that a rank
    fills up, the one that takes most is served first, always from the expert with most rows left.
    """
    per_rank, whole = len(totals) // ranks, sum(totals)
    balance = [
        sum(totals[rank * per_rank : (rank + 1) * per_rank]) - whole // ranks - (rank < whole % ranks)
        for rank in range(ranks)
    ]
    quotas = [[0] * ranks for _ in range(ranks)]
    while max(balance) > 0:
        donor, taker = balance.index(max(balance)), balance.index(min(balance))
        quotas[donor][taker] = -balance[taker]
        balance[donor], balance[taker] = balance[donor] + balance[taker], 0
    found = [[total * (rank == expert // per_rank) for rank in range(ranks)] for expert, total in enumerate(totals)]
    for donor, of_donor in enumerate(quotas):
        experts = range(donor * per_rank, (donor + 1) * per_rank)
        while max(of_donor):
            taker = of_donor.index(max(of_donor))
            busiest = max(experts, key=lambda expert: found[expert][donor])
            moved = min(of_donor[taker], found[busiest][donor])
            found[busiest][donor] -= moved
            found[busiest][taker] += moved
            of_donor[taker] -= moved
    return found


def split_in_turns(sources: list[int], takers: list[int], per_node: int) -> list[list[int]]:
    """Split the rows of one expert, rank by rank: to the rank itself, then inside of its node, then to the others."""
    ranks = range(len(sources))
    found, sources, takers = [[0] * len(sources) for _ in ranks], [*sources], [*takers]
    for near in (lambda a, b: a == b, lambda a, b: a // per_node == b // per_node, lambda a, b: True):
        for source in filter(sources.__getitem__, ranks):
            for taker in filter(takers.__getitem__, ranks):
                if near(source, taker):
                    moved = min(sources[source], takers[taker])
                    found[source][taker] += moved
                    sources[source] -= moved
                    takers[taker] -= moved
    assert not any(sources + takers)
    return found


def flows(plan: ExactPlan) -> Tensor:
    """Rows of a rank for each expert by receiving rank, (E, P)."""
    assert plan.ends_EP is not None
    return plan.ends_EP.diff(dim=1, prepend=torch.zeros_like(plan.ends_EP[:, :1]))


def holds(placement: ExactPlacement, ranks: int) -> Tensor:
    held = torch.zeros(placement.num_experts, ranks, dtype=torch.bool)
    for rank, slots in enumerate(placement.read().slots):
        for expert in slots:
            if expert >= 0:
                held[expert, rank] = True
    return held


def shares(rows_EP: Tensor) -> dict[tuple[int, int], list[int]]:
    """Return the rows of the copies on each rank, by home and rank, largest first."""
    experts, ranks = rows_EP.shape
    found: dict[tuple[int, int], list[int]] = {}
    for expert, rank in rows_EP.nonzero().tolist():
        if expert * ranks // experts != rank:
            found.setdefault((expert * ranks // experts, rank), []).append(int(rows_EP[expert, rank]))
    return {pair: sorted(of_pair, reverse=True) for pair, of_pair in found.items()}


def moved(rows_EP: Tensor) -> tuple[int, int]:
    """Return the number of copies, and of the rows that they take over."""
    of_copies = [rows for of_pair in shares(rows_EP).values() for rows in of_pair]
    return len(of_copies), sum(of_copies)


def expect_same(found: ExactPlan, expected: ExactPlan) -> None:
    assert torch.equal(found.placement.copies_PS, expected.placement.copies_PS)
    assert torch.equal(found.experts_L, expected.experts_L)
    assert int(found.num_copies) == int(expected.num_copies)
    if expected.ends_EP is not None:  # else nothing is copied
        assert found.ends_EP is not None
        assert torch.equal(found.ends_EP, expected.ends_EP)
        assert torch.equal(found.slots_EP, expected.slots_EP)


def expect_exact_plan(draws: random.Random, counts_PE: Tensor) -> None:
    """A plan of these counts loses no row, obeys its bound, and keeps rows on their rank or node where it can."""
    ranks, experts = counts_PE.shape
    per_node = draws.choice([size for size in range(1, ranks + 1) if ranks % size == 0])
    bound, pad_multiple = draws.choice([(1.0, 1), (1.0, 1), (1.0, 8), (1.25, 1), (1.25, 8)])
    rank, other = draws.randrange(ranks), draws.randrange(ranks)
    fields: dict[str, Any] = {"bound": bound, "pad_multiple": pad_multiple, "ranks_per_node": per_node}
    planner = ExactPlanner(experts, ranks, rank, spare=experts // ranks, **fields)
    alone_PE = torch.zeros_like(counts_PE)
    alone_PE[rank] = counts_PE.sum(0)  # its rows are those of all sources, and the plan depends on their sum only
    got_EP, plan = flows(planner(alone_PE)), planner(counts_PE)
    expect_same(plan, planner.host_plan(counts_PE))
    of_other = ExactPlanner(experts, ranks, other, spare=experts // ranks, **fields)(counts_PE)
    assert torch.equal(plan.placement.copies_PS, of_other.placement.copies_PS)
    assert torch.equal(got_EP.sum(1), counts_PE.sum(0))
    assert not got_EP[~holds(plan.placement, ranks)].any()
    blocks = (counts_PE.sum(0) + pad_multiple - 1).div(pad_multiple, rounding_mode="floor").sum().item()
    padded_P = (got_EP + pad_multiple - 1).div(pad_multiple, rounding_mode="floor").sum(0) * pad_multiple
    assert padded_P.max() <= torch.tensor(bound * blocks / ranks).ceil() * pad_multiple
    if bound == 1:
        assert padded_P.max() - padded_P.min() <= pad_multiple
        if pad_multiple == 1:
            assert got_EP.tolist() == in_turns(counts_PE.sum(0).tolist(), ranks)
    for each, of_each in ((rank, flows(plan)), (other, flows(of_other))):
        for expert, (sources, takers) in enumerate(zip(counts_PE.t().tolist(), got_EP.tolist(), strict=True)):
            expected = split_in_turns(sources, takers, per_node)[each] if sources[each] else [0] * ranks
            assert of_each[expert].tolist() == expected


@pytest.mark.parametrize(
    ("part", "counts"), [(16, 200), *(pytest.param(part, 3_000, marks=pytest.mark.slow) for part in range(8))]
)
def test_loads_and_rows_are_exact(part: int, counts: int) -> None:
    """1 to 64 ranks, 1 to 32 experts of a rank, no row, one expert, one source."""
    draws, generator = random.Random(part), torch.Generator().manual_seed(part)
    for _ in range(counts):
        ranks, per_rank = (int(2 ** (largest * draws.random() ** 2)) for largest in (6.05, 5.05))
        counts_PE = draw(generator, ranks, per_rank, draws.choice((0, 1, 7, 300, 5000)), draws.choice((0.1, 1.0, 30.0)))
        only, kind = torch.zeros_like(counts_PE), draws.randrange(4)
        if kind == 0:  # one expert
            only[:, draws.randrange(ranks * per_rank)] = counts_PE.sum(1)
        elif kind == 1:  # one source
            only[draws.randrange(ranks)] = counts_PE.sum(0)
        expect_exact_plan(draws, only if kind < 2 else counts_PE)


def skewed(kind: str, ranks: int, per_rank: int, generator: torch.Generator) -> Tensor:
    """Return the rows of all ranks for each expert."""
    experts = ranks * per_rank
    odds = torch.ones(experts, dtype=torch.float64)
    if kind.startswith("zipf"):
        odds /= torch.arange(1, experts + 1)
        if kind == "zipf, shuffled":
            odds = odds[torch.randperm(experts, generator=generator)]
    elif kind == "noise":
        odds *= torch.rand(experts, generator=generator)
    elif kind == "hot rank":
        odds[:per_rank] = 12
    elif kind == "hot expert":
        odds[0] = experts
    elif kind == "halves":  # each expert of a rank is half as large as the one before
        odds *= 2.0 ** -(torch.arange(experts) % per_rank) * (1 + torch.arange(experts) // per_rank)
    elif kind == "uneven ranks":
        odds *= torch.rand(ranks, generator=generator).pow(3).repeat_interleave(per_rank)
    return torch.bincount(torch.multinomial(odds, 64 * experts, True, generator=generator), minlength=experts)


@pytest.mark.parametrize("sizes", [(4, 16), (8, 8), (64, 4)], ids=str)
@pytest.mark.parametrize(
    "kind",
    ["uniform", "noise", "zipf", "zipf, shuffled", "hot rank", "hot expert", "halves", "uneven ranks"],
)
def test_copies_are_as_few_as_those_of_the_greedy_pairing(kind: str, sizes: tuple[int, int]) -> None:
    """Weights of a copy travel, so each one costs time. The closed form of this method makes 1.9 times as many."""
    generator, (ranks, per_rank) = torch.Generator().manual_seed(0), sizes
    planner = ExactPlanner(ranks * per_rank, ranks, 0, spare=per_rank)
    for _ in range(20):
        total = skewed(kind, ranks, per_rank, generator)
        counts_PE = torch.nn.functional.pad(total.unsqueeze(0), (0, 0, 0, ranks - 1))
        got_EP = flows(planner.host_plan(counts_PE))
        copies, rows = moved(got_EP)
        greedy_copies, greedy_rows = moved(torch.tensor(in_turns(total.tolist(), ranks)))
        assert copies <= 1.05 * greedy_copies
        assert rows <= 1.05 * greedy_rows
        loads = got_EP.sum(0)
        assert loads.max() - loads.min() <= 1


def test_with_a_bound_no_more_rows_move_than_it_needs() -> None:
    """Ranks may have 15 rows. Rank 0 has 3 more, and rank 2 has room for 15, of which it fills no more than 3."""
    counts = torch.tensor([[18, 9, 0], [0, 0, 0], [0, 0, 0]])
    plan = ExactPlanner(3, 3, 0, spare=1, bound=5 / 3)(counts)
    assert flows(plan).sum(0).tolist() == [15, 9, 3]


def test_few_slots_keep_the_largest_shares_and_lose_no_row() -> None:
    generator = torch.Generator().manual_seed(0)
    better = 0
    for _ in range(50):
        counts = draw(generator, 4, 8, 4000, 3.0)
        before = counts.sum(0).view(4, 8).sum(1).max()
        planners = [ExactPlanner(32, 4, rank, spare=1) for rank in range(4)]
        plans = [planner.host_plan(counts) for planner in planners]
        expect_same(planners[3](counts), plans[3])
        got = torch.stack([flows(plan) for plan in plans]).sum(0)
        assert torch.equal(got.sum(1), counts.sum(0))
        assert not got[~holds(plans[0].placement, 4)].any()
        assert got.sum(0).max() <= before
        better += int(got.sum(0).max() < before)
    assert better >= 45


def test_with_few_slots_a_rank_takes_an_expert_that_has_rows_left() -> None:
    """Ranks 1 and 2 take 40 rows each. After rank 1, expert 1 has 30 rows left and expert 0 has 50."""
    counts = torch.tensor([[50, 70, 0, 0, 0, 0], [0] * 6, [0] * 6])
    plan = ExactPlanner(6, 3, 0, spare=1)(counts)
    assert plan.placement.copies_PS.tolist() == [[6], [1], [0]]
    assert flows(plan).sum(0).tolist() == [40, 40, 40]


@pytest.mark.parametrize(("spare", "min_rows"), [(1, 0), (8, 13), (1, 13)])
def test_a_busy_rank_takes_no_rows_in_return_for_copies_that_are_not_made(spare: int, min_rows: int) -> None:
    """Rank 0 has many small experts to give, and rank 1 one large expert that would fill the gap."""
    counts = torch.tensor([12] * 8 + [90] + [0] * 15)
    planner = ExactPlanner(24, 3, 0, spare=spare, min_rows=min_rows)
    counts_PE = torch.stack([counts, torch.zeros_like(counts), torch.zeros_like(counts)])
    plan = planner.host_plan(counts_PE)
    if min_rows:
        assert plan.ends_EP is None  # all rows stay at home
        assert plan.left_out == (6 if spare == 8 else 1)
    else:
        assert flows(plan).sum(0).tolist() == [84, 90, 12]
        expect_same(planner(counts_PE), plan)
    held = [expert for expert in plan.placement.copies_PS.flatten().tolist() if expert < 24]
    assert len(held) == (min_rows == 0)


def test_hand_made_plans() -> None:
    """Ties: equal experts and equal ranks are taken in the order of their numbers. Made by hand."""
    plan = ExactPlanner(4, 2, 0, spare=2)(torch.tensor([[4, 4, 0, 0], [4, 4, 0, 0]]))
    assert plan.placement.read().slots == ((0, 1, -1, -1), (2, 3, 0, -1))
    assert flows(plan).tolist() == [[0, 4], [4, 0], [0, 0], [0, 0]]
    # Two ranks with equal excess, and two that lack the same: each donor serves one, in the order of their numbers.
    plan = ExactPlanner(4, 4, 0, spare=1)(torch.tensor([[6, 6, 0, 0], [0, 0, 0, 0], [0, 0, 0, 0], [0, 0, 0, 0]]))
    assert plan.placement.read().slots == ((0, -1), (1, -1), (2, 0), (3, 1))
    assert flows(plan).tolist() == [[3, 0, 3, 0], [0, 3, 0, 3], [0, 0, 0, 0], [0, 0, 0, 0]]
    # Equal ranks and equal experts: nothing is copied, also if the rows come from one rank.
    equal = torch.tensor([[5, 5, 5, 5], [0, 0, 0, 0]])
    plan = ExactPlanner(4, 2, 0, spare=2)(equal)
    assert plan.placement.read().slots == ((0, 1, -1, -1), (2, 3, -1, -1))
    assert flows(plan).tolist() == [[5, 0], [5, 0], [0, 5], [0, 5]]
    # A total that ranks cannot share equally: the first ranks get one row more.
    plan = ExactPlanner(3, 3, 1, spare=1)(torch.tensor([[0, 0, 0], [0, 0, 5], [0, 0, 0]]))
    assert flows(plan).sum(0).tolist() == [2, 2, 1]
    assert plan.placement.read().slots == ((0, 2), (1, 2), (2, -1))
    plan = ExactPlanner(4, 4, 2, spare=1)(torch.tensor([[0, 0, 0, 0], [0, 0, 0, 0], [9, 0, 0, 0], [3, 0, 0, 0]]))
    assert plan.placement.read().slots == ((0, -1), (1, 0), (2, 0), (3, 0))
    assert flows(plan)[0].tolist() == [3, 3, 3, 0]


def test_a_copy_with_few_rows_is_not_made() -> None:
    counts = torch.tensor([[60, 0, 20, 0], [60, 0, 20, 0]])
    plan, is_uneven = ExactPlanner(4, 2, 0, spare=2, min_rows=40).on_host(counts)
    assert not is_uneven
    assert flows(plan)[0].tolist() == [60, 0]
    assert plan.placement.read().slots == ((0, 1, -1, -1), (2, 3, 0, -1))
    for fields in ({"min_rows": 41}, {"min_rows": 41, "pad_multiple": 4}, {"bound": 1.5}):
        nothing, is_uneven = ExactPlanner(4, 2, 0, spare=2, **fields).on_host(counts)
        assert is_uneven == ("min_rows" in fields)
        assert nothing.placement.read().slots == ((0, 1, -1, -1), (2, 3, -1, -1))
        assert nothing.slots_of(torch.tensor([[0, 3], [-1, 2]])).tolist() == [[0, 5], [-1, 4]]


def test_copies_that_were_left_out_are_told(caplog: pytest.LogCaptureFixture) -> None:
    """In eager mode, few rows stay where they are. This is said once, and counted in every dispatch."""

    def body(group: Group) -> tuple[list[int], int]:
        dispatcher = build_dispatcher(small_config(balance="exact", top_k=1), group)
        rows = [dispatcher.dispatch(torch.zeros(400, 16), Routing(ids, torch.ones(400, 1))).rows for ids in routed]
        return [*map(len, rows)], dispatcher.metrics().dispatches_left_uneven

    routed = [torch.zeros(400, 1).long(), torch.zeros(400, 1).long(), (torch.arange(400) % 8).view(400, 1)]
    assert on_ranks(body, 4) == [([1600, 1600, 400], 2), *[([0, 0, 400], 2)] * 3]
    (told,) = (text for text in caplog.messages if "left out" in text)  # others may be of tests before
    assert re.search(
        r"left out 3 copies .* of 1600 rows, .*fewer than balance.min_rows \(512\).* 4\.00 times .*balance.min_rows=0",
        told,
    )


def test_a_dispatch_too_small_for_any_copy_does_not_tell_of_their_number(caplog: pytest.LogCaptureFixture) -> None:
    """No rank has balance.min_rows rows more than the mean, so the copies are never planned."""

    def body(group: Group) -> tuple[int, int]:
        dispatcher = build_dispatcher(small_config(balance="exact", top_k=1), group)
        ids = torch.zeros(64, 1).long()
        return len(dispatcher.dispatch(torch.zeros(64, 16), Routing(ids, torch.ones(64, 1))).rows), (
            dispatcher.metrics().dispatches_left_uneven
        )

    assert on_ranks(body, 2) == [(128, 1), (0, 1)]
    (told,) = (text for text in caplog.messages if "in a dispatch of 128 rows" in text)
    assert re.search(r"made no copy of an expert .*fewer than balance.min_rows \(512\).* 2\.00 times ", told)


def test_the_load_that_is_told_is_that_with_the_copies_that_are_made(caplog: pytest.LogCaptureFixture) -> None:
    """The busiest rank would have 3.08 times the mean rows without any copy. With the two that are made it has 1.08."""

    def body(group: Group) -> tuple[int, int]:
        assert group is not None
        dispatcher = build_dispatcher(small_config(balance="exact", top_k=1, num_experts=4), group)
        ids = torch.tensor([1] * 150 + [3] * 500).view(-1, 1)
        sent = dispatcher.dispatch(torch.zeros(650, 16), Routing(ids, torch.ones(650, 1)))
        return len(sent.rows), dispatcher.metrics().dispatches_left_uneven

    assert on_ranks(body, 4) == [(650, 1), (600, 1), (650, 1), (700, 1)]
    assert not caplog.messages


@pytest.mark.parametrize("pad_multiple", [1, 8])
def test_a_graph_safe_dispatch_never_drops_and_has_one_size(pad_multiple: int) -> None:
    """All tokens to one expert, to the experts of one rank, and at random; ranks with 0 to 12 tokens. No host sync."""
    most = 12
    fields: dict[str, Any] = {"graph_safe": True, "max_tokens_per_rank": most, "pad_multiple": pad_multiple}

    def body(group: Group) -> set[int]:
        with allow_host_syncs():
            dispatcher = build_dispatcher(
                small_config(balance={"name": "exact", "spare_experts_per_rank": 2}, **fields), group
            )
        generator, sizes, loads = random.Random(group.rank()), set(), []
        stacked = [torch.ones(2, 16, 4).requires_grad_(), torch.ones(2, 4, 16).requires_grad_()]
        for step in range(7):
            rows = most if step == 0 else generator.randrange(most + 1)
            ids = torch.rand(rows, 8).argsort(1)[:, :2].contiguous()
            if step < 4:
                ids = torch.tensor([0, 1]).expand(rows, 2).contiguous()
            x = torch.randn(rows, 16).requires_grad_()
            sent = dispatcher.dispatch(x, Routing(ids, torch.rand(rows, 2)))
            sent, outputs = SlotWeights(dispatcher).run(sent, experts, *stacked)
            dispatcher.combine(outputs, sent).sum().backward()
            sizes.add(len(sent.rows))
            loads.append(sent.tokens_per_expert.sum())
        with allow_host_syncs():
            assert not dispatcher.check().overflowed
            assert torch.stack(loads).max() <= max(sizes)
            metrics = dispatcher.metrics(gather=True)
            assert metrics.expert_copies >= 4 * 2  # in the first four steps two ranks hold copies of two experts
            assert metrics.rank_imbalance is not None
            assert metrics.rank_imbalance < 1.5
        return sizes

    with refuse_host_syncs():
        found = on_ranks(body, 4)
    # 4 ranks * 12 tokens * top-2 rows are 96; padded to 8, at most (96 + 8 experts * 7) // 8 = 19 blocks, so 5 a rank.
    assert found == [{24 if pad_multiple == 1 else 40}] * 4


@pytest.mark.parametrize("graph_safe", [False, True])
def test_one_rank_pays_nothing(graph_safe: bool) -> None:
    fields = {"graph_safe": True, "max_tokens_per_rank": 3} if graph_safe else {}
    dispatcher = build_dispatcher(
        small_config("local", balance={"name": "exact", "spare_experts_per_rank": 4}, **fields)
    )
    up = torch.ones(8, 16, 16)
    with refuse_host_syncs() if graph_safe else nullcontext():
        sent = dispatcher.dispatch(torch.ones(3, 16), Routing(torch.zeros(3, 2).long(), torch.ones(3, 2)))
        sent, (given,) = SlotWeights(dispatcher).fetch(sent, up)
    assert given is up
    assert len(sent.tokens_per_expert) == 8
    assert sent.placement is None


def test_slots_that_no_plan_can_use_are_not_made() -> None:
    config = DispatcherConfig(
        num_experts=8, top_k=2, hidden_size=16, balance={"name": "exact", "spare_experts_per_rank": 9}
    )
    assert [config.spare_slots(ranks) for ranks in (1, 2, 4)] == [0, 4, 2]


STATIC: dict[str, Any] = {"graph_safe": True, "max_tokens_per_rank": 12}


@pytest.mark.parametrize(
    ("fields", "promise", "proved"),
    [
        ({"balance": None}, "^$", False),
        (
            {"balance": {"name": "exact", "bound": 1.05, "min_rows": 0}},
            "at most 1.05 times .* for every routing. Nothing",
            True,
        ),
        (STATIC, "at most 1 times the mean rows, rounded up, for every routing", True),
        ({}, "and the rows of copies that were not made .* fewer than balance.min_rows", True),
        (
            {"balance": {"name": "exact", "spare_experts_per_rank": 1}},
            "1 of 2 spare slots finds, which may exceed 1 times the mean",
            False,
        ),
        (
            {**STATIC, "balance": {"name": "exact", "spare_experts_per_rank": 1}},
            "may exceed 1 times .* check.. reports an overflow",
            False,
        ),
        ({"balance": {"name": "least_loaded", "spare_experts_per_rank": 1}}, "'least_loaded' proves no bound", False),
    ],
)
def test_a_config_says_whether_its_bound_is_proved(fields: dict[str, Any], promise: str, proved: bool) -> None:
    config = small_config(**{"balance": "exact", **fields})
    assert config.balance_is_proved(4) == proved
    assert re.search(promise, config.balance_promise(4))
    assert (shape_of(config, 4).planned_rows is not None) == (proved and bool(config.graph_safe))
