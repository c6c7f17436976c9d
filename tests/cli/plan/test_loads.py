"""Counts of known dispatches by hand, and simulated ones against closed forms and torch's own draws."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor

from moe_dispatch.backends import MoEShape
from moe_dispatch_tools.loads import Loads, count_loads, overflow_bounds
from moe_dispatch_tools.plan.routing import draw_experts, popularity, random_routing

RANKS, NODES, TOKENS, DISPATCHES = 4, 2, 60, 256
# Experts, top_k, exponent.
KINDS = [(16, 4, 0.0), (16, 4, 1.2), (32, 2, 0.7), (8, 8, 1.0), (12, 3, 4.0)]


def shape(num_experts: int, top_k: int) -> MoEShape:
    return MoEShape(
        num_experts=num_experts,
        top_k=top_k,
        hidden_size=8,
        ep_size=RANKS,
        pad_multiple=16,
        ranks_per_node=RANKS // NODES,
    )


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def simulated(num_experts: int, top_k: int, exponent: float) -> Loads:
    of = shape(num_experts, top_k)
    return count_loads(random_routing(f"zipf:{exponent}").dispatches(of, TOKENS), of)


def by_torch(num_experts: int, top_k: int, exponent: float) -> Loads:
    """As many dispatches, by torch's own draws without replacement."""
    odds, rng = popularity(num_experts, exponent, generator()), generator(1)
    tokens = odds.expand(DISPATCHES * RANKS * TOKENS, -1)
    ids = torch.multinomial(tokens, top_k, generator=rng).view(DISPATCHES, RANKS, TOKENS, top_k)
    return count_loads([tuple(dispatch) for dispatch in ids], shape(num_experts, top_k))


def counts(loads: Loads) -> dict[str, Tensor]:
    """By name, float64 (C, ...)."""
    return {
        "tokens": loads.tokens_CE.double(),
        "slots": loads.slots_CPP.double(),
        "pairs": loads.pairs_CPP.double(),
        "nodes": loads.nodes_CPN.double(),
        "padding": loads.expert_padding_CP(16).double(),
        "busiest rank": loads.received_CP.amax(1).double(),
        "busiest expert": loads.tokens_CE.amax(1).double(),
    }


@pytest.mark.parametrize(("num_experts", "top_k", "exponent"), KINDS)
def test_simulated_counts_have_the_means_and_spreads_of_other_draws(
    num_experts: int, top_k: int, exponent: float
) -> None:
    ours, theirs = (counts(draws(num_experts, top_k, exponent)) for draws in (simulated, by_torch))
    for name, values in ours.items():
        assert len(values) == len(theirs[name]) == DISPATCHES
        noise = 5 * ((values.var(0) + theirs[name].var(0)) / DISPATCHES).sqrt() + 1e-9
        assert ((values.mean(0) - theirs[name].mean(0)).abs() <= noise).all(), name
        both = torch.stack([values.std(0).mean(), theirs[name].std(0).mean()])
        assert both.max() <= 1.25 * both.min() + 0.2, name


@pytest.mark.parametrize(("num_experts", "top_k", "inside"), [(8, 2, 2), (64, 8, 8), (64, 8, 1), (12, 12, 4)])
def test_equal_odds_are_hypergeometric(num_experts: int, top_k: int, inside: int) -> None:
    """How many of a token's experts lie among the first few."""
    tokens = 40_000
    ids = draw_experts(popularity(num_experts, 0, generator()), top_k, tokens, generator(1))
    found = (ids < inside).sum(1).bincount(minlength=top_k + 1) / tokens
    for count in range(top_k + 1):
        ways = math.comb(inside, count) * math.comb(num_experts - inside, top_k - count)
        odds = ways / math.comb(num_experts, top_k)
        assert float(found[count]) == pytest.approx(odds, abs=5 * math.sqrt(odds * (1 - odds) / tokens) + 1e-9)


@pytest.mark.parametrize("exponent", [1.0, 3.0, 8.0])
def test_unequal_odds_by_hand(exponent: float) -> None:
    """First a, then b, has odds a * b / (1 - a). Large exponents take the way without rejections."""
    odds, tokens = popularity(4, exponent, generator()), 40_000
    ids = draw_experts(odds, 3, tokens, generator(1))
    assert all(len(set(row)) == 3 for row in ids[:1000].tolist())
    for a, b in itertools.permutations(range(4), 2):
        wanted = float(odds[a] * odds[b] / (1 - odds[a]))
        found = float(((ids[:, 0] == a) & (ids[:, 1] == b)).double().mean())
        assert found == pytest.approx(wanted, abs=5 * math.sqrt(wanted * (1 - wanted) / tokens) + 1e-4)


def test_large_groups_are_simulated_in_few_dispatches() -> None:
    of = MoEShape(num_experts=64, top_k=2, hidden_size=8, ep_size=64, pad_multiple=1)
    assert len(list(random_routing("uniform").dispatches(of, 2**14))) == 4
    (first, *_), (again, *_) = (random_routing("uniform", seed=3).dispatches(of, 64) for _ in range(2))
    assert torch.equal(first[5], again[5])
    assert first[5].shape == (64, 2)


def test_known_loads_by_hand() -> None:
    """Two nodes of two ranks with two experts each; rank 0 sends a row to ranks 2 and 3, and one to itself."""
    of = MoEShape(num_experts=8, top_k=3, hidden_size=8, ep_size=4, pad_multiple=4, ranks_per_node=2)
    nowhere = torch.full((1, 3), -1)
    found = count_loads([[torch.tensor([[6, 4, 5], [0, 0, -1]]), nowhere, nowhere, nowhere]], of)
    assert found.rows_CP.tolist() == [[2, 1, 1, 1]]
    assert found.tokens_CE.tolist() == [[1, 0, 0, 0, 1, 1, 1, 0]]
    assert found.received_CP.tolist() == [[1, 0, 2, 1]]
    assert found.expert_padding_CP(4).tolist() == [[3, 0, 6, 3]]
    assert found.slots_CPP[0].tolist() == [[1, 0, 2, 1], [0] * 4, [0] * 4, [0] * 4]
    assert found.pairs_CPP[0].tolist() == [[1, 0, 1, 1], [0] * 4, [0] * 4, [0] * 4]
    assert found.nodes_CPN[0].tolist() == [[1, 1], [0, 0], [0, 0], [0, 0]]


def test_no_dispatch_and_no_token_are_counted_as_nothing() -> None:
    assert count_loads([], shape(16, 4)).slots_CPP.shape == (0, RANKS, RANKS)
    empty = count_loads([[torch.zeros(0, 4, dtype=torch.int64)] * RANKS], shape(16, 4))
    assert (empty.rows_CP.tolist(), int(empty.tokens_CE.sum())) == ([[0] * RANKS], 0)


@pytest.mark.parametrize(("num_experts", "top_k", "exponent"), KINDS[:3])
@pytest.mark.parametrize("above", [0.98, 1.0, 1.05, 1.15])
def test_overflows_are_as_frequent_as_said(num_experts: int, top_k: int, exponent: float, above: float) -> None:
    ours, theirs = (draws(num_experts, top_k, exponent) for draws in (simulated, by_torch))
    for name, summed in (("slots_CPP", True), ("pairs_CPP", False)):
        needed_C = getattr(theirs, name).sum(1).amax(1) if summed else getattr(theirs, name).amax((1, 2))
        limit = int(float(needed_C.double().mean()) * above)
        low, high = overflow_bounds(getattr(ours, name), limit, summed=summed)
        found = float((needed_C > limit).double().mean())
        noise = 4 * math.sqrt(max(found * (1 - found), 1 / DISPATCHES) / DISPATCHES)
        assert low - noise <= found <= high + noise, name
        assert high - low < 0.25


@pytest.mark.parametrize(("limit", "rel"), [(4050, 0.2), (4150, 0.2), (4220, 0.5), (4300, 0.8)])
def test_overflows_of_two_ranks_are_binomial(limit: int, rel: float) -> None:
    """One of two experts, one to a rank: 8000 coins. Far out the doubt about the mean counts more than its size."""
    of = MoEShape(num_experts=2, top_k=1, hidden_size=8, ep_size=2, pad_multiple=1)
    low, high = overflow_bounds(
        count_loads(random_routing("uniform").dispatches(of, 4000), of).slots_CPP, limit, summed=True
    )
    heads = torch.arange(limit + 1, 8001, dtype=torch.float64)
    log_odds = math.lgamma(8001) - torch.lgamma(heads + 1) - torch.lgamma(8001 - heads) - 8000 * math.log(2)
    exactly = min(1.0, 2 * float(log_odds.exp().sum()))  # either rank
    assert low * (1 - rel) <= exactly <= high * (1 + rel)


def test_overflows_that_are_sure_or_impossible() -> None:
    certain = torch.full((3, 2, 2), 5)
    assert overflow_bounds(certain, 9, summed=True) == (1.0, 1.0)
    assert overflow_bounds(certain, 10, summed=True) == (0.0, 0.0)
    assert overflow_bounds(certain, 4, summed=False) == (1.0, 1.0)
    assert overflow_bounds(certain, 5, summed=False) == (0.0, 0.0)
