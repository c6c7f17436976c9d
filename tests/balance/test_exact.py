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
from moe_dispatch.balance.exact import ExactPlan, ExactPlanner
from moe_dispatch.dispatchers import SlotWeights
from moe_dispatch.dispatchers.requirements import shape_of
from moe_dispatch.errors import ConfigError
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
    """Return the rows of each expert on each rank, (E, P), by the alias method in turns, as MoonEP plans.

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


def expect_loads_in_turns(got_EP: Tensor, ranks: int) -> None:
    """The loads are those of the alias method in turns, and neither needs more slots than a rank has experts."""
    wanted_EP = torch.tensor(in_turns(got_EP.sum(1).tolist(), ranks))
    assert torch.equal(got_EP.sum(0), wanted_EP.sum(0))
    for rows_EP in (got_EP, wanted_EP):
        takers = [taker for (_, taker), of_pair in shares(rows_EP).items() for _ in of_pair]
        assert max(map(takers.count, takers), default=0) <= len(rows_EP) // ranks


CASES = [(ranks, per_rank) for ranks in (1, 2, 3, 4, 8) for per_rank in (1, 2, 5, 32) if ranks * per_rank <= 64]


@pytest.mark.parametrize(("ranks", "per_rank"), CASES)
def test_loads_and_rows_are_exact(ranks: int, per_rank: int) -> None:
    generator = torch.Generator().manual_seed(ranks * 100 + per_rank)
    for rows in (0, 1, 7, 300, 5000):
        for skew in (0.1, 1.0, 30.0):
            for bound, pad_multiple in ((1.0, 1), (1.0, 8), (1.25, 1), (1.25, 8)):
                counts = draw(generator, ranks, per_rank, rows, skew)
                planners = (
                    ExactPlanner(ranks * per_rank, ranks, rank, spare=per_rank, bound=bound, pad_multiple=pad_multiple)
                    for rank in range(ranks)
                )
                plans = [planner(counts) for planner in planners]
                by_source = torch.stack([flows(plan) for plan in plans])  # (P, E, P)
                assert all(torch.equal(plan.placement.copies_PS, plans[0].placement.copies_PS) for plan in plans)
                assert torch.equal(by_source.sum(2), counts)
                assert by_source.min() >= 0
                assert not by_source.sum(0)[~holds(plans[0].placement, ranks)].any()
                got = by_source.sum(0)
                own = torch.minimum(counts.t(), got)  # rows that may stay where they are do so
                assert all(torch.equal(by_source[rank, :, rank], own[:, rank]) for rank in range(ranks))
                blocks = (counts.sum(0) + pad_multiple - 1).div(pad_multiple, rounding_mode="floor").sum().item()
                padded = (got + pad_multiple - 1).div(pad_multiple, rounding_mode="floor").sum(0) * pad_multiple
                assert padded.max() <= torch.tensor(bound * blocks / ranks).ceil() * pad_multiple
                if bound == 1:
                    assert padded.max() - padded.min() <= pad_multiple
                if bound == 1 and pad_multiple == 1:
                    expect_loads_in_turns(got, ranks)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(16))
def test_loads_slots_and_flows_of_random_counts_are_exact(part: int) -> None:
    """100,000 counts: 1 to 64 ranks, 1 to 32 experts of a rank, no row, one expert, one source."""
    draws, generator = random.Random(part), torch.Generator().manual_seed(part)
    seen = set()
    for _ in range(6_250):
        ranks, per_rank = (int(2 ** (largest * draws.random() ** 2)) for largest in (6.05, 5.05))
        per_node = draws.choice([size for size in range(1, ranks + 1) if ranks % size == 0])
        rank, rows, kind = draws.randrange(ranks), draws.choice((0, 1, 7, 60, 500)), draws.randrange(4)
        counts_PE = draw(generator, ranks, per_rank, rows, draws.choice((0.1, 1.0, 30.0)))
        if kind == 0:  # one expert
            only = torch.zeros_like(counts_PE)
            only[:, draws.randrange(ranks * per_rank)] = counts_PE.sum(1)
            counts_PE = only
        elif kind == 1:  # one source
            only = torch.zeros_like(counts_PE)
            only[rank] = counts_PE.sum(0)
            counts_PE = only
        planner = ExactPlanner(ranks * per_rank, ranks, rank, spare=per_rank, ranks_per_node=per_node)
        alone = torch.zeros_like(counts_PE)
        alone[rank] = counts_PE.sum(0)  # its rows are those of all sources, and the plan depends on their sum only
        got_EP, plan = flows(planner(alone)), planner(counts_PE)
        assert torch.equal(got_EP > 0, (got_EP > 0) & holds(plan.placement, ranks))
        expect_loads_in_turns(got_EP, ranks)
        mine_EP, both = flows(plan), zip(counts_PE.t().tolist(), got_EP.tolist(), strict=True)
        for expert, (sources, takers) in enumerate(both):
            if sources[rank]:
                assert mine_EP[expert].tolist() == split_in_turns(sources, takers, per_node)[rank]
            else:
                assert not mine_EP[expert].any()
        seen |= {("ranks", ranks), ("experts", per_rank), ("rows", rows), ("kind", kind)}
    assert {("ranks", 1), ("ranks", 64), ("experts", 1), ("experts", 32), ("rows", 0), ("kind", 0), ("kind", 1)} <= seen


def test_few_slots_keep_the_largest_shares_and_lose_no_row() -> None:
    generator = torch.Generator().manual_seed(0)
    better = 0
    for _ in range(50):
        counts = draw(generator, 4, 8, 4000, 3.0)
        before = counts.sum(0).view(4, 8).sum(1).max()
        plans = [ExactPlanner(32, 4, rank, spare=1)(counts) for rank in range(4)]
        got = torch.stack([flows(plan) for plan in plans]).sum(0)
        assert torch.equal(got.sum(1), counts.sum(0))
        assert not got[~holds(plans[0].placement, 4)].any()
        assert got.sum(0).max() <= before
        better += int(got.sum(0).max() < before)
    assert better >= 45


def test_with_few_slots_a_rank_takes_an_expert_that_has_rows_left() -> None:
    """Rank 1 would take 10 rows of expert 0 and 30 of expert 1, of which nothing is left. It has one slot."""
    counts = torch.tensor([[50, 70, 0, 0, 0, 0], [0] * 6, [0] * 6])
    plan = ExactPlanner(6, 3, 0, spare=1)(counts)
    assert plan.placement.copies_PS.tolist() == [[6], [0], [1]]
    assert flows(plan).sum(0).tolist() == [40, 40, 40]


@pytest.mark.parametrize(("spare", "min_rows"), [(1, 0), (8, 13), (1, 13)])
def test_a_busy_rank_takes_no_rows_in_return_for_copies_that_are_not_made(spare: int, min_rows: int) -> None:
    """Rank 0 has many small experts to give, and rank 1 one large expert that would fill the gap."""
    counts = torch.tensor([12] * 8 + [90] + [0] * 15)
    planner = ExactPlanner(24, 3, 0, spare=spare, min_rows=min_rows)
    plan = planner(torch.stack([counts, torch.zeros_like(counts), torch.zeros_like(counts)]))
    loads = flows(plan).sum(0).tolist()
    assert loads == ([84, 90, 12] if min_rows == 0 else [96, 90, 0])
    held = [expert for expert in plan.placement.copies_PS.flatten().tolist() if expert < 24]
    assert len(held) == (min_rows == 0)


def test_hand_made_plans() -> None:
    """Ties: equal experts and equal ranks are taken in the order of their numbers. Made by hand."""
    plan = ExactPlanner(4, 2, 0, spare=2)(torch.tensor([[4, 4, 0, 0], [4, 4, 0, 0]]))
    assert plan.placement.read().slots == ((0, 1, -1, -1), (2, 3, 1, -1))
    assert flows(plan).tolist() == [[4, 0], [0, 4], [0, 0], [0, 0]]
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


@pytest.mark.parametrize(
    ("totals", "moved", "slots"),
    [
        # Two equally busy ranks and two without rows.
        ([4, 4, 4, 4, 0, 0, 0, 0], {(0, 2): 4, (1, 3): 4}, [0, 0, 1, 1]),
        # Three equally busy ranks and one without rows: each busy rank gives, and two of them also take.
        ([4] * 9 + [0] * 3, {(0, 3): 9, (1, 0): 6, (2, 1): 3}, [2, 1, 0, 3]),
    ],
    ids=["rank_ties", "ties"],
)
def test_tables_of_megatron_agree_between_ranks(
    totals: list[int], moved: dict[tuple[int, int], int], slots: list[int]
) -> None:
    """The two hand-computed tables in the tests of Megatron-LM #7450: rows between ranks, and slots in use.

    Of experts with equally many rows it moves others than we do, so the experts are not compared.
    """
    per_rank = len(totals) // 4
    counts = torch.zeros(4, len(totals), dtype=torch.int64)
    counts[0] = torch.tensor(totals)
    planner = ExactPlanner(len(totals), 4, 0, spare=per_rank)
    copies = planner(counts).placement.copies_PS
    by_rank = sum(flows(ExactPlanner(len(totals), 4, rank, spare=per_rank)(counts)) for rank in range(4))
    assert isinstance(by_rank, Tensor)
    between = by_rank.view(4, per_rank, 4).sum(1)
    assert {(a, b): n for a, row in enumerate(between.tolist()) for b, n in enumerate(row) if n and a != b} == moved
    assert (copies < len(totals)).sum(1).tolist() == slots
    assert shares(by_rank) == shares(torch.tensor(in_turns(totals, 4)))


@pytest.mark.parametrize("per_node", [1, 2, 4])
def test_rows_stay_on_their_node_if_they_can(per_node: int) -> None:
    generator = torch.Generator().manual_seed(per_node)
    for _ in range(30):
        counts = draw(generator, 8, 2, 2000, 2.0)
        plans = [ExactPlanner(16, 8, rank, spare=2, ranks_per_node=per_node)(counts) for rank in range(8)]
        by_source = torch.stack([flows(plan) for plan in plans])
        nodes = torch.arange(8) // per_node
        inside = (by_source * (nodes.view(8, 1, 1) == nodes)).sum((0, 2))
        sent = counts.view(8 // per_node, per_node, 16).sum(1)
        taken = by_source.sum(0).t().view(8 // per_node, per_node, 16).sum(1)
        assert torch.equal(inside, torch.minimum(sent, taken).sum(0))


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
    (told,) = caplog.messages
    assert re.search(
        r"left out 3 copies .* of 1600 rows, .*fewer than balance_min_rows \(512\).* 4\.00 times .*balance_min_rows=0",
        told,
    )


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
            dispatcher = build_dispatcher(small_config(balance="exact", spare_experts_per_rank=2, **fields), group)
        generator, sizes, loads = random.Random(group.rank()), set(), []
        stacked = [torch.ones(2, 16, 4).requires_grad_(), torch.ones(2, 4, 16).requires_grad_()]
        for step in range(12):
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
    dispatcher = build_dispatcher(small_config("local", balance="exact", spare_experts_per_rank=4, **fields))
    up = torch.ones(8, 16, 16)
    with refuse_host_syncs() if graph_safe else nullcontext():
        sent = dispatcher.dispatch(torch.ones(3, 16), Routing(torch.zeros(3, 2).long(), torch.ones(3, 2)))
        sent, (given,) = SlotWeights(dispatcher).fetch(sent, up)
    assert given is up
    assert len(sent.tokens_per_expert) == 8
    assert sent.placement is None


def test_slots_that_no_plan_can_use_are_not_made() -> None:
    config = DispatcherConfig(num_experts=8, top_k=2, hidden_size=16, balance="exact", spare_experts_per_rank=9)
    assert [config.spare_slots(ranks) for ranks in (1, 2, 4)] == [0, 4, 2]


STATIC: dict[str, Any] = {"graph_safe": True, "max_tokens_per_rank": 12}


@pytest.mark.parametrize(
    ("fields", "promise", "proved"),
    [
        ({"balance": None}, "", False),
        (
            {"balance_min_rows": 0, "balance_bound": 1.05},
            "The busiest rank has at most 1.05 times the mean rows, rounded up, for every routing. Nothing overflows.",
            True,
        ),
        (STATIC, "The busiest rank has at most 1 times the mean rows, rounded up, for every routing.", True),
        ({}, "and the rows of copies that were not made because they had fewer than balance_min_rows", True),
        (
            {"spare_experts_per_rank": 1},
            "a plan with 1 of 2 spare slots finds, which may exceed 1 times the mean rows.",
            False,
        ),
        (
            {**STATIC, "spare_experts_per_rank": 1},
            "may exceed 1 times the mean rows. check() reports an overflow",
            False,
        ),
        (
            {"balance": "least_loaded", "spare_experts_per_rank": 1},
            "Planner 'least_loaded' proves no bound for the busiest rank.",
            False,
        ),
    ],
)
def test_a_config_says_whether_its_bound_is_proved(fields: dict[str, Any], promise: str, proved: bool) -> None:
    config = small_config(**{"balance": "exact", **fields})
    assert config.balance_is_proved(4) == proved
    assert promise in config.balance_promise(4)
    assert bool(promise) == bool(config.balance_promise(4))
    assert (shape_of(config, 4).planned_rows is not None) == (proved and config.graph_safe)


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        (
            {"balance_bound": 1.1},
            r"balance_bound and balance_min_rows are settings of balance=\"exact\", got balance=None",
        ),
        (
            {
                "balance": "exact",
                "spare_experts_per_rank": 1,
                "graph_safe": True,
                "max_tokens_per_rank": 4,
                "balance_min_rows": 8,
            },
            r"balance_min_rows needs graph_safe=False: without a copy",
        ),
    ],
)
def test_configs_that_cannot_work_are_refused(fields: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        DispatcherConfig(num_experts=8, top_k=2, hidden_size=16, **fields)
