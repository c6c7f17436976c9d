"""A compiled layer whose router gives a dense map, Megatron's form: ``Routing.from_map`` is traced with it."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from moe_dispatch import Routing
from tests.compile.layer import NUM_EXPERTS, TOP_K, Layer, dispatcher_for, expect_same, no_recompilation, tensors

compiled = partial(torch.compile, fullgraph=True, backend="aot_eager")


def _mapped(x: Tensor, ids: Tensor, weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """x, and a map and dense probabilities that name the experts of ``ids``, none in the first row; leaves."""
    del weights
    ids[:1] = -1
    routing_map = torch.zeros(len(ids), NUM_EXPERTS + 1, dtype=torch.bool)
    routing_map.scatter_(1, ids + 1, True)
    probs = torch.rand(len(ids), NUM_EXPERTS, generator=torch.Generator().manual_seed(len(ids)))
    return x, routing_map[:, 1:].contiguous(), probs.requires_grad_()


class MapLayer(Layer):
    def forward(self, x: Tensor, ids: Tensor, weights: Tensor, plan: Any = None) -> Tensor:
        """``ids`` is the map, ``weights`` the dense probabilities."""
        routing = Routing.from_map(ids, weights, top_k=TOP_K)
        return super().forward(x, routing.topk_ids, routing.topk_weights, plan)


@pytest.mark.parametrize("planned", [False, True])
@pytest.mark.parametrize("backend", ["local", "alltoall"])
def test_from_map_in_a_compiled_layer(backend: str, planned: bool) -> None:
    layer = MapLayer(dispatcher_for(backend, pad_multiple=4), torch.float32)
    inputs = _mapped(*tensors(10, 0, torch.float32))
    assert inputs[1].sum(1).unique().tolist() == [0, 1, 2], "rows with fewer slots than top_k"
    expect_same(compiled(layer), layer, inputs, layer.dispatcher.plan(like=inputs[0]) if planned else None)


def test_other_routings_and_row_counts_compile_nothing_again() -> None:
    layer = MapLayer(dispatcher_for("alltoall"), torch.float32)
    run = compiled(layer, dynamic=True)
    expect_same(run, layer, _mapped(*tensors(10, 0, torch.float32)))
    with no_recompilation():
        for turn, rows in enumerate((7, 12, 10)):
            expect_same(run, layer, _mapped(*tensors(rows, turn, torch.float32)))


def test_a_map_that_cannot_fit_is_refused_while_it_is_traced() -> None:
    _, routing_map, probs = (tensor.detach() for tensor in _mapped(*tensors(10, 0, torch.float32)))
    for given, text in (((routing_map.int(), probs), "must be bool"), ((routing_map, probs[:5]), "the same shape")):
        torch._dynamo.reset()
        with pytest.raises(torch._dynamo.exc.Unsupported, match=text):
            compiled(lambda *given: Routing.from_map(*given, top_k=TOP_K).topk_ids)(*given)
