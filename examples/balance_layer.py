"""Compare a layer with and without balancing, on Zipf loads: time, busiest rank, and bytes of weights.

The third side, "even", needs no copies: it has the same experts, but on ranks where they make nearly equal loads. A
balanced layer cannot be faster than this one.

    python examples/balance_layer.py --ranks 4 --tokens 256 1024 4096

Steps of the sides take turns in one run. A step is the forward and the backward of one MoE layer with
grouped GEMMs. Ranks that share cores disturb each other, so the table also has the processor time of the busiest rank.
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from moe_dispatch import Dispatched, Dispatcher, DispatcherConfig, Routing, build_dispatcher
from moe_dispatch.balance import ExpertPlacement, eplb
from moe_dispatch.dispatchers import SlotWeights
from moe_dispatch_testing import run_processes

SIDES = ("without", "with", "even")


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Compare a layer with and without balancing.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--experts", type=int, default=32)
    parser.add_argument("--top-k", type=int, default=2)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--inner", type=int, default=512)
    parser.add_argument("--zipf", type=float, nargs="+", default=[1.0], help="exponents of the load of experts")
    parser.add_argument("--sorted", action="store_true", help="the first experts are the busiest; else a drawn order")
    parser.add_argument("--tokens", type=int, nargs="+", default=[256, 1024, 4096], help="tokens of a rank")
    parser.add_argument(
        "--bound", type=float, default=1.0, help="busiest rank over the mean, from which on experts are copied"
    )
    parser.add_argument("--min-rows", type=int, help="fewest rows for which an expert is copied")
    parser.add_argument("--steps", type=int, default=7, help="steps of each side")
    parser.add_argument(
        "--keep-memory", action="store_true", help="keep freed memory in the process, as the allocator of a GPU does"
    )
    parser.add_argument("--picture", help="file for a picture of the ratios")
    given = parser.parse_args()
    if given.keep_memory:  # otherwise glibc returns it, and each tensor above 32 MB pays for its pages again
        os.environ.update(MALLOC_MMAP_MAX_="0", MALLOC_TRIM_THRESHOLD_=str(1 << 40))
    print(
        "zipf, tokens per expert | balance | step ms (quartiles) | busiest rank: cpu ms, rows, saved MB | max/mean | "
        "moved MB"
    )
    ratios: dict[tuple[float, str, str], list[float]] = {}
    for zipf, tokens in itertools.product(given.zipf, given.tokens):
        of_ranks = run_processes(compare, given.ranks, zipf, tokens, given)
        case = f"{zipf:.1f}, {tokens * given.top_k * given.ranks / given.experts:7.0f}"
        for side in SIDES:
            print(line([of_rank[side] for of_rank in of_ranks], side, case))
        for clock in ("wall", "cpu"):
            without, *others = ([of_rank[side] for of_rank in of_ranks] for side in SIDES)
            for side, other in zip(SIDES[1:], others, strict=True):
                found = ratio(slowest(without, clock), slowest(other, clock))
                ratios.setdefault((zipf, side, clock), []).append(found)
                print(f"{case} | {clock} time without / {side}: {found:.2f}")
    if given.picture:
        save_picture(given.picture, given.tokens, ratios)


def save_picture(path: str, tokens: list[int], ratios: dict[tuple[float, str, str], list[float]]) -> None:
    """Draw how many times as fast a balanced step is, by tokens of a rank, and how fast one with even loads is."""
    from matplotlib.figure import Figure  # noqa: PLC0415  (only the picture needs matplotlib)

    figure = Figure(figsize=(6, 3.2), layout="constrained")
    axes = figure.subplots()
    for (zipf, side, clock), values in ratios.items():
        if clock == "wall":
            label = "exact" if side == "with" else "even ranks, no copies"
            axes.plot(tokens, values, "o-" if side == "with" else "s--", label=f"Zipf({zipf:g}), {label}")
    axes.axhline(1, color="gray", linewidth=0.8)
    axes.set(xscale="log", xlabel="tokens of a rank", ylabel="time without balance / time")
    axes.set_xticks(tokens, [str(number) for number in tokens])
    axes.minorticks_off()
    figure.legend(fontsize=8, loc="outside upper center", ncols=2)
    figure.savefig(path, dpi=130)


def compare(rank: int, zipf: float, tokens: int, given: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Return the measurements of one rank, by side."""
    balanced = {
        "balance": {
            "name": "exact",
            "bound": given.bound,
            "min_rows": given.min_rows,
            "spare_experts_per_rank": given.experts // given.ranks,
        },
    }
    world = dist.group.WORLD
    assert world is not None
    layers = {side: Layer(given, world, **(balanced if side == "with" else {})) for side in SIDES}
    x, routing = draw(rank, zipf, tokens, given)
    routings = dict.fromkeys(SIDES, routing) | {"even": evened(routing, world, given.experts)}
    found: dict[str, dict[str, Any]] = {side: {"wall": [], "cpu": []} for side in SIDES}
    for step in range(given.steps + 1):
        for side in (*SIDES, *SIDES)[step % 3 : step % 3 + 3]:
            dist.barrier()
            wall, cpu = time.perf_counter(), time.process_time()
            layers[side](x, routings[side]).square().sum().backward()
            if step:  # the first step warms up
                found[side]["wall"].append(time.perf_counter() - wall)
                found[side]["cpu"].append(time.process_time() - cpu)
    for side, layer in layers.items():
        before = layer.dispatcher.metrics().bytes_sent.get("weights", 0)
        result, saved = with_saved_bytes(partial(layer, x, routings[side]))
        result.sum().backward()
        moved = layer.dispatcher.metrics().bytes_sent.get("weights", 0) - before
        found[side].update(moved=moved, rows=layer.rows, saved=saved)
    return found


class Layer:
    """A MoE layer whose experts are two matrices each. All experts of a layer are drawn from one seed."""

    def __init__(self, given: argparse.Namespace, group: dist.ProcessGroup, **fields: Any) -> None:
        config = DispatcherConfig(
            backend="alltoall", num_experts=given.experts, top_k=given.top_k, hidden_size=given.hidden, **fields
        )
        self.dispatcher: Dispatcher = build_dispatcher(config, group)
        self.slot_weights = SlotWeights(self.dispatcher)
        generator = torch.Generator().manual_seed(group.rank())
        own = given.experts // given.ranks
        self.up = (
            torch.randn(own, given.hidden, given.inner, generator=generator) / given.hidden**0.5
        ).requires_grad_()
        self.down = (
            torch.randn(own, given.inner, given.hidden, generator=generator) / given.inner**0.5
        ).requires_grad_()
        self.rows = 0

    def __call__(self, x: Tensor, routing: Routing) -> Tensor:
        in_flight = self.dispatcher.dispatch(x, routing, async_op=True)
        sent, outputs = self.slot_weights.run(in_flight, experts, self.up, self.down)
        self.rows = len(sent.rows)
        return self.dispatcher.combine(outputs, sent)


def experts(part: Dispatched, up: Tensor, down: Tensor) -> Tensor:
    """Run the experts of some slots, with the weights of these slots."""
    return part.grouped_mm(torch.relu(part.grouped_mm(part.rows, up)), down)


def draw(rank: int, zipf: float, tokens: int, given: argparse.Namespace) -> tuple[Tensor, Routing]:
    """Return x and a routing. Which experts are busy is drawn too, the same on all ranks."""
    order = torch.randperm(given.experts, generator=torch.Generator().manual_seed(0))
    if given.sorted:
        order = torch.arange(given.experts)
    odds = (torch.arange(given.experts) + 1.0).pow(-zipf)[order].expand(tokens, -1)
    generator = torch.Generator().manual_seed(100 + rank)
    ids = torch.multinomial(odds, given.top_k, generator=generator)
    x = torch.randn(tokens, given.hidden, generator=generator, requires_grad=True)
    return x, Routing(ids, torch.rand(tokens, given.top_k, generator=generator))


def evened(routing: Routing, group: dist.ProcessGroup, experts: int) -> Routing:
    """Return the routing with numbers of experts for which the ranks have nearly equal loads."""
    counts_E = torch.bincount(routing.topk_ids.flatten(), minlength=experts)
    dist.all_reduce(counts_E, group=group)
    packed = eplb(counts_E, ExpertPlacement.contiguous(experts, group.size()), ranks_per_node=group.size())
    numbers_E = torch.tensor([slots[0] for slots in packed.slots_of_expert])
    return Routing(numbers_E[routing.topk_ids], routing.topk_weights)


def with_saved_bytes(forward: Callable[[], Tensor]) -> tuple[Tensor, int]:
    """Return the result of a forward, and the bytes that it keeps for the backward.

    Parameters count too. Tensors that share memory count once. The weights of copies do not count: ``SlotWeights``
    frees their memory before the forward ends.
    """
    storages: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: Tensor) -> Tensor:
        storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        result = forward()
    return result, sum(storage.nbytes() for storage in storages.values())


def slowest(of_ranks: list[dict[str, Any]], clock: str) -> list[float]:
    """Return the milliseconds of each step. A step takes as long as its slowest rank."""
    return [1e3 * max(times) for times in zip(*(of_rank[clock] for of_rank in of_ranks), strict=True)]


def ratio(without: list[float], other: list[float]) -> float:
    """Return the ratio of the times of two sides: medians of the fastest quarter, for which other work waited least."""
    fastest = (sorted(times)[: max(len(times) // 4, 1)] for times in (without, other))
    above, below = map(statistics.median, fastest)
    return above / below


def line(of_ranks: list[dict[str, Any]], side: str, case: str) -> str:
    """Return a line of the table."""
    low, middle, high = statistics.quantiles(slowest(of_ranks, "wall"), n=4, method="inclusive")
    cpu = statistics.median(slowest(of_ranks, "cpu"))
    rows = [of_rank["rows"] for of_rank in of_ranks]
    saved = max(of_rank["saved"] for of_rank in of_ranks) / 1e6
    moved = sum(of_rank["moved"] for of_rank in of_ranks) / 1e6
    return (
        f"{case} | {side:7} | {middle:7.1f} ({low:.1f}-{high:.1f}) | {cpu:7.1f}, {max(rows):6d}, {saved:6.1f} | "
        f"{max(rows) * len(rows) / sum(rows):5.2f} | {moved:5.1f}"
    )


if __name__ == "__main__":
    main()
