"""One rank of a test: a vendor's layers in a process of their own, each held against the dense layer there."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Protocol, final

import torch.distributed as dist

from moe_dispatch_testing import run_processes
from moe_dispatch_testing.emulation import hybrid, imported_as_deep_ep
from tests.integration.deep_ep_users.cpu import cpu_for_cuda
from tests.integration.deep_ep_users.dense import TOLERANCE, Case, Outcome, dense_outcomes, errors

# Ranks import the vendor's package before they meet, on machines that others use too.
TIMEOUT = timedelta(seconds=180)
hybrid.checks_handles = False  # the vendors' own layers let handles of old releases go too early


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """One case on a layer of its own; ``options`` are the vendor's, by its names."""

    case: Case
    options: Mapping[str, Any] = field(default_factory=dict)


class Running(Protocol):
    """A layer after its forward."""

    def backward(self) -> Outcome: ...


Forward = Callable[[Job, int, dist.ProcessGroup], Running]
Jobs = Mapping[str, Sequence[Job]]
# Of one rank, by name: an error by tensor for each job, or what was raised.
Results = dict[str, list[dict[str, float]] | str]


def run_jobs(forward: Forward, release: str, jobs: Jobs, ep_size: int) -> list[Results]:
    """The results of every rank, by rank.

    The jobs under one name are in flight together: all go forward, then all backward, in the same order.
    """
    return run_processes(_on_rank, ep_size, forward, release, jobs, timeout=TIMEOUT)


def require_dense(results: list[Results], name: str, *names: tuple[str, ...]) -> None:
    """Fail where the jobs under one name are not the dense layer; ``names`` are the tensors that each job must have."""
    for rank, by_name in enumerate(results):
        found = by_name[name]
        assert not isinstance(found, str), f"rank {rank}:\n{found}"
        for errors_of_job, wanted in zip(found, names, strict=True):
            assert tuple(errors_of_job) == wanted
            assert all(error <= TOLERANCE for error in errors_of_job.values()), f"rank {rank}: {errors_of_job}"


def _on_rank(rank: int, forward: Forward, release: str, jobs: Jobs) -> Results:
    assert dist.group.WORLD is not None
    with imported_as_deep_ep(release):
        return {name: _errors(together, forward, rank, dist.group.WORLD) for name, together in jobs.items()}


def _errors(jobs: Sequence[Job], forward: Forward, rank: int, group: dist.ProcessGroup) -> list[dict[str, float]] | str:
    try:
        with cpu_for_cuda():
            running = [forward(job, rank, group) for job in jobs]
            outcomes = [one.backward() for one in running]
        return [errors(got, dense_outcomes(job.case)[rank]) for job, got in zip(jobs, outcomes, strict=True)]
    except Exception:
        return traceback.format_exc()
