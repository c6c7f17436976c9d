"""Measure what replay costs beside a training step of the demo's model: python tests/replay/cost.py.

One process. Each round measures the processor time of a step, and of a cut with its lookups. It prints the medians and
their ratio. Each layer is checkpointed, so memory holds the activations of one layer. Since this makes the step longer
by one forward, the ratio without that forward is printed too.
"""

from __future__ import annotations

import argparse
import resource
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn import functional as F

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "examples")]

from moe_dispatch import THD, DispatcherConfig  # noqa: E402
from moe_dispatch.replay import RoutingTable  # noqa: E402
from packed_text.model import ByteLanguageModel, ModelShape  # noqa: E402


def seconds(work: Callable[[], object]) -> float:
    start = time.process_time()  # other processes of the machine do not count
    work()
    return time.process_time() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--layers", type=int, default=48)
    parser.add_argument("--experts", type=int, default=16)
    given = parser.parse_args()
    torch.set_num_threads(1)  # on a busy machine, threads that wait for each other would count as work
    config = DispatcherConfig(backend="local", num_experts=given.experts, top_k=8, hidden_size=256)
    model = ByteLanguageModel(config, None, ModelShape(num_layers=given.layers))
    model.blocks = torch.nn.ModuleList(checkpoint_wrapper(block) for block in model.blocks)
    lengths = [given.tokens // 8] * 8
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0)
    ids = [torch.randint(given.experts, (length, given.layers, 8)) for length in lengths]
    table = RoutingTable(enumerate(ids), num_experts=given.experts)
    tokens, targets = torch.randint(256, (given.tokens,)), torch.randint(256, (given.tokens,))

    def step() -> None:
        model.zero_grad()
        logits, _ = model(tokens, cu_seqlens)
        F.cross_entropy(logits, targets).backward()

    @torch.no_grad()
    def forward() -> None:
        model(tokens, cu_seqlens)

    def replay() -> None:
        cut = table.cut(THD(cu_seqlens), range(8))
        for layer in range(given.layers):
            cut.routing_for(layer)

    replay()
    rounds = [tuple(map(seconds, (step, forward, replay))) for _ in range(given.rounds)]
    step_s, forward_s, replay_s = (statistics.median(times) for times in zip(*rounds, strict=True))
    print(
        f"processor time of a training step: {step_s:.2f} s, in which each forward runs twice, {forward_s:.2f} s; cut "
        f"and {given.layers} lookups: {1000 * replay_s:.1f} ms"
    )
    shares = [100 * replay_s / whole_s for whole_s in (step_s, step_s - forward_s)]
    print(
        f"ratio: {shares[0]:.3f} %, without the second forward {shares[1]:.3f} %, one thread, torch {torch.__version__}"
    )
    print(f"largest memory of the process: {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20:.2f} GiB")
    print(f"table: {table.nbytes / 2**20:.1f} MiB, {table.bytes_per_entry} bytes for each token and layer")


if __name__ == "__main__":
    main()
