"""Layers in the stages of torch's pipelines, on 2 stages x 2 expert-parallel ranks, and the same in one process.

A cell is a schedule, a backend and a mode. Ranks differ: in tokens, and in the experts that these choose.
"""

from __future__ import annotations

import traceback
from collections import Counter
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.pipelining import PipelineStage, schedules
from torch.distributed.pipelining import stage as stages
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from moe_dispatch import Dispatched, Dispatcher, DispatcherConfig, Routing
from moe_dispatch.dispatchers import SlotWeights
from moe_dispatch.lean import first_mm, last_mm
from moe_dispatch.recompute import checkpoint

EXPERTS, TOP_K, HIDDEN, INNER, MICRO_BATCHES = 4, 2, 32, 8, 4
TOKENS = 5, 3  # of a micro-batch of each expert-parallel rank
SCHEDULES = ["GPipe", "1F1B", "Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"]
SAFE: dict[str, Any] = {"graph_safe": True, "max_tokens_per_rank": 5}
EXACT: dict[str, Any] = {"balance": {"name": "exact", "min_rows": 0}}
MODES: dict[str, dict[str, Any]] = {
    "eager": {},
    "graph-safe": SAFE,
    "exact": EXACT,
    "exact graph-safe": EXACT | SAFE,
    "chunks": {"chunks": 2},
    "weights in experts": {"weights": "experts"},
    "carry": {},
    "8 bits": {"wire": "mxfp8"},
    "kept": {},
    "kept graph-safe": SAFE,
    "debug": {"debug": True},
    "lean": {"deliver": "packets"},
    "lean graph-safe": {"deliver": "packets", **SAFE},
}
Cell = tuple[str, str, str]
REPEATED: Cell = ("InterleavedZeroBubble", "alltoall", "torch's checkpoint")
"""A cell that repeats its exchanges in the pass for weights."""
OTHERS = {"local": {"exact", "exact graph-safe", "8 bits"}, "alltoall": set[str](), "allgather": set[str]()}
CELLS: list[Cell] = [
    (schedule, backend, mode)
    for schedule in SCHEDULES
    for backend, others in OTHERS.items()
    for mode in MODES
    if mode not in others
]


def parameter(seed: int, *shape: int) -> Tensor:
    values: Tensor = torch.randn(shape, generator=torch.Generator().manual_seed(seed)) / shape[-2] ** 0.5
    return values


class Experts(Dispatcher):
    def __init__(self, config: DispatcherConfig, group: Any, first: Tensor, second: Tensor) -> None:
        super().__init__(config, group)
        self.first, self.second = nn.Parameter(first), nn.Parameter(second)
        self.slots = SlotWeights(self) if config.balance is not None else None

    def run_experts(self, sent: Dispatched) -> Any:
        if self.config.deliver == "packets":
            return last_mm(sent, first_mm(sent, self.first), self.second, activation=torch.tanh)
        if self.slots is not None:
            return self.slots.run(sent, self.compute, self.first, self.second)[1]
        return self.compute(sent, self.first, self.second)

    def compute(self, sent: Dispatched, first: Tensor, second: Tensor) -> Tensor:
        rows = sent.rows
        if sent.carried is not None:
            rows = rows * (1 + 0.1 * sent.carried["kind"]).unsqueeze(1)
        rows = sent.grouped_mm(torch.tanh(sent.grouped_mm(rows, first)), second)
        return rows * sent.weights.unsqueeze(1) if self.config.weights == "experts" else rows


class Layer(nn.Module):
    """A dense layer and experts, in one process in float64 with loops.

    Attributes:
        runs: How often it has run.
    """

    def __init__(self, number: int, mode: str, config: DispatcherConfig | None, group: Any, own: slice) -> None:
        super().__init__()
        seed, dtype = 10 * number, torch.float64 if config is None else torch.float32
        self.number, self.mode, self.runs = number, mode, 0
        self.dense = nn.Parameter(parameter(seed, HIDDEN, HIDDEN).to(dtype))
        self.router = nn.Parameter(parameter(seed + 1, HIDDEN, EXPERTS).to(dtype))
        first = parameter(seed + 2, EXPERTS, HIDDEN, INNER)[own].to(dtype)
        second = parameter(seed + 3, EXPERTS, INNER, HIDDEN)[own].to(dtype)
        self.experts: Any = Experts(config, group, first, second) if config is not None else None
        if config is None:
            self.first, self.second = nn.Parameter(first), nn.Parameter(second)

    def forward(self, x: Tensor) -> Tensor:
        if self.experts is not None and self.mode.startswith("kept"):
            return checkpoint(self.compute, x)
        if self.experts is not None and self.mode == REPEATED[2]:
            repeated: Tensor = torch_checkpoint(self.compute, x, use_reentrant=False)
            return repeated
        return self.compute(x)

    def compute(self, x: Tensor) -> Tensor:
        self.runs += 1
        x = x + torch.tanh(x @ self.dense)
        place = torch.arange(len(x)).unsqueeze(1)
        ids = (3 * place + self.number + torch.tensor([0, 1]) * (1 + len(x) % 2 + place % 2)) % EXPERTS
        ids = torch.where(place == 1, -1, ids) if self.number == 1 else ids
        weights = (x @ self.router).softmax(1).gather(1, ids.clamp(min=0))
        kind = place.squeeze(1) % 3
        if self.experts is not None:
            carry = {"kind": kind} if self.mode == "carry" else None
            y: Tensor = x + self.experts(x, Routing(ids, weights), carry=carry)
            return y
        rows = x * (1 + 0.1 * kind).unsqueeze(1) if self.mode == "carry" else x
        for number in range(EXPERTS):
            share = (weights * (ids == number)).sum(1, keepdim=True)
            x = x + share * (torch.tanh(rows @ self.first[number]) @ self.second[number])
        return x


def loss_of(y: Tensor, target: Tensor) -> Tensor:
    return (y - target).square().sum()


def batch(rank: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(rank)
    x, target = torch.randn(2, MICRO_BATCHES * TOKENS[rank], HIDDEN, generator=generator)
    return x, target


def wanted(mode: str, num_stages: int) -> list[dict[str, Tensor]]:
    """The gradients of one process, by stage."""
    layers = [Layer(number, mode, None, None, slice(None)) for number in range(num_stages)]
    for rank in range(len(TOKENS)):
        for x, target in zip(*(each.double().chunk(MICRO_BATCHES) for each in batch(rank)), strict=True):
            loss_of(nn.Sequential(*layers)(x), target).backward()
    return [{name: p.grad for name, p in layer.named_parameters() if p.grad is not None} for layer in layers]


def trained(mesh: DeviceMesh, cell: Cell) -> dict[str, Any]:
    """Run a step of this rank's stages.

    Returns:
        How far each gradient is from that of one process; rows and runs of the layers; exchanges for weights.
    """
    name, backend, mode = cell
    group, rank, stage = mesh["ep"].get_group(), mesh["ep"].get_local_rank(), mesh["pp"].get_local_rank()
    own = slice(None) if backend == "local" else slice(2 * rank, 2 * rank + 2)
    fields = {"num_experts": EXPERTS, "top_k": TOP_K, "hidden_size": HIDDEN, "backend": backend, **MODES.get(mode, {})}
    config = DispatcherConfig(**fields)
    alone = name in ("GPipe", "1F1B")
    mine = [stage] if alone else [stage, stage + 2] if "Interleaved" in name else [stage, 3 - stage]
    num_stages = 2 if alone else 4
    layers = {each: Layer(each, mode, config, None if backend == "local" else group, own) for each in mine}
    exchanged, backward = Counter[str](), stages.stage_backward_weight

    def counts() -> Counter[str]:
        return Counter(layers[mine[0]].experts.metrics().collectives)

    def for_weights(*args: Any, **kwargs: Any) -> Any:
        before = counts()
        result = backward(*args, **kwargs)
        exchanged.update(counts() - before)
        return result

    stages.stage_backward_weight = for_weights
    try:
        built = [
            PipelineStage(layers[n], n, num_stages, torch.device("cpu"), group=mesh["pp"].get_group()) for n in mine
        ]
        schedule: Any = getattr(schedules, f"Schedule{name}")
        given = built[0] if alone else built
        run = schedule(given, MICRO_BATCHES, loss_fn=loss_of, scale_grads=False)
        x, target = batch(rank)
        run.step(*([x] if 0 in mine else []), **({"target": target} if num_stages - 1 in mine else {}))
        runs = [layer.runs / MICRO_BATCHES for layer in layers.values()]
        rows = [int(layer.experts.expert_counts().sum()) for layer in layers.values()]
        total = int(layers[mine[0]].experts.metrics().real_tokens_per_expert.sum())
        if config.graph_safe:
            layers[mine[0]].experts.check()
    finally:
        stages.stage_backward_weight = backward
        for layer in layers.values():
            layer.experts.close()
    far, reference = {}, wanted(mode, num_stages)
    for number, layer in layers.items():
        for each, p in layer.named_parameters():
            want = reference[number][each.removeprefix("experts.")]
            if p.grad is None:
                far[f"{number}.{each}"] = 1.0
                continue
            grad = p.grad.double()
            if each.startswith("experts.") and backend != "local":
                want = want[own]
            else:
                dist.all_reduce(grad, group=group)
            far[f"{number}.{each}"] = float((grad - want).norm() / want.norm())
    return {"stages": mine, "far": far, "rows": rows, "total": total, "runs": runs, "for weights": dict(exchanged)}


def run_cells(rank: int, cells: Iterable[Cell]) -> dict[Cell, Any]:
    """Run cells one after the other; an error, which all ranks raise, is the result of its cell."""
    torch.use_deterministic_algorithms(True)  # a stage that is run to learn shapes reads NaN
    mesh, found = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "ep")), dict[Cell, Any]()
    for cell in cells:
        try:
            found[cell] = trained(mesh, cell)
        except Exception:
            found[cell] = traceback.format_exc()
            break  # this rank may have left others behind
    return found
