"""Conformance cases on ranks that are processes, with gloo as the default group."""

from __future__ import annotations

import torch
import torch.distributed as dist

from moe_dispatch.backends import known_backends
from moe_dispatch_testing import SCENARIOS, Case, run_processes
from moe_dispatch_testing.case import case_config, run_rank
from moe_dispatch_testing.kit import excuse
from tests.conformance.backends import more_backends

EP_SIZE = 2
NAMES = ("balanced", "rank_without_tokens", "idle_ranks_detached", "two_in_flight", "checkpointed", "bfloat16")


def run_all(rank: int) -> list[tuple[str, str]]:
    """Run the cases on one rank, and return the backend and scenario of each."""
    ran = []
    torch.set_deterministic_debug_mode("error")  # use_deterministic_algorithms would import a compiler for it
    with more_backends():
        for backend in known_backends():
            for scenario in SCENARIOS:
                if scenario.name not in NAMES or excuse(backend, scenario, EP_SIZE) is not None:
                    continue
                case = Case(scenario=scenario, ep_size=EP_SIZE, input_layout="bshd", row_counts="agree")
                run_rank(case_config(backend, case), dist.group.WORLD, case)
                ran.append((backend, scenario.name))
    return ran


def test_scenarios_in_processes() -> None:
    first, second = run_processes(run_all, EP_SIZE)
    assert first == second
    backends = ("allgather", "alltoall", "alltoall_by_node", "ring", "strict")
    assert set(first) == {(backend, name) for backend in backends for name in NAMES}
