"""Profile forward and backward of one layer on several ranks. Write a Chrome trace and a picture of its ranges.

    python examples/profile_layer.py --backend alltoall --out out

writes ``out/trace.json`` and ``out/trace.png``. chrome://tracing and https://ui.perfetto.dev open the former.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import matplotlib as mpl
import torch
import torch.distributed as dist
from matplotlib.figure import Figure
from torch.profiler import ProfilerActivity, profile, record_function

from moe_dispatch import DispatcherConfig, Routing, build_dispatcher
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
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    run_processes(profile_rank, given.ranks, given.backend, given.out / "trace.json")
    draw(ranges(given.out / "trace.json"), given.out / "trace.png", f"{given.backend}, rank 0 of {given.ranks}")
    print(f"{given.out}/trace.json, {given.out}/trace.png")


def profile_rank(rank: int, backend: str, path: Path) -> None:
    """Run three steps, and record the last one. Rank 0 writes the trace."""
    config = DispatcherConfig(backend=backend, num_experts=EXPERTS, top_k=TOP_K, hidden_size=HIDDEN)
    dispatcher = build_dispatcher(config, dist.group.WORLD)
    generator = torch.Generator().manual_seed(rank)
    matrices = torch.randn(EXPERTS // dist.get_world_size(), HIDDEN, HIDDEN, generator=generator) / HIDDEN**0.5
    matrices.requires_grad_()
    x = torch.randn(TOKENS, HIDDEN, generator=generator, requires_grad=True)
    weights, ids = torch.randn(TOKENS, EXPERTS, generator=generator).softmax(1).topk(TOP_K)

    def step() -> None:
        sent = dispatcher.dispatch(x, Routing(ids, weights))
        with record_function("experts"):
            outputs = sent.grouped_mm(sent.rows, matrices)
        dispatcher.combine(outputs, sent).square().sum().backward()

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
