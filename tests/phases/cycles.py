"""Phases as in colocated reinforcement learning: train, release, destroy and make groups anew, evaluate, train.

``python -m tests.phases.cycles 50`` checks 50 cycles on each backend, which takes 20 minutes, and measures cycles with
``release``, and with ``close`` and a build.
"""

from __future__ import annotations

import datetime
import gc
import os
import statistics
import sys
import tempfile
import threading
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from moe_dispatch import Dispatched, Dispatcher, DispatcherConfig, Routing
from moe_dispatch.dispatchers import channel as channels
from moe_dispatch.dispatchers import release
from moe_dispatch_testing import run_processes

RANKS, EXPERTS, TOP_K = 4, 8, 2
SAFE: dict[str, Any] = {"graph_safe": True, "max_tokens_per_rank": 8}
CASES: dict[str, dict[str, Any]] = {
    "alltoall": {"backend": "alltoall"},
    "alltoall, graph-safe": {"backend": "alltoall", **SAFE},
    "alltoall, exact balance": {"backend": "alltoall", "balance": {"name": "exact", "min_rows": 0}},
    "alltoall_by_node": {"backend": {"name": "alltoall_by_node", "ranks_per_node": 2}},
    "allgather": {"backend": "allgather"},
    "allgather, graph-safe": {"backend": "allgather", **SAFE},
    "deepep v1": {"backend": {"name": "deepep", "emulate": "v1.2.1"}},
    "deepep v2.5": {"backend": {"name": "deepep", "emulate": True}},
    "deepep v2.5, graph-safe": {"backend": {"name": "deepep", "emulate": True}, **SAFE},
    "hybridep": {"backend": {"name": "hybridep", "emulate": True}},
    "hybridep, graph-safe": {"backend": {"name": "hybridep", "emulate": True}, **SAFE},
}


class Layer(Dispatcher):
    """An MoE layer with its own experts: one matrix each."""

    def __init__(self, config: DispatcherConfig, group: dist.ProcessGroup, name: str) -> None:
        super().__init__(config, group, name=name)
        hidden, generator = config.hidden_size, torch.Generator().manual_seed(7)
        whole = torch.randn(EXPERTS, hidden, hidden, generator=generator) / hidden**0.5
        self.gate = nn.Parameter(torch.randn(hidden, EXPERTS, generator=generator) / hidden**0.5)
        self.matrices = nn.Parameter(whole.chunk(RANKS)[group.rank()].clone())

    def run_experts(self, sent: Dispatched) -> Tensor:
        if self.config.balance is not None:
            return sent.rows * 0.5  # the same for every expert, wherever a copy of it is
        return sent.grouped_mm(sent.rows, self.matrices.to(sent.rows.dtype)).tanh()

    def layer(self, x: Tensor) -> Tensor:
        weights, ids = (x.float() @ self.gate).softmax(1).topk(TOP_K)
        y: Tensor = self(x, Routing(ids, weights))
        return x + y


class Trainee:
    """Two layers with an optimizer, on a rank with its own number of tokens."""

    def __init__(self, case: str, group: dist.ProcessGroup) -> None:
        self.rank, fields = group.rank(), dict(CASES[case])
        self.dtype = torch.bfloat16 if "emulate" in str(fields["backend"]) else torch.float32
        config = DispatcherConfig(num_experts=EXPERTS, top_k=TOP_K, hidden_size=256, **fields)
        self.layers = nn.ModuleList(Layer(config, group, f"layers.{number}") for number in range(2))
        self.optimizer = torch.optim.AdamW(self.layers.parameters(), lr=1e-2)
        self.steps = 0

    def loss(self) -> Tensor:
        generator = torch.Generator().manual_seed(100 * self.steps + self.rank)
        x = torch.randn(3 + (self.rank + self.steps) % 4, 256, generator=generator).to(self.dtype)
        for layer in self.layers:
            x = layer.layer(x)  # type: ignore[operator]
        return x.float().square().mean()

    def train(self) -> float:
        self.optimizer.zero_grad()
        loss = self.loss()
        loss.backward()
        self.optimizer.step()
        self.steps += 1
        return float(loss.detach())

    def state(self) -> tuple[int, list[list[int]]]:
        """The memory held, and the counts of each layer."""
        counts = [layer.expert_counts().tolist() for layer in self.layers]  # type: ignore[operator]
        return self.layers[0].metrics().memory_held, counts  # type: ignore[operator]

    def evaluate(self) -> float:
        with torch.no_grad():
            return float(self.loss())


def held() -> dict[str, int]:
    """What a process holds: channels, threads, file descriptors."""
    gc.collect()
    return {
        "channels": len(channels._channels),
        "threads": threading.active_count(),
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads of the system": len(os.listdir("/proc/self/task")),
    }


def run(rank: int, case: str, cycles: int, folder: str, *, releases: bool, default: bool) -> dict[str, Any]:
    """Return the losses, and what the process holds at the end of each cycle.

    Without ``releases`` the same steps run on one group.
    """
    trainee: Trainee | None = None
    found: dict[str, Any] = {"losses": [], "held": [], "keys": [], "memory": [], "seconds": []}
    for number in range(cycles + 1):
        start = time.monotonic()
        if not number or releases:
            group = make_group(f"{folder}/{case}-{releases}-{number}", rank, default=default)
        trainee = Trainee(case, group) if trainee is None else trainee
        if number:
            found["losses"].append(trainee.evaluate())
        found["losses"] += [trainee.train(), trainee.train()]
        if releases:
            dist.barrier()
            found["keys"].append(_store().num_keys())
            before, counts = trainee.state()
            release(trainee.layers)
            found["memory"].append((before, trainee.state()[0]))
            assert trainee.state()[1] == counts
            dist.barrier()
            assert _store().num_keys() == found["keys"][-1]
            torch.ones(25 << 20)  # 100 MB for somebody else
            del group
            dist.destroy_process_group()
            found["held"].append(held())
        found["seconds"].append(time.monotonic() - start)
    if not releases:
        close_all(trainee)
        dist.destroy_process_group()
    return found


def close_all(trainee: Trainee | None) -> None:
    assert trainee is not None
    for layer in trainee.layers:
        layer.close()  # type: ignore[operator]


def _store() -> Any:
    return dist.distributed_c10d._get_default_store()


def make_group(file: str, rank: int, *, default: bool) -> Any:
    """Make the default group, and return it or a group of the same ranks beside it."""
    timeout = datetime.timedelta(seconds=100)
    dist.init_process_group("gloo", store=dist.FileStore(file, RANKS), rank=rank, world_size=RANKS, timeout=timeout)
    return dist.group.WORLD if default else dist.new_group(list(range(RANKS)))


def compare(rank: int, cases: list[str], cycles: int, folder: str) -> dict[str, Any]:
    """Run each case with ``release`` on groups that are made anew, and without on one group."""
    torch.set_num_threads(1)
    dist.destroy_process_group()  # of ``run_processes``
    found = {}
    for number, case in enumerate(cases):
        plain, released = (
            run(rank, case, cycles, folder, releases=releases, default=bool(number % 2)) for releases in (False, True)
        )
        found[case] = {**released, "equal": plain["losses"] == released["losses"]}
    make_group(f"{folder}/end", rank, default=True)  # which ``run_processes`` destroys
    return found


def check(found: dict[str, Any]) -> None:
    """Check that the losses of a rank are those without ``release``, and that it holds no more from cycle to cycle."""
    for case, of_case in found.items():
        assert of_case["equal"], case
        assert len(set(of_case["keys"])) == 1, case
        held = of_case["held"]
        assert all(each == held[0] for each in held[1:]), (case, held[0], held[-1])
        assert held[0]["channels"] == 0
        assert {after for _, after in of_case["memory"]} == {0}
        assert len({before for before, _ in of_case["memory"][1:]}) == 1, case


def rebuild(rank: int, case: str, cycles: int, folder: str) -> list[float]:
    """Return the seconds of each cycle with ``close`` and a build of the dispatchers."""
    found = []
    for number in range(cycles + 1):
        start = time.monotonic()
        trainee = Trainee(case, make_group(f"{folder}/{case}-rebuild-{number}", rank, default=True))
        for _ in range(3 if number else 2):
            trainee.train()
        close_all(trainee)
        dist.destroy_process_group()
        found.append(time.monotonic() - start)
    return found


def measure(rank: int, cycles: int, folder: str) -> dict[str, tuple[float, float]]:
    """Return the median seconds of a cycle of each case, with ``release`` and with a new build."""
    torch.set_num_threads(1)
    dist.destroy_process_group()  # of ``run_processes``
    found = {}
    for case in CASES:
        released = run(rank, case, cycles, folder, releases=True, default=True)["seconds"]
        found[case] = statistics.median(released[1:]), statistics.median(rebuild(rank, case, cycles, folder)[1:])
    make_group(f"{folder}/end", rank, default=True)  # which ``run_processes`` destroys
    return found


def main(cycles: int) -> None:
    """Check cycles, and print seconds per cycle, of the slowest rank."""
    with tempfile.TemporaryDirectory() as folder:
        for found in run_processes(compare, RANKS, [*CASES], cycles, folder):
            check(found)
        by_rank = run_processes(measure, RANKS, cycles, folder)
    for case in CASES:
        released, rebuilt = (max(found[case][way] for found in by_rank) for way in range(2))
        print(f"{case:24} {released:.3f} s with release, {rebuilt:.3f} s with close and build")


if __name__ == "__main__":
    main(int(sys.argv[1]))
