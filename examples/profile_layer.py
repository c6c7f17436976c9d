"""Profile forward and backward of one layer on several ranks. Write a Chrome trace and a picture of its ranges.

    python examples/profile_layer.py --backend alltoall --out out

writes ``out/trace.json`` and ``out/trace.png``. chrome://tracing and https://ui.perfetto.dev open the former.

    python examples/profile_layer.py --ranks 2 --chunks 4

prints how long a step in four chunks takes, and a step of a checkpointed layer, divided by the time of a step in one
dispatch.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import matplotlib as mpl
import torch
import torch.distributed as dist
from matplotlib.figure import Figure
from torch import Tensor
from torch.profiler import ProfilerActivity, profile, record_function
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from moe_dispatch import Dispatched, Dispatcher, DispatcherConfig, Routing
from moe_dispatch.dispatchers import run_in_chunks
from moe_dispatch.recompute import keep_routes
from moe_dispatch_testing import run_processes

TOKENS, HIDDEN, EXPERTS, TOP_K = 2048, 512, 16, 4
COLOURS = {"dispatch": "#4c78a8", "experts": "#b8b6ae", "combine": "#f58518"}


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Profile a layer.", formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--backend", default="alltoall")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--out", type=Path, default=Path("out"))
    parser.add_argument("--chunks", type=int, help="time steps in this many chunks, and profile nothing")
    given = parser.parse_args()
    if given.chunks is not None:
        for name, (milliseconds, ratio) in run_processes(time_chunks, given.ranks, given.backend, given.chunks)[
            0
        ].items():
            print(f"{name:30} {milliseconds:6.0f} ms {ratio:5.2f}")
        return
    given.out.mkdir(parents=True, exist_ok=True)
    run_processes(profile_rank, given.ranks, given.backend, given.out / "trace.json")
    draw(ranges(given.out / "trace.json"), given.out / "trace.png", f"{given.backend}, rank 0 of {given.ranks}")
    print(f"{given.out}/trace.json, {given.out}/trace.png")


def layer_steps(rank: int, backend: str, chunks: int = 1) -> dict[str, Callable[[], None]]:
    """Return forwards and backwards of one layer, by what they do with its rows. Collective."""
    config = DispatcherConfig(backend=backend, num_experts=EXPERTS, top_k=TOP_K, hidden_size=HIDDEN)
    rows = -(-TOKENS // chunks)
    whole, kept, recomputed = (
        Dispatcher(config.replace(**fields), dist.group.WORLD)
        for fields in ({}, {"chunks": rows}, {"chunks": {"tokens": rows, "recompute": True}})
    )
    generator = torch.Generator().manual_seed(rank)
    matrices = torch.randn(EXPERTS // dist.get_world_size(), HIDDEN, HIDDEN, generator=generator) / HIDDEN**0.5
    matrices.requires_grad_()
    x = torch.randn(TOKENS, HIDDEN, generator=generator, requires_grad=True)
    weights, ids = torch.randn(TOKENS, EXPERTS, generator=generator).softmax(1).topk(TOP_K)

    def experts(sent: Dispatched) -> Tensor:
        with record_function("experts"):
            return sent.grouped_mm(sent.rows, matrices)

    def step(dispatcher: Dispatcher, pieces: int) -> None:
        parts = (tensor.tensor_split(pieces) for tensor in (x, ids, weights))
        outputs = [
            run_in_chunks(dispatcher, experts, x_ND, Routing(ids_NK, weights_NK))
            for x_ND, ids_NK, weights_NK in zip(*parts, strict=True)
        ]
        torch.cat(outputs).square().sum().backward()

    def checkpointed(**how: Any) -> None:
        def layer(x_TD: Tensor) -> Tensor:
            sent = whole.dispatch(x_TD, Routing(ids, weights))
            return whole.combine(experts(sent), sent)

        checkpoint(layer, x, use_reentrant=False, **how).square().sum().backward()

    saved = partial(create_selective_checkpoint_contexts, [torch.ops.moe_dispatch.dispatch.default])
    return {
        "one dispatch": lambda: step(whole, 1),
        "chunks": lambda: step(kept, 1),
        "chunks without overlap": lambda: step(whole, chunks),
        "chunks with recomputation": lambda: step(recomputed, 1),
        "checkpoint": checkpointed,
        "checkpoint on kept routes": lambda: checkpointed(context_fn=keep_routes),
        "checkpoint, dispatch saved": lambda: checkpointed(context_fn=saved),
    }


def time_chunks(rank: int, backend: str, chunks: int, rounds: int = 9) -> dict[str, tuple[float, float]]:
    """Return the median of the milliseconds of each step, and of its time divided by that of one dispatch."""
    steps = layer_steps(rank, backend, chunks)
    found: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(2 + rounds):
        for name, step in steps.items():
            dist.barrier()
            start = time.perf_counter()
            step()
            dist.barrier()
            found[name].append(1e3 * (time.perf_counter() - start))
    times = {name: all_times[2:] for name, all_times in found.items()}
    whole = times["one dispatch"]
    return {
        name: (median(mine), median(one / other for one, other in zip(mine, whole, strict=True)))
        for name, mine in times.items()
    }


def profile_rank(rank: int, backend: str, path: Path) -> None:
    """Run three steps, and record the last one. Rank 0 writes the trace."""
    step = layer_steps(rank, backend)["one dispatch"]
    for _ in range(2):
        step()
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        step()
    if rank == 0:
        profiler.export_chrome_trace(str(path))


def ranges(path: Path) -> list[dict[str, Any]]:
    """Return the events for the picture: ranges of moe-dispatch, and experts. ``ts`` and ``dur`` are in us."""
    events: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    named = [event for event in events if event.get("ph") == "X" and event.get("cat") == "user_annotation"]
    return [event for event in named if event["name"].startswith("moe_dispatch::") or event["name"] == "experts"]


def draw(events: list[dict[str, Any]], path: Path, title: str) -> None:
    """Draw one line for the forward and one for the backward, with a bar for each range."""
    start = min(event["ts"] for event in events)
    with mpl.rc_context({"font.size": 9, "axes.spines.top": False, "axes.spines.right": False}):
        figure = Figure(figsize=(10, 2.2), layout="constrained")
        axes = figure.subplots()
        for event in events:
            verb, _, way = event["name"].removeprefix("moe_dispatch::").partition(".")
            left, width = (event["ts"] - start) / 1e3, event["dur"] / 1e3
            axes.barh(way or "forward", width, left=left, height=0.6, color=COLOURS[verb], edgecolor="white")
        for name, colour in COLOURS.items():
            axes.barh("forward", 0, color=colour, label=name)
        axes.set(title=title, xlabel="ms", xlim=(0, None))
        axes.invert_yaxis()
        figure.legend(loc="outside right upper", frameon=False)
        figure.savefig(path, dpi=130)


if __name__ == "__main__":
    main()
