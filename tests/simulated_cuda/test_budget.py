"""No verb asks more of a device than its budget allows."""

from __future__ import annotations

import pytest
import torch

from tests.simulated_cuda.budget import combinations, counted, measure, read


@pytest.mark.parametrize("combination", list(combinations()), ids=" ".join)
def test_no_verb_exceeds_its_budget(combination: tuple[str, str, str]) -> None:
    torch.use_deterministic_algorithms(False)  # which fills memory by launches; conftest.py restores it
    budget = read()
    for verb, records in measure(*combination).items():
        allowed, found = budget[" ".join([*combination, verb])], counted(records)
        excess = {kind: count for kind, count in found.items() if count > allowed[kind]}
        assert not excess, f"{verb} exceeds {allowed}: {excess}"


def test_every_combination_has_a_budget() -> None:
    assert {key.rsplit(" ", 1)[0] for key in read()} == {" ".join(each) for each in combinations()}
