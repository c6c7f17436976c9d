"""Lean experts beside every other capability: each mode computes a dense layer, with ranks that differ."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from moe_dispatch import Dispatched, Dispatcher, Routing, build_dispatcher
from moe_dispatch.capabilities.lean.last import Outputs
from moe_dispatch.dispatchers import SlotWeights, run_in_chunks
from moe_dispatch.recompute import keep_routes
from tests.dispatchers.layer import Group, on_ranks
from tests.lean.layer import NAMES, Whole, compare, expected, lean_two, whole_layer
from tests.lean.test_lean_experts import lean_config

CUT = [3, 8, 0, 2]
Run = Callable[[Dispatcher, Tensor, Routing, list[Tensor]], Tensor]


def plain(dispatcher: Dispatcher, x: Tensor, routing: Routing, matrices: list[Tensor]) -> Tensor:
    sent = dispatcher.dispatch(x, routing)
    return dispatcher.combine(lean_two(sent, matrices), sent)


def chunked(dispatcher: Dispatcher, x: Tensor, routing: Routing, matrices: list[Tensor]) -> Tensor:
    return run_in_chunks(dispatcher, lambda sent: lean_two(sent, matrices), x, routing)


def kept(dispatcher: Dispatcher, x: Tensor, routing: Routing, matrices: list[Tensor]) -> Tensor:
    def layer(x: Tensor, weights: Tensor) -> Tensor:
        return plain(dispatcher, x, Routing(routing.topk_ids, weights), matrices)

    found: Tensor = checkpoint(layer, x, routing.topk_weights, use_reentrant=False, context_fn=keep_routes)
    return found


def checkpointed(dispatcher: Dispatcher, x: Tensor, routing: Routing, matrices: list[Tensor]) -> Tensor:
    def layer(x: Tensor, weights: Tensor) -> Tensor:
        return plain(dispatcher, x, Routing(routing.topk_ids, weights), matrices)

    found: Tensor = checkpoint(layer, x, routing.topk_weights, use_reentrant=False)
    return found


def carried(dispatcher: Dispatcher, x: Tensor, routing: Routing, matrices: list[Tensor]) -> Tensor:
    sent = dispatcher.dispatch(x, routing, carry={"number": torch.arange(len(x))})
    assert sent.carried is not None
    assert sent.carried["number"].shape == sent.in_graph.shape[:1]
    return dispatcher.combine(lean_two(sent, matrices), sent)


def again(dispatcher: Dispatcher, x: Tensor, routing: Routing, matrices: list[Tensor]) -> Tensor:
    first = dispatcher.dispatch(torch.zeros_like(x), routing)
    sent = dispatcher.dispatch(x, again=first)
    return dispatcher.combine(lean_two(sent, matrices), sent)


def overlapped(dispatcher: Dispatcher, x: Tensor, routing: Routing, matrices: list[Tensor]) -> Tensor:
    sent = dispatcher.dispatch(x, routing, async_op=True).wait()
    return dispatcher.combine(lean_two(sent, matrices), sent)


def on_slots(dispatcher: Dispatcher, x: Tensor, routing: Routing, matrices: list[Tensor]) -> Tensor:
    def experts(part: Dispatched, *weights: Tensor) -> Any:
        return lean_two(part, weights)

    sent, outputs = SlotWeights(dispatcher).run(dispatcher.dispatch(x, routing), experts, *matrices)
    assert isinstance(outputs, Outputs)
    return dispatcher.combine(outputs, sent)


def fetched(dispatcher: Dispatcher, x: Tensor, routing: Routing, matrices: list[Tensor]) -> Tensor:
    sent, slots = SlotWeights(dispatcher).fetch(dispatcher.dispatch(x, routing), *matrices)
    return dispatcher.combine(lean_two(sent, slots), sent)


def slots_in_chunks(dispatcher: Dispatcher, x: Tensor, routing: Routing, matrices: list[Tensor]) -> Tensor:
    slots = SlotWeights(dispatcher)

    def experts(sent: Dispatched) -> Any:
        return slots.run(sent, lambda part, *weights: lean_two(part, weights), *matrices)[1]

    return run_in_chunks(dispatcher, experts, x, routing)


SAFE = {"graph_safe": True, "max_tokens_per_rank": 8}
EXACT: dict[str, Any] = {"balance": {"name": "exact", "min_rows": 0}}
WAYS: dict[str, tuple[Run, dict[str, Any]]] = {
    "chunks": (chunked, {"chunks": 3}),
    "chunks, recomputed": (chunked, {"chunks": {"tokens": 3, "recompute": True}}),
    "chunks, graph-safe": (chunked, {"chunks": 3, **SAFE}),
    "kept routes": (kept, {}),
    "kept routes, graph-safe": (kept, SAFE),
    "checkpoint": (checkpointed, {}),
    "carry": (carried, {}),
    "carry, padded": (carried, {"pad_multiple": 4}),
    "again": (again, {}),
    "overlapped": (overlapped, {}),
    "debug": (plain, {"debug": True}),
    "exact": (on_slots, EXACT),
    "exact, padded": (on_slots, {**EXACT, "pad_multiple": 4}),
    "exact, graph-safe": (on_slots, {**EXACT, **SAFE}),
    "exact, graph-safe, padded": (on_slots, {**EXACT, **SAFE, "pad_multiple": 4}),
    "exact, fetched": (fetched, EXACT),
    "exact, in chunks": (slots_in_chunks, {**EXACT, "chunks": 3}),
    "planned": (on_slots, {"balance": "least_loaded"}),
    "experts weigh": (plain, {"weights": "experts"}),
}
BACKENDS = ["alltoall", "allgather"]


def run(
    backend: Any, way: str, deliver: str = "packets", whole: Whole | None = None, dtype: torch.dtype = torch.float64
) -> dict[str, Tensor]:
    """Output and gradients of all ranks, which differ in their numbers of tokens."""
    layer, fields = WAYS[way] if isinstance(way, str) else way
    whole = whole or whole_layer(sum(CUT))

    def body(group: Group) -> dict[str, Tensor]:
        rank = group.rank()
        x = whole.x.split(CUT)[rank].to(dtype, copy=True).requires_grad_()
        wide = torch.promote_types(dtype, torch.float32)
        weights = whole.weights.split(CUT)[rank].to(wide, copy=True).requires_grad_()
        held = [matrix.chunk(len(CUT))[rank].to(dtype, copy=True).requires_grad_() for matrix in whole.matrices]
        dispatcher = build_dispatcher(lean_config(backend, deliver=deliver, **fields), group)
        y = layer(dispatcher, x, Routing(whole.ids.split(CUT)[rank], weights), held[:3])
        y.backward(whole.upstream.split(CUT)[rank].to(dtype))
        dispatcher.close()
        grads = {"x": x.grad, "weights": weights.grad, **dict(zip(NAMES, (each.grad for each in held), strict=True))}
        return {"y": y.detach(), **{name: grad for name, grad in grads.items() if grad is not None}}

    results = on_ranks(body, len(CUT))
    return {name: torch.cat([result[name] for result in results]) for name in results[0]}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("way", WAYS)
def test_every_mode_is_a_dense_layer(way: str, backend: str) -> None:
    found = run(backend, way)
    assert found.keys() >= {"y", "x", "weights", "gate", "up", "down"}
    compare(found, expected(whole_layer(sum(CUT)), "two matrices"))
