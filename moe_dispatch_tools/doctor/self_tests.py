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
from moe_dispatch.dispatchers.channel import ranks_per_node
from moe_dispatch.errors import ConfigError, MoEDispatchError
from moe_dispatch_testing import RankFailed
from moe_dispatch_tools.place import Place
from moe_dispatch_tools.ranks import Send, on_ranks, under_torchrun


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Testee:
    """A dispatcher to test.

    Attributes:
        config: Config of the dispatcher.
        alone: Whether the test runs on one rank without a group. Otherwise it runs on all ranks.
        on_cpu: Whether the test runs on the CPU, as an emulation does. Otherwise it runs on the ranks' device.
    """

    config: DispatcherConfig
    alone: bool = False
    on_cpu: bool = False


def run_self_tests(
    testees: Mapping[str, Testee], ranks: int, on_done: Callable[[int, int], None]
) -> tuple[dict[str, dict[str, Any]], dict[str, Any]]:
    """Run self-tests one after the other.

    If a rank dies, or raises an error that is not one of this library's, its test fails. New processes then run the
    remaining tests. Under torchrun there can be no new processes, so the error is raised.

    Args:
        testees: Dispatchers to test, by a name that the caller chooses.
        ranks: Number of processes to start. Under torchrun, torchrun's number of ranks is used.
        on_done: Function that gets the number of finished tests and the number of all tests.

    Returns:
        For each name: the number of ``ranks``, their ``device``, whether the test ``passed`` (None if it could not run
        because the config does not fit these ranks), and the ``error``. The topology of the ranks: ``launcher``
        ("torchrun", or "here"), ``ranks``, ``ranks_per_node``, ``nodes`` and ``transport``.

    Raises:
        RankFailed: A rank failed under torchrun, or before the first test.
    """
    results: dict[str, dict[str, Any]] = {}
    running: list[str] = []

    def hear(message: tuple[str, dict[str, Any] | None]) -> None:
        name, result = message
        running[:] = [name]
        if result is not None:
            running.clear()
            results[name] = result
            on_done(len(results), len(testees))

    while True:
        pending = {name: testee for name, testee in testees.items() if name not in results}
        try:
            topology: dict[str, Any] = on_ranks(partial(_run_on_rank, pending), ranks, hear)
            return results, topology
        except RankFailed as failure:
            if under_torchrun() or not running:
                raise
            (name,) = running
            size = 1 if testees[name].alone else ranks
            hear((name, {"ranks": size, "device": "?", "passed": False, "error": str(failure)}))


def _run_on_rank(testees: Mapping[str, Testee], place: Place, send: Send) -> dict[str, Any]:
    logging.getLogger("moe_dispatch").setLevel(logging.ERROR)  # the result already shows which backends are emulated
    for name, testee in testees.items():
        send((name, None))
        send((name, _run(testee, place)))
    hosts = Communicator(place.control or place.group).gather_json(socket.gethostname(), label="topology")
    return {
        "launcher": "torchrun" if under_torchrun() else "here",
        "ranks": place.size,
        "ranks_per_node": ranks_per_node(hosts),
        "nodes": len(set(hosts)),
        "transport": "nccl" if place.device.type == "cuda" else "gloo",
    }


def _run(testee: Testee, place: Place) -> dict[str, Any]:
    device = torch.device("cpu") if testee.on_cpu else place.device
    groups: dict[str, Any] = {"group": None if testee.alone else place.group, "control_group": place.control}
    if testee.alone or testee.on_cpu:  # the control group is on CPUs
        groups = {"group": None if testee.alone else place.control or place.group}
    passed, error = True, None
    try:
        dispatcher = build_dispatcher(testee.config, **groups)
        dispatcher.self_test(device=device)
        dispatcher.close()
    except MoEDispatchError as failure:  # a ConfigError: the config does not fit these ranks or this model
        passed, error = None if isinstance(failure, ConfigError) else False, str(failure)  # type: ignore[assignment]
    return {"ranks": 1 if testee.alone else place.size, "device": device.type, "passed": passed, "error": error}
