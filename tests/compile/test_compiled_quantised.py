"""Quantised rows in compiled calls: the bits and gradients of eager calls."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from moe_dispatch import DispatcherConfig, Routing, build_dispatcher
from tests.compile.layer import needs_compiler
from tests.dispatchers.layer import doubled, random_routing, random_rows, small_config

# Dynamo makes an instance of every autograd function that it traces.
pytestmark = pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")

SAFE: dict[str, Any] = {"graph_safe": True, "max_tokens_per_rank": 12, "gradients": True}


def _config(backend: str, *, gradients: bool = False, **fields: Any) -> DispatcherConfig:
    wire = {"dtype": "mxfp8", "gradients": gradients, "deliver": "quantised"}
    return small_config(backend, hidden_size=64, wire=wire, pad_multiple="mxfp8", **fields)


def _run(config: DispatcherConfig, compiler: str | None = None, *, breaks: bool = False) -> tuple[Tensor, Tensor]:
    dispatcher, way = build_dispatcher(config), random_routing(12, seed=3)
    x = random_rows(12, 64, dtype=torch.bfloat16).requires_grad_()

    def layer(x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        sent = dispatcher.dispatch(x, Routing(ids, weights))
        again = dispatcher.dispatch(4 * x, again=sent)
        if breaks:
            torch._dynamo.graph_break()
        return dispatcher.combine(doubled(sent.quantised), sent) + dispatcher.combine(again.rows, again)

    if compiler is not None:
        layer = torch.compile(layer, fullgraph=not breaks, backend=compiler)
    y = layer(x, way.topk_ids, way.topk_weights)
    y.backward(random_rows(12, 64, seed=7, dtype=torch.bfloat16))
    assert x.grad is not None
    return y.detach(), x.grad


INDUCTOR = (needs_compiler, pytest.mark.slow)


@pytest.mark.parametrize(
    ("backend", "fields", "compiler"),
    [
        ("allgather", {}, "eager"),
        ("alltoall", SAFE, "aot_eager"),
        pytest.param("alltoall", {}, "inductor", marks=INDUCTOR),
        pytest.param("allgather", SAFE, "inductor", marks=INDUCTOR),
    ],
)
def test_compiled_equals_eager(backend: str, fields: dict[str, Any], compiler: str) -> None:
    config = _config(backend, **fields)
    for got, expected in zip(_run(config, compiler), _run(config), strict=True):
        assert torch.equal(got, expected)


# Dynamo reads ``grad`` of every tensor that enters the code behind a break.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
def test_a_graph_break_between_dispatch_and_experts_keeps_the_gradient() -> None:
    config = _config("local", **SAFE)
    for got, expected in zip(_run(config, "aot_eager", breaks=True), _run(config), strict=True):
        assert torch.equal(got, expected)
