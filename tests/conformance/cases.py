"""The cases of the kit: those of ``make test`` and ``make slow``, and the others, which ``make kit`` runs."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest

from moe_dispatch_testing import Ranks
from moe_dispatch_testing.case import BackendSpec, Case, run_case
from moe_dispatch_testing.kit import backend_cases, describe
from tests.conformance.backends import BACKENDS, IN_ONE_LAYOUT, OLDER_RELEASES, more_backends

# The dispatcher and autograd handle what these scenarios show: gradients that nobody asks for, empty experts, layouts,
# the dtype of the experts. A backend is called as in other scenarios.
OF_THE_DISPATCHER = frozenset(
    (
        *("idle_ranks_detached", "nowhere_detached", "sent_again_detached", "experts_only"),
        *("x_without_grad", "weights_without_grad", "inputs_without_grad", "pad_16_unpoisoned", "strided", "debug"),
        *("layout_given", "nothing_given", "backward_one_by_one", "checkpointed_reentrant", "combined_twice"),
        *("float64_experts", "float32_experts", "bfloat16_experts", "float16_experts", "float64", "float16"),
        *("one_expert_per_rank", "one_token_on_one_rank", "one_rank_with_tokens", "equal_tokens", "balanced"),
        *("placed", "placed_partly_nowhere", "wire_bfloat16_float64"),
    )
)
# One scenario for each thing in which the calls of two backends may differ. ``make test`` runs no others on variants of
# a backend and on emulated libraries. The short selection of an older release has no others in graph-safe mode.
OF_EACH_KIND_OF_CALL = frozenset(
    (
        *("partly_nowhere", "rank_without_tokens", "duplicates", "many_tokens", "pad_128", "changing_tokens"),
        *("wire_bfloat16", "checkpointed", "placed_duplicates", "in_chunks"),
    )
)
_SHORTER: tuple[BackendSpec, ...] = (*OLDER_RELEASES, {"name": "deepep", "emulate": "v2.5.0", "expand": True})


def chosen_cases(*, short: bool) -> Iterator[Any]:
    """Yield a parameter for each case, a function that runs it: of the short selection, or of all other cases."""
    ranks = Ranks()
    with more_backends():
        for backend in BACKENDS:
            for case in backend_cases(backend):
                if _is_run(case, backend) and _is_short(case, backend) is short:
                    run, name = partial(run_case, backend, case, ranks), f"{describe(backend)}-{case.id}"
                    yield pytest.param(run, id=name, marks=pytest.mark.slow if _is_slow(case, backend) else ())


def _is_run(case: Case, backend: BackendSpec) -> bool:
    """Return whether a backend runs a case at all; see ``IN_ONE_LAYOUT``."""
    if backend not in IN_ONE_LAYOUT:
        return True
    if case.scenario.graph_safe:
        return case.input_layout == "bshd" and case.ep_size == 2
    return case.input_layout == "bshd" and (case.ep_size == 4 or backend not in OLDER_RELEASES)


def _is_short(case: Case, backend: BackendSpec) -> bool:
    """Return whether ``make test`` or ``make slow`` runs a case.

    ``local`` is fast and runs all cases. The dispatcher cuts or masks rows before a backend sees them, on any number of
    ranks, so it is enough that two ranks run the other layouts.
    """
    static, name = case.scenario.graph_safe, _name(case)
    if backend == "local":
        return True
    if backend not in IN_ONE_LAYOUT:
        if name in OF_THE_DISPATCHER and (case.ep_size == 1 or (static and case.ep_size == 4)):
            return False
        return case.input_layout == "bshd" or case.ep_size == 2
    if static:
        return name in OF_EACH_KIND_OF_CALL if backend in _SHORTER else name not in OF_THE_DISPATCHER
    if name in OF_THE_DISPATCHER and (case.ep_size != 4 or "emulate" in backend):
        return False
    return case.ep_size != 2


def _is_slow(case: Case, backend: BackendSpec) -> bool:
    """Return whether ``make test`` leaves a case of the short selection to ``make slow``."""
    return backend in IN_ONE_LAYOUT and _name(case) not in OF_EACH_KIND_OF_CALL


def _name(case: Case) -> str:
    """Return the name of a scenario without the mode in which it runs."""
    return case.scenario.name.removesuffix("_graph_safe")
