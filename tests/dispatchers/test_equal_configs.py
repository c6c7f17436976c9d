"""Configs that mean the same, on one rank or on several: they share a channel, and ranks need not write them alike."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from moe_dispatch import build_dispatcher
from moe_dispatch.errors import ConfigError, StateError
from tests.dispatchers.layer import (
    HIDDEN,
    Group,
    on_ranks,
    outcomes,
    raises_everywhere,
    random_routing,
    random_rows,
    small_config,
)

SAFE: dict[str, Any] = {"graph_safe": True, "max_tokens_per_rank": 4}
ALLTOALL = {"name": "alltoall", "reduction": "fast", "pair_rows": "worst"}
FINITE: dict[str, Any] = {**SAFE, "on_overflow": "raise"}

# Fields of two configs that mean the same.
SAME: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    **{
        f"options in order {', '.join(order)}": (
            {"backend": ALLTOALL},
            {"backend": {key: ALLTOALL[key] for key in order}},
        )
        for order in itertools.permutations(ALLTOALL)
    },
    "a name and a mapping": ({"backend": "alltoall"}, {"backend": {"name": "alltoall"}}),
    "a name and all defaults": (
        {"backend": "alltoall"},
        {"backend": {**ALLTOALL, "levels": 1, "ranks_per_node": None}},
    ),
    "a number of rows and its name": ({"pad_multiple": "fp8"}, {"pad_multiple": 16}),
    "no policy and agree": ({}, {"row_counts": "agree"}),
    "no policy and static": (SAFE, {**SAFE, "row_counts": "static"}),
    "1 and 1.0 for pair_rows": (
        {**FINITE, "backend": {"name": "alltoall", "pair_rows": 1}},
        {**FINITE, "backend": {"name": "alltoall", "pair_rows": 1.0}},
    ),
    "1 and 1.0 for capacity_factor": ({**FINITE, "capacity_factor": 1}, {**FINITE, "capacity_factor": 1.0}),
}


@pytest.mark.parametrize("name", SAME)
def test_ranks_may_write_one_config_in_two_ways(name: str) -> None:
    def body(group: Group) -> None:
        assert group is not None
        dispatcher = build_dispatcher(small_config(**{"backend": "alltoall", **SAME[name][group.rank()]}), group)
        sent = dispatcher.dispatch(random_rows(4), random_routing(4))
        assert dispatcher.combine(sent.rows, sent).shape == (4, HIDDEN)

    assert outcomes(body, 2) == [None, None]


@pytest.mark.parametrize("name", SAME)
def test_equal_configs_share_a_channel_and_accept_each_others_plans(name: str) -> None:
    def body(group: Group) -> None:
        one, other = (build_dispatcher(small_config(**{"backend": "alltoall", **way}), group) for way in SAME[name])
        assert one._channel is other._channel
        x = random_rows(4)
        other.dispatch(x, random_routing(4), one.plan(like=x))
        one.dispatch(x, random_routing(4), other.plan(like=x))

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
    "pad_multiple": (
        {"pad_multiple": "fp8"},
        {"pad_multiple": 32},
        "Ranks disagree on pad_multiple: rank 0 has 16, rank 1 has 32",
    ),
    "row_counts": (
        {},
        {"row_counts": "check"},
        "Ranks disagree on row_counts: rank 0 has 'agree', rank 1 has 'check'",
    ),
}


@pytest.mark.parametrize("name", DIFFERENT)
def test_configs_that_differ_still_differ(name: str) -> None:
    *ways, told = DIFFERENT[name]

    def shared(group: Group) -> None:
        one, other = (build_dispatcher(small_config(**{"backend": "alltoall", **way}), group) for way in ways)
        assert one._channel is not other._channel
        x = random_rows(4)
        with pytest.raises(StateError, match="the plan must be made by a dispatcher of the same config and group"):
            other.dispatch(x, random_routing(4), one.plan(like=x))

    def apart(group: Group) -> None:
        assert group is not None
        build_dispatcher(small_config(**{"backend": "alltoall", **ways[group.rank()]}), group)

    on_ranks(shared, 1)
    raises_everywhere(outcomes(apart, 2), ConfigError, told)
