"""Ranks that differ: pairs of manners on every backend that runs on two ranks. ``make kit`` runs all pairs."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist

from moe_dispatch import DispatcherConfig, build_dispatcher
from moe_dispatch_testing import run_processes
from moe_dispatch_testing.case import BackendSpec
from moe_dispatch_testing.differences import run_each_manner
from moe_dispatch_testing.kit import describe, difference_settings
from moe_dispatch_testing.ranks import Ranks
from tests.conformance.backends import BACKENDS, more_backends
from tests.dispatchers.layer import SAFE, outcomes, random_routing, random_rows, small_config

RANKS = Ranks()
SHORT: tuple[BackendSpec, ...] = ("alltoall", "allgather", {"name": "hybridep", "emulate": "hybridep-746"})


def difference_cases(*, short: bool) -> list[Any]:
    """Return backends and settings: of the short selection, or all."""
    with more_backends():
        return [
            pytest.param(backend, setting, id=f"{describe(backend)}-{setting}")
            for backend in (SHORT if short else BACKENDS)
            for setting in difference_settings(backend)
        ]


@pytest.mark.parametrize(("backend", "setting"), difference_cases(short=True))
def test_ranks_that_differ(backend: BackendSpec, setting: str) -> None:
    run_each_manner(backend, setting, RANKS)


def _fails(group: dist.ProcessGroup, config: DispatcherConfig, where: str) -> None:
    """Make two steps. Rank 1 raises in its experts, in their backward, or between the steps."""
    dispatcher = build_dispatcher(config, group)
    for _ in range(2):
        x = random_rows(4).requires_grad_()
        sent = dispatcher.dispatch(x, random_routing(4))
        rows = sent.rows * 2
        if group.rank() == 1 and where == "experts":
            raise ArithmeticError(where)
        if group.rank() == 1 and where == "backward":
            rows.register_hook(_raise_in_backward)
        dispatcher.combine(rows, sent).sum().backward()
        if group.rank() == 1 and where == "optimizer":
            raise ArithmeticError(where)


def _raise_in_backward(grad: torch.Tensor) -> torch.Tensor:
    raise ArithmeticError("backward")


def _told_where_a_rank_fails(rank: int) -> dict[str, list[str]]:
    told = {}
    both: tuple[dict[str, Any], ...] = ({}, SAFE)
    for fields in both:
        config = small_config(watchdog=1, **fields)
        for where in ("experts", "backward", "optimizer"):
            errors = outcomes(partial(_fails, config=config, where=where), 2)
            told[f"{where}, {fields}"] = [f"{type(error).__name__}: {error}" for error in errors]
    return told


@pytest.mark.slow
def test_errors_of_one_rank_are_its_own_and_the_watchdog_names_it() -> None:
    """In a process of its own, because groups with a rank that is gone cannot be used again."""
    (told,) = run_processes(_told_where_a_rank_fails, 1)
    for case, (waiting, failed) in told.items():
        assert failed == f"ArithmeticError: {case.partition(',')[0]}"
        assert waiting.startswith("LostPeerError")
        assert "Look at rank 1 first" in waiting, case
