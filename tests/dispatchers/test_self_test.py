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
from moe_dispatch.permutation import TorchPermutation
from tests.dispatchers.layer import BACKENDS, on_ranks, outcomes_on, raises_everywhere, small_config

GOOD: list[dict[str, Any]] = [
    {},
    {"weights": "experts"},
    {"pad_multiple": "mxfp8"},
    {"row_counts": "assume"},
    {"row_counts": "check"},
    {"row_counts": "static", "max_tokens_per_rank": 9},
    {"debug": True},
    {"top_k": 8},
    {"num_experts": 2, "top_k": 1},
]


@pytest.mark.parametrize("fields", GOOD, ids=str)
@pytest.mark.parametrize(("backend", "size"), BACKENDS)
def test_passes(backend: str, size: int, fields: dict[str, Any]) -> None:
    on_ranks(lambda group: build_dispatcher(small_config(backend, **fields), group).self_test(), size)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("wire", [None, "bfloat16", "float8_e4m3fn"])
@pytest.mark.parametrize(("backend", "size"), [("local", 1), ("alltoall", 2)])
def test_passes_in_every_dtype(backend: str, size: int, wire: str | None, dtype: torch.dtype) -> None:
    config = small_config(backend, hidden_size=256, wire_dtype=wire)
    on_ranks(lambda group: build_dispatcher(config, group).self_test(dtype=dtype), size)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_passes_in_every_mode(mode: Callable[[], Any]) -> None:
    with mode():
        build_dispatcher(small_config("local")).self_test()


def test_keeps_to_the_rows_and_dtypes_that_the_backend_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    needs = Constraints(max_rows=5, dtypes=frozenset({torch.bfloat16}))
    monkeypatch.setattr(LocalOptions, "constraints", lambda options, shape: needs)
    dispatcher = build_dispatcher(small_config("local"))
    dispatcher.self_test()
    assert int(dispatcher.metrics().real_tokens_per_expert.sum()) == 5 * 2


def collecting(monkeypatch: pytest.MonkeyPatch, route: type, fault: Callable[[Any, str, Tensor, Any], Any]) -> None:
    """Plant a fault: it changes the rows and values that a route collects for a label."""
    original: Any = getattr(route, "collect")  # noqa: B009 - the routes have no base with this method

    def collect(self: Any, *args: Any, label: str) -> Any:
        return fault(self, label, *original(self, *args, label=label))

    monkeypatch.setattr(route, "collect", collect)


FAULTS: list[tuple[Callable[[Any, str, Tensor, Any], Any], str]] = [
    (lambda self, label, out, values: (out * 2 if label == "combine" else out, values), "output"),
    (
        lambda self, label, out, values: (out if label == "combine" else torch.cat((out[:-1], 0 * out[-1:])), values),
        "gradient of x",
    ),
    (lambda self, label, out, values: (out, None if values is None else values.roll(1, 0)), "gradient of the weights"),
    (lambda self, label, out, values: (out if label == "combine" else out * float("nan"), values), "gradient of x"),
]
DOUBLED = FAULTS[0][0]


@pytest.mark.parametrize(("fault", "where"), FAULTS)
@pytest.mark.parametrize(("backend", "size", "route"), [("local", 1, LocalRoute), ("alltoall", 2, AllToAllRoute)])
def test_finds_a_planted_fault(
    monkeypatch: pytest.MonkeyPatch, backend: str, size: int, route: type, fault: Any, where: str
) -> None:
    collecting(monkeypatch, route, fault)
    results = outcomes_on(lambda group: build_dispatcher(small_config(backend), group).self_test(), size)
    texts = (f"in the {where} on backend '{backend}'", "a difference of ", "Do not train")
    raises_everywhere(results, StateError, *texts)


def test_a_fault_of_one_rank_is_told_on_all(monkeypatch: pytest.MonkeyPatch) -> None:
    def doubled(self: Any, label: str, out: Tensor, values: Any) -> Any:
        return (out * 2 if self.context.communicator.rank == 1 else out), values

    collecting(monkeypatch, AllToAllRoute, doubled)
    results = outcomes_on(lambda group: build_dispatcher(small_config(), group).self_test(), 2)
    raises_everywhere(results, StateError, "in the output on backend 'alltoall', rank 1")


def test_tests_the_forward_of_a_backend_without_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LocalOptions, "constraints", lambda options, shape: Constraints(differentiable=False))
    dispatcher = build_dispatcher(small_config("local"))
    dispatcher.self_test()
    collecting(monkeypatch, LocalRoute, DOUBLED)
    with pytest.raises(StateError, match="in the output on backend 'local'"):
        dispatcher.self_test()


def test_does_not_ask_the_layer_for_a_layout() -> None:
    """A layer's layout is that of a batch; the test's rows are none of it."""

    class Packed(Dispatcher):
        def layout_of(self, x: Tensor) -> Layout:
            return THD([0, 5])

    Packed(small_config("local")).self_test()


def test_finds_rows_in_the_wrong_order(monkeypatch: pytest.MonkeyPatch) -> None:
    expand = TorchPermutation.expand
    monkeypatch.setattr(TorchPermutation, "expand", lambda *args: expand(*args).flip(0))
    with pytest.raises(StateError, match="a difference of "):
        build_dispatcher(small_config("local")).self_test()


def test_a_finite_capacity_drops_nothing_of_the_test() -> None:
    """It told not to train on these machines where rows had only been dropped."""
    safe = {"graph_safe": True, "max_tokens_per_rank": 32, "capacity_factor": 0.5, "on_overflow": "raise"}
    dispatcher = build_dispatcher(small_config("local", **safe))
    dispatcher.self_test()
    assert not dispatcher.check().overflowed
