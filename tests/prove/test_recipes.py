"""The recipes of docs/training.md are proven, and so is a backward in two halves, if parameters are not resharded."""

from __future__ import annotations

import datetime
import re

import pytest

from moe_dispatch_testing.prove import Proof, prove_all
from tests.prove import recipes, split_backward

pytestmark = pytest.mark.slow
TIMEOUT = datetime.timedelta(seconds=180)


@pytest.fixture(scope="module")
def proofs() -> dict[str, Proof]:
    split = {by: split_backward.setup(by) for by in ("fully_shard", "no reshard")}
    return prove_all({recipe: recipes.setup(recipe) for recipe in recipes.MESHES} | split, timeout=TIMEOUT)


@pytest.mark.parametrize("name", [*recipes.MESHES, "no reshard"])
def test_recipe_is_proven(name: str, proofs: dict[str, Proof]) -> None:
    assert proofs[name].right, proofs[name]
    assert proofs[name].num_parameters in (8, 12)


def test_resharding_before_the_second_half_is_told(proofs: dict[str, Proof]) -> None:
    found = proofs["fully_shard"].findings
    pattern = (
        r"(no gradient of .*|gradient of .* differs by .* of its length) on stage \d: resharded before a split "
        r"backward \(ScheduleInterleavedZeroBubble\)\. Use reshard_after_forward=False\."
    )
    assert any(re.match(r"no gradient of .* on stage 1: resharded", finding) for finding in found)
    assert all(re.fullmatch(pattern, finding) for finding in found), found
