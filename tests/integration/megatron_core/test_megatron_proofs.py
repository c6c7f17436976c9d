"""A step of Megatron on ranks, with our dispatcher, is that of one process, if losses are counted per token."""

from __future__ import annotations

import datetime
import importlib
import re
import warnings

import pytest

from moe_dispatch_testing.prove import Proof, prove_all
from tests.integration.megatron_core.proofs import FAULTY, SETUPS
from tests.integration.needs import needs

pytestmark = [*needs("megatron"), pytest.mark.slow]


@pytest.fixture(scope="module")
def proofs() -> dict[str, Proof]:
    with warnings.catch_warnings():  # what a rank sends names classes of Megatron, whose import warns
        warnings.simplefilter("ignore")
        importlib.import_module("megatron.core")
    return prove_all(SETUPS, dtype="float32", timeout=datetime.timedelta(seconds=180))


@pytest.mark.parametrize("name", [name for name in SETUPS if name not in FAULTY])
def test_step_is_proven(name: str, proofs: dict[str, Proof]) -> None:
    assert proofs[name].right, proofs[name]


def test_means_of_means_without_a_loss_per_token(proofs: dict[str, Proof]) -> None:
    (finding,) = proofs["means"].findings
    assert "is the mean of the means of the ranks" in finding


def test_gaps_that_the_ranks_count_are_told(proofs: dict[str, Proof]) -> None:
    (finding,) = proofs["gaps counted"].findings
    assert re.fullmatch(
        r"Every gradient is \d\.\d\d times too small( \(number of ranks along dp, or cp\))?\.", finding
    ), finding
