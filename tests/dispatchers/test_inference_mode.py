"""Training before and after an evaluation: what a dispatcher keeps must not be a tensor of torch.inference_mode."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from moe_dispatch import Dispatcher, Routing, Rows, build_dispatcher
from moe_dispatch.dispatchers import run_in_chunks
from moe_dispatch.layouts import Masked
from moe_dispatch.recompute import keep_routes
from tests.dispatchers.layer import SAFE, Group, on_ranks, random_routing, random_rows, rank_of, small_config

ROWS = 4
BOUNDED: dict[str, Any] = {"graph_safe": {"capacity_factor": 2.0, "on_overflow": "raise"}, "max_tokens_per_rank": ROWS}
OPTIONS: dict[str, dict[str, Any]] = {
    "eager": {},
    "graph-safe": SAFE,
    "bounded": BOUNDED,
    "exact": {"balance": {"name": "exact", "min_rows": 0}},
    "exact, graph-safe": {"balance": "exact", **SAFE},
    "least_loaded": {"balance": "least_loaded"},
    "manual": {"balance": "manual"},
    "chunks": {"chunks": 2},
    "chunks, recomputed": {"chunks": {"tokens": 2, "recompute": True}},
    "mxfp8": {"wire": "mxfp8"},
    "float8, gradients": {"wire": {"dtype": "float8_e4m3fn", "gradients": True}},
    "quantised": {"wire": {"dtype": "mxfp8", "deliver": "quantised"}, "pad_multiple": 32},
    "padded": {"pad_multiple": 16},
    "debug": {"debug": True},
}
EMULATED = [{"name": name, "emulate": True} for name in ("deepep", "hybridep")]
CASES: list[tuple[Any, str]] = [(backend, name) for backend in ("local", "alltoall", "allgather") for name in OPTIONS]
CASES += [(backend, name) for backend in EMULATED for name in ("eager", "graph-safe")]
CASES += [({"name": "alltoall", "reduction": "exact"}, "eager"), ({"name": "alltoall_by_node"}, "eager")]


def layer_of(dispatcher: Dispatcher, x: Tensor, weights: Tensor, ids: Tensor, plan: Any = None) -> Tensor:
    routing = Routing(ids, weights)
    if dispatcher.config.chunks is not None:
        return run_in_chunks(dispatcher, lambda sent: sent.rows * 2.0, x, routing)
    sent = dispatcher.dispatch(x, routing, dispatcher.plan(like=x) if plan is None else plan)
    return dispatcher.combine(sent.rows * 2.0, sent)


def train(dispatcher: Dispatcher, x: Tensor, way: Routing, plan: Any = None, *, keep: bool = False) -> list[Tensor]:
    x, weights = x.clone().requires_grad_(), way.topk_weights.clone().requires_grad_()
    if keep:
        run: Callable[..., Tensor] = lambda *given: layer_of(dispatcher, *given)  # noqa: E731
        y = checkpoint(run, x, weights, way.topk_ids, use_reentrant=False, context_fn=keep_routes)
    else:
        y = layer_of(dispatcher, x, weights, way.topk_ids, plan)
    y.square().sum().backward()
    assert x.grad is not None
    assert weights.grad is not None
    return [y.detach(), x.grad, weights.grad]


def evaluate(dispatcher: Dispatcher, x: Tensor, way: Routing, mode: Callable[[], Any]) -> Any:
    """Run every verb of a user's evaluation; return the plan, which a training may use."""
    with mode():
        layer_of(dispatcher, x.clone(), way.topk_weights.clone(), way.topk_ids.clone())
        plan = None
        if dispatcher.config.chunks is None:
            layout = Masked(torch.tensor([True, False, True, True])) if dispatcher.config.debug else Rows(3)
            plan = dispatcher.plan(layout, like=x)
            sent = dispatcher.dispatch(x, way, plan)
            dispatcher.combine(sent.rows, sent)
            dispatcher.dispatch(x, again=sent)
        dispatcher.metrics()
        dispatcher.expert_counts()
        if dispatcher.config.graph_safe:
            dispatcher.check()
            dispatcher.grow()
        return plan


@pytest.mark.parametrize("built_inside", [False, True])
@pytest.mark.parametrize(("backend", "name"), CASES, ids=str)
def test_training_is_the_same_after_an_evaluation(backend: Any, name: str, built_inside: bool) -> None:
    emulated, fields = isinstance(backend, dict) and "emulate" in backend, OPTIONS[name]
    hidden = 256 if emulated else 128 if "wire" in fields else 16
    config = small_config(backend, **{**fields, "hidden_size": hidden})

    def body(group: Group) -> None:
        with torch.inference_mode(built_inside):
            dispatcher = build_dispatcher(config, group)
        rank = rank_of(group)
        x = random_rows(ROWS, hidden, seed=rank, dtype=torch.bfloat16 if emulated else torch.float32)
        way = random_routing(ROWS, rank)
        if not built_inside:  # the first call of all is an evaluation
            evaluate(dispatcher, x, way, torch.inference_mode)
        want = train(dispatcher, x, way)
        for mode in (torch.inference_mode, torch.no_grad):
            plan = evaluate(dispatcher, x, way, mode)
            for keep in (False, True):
                for got, expected in zip(train(dispatcher, x, way, keep=keep), want, strict=True):
                    assert torch.equal(got, expected)
            train(dispatcher, x, way, plan)
        fresh = build_dispatcher(config, group)
        for got, expected in zip(train(fresh, x, way), want, strict=True):
            assert torch.equal(got, expected)

    on_ranks(body, 1 if backend == "local" else 2)
