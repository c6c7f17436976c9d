"""Compare the host time of verbs in two checkouts: ``python tests/simulated_cuda/host_time.py OLD [NEW] [--rows 64]``.

NEW is this checkout if it is left out. Each runs in a process of its own, in turns. torch, Triton and this package do
all that they do on a GPU, and a kernel that is launched computes nothing. So the time is that of the host: CPU time of
the thread that calls a verb, and of the process for the backward. There are two ranks, of which one exists. Its
exchanges return at once, and the counts that the host reads are those of even ranks.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist

ROOT = Path(__file__).parents[2]
VERBS = ("dispatch", "combine", "both backwards")
EXPERTS, TOP_K, HIDDEN, RANKS = 8, 2, 256, 2


def serve(rows: int) -> None:
    """Answer each number of steps on stdin with the median microseconds of each verb."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    import moe_dispatch as md
    from moe_dispatch.backends.alltoall import backend as alltoall
    from moe_dispatch.dispatchers.trail import Trail

    backend = cast(Any, alltoall)
    marks: list[int] = []
    local, shares = EXPERTS // RANKS, rows * TOP_K // EXPERTS // RANKS

    def marked(trail: Any, *call: Any, of: Callable[..., int] = Trail.marked) -> int:
        marks[:] = [of(trail, *call)]
        return marks[0]

    def counts(table: torch.Tensor) -> list[int]:
        table.tolist()
        each = [shares] * local + [marks[0] * backend.MARK + rows * 3 // 4]
        return [RANKS * shares] * local + [0] + 2 * RANKS * each

    cast(Any, Trail).marked, backend.read_host = marked, counts
    torch.cuda.set_device(0)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=RANKS)
    sizes: dict[str, Any] = {"num_experts": EXPERTS, "top_k": TOP_K, "hidden_size": HIDDEN, "pad_multiple": 16}
    dispatcher = md.build_dispatcher(md.DispatcherConfig(backend="alltoall", **sizes), dist.group.WORLD)
    x = torch.randn(rows, HIDDEN).bfloat16().cuda().requires_grad_()
    weights = torch.rand(rows, TOP_K).cuda().requires_grad_()
    routing = md.Routing(torch.rand(rows, EXPERTS).argsort(1)[:, :TOP_K].cuda(), weights)
    plan, ones = dispatcher.plan(like=x), torch.ones_like(x)
    for line in sys.stdin:
        found = []
        for _ in range(int(line)):
            begin = time.thread_time_ns()
            sent = dispatcher.dispatch(x, routing, plan)
            middle = time.thread_time_ns()
            y = dispatcher.combine(sent.rows, sent)
            end, before = time.thread_time_ns(), time.process_time_ns()
            torch.autograd.grad(y, (x, weights), ones)
            found.append((middle - begin, end - middle, time.process_time_ns() - before))
        print(*(statistics.median(of_verb) / 1000 for of_verb in zip(*found, strict=True)), flush=True)


def main() -> None:
    """Print the medians of both trees, and the median, lowest and highest of the ratios of turns."""
    parser = argparse.ArgumentParser()
    parser.add_argument("trees", nargs="+", type=Path)
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--turns", type=int, default=15)
    parser.add_argument("--serve", action="store_true")
    given = parser.parse_args()
    if given.serve:
        sys.path.insert(0, str(given.trees[0]))
        serve(given.rows)
        os._exit(0)
    libraries = Path(torch.__file__).parents[1] / "nvidia" / "cu13" / "lib"
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TRITON_LIBCUDA_PATH": str(libraries)}
    environment.pop("PYTHONPATH", None)
    trees = [tree.resolve() for tree in (*given.trees, ROOT)[:2]]
    processes = [
        subprocess.Popen(
            [sys.executable, __file__, str(tree), "--serve", "--rows", str(given.rows)],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for tree in trees
    ]

    def ask(process: subprocess.Popen[str], steps: int) -> list[float]:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(f"{steps}\n")
        process.stdin.flush()
        return [float(text) for text in process.stdout.readline().split()]

    turns = [[ask(process, 40) for process in processes] for _ in range(1 + given.turns)][1:]
    for number, verb in enumerate(VERBS):
        old, new = ([turn[tree][number] for turn in turns] for tree in (0, 1))
        ratios = [after / before for before, after in zip(old, new, strict=True)]
        times = f"{statistics.median(old):.0f} us, then {statistics.median(new):.0f} us"
        print(f"{verb}: {times}, ratio {statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})")
    for process in processes:
        process.kill()


if __name__ == "__main__":
    main()
