"""Run ``self_test()`` of many dispatchers on the ranks of a command. A test that kills a rank fails alone."""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, final

import torch

from moe_dispatch.communication import Communicator
from moe_dispatch.config import DispatcherConfig
from moe_dispatch.dispatchers import build_dispatcher
from moe_dispatch.dispatchers.opening import ranks_per_node
from moe_dispatch.errors import ConfigError, MoEDispatchError
from moe_dispatch_testing import RankFailed
from moe_dispatch_tools.place import Place
from moe_dispatch_tools.ranks import Send, on_ranks, under_torchrun


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """One self-test.

    Attributes:
        config: Config of the dispatcher.
        alone: Whether the test runs on one rank without a group. Otherwise it runs on all ranks.
        on_cpu: Whether the test runs on the CPU, as an emulation does. Otherwise it runs on the ranks' device.
    """

    config: DispatcherConfig
    alone: bool = False
    on_cpu: bool = False


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class SelfTest:
    """The result of one self-test.

    Attributes:
        ranks: Number of ranks in the test.
        device: Type of their device.
        passed: Whether the test passed; None if it could not run because the config does not fit these ranks.
        error: Why the test could not run, or why it failed.
    """

    ranks: int
    device: str
    passed: bool | None
    error: str | None = None


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Topology:
    """The ranks of a command.

    Attributes:
        launcher: "torchrun", or "here" for processes that the command starts.
        ranks: Number of ranks.
        ranks_per_node: Largest number of consecutive ranks that share a host on every host.
        nodes: Number of hosts.
        transport: "nccl" or "gloo".
    """

    launcher: str
    ranks: int
    ranks_per_node: int
    nodes: int
    transport: str


def run_jobs(
    jobs: Mapping[str, Job], ranks: int, on_done: Callable[[int, int], None]
) -> tuple[dict[str, SelfTest], Topology]:
    """Run self-tests one after the other.

    If a rank dies, or raises an error that is not one of this library's, its test fails. New processes then run the
    remaining tests. Under torchrun there can be no new processes, so the error is raised.

    Args:
        jobs: Self-tests by a name that the caller chooses.
        ranks: Number of processes to start. Under torchrun, torchrun's number of ranks is used.
        on_done: Function that gets the number of finished jobs and the number of all jobs.

    Returns:
        The results by name, and the topology of the ranks.

    Raises:
        RankFailed: A rank failed under torchrun, or before the first test.
    """
    results: dict[str, SelfTest] = {}
    running: list[str] = []

    def hear(message: tuple[str, SelfTest | None]) -> None:
        name, result = message
        running[:] = [name]
        if result is not None:
            running.clear()
            results[name] = result
            on_done(len(results), len(jobs))

    while True:
        pending = {name: job for name, job in jobs.items() if name not in results}
        try:
            topology: Topology = on_ranks(partial(_run_on_rank, pending), ranks, hear)
            return results, topology
        except RankFailed as failure:
            if under_torchrun() or not running:
                raise
            (name,) = running
            hear((name, SelfTest(ranks=_ranks(jobs[name], ranks), device="?", passed=False, error=str(failure))))


def _run_on_rank(jobs: Mapping[str, Job], place: Place, send: Send) -> Topology:
    logging.getLogger("moe_dispatch").setLevel(logging.ERROR)  # the result already shows which backends are emulated
    for name, job in jobs.items():
        send((name, None))
        send((name, _run(job, place)))
    hosts = Communicator(place.control or place.group).gather_json(socket.gethostname(), label="topology")
    return Topology(
        launcher="torchrun" if under_torchrun() else "here",
        ranks=place.size,
        ranks_per_node=ranks_per_node(hosts),
        nodes=len(set(hosts)),
        transport="nccl" if place.device.type == "cuda" else "gloo",
    )


def _run(job: Job, place: Place) -> SelfTest:
    device = torch.device("cpu") if job.on_cpu else place.device
    groups: dict[str, Any] = {"group": None if job.alone else place.group, "control_group": place.control}
    if job.alone or job.on_cpu:  # the control group is on CPUs
        groups = {"group": None if job.alone else place.control or place.group}
    passed: bool | None = True
    error = None
    try:
        dispatcher = build_dispatcher(job.config, **groups)
        dispatcher.self_test(device=device)
        dispatcher.close()
    except ConfigError as refusal:  # the config does not fit these ranks or this model
        passed, error = None, str(refusal)
    except MoEDispatchError as failure:
        passed, error = False, str(failure)
    return SelfTest(ranks=_ranks(job, place.size), device=device.type, passed=passed, error=error)


def _ranks(job: Job, ranks: int) -> int:
    return 1 if job.alone else ranks
