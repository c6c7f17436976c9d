"""A step of transformers' sharded model on ranks, with our dispatcher or theirs, is that of the unsharded model."""

from __future__ import annotations

import datetime

import pytest

from moe_dispatch_testing.prove import Proof, prove_all
from tests.integration.needs import needs
from tests.integration.transformers.proofs import SETUPS

pytestmark = [*needs("transformers"), pytest.mark.slow]


@pytest.fixture(scope="module")
def proofs() -> dict[str, Proof]:
    """In float32: transformers' grouped products take no float64."""
    return prove_all(SETUPS, dtype="float32", timeout=datetime.timedelta(seconds=180))


@pytest.mark.parametrize("name", SETUPS)
def test_step_is_proven(name: str, proofs: dict[str, Proof]) -> None:
    assert proofs[name].right, proofs[name]
