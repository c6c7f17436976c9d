"""Tensors that are not plain: DTensors are refused, dispatchers are built without real ones, FSDP2 casts arguments."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, TypeVar

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.utils import _apply_to_tensors  # what FSDP2 casts arguments with

from moe_dispatch import BSHD, Dispatched, Dispatcher, Routing, build_dispatcher
from moe_dispatch.dispatchers import SlotWeights, run_in_chunks
from moe_dispatch.errors import InputError
from moe_dispatch.quantised import deep_gemm_pair
from tests.dispatchers.layer import (
    SAFE,
    Group,
    by_operators,
    expert_weights,
    identity_round,
    on_ranks,
    random_routing,
    random_rows,
    small_config,
)

X, WAY, MATRICES = random_rows(4).requires_grad_(), random_routing(4), expert_weights()
IDS, WEIGHTS = WAY.topk_ids, WAY.topk_weights

Wrap = Callable[[Tensor], Tensor]


@pytest.fixture(scope="module")
def wrap() -> Iterator[Wrap]:
    """Make a DTensor of a tensor, on one rank in this process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    mesh = init_device_mesh("cpu", (1,))
    yield lambda tensor: DTensor.from_local(tensor, mesh, [Replicate()])
    dist.destroy_process_group()


def _backward(tensor: Tensor, wrap: Wrap) -> None:
    tensor.backward(wrap(torch.ones_like(tensor)))


def _combined(d: Dispatcher, sent: Dispatched) -> Tensor:
    return d.combine(sent.rows * 2, sent)


# What is told, and the call.
CALLS: list[tuple[str, Callable[[Dispatcher, Dispatched, Wrap], Any]]] = [
    ("x", lambda d, _, wrap: d.dispatch(wrap(X), WAY)),
    ("topk_ids", lambda d, _, wrap: d.dispatch(X, Routing(wrap(IDS), WEIGHTS))),
    ("topk_weights", lambda d, _, wrap: d.dispatch(X, Routing(IDS, wrap(WEIGHTS)))),
    ("x", lambda d, sent, wrap: d.dispatch(wrap(X), again=sent)),
    ("like", lambda d, _, wrap: d.plan(like=wrap(X))),
    ("x", lambda d, _, wrap: by_operators(lambda x: d.dispatch(wrap(x), WAY).rows, X)),
    ("rows", lambda d, sent, wrap: d.combine(wrap(sent.rows), sent)),
    ("rows", lambda _, sent, wrap: sent.grouped_mm(wrap(sent.rows), MATRICES)),
    ("weights", lambda _, sent, wrap: sent.grouped_mm(sent.rows, wrap(MATRICES))),
    ("weights", lambda _, sent, wrap: sent.grouped_mm(sent.rows, nn.Parameter(wrap(MATRICES)))),
    (r"stacked\[1\]", lambda d, sent, wrap: SlotWeights(d).run(sent, len, MATRICES, wrap(MATRICES))),  # type: ignore[arg-type]
    ("gradient", lambda d, sent, wrap: _backward(_combined(d, sent), wrap)),
    ("gradient", lambda _, sent, wrap: _backward(sent.rows, wrap)),
]


@pytest.mark.parametrize("fields", [{}, SAFE], ids=["eager", "graph-safe"])
def test_dtensors_are_refused_also_after_a_call_with_tensors(wrap: Wrap, fields: dict[str, Any]) -> None:
    dispatcher = build_dispatcher(small_config("local", **fields))
    for what, call in CALLS:
        sent = dispatcher.dispatch(X, WAY)
        told = rf": {what} must be the tensor of this rank, got a DTensor\. .*to_local\(\)"
        with pytest.raises(InputError, match=told):
            call(dispatcher, sent, wrap)


def test_dtensors_are_refused_in_chunks(wrap: Wrap) -> None:
    dispatcher = build_dispatcher(small_config("local", chunks=2))
    with pytest.raises(InputError, match=r"x must be the tensor of this rank, got a DTensor"):
        run_in_chunks(dispatcher, lambda sent: sent.rows, wrap(X), WAY)


@pytest.mark.parametrize(
    ("fields", "mode"),
    [
        ({}, partial(torch.device, "meta")),
        ({"balance": {"name": "manual", "spare_experts_per_rank": 1}}, FakeTensorMode),
        ({"balance": {"name": "manual", "spare_experts_per_rank": 1}}, torch.inference_mode),
        (SAFE, partial(torch.device, "meta")),
        (SAFE, FakeTensorMode),
        (SAFE, torch.inference_mode),
    ],
)
def test_a_dispatcher_built_without_real_tensors_is_like_another(
    fields: dict[str, Any], mode: Callable[[], AbstractContextManager[Any]]
) -> None:
    def body(group: Group) -> None:
        with mode():
            dispatcher = build_dispatcher(small_config(**fields), group)
        identity_round(dispatcher, rows=3 + group.rank())

    on_ranks(body, 2)


def test_fake_tensors_go_through_a_graph_safe_layer() -> None:
    with FakeTensorMode():
        dispatcher = build_dispatcher(small_config("local", **SAFE))
        x = torch.zeros(4, dispatcher.config.hidden_size, dtype=torch.bfloat16, requires_grad=True)
        sent = dispatcher.dispatch(x, Routing(torch.zeros(4, 2, dtype=torch.int64), torch.zeros(4, 2)))
        matrices = torch.zeros(8, x.shape[1], x.shape[1], dtype=torch.bfloat16, requires_grad=True)
        y = dispatcher.combine(sent.grouped_mm(sent.rows, matrices), sent)
        y.sum().backward()
    assert y.shape == x.shape
    assert x.grad is not None
    assert matrices.grad is not None


Argument = TypeVar("Argument")


def same(argument: Argument) -> Argument:
    return _apply_to_tensors(lambda tensor: tensor, argument)  # type: ignore[no-any-return]


def in_bfloat16(argument: Argument) -> Argument:
    cast: Argument = _apply_to_tensors(lambda t: t.bfloat16() if t.is_floating_point() else t, argument)
    return cast


@pytest.mark.parametrize(
    ("fields", "call", "change"),
    [
        ({}, None, in_bfloat16),
        ({"backend": "allgather"}, None, in_bfloat16),
        ({**SAFE, "max_tokens_per_rank": 6}, None, same),
        ({**SAFE, "max_tokens_per_rank": 6}, None, in_bfloat16),
        ({"balance": {"name": "exact", "min_rows": 0, "spare_experts_per_rank": 1}}, None, same),
        ({}, by_operators, in_bfloat16),
    ],
)
def test_mapped_plans_routings_and_results_do_as_the_originals(
    fields: dict[str, Any], call: Callable[..., Any] | None, change: Callable[[Any], Any]
) -> None:
    def body(group: Group) -> None:
        rank = group.rank()
        dispatcher, way = build_dispatcher(small_config(**fields), group), random_routing(6, rank)
        # With few bits nothing is rounded, except where sums are.
        x = random_rows(6, seed=rank).mul(4).round().view(2, 3, -1).requires_grad_()
        weights = way.topk_weights.mul(8).round().requires_grad_()
        found: list[list[Tensor]] = []
        changes: tuple[Callable[[Any], Any], ...] = (lambda argument: argument, change)
        for each in changes:
            plan = each(dispatcher.plan(BSHD([3, 1]), like=x))

            def layer(x: Tensor, plan: Any = plan, each: Any = each) -> Tensor:
                sent = each(dispatcher.dispatch(each(x), each(Routing(way.topk_ids, weights)), plan))
                return dispatcher.combine(sent.rows * 2, sent)

            y = layer(x) if call is None else call(layer, x)
            assert y.dtype == (torch.bfloat16 if each is in_bfloat16 else torch.float32)
            found.append([y.detach(), *torch.autograd.grad(y.float().square().sum(), [x, weights])])
        for want, got in zip(*found, strict=True):
            torch.testing.assert_close(got.float(), want, rtol=0.02, atol=0.02 * float(want.abs().max()))

    on_ranks(body, 2)


def test_quantised_rows_that_were_cast_are_refused_when_they_are_used() -> None:
    config = small_config(
        "local", hidden_size=128, wire={"dtype": "float8_e4m3fn", "deliver": "quantised"}, pad_multiple=128
    )
    sent = build_dispatcher(config).dispatch(random_rows(6, 128), random_routing(6))
    assert torch.equal(same(sent).rows, sent.rows)
    for use in (lambda sent: sent.rows, deep_gemm_pair):
        with pytest.raises(InputError, match=r"values must be .*float8_e4m3fn, got .*bfloat16.*cast_forward_inp"):
            use(in_bfloat16(sent))


@pytest.mark.parametrize("fields", [{}, {"chunks": 2}], ids=["whole", "chunks"])
def test_hooks_on_the_output_stay_when_it_is_changed_in_place(fields: dict[str, Any]) -> None:
    dispatcher = build_dispatcher(small_config("local", **fields))
    x, seen = random_rows(6).view(2, 3, -1).requires_grad_(), list[Tensor]()
    y = run_in_chunks(dispatcher, lambda sent: sent.rows, x, random_routing(6))
    y.register_hook(seen.append)  # as FSDP2 does, to gather parameters before the backward
    y += x
    y.sum().backward()
    assert len(seen) == 1
