"""DTensors are refused in one sentence, and a dispatcher can be built where tensors are not real."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate

from moe_dispatch import Dispatched, Dispatcher, Routing, build_dispatcher
from moe_dispatch.dispatchers import SlotWeights, run_in_chunks
from moe_dispatch.errors import InputError
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
    dispatcher = build_dispatcher(small_config("local", chunk_tokens=2))
    with pytest.raises(InputError, match=r"x must be the tensor of this rank, got a DTensor"):
        run_in_chunks(dispatcher, lambda sent: sent.rows, wrap(X), WAY)


@pytest.mark.parametrize(
    ("fields", "mode"),
    [
        ({}, partial(torch.device, "meta")),
        ({"spare_experts_per_rank": 1}, FakeTensorMode),
        ({"spare_experts_per_rank": 1}, torch.inference_mode),
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
