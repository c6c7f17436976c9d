"""Routers that are limited to groups of experts, against counts of every order and of every token."""

from __future__ import annotations

import itertools
import math
from collections import Counter, defaultdict
from typing import Any

import pytest
import torch

from moe_dispatch.backends import MoEShape
from moe_dispatch_tools.plan import routing
from moe_dispatch_tools.plan.models import GroupLimit
from moe_dispatch_tools.plan.routing import (
    choose_experts,
    draw_experts,
    draw_limited_experts,
    popularity,
    random_routing,
)
from moe_dispatch_tools.plan.sequences import Batch
from tests.cli.plan.planned import config, plan_of

DEEPSEEK: dict[str, Any] = {"num_experts": 256, "top_k": 8, "hidden_size": 512}
LIMIT = GroupLimit(num_groups=8, topk_groups=4, scored_experts=2)


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


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


@pytest.mark.parametrize("exponent", [0.0, 1.0])
def test_drawn_experts_are_as_likely_as_all_orders_say(exponent: float) -> None:
    """6 experts in 3 groups, of which a token uses 2: count all 720 orders of the scores, each with its odds."""
    limit = GroupLimit(num_groups=3, topk_groups=2, scored_experts=1)
    odds_E, tokens = popularity(6, exponent, generator()), 40_000
    wanted = defaultdict[frozenset[int], float](float)
    for order in itertools.permutations(range(6)):
        chance, left = 1.0, 1.0
        for expert in order:
            chance, left = chance * float(odds_E[expert]) / left, max(left - float(odds_E[expert]), 1e-12)
        scores = [-float(order.index(expert)) for expert in range(6)]
        wanted[frozenset(by_hand(scores, 3, limit))] += chance
    found = Counter(map(frozenset, draw_limited_experts(limit, odds_E, 3, tokens, generator(1)).tolist()))
    assert set(found) <= set(wanted)
    assert sum(wanted.values()) == pytest.approx(1)
    for experts, chance in wanted.items():
        assert found[experts] / tokens == pytest.approx(chance, abs=5 * math.sqrt(chance / tokens)), experts


def test_without_a_limit_scores_have_the_distribution_of_draws() -> None:
    """All groups are allowed: the mean loads of experts are those of draws one after the other."""
    odds_E, tokens = popularity(16, 1.0, generator()), 40_000
    everything = GroupLimit(num_groups=4, topk_groups=4, scored_experts=2)
    ours = draw_limited_experts(everything, odds_E, 4, tokens, generator(1)).flatten().bincount() / tokens
    theirs = draw_experts(odds_E, 4, tokens, generator(2)).flatten().bincount() / tokens
    assert torch.allclose(ours, theirs, atol=5 * math.sqrt(0.5 / tokens))


def test_traffic_between_nodes_is_that_of_every_token_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """DeepSeek-V3 on 8 nodes of a group each: without the limit a third more rows would cross."""
    monkeypatch.setattr(routing, "_SIMULATED_TOKENS", 2**15)  # the loop below counts them one by one
    limited = random_routing("uniform", groups=LIMIT)
    given = config(**DEEPSEEK)
    shape = MoEShape(**DEEPSEEK, ep_size=64, pad_multiple=1, ranks_per_node=8)
    crossings = nodes_of_token = tokens = 0
    for dispatch in limited.dispatches(shape, 32):
        for sender, ids_TK in enumerate(dispatch):
            for ids in (ids_TK // 32).tolist():  # 32 experts to a node
                tokens += 1
                nodes_of_token += len(set(ids))
                crossings += len(set(ids) - {sender // 8})
    assert nodes_of_token / tokens <= 4

    def between_nodes(**more: Any) -> float:
        source = random_routing("uniform", **more)
        (plan,) = plan_of(given, 64, source, 'deepep+emulate="v2-2.1.0"', nodes=8, batch=Batch(tokens=32)).backends
        assert plan.between_nodes is not None
        return plan.between_nodes

    counted = crossings / tokens * 32 * 512 * 2 * 4  # rows of 512 bfloat16, in two verbs and their backwards
    assert between_nodes(groups=LIMIT) == pytest.approx(counted)
    assert between_nodes() / counted == pytest.approx(1.334, abs=0.01)
