"""Compare a layer without balancing, with a placement of ``eplb`` and with exact plans, on eight routings.

    python examples/balance_workloads.py --ranks 4 --tokens 1024 --picture workloads.svg

All sides of the comparison take turns in one process group. A step is the forward and the backward of one MoE layer
with grouped GEMMs. ``eplb`` places experts once, from the rows of the steps before. The other sides plan each step.
Every number but the time of a step is the same on any machine.

Source: the names of the workloads, and what each shows, are those of Megatron-LM pull request 7488.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import matplotlib as mpl
import torch
import torch.distributed as dist
from matplotlib.figure import Figure
from torch import Tensor

from balance_layer import Layer, with_saved_bytes
from moe_dispatch import Routing
from moe_dispatch.balance import ExactPlacement, ExpertPlacement, eplb
from moe_dispatch_testing import run_processes

SIDES: dict[str, dict[str, Any]] = {
    "none": {},
    "eplb": {},
    **{f"exact {bound}": {"balance": "exact", "balance_bound": bound} for bound in (1.0, 1.05, 1.25)},
}
WORKLOADS = {
    "W0_balanced": "every expert gets the same number of rows",
    "W1_hot_expert_set": "an eighth of the experts, at random places, is hot",
    "W2_hot_rank": "as many hot experts, all next to each other",
    "W3_spread_hot_experts": "as many hot experts, at equal distances",
    "W4_source_ragged": "no expert is hot, and ranks have 1, 3, 5, ... parts of the tokens",
    "W5_zero_expert_rank": "the last half of the experts gets no row",
    "W6_rotating_hotspot": "as W2, and every four steps the next experts are hot",
    "W7_burst": "as W2 in one step of eight; no expert is hot in the others",
}
HEAT = 7.0  # a hot expert is drawn so many times as often as another: an eighth of the experts gets half of the rows
PAST = 4  # steps from which eplb places
Numbers = dict[str, float]
Step = dict[str, Numbers]  # by side
COLOURS = {
    "none": "#b8b6ae",
    "eplb": "#f58518",
    "exact 1.0": "#24476b",
    "exact 1.05": "#4c78a8",
    "exact 1.25": "#9fc5e8",
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Compare ways of balancing on eight routings.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--experts", type=int, default=32, help="a multiple of 8 and of the ranks")
    parser.add_argument("--top-k", type=int, default=2)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--inner", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=1024, help="mean number of tokens of a rank")
    parser.add_argument("--spare", type=int, help="spare expert slots of a rank (default: experts / ranks)")
    parser.add_argument("--min-rows", type=int, default=0, help="fewest rows for which an exact plan copies an expert")
    parser.add_argument("--steps", type=int, default=8, help="measured steps of each side")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, default=list(WORKLOADS))
    parser.add_argument("--picture", type=Path, help="file for a picture of the busiest ranks")
    given = parser.parse_args()
    of_ranks = run_processes(on_world, given.ranks, given)
    print(
        "workload | side | busiest/mean: worst, mean | busiest rank: rows, saved MB | copies | moved MB | time | error"
    )
    ratios: dict[str, dict[str, float]] = {}
    for workload in given.workloads:
        steps = list(zip(*(of_rank[workload] for of_rank in of_ranks), strict=True))
        ratios[workload] = {side: max(busiest(steps, side)) for side in SIDES}
        for side in SIDES:
            print(f"{workload:21} | {side:10} | {line(steps, side)}")
    if given.picture:
        draw_picture(ratios, given.picture)


def on_world(rank: int, given: argparse.Namespace) -> dict[str, list[Step]]:
    """Measure all workloads in the default group."""
    world = dist.group.WORLD
    assert world is not None
    return {workload: measure(world, workload, given) for workload in given.workloads}


def measure(group: dist.ProcessGroup, workload: str, given: argparse.Namespace) -> list[Step]:
    """Return what one rank measures in each step."""
    spare = given.experts // given.ranks if given.spare is None else given.spare
    layers = {}
    for side, fields in SIDES.items():
        slots = {"spare_experts_per_rank": 0 if side == "none" else spare}
        least = {"balance_min_rows": given.min_rows} if "balance" in fields else {}
        layers[side] = Layer(given, group, **fields, **slots, **least)
    layers["eplb"].dispatcher.place(placement_of_past(workload, spare, given))
    steps = []
    for step in range(PAST - 1, PAST + given.steps):
        x, routing = share_of_rank(group.rank(), workload, step, given)
        results, numbers = {}, {}
        for side in list(SIDES)[:: 1 if step % 2 else -1]:
            results[side], numbers[side] = run_step(group, layers[side], x, routing)
        for side in SIDES:
            numbers[side]["error"] = largest_error(results[side], results["none"])
        steps.append(numbers)
    return steps[1:]  # the first step warms up


def run_step(group: dist.ProcessGroup, layer: Layer, x: Tensor, routing: Routing) -> tuple[list[Tensor], Numbers]:
    """Run forward and backward. Return the result with the gradients of x and of the parameters; and what they cost."""
    x = x.clone().requires_grad_()
    layer.up.grad = layer.down.grad = None
    before = moved_bytes(layer)
    group.barrier().wait()
    start = time.perf_counter()
    result, saved = with_saved_bytes(partial(layer, x, routing))
    result.square().sum().backward()
    numbers = {
        "seconds": time.perf_counter() - start,
        "rows": layer.rows,
        "saved": saved,
        "copies": num_copies(layer.placement),
        "moved": moved_bytes(layer) - before,
    }
    found = (result.detach(), x.grad, layer.up.grad, layer.down.grad)
    return [tensor for tensor in found if tensor is not None], numbers


def moved_bytes(layer: Layer) -> int:
    """Return the bytes of weights and their gradients that this rank has sent."""
    sent = layer.dispatcher.metrics().bytes_sent
    return sent.get("weights", 0) + sent.get("weights.backward", 0)


def num_copies(placement: ExpertPlacement | ExactPlacement | None) -> int:
    """Return the number of slots, of all ranks, whose expert has its home on another rank."""
    if placement is None:
        return 0
    slots = (placement.read() if isinstance(placement, ExactPlacement) else placement).slots
    own = placement.num_experts // len(slots)
    return sum(expert >= 0 and expert // own != rank for rank, held in enumerate(slots) for expert in held)


def largest_error(got: list[Tensor], wanted: list[Tensor]) -> float:
    """Return the largest difference, relative to the largest number of each tensor."""
    pairs = zip(got, wanted, strict=True)
    return max(float((one - other).abs().max() / other.abs().max().clamp(min=1e-30)) for one, other in pairs)


def placement_of_past(workload: str, spare: int, given: argparse.Namespace) -> ExpertPlacement:
    """Return the placement of ``eplb`` for the rows of the first steps. They are the same on all ranks."""
    home = ExpertPlacement.contiguous(given.experts, given.ranks, spare=spare)
    ids = torch.cat([draw(workload, given.seed, step, given)[0] for step in range(PAST)])
    return eplb(torch.bincount(ids.flatten(), minlength=given.experts), home, ranks_per_node=given.ranks)


def share_of_rank(rank: int, workload: str, step: int, given: argparse.Namespace) -> tuple[Tensor, Routing]:
    """Return x and routing of one rank."""
    ids, weights, x = draw(workload, given.seed, step, given)
    part = slice(*(first_token(which, workload, len(x), given.ranks) for which in (rank, rank + 1)))
    return x[part], Routing(ids[part], weights[part])


def first_token(rank: int, workload: str, total: int, ranks: int) -> int:
    """Return where the tokens of a rank begin."""
    if workload == "W4_source_ragged":
        return int(total * rank**2 // ranks**2)
    return int(total * rank // ranks)


def draw(workload: str, seed: int, step: int, given: argparse.Namespace) -> tuple[Tensor, Tensor, Tensor]:
    """Return ids, weights and x of the tokens of all ranks. They do not depend on the number of ranks."""
    total = given.tokens * given.ranks
    generator = torch.Generator().manual_seed(1000 * (8 * seed + list(WORKLOADS).index(workload)) + step)
    if workload == "W0_balanced":
        ids = torch.arange(total * given.top_k).remainder(given.experts).view(total, given.top_k)
    else:
        odds = odds_of_experts(workload, seed, step, given.experts)
        ids = torch.multinomial(odds.expand(total, -1), given.top_k, generator=generator)
    weights = torch.rand(total, given.top_k, generator=generator)
    return ids, weights, torch.randn(total, given.hidden, generator=generator)


def odds_of_experts(workload: str, seed: int, step: int, experts: int) -> Tensor:
    """Return how often each expert is drawn, relative to the others."""
    odds, hot = torch.ones(experts), torch.arange(experts // 8)
    if workload == "W1_hot_expert_set":
        hot = torch.randperm(experts, generator=torch.Generator().manual_seed(seed))[: len(hot)]
    elif workload == "W3_spread_hot_experts":
        hot = hot * 8
    elif workload == "W6_rotating_hotspot":
        hot = (hot + step // PAST * len(hot)) % experts
    elif workload == "W4_source_ragged" or (workload == "W7_burst" and step % 8 != 5):
        hot = hot[:0]
    elif workload == "W5_zero_expert_rank":
        hot, odds[experts // 2 :] = hot[:0], 0
    odds[hot] = HEAT
    return odds


def busiest(steps: Sequence[Sequence[Step]], side: str) -> list[float]:
    """Return the rows of the busiest rank divided by the mean, for each step."""
    by_step = ([of_rank[side]["rows"] for of_rank in step] for step in steps)
    return [max(rows) * len(rows) / sum(rows) for rows in by_step]


def line(steps: Sequence[Sequence[Step]], side: str) -> str:
    """Return a line of the table. Copies and moved bytes are means of a step; rows and saved bytes are the largest."""
    ratios = busiest(steps, side)
    rows, saved, error = (
        max(of_rank[side][name] for step in steps for of_rank in step) for name in ("rows", "saved", "error")
    )
    copies = statistics.mean(step[0][side]["copies"] for step in steps)
    moved = statistics.mean(sum(of_rank[side]["moved"] for of_rank in step) for step in steps)
    slowest = [{name: max(of_rank[name]["seconds"] for of_rank in step) for name in (side, "none")} for step in steps]
    times = statistics.median(of[side] / of["none"] for of in slowest)
    return (
        f"{max(ratios):5.2f}, {statistics.mean(ratios):5.2f} | {rows:6.0f}, {saved / 1e6:6.1f} | {copies:5.1f} | "
        f"{moved / 1e6:6.1f} | {times:5.2f} | {error:.0e}"
    )


def draw_picture(ratios: dict[str, dict[str, float]], path: Path) -> None:
    """Draw the busiest rank of the worst step of each workload and side."""
    with mpl.rc_context(
        {"svg.fonttype": "none", "svg.hashsalt": "workloads", "font.size": 9, "font.sans-serif": "DejaVu Sans"}
    ):
        figure = Figure(figsize=(8, 3), layout="constrained")
        axes = figure.add_subplot()
        for which, side in enumerate(SIDES):
            places = [place + 0.16 * (which - 2) for place in range(len(ratios))]
            axes.bar(places, [of[side] for of in ratios.values()], width=0.16, color=COLOURS[side], label=side)
        axes.set_xticks(range(len(ratios)), [name.replace("_", "\n") for name in ratios])
        axes.axhline(1, color="#1f2933", linewidth=0.8)
        axes.set_ylabel("busiest rank / mean")
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(ncols=len(SIDES), frameon=False, loc="lower center", bbox_to_anchor=(0.5, 1))
        figure.savefig(path, metadata={"Date": None})


if __name__ == "__main__":
    main()
