"""The conformance kit on CUDA tensors, with ranks as threads over NCCL."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from random import Random
from typing import Any

import pytest

from moe_dispatch_testing import run_case
from moe_dispatch_testing.case import Case
from moe_dispatch_testing.kit import backend_cases
from tests.simulated_cuda.ranks import NcclRanks

RANKS: Any = NcclRanks()
SUITES = [("local", (1,)), ("alltoall", (1, 2)), ("alltoall", (4,)), ("allgather", (1, 2, 4))]


def covering(cases: list[Case]) -> Iterator[Case]:
    """Yield cases that have each scenario, and each layout and policy of row counts on each number of ranks."""
    seen = set[Any]()
    for case in Random(0).sample(cases, len(cases)):
        shown = {case.scenario.name, (case.ep_size, case.input_layout, case.row_counts)}
        if not shown <= seen:
            seen |= shown
            yield case


CASES = [
    pytest.param(backend, case, id=f"{backend}-{case.id}")
    for backend, sizes in SUITES
    for case in covering(list(backend_cases(backend, sizes)))
]


@pytest.mark.parametrize(("backend", "case"), CASES)
def test_conforms(backend: str, case: Case) -> None:
    run_case(backend, dataclasses.replace(case, device="cuda"), RANKS)
