"""The cases of the conformance kit that ``make test`` leaves out. ``make kit`` runs them."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from moe_dispatch_testing.case import BackendSpec
from moe_dispatch_testing.differences import run_pairs
from tests.conformance.cases import chosen_cases
from tests.conformance.test_differences import RANKS, difference_cases


@pytest.mark.parametrize("run", list(chosen_cases(short=False)))
def test_conforms(run: Callable[[], None]) -> None:
    run()


@pytest.mark.parametrize(("backend", "setting"), difference_cases(short=False))
def test_all_pairs_of_ranks_that_differ(backend: BackendSpec, setting: str) -> None:
    assert run_pairs(backend, setting, RANKS) > 60
