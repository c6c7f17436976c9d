"""Layers of a vendor on ranks in processes of their own, each held against the dense layer there."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta

import torch.distributed as dist

from moe_dispatch_testing import run_processes
from moe_dispatch_testing.emulation import hybrid, imported_as_deep_ep
from tests.integration.deep_ep_users.cpu import cpu_for_cuda
from tests.integration.deep_ep_users.dense import TOLERANCE, Case, Tensors, dense, worst_row

# Ranks import the vendor's package before they meet, on machines that others use too.
TIMEOUT = timedelta(seconds=180)
hybrid.checks_handles = False  # the vendors' own layers let handles of old releases go too early

# Runs a layer forward. What it returns runs the backward, and returns what ``dense`` does.
Forward = Callable[[Case, int, dist.ProcessGroup], Callable[[], Tensors]]
Jobs = Mapping[str, Sequence[Case]]
# Of one rank, by name: an error by tensor for each case, or what was raised.
Results = dict[str, list[dict[str, float]] | str]


def run_jobs(forward: Forward, release: str, jobs: Jobs, ep_size: int) -> list[Results]:
    """The results of every rank, by rank.

    The cases under one name are in flight together: all go forward, then all backward, in the same order.
    """
    return run_processes(_on_rank, ep_size, forward, release, jobs, timeout=TIMEOUT)


def require_dense(results: list[Results], name: str, wanted: tuple[str, ...]) -> None:
    """Fail where the cases under one name are not the dense layer, or have other tensors than ``wanted``."""
    for rank, by_name in enumerate(results):
        found = by_name[name]
        assert not isinstance(found, str), f"rank {rank}:\n{found}"
        for errors in found:
            assert tuple(errors) == wanted
            assert all(error <= TOLERANCE for error in errors.values()), f"rank {rank}: {errors}"


def _on_rank(rank: int, forward: Forward, release: str, jobs: Jobs) -> Results:
    with imported_as_deep_ep(release):
        return {name: _errors(cases, forward, rank) for name, cases in jobs.items()}


def _errors(cases: Sequence[Case], forward: Forward, rank: int) -> list[dict[str, float]] | str:
    assert dist.group.WORLD is not None
    try:
        with cpu_for_cuda():
            running = [forward(case, rank, dist.group.WORLD) for case in cases]
            outcomes = [backward() for backward in running]
        return [_differences(got, dense(case)[rank]) for case, got in zip(cases, outcomes, strict=True)]
    except Exception:
        return traceback.format_exc()


def _differences(got: Tensors, want: Tensors) -> dict[str, float]:
    return {name: worst_row(tensor, want[name]) for name, tensor in got.items()}
