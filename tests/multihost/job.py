"""The script that torchrun starts on the hosts: ``job.py kit``, ``steps TIMEOUT NUMBER`` or ``nodes TIMEOUT ROUNDS``.

``steps`` trains a layer and logs each step to ``run/``. TIMEOUT is the timeout of the process group in seconds, and
NUMBER the number of steps. ``MOE_DISPATCH_WATCHDOG`` may set the watchdog.

``nodes`` runs an exchange and its backward on ``alltoall`` and ``alltoall_by_node`` in turn, and prints what it
measured as JSON.
"""

from __future__ import annotations

import datetime
import itertools
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from moe_dispatch import DispatcherConfig, Routing, build_dispatcher
from moe_dispatch_testing import SCENARIOS, Case
from moe_dispatch_testing.case import case_config, run_rank
from moe_dispatch_testing.kit import describe
from moe_dispatch_tools.traces import RunLog

KIT = ("balanced", "rank_without_tokens", "two_in_flight", "checkpointed", "bfloat16")
BY_NODE: dict[str, Any] = {"name": "alltoall_by_node"}
BACKENDS = ("allgather", "alltoall", BY_NODE)


def run_kit() -> None:
    """Run a slice of the conformance kit on all ranks, and say what ran."""
    torch.set_deterministic_debug_mode("error")  # fresh memory holds NaN
    group = dist.group.WORLD
    for backend, scenario in itertools.product(BACKENDS, (each for each in SCENARIOS if each.name in KIT)):
        case = Case(scenario=scenario, ep_size=dist.get_world_size(), input_layout="bshd", row_counts="agree")
        run_rank(case_config(backend, case), group, case)
        if dist.get_rank() == 0:
            print(f"passed {describe(backend)} {scenario.name}", flush=True)


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


def run_nodes(rounds: int) -> None:
    """Measure one and two legs on 2 ranks per host: seconds of an exchange, and bytes on the link of this host."""
    rank, size, per_host, experts, top_k, hidden, rows = dist.get_rank(), dist.get_world_size(), 2, 16, 6, 1024, 1024
    sizes: dict[str, Any] = {"num_experts": experts, "top_k": top_k, "hidden_size": hidden}
    backends = {"1": {"name": "alltoall"}, "2": BY_NODE, "2, configured": {**BY_NODE, "ranks_per_node": per_host}}
    layers = {
        name: build_dispatcher(DispatcherConfig(backend=backend, **sizes), dist.group.WORLD)
        for name, backend in backends.items()
    }
    torch.manual_seed(rank)
    ids = torch.rand(rows, experts).argsort(1)[:, :top_k].contiguous()
    weights, x = torch.rand(rows, top_k).requires_grad_(), torch.randn(rows, hidden).bfloat16().requires_grad_()
    owner = ids // (experts // size)
    pairs = {
        # A row goes to a rank of the other host, or to the other host.
        "1": sum(len({one for one in row if one // per_host != rank // per_host}) for row in owner.tolist()),
        "2": sum(len({one // per_host for one in row} - {rank // per_host}) for row in owner.tolist()),
    }
    # A row with weights and ids, the row back, its gradient, and the gradient back with the gradients of the weights.
    payload = {name: count * (4 * 2 * hidden + 6 * top_k + 4 * top_k) for name, count in pairs.items()}
    seconds: dict[str, list[float]] = {name: [] for name in layers}
    link: dict[str, int] = dict.fromkeys(layers, 0)
    legs: dict[str, int] = {}
    for turn in range(rounds + 1):
        for name, layer in layers.items():
            dist.barrier()
            before, begin = sent_by_link(), time.perf_counter()
            sent = layer.dispatch(x, Routing(ids, weights))
            layer.combine(sent.rows, sent).backward(x.detach())
            dist.barrier()
            legs[name] = 1 if hasattr(sent.state.route, "leg") else 2
            if turn:  # the first turn warms up
                seconds[name].append(time.perf_counter() - begin)
                link[name] += sent_by_link() - before
    found = {
        "seconds": {name: statistics.median(times) for name, times in seconds.items()},
        "link": {name: nbytes // rounds for name, nbytes in link.items()},
        "payload": payload,
        "legs": legs,
    }
    print(f"rank {rank}: measured {json.dumps(found)}", flush=True)


def sent_by_link() -> int:
    """The bytes that the interface of this host has sent."""
    for line in Path("/proc/net/dev").read_text().splitlines():
        if (name := line.partition(":"))[0].strip() == "eth0":
            return int(name[2].split()[8])
    raise RuntimeError("this host has no eth0")


if __name__ == "__main__":
    task, *numbers = sys.argv[1:]
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=float(numbers[0] if numbers else 60)))
    run_kit() if task == "kit" else {"steps": run_steps, "nodes": run_nodes}[task](int(numbers[1]))
    dist.destroy_process_group()
