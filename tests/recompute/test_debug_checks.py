"""With ``debug=True``, a checkpoint on kept routes has the bits of a run without it: no check saves a tensor."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from moe_dispatch import BSHD, Dispatched, Routing
from moe_dispatch.dispatchers import SlotWeights, run_in_chunks
from moe_dispatch.quantised import QuantisedRows
from tests.deep_ep_backends.vendors import HYBRID, V25
from tests.dispatchers.layer import Group, doubled, on_ranks
from tests.recompute.layer import Layer, assert_equal, called, gradients, layer_config, tokens

SAFE: dict[str, Any] = {"graph_safe": True, "max_tokens_per_rank": 12}
BALANCED: dict[str, Any] = {"balance": {"name": "exact", "min_rows": 0}}
WAYS = ["kept", "kept, only added", "reentrant", "reentrant, only added"]
Call = Callable[[Layer, Tensor], Tensor]


def plainly(layer: Layer, x: Tensor) -> Tensor:
    return layer(layer(x))


def with_autocast(layer: Layer, x: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return layer(x).float()


def with_lengths(layer: Layer, x: Tensor) -> Tensor:
    """Some rows are no tokens, and some slots of others go nowhere."""
    routing, layout = layer.route(x), BSHD([max(len(x) - 2, 0)])
    ids = torch.where(torch.arange(len(x)).unsqueeze(1) % 3 == 0, torch.tensor([[1, -1]]), routing.topk_ids)
    sent = layer.dispatcher.dispatch(x.unsqueeze(0), Routing(ids, routing.topk_weights), layout)
    return x + layer.dispatcher.combine(torch.nan_to_num(experts(layer, sent)), sent).squeeze(0)


def with_doubled_ids(layer: Layer, x: Tensor) -> Tensor:
    routing = layer.route(x)
    sent = layer.dispatcher.dispatch(x, Routing(routing.topk_ids // 2, routing.topk_weights))
    return x + layer.dispatcher.combine(experts(layer, sent), sent)


def with_data(layer: Layer, x: Tensor) -> Tensor:
    sent = layer.dispatcher.dispatch(x, layer.route(x), carry={"number": torch.arange(len(x))})
    assert sent.carried is not None
    factors = 1 + sent.carried["number"].clamp(min=0).unsqueeze(1)
    return x + layer.dispatcher.combine(experts(layer, sent) * factors, sent)


def in_chunks(layer: Layer, x: Tensor) -> Tensor:
    return x + run_in_chunks(layer.dispatcher, partial(experts, layer), x, layer.route(x))


def on_slots(layer: Layer, x: Tensor) -> Tensor:
    routing = layer.route(x)
    sent = layer.dispatcher.dispatch(x, Routing(routing.topk_ids % 3, routing.topk_weights))  # busy experts
    sent, outputs = SlotWeights(layer.dispatcher).run(sent, multiplied, layer.first, layer.second)
    return x + layer.dispatcher.combine(outputs, sent)


def quantised(layer: Layer, x: Tensor) -> Tensor:
    sent = layer.dispatcher.dispatch(x, layer.route(x))
    assert isinstance(sent.quantised, QuantisedRows)
    return x + layer.dispatcher.combine(doubled(sent.quantised), sent)


def experts(layer: Layer, sent: Dispatched) -> Tensor:
    return multiplied(sent, layer.first, layer.second)


def multiplied(sent: Dispatched, first: Tensor, second: Tensor) -> Tensor:
    return sent.grouped_mm(torch.tanh(sent.grouped_mm(sent.rows, first)), second)


CASES: dict[str, tuple[Call, dict[str, Any]]] = {
    "one rank": (plainly, {"backend": "local"}),
    "alltoall": (plainly, {}),
    "weights of experts": (plainly, {"weights": "experts", "pad_multiple": 4}),
    "allgather": (plainly, {"backend": "allgather"}),
    "deepep": (plainly, {"backend": V25}),
    "hybridep": (plainly, {"backend": HYBRID}),
    "graph-safe": (plainly, SAFE),
    "autocast": (with_autocast, {}),
    "lengths": (with_lengths, {}),
    "lengths, graph-safe": (with_lengths, SAFE),
    "an expert twice": (with_doubled_ids, {}),
    "data": (with_data, {}),
    "data, allgather": (with_data, {"backend": "allgather"}),
    "chunks": (in_chunks, {"chunks": 4}),
    "chunks, recomputed": (in_chunks, {"chunks": {"tokens": 4, "recompute": True}}),
    "chunks, allgather": (in_chunks, {"chunks": {"tokens": 4, "recompute": True}, "backend": "allgather"}),
    "slots": (on_slots, BALANCED),
    "slots, graph-safe": (on_slots, {**BALANCED, **SAFE}),
    "wire": (plainly, {"wire": "bfloat16"}),
    "quantised": (
        quantised,
        {"wire": {"dtype": "float8_e4m3fn", "deliver": "quantised"}, "hidden_size": 256, "pad_multiple": 128},
    ),
}


@pytest.mark.parametrize("how", WAYS)
@pytest.mark.parametrize("case", CASES)
def test_debug(case: str, how: str) -> None:
    function, fields = CASES[case]
    config = layer_config(**fields, debug=True)

    def body(group: Group, how: str) -> list[Tensor]:
        layer, x = Layer(config, group), tokens(group, config.hidden_size)
        y = called(how, partial(function, layer), x)
        y.square().sum().backward()
        if config.graph_safe:
            layer.dispatcher.check()
        layer.dispatcher.close()
        return [y.detach(), *gradients(x, layer)]

    size = 1 if case == "one rank" else 2
    wanted, found = (on_ranks(partial(body, how=each), size) for each in ("plain", how))
    assert len(wanted[0]) >= 3
    assert_equal(found, wanted)


@pytest.mark.parametrize("case", ["alltoall", "graph-safe", "chunks, recomputed", "data"])
def test_debug_with_live_micro_batches_and_ranks_that_differ(case: str) -> None:
    """Three forwards are live, and one rank trains no router."""
    function, fields = CASES[case]

    def body(group: Group, how: str) -> list[Tensor]:
        layer = Layer(layer_config(**fields, debug=True), group)
        layer.gate.requires_grad_(group.rank() == 0)
        batches = [tokens(group, seed=seed) for seed in range(3)]
        losses = [called(how, partial(function, layer), batch).square().sum() for batch in batches]
        for loss in losses:
            loss.backward()
        layer.dispatcher.close()
        return [*gradients(batches[0], layer), *(batch.grad for batch in batches if batch.grad is not None)]

    wanted = on_ranks(partial(body, how="plain"), 2)
    assert [len(found) for found in wanted] == [7, 6]
    assert_equal(on_ranks(partial(body, how="kept"), 2), wanted)
