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
    split = {f"reshards {reshards}": split_backward.setup(reshards) for reshards in (True, False)}
    return prove_all({recipe: recipes.setup(recipe) for recipe in recipes.MESHES} | split, timeout=TIMEOUT)


@pytest.mark.parametrize("name", [*recipes.MESHES, "reshards False"])
def test_recipe_is_proven(name: str, proofs: dict[str, Proof]) -> None:
    assert proofs[name].right, proofs[name]
    assert proofs[name].num_parameters in (8, 12)


def test_resharding_before_the_second_half_is_told(proofs: dict[str, Proof]) -> None:
    found = proofs["reshards True"].findings
    pattern = (
        r"(no gradient of .* on any rank|gradient of .* differs by .* of its length on .*)\. "
        r"ScheduleInterleavedZeroBubble splits the backward, and FSDP has resharded the parameters before its second "
        r"half: use reshard_after_forward=False\."
    )
    assert found
    assert all(re.fullmatch(pattern, finding) for finding in found), found
