"""Layers of a vendor on ranks in processes of their own, each held against the dense layer there."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch.distributed as dist

from moe_dispatch_testing.emulation import imported_as_deep_ep
from tests.integration.deep_ep_users.dense import TOLERANCE, Case, Tensors, dense, worst_row
from tests.integration.jobs import Raised, require, run_checks
from tests.integration.megatron_core.on_cpu import cpu_for_cuda

# Runs a layer forward. What it returns runs the backward, and returns what ``dense`` does.
Forward = Callable[[Case, int, dist.ProcessGroup], Callable[[], Tensors]]


def run_jobs(forward: Forward, release: str, jobs: Mapping[str, Sequence[Case]], ep_size: int) -> dict[str, list[Any]]:
    """By name and rank: an error by tensor for each case, or what was raised.

    The cases under one name are in flight together: all go forward, then all backward, in the same order.
    """
    checks = {name: partial(_errors, cases=cases, forward=forward) for name, cases in jobs.items()}
    return run_checks(checks, ep_size, partial(_with_library, release))


def require_dense(results: list[Any], wanted: tuple[str, ...]) -> None:
    """Fail where the cases under one name are not the dense layer, or have other tensors than ``wanted``."""
    for rank, found in enumerate(require(results)):
        for errors in found:
            assert tuple(errors) == wanted
            assert all(error <= TOLERANCE for error in errors.values()), f"rank {rank}: {errors}"


@contextmanager
def _with_library(release: str, ranks: int) -> Iterator[None]:
    with imported_as_deep_ep(release):
        yield


def _errors(rank: int, cases: Sequence[Case], forward: Forward) -> list[dict[str, float]] | Raised:
    assert dist.group.WORLD is not None
    try:
        with cpu_for_cuda():
            running = [forward(case, rank, dist.group.WORLD) for case in cases]
            outcomes = [backward() for backward in running]
    except Exception:  # all ranks raise alike, so further cases may run
        return Raised(traceback.format_exc())
    return [_differences(got, dense(case)[rank]) for case, got in zip(cases, outcomes, strict=True)]


def _differences(got: Tensors, want: Tensors) -> dict[str, float]:
    return {name: worst_row(tensor, want[name]) for name, tensor in got.items()}
