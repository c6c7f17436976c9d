"""``Plan.bytes`` says what each verb allocates on a device: nothing is missing, and little is too much."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch

from moe_dispatch.permutation.triton_rows import TritonPermutation
from tests.simulated_cuda.memory import TOKENS, TOP_K, Case, measure

EXPAND = {"name": "deepep", "expand": True, "deterministic": False}
FLOAT8, MXFP8 = ({"dtype": dtype, "gradients": True} for dtype in ("float8_e4m3fn", "mxfp8"))
QUANTISED = {"wire": {"dtype": "mxfp8", "deliver": "quantised"}, "pad_multiple": 32}
QUARTER = {"graph_safe": {"capacity_factor": 1.25, "on_overflow": "drop"}}
IN_MODEL = {"weights": "experts"}
HYBRID, ELASTIC = "hybridep-94a9f8f", "v2-2.1.0"
CASES = {
    "local": Case("local", 1),
    "local-mxfp8-carry": Case("local", 1, {"wire": MXFP8}, carry=True),
    "alltoall": Case("alltoall", 4),
    "alltoall-no-padding": Case("alltoall", 2, {"pad_multiple": 1}),
    "alltoall-capacity-carry": Case("alltoall", 4, QUARTER, carry=True),
    "alltoall-balance-carry": Case("alltoall", 4, {"balance": "exact"}, carry=True),
    "alltoall-mxfp8": Case("alltoall", 4, {"wire": MXFP8}),
    "alltoall-quantised-carry": Case("alltoall", 2, QUANTISED, carry=True),
    "alltoall-experts": Case("alltoall", 2, IN_MODEL),
    "allgather": Case("allgather", 4, carry=True),
    "allgather-float8": Case("allgather", 2, {"wire": FLOAT8}),
    "hybridep": Case("hybridep", 1, {}, HYBRID),
    "hybridep-carry": Case("hybridep", 1, {}, HYBRID, carry=True),
    "hybridep-experts": Case("hybridep", 1, IN_MODEL, HYBRID),
    "hybridep-float8": Case("hybridep", 1, {"wire": FLOAT8}, HYBRID),
    "deepep": Case("deepep", 1, {}, ELASTIC),
    "deepep-float8-carry": Case("deepep", 1, {"wire": FLOAT8}, ELASTIC, carry=True),
    "deepep-expand": Case(EXPAND, 1, {}, ELASTIC),
    "deepep-expand-float8": Case(EXPAND, 1, {"wire": FLOAT8}, ELASTIC),
}
LEAST, MOST, SLOTS = 0.96, 1.02, 16 * TOKENS * TOP_K


@pytest.fixture(autouse=True)
def no_fills() -> None:
    """Deterministic mode fills memory by operators; conftest.py restores it."""
    torch.use_deterministic_algorithms(False)


def differences(case: Case) -> dict[str, tuple[int, int]]:
    """Return what is measured and what is told of the verbs where they differ."""
    found, told = measure(case)
    return {
        verb: (found[verb], told[verb])
        for verb in told
        if not LEAST * told[verb] <= found[verb] <= MOST * told[verb] + SLOTS
    }


@pytest.mark.parametrize("name", CASES)
def test_plan_bytes_are_those_that_verbs_allocate(name: str) -> None:
    assert not differences(CASES[name])


def test_a_planted_copy_of_all_rows_differs() -> None:
    weigh: Any = TritonPermutation.weigh
    with patch.object(
        TritonPermutation, "weigh", lambda self, rows, *args, **more: weigh(self, rows + 0, *args, **more)
    ):
        assert set(differences(CASES["hybridep"])) == {"combine", "combine.backward"}
