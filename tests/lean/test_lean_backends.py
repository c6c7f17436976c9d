"""Lean experts on the backends of vendors' libraries, which are emulated, in compiled regions, and step after step."""

from __future__ import annotations

import gc
import warnings
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from moe_dispatch import Routing, build_dispatcher
from moe_dispatch.capabilities.lean.last import Outputs
from moe_dispatch.lean import first_mm, last_mm, swiglu
from tests.deep_ep_backends.vendors import HYBRID, RAGGED, V1, V2, V25, config
from tests.dispatchers.layer import Group, on_ranks, rank_of
from tests.lean.layer import HIDDEN, INNER, NUM_EXPERTS, compare, expected, lean_two, whole_layer
from tests.lean.test_lean_experts import lean_config

# Backend, and whether rows stay as they arrived.
VENDORS: dict[str, tuple[dict[str, Any], bool]] = {
    "v1": (V1, True),
    "v2": (V2, True),
    "v2.5": (V25, True),
    "v2.5, expand": ({**V25, "expand": True}, False),
    "hybridep": (HYBRID, False),
    "hybridep, ragged": (RAGGED, False),
}
CUT = [5, 9]


@pytest.mark.parametrize("pad_multiple", [1, 16])
@pytest.mark.parametrize("vendor", VENDORS)
def test_vendors_give_what_plain_experts_give(vendor: str, pad_multiple: int) -> None:
    backend, keeps_packets = VENDORS[vendor]
    kinds = set()

    def layer(group: Group, deliver: str, *, is_lean: bool) -> list[Tensor]:
        rank, generator = rank_of(group), torch.Generator().manual_seed(2)
        shapes = (8, 256, 64), (8, 32, 256)
        up, down = (torch.randn(shape, generator=generator).div(16).chunk(2)[rank].clone() for shape in shapes)
        up.requires_grad_()
        down.requires_grad_()
        x = torch.randn(sum(CUT), 256, generator=generator).bfloat16().float().split(CUT)[rank].requires_grad_()
        ids = torch.rand(sum(CUT), 8, generator=generator).argsort(1)[:, :2].split(CUT)[rank].contiguous()
        weights = torch.rand(sum(CUT), 2, generator=generator).split(CUT)[rank].clone().requires_grad_()
        dispatcher = build_dispatcher(config(backend, deliver=deliver, pad_multiple=pad_multiple), group)
        sent = dispatcher.dispatch(x, Routing(ids, weights))
        kinds.add((deliver, sent.packets is not None))
        if is_lean:
            outputs = last_mm(sent, first_mm(sent, up), down, activation=swiglu)
            assert isinstance(outputs, Outputs)
        else:
            outputs = sent.grouped_mm(swiglu(sent.grouped_mm(sent.rows, up)), down)
        y = dispatcher.combine(outputs, sent)
        y.backward(torch.ones_like(y).cumsum(1) / 256)
        dispatcher.close()
        assert x.grad is not None
        assert weights.grad is not None
        assert up.grad is not None
        assert down.grad is not None
        return [y.detach(), x.grad, weights.grad, up.grad, down.grad]

    plain, lean = (
        on_ranks(partial(layer, deliver=deliver, is_lean=deliver == "packets"), 2) for deliver in ("rows", "packets")
    )
    assert kinds == {("rows", False), ("packets", keeps_packets)}
    for its, mine in zip(plain, lean, strict=True):
        assert mine[0].equal(its[0])
        for found, wanted in zip(mine[1:], its[1:], strict=True):
            assert (found - wanted).abs().max() <= 2e-2 * wanted.abs().max()


@pytest.mark.parametrize("mode", [{}, {"graph_safe": True, "max_tokens_per_rank": 8}])
def test_a_compiled_layer_is_right(mode: dict[str, Any]) -> None:
    """The compiler decides there what is saved; the verbs are plain products."""
    whole = whole_layer(6)
    x, weights = whole.x.float().requires_grad_(), whole.weights.float().requires_grad_()
    matrices = [matrix.float().requires_grad_() for matrix in whole.matrices]
    dispatcher = build_dispatcher(lean_config("local", **mode))

    def layer(x: Tensor, weights: Tensor) -> Tensor:
        sent = dispatcher.dispatch(x, Routing(whole.ids, weights))
        return dispatcher.combine(lean_two(sent, matrices), sent)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.compile(layer, backend="aot_eager", fullgraph=True)(x, weights).backward(whole.upstream.float())
    grads = {"x": x.grad, "weights": weights.grad, "down": matrices[2].grad, "gate": matrices[0].grad}
    compare({name: grad for name, grad in grads.items() if grad is not None}, expected(whole, "two matrices"), 1e-5)
    assert all(grad is not None for grad in grads.values())


def live_tensors() -> int:
    gc.collect()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return sum(1 for each in gc.get_objects() if isinstance(each, Tensor))


def test_two_hundred_steps_hold_no_more_tensors_than_ten() -> None:
    dispatcher = build_dispatcher(lean_config("local"))
    whole = whole_layer(9)
    matrices = [matrix.float().requires_grad_() for matrix in whole.matrices]

    def step(number: int) -> None:
        x = whole.x.float().requires_grad_()
        sent = dispatcher.dispatch(x, Routing(whole.ids, whole.weights.float().requires_grad_()))
        y = dispatcher.combine(lean_two(sent, matrices), sent)
        if number % 5:  # now and then a forward without its backward
            y.sum().backward()

    for number in range(10):
        step(number)
    before = live_tensors()
    for number in range(200):
        step(number)
    assert live_tensors() <= before


def test_a_forward_that_is_thrown_away_frees_what_it_saved() -> None:
    """Without the garbage collector: no node holds itself."""
    dispatcher = build_dispatcher(lean_config("local"))
    gc.collect()
    gc.disable()
    try:
        x = torch.randn(4, HIDDEN, requires_grad=True)
        ids, matrices = torch.arange(8).view(4, 2), [torch.randn(8, HIDDEN, 2 * INNER), torch.randn(8, INNER, HIDDEN)]
        up, down = (matrix.requires_grad_() for matrix in matrices)
        sent = dispatcher.dispatch(x, Routing(ids, torch.ones(4, 2)))
        assert len(sent.tokens_per_expert) == NUM_EXPERTS
        first = first_mm(sent, up)
        storage = first.untyped_storage()
        y = dispatcher.combine(last_mm(sent, first, down, activation=swiglu), sent)
        assert torch._C._storage_Use_Count(storage._cdata) > 1
        del first, y, sent
        assert torch._C._storage_Use_Count(storage._cdata) == 1
    finally:
        gc.enable()
