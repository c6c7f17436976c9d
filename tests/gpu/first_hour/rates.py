"""Byte rates of ``alltoall`` over NCCL: ``python -m tests.gpu.first_hour.rates rates cuda full``.

Each verb is compared with a bare ``all_to_all_single`` of as many bytes in the same process group: 1.0 is its rate. The
verbs also sort, copy and add rows, which the bare exchange does not.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
import torch.distributed as dist

from tests.gpu.first_hour.kernels import milliseconds
from tests.gpu.first_hour.layer import Layer
from tests.gpu.first_hour.verbs import MODES, VERBS, Calls, timed
from tests.gpu.ranks import group_sizes, run_on_gpus

Rates = dict[str, tuple[int, float, float]]


def main(_: str, device: str, scale: str) -> None:
    found: dict[str, Any] = {}
    for size in group_sizes() if device == "cuda" else ():
        for mode, graph_safe in MODES.items() if size > 1 else ():
            by_rank: list[Rates] = run_on_gpus(measure, size, scale == "small", graph_safe, minutes=2)
            for verb in VERBS:
                nbytes, ms, bare_ms = (max(values) for values in zip(*(each[verb] for each in by_rank), strict=True))
                found[f"{size} ranks, {mode}, {verb}"] = (
                    f"{bare_ms / ms:.2f} of the bare rate ({nbytes / 1e6:.3f} MB from a rank in {ms:.3f} ms; "
                    f"bare {nbytes / bare_ms / 1e6:.0f} GB/s)"
                )
    print(json.dumps(found or {"skipped": "it needs two GPUs"}), flush=True)


def measure(group: dist.ProcessGroup, small: bool, graph_safe: bool) -> Rates:
    """Return for each verb the most bytes that a rank sends to others, its time, and that of the bare exchange."""
    layer = Layer("alltoall", "cuda", small=small, group=group, matrices=False, graph_safe=graph_safe)
    calls, dispatcher = Calls(layer, group.rank()), layer.dispatcher
    dispatcher.dispatch(calls.x, calls.routing)  # the first call exchanges more
    before = dispatcher.metrics().bytes_sent
    for verb in VERBS:
        calls.run(verb)
    sent = dispatcher.metrics().bytes_sent
    counts = torch.tensor([sent[verb] - before.get(verb, 0) for verb in VERBS], device="cuda")
    options = dist.AllreduceOptions()
    options.reduceOp = dist.ReduceOp(dist.ReduceOp.MAX)
    group.allreduce([counts], options).wait()
    times = timed(calls, "cuda", 2 if small else 20)
    found = {}
    for verb, nbytes in zip(VERBS, counts.tolist(), strict=True):
        found[verb] = (nbytes, max(times[verb][1], 1e-6), bare(group, nbytes))
    dispatcher.close()
    return found


def bare(group: dist.ProcessGroup, nbytes: int) -> float:
    """Return the milliseconds of an exchange in which each rank sends this many bytes to the others together."""
    part = -(-nbytes // max(group.size() - 1, 1))
    rows = torch.zeros(group.size(), part, dtype=torch.uint8, device="cuda")
    received = torch.empty_like(rows)
    return milliseconds("cuda", lambda: dist.all_to_all_single(received, rows, group=group))


if __name__ == "__main__":
    main(*sys.argv[1:])
