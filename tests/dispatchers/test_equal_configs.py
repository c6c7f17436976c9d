"""Configs that mean the same, on one rank or on several: they share a channel, and ranks need not write them alike."""

from __future__ import annotations

from typing import Any

import pytest

from moe_dispatch import build_dispatcher
from moe_dispatch.errors import ConfigError, StateError
from tests.dispatchers.layer import (
    HIDDEN,
    SAFE,
    Group,
    on_ranks,
    outcomes,
    raises_everywhere,
    random_routing,
    random_rows,
    small_config,
)

ALLTOALL = {"name": "alltoall", "reduction": "fast", "pair_rows": "worst"}
FINITE: dict[str, Any] = {**SAFE, "on_overflow": "raise"}

# Fields of two configs that mean the same; tests/config/test_meaning.py has all ways to write one config.
SAME: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "options in another order": (
        {"backend": ALLTOALL},
        {"backend": {"reduction": "fast", "pair_rows": "worst", "name": "alltoall"}},
    ),
    "a name and all defaults": (
        {"backend": "alltoall"},
        {"backend": {**ALLTOALL, "levels": 1, "ranks_per_node": None}},
    ),
    "1 and 1.0 for pair_rows": (
        {**FINITE, "backend": {"name": "alltoall", "pair_rows": 1}},
        {**FINITE, "backend": {"name": "alltoall", "pair_rows": 1.0}},
    ),
}


@pytest.mark.parametrize("name", SAME)
def test_configs_that_mean_the_same(name: str) -> None:
    """Ranks may write one config in two ways. Dispatchers of both share a channel and accept each other's plans."""

    def body(group: Group) -> None:
        one, other = (small_config(**{"backend": "alltoall", **SAME[name][way]}) for way in (0, 1))
        dispatcher, x = build_dispatcher([one, other][group.rank()], group), random_rows(4)
        sent = dispatcher.dispatch(x, random_routing(4))
        assert dispatcher.combine(sent.rows, sent).shape == (4, HIDDEN)
        first, second = build_dispatcher(one, group), build_dispatcher(other, group)
        assert first._channel is second._channel
        second.dispatch(x, random_routing(4), first.plan(like=x))
        first.dispatch(x, random_routing(4), second.plan(like=x))

    on_ranks(body, 2)


# Fields of two configs that mean different things, and what ranks that have one each are told.
DIFFERENT: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "reduction": ({}, {"backend": {**ALLTOALL, "reduction": "exact"}}, "Ranks disagree on backend: "),
    "pair_rows": (
        {**FINITE, "backend": {**ALLTOALL, "pair_rows": 1}},
        {**FINITE, "backend": {**ALLTOALL, "pair_rows": 1.5}},
        "Ranks disagree on backend: ",
    ),
    "auto": ({"backend": "alltoall"}, {"backend": "auto"}, "Ranks disagree on backend: "),
    "pad_multiple": ({"pad_multiple": "fp8"}, {"pad_multiple": 32}, "Ranks disagree on pad_multiple: rank 0 has 16"),
    "row_counts": ({}, {"row_counts": "check"}, "Ranks disagree on row_counts: rank 0 has 'agree', rank 1 has 'check'"),
    "num_experts": ({}, {"num_experts": 16}, "num_experts: rank 0 has 8, rank 1 has 16. Give every rank the same"),
    "debug": ({}, {"debug": True}, "Ranks disagree on debug: rank 0 has False, rank 1 has True"),
    "allgather": (
        {},
        {"backend": "allgather"},
        "Ranks disagree on backend: rank 0 has {'name': 'alltoall', 'reduction': 'fast', 'pair_rows': 'worst', "
        "'levels': 1, 'ranks_per_node': None}, rank 1 has {'name': 'allgather'}",
    ),
}


@pytest.mark.parametrize("name", DIFFERENT)
def test_configs_that_differ_still_differ(name: str) -> None:
    *ways, told = DIFFERENT[name]

    def shared(group: Group) -> None:
        one, other = (build_dispatcher(small_config(**{"backend": "alltoall", **way}), group) for way in ways)
        assert one._channel is not other._channel
        x = random_rows(4)
        with pytest.raises(StateError, match="the plan is of another config or group"):
            other.dispatch(x, random_routing(4), one.plan(like=x))

    def apart(group: Group) -> None:
        build_dispatcher(small_config(**{"backend": "alltoall", **ways[group.rank()]}), group)

    on_ranks(shared, 1)
    raises_everywhere(outcomes(apart, 2), ConfigError, told)
