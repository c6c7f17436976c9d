"""One captured graph of a balanced layer computes any routing: exact, with a fixed size, and without the host."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from moe_dispatch import Dispatched, DispatcherConfig, Routing, build_dispatcher, capture
from moe_dispatch.dispatchers import SlotWeights
from tests.balance.any_routing import EXPERTS, HIDDEN, RANKS, TOKENS, TOP_K, all_weights, dense, inputs_of
from tests.simulated_cuda.device import recorded
from tests.simulated_cuda.ranks import NcclRanks
from tests.simulated_cuda.test_capture import with_the_host

# torch warns of the run before the capture, in which a leaf is used on two streams.
pytestmark = pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream")


def experts(part: Dispatched, up: Tensor, down: Tensor) -> Tensor:
    return part.grouped_mm(torch.tanh(part.grouped_mm(part.rows, up)), down)


@pytest.mark.parametrize(
    ("backend", "pad_multiple", "rows", "replays"),
    [("alltoall", 1, TOKENS * TOP_K, 100), ("alltoall", 4, 32, 5), ("allgather", 4, 32, 5)],
)
def test_one_graph_replays_any_routing(backend: str, pad_multiple: int, rows: int, replays: int) -> None:
    """Padded to 4, 96 rows of all ranks are at most (96 + 8 * 3) // 4 = 30 blocks, so 8 blocks for a rank."""

    def body(group: dist.ProcessGroup) -> None:
        rank, fields = group.rank(), {"balance": "exact", "graph_safe": True, "max_tokens_per_rank": TOKENS}
        dispatcher = build_dispatcher(
            DispatcherConfig(
                backend=backend,
                num_experts=EXPERTS,
                top_k=TOP_K,
                hidden_size=HIDDEN,
                pad_multiple=pad_multiple,
                **fields,  # type: ignore[arg-type]
            ),
            group,
        )
        slot_weights = SlotWeights(dispatcher)
        own = [each.chunk(RANKS)[rank].cuda().requires_grad_() for each in all_weights()]

        def step(x: Tensor, ids: Tensor, weights: Tensor) -> tuple[Any, ...]:
            in_flight = dispatcher.dispatch(x, Routing(ids, weights), async_op=True)
            sent, outputs = slot_weights.run(in_flight, experts, *own)
            y = dispatcher.combine(outputs, sent)
            grads = torch.autograd.grad(y.square().sum(), (x, weights, *own))
            return y.detach(), *grads, sent.tokens_per_expert, sent.rows.detach()

        def mine(number: int) -> list[Tensor]:
            x, ids, weights = (each.chunk(RANKS)[rank].cuda() for each in inputs_of(number))
            return [x.requires_grad_(), ids, weights.requires_grad_()]

        graph = capture(dispatcher, step, *mine(0), warmup=1)
        for number in range(replays):
            *found, tokens_per_expert, arrived = graph.replay(*mine(number))
            assert len(arrived) == rows
            assert tokens_per_expert.sum() <= rows
            for got, wanted in zip(found, dense(number), strict=True):
                torch.testing.assert_close(got.cpu(), wanted.chunk(RANKS)[rank], rtol=1e-10, atol=1e-10)
        assert not dispatcher.check().overflowed
        dispatcher.close()

    with recorded() as records:
        NcclRanks().run(body, RANKS)
    captured = [each for each in records if each.capture]
    assert {"kernel", "copy", "nccl"} <= {each.kind for each in captured}
    assert not with_the_host(captured)
