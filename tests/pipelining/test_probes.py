"""The run of a stage in which torch learns shapes is no step: nothing counts, records or checks it."""

from __future__ import annotations

import warnings
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleavedZeroBubble
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from moe_dispatch import DispatcherConfig, Routing, build_dispatcher
from moe_dispatch.pipelining import build_stage
from moe_dispatch.recompute import checkpoint
from moe_dispatch.seams.observers import Observer
from moe_dispatch_testing import run_processes

HIDDEN, EXPERTS, TOP_K, MICRO_BATCHES, TOKENS = 16, 4, 2, 4, 5
WAYS: dict[str, Any] = {
    "plain": lambda f, x: f(x),
    "torch": lambda f, x: torch_checkpoint(f, x, use_reentrant=False),
    "own": checkpoint,
}


class Layer(nn.Module):
    """A layer of one rank. It counts its runs by itself."""

    def __init__(self, how: str = "plain", **fields: Any) -> None:
        super().__init__()
        self.gate, self.how, self.runs = nn.Linear(HIDDEN, EXPERTS, bias=False), how, 0
        config = DispatcherConfig(backend="local", num_experts=EXPERTS, top_k=TOP_K, hidden_size=HIDDEN, **fields)
        self.dispatcher = build_dispatcher(config)

    def forward(self, x: Tensor) -> Tensor:
        self.runs += 1
        y: Tensor = WAYS[self.how](self.compute, x)
        return y

    def compute(self, x: Tensor) -> Tensor:
        weights, ids = self.gate(x).softmax(-1).topk(TOP_K, -1)
        sent = self.dispatcher.dispatch(x, Routing(ids, weights))
        return x + self.dispatcher.combine(sent.rows * 0.5, sent)


class Heard(Observer):
    """Hears of dispatches, as recorders and logs do."""

    rows = 0

    def started(self, lease: Any, x: Tensor, routing: Routing, layout: Any) -> None:
        self.rows += len(x)


def loss_of(y: Tensor, target: Tensor) -> Tensor:
    return (y - target).square().mean()


def step(rank: int, schedule: Any, x: Tensor) -> None:
    schedule.step(*([x] if rank == 0 else []), **({"target": x} if rank == 1 else {}))


def counts(layer: Layer) -> dict[str, Any]:
    dispatcher, metrics = layer.dispatcher, layer.dispatcher.metrics()
    return {
        "trained": int(dispatcher.expert_counts().sum()),
        "every call": int(dispatcher.expert_counts(every_call=True).sum()),
        "metrics": int(metrics.real_tokens_per_expert.sum()),
        "padding": dict(metrics.rows_padded),
        "dispatches": metrics.dispatches,
        "collectives": dict(metrics.collectives),
        "runs": layer.runs,
    }


def layer_of(stage: int, how: str, **fields: Any) -> Layer:
    torch.manual_seed(stage)
    return Layer(how, **fields)


def first_step(rank: int, x: Tensor, how: str, *, static: bool = False, **fields: Any) -> dict[str, Any]:
    """What counts after the first step, and after the same micro-batches without a pipeline."""
    layer = layer_of(rank, how, **fields)
    shape = torch.empty(TOKENS, HIDDEN, device="meta")
    if static:
        stage = build_stage(layer, rank, 2, inputs=shape, device="cpu")
    else:
        stage = PipelineStage(layer, rank, 2, torch.device("cpu"))
    schedule = Schedule1F1B(stage, MICRO_BATCHES, loss_fn=loss_of)
    heard = Heard()
    layer.dispatcher._channel.observers.append(heard)
    step(rank, schedule, x)
    found = counts(layer) | {"heard": heard.rows}
    layer.dispatcher.close()
    inputs = x.chunk(MICRO_BATCHES)
    if rank == 1:
        before = layer_of(0, how, **fields)
        inputs = tuple(before(each).detach() for each in inputs)
        before.dispatcher.close()
    wanted = layer_of(rank, how, **fields)  # its counters are new, because the channel was closed
    for each in inputs:
        wanted(each.clone().requires_grad_(rank > 0)).sum().backward()
    wants = counts(wanted) | {"heard": MICRO_BATCHES * TOKENS}
    wanted.dispatcher.close()
    return {"found": found, "wanted": wants}


def warned(rank: int, how: str) -> list[str]:
    """The warnings of two steps that split the backward, by two stages on each rank."""
    layers = [Layer(how) for _ in range(2)]
    stages: list[Any] = [PipelineStage(each, rank + 2 * n, 4, torch.device("cpu")) for n, each in enumerate(layers)]
    schedule = ScheduleInterleavedZeroBubble(stages, MICRO_BATCHES, loss_fn=loss_of)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        for _ in range(2):
            step(rank, schedule, torch.randn(MICRO_BATCHES * TOKENS, HIDDEN))
    return [str(each.message) for each in found if "moe_dispatch" in str(each.message)]


def body(rank: int) -> dict[str, Any]:
    torch.use_deterministic_algorithms(True)  # a stage that is run to learn shapes reads NaN
    x = torch.randn(MICRO_BATCHES * TOKENS, HIDDEN, generator=torch.Generator().manual_seed(7))
    safe: dict[str, Any] = {"graph_safe": True, "max_tokens_per_rank": TOKENS, "pad_multiple": 4}
    found = {
        "eager": first_step(rank, x, "plain"),
        "padded": first_step(rank, x, "plain", pad_multiple=4),
        "debug": first_step(rank, x, "plain", debug=True),
        "graph-safe": first_step(rank, x, "plain", **safe),
        "checkpoint": first_step(rank, x, "own", debug=True),
        "static": first_step(rank, x, "plain", static=True),
        "static checkpoint": first_step(rank, x, "own", static=True),
        "own": warned(rank, "own"),
        "torch": warned(rank, "torch"),
    }
    dist.barrier()
    return found


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    return run_processes(body, 2, timeout=timedelta(seconds=60))


@pytest.mark.parametrize(
    "name", ["eager", "padded", "debug", "graph-safe", "checkpoint", "static", "static checkpoint"]
)
def test_the_first_step_counts_micro_batches_and_nothing_else(ranks: list[dict[str, Any]], name: str) -> None:
    for rank in ranks:
        found, wanted = rank[name]["found"], rank[name]["wanted"]
        runs, its = found.pop("runs"), wanted.pop("runs")
        assert runs == its + (0 if name.startswith("static") else 1)
        assert found == wanted
        assert found["trained"] == found["metrics"] == MICRO_BATCHES * TOKENS * TOP_K


def test_torchs_checkpoint_in_a_split_backward_warns_once(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert rank["own"] == []
        (told,) = rank["torch"]
        assert "repeats the dispatch in the pass for weights" in told
        assert "Use checkpoint of moe_dispatch.recompute, or context_fn=keep_routes" in told
