"""The start-up test passes wherever the numbers are right, and finds faults planted into a backend."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from moe_dispatch import Dispatcher, build_dispatcher
from moe_dispatch.backends import Constraints
from moe_dispatch.backends.alltoall.backend import AllToAllRoute
from moe_dispatch.backends.local import LocalOptions, LocalRoute
from moe_dispatch.errors import StateError
from moe_dispatch.layouts import THD, Layout
from tests.dispatchers.layer import on_ranks, outcomes_on, raises_everywhere, small_config


@pytest.mark.parametrize(
    ("backend", "size", "dtype", "fields"),
    [
        ("local", 1, torch.float64, {}),
        ("local", 1, torch.float32, {"num_experts": 2, "top_k": 1, "wire": "float8_e4m3fn"}),
        ("alltoall", 2, torch.bfloat16, {"num_experts": 2, "top_k": 1, "pad_multiple": "mxfp8", "debug": True}),
        ("alltoall", 2, torch.float32, {"row_counts": "static", "max_tokens_per_rank": 9, "wire": "bfloat16"}),
        ("alltoall", 2, torch.float16, {"wire": "float8_e4m3fn", "top_k": 8}),
        ("allgather", 2, torch.float32, {"row_counts": "assume", "weights": "experts"}),
        ("allgather", 2, torch.float32, {"row_counts": "check", "pad_multiple": "mxfp8"}),
    ],
    ids=str,
)
def test_passes(backend: str, size: int, dtype: torch.dtype, fields: dict[str, Any]) -> None:
    config = small_config(backend, hidden_size=256, **fields)
    on_ranks(lambda group: build_dispatcher(config, group).self_test(dtype=dtype), size)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_passes_in_every_mode(mode: Callable[[], Any]) -> None:
    with mode():
        build_dispatcher(small_config("local")).self_test()


def test_keeps_to_the_rows_and_dtypes_that_the_backend_takes() -> None:
    build_dispatcher(small_config({"name": "hybridep", "emulate": True})).self_test()  # bfloat16 only
    dispatcher = build_dispatcher(small_config("local", constraints={"max_rows": 5}))
    dispatcher.self_test()
    assert int(dispatcher.metrics().real_tokens_per_expert.sum()) == 5 * 2


Fault = Callable[[Any, str, Tensor, Any], Any]


def collecting(monkeypatch: pytest.MonkeyPatch, route: type, fault: Fault) -> None:
    """Plant a fault: it changes the rows and values that a route collects for a label."""
    original: Any = getattr(route, "collect")  # noqa: B009 - the routes have no base with this method

    def collect(self: Any, *args: Any, label: str) -> Any:
        return fault(self, label, *original(self, *args, label=label))

    monkeypatch.setattr(route, "collect", collect)


def doubled(route: Any, label: str, out: Tensor, values: Any) -> Any:
    return out * 2 if label == "combine" else out, values


def doubled_on_rank_1(route: Any, label: str, out: Tensor, values: Any) -> Any:
    return out * 2 if route.context.communicator.rank == 1 else out, values


def last_row_lost(route: Any, label: str, out: Tensor, values: Any) -> Any:
    return out if label == "combine" else torch.cat((out[:-1], 0 * out[-1:])), values


def gradients_are_nan(route: Any, label: str, out: Tensor, values: Any) -> Any:
    return out if label == "combine" else out * float("nan"), values


def weights_in_another_order(route: Any, label: str, out: Tensor, values: Any) -> Any:
    return out, None if values is None else values.roll(1, 0)


def rows_in_another_order(route: Any, label: str, out: Tensor, values: Any) -> Any:
    return out.flip(0) if label == "combine" else out, values


@pytest.mark.parametrize(
    ("size", "fault", "where"),
    [
        (1, doubled, "output on backend 'local'"),
        (1, last_row_lost, "gradient of x on backend 'local'"),
        (1, gradients_are_nan, "gradient of x on backend 'local'"),
        (1, weights_in_another_order, "gradient of the weights on backend 'local'"),
        (1, rows_in_another_order, "output on backend 'local'"),
        (2, last_row_lost, "gradient of x on backend 'alltoall'"),
        (2, weights_in_another_order, "gradient of the weights on backend 'alltoall'"),
        (2, doubled_on_rank_1, "output on backend 'alltoall', rank 1"),
    ],
)
def test_finds_a_planted_fault(monkeypatch: pytest.MonkeyPatch, size: int, fault: Fault, where: str) -> None:
    backend, route = ("local", LocalRoute) if size == 1 else ("alltoall", AllToAllRoute)
    collecting(monkeypatch, route, fault)
    results = outcomes_on(lambda group: build_dispatcher(small_config(backend), group).self_test(), size)
    raises_everywhere(results, StateError, f"in the {where}", "a difference of ", "Do not train")


def test_tests_the_forward_of_a_backend_without_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LocalOptions, "constraints", lambda options, shape: Constraints(differentiable=False))
    dispatcher = build_dispatcher(small_config("local"))
    dispatcher.self_test()
    collecting(monkeypatch, LocalRoute, doubled)
    with pytest.raises(StateError, match="in the output on backend 'local'"):
        dispatcher.self_test()


def test_does_not_ask_the_layer_for_a_layout() -> None:
    """A layer's layout is that of a batch; the test's rows are none of it."""

    class Packed(Dispatcher):
        def layout_of(self, x: Tensor) -> Layout:
            return THD([0, 5])

    Packed(small_config("local")).self_test()


def test_a_finite_capacity_drops_nothing_of_the_test() -> None:
    """It told not to train on these machines where rows had only been dropped."""
    safe = {"graph_safe": {"capacity_factor": 0.5, "on_overflow": "raise"}, "max_tokens_per_rank": 32}
    dispatcher = build_dispatcher(small_config("local", **safe))
    dispatcher.self_test()
    assert not dispatcher.check().overflowed
