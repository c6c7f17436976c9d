"""A balanced graph-safe layer computes routings of all kinds on every backend, with one size and no dropped row."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from moe_dispatch import Dispatched, Routing, build_dispatcher
from moe_dispatch.dispatchers import SlotWeights
from tests.balance.any_routing import RANKS, TOKENS, TOP_K, all_weights, dense, inputs_of
from tests.deep_ep_backends.vendors import ALL
from tests.dispatchers.layer import Group, on_ranks, small_config

BACKENDS: list[Any] = ["alltoall", "allgather", *ALL]


def experts(part: Dispatched, up: Tensor, down: Tensor) -> Tensor:
    rows = part.rows.to(up.dtype)
    return part.grouped_mm(torch.tanh(part.grouped_mm(rows, up)), down).to(part.rows.dtype)


@pytest.mark.parametrize("routings", [5, pytest.param(100, marks=pytest.mark.slow)])
@pytest.mark.parametrize("backend", BACKENDS, ids=str)
def test_any_routing_is_computed(backend: Any, routings: int) -> None:
    vendor = isinstance(backend, dict)
    hidden, dtype, tolerance = (256, torch.bfloat16, 3e-2) if vendor else (16, torch.float64, 1e-10)

    def body(group: Group) -> set[int]:
        rank, sizes = group.rank(), set[int]()
        static: dict[str, Any] = {"balance": "exact", "graph_safe": True, "max_tokens_per_rank": TOKENS}
        dispatcher = build_dispatcher(small_config(backend, hidden_size=hidden, **static), group)
        own_type = torch.float32 if vendor else torch.float64
        own = [each.chunk(RANKS)[rank].to(own_type).requires_grad_() for each in all_weights(hidden)]
        slot_weights = SlotWeights(dispatcher)
        for number in range(routings):
            x, ids, weights = (each.chunk(RANKS)[rank] for each in inputs_of(number, hidden))
            x, weights = x.to(dtype).requires_grad_(), weights.to(own_type).requires_grad_()
            in_flight = dispatcher.dispatch(x, Routing(ids, weights), async_op=True)
            sent, outputs = slot_weights.run(in_flight, experts, *own)
            y = dispatcher.combine(outputs, sent)
            grads = torch.autograd.grad(y.double().square().sum(), (x, weights, *own))
            for got, whole in zip((y.detach(), *grads), dense(number, hidden), strict=True):
                wanted = whole.chunk(RANKS)[rank]
                torch.testing.assert_close(got.double(), wanted, rtol=0, atol=tolerance * float(whole.abs().max() + 1))
            sizes.add(len(sent.rows))
            assert sent.tokens_per_expert.sum() <= TOKENS * TOP_K
        assert not dispatcher.check().overflowed
        return sizes

    found = on_ranks(body, RANKS)
    assert found == [found[0]] * RANKS
    assert len(found[0]) == 1
    assert vendor or found[0] == {TOKENS * TOP_K}
