"""The cases of the kit: a covering selection for ``make test``, and all others, which ``make kit`` runs.

Every scenario is in the selection, and so is every pair of settings that some case of the kit has: backend with its
options, group size, input layout, mode, dtype, padding, copies of experts and chunks; and backend, policy of row
counts, routing, schedule, who applies the weights, what travels, and which inputs collect gradients.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from functools import partial
from itertools import combinations
from typing import Any

import pytest

from moe_dispatch_testing import Ranks
from moe_dispatch_testing.case import BackendSpec, Case, run_case
from moe_dispatch_testing.kit import backend_cases, describe
from tests.conformance.backends import BACKENDS, IN_ONE_LAYOUT, OLDER_RELEASES, more_backends

_Cases = dict[str, tuple[BackendSpec, Case]]


def chosen_cases(*, short: bool) -> Iterator[Any]:
    """Yield a parameter for each case, a function that runs it: of the covering selection, or of all other cases."""
    ranks, cases = Ranks(), _all_cases()
    selected = _covering(cases)
    for name, (backend, case) in cases.items():
        if (name in selected) is short:
            yield pytest.param(partial(run_case, backend, case, ranks), id=name)


def _all_cases() -> _Cases:
    with more_backends():
        return {
            f"{describe(backend)}-{case.id}": (backend, case)
            for backend in BACKENDS
            for case in backend_cases(backend)
            if _is_run(case, backend)
        }


def _is_run(case: Case, backend: BackendSpec) -> bool:
    """Return whether a backend runs a case at all; see ``IN_ONE_LAYOUT``."""
    if backend not in IN_ONE_LAYOUT:
        return True
    if case.scenario.graph_safe:
        return case.input_layout == "bshd" and case.ep_size == 2
    return case.input_layout == "bshd" and (case.ep_size == 4 or backend not in OLDER_RELEASES)


def _covering(cases: _Cases) -> set[str]:
    """Select cases one by one, each time the one that shows the most that is not shown yet for the time it takes."""
    numbers: dict[Hashable, int] = {}
    shown = {
        name: sum({1 << numbers.setdefault(pair, len(numbers)) for pair in _shows(backend, case)})
        for name, (backend, case) in cases.items()
    }
    left, selected = (1 << len(numbers)) - 1, set()
    while left:
        best = max(shown, key=lambda name: (shown[name] & left).bit_count() / _cost(cases[name][1]))
        selected.add(best)
        left &= ~shown[best]
        shown = {name: pairs for name, pairs in shown.items() if pairs & left}
    return selected


def _shows(backend: BackendSpec, case: Case) -> Iterator[Hashable]:
    """Yield the scenario and the pairs of settings that a case shows.

    On one rank nothing travels, so for a backend that can do more a group of one shows only that it works at all.
    """
    scenario = case.scenario
    ep_size = ("ep_size", case.ep_size)
    others = (
        ("backend", describe(backend)),
        ("layout", case.input_layout),
        ("graph_safe", scenario.graph_safe),
        ("dtype", scenario.dtype),
        ("padding", scenario.pad_multiple),
        ("copies", scenario.spare > 0),
        ("chunks", scenario.chunk_tokens is not None),
    )
    yield scenario.name
    yield from ((ep_size, other) for other in others)
    if case.ep_size > 1 or backend == "local":
        yield from combinations(others, 2)
        yield from combinations(
            (
                ("name", backend if isinstance(backend, str) else backend["name"]),
                ("row_counts", case.row_counts),
                ("routing", scenario.routing),
                ("schedule", scenario.schedule),
                ("weights", scenario.weights),
                ("wire", scenario.wire_dtype, scenario.grad_wire_dtype, scenario.deliver),
                ("requires_grad", scenario.requires_grad),
            ),
            2,
        )


def _cost(case: Case) -> float:
    """Return the time that a case takes, roughly, as a multiple of that of an eager step on one rank."""
    scenario = case.scenario
    steps = 4 if scenario.chunk_tokens is not None else 1
    return case.ep_size * steps * (2 if scenario.graph_safe else 1) * (2 if scenario.num_experts > 8 else 1)
