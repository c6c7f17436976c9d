"""The cases of one rank with tensors on a GPU, without a group: what does not travel must be the same there."""

from __future__ import annotations

import dataclasses

import pytest

from moe_dispatch_testing import SCENARIOS, run_case
from moe_dispatch_testing.case import BackendSpec
from moe_dispatch_testing.kit import backend_cases, describe
from tests.conformance.backends import BACKENDS, more_backends

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("backend", BACKENDS, ids=describe)
def test_one_rank_on_a_gpu(backend: BackendSpec) -> None:
    ran = set()
    with more_backends():
        for case in backend_cases(backend, (1,)):
            run_case(backend, dataclasses.replace(case, device="cuda"), None)
            ran.add(case.scenario)
    assert len(ran) > len(SCENARIOS) / 2
