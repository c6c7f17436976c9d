"""A step of torchtitan's own sharding and clipping with our dispatcher is that of its unsharded modules."""

from __future__ import annotations

import datetime

import pytest

from moe_dispatch_testing.prove import Proof, prove_all
from tests.integration.needs import needs
from tests.integration.titan.proofs import FAULTY, SETUPS

pytestmark = [*needs("torchtitan"), pytest.mark.slow]


@pytest.fixture(scope="module")
def proofs() -> dict[str, Proof]:
    """In float32: torchtitan's grouped products take no float64."""
    return prove_all(SETUPS | FAULTY, dtype="float32", timeout=datetime.timedelta(seconds=180))


@pytest.mark.parametrize("name", SETUPS)
def test_step_is_proven(name: str, proofs: dict[str, Proof]) -> None:
    assert proofs[name].right, proofs[name]


@pytest.mark.parametrize(
    ("fault", "told"),
    [
        ("mean of means", "is a mean of means, or of sums with other divisors: the tokens of one rank's batch count"),
        ("clipped per rank", "on one process: each rank clips by its own part."),
    ],
)
def test_fault_is_told(fault: str, told: str, proofs: dict[str, Proof]) -> None:
    assert told in " ".join(proofs[fault].findings)
