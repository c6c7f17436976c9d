"""Experts without rows get a gradient of 0 also where torch's grouped GEMM leaves garbage there."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any, final
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from moe_dispatch import Dispatched, Routing, build_dispatcher, quantised
from moe_dispatch.dispatchers import SlotWeights
from tests import idle_groups
from tests.dispatchers.layer import HIDDEN, NUM_EXPERTS, Group, local_part, on_ranks, small_config
from tests.idle_groups import GARBAGE, garbage_in_idle_groups

BUSY = [0, 5]
INNER = 16
SAFE: dict[str, Any] = {"graph_safe": True, "max_tokens_per_rank": 16}
MODES: dict[str, dict[str, Any]] = {
    "eager": {},
    "padded": {"pad_multiple": 16},
    "graph-safe": SAFE,
    "graph-safe, padded": {**SAFE, "pad_multiple": 16},
}


@pytest.fixture(autouse=True)
def garbage() -> Iterator[None]:
    with garbage_in_idle_groups():
        yield


def matrices(dtype: torch.dtype) -> Tensor:
    return torch.ones(NUM_EXPERTS, HIDDEN, INNER, dtype=dtype)


def routed(rows: int, dtype: torch.dtype) -> tuple[Tensor, Routing]:
    return torch.ones(rows, HIDDEN, dtype=dtype), Routing(torch.tensor(BUSY).expand(rows, 2), torch.ones(rows, 2))


def expect(gradient: Tensor | None, rows: int, first: int = 0) -> None:
    """The loss is the sum over all products."""
    assert gradient is not None
    for index, matrix in enumerate(gradient, first):
        assert torch.equal(matrix, torch.full_like(matrix, rows if index in BUSY else 0)), index


def products(sent: Dispatched, own: Tensor) -> Tensor:
    return sent.grouped_mm(sent.rows, own)


def train(group: Group, dtype: torch.dtype, fields: dict[str, Any]) -> None:
    rows = 3 + group.rank()
    dispatcher = build_dispatcher(small_config(**fields), group)
    x, routing = routed(rows, dtype)
    own = local_part(matrices(dtype), group)
    if fields.get("balance"):
        in_flight = dispatcher.dispatch(x, routing, async_op=True)
        sent, out = SlotWeights(dispatcher).run(in_flight, products, own)
    else:
        sent = dispatcher.dispatch(x, routing)
        out = products(sent, own)
    y = dispatcher.combine(out.repeat(1, HIDDEN // INNER), sent) * (INNER / HIDDEN)
    y.sum().backward()
    expect(own.grad, sum(3 + rank for rank in range(group.size())), group.rank() * len(own))


@pytest.mark.parametrize("fields", MODES.values(), ids=MODES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_in_one_process(dtype: torch.dtype, fields: dict[str, Any]) -> None:
    dispatcher = build_dispatcher(small_config(backend="local", **fields))
    for rows in (5, 0):
        x, routing = routed(rows, dtype)
        own = matrices(dtype).requires_grad_()
        products(dispatcher.dispatch(x, routing), own).sum().backward()
        expect(own.grad, rows)


@pytest.mark.parametrize("backend", ["alltoall", "allgather"])
@pytest.mark.parametrize("fields", [*MODES.values(), {"balance": {"name": "exact", "min_rows": 0}}])
def test_on_ranks(backend: str, fields: dict[str, Any]) -> None:
    on_ranks(partial(train, dtype=torch.float32, fields={"backend": backend, **fields}), 2)


def test_a_gemm_of_quantised_rows() -> None:
    fields: dict[str, Any] = {
        "wire": {"dtype": "float8_e4m3fn", "deliver": "quantised"},
        "backend": "local",
        "pad_multiple": 128,
    }
    dispatcher = build_dispatcher(small_config(**{**fields, "hidden_size": 128}))
    x, routing = torch.ones(5, 128), routed(5, torch.float32)[1]
    own = torch.ones(NUM_EXPERTS, 128, INNER).requires_grad_()
    sent = dispatcher.dispatch(x, routing)
    outputs = quantised.grouped_gemm(
        sent, own, lambda part, weights: torch.ones(len(part.in_graph), INNER, dtype=torch.float32)
    )
    outputs.sum().backward()
    expect(own.grad, 5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("fields", MODES.values(), ids=MODES)
def test_compiled(fields: dict[str, Any], dtype: torch.dtype) -> None:
    dispatcher = build_dispatcher(small_config(backend="local", **fields))
    torch.compiler.reset()  # Dynamo counts compilations of this function over all cases

    @torch.compile(backend="eager", fullgraph=True)
    def run(x: Tensor, ids: Tensor, weights: Tensor, own: Tensor) -> Tensor:
        sent = dispatcher.dispatch(x, Routing(ids, weights))
        return products(sent, own)

    for rows in (5,) if fields.get("graph_safe") else (5, 0):  # whose gradient is expanded, and empty
        x, routing = routed(rows, dtype)
        own = matrices(dtype).requires_grad_()
        run(x, routing.topk_ids, routing.topk_weights, own).sum().backward()
        expect(own.grad, rows)


@final
class Operations(TorchDispatchMode):
    """Counts operations, those of a backward too."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count: int = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


def operations_of_a_step() -> int:
    dispatcher = build_dispatcher(small_config(backend="local", **SAFE))
    x, routing = routed(5, torch.float32)
    sent, own = dispatcher.dispatch(x, routing), matrices(torch.float32).requires_grad_()
    with Operations() as operations:
        out = products(sent, own)
        torch.autograd.grad(out, own, torch.ones_like(out))
    count: int = operations.count
    return count


def test_a_right_gemm_costs_no_operation_more() -> None:
    with_fault = operations_of_a_step()
    with mock.patch.object(torch, "_grouped_mm", idle_groups.product):
        without = operations_of_a_step()
        with mock.patch("moe_dispatch.permutation.grouped_mm.leaves_idle_groups", return_value=False):
            assert operations_of_a_step() == without
    assert without < with_fault


def test_the_fault_shows_in_torch_itself() -> None:
    own = matrices(torch.float32).requires_grad_()
    offs = torch.tensor([2, 2, 2, 2, 2, 4, 4, 4], dtype=torch.int32)
    out = torch.nn.functional.grouped_mm(torch.ones(4, HIDDEN), own, offs=offs)
    (found,) = torch.autograd.grad(out, own, torch.ones_like(out))
    assert (found[1] == GARBAGE).all()
