"""Megatron's overlap of a forward and a backward, with its own nodes and order, on two streams of simulated devices."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from moe_dispatch.communication import Communicator
from tests.simulated_cuda.device import Record, recorded
from tests.simulated_cuda.ranks import NcclRanks

pytest.importorskip("megatron.core.models.common.model_chunk_schedule_plan", reason="needs megatron-core")
pytestmark = pytest.mark.filterwarnings("ignore")  # of Megatron's import
from moe_dispatch.integrations.megatron import MegatronDispatcher, dispatcher  # noqa: E402

RANKS = NcclRanks()
EXPERTS, TOP_K, HIDDEN, TOKENS, MICRO_BATCHES = 8, 2, 256, 24, 4
ONE = SimpleNamespace(size=lambda: 1, rank=lambda: 0)


def config(overlaps: bool) -> Any:
    return SimpleNamespace(
        num_moe_experts=EXPERTS,
        moe_router_topk=TOP_K,
        hidden_size=HIDDEN,
        moe_token_dispatcher_type="alltoall",
        overlap_moe_expert_parallel_comm=overlaps,
        ep_overlap_early_attn_memory_release=False,
        fp8=None,
        fp4=None,
        cuda_graph_modules=[],
        moe_ncclep_zero_copy=False,
    )


class Layer:
    """A router and experts around a MegatronDispatcher, in the parts that the schedule calls."""

    def __init__(self, group: dist.ProcessGroup, overlaps: bool) -> None:
        self.config, self.rank, local = config(overlaps), group.rank(), EXPERTS // group.size()
        first = group.rank() * local
        groups = SimpleNamespace(ep=group, expt_tp=ONE, tp_ep=group)
        self.dispatcher = MegatronDispatcher(local, range(first, first + local), self.config, groups)
        generator = torch.Generator().manual_seed(group.rank())
        self.router = torch.randn(HIDDEN, EXPERTS, generator=generator).cuda().requires_grad_()
        self.weights = torch.randn(local, HIDDEN, HIDDEN, generator=generator).cuda().requires_grad_()

    def route(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        scores = (hidden @ self.router).softmax(-1)
        chosen = torch.zeros_like(scores, dtype=torch.bool).scatter(1, scores.topk(TOP_K).indices, True)
        local, probs = self.dispatcher.dispatch_preprocess(hidden * 1, chosen, scores * chosen)
        return local, probs

    def experts(self, rows: Tensor, probs: Tensor) -> Tensor:
        rows, counts, probs = self.dispatcher.dispatch_postprocess(rows, probs)
        outputs = [part @ weight for part, weight in zip(rows.split(counts.tolist()), self.weights, strict=True)]
        return self.dispatcher.combine_preprocess(torch.cat(outputs) * probs.unsqueeze(1))

    def combine(self, outputs: Tensor) -> Tensor:
        return self.dispatcher.combine_postprocess(self.dispatcher.token_combine(outputs))

    def plain(self, hidden: Tensor) -> Tensor:
        rows, probs = self.dispatcher.token_dispatch(*self.route(hidden))
        return self.combine(self.experts(rows, probs))

    def plan(self, compute: Any, exchange: Any) -> Any:
        """The layer's part in the schedule of one micro-batch."""
        from megatron.core.models.common.utils import TransformerLayerNode
        from megatron.core.pipeline_parallel.utils import NoopScheduleNode

        state, event = SimpleNamespace(), torch.cuda.Event()
        extra = {"config": self.config, "is_moe": True, "num_local_experts": len(self.weights)}

        def dispatch(node: Any, local: Tensor, probs: Tensor) -> Tensor:
            rows, probs = self.dispatcher.token_dispatch(local, probs)
            state.probs = node.detach(probs)
            return rows

        return SimpleNamespace(
            config=self.config,
            event=event,
            get_low_precision_context=nullcontext,
            mtp_post_process=NoopScheduleNode(),
            **{
                name: TransformerLayerNode(stream, event, state, state, run, name, extra_args=extra)
                for name, stream, run in (
                    ("pre_dispatch_computation", compute, lambda node, hidden: self.route(hidden)),
                    ("moe_dispatch", exchange, dispatch),
                    ("mlp", compute, lambda node, rows: self.experts(rows, state.probs)),
                    ("moe_combine", exchange, lambda node, outputs: self.combine(outputs)),
                )
            },
        )


def results(layer: Layer, outputs: list[Tensor], inputs: list[Tensor]) -> list[Tensor]:
    torch.cuda.synchronize()
    grads = [tensor.grad for tensor in (*inputs, layer.router, layer.weights)]
    return [tensor.detach().cpu() for tensor in (*outputs, *grads) if tensor is not None]


def micro_batches(rank: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(7 + rank)
    return [
        torch.randn(TOKENS + rank + micro, HIDDEN, generator=generator).cuda().requires_grad_()
        for micro in range(MICRO_BATCHES)
    ]


def plain_steps(layer: Layer) -> list[Tensor]:
    inputs, outputs = micro_batches(layer.rank), list[Tensor]()
    for hidden in inputs:
        outputs.append(layer.plain(hidden))
        outputs[-1].backward(torch.ones_like(outputs[-1]))
    return results(layer, outputs, inputs)


def overlapped_steps(layer: Layer) -> list[Tensor]:
    from megatron.core.models.common.model_chunk_schedule_plan import TransformerLayerSchedulePlan

    inputs, outputs = micro_batches(layer.rank), list[Tensor]()
    compute, exchange = torch.cuda.current_stream(), torch.cuda.Stream()
    before: Any = None
    for hidden in [*inputs, None]:
        plan = None if hidden is None else layer.plan(compute, exchange)
        upstream = None if before is None else torch.ones_like(outputs[-1])
        for each in (plan, before):  # as the schedule of whole models does
            if each is not None:
                each.event.record(compute)
        output, grad = TransformerLayerSchedulePlan.run(plan, before, hidden, upstream)
        compute.wait_stream(exchange)
        if before is not None:
            inputs[len(outputs) - 1].grad = grad
        if plan is not None:
            outputs.append(output)
        before = plan
    return results(layer, outputs, inputs)


def steps_of_ranks(overlaps: bool) -> tuple[list[list[Tensor]], list[Record]]:
    """Results of each rank, and what the steps asked of the devices."""
    layers = RANKS.run(lambda group: Layer(group, overlaps), 2)
    steps = overlapped_steps if overlaps else plain_steps
    with recorded() as records:
        found = RANKS.run(lambda group: steps(layers[group.rank()]), 2)
    return found, records


def test_steps_on_two_streams_have_the_bits_of_plain_ones() -> None:
    """The plugin also fails the test if the streams use one memory without an order."""
    (want, _), (got, records) = steps_of_ranks(overlaps=False), steps_of_ranks(overlaps=True)
    for of_rank, plain in zip(got, want, strict=True):
        assert len(of_rank) == 2 * MICRO_BATCHES + 2
        assert all(torch.equal(*pair) for pair in zip(of_rank, plain, strict=True))
    waits = [record.place for record in records if record.kind == "sync" and ".py" in record.place]
    assert len(waits) == 2 * MICRO_BATCHES, waits
    assert all("communication.py" in place for place in waits), waits  # for counts


def exchange_without_wait(all_to_all: Any) -> Any:
    def started(*arguments: Any, **options: Any) -> Any:
        return SimpleNamespace(wait=lambda: None, kept=all_to_all(*arguments, **options))

    return started


@pytest.mark.expects_races
@pytest.mark.parametrize("plant", ["memory that no stream keeps", "exchanges without a wait"])
def test_a_missing_order_is_noticed(plant: str) -> None:
    if plant == "memory that no stream keeps":
        planted: Any = patch.object(dispatcher, "use_on_current_stream", lambda *tensors: None)
    else:
        planted = patch.object(Communicator, "all_to_all", exchange_without_wait(Communicator.all_to_all))
    with planted:
        _, records = steps_of_ranks(overlaps=True)
    assert any(record.kind == "race" for record in records)
