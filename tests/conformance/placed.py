"""All scenarios of the kit under a random placement with copies, on every backend. Run by ``make kit``.

``make test`` runs the few scenarios of the kit that have a placement.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest

from moe_dispatch_testing import SCENARIOS, Ranks, run_case
from moe_dispatch_testing.case import BackendSpec
from moe_dispatch_testing.kit import describe, excuse, fitted, scenario_cases
from moe_dispatch_testing.scenario import Scenario
from tests.conformance.backends import BACKENDS, IN_ONE_LAYOUT, more_backends

EP_SIZES = (2, 4)


def all_cases() -> list[Any]:
    ranks = Ranks()
    with more_backends():
        return [
            pytest.param(partial(run_case, backend, case, ranks), id=f"{describe(backend)}-{case.id}")
            for backend in BACKENDS
            for number, scenario in enumerate(SCENARIOS)
            for ep_size in EP_SIZES
            for placed in _placed(backend, dataclasses.replace(scenario, seed=number), ep_size)
            for case in scenario_cases(fitted(backend, placed, ep_size), ep_size)
            if backend not in IN_ONE_LAYOUT or case.input_layout == "bshd"
        ]


def _placed(backend: BackendSpec, scenario: Scenario, ep_size: int) -> Iterator[Scenario]:
    """Yield the scenario with the fewest spare slots with which the backend must run it, if there is such a number."""
    found = (dataclasses.replace(scenario, spare=spare) for spare in (1, 2, 3, 4))
    placed = next((one for one in found if excuse(backend, one, ep_size) is None), None)
    if placed is not None:
        yield placed


@pytest.mark.parametrize("run", all_cases())
def test_conforms_with_copies(run: Any) -> None:
    run()
