"""The conformance kit on CUDA tensors, with ranks as threads over NCCL."""

from __future__ import annotations

import dataclasses
from itertools import islice
from typing import Any

import pytest

from moe_dispatch_testing import run_case
from moe_dispatch_testing.case import Case
from moe_dispatch_testing.kit import backend_cases
from tests.simulated_cuda.ranks import NcclRanks

RANKS: Any = NcclRanks()
# Every third case of the backends with several ranks. Each scenario runs, on some sizes and in some of its layouts.
SUITES: list[tuple[str, tuple[int, ...], int]] = [
    ("local", (1,), 1),
    ("alltoall", (1, 2, 4), 3),
    ("allgather", (1, 2, 4), 3),
]
CASES = [
    pytest.param(backend, case, id=f"{backend}-{case.id}")
    for backend, sizes, step in SUITES
    for case in islice(backend_cases(backend, sizes), 0, None, step)
]


@pytest.mark.parametrize(("backend", "case"), CASES)
def test_conforms(backend: str, case: Case) -> None:
    run_case(backend, dataclasses.replace(case, device="cuda"), RANKS)
