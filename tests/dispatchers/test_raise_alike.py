"""``raise_alike``, the one way in which ranks raise together: who raises what, and what the ranks agree on."""

from __future__ import annotations

from typing import Any

import pytest

from moe_dispatch.communication import Communicator, raise_alike
from moe_dispatch.errors import ConfigError, InputError, PeerError
from tests.dispatchers.layer import Group, outcomes, raises_everywhere

FACTS: dict[str, Any] = {"dtypes": ["bfloat16"], "rows": 64, "options": {"name": "alltoall", "factor": 1}}


def _entered(size: int, *by_rank: dict[str, Any]) -> list[Any]:
    """What ``raise_alike`` returned or raised on each rank, given ``by_rank``; the last entry is for all ranks left."""

    def body(group: Group) -> list[int]:
        given = {"problem": None, **by_rank[min(group.rank(), len(by_rank) - 1)]}
        return raise_alike(Communicator(group), given.pop("problem"), label="test", **given)

    return outcomes(body, size)


@pytest.mark.parametrize(
    ("other", "told"),
    [
        ({**FACTS, "rows": 32}, "Ranks disagree on rows: rank 0 has 64, rank 2 has 32. Give every rank the same"),
        ({}, "Ranks disagree on dtypes: rank 0 has ['bfloat16'], rank 2 has nothing."),
        ({**FACTS, "newer": None}, "Ranks disagree on newer: rank 0 has nothing, rank 2 has None."),
    ],
)
def test_facts_that_differ_are_named_with_both_values_on_every_rank(other: dict[str, Any], told: str) -> None:
    results = _entered(3, {"facts": FACTS}, {"facts": FACTS}, {"facts": other})
    raises_everywhere(results, ConfigError, told)
    assert len({str(result) for result in results}) == 1


def test_a_problem_comes_before_facts_that_differ() -> None:
    problem = InputError("x is wrong.")
    results = _entered(2, {"facts": FACTS}, {"facts": {}, "problem": problem})
    raises_everywhere(results[:1], PeerError, "rank 1 refused: x is wrong.")
    assert results[1] is problem


@pytest.mark.parametrize("facts", [None, FACTS], ids=["no facts", "facts"])
def test_a_peer_that_left(facts: dict[str, Any] | None) -> None:
    problem = InputError("x is wrong.")

    def body(group: Group) -> None:
        if group.rank() < 2:
            raise_alike(Communicator(group), problem if group.rank() == 0 else None, facts=facts, label="test")

    mine, peer, absent = outcomes(body, 3, seconds=0.3)
    assert mine is problem
    assert mine.__notes__[0].startswith("The other ranks were not told: ")
    assert mine.__context__ is None
    assert isinstance(peer, RuntimeError)
    assert not isinstance(peer, PeerError), "it heard of nothing, so it must not say that a rank refused"
    assert absent is None
