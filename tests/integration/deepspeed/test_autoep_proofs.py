"""A step of DeepSpeed under each stage of ZeRO, with our dispatchers in AutoEP, is that of the unsharded model."""

from __future__ import annotations

import datetime

import pytest

from moe_dispatch_testing.prove import Proof, prove_all
from tests.integration.deepspeed.proofs import FAULTY, SETUPS


@pytest.fixture(scope="module")
def proofs() -> dict[str, Proof]:
    return prove_all(SETUPS | FAULTY, dtype="float32", timeout=datetime.timedelta(seconds=180))


@pytest.mark.parametrize("name", SETUPS)
def test_step_is_proven(name: str, proofs: dict[str, Proof]) -> None:
    assert proofs[name].right, proofs[name]
    assert proofs[name].num_parameters > 20


@pytest.mark.parametrize(
    ("fault", "told"),
    [("sum of losses", "2.00 times too large"), ("lost", "of its length on ranks 0 and 1.")],
    ids=["sum", "lost"],
)
def test_fault_is_told(fault: str, told: str, proofs: dict[str, Proof]) -> None:
    assert told in " ".join(proofs[fault].findings), proofs[fault]
