"""``Plan.bytes`` says beforehand what a graph-safe dispatch then allocates."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from moe_dispatch import DispatcherConfig, Routing, build_dispatcher
from moe_dispatch.errors import StateError
from tests.dispatchers.layer import small_config
from tests.ranks import run_ranks

EXPERTS, TOP_K, HIDDEN, MAXIMUM = 8, 3, 32, 40
# What a route holds for its way back; the rest of it is the context, which outlives the call.
TABLES = ("index", "legs")


def tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple):
        for part in value:
            yield from tensors(part)
    elif dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            yield from tensors(getattr(value, field.name))


def allocated(*values: Any) -> int:
    """Bytes of the memory behind all tensors in these values, each once."""
    storages = [tensor.untyped_storage() for value in values for tensor in tensors(value)]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


class Wires(TorchDispatchMode):
    """Bytes of what each collective sends and receives."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.nbytes: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            self.nbytes.append(sum(tensor.nbytes for tensor in args if isinstance(tensor, Tensor)))
        return func(*args, **(kwargs or {}))


def config(backend: str, **changes: Any) -> DispatcherConfig:
    sizes = {"num_experts": EXPERTS, "top_k": TOP_K, "hidden_size": HIDDEN, "max_tokens_per_rank": MAXIMUM}
    return small_config(backend, **{**sizes, "graph_safe": True, **changes})


@pytest.mark.parametrize(
    ("backend", "size", "pad_multiple", "capacity", "dtype"),
    [
        ("local", 1, 1, "worst", torch.float32),
        ("local", 1, 16, 1.25, torch.bfloat16),
        ("alltoall", 1, 16, "worst", torch.float64),
        ("alltoall", 2, 1, 1.25, torch.bfloat16),
        ("alltoall", 2, 16, "worst", torch.float32),
        ("allgather", 2, 16, 1.25, torch.bfloat16),
        ("allgather", 2, 1, "worst", torch.float64),
    ],
)
def test_bytes_are_those_allocated(
    backend: str, size: int, pad_multiple: int, capacity: Any, dtype: torch.dtype
) -> None:
    def body(group: dist.ProcessGroup) -> tuple[dict[str, int], dict[str, int], list[int]]:
        drops = None if capacity == "worst" else "drop"
        given = config(backend, pad_multiple=pad_multiple, capacity_factor=capacity, on_overflow=drops)
        dispatcher = build_dispatcher(given, group)
        x = torch.randn(17 + group.rank(), HIDDEN).to(dtype)
        ids = torch.randint(0, EXPERTS, (len(x), TOP_K))
        plan = dispatcher.plan(like=x)
        told = plan.bytes(dtype)
        with Wires() as wires:
            sent = dispatcher.dispatch(x, Routing(ids, torch.rand(len(x), TOP_K)), plan)
        route = sent.state.route
        tables = [getattr(route, name) for name in TABLES if hasattr(route, name)]
        found = {"rows": allocated(sent.rows), "weights": allocated(sent.weights), "index": allocated(*tables)}
        return told, found, wires.nbytes

    told, found, wires = run_ranks(body, size)[0]
    assert told == found | ({"wire": wires[0]} if wires else {})
    assert bool(wires) == (backend != "local")


@pytest.mark.parametrize("pad_multiple", [1, 16])
def test_bytes_of_an_exact_plan(pad_multiple: int) -> None:
    """Room for Tmax * K rows and padding on two ranks, where the worst routing would need twice as many."""

    def body(group: dist.ProcessGroup) -> None:
        dispatcher = build_dispatcher(config("alltoall", pad_multiple=pad_multiple, balance="exact"), group)
        x = torch.randn(17, HIDDEN)
        plan = dispatcher.plan(like=x)
        sent = dispatcher.dispatch(x, Routing(torch.zeros(17, TOP_K).long(), torch.rand(17, TOP_K)), plan)
        told = plan.bytes(x.dtype)
        assert told["rows"] == allocated(sent.rows)
        assert told["weights"] == allocated(sent.weights)
        blocks = (2 * MAXIMUM * TOP_K + EXPERTS * (pad_multiple - 1)) // pad_multiple
        assert len(sent.rows) == -(-blocks // 2) * pad_multiple

    run_ranks(body, 2)


def test_bytes_of_an_eager_plan() -> None:
    dispatcher = build_dispatcher(config("local", graph_safe=False))
    with pytest.raises(StateError, match=r"Plan.bytes: without graph_safe, sizes follow"):
        dispatcher.plan(like=torch.empty(3, HIDDEN)).bytes(torch.float32)
