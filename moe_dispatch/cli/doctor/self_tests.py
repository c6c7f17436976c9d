"""Runs ``self_test()`` of many dispatchers on the ranks of a command; one may fail or die without the others."""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, final

import torch

from moe_dispatch.cli.place import Place
from moe_dispatch.cli.ranks import Send, on_ranks, under_torchrun
from moe_dispatch.communication import Communicator
from moe_dispatch.config import DispatcherConfig
from moe_dispatch.dispatchers import build_dispatcher
from moe_dispatch.dispatchers.opening import ranks_per_node
from moe_dispatch.errors import ConfigError, MoEDispatchError
from moe_dispatch.testing import RankFailed


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """One self-test.

    Attributes:
        config: config of the dispatcher.
        alone: whether it runs on one rank without a group; else on all ranks.
        on_cpu: whether it runs on the CPU, as an emulation does; else on the device of the ranks.
    """

    config: DispatcherConfig
    alone: bool = False
    on_cpu: bool = False


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class SelfTest:
    """The result of one self-test.

    Attributes:
        ranks: number of ranks that took part.
        device: type of their device.
        passed: None if the test could not run, because the config does not fit these ranks.
        error: why the test could not run, or what was wrong.
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
        ranks: number of ranks.
        ranks_per_node: largest number of consecutive ranks that share a host on every host.
        nodes: number of hosts.
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

    Args:
        jobs: self-tests by a name that the caller chooses.
        ranks: number of processes to start. Under torchrun its number of ranks counts.
        on_done: called with the number of finished jobs and the number of all jobs.

    Returns:
        Results by name, and the topology of the ranks. If a rank dies or raises an error that is not of this library,
        its test fails, and new processes are started for the rest. Torchrun cannot start new processes.

    Raises:
        RankFailed: under torchrun, or before the first test.
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
    logging.getLogger("moe_dispatch").setLevel(logging.ERROR)  # which backends are emulated is in the result
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
    except ConfigError as refusal:  # of these ranks or this model
        passed, error = None, str(refusal)
    except MoEDispatchError as failure:
        passed, error = False, str(failure)
    return SelfTest(ranks=_ranks(job, place.size), device=device.type, passed=passed, error=error)


def _ranks(job: Job, ranks: int) -> int:
    return 1 if job.alone else ranks
