"""Measure what replay costs beside a training step of the demo's model: python tests/replay/cost.py.

One process. Each round measures the processor time of a step, and of a cut with its lookups. It prints the medians and
their ratio.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
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
    parser.add_argument("--experts", type=int, default=128)
    given = parser.parse_args()
    config = DispatcherConfig(backend="local", num_experts=given.experts, top_k=8, hidden_size=256)
    model = ByteLanguageModel(config, None, ModelShape(num_layers=given.layers))
    lengths = [given.tokens // 8] * 8
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0)
    ids = [torch.randint(given.experts, (length, given.layers, 8)) for length in lengths]
    table = RoutingTable(enumerate(ids), num_experts=given.experts)
    tokens, targets = torch.randint(256, (given.tokens,)), torch.randint(256, (given.tokens,))

    def step() -> None:
        model.zero_grad()
        logits, _ = model(tokens, cu_seqlens)
        F.cross_entropy(logits, targets).backward()

    def replay() -> None:
        cut = table.cut(THD(cu_seqlens), range(8))
        for layer in range(given.layers):
            cut.routing_for(layer)

    replay()
    pairs = [(seconds(step), seconds(replay)) for _ in range(given.rounds)]
    step_s, replay_s = (statistics.median(times) for times in zip(*pairs, strict=True))
    print(
        f"processor time of a training step: {step_s:.2f} s; cut and {given.layers} lookups: {1000 * replay_s:.1f} ms"
    )
    print(f"ratio: {100 * replay_s / step_s:.2f} %, {torch.get_num_threads()} threads, torch {torch.__version__}")
    print(f"table: {table.nbytes / 2**20:.1f} MiB, {table.bytes_per_entry} bytes for each token and layer")


if __name__ == "__main__":
    main()
