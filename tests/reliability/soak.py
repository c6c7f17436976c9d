"""Run changing shapes for minutes, and see that what a process holds does not grow.

    python tests/reliability/soak.py --minutes 5

Two ranks run two dispatchers on one group. Each round changes the number of tokens (0 to 8192), the layout, and what
requires grad, and every tenth round closes and builds a dispatcher. After each window of rounds a rank counts resident
memory, live tensors, threads and open files. The first hundred rounds warm up caches, a short run fewer;
from then on nothing may grow.
"""

from __future__ import annotations

import argparse
import ctypes
import datetime
import gc
import json
import os
import platform
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from moe_dispatch import BSHD, THD, Dispatched, Dispatcher, DispatcherConfig, Masked, Routing, Rows, build_dispatcher
from moe_dispatch.layouts import Layout
from moe_dispatch_testing import run_processes

EXPERTS, TOP_K, HIDDEN = 8, 2, 32
ROUNDS = 10  # in a window
SHORTEST = 9  # windows
MAY_GROW_MIB = 8.0  # of resident memory, which an allocator does not give back completely
Leak = Callable[[list[Dispatched]], object]  # gets what the dispatches of a round return


@dataclass(frozen=True)
class Count:
    """What a process holds."""

    memory_mib: float
    tensors: int
    threads: int
    files: int


def count() -> Count:
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)  # glibc keeps tens of MiB of freed memory, more or less by chance
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return Count(
        memory_mib=pages * os.sysconf("SC_PAGE_SIZE") / 2**20,
        tensors=sum(issubclass(type(found), torch.Tensor) for found in gc.get_objects()),
        threads=sum(1 for _ in Path("/proc/self/task").iterdir()),
        files=sum(1 for _ in Path("/proc/self/fd").iterdir()),
    )


def build(index: int) -> Dispatcher:
    fields: dict[str, Any] = {"num_experts": EXPERTS, "top_k": TOP_K, "hidden_size": HIDDEN, "watchdog": 60}
    backend = ("alltoall", "allgather")[index]
    return build_dispatcher(DispatcherConfig(backend=backend, **fields), dist.group.WORLD, name=f"layers.{index}")


def batch(generator: torch.Generator, most: int, number: int) -> tuple[torch.Tensor, Layout]:
    """Hidden states of a random number of tokens, at most ``most``, often none or few, in a random layout."""
    kind, size = torch.randint(4, (2,), generator=generator).tolist()
    tokens = int(torch.randint(1 + (0, 8, most // 16, most)[size], (), generator=generator))
    if number < ROUNDS:  # caches are filled once by the largest batch of each layout
        kind, tokens = number % 4, most
    if kind == 0:
        return torch.randn(tokens, HIDDEN), Rows()
    half = tokens // 2
    if kind == 1:
        return torch.randn(2, half, HIDDEN), BSHD()
    if kind == 2:
        return torch.randn(2 * half, HIDDEN), Masked(torch.rand(2 * half, generator=generator) < 0.7)
    return torch.randn(2 * half, HIDDEN), THD(torch.tensor([0, half, 2 * half], dtype=torch.int32))


def one_round(dispatchers: list[Dispatcher], number: int, generator: torch.Generator, most: int) -> list[Dispatched]:
    if number % 10 == 9:
        turn = number // 10 % 2
        dispatchers[turn].close()
        dispatchers[turn] = build(turn)
    all_sent = []
    for dispatcher in dispatchers:
        x, layout = batch(generator, most, number)
        rows = layout.flatten(x).shape[0]
        weights, ids = torch.rand(rows, EXPERTS, generator=generator).topk(TOP_K)
        sent = dispatcher.dispatch(x.requires_grad_(number % 3 > 0), Routing(ids, weights.requires_grad_()), layout)
        dispatcher.combine(sent.rows.tanh(), sent).sum().backward()
        all_sent.append(sent)
    return all_sent


def soak(rank: int, seconds: float, most: int = 8192, leak: Leak = len) -> list[Count]:
    """Counts after each window, until rank 0 says that the time is over."""
    dispatchers, generator = [build(0), build(1)], torch.Generator().manual_seed(rank)
    counts: list[Count] = []
    begin, number = time.monotonic(), 0
    over = torch.zeros(())
    while not over:
        for _ in range(ROUNDS):
            leak(one_round(dispatchers, number, generator, most))
            number += 1
        counts.append(count())
        over.fill_(time.monotonic() - begin > seconds and len(counts) >= SHORTEST)
        dist.broadcast(over, 0)
    return counts


def growth(counts: list[Count]) -> list[str]:
    """What grew from the first windows after the warm-up to the last ones, as sentences."""
    warm_up = min(10, len(counts) // 3)
    early, late = counts[warm_up : warm_up + 3], counts[-3:]
    found = []
    for name, allowed in (("memory_mib", MAY_GROW_MIB), ("tensors", 0), ("threads", 0), ("files", 0)):
        first, last = max(getattr(one, name) for one in early), min(getattr(one, name) for one in late)
        if last > first + allowed:
            found.append(f"{name} grew from {first:g} to {last:g}")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=5)
    options = parser.parse_args()
    timeout = datetime.timedelta(seconds=120)
    problems = []
    print(f"{platform.platform()}, {os.cpu_count()} cores, torch {torch.__version__}, load {os.getloadavg()[0]:.1f}")
    for rank, counts in enumerate(run_processes(soak, 2, 60 * options.minutes, timeout=timeout)):
        print(f"rank {rank}: {len(counts) * ROUNDS} rounds")
        for number in (0, min(10, len(counts) // 3), len(counts) // 2, len(counts) - 1):
            print(f"  after {(number + 1) * ROUNDS} rounds: {json.dumps(asdict(counts[number]))}")
        problems += [f"rank {rank}: {sentence}" for sentence in growth(counts)]
    print("\n".join(problems) or "nothing grew")
    sys.exit(bool(problems))


if __name__ == "__main__":
    main()
