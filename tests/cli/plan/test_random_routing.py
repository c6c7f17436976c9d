"""Counts of known dispatches by hand, and random routings against closed forms and loops."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from moe_dispatch.backends import MoEShape
from moe_dispatch_tools.loads import count_loads
from moe_dispatch_tools.plan.models import GroupLimit
from moe_dispatch_tools.plan.routing import choose_experts, draw_experts, popularity, random_routing

LIMIT = GroupLimit(num_groups=8, topk_groups=4, scored_experts=2)


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


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


@pytest.mark.parametrize("exponent", [0.0, 1.0, 8.0])
def test_odds_by_hand(exponent: float) -> None:
    """First a, then b, has odds a * b / (1 - a)."""
    odds, tokens = popularity(4, exponent, generator()), 40_000
    ids = draw_experts(odds, 3, tokens, generator(1))
    assert all(len(set(row)) == 3 for row in ids[:1000].tolist())
    for a, b in itertools.permutations(range(4), 2):
        wanted = float(odds[a] * odds[b] / (1 - odds[a]))
        found = float(((ids[:, 0] == a) & (ids[:, 1] == b)).double().mean())
        assert found == pytest.approx(wanted, abs=5 * math.sqrt(wanted * (1 - wanted) / tokens) + 1e-4)


def test_large_groups_are_simulated_in_few_dispatches() -> None:
    large = MoEShape(num_experts=8, top_k=1, hidden_size=8, ep_size=8, pad_multiple=1)
    assert len(list(random_routing("uniform").dispatches(large, 2**16))) == 2
    of = MoEShape(num_experts=64, top_k=2, hidden_size=8, ep_size=64, pad_multiple=1)
    (first, *_), (again, *_) = (random_routing("uniform", seed=3).dispatches(of, 64) for _ in range(2))
    assert torch.equal(first[5], again[5])
    assert first[5].shape == (64, 2)


def by_hand(scores: list[float], top_k: int, groups: GroupLimit) -> set[int]:
    """Return the experts of one token, by loops."""
    size = len(scores) // groups.num_groups
    members = [range(group * size, (group + 1) * size) for group in range(groups.num_groups)]

    def score(group: range) -> float:
        return sum(sorted((scores[expert] for expert in group), reverse=True)[: groups.scored_experts])

    best = sorted(members, key=score, reverse=True)[: groups.topk_groups]
    allowed = [expert for group in best for expert in group]
    return set(sorted(allowed, key=lambda expert: scores[expert], reverse=True)[:top_k])


@pytest.mark.parametrize("limit", [LIMIT, GroupLimit(num_groups=4, topk_groups=1, scored_experts=1)])
def test_experts_are_chosen_as_by_loops(limit: GroupLimit) -> None:
    scores_TE = torch.randn(200, 32, generator=generator())
    ids_TK = choose_experts(scores_TE, 6, limit)
    for scores, ids in zip(scores_TE.tolist(), ids_TK.tolist(), strict=True):
        assert len(ids) == 6
        assert set(ids) == by_hand(scores, 6, limit)
