"""Lean experts compute what a dense float64 layer does, forward and backward, and save little for the backward."""

from __future__ import annotations

from collections import Counter
from typing import Any, cast

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from moe_dispatch import Dispatched, DispatcherConfig, Routing, build_dispatcher
from moe_dispatch.capabilities.lean.packets import Copies
from moe_dispatch.errors import InputError, StateError
from moe_dispatch.lean import first_mm, last_mm, swiglu
from moe_dispatch.permutation import TorchPermutation
from moe_dispatch_testing.rank_context import padding_rows, poison, poison_gradient
from tests.dispatchers.layer import Group, by_operators, on_ranks, random_routing, random_rows, small_config
from tests.lean.layer import (
    HIDDEN,
    INNER,
    KINDS,
    NUM_EXPERTS,
    TOP_K,
    compare,
    expected,
    lean_plain,
    lean_two,
    run_layer,
    whole_layer,
)

SAFE = {"graph_safe": True, "max_tokens_per_rank": 9}
BACKENDS: dict[str, tuple[Any, list[int]]] = {
    "local": ("local", [11]),
    "alltoall": ("alltoall", [3, 8]),
    "alltoall, idle rank": ("alltoall", [9, 0, 1, 6]),
    "allgather": ("allgather", [7, 2]),
    "exact": ({"name": "alltoall", "reduction": "exact"}, [5, 2]),
    "by node": ({"name": "alltoall_by_node", "ranks_per_node": 2}, [4, 1, 0, 6]),
}
MODES: dict[str, dict[str, Any]] = {
    "eager": {},
    "padded": {"pad_multiple": 8},
    "graph-safe": SAFE | {"max_tokens_per_rank": 11},
    "graph-safe, padded": SAFE | {"max_tokens_per_rank": 11, "pad_multiple": 8},
    "experts weigh": {"weights": "experts"},
}


def lean_config(backend: Any = "alltoall", **fields: Any) -> DispatcherConfig:
    sizes = {"num_experts": NUM_EXPERTS, "top_k": TOP_K, "hidden_size": HIDDEN, "deliver": "packets"}
    return DispatcherConfig(backend=backend, **{**sizes, **fields})


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_gradients_are_those_of_a_dense_layer(backend: str, mode: str, kind: str) -> None:
    name, cut = BACKENDS[backend]
    if isinstance(name, dict) and "graph_safe" in MODES[mode]:
        pytest.skip("these backends are eager")
    whole, by_experts = whole_layer(sum(cut)), mode == "experts weigh"
    wanted = expected(whole, kind, by_experts=by_experts)
    found = run_layer(lean_config(name, **MODES[mode]), whole, cut, KINDS[kind])
    assert found.keys() >= {"y", "x", "weights", "gate", "up", "down"}
    compare(found, wanted)


@pytest.mark.parametrize("kind", ["two matrices", "biases"])
@pytest.mark.parametrize("mode", ["eager", "padded", "experts weigh"])
@pytest.mark.parametrize("backend", ["local", "alltoall, idle rank"])
def test_all_copies_at_once_give_the_same(backend: str, mode: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, where the copies of all experts are multiplied at once."""
    monkeypatch.setattr(Copies, "by_expert", lambda self, arrived: None)
    name, cut = BACKENDS[backend]
    whole = whole_layer(sum(cut))
    found = run_layer(lean_config(name, **MODES[mode]), whole, cut, KINDS[kind])
    compare(found, expected(whole, kind, by_experts=mode == "experts weigh"))


@pytest.mark.parametrize("deliver", ["rows", "packets"])
@pytest.mark.parametrize("highest", [3, 0, -1])
@pytest.mark.parametrize("backend", ["local", "alltoall, idle rank", "allgather"])
def test_experts_without_rows_get_zeros(backend: str, highest: int, deliver: str) -> None:
    name, cut = BACKENDS[backend]
    whole = whole_layer(sum(cut), highest=highest)
    found = run_layer(lean_config(name, deliver=deliver), whole, cut, lean_two)
    compare(found, expected(whole, "two matrices"))
    assert not found["down"][highest + 1 :].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", KINDS)
def test_other_dtypes(kind: str, dtype: torch.dtype) -> None:
    whole = whole_layer(11)
    found = run_layer(lean_config(), whole, [3, 8], KINDS[kind], dtype)
    assert found["y"].dtype == found["x"].dtype == found["down"].dtype == dtype
    compare(found, expected(whole, kind), {torch.float32: 1e-5, torch.bfloat16: 5e-2, torch.float16: 1e-2}[dtype])


@pytest.mark.parametrize("mode", ["padded", "graph-safe", "graph-safe, padded"])
@pytest.mark.parametrize("deliver", ["rows", "packets"])
def test_padding_may_hold_anything(mode: str, deliver: str) -> None:
    def experts(sent: Dispatched, matrices: Any) -> Any:
        gate, up, down, *_ = matrices
        unused_R = padding_rows(sent)
        first, second = (poison(poison_gradient(rows, unused_R), unused_R) for rows in first_mm(sent, gate, up))
        return last_mm(sent, poison(poison_gradient(swiglu(first, second), unused_R), unused_R), down)

    whole = whole_layer(11)
    found = run_layer(lean_config(deliver=deliver, **MODES[mode]), whole, [3, 8], experts)
    compare(found, expected(whole, "saved activation"))


@pytest.mark.parametrize("frozen", [("gate", "up"), ("down",), ("gate", "up", "down"), ("x",), ("weights",)])
@pytest.mark.parametrize("backend", ["local", "alltoall, idle rank"])
def test_frozen_tensors_get_no_gradient(backend: str, frozen: tuple[str, ...]) -> None:
    name, cut = BACKENDS[backend]
    whole = whole_layer(sum(cut))
    found = run_layer(lean_config(name), whole, cut, lean_two, frozen=frozen)
    assert not found.keys() & set(frozen)
    assert found.keys() | set(frozen) >= {"x", "weights", "gate", "up", "down"}
    compare(found, expected(whole, "two matrices"))


@pytest.mark.parametrize("wire", ["bfloat16", "mxfp8", {"dtype": "float8_e4m3fn", "gradients": True}])
def test_a_wire_gives_the_bits_of_plain_experts(wire: Any) -> None:
    def layer(deliver: str, lean: bool) -> list[Tensor]:
        generator = torch.Generator().manual_seed(1)
        matrices = [torch.randn(4, *shape, generator=generator).bfloat16() / 16 for shape in ((128, 64), (64, 128))]
        up, down = (matrix.requires_grad_() for matrix in matrices)
        x, routing = random_rows(13, 128, dtype=torch.bfloat16).requires_grad_(), random_routing(13, num_experts=4)
        config = DispatcherConfig(
            backend="local",
            num_experts=4,
            top_k=2,
            hidden_size=128,
            wire=wire,
            deliver=deliver,  # type: ignore[arg-type]
        )
        dispatcher = build_dispatcher(config)
        sent = dispatcher.dispatch(x, routing)
        if deliver == "packets" and wire != "bfloat16":
            assert sent.packets is not None
            assert {tensor.dtype.itemsize for tensor in sent.packets.tensors()} == {1}
        first = first_mm(sent, up) if lean else sent.grouped_mm(sent.rows, up)
        out = last_mm(sent, first, down) if lean else sent.grouped_mm(first, down)
        y = dispatcher.combine(out, sent)
        y.backward(random_rows(13, 128, seed=5, dtype=torch.bfloat16))
        assert x.grad is not None
        assert up.grad is not None
        assert down.grad is not None
        return [y.detach(), x.grad, up.grad, down.grad]

    plain, lean = layer("rows", False), layer("packets", True)
    assert plain[0].equal(lean[0])
    for mine, its in zip(lean[1:], plain[1:], strict=True):  # weights are applied after a product, not before
        torch.testing.assert_close(mine, its, atol=3e-2 * float(its.abs().max()), rtol=0)


def test_rows_are_copied_when_they_are_read() -> None:
    whole = whole_layer(11)

    def experts(sent: Dispatched, matrices: Any) -> Tensor:
        gate, up, down, *_ = matrices
        assert sent.rows is sent.rows
        first = sent.grouped_mm(sent.rows, gate)
        return sent.grouped_mm(swiglu(first, sent.grouped_mm(sent.rows, up)), down)

    compare(run_layer(lean_config(), whole, [3, 8], experts), expected(whole, "saved activation"))


def saved_numbers(config: DispatcherConfig, experts: Any, frozen: tuple[str, ...] = ()) -> dict[int, Tensor]:
    """The storages that autograd saves in the forward of a layer on one rank, without those of its parameters."""
    whole, saved = whole_layer(64), dict[int, Tensor]()
    x, weights = whole.x.float().requires_grad_(), whole.weights.float().requires_grad_("weights" not in frozen)
    matrices = [
        matrix.float().requires_grad_(name not in frozen) for name, matrix in zip("gudab", whole.matrices, strict=True)
    ]
    own = {tensor.untyped_storage().data_ptr() for tensor in (x, *matrices)}

    def pack(tensor: Tensor) -> Tensor:
        if tensor.untyped_storage().data_ptr() not in own:
            saved[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    dispatcher = build_dispatcher(config)
    with saved_tensors_hooks(pack, lambda tensor: tensor):
        sent = dispatcher.dispatch(x, Routing(whole.ids, weights))
        y = dispatcher.combine(experts(sent, matrices), sent)
    y.sum().backward()
    return saved


def test_only_the_first_products_are_saved() -> None:
    rows = 64 * TOP_K
    large = [tensor for tensor in saved_numbers(lean_config("local"), lean_two).values() if tensor.dim() == 2]
    assert sorted(tuple(tensor.shape) for tensor in large) == [(rows, INNER), (rows, INNER)]


def test_what_arrives_is_saved_once_with_its_slots() -> None:
    """S packets of 16 float32, 2 weights and 2 ids, rounded up to 16 numbers; and two products of 8 columns."""
    whole, cut = whole_layer(20), [12, 8]

    def body(group: Group) -> tuple[int, int]:
        rank, saved = group.rank(), dict[int, int]()
        x = whole.x.float().split(cut)[rank].clone().requires_grad_()
        weights = whole.weights.float().split(cut)[rank].clone().requires_grad_()
        gate, up, down, *_ = (each.float().chunk(2)[rank].clone().requires_grad_() for each in whole.matrices)
        own = {each.untyped_storage().data_ptr() for each in (x, gate, up, down)}

        def pack(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            if tensor.dim() == 2 and storage.data_ptr() not in own:
                saved[storage.data_ptr()] = storage.nbytes()
            return tensor

        dispatcher = build_dispatcher(lean_config(), group)
        with saved_tensors_hooks(pack, lambda tensor: tensor):
            sent = dispatcher.dispatch(x, Routing(whole.ids.split(cut)[rank], weights))
            y = dispatcher.combine(lean_two(sent, [gate, up, down]), sent)
        y.sum().backward()
        arrived = sent.state.route.index.num_rows
        return sum(saved.values()), arrived * 128 + 2 * len(sent.in_graph) * INNER * 4

    for nbytes, formula in on_ranks(body, 2):
        assert nbytes == formula


def test_frozen_experts_save_less() -> None:
    frozen = ("g", "u", "d", "weights")
    large = [tensor for tensor in saved_numbers(lean_config("local"), lean_plain, frozen).values() if tensor.dim() == 2]
    assert all(tensor.shape[1] == INNER for tensor in large)


@pytest.mark.parametrize("backend", ["local", "alltoall"])
def test_packets_that_are_overwritten_are_an_error(backend: str) -> None:
    def experts(sent: Dispatched, matrices: Any) -> Any:
        outputs = lean_two(sent, matrices)
        assert sent.packets is not None
        sent.packets.tensors()[0].zero_()
        return outputs

    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        run_layer(lean_config(backend), whole_layer(4), [4], experts)


def test_packets_that_are_overwritten_before_the_experts_are_an_error() -> None:
    dispatcher, x = build_dispatcher(lean_config("local")), random_rows(3)
    sent = dispatcher.dispatch(x, random_routing(3))
    x.add_(1)
    with pytest.raises(StateError, match=r"rows that arrived must stay as they are .* do not write to x"):
        first_mm(sent, torch.ones(NUM_EXPERTS, HIDDEN, INNER))
    with pytest.raises(StateError, match="rows that arrived must stay as they are"):
        _ = sent.rows


@pytest.mark.parametrize("backend", ["local", "alltoall"])
@pytest.mark.parametrize("which", range(3))
def test_weights_that_change_before_the_backward_are_an_error(which: int, backend: str) -> None:
    def change(outputs: Any) -> Any:
        with torch.no_grad():
            held[which].add_(1)
        return outputs

    held: list[Tensor] = []

    def experts(sent: Dispatched, matrices: Any) -> Any:
        held[:] = matrices
        return lean_two(sent, matrices)

    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        run_layer(lean_config(backend), whole_layer(4), [4], experts, change=change)


def test_one_result_can_be_combined_twice() -> None:
    whole = whole_layer(5)
    x = whole.x.clone().requires_grad_()
    matrices = [matrix.clone().requires_grad_() for matrix in whole.matrices]
    dispatcher = build_dispatcher(lean_config("local"))
    sent = dispatcher.dispatch(x, Routing(whole.ids, whole.weights))
    outputs = lean_two(sent, matrices)
    (dispatcher.combine(outputs, sent) + dispatcher.combine(outputs, sent)).backward(whole.upstream)
    wanted = expected(whole, "two matrices")
    assert x.grad is not None
    assert matrices[2].grad is not None
    compare({"x": x.grad / 2, "down": matrices[2].grad / 2}, wanted)


def test_a_retained_graph_gives_the_same_gradients() -> None:
    whole = whole_layer(5)
    matrices = [matrix.clone().requires_grad_() for matrix in whole.matrices]
    dispatcher = build_dispatcher(lean_config("local"))
    sent = dispatcher.dispatch(whole.x, Routing(whole.ids, whole.weights))
    y = dispatcher.combine(lean_two(sent, matrices), sent)
    first = torch.autograd.grad(y, matrices[:3], whole.upstream, retain_graph=True)
    again = torch.autograd.grad(y, matrices[:3], 2 * whole.upstream)
    for mine, its in zip(again, first, strict=True):
        torch.testing.assert_close(mine, 2 * its)


def test_traced_calls_save_rows() -> None:
    """A selective checkpoint records operators, which deliver rows."""
    whole = whole_layer(5)
    x = whole.x.clone().requires_grad_()
    matrices = [matrix.clone().requires_grad_() for matrix in whole.matrices]
    dispatcher = build_dispatcher(lean_config("local"))

    def layer(x: Tensor) -> Tensor:
        sent = dispatcher.dispatch(x, Routing(whole.ids, whole.weights))
        return dispatcher.combine(lean_two(sent, matrices), sent)

    by_operators(layer, x).backward(whole.upstream)
    assert x.grad is not None
    compare({"x": x.grad}, expected(whole, "two matrices"))


def test_double_backward_is_refused() -> None:
    whole = whole_layer(3)
    x = whole.x.clone().requires_grad_()
    dispatcher = build_dispatcher(lean_config("local"))
    sent = dispatcher.dispatch(x, Routing(whole.ids, whole.weights))
    y = dispatcher.combine(lean_two(sent, whole.matrices), sent)
    with pytest.raises(StateError, match="double backward is not supported"):
        torch.autograd.grad(y.sum(), x, create_graph=True)


REFUSED: dict[str, tuple[Any, str]] = {
    "no matrix": (lambda sent: first_mm(sent), "first_mm: pass at least one matrix"),
    "not a dispatch": (lambda sent: first_mm(sent.rows, torch.ones(8, 16, 8)), "must be the result of a dispatch"),
    "columns": (lambda sent: first_mm(sent, torch.ones(8, 8, 16)), r"first_mm: weights must be \(L=8, D=16, H\)"),
    "dtype": (lambda sent: first_mm(sent, torch.ones(8, 16, 8).double()), "like the rows, got torch.float64"),
    "no tensor": (
        lambda sent: first_mm(sent, *[cast(Tensor, None)]),
        "first_mm: weights.0. must be a Tensor, got NoneType",
    ),
    "rows": (lambda sent: last_mm(sent, torch.ones(5, 8), torch.ones(8, 8, 16)), r"last_mm: rows must be \(R=6, H\)"),
    "no rows": (lambda sent: last_mm(sent, (), torch.ones(8, 8, 16)), "last_mm: rows must be"),
    "two rows": (lambda sent: last_mm(sent, (torch.ones(6, 8),) * 2, torch.ones(8, 8, 16)), "with activation its inp"),
    "output": (lambda sent: last_mm(sent, torch.ones(6, 8), torch.ones(8, 8, 8)), r"weights must be \(L, H, D=16\)"),
    "bias": (lambda sent: last_mm(sent, torch.ones(6, 8), torch.ones(8, 8, 16), torch.ones(8)), r"bias must be \(L=8"),
    "activation": (
        lambda sent: last_mm(
            sent,
            torch.ones(6, 8),
            torch.ones(8, 8, 16),
            activation=lambda rows: rows * torch.ones(8, requires_grad=True),
        ),
        "activation must be a function of its inputs alone",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_arguments_that_do_not_fit(what: str) -> None:
    call, told = REFUSED[what]
    sent = build_dispatcher(lean_config("local")).dispatch(random_rows(3), random_routing(3))
    with pytest.raises(InputError, match=told):
        call(sent)


def test_outputs_belong_to_their_dispatch() -> None:
    dispatcher = build_dispatcher(lean_config("local"))
    first, second = (dispatcher.dispatch(random_rows(3), random_routing(3)) for _ in range(2))
    outputs = last_mm(first, torch.ones(6, 8), torch.ones(8, 8, 16))
    with pytest.raises(InputError, match="must be combined with the dispatch that it was made with"):
        dispatcher.combine(outputs, second)


def test_packets_and_quantised_rows_exclude_each_other() -> None:
    with pytest.raises(ValueError, match=r'deliver="packets" and wire.deliver="quantised" exclude each other'):
        small_config(
            hidden_size=128, pad_multiple=32, deliver="packets", wire={"dtype": "mxfp8", "deliver": "quantised"}
        )


def test_a_backward_copies_gradients_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The node of the matrix takes the copies over from the node of the rows, and the rows are copied again."""
    monkeypatch.setattr(Copies, "by_expert", lambda self, arrived: None)  # as on a GPU
    copies, expand = Counter[str](), TorchPermutation.expand

    def counted(self: TorchPermutation, *given: Any) -> Tensor:
        copies["made"] += 1
        return expand(self, *given)

    monkeypatch.setattr(TorchPermutation, "expand", counted)
    run_layer(lean_config("local"), whole_layer(6), [6], lean_plain)
    assert copies["made"] == 1 + 1 + 2  # forward; gradients; the rows for each of two first matrices
