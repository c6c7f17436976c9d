"""The script that torchrun starts on the hosts: ``job.py kit``, or ``job.py steps TIMEOUT NUMBER``.

``steps`` trains a layer and logs each step to ``run/``. TIMEOUT is the timeout of the process group in seconds, and
NUMBER the number of steps. ``MOE_DISPATCH_WATCHDOG`` may set the watchdog.
"""

from __future__ import annotations

import datetime
import itertools
import sys

import torch
import torch.distributed as dist

from moe_dispatch import DispatcherConfig, Routing, build_dispatcher
from moe_dispatch.testing import SCENARIOS, Case
from moe_dispatch.testing.case import case_config, run_rank
from moe_dispatch.traces import RunLog

KIT = ("balanced", "rank_without_tokens", "two_in_flight", "checkpointed", "bfloat16")
BACKENDS = ("allgather", "alltoall")


def run_kit() -> None:
    """Run a slice of the conformance kit on all ranks, and say what ran."""
    torch.set_deterministic_debug_mode("error")  # fresh memory holds NaN
    group = dist.group.WORLD
    for backend, scenario in itertools.product(BACKENDS, (each for each in SCENARIOS if each.name in KIT)):
        case = Case(scenario=scenario, ep_size=dist.get_world_size(), input_layout="bshd", row_counts="agree")
        run_rank(case_config(backend, case), group, case)
        if dist.get_rank() == 0:
            print(f"passed {backend} {scenario.name}", flush=True)


def run_steps(number: int) -> None:
    """Train a layer, and log every step."""
    rank, size = dist.get_rank(), dist.get_world_size()
    config = DispatcherConfig.load(backend="alltoall", num_experts=2 * size, top_k=2, hidden_size=64)
    dispatcher = build_dispatcher(config, dist.group.WORLD)
    print(f"rank {rank}: {dispatcher._channel.shape.ranks_per_node} ranks per node", flush=True)
    torch.manual_seed(rank)
    x = torch.randn(100 + rank, 64, requires_grad=True)
    with RunLog.record(dispatcher, "run") as log:
        for step in range(number):
            routing = Routing(torch.randint(2 * size, (len(x), 2)), torch.rand(len(x), 2))
            sent = dispatcher.dispatch(x, routing)
            dispatcher.combine(sent.rows, sent).sum().backward()
            log.step()
            print(f"rank {rank}: step {step}", flush=True)


if __name__ == "__main__":
    task, *numbers = sys.argv[1:]
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=float(numbers[0] if numbers else 60)))
    run_kit() if task == "kit" else run_steps(int(numbers[1]))
    dist.destroy_process_group()
