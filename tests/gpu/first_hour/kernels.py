"""The reorder of one rank against a copy: ``python -m tests.gpu.first_hour.kernels kernels cuda full``.

A pass that reads and writes the grouped rows once is compared with a copy of as many bytes in the same run. 1.0 is the
speed of the copy.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

from moe_dispatch._probing import Rejected
from moe_dispatch.permutation import choose_permutation, group_slots, known_permutations, probe_permutation

# Rows, columns, experts, top_k: the shape of the issue, DeepSeek-V3's layer, and a small batch.
SHAPES = {"full": [(8192, 4096, 64, 8), (4096, 7168, 256, 8), (256, 4096, 64, 8)], "small": [(64, 128, 8, 2)]}


def main(_: str, device: str, scale: str) -> None:
    found: dict[str, Any] = {}
    for rows, width, experts, top_k in SHAPES[scale]:
        for name in known_permutations():
            where = f"{name} {rows} x {width}, {experts} experts, top-{top_k}"
            verdict = probe_permutation(name, device)
            if isinstance(verdict, Rejected):
                found[where] = f"skipped: {verdict.reason}"
            else:
                found[where] = _passes(name, device, rows, width, experts, top_k)
    print(json.dumps(found), flush=True)


def _passes(name: str, device: str, rows: int, width: int, experts: int, top_k: int) -> str:
    generator = torch.Generator(device).manual_seed(0)
    ids_TK = torch.rand(rows, experts, generator=generator, device=device).topk(top_k).indices
    index = group_slots(ids_TK, torch.bincount(ids_TK.flatten(), minlength=experts).tolist())
    rows_SD = torch.randn(rows, width, dtype=torch.bfloat16, generator=generator, device=device)
    rows_RD = torch.randn(index.num_grouped, width, dtype=torch.bfloat16, generator=generator, device=device)
    weights_R, copied = torch.rand(index.num_grouped, device=device), torch.empty_like(rows_RD)
    permutation = choose_permutation(name, device)
    # Bytes that a pass must move: the grouped rows once, and the rows or the grouped rows once more.
    grouped, single = rows_RD.nbytes, rows_SD.nbytes
    passes: dict[str, tuple[Callable[[], object], int]] = {
        "expand": (lambda: permutation.expand(rows_SD, index, torch.bfloat16), grouped + single),
        "reduce": (lambda: permutation.reduce(rows_RD, index, weights_R, rows_SD), grouped + single),
        "expand_weighted": (
            lambda: permutation.expand_weighted(rows_SD, index, weights_R, rows_RD, torch.bfloat16),
            2 * grouped + single,
        ),
    }
    copy_bytes_per_ms = 2 * grouped / milliseconds(device, lambda: copied.copy_(rows_RD))
    told = [f"copy {copy_bytes_per_ms / 1e6:.0f} GB/s"]
    for label, (action, moved) in passes.items():
        ms = milliseconds(device, action)
        told.append(f"{label} {moved / ms / copy_bytes_per_ms:.2f} of the copy ({ms * 1e3:.0f} us)")
    return ", ".join(told)


def milliseconds(device: str, action: Callable[[], object]) -> float:
    """Return the shortest of some runs."""
    if device != "cuda":
        begin = time.perf_counter()
        action()
        return (time.perf_counter() - begin) * 1e3
    action()
    found: list[float] = []
    for _ in range(20):
        begin_event, end_event = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin_event.record()
        action()
        end_event.record()
        end_event.synchronize()
        found.append(begin_event.elapsed_time(end_event))
    return max(min(found), 1e-6)  # a simulated device has no clock


if __name__ == "__main__":
    main(*sys.argv[1:])
