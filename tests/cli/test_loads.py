"""Statistics of random routings against closed forms, simulations, and their own promises."""

from __future__ import annotations

import math
from functools import cache

import pytest
import torch
from torch import Tensor

from moe_dispatch.backends import MoEShape
from moe_dispatch.backends.capacity import Capacity
from moe_dispatch.cli.loads import Loads, Range, expected_loads, known_loads
from moe_dispatch.cli.picks import block_picks, draw_ids, popularity
from moe_dispatch.cli.tails import above, any_above, largest, padding_odds, sum_range

RANKS, NODES, TOKENS, PAD = 4, 2, 60, 16
# Experts, top_k, exponent.
KINDS = [(16, 4, 0.0), (16, 4, 1.2), (32, 2, 0.7), (8, 8, 1.0)]


def shape(num_experts: int, top_k: int) -> MoEShape:
    return MoEShape(
        num_experts=num_experts,
        top_k=top_k,
        hidden_size=8,
        ep_size=RANKS,
        pad_multiple=PAD,
        ranks_per_node=RANKS // NODES,
    )


def drawn(odds_E: Tensor, top_k: int, generator: torch.Generator) -> list[Tensor]:
    """Ids of each rank, by torch's own draws without replacement."""
    return list(torch.multinomial(odds_E.expand(RANKS * TOKENS, -1), top_k, generator=generator).split(TOKENS))


@cache
def simulated(num_experts: int, top_k: int, exponent: float, runs: int = 300) -> tuple[Loads, list[Loads]]:
    odds, generator = popularity(num_experts, exponent, 0), torch.Generator().manual_seed(1)
    of = shape(num_experts, top_k)
    known = [known_loads(drawn(odds, top_k, generator), of) for _ in range(runs)]
    return expected_loads(odds, TOKENS, of), known


def ranges(loads: Loads) -> dict[str, Range]:
    return {"received": loads.received, "padding": loads.padding, **loads.exchanged}


@pytest.mark.parametrize(
    ("num_experts", "top_k", "blocks"), [(8, 2, 4), (64, 8, 8), (64, 8, 64), (12, 12, 3), (64, 1, 8), (16, 4, 1)]
)
def test_equal_odds_are_hypergeometric(num_experts: int, top_k: int, blocks: int) -> None:
    found, inside = block_picks(popularity(num_experts, 0, 0), top_k, blocks), num_experts // blocks
    wanted = [
        math.comb(inside, count) * math.comb(num_experts - inside, top_k - count) / math.comb(num_experts, top_k)
        for count in range(top_k + 1)
    ]
    torch.testing.assert_close(
        found, torch.tensor(wanted, dtype=torch.float64).expand(blocks, -1), rtol=1e-3, atol=2e-6
    )
    assert ((found == 0) == (torch.tensor(wanted) == 0)).all()  # what cannot be is not merely rare


def test_three_experts_by_hand() -> None:
    """First a, then b, has odds a * b / (1 - a): all ways to name two of three experts."""
    a, b, c = odds = popularity(3, 1.0, 5).tolist()
    pair = {frozenset(two): 0.0 for two in ((0, 1), (0, 2), (1, 2))}
    for first in range(3):
        for second in {0, 1, 2} - {first}:
            pair[frozenset((first, second))] += odds[first] * odds[second] / (1 - odds[first])
    named = block_picks(torch.tensor([a, b, c], dtype=torch.float64), 2, 3)[:, 1]
    wanted = [sum(chance for two, chance in pair.items() if expert in two) for expert in range(3)]
    torch.testing.assert_close(named, torch.tensor(wanted, dtype=torch.float64), rtol=1e-5, atol=0)


def test_both_ways_of_drawing_agree() -> None:
    odds = popularity(8, 1.5, 0)
    by_clocks = draw_ids(odds, 3, 40_000, 0).flatten().bincount(minlength=8) / 40_000
    torch.testing.assert_close(by_clocks.double(), block_picks(odds, 3, 8)[:, 1], rtol=0, atol=0.012)


@pytest.mark.parametrize(("num_experts", "top_k", "exponent"), KINDS)
def test_expectations_are_means(num_experts: int, top_k: int, exponent: float) -> None:
    expected, known = simulated(num_experts, top_k, exponent)
    for name, of in ranges(expected).items():
        values = torch.stack([ranges(one)[name].expected for one in known])
        noise = 5 * values.std(0) / math.sqrt(len(known)) + 1e-6
        assert ((values.mean(0) - of.expected).abs() <= noise).all(), name
    for kind in ("between_nodes", "once_per_node"):
        for name, mean in getattr(expected, kind).items():
            values = torch.stack([getattr(one, kind)[name] for one in known])
            assert ((values.mean(0) - mean).abs() <= 5 * values.std(0) / math.sqrt(len(known)) + 1e-6).all(), name


@pytest.mark.parametrize(("num_experts", "top_k", "exponent"), KINDS)
def test_ranges_hold_and_are_no_wider_than_they_must(num_experts: int, top_k: int, exponent: float) -> None:
    """Left by at most 1 in 1000 runs, and not trivially kept: some ten standard deviations wide."""
    expected, known = simulated(num_experts, top_k, exponent)
    for name, of in ranges(expected).items():
        values = torch.stack([ranges(one)[name].expected for one in known])
        left = ((values < of.low) | (values > of.high)).any(1).sum()
        assert left <= 2, f"{name}: {left} of {len(known)}"
        room = (of.high - of.low) - 12 * values.std(0)
        # Besides, whole numbers, and what Bernstein's inequality asks for single large terms.
        assert (
            room <= 2 + 7 * (PAD if name == "padding" else min(top_k, num_experts // RANKS, RANKS - 1) + 1)
        ).all(), name


@pytest.mark.parametrize(("num_experts", "top_k", "exponent"), KINDS)
def test_the_busiest(num_experts: int, top_k: int, exponent: float) -> None:
    expected, known = simulated(num_experts, top_k, exponent)
    for name in ("busiest_rank", "busiest_expert"):
        of: Range = getattr(expected, name)
        values = torch.cat([getattr(one, name).expected for one in known])
        assert of.low <= values.min()
        assert values.max() <= of.high
        assert abs(float(values.median() - of.expected)) <= 0.35 * float(values.std()) + 1
        assert of.high - of.low <= 10 * float(values.std()) + 2


@pytest.mark.parametrize(("num_experts", "top_k", "exponent"), KINDS[:3])
@pytest.mark.parametrize("rows", [1.0, 1.08, 1.15, 1.3])
def test_overflows_are_as_frequent_as_said(num_experts: int, top_k: int, exponent: float, rows: float) -> None:
    expected, known = simulated(num_experts, top_k, exponent)
    typical = float(expected.busiest_rank.expected)
    pairs = int(max(float(one) for one in expected.exchanged["pairs_in"].expected) / (RANKS - 1) * rows)
    for capacity in (
        Capacity(rows=int(typical * (rows - 0.05)), buffer_rows=0),
        Capacity(rows=10**9, buffer_rows=0, pair_rows=pairs),
        Capacity(rows=int(typical * (rows - 0.02)), buffer_rows=0, pair_rows=pairs),
    ):
        low, high = expected.overflow(capacity)
        found = sum(one.overflow(capacity)[0] for one in known) / len(known)
        noise = 4 * math.sqrt(max(found * (1 - found), 1 / len(known)) / len(known))
        assert low - noise <= found <= high + noise


def _binomial_above(count: int, odds: float, limit: int) -> float:
    return sum(math.comb(count, k) * odds**k * (1 - odds) ** (count - k) for k in range(limit + 1, count + 1))


@pytest.mark.parametrize(
    ("count", "odds", "limit"),
    [
        (1, 0.3, 0),
        (5, 0.5, 2),
        (10, 0.3, 3),
        (10, 0.3, 8),
        (100, 0.1, 10),
        (100, 0.1, 25),
        (1000, 0.5, 500),
        (300, 0.02, 40),
    ],
)
def test_tails_of_binomials(count: int, odds: float, limit: int) -> None:
    found = above(torch.tensor([[1 - odds, odds]], dtype=torch.float64), count, limit)
    assert float(found) == pytest.approx(_binomial_above(count, odds, limit), rel=0.03)


def test_what_cannot_be_exceeded_is_not() -> None:
    odds = torch.tensor([[0.5, 0.5, 0.0]], dtype=torch.float64)
    assert float(above(odds, 10, 10)) == 0.0
    assert float(above(odds, 0, 0)) == 0.0
    sure = torch.tensor([[0.0, 1.0]], dtype=torch.float64)
    assert [float(above(sure, 10, limit)) for limit in (9, 10)] == [1.0, 0.0]


def test_any_of_several_is_between_its_bounds() -> None:
    odds = torch.tensor([[0.9, 0.1], [0.8, 0.2]], dtype=torch.float64)
    each = above(odds, 50, 12)
    low, high = any_above(odds, 50, 12, times=3)
    assert low == pytest.approx(1 - float((1 - each).prod()) ** 3)
    assert high == pytest.approx(min(1.0, 3 * float(each.sum())))


def test_the_largest_of_one_sum_is_its_median() -> None:
    median, least, most = largest(torch.tensor([[0.5, 0.5]], dtype=torch.float64), 100)
    assert (median, 30 < least < 40, 60 < most < 70) == (50, True, True)


@pytest.mark.parametrize(("count", "odds", "multiple"), [(40, 0.2, 16), (3, 0.5, 2), (7, 0.9, 4), (0, 0.5, 8)])
def test_padding_of_a_binomial(count: int, odds: float, multiple: int) -> None:
    wanted = [0.0] * multiple
    for k in range(count + 1):
        wanted[-k % multiple] += math.comb(count, k) * odds**k * (1 - odds) ** (count - k)
    found = padding_odds(torch.tensor([odds], dtype=torch.float64), count, multiple)[0]
    torch.testing.assert_close(found, torch.tensor(wanted, dtype=torch.float64), rtol=0, atol=1e-12)


def test_the_range_of_a_sum_is_that_of_its_parts() -> None:
    dice = torch.full((1, 2, 6), 1 / 6, dtype=torch.float64)
    assert [float(bound) for bound in sum_range(dice)] == [0.0, 10.0]
    certain = torch.zeros(2, 3, 4, dtype=torch.float64)
    certain[..., 2] = 1
    assert [bound.tolist() for bound in sum_range(certain)] == [[6.0, 6.0], [6.0, 6.0]]


def test_known_loads_by_hand() -> None:
    """Two nodes of two ranks with two experts each; rank 0 sends a row to ranks 2 and 3, and one to itself."""
    of = MoEShape(num_experts=8, top_k=3, hidden_size=8, ep_size=4, pad_multiple=4, ranks_per_node=2)
    nowhere = torch.full((1, 3), -1)
    found = known_loads([torch.tensor([[4, 5, 6], [0, 0, -1]]), nowhere, nowhere, nowhere], of)
    assert found.tokens.tolist() == [2, 1, 1, 1]
    assert found.received.expected.tolist() == [1, 0, 2, 1]
    assert found.padding.expected.tolist() == [3, 0, 6, 3]
    sent = {name: of_ranks.expected.tolist() for name, of_ranks in found.exchanged.items()}
    assert sent == {
        "pairs_out": [2, 0, 0, 0],
        "pairs_in": [0, 0, 1, 1],
        "slots_out": [3, 0, 0, 0],
        "slots_in": [0, 0, 2, 1],
    }
    assert found.between_nodes["pairs_out"].tolist() == [2, 0, 0, 0]
    assert found.once_per_node["pairs_out"].tolist() == [1, 0, 0, 0]
    assert found.once_per_node["pairs_in"].tolist() == [0, 0, 1, 0]  # at the place that the sender has on its node


def test_padding_of_many_experts_is_told_narrowly() -> None:
    of = MoEShape(num_experts=256, top_k=4, hidden_size=8, ep_size=2, pad_multiple=16)
    found = expected_loads(popularity(256, 0.4, 0), 4000, of).padding
    exactly = math.sqrt(128 * (16**2 - 1) / 12)  # of 128 remainders that may be anything
    assert found.expected.tolist() == pytest.approx([128 * 7.5] * 2, rel=0.01)
    assert ((found.high - found.low) < 9 * exactly).all()
    assert ((found.high - found.low) > 6 * exactly).all()
