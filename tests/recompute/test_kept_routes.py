"""A recomputed dispatch takes the route of its forward: bits, exchanges, and libraries that are different each time."""

from __future__ import annotations

import dataclasses
import gc
import time
import weakref
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from types import FunctionType, ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils.checkpoint import (
    CheckpointError,
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
    set_checkpoint_early_stop,
)

from moe_dispatch import BSHD, Routing
from moe_dispatch.backends.alltoall.backend import AllToAll
from moe_dispatch.backends.base import Arrived, Backend, BackendContext, Route
from moe_dispatch.capabilities.recompute import contexts, routes
from moe_dispatch.communication import Communicator
from moe_dispatch.dispatchers import SlotWeights, run_in_chunks
from moe_dispatch.dispatchers.channel import Channel, Lease
from moe_dispatch.errors import ConfigError, InputError, StateError
from moe_dispatch.recompute import keep_routes, keep_routes_in, keep_routes_of
from tests.deep_ep_backends.vendors import HYBRID, RAGGED, V1, V2, V25
from tests.dispatchers.layer import Group, caught, on_ranks, outcomes, raises_everywhere, rank_of
from tests.recompute.layer import D, K, Layer, assert_equal, called, gradients, layer_config, step, tokens

EXACT = {"name": "alltoall", "reduction": "exact"}
SAFE: dict[str, Any] = {"graph_safe": True, "max_tokens_per_rank": 12}
SETTINGS: list[tuple[Any, dict[str, Any]]] = [
    ("local", {}),
    ("alltoall", {}),
    ("alltoall", {"pad_multiple": 16, "weights": "experts"}),
    (EXACT, {}),
    ("allgather", {}),
    ("alltoall", SAFE),
    ("allgather", SAFE),
    *((backend, {}) for backend in (V1, V2, V25, HYBRID, RAGGED)),
    (V25, SAFE),
    ({**V25, "expand": True}, {"pad_multiple": 16}),
]


def names(value: Any) -> str:
    if isinstance(value, dict):
        return ",".join(f"{key}={each}" for key, each in value.items() if key != "max_tokens_per_rank") or "eager"
    return str(value)


@pytest.mark.parametrize("how", ["kept", "reentrant"])
@pytest.mark.parametrize(("backend", "fields"), SETTINGS, ids=names)
def test_results_have_the_bits_of_a_run_without_checkpoints(backend: Any, fields: dict[str, Any], how: str) -> None:
    config = layer_config(backend, **fields)

    def body(group: Group, how: str) -> list[Tensor]:
        layer = Layer(config, group)
        found = step(layer, tokens(group, config.hidden_size), how)
        if config.graph_safe:
            layer.dispatcher.check()
        layer.dispatcher.close()
        return found

    size = 1 if backend == "local" else 2 if isinstance(backend, dict) and "emulate" in backend else 4
    assert_equal(on_ranks(partial(body, how=how), size), on_ranks(partial(body, how="plain"), size))


@pytest.fixture
def on_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let recomputations take the control group for one on a GPU, where each question would be a host sync."""
    monkeypatch.setattr(routes, "control_device", lambda group: torch.device("meta"))


# By label, what one recomputed dispatch and combine add to a step, and what the recomputations of one backward add.
ROWS = {"dispatch": 1, "combine": 1}
ADDED: dict[str, tuple[str, dict[str, Any], dict[str, int], dict[str, int], int]] = {
    "alltoall": ("alltoall", {}, {"counts": 1, **ROWS}, {"dispatch": 1, "recompute": 1}, 1),
    "alltoall, on device": ("alltoall", {}, {"counts": 1, **ROWS}, {"dispatch": 1}, 2),
    "allgather": ("allgather", {}, {"sizes": 1, **ROWS}, {"dispatch": 1, "recompute": 1}, 1),
    "allgather, on device": ("allgather", {}, {"sizes": 1, **ROWS}, {"dispatch": 1}, 2),
    "graph-safe": ("alltoall", SAFE, ROWS, ROWS, 0),
    "graph-safe, on device": ("alltoall", SAFE, ROWS, ROWS, 0),
}


def collectives_of(config: Any, function: Any, group: Group, ways: tuple[str, ...]) -> dict[str, Counter[str]]:
    """The collectives by label that each way adds to a step that recomputes nothing."""
    layer, found = Layer(config, group), {}
    for how in ("plain", "plain", *ways):
        before = Counter(layer.dispatcher.metrics().collectives)
        function(layer, tokens(group), how)
        found[how] = Counter(layer.dispatcher.metrics().collectives) - before
    layer.dispatcher.close()
    return {how: found[how] - found["plain"] for how in ways}


@pytest.mark.parametrize("case", ADDED)
def test_exchanges_of_a_recomputed_dispatch(case: str, request: pytest.FixtureRequest) -> None:
    backend, fields, anew, kept, of_backward = ADDED[case]
    if "on device" in case:
        request.getfixturevalue("on_device")
    body = partial(collectives_of, layer_config(backend, **fields), partial(step, calls=3), ways=("anew", "kept"))
    for found in on_ranks(lambda group: body(group=group), 2):
        assert found["anew"] == {label: 3 * count for label, count in anew.items()}
        assert found["kept"] == +Counter(
            {label: 3 * kept.get(label, 0) + of_backward * (label == "recompute") for label in (*ROWS, "recompute")}
        )


@pytest.mark.parametrize("how", ["kept", "reentrant"])
@pytest.mark.parametrize("saves", [(0, 1), (1,), ()], ids=["both ranks", "one rank", "no rank"])
@pytest.mark.parametrize("case", ["eager", "on device", "graph-safe"])
def test_what_follows_a_combine_gets_its_rows(
    case: str, saves: tuple[int, ...], how: str, request: pytest.FixtureRequest
) -> None:
    """Recomputations leave the last combine out if nothing behind it is needed on any rank. Ranks may differ."""
    if case == "on device":
        request.getfixturevalue("on_device")
    config = layer_config(**(SAFE if case == "graph-safe" else {}))

    def body(group: Group, how: str) -> tuple[list[Tensor], int]:
        layer, x = Layer(config, group), tokens(group)

        def function(x: Tensor) -> Tensor:
            y = layer(layer(x))
            return y * y.tanh() if rank_of(group) in saves else y + 1

        y = called(how, function, x)
        y.square().sum().backward()
        combines = layer.dispatcher.metrics().collectives["combine"]
        layer.dispatcher.close()
        return [y.detach(), *gradients(x, layer)], combines

    wanted, found = (on_ranks(partial(body, how=each), 2) for each in ("plain", how))
    assert_equal([grads for grads, _ in found], [grads for grads, _ in wanted])
    again = 1 if how == "kept" and not saves and case != "graph-safe" else 2
    assert [combines for _, combines in found] == [2 + again] * 2


def test_a_recomputation_that_does_not_stop_at_its_last_combine() -> None:
    """All ranks have left the combine out, so it cannot be made; the checkpointed function is not the same."""
    layer, calls = Layer(layer_config("local"), None), []

    def function(x: Tensor) -> Tensor:
        calls.append(x)
        return layer(x if len(calls) > 1 else x.tanh())

    with pytest.raises(InputError, match=r"a recomputation of 'layers.1' must save the tensors of its forward"):
        called("kept", function, tokens(None)).sum().backward()


class _Unsteady(Route):
    """A route whose expert rows are reversed expert by expert, with rows of padding behind them."""

    def __init__(self, inner: Route, order_R: Tensor, padding: int) -> None:
        self.inner, self.order_R, self.padding = inner, order_R, padding

    def there(self, rows: Tensor) -> Tensor:
        return torch.cat([rows[self.order_R], rows.new_zeros(self.padding, *rows.shape[1:])])

    def back(self, rows: Tensor | None) -> Any:
        return None if rows is None else rows[: len(self.order_R)][self.order_R.argsort()]

    def send(self, rows_TD: Tensor) -> Any:
        rows = self.inner.send(rows_TD)
        assert isinstance(rows, Tensor)
        return self.there(rows)

    def combine(self, rows_RD: Tensor, weights_R: Tensor | None) -> Tensor:
        return self.inner.combine(self.back(rows_RD), self.back(weights_R))

    def dispatch_backward(self, grad_RD: Tensor, grad_R: Tensor | None) -> tuple[Tensor, Tensor | None]:
        return self.inner.dispatch_backward(self.back(grad_RD), self.back(grad_R))

    def combine_backward(
        self, grad_TD: Tensor, rows_RD: Tensor | None, weights_R: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        rows, weights = self.inner.combine_backward(grad_TD, self.back(rows_RD), self.back(weights_R))
        return self.there(rows), None if weights is None else self.there(weights)


@pytest.fixture
def unsteady(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let ``alltoall`` deliver rows in another order, or with other counts, in every second dispatch."""
    finish, dispatches = AllToAll.finish, weakref.WeakKeyDictionary[AllToAll, int]()

    def other(self: AllToAll, started: Any) -> Arrived:
        arrived = finish(self, started)
        assert isinstance(arrived.rows, Tensor)
        dispatches[self] = dispatches.get(self, 0) + 1
        is_other = dispatches[self] % 2 == 0
        ends, assert_counts = arrived.tokens_per_expert.cumsum(0).tolist(), arrived.tokens_per_expert_list
        assert assert_counts is not None
        reverses = is_other and request.param == "order"
        order = torch.cat(
            [
                torch.arange(end - count, end).flip(0) if reverses else torch.arange(end - count, end)
                for end, count in zip(ends, assert_counts, strict=True)
            ]
        )
        route = _Unsteady(arrived.route, order, 3 if is_other and request.param == "counts" else 0)
        last = torch.zeros_like(arrived.tokens_per_expert)
        last[-1] = route.padding
        return dataclasses.replace(
            arrived,
            rows=route.there(arrived.rows),
            weights=route.there(arrived.weights),
            tokens_per_expert=arrived.tokens_per_expert + last,
            tokens_per_expert_list=tuple((arrived.tokens_per_expert + last).tolist()),
            route=route,
        )

    monkeypatch.setattr(AllToAll, "finish", other)


@pytest.mark.parametrize("unsteady", ["order", "counts"], indirect=True)
@pytest.mark.usefixtures("unsteady")
def test_a_library_that_delivers_other_rows_each_time(request: pytest.FixtureRequest) -> None:
    way = request.node.callspec.params["unsteady"]

    def body(group: Group, how: str) -> list[Tensor]:
        layer = Layer(layer_config(), group)
        try:
            return step(layer, tokens(group), how, calls=3)
        finally:
            layer.dispatcher.close()

    wanted = on_ranks(partial(body, how="plain"), 2)
    for how in ("kept", "reentrant"):
        assert_equal(on_ranks(partial(body, how=how), 2), wanted)
    if way == "counts":
        raises_everywhere(outcomes(partial(body, how="anew"), 2), CheckpointError)
    else:
        anew = on_ranks(partial(body, how="anew"), 2)
        assert any(not torch.equal(*pair) for pair in zip(anew[0], wanted[0], strict=True))


@pytest.mark.parametrize("backend", [V2, V25], ids=["v2", "v2.5"])
def test_rows_in_the_order_of_arrival(backend: dict[str, Any]) -> None:
    config = layer_config({**backend, "deterministic": False})

    def body(group: Group, how: str) -> list[Tensor]:
        layer = Layer(config, group)
        try:
            return step(layer, tokens(group, config.hidden_size), how)
        finally:
            layer.dispatcher.close()

    wanted = on_ranks(partial(body, how="plain"), 2)
    for how in ("kept", "reentrant"):
        for mine, its in zip(on_ranks(partial(body, how=how), 2), wanted, strict=True):
            for one, other in zip(mine, its, strict=True):
                torch.testing.assert_close(one, other, rtol=2e-2, atol=2e-2)
    raises_everywhere(outcomes(partial(body, how="anew"), 2), ConfigError, "moe_dispatch.recompute.keep_routes")


def schedule_1f1b(layer: Layer, batches: list[Tensor], how: str) -> None:
    live: list[Tensor] = []
    for batch in batches:
        live.append(called(how, layer, batch))
        if len(live) == 3:
            live.pop(0).square().sum().backward()
    for y in live:
        y.square().sum().backward()


def zero_bubble(layer: Layer, batches: list[Tensor], how: str) -> None:
    """Backwards of inputs first, those of weights later, in another order."""
    live = [(batch, called(how, layer, batch).square().sum()) for batch in batches[:3]]
    for batch, loss in live:
        loss.backward(inputs=[batch], retain_graph=True)
    for batch in batches[3:]:
        called(how, layer, batch).square().sum().backward()
    for _, loss in reversed(live):
        loss.backward(inputs=[*layer.parameters()])


@pytest.mark.parametrize("schedule", [schedule_1f1b, zero_bubble])
@pytest.mark.parametrize("fields", [{}, SAFE], ids=["eager", "graph-safe"])
def test_pipelines_with_three_live_micro_batches(schedule: Any, fields: dict[str, Any]) -> None:
    def body(group: Group, how: str) -> list[Tensor]:
        layer = Layer(layer_config(**fields), group)
        batches = [tokens(group, seed=seed) for seed in range(5)]
        schedule(layer, batches, how)
        layer.dispatcher.close()
        return [*gradients(batches[0], layer), *(batch.grad for batch in batches if batch.grad is not None)]

    wanted = on_ranks(partial(body, how="plain"), 2)
    assert len(wanted[0]) == 9
    assert_equal(on_ranks(partial(body, how="kept"), 2), wanted)


def nested(layer: Layer, x: Tensor, how: str) -> None:
    def inner(x: Tensor) -> Tensor:
        return called(how, layer, layer(x))

    called(how, lambda x: called(how, inner, called(how, layer, x)) * 2, x).square().sum().backward()


def mixed(layer: Layer, x: Tensor, how: str) -> None:
    """Only some of the nested checkpoints keep routes."""
    other = "plain" if how == "plain" else "anew"

    def inner(x: Tensor) -> Tensor:
        return called(other, lambda x: called(how, layer, layer(x)), x)

    called(how, inner, called(other, lambda x: called(how, layer, x), x)).square().sum().backward()


def thrice(layer: Layer, x: Tensor, how: str) -> None:
    called(how, lambda x: layer(layer(layer(x))), x).square().sum().backward()


def twice_backward(layer: Layer, x: Tensor, how: str) -> None:
    loss = called(how, lambda x: layer(layer(x)), x).square().sum()
    loss.backward(retain_graph=True)
    loss.backward()


def without_early_stop(layer: Layer, x: Tensor, how: str) -> None:
    called(how, lambda x: layer(layer(x)), x).square().sum().backward()


def asynchronous(layer: Layer, x: Tensor, how: str) -> None:
    def function(x: Tensor) -> Tensor:
        one = layer.dispatcher.dispatch(x, layer.route(x), async_op=True)
        two = layer.dispatcher.dispatch(2 * x, layer.route(2 * x), async_op=True)
        y = x
        for coming in (two, one):
            sent = coming.wait()
            y = y + layer.dispatcher.combine(
                sent.grouped_mm(sent.grouped_mm(sent.rows, layer.first), layer.second), sent
            )
        return y

    called(how, function, x).square().sum().backward()


def again(layer: Layer, x: Tensor, how: str) -> None:
    def function(x: Tensor) -> Tensor:
        sent = layer.dispatcher.dispatch(x, layer.route(x))
        more = layer.dispatcher.dispatch(x.square(), again=sent)
        rows = sent.grouped_mm(sent.grouped_mm(sent.rows * more.rows, layer.first), layer.second)
        return layer.dispatcher.combine(rows, sent)

    called(how, function, x).square().sum().backward()


def in_chunks(layer: Layer, x: Tensor, how: str) -> None:
    def experts(sent: Any) -> Tensor:
        return sent.grouped_mm(torch.tanh(sent.grouped_mm(sent.rows, layer.first)), layer.second)  # type: ignore[no-any-return]

    def function(x: Tensor) -> Tensor:
        return run_in_chunks(layer.dispatcher, experts, x, layer.route(x))

    called(how, function, x).square().sum().backward()


def with_a_plan(layer: Layer, x: Tensor, how: str) -> None:
    plan = layer.dispatcher.plan(like=x)

    def function(x: Tensor) -> Tensor:
        sent = layer.dispatcher.dispatch(x, layer.route(x), plan)
        return layer.dispatcher.combine(sent.grouped_mm(sent.grouped_mm(sent.rows, layer.first), layer.second), sent)

    called(how, function, x).square().sum().backward()


def in_place(layer: Layer, x: Tensor, how: str) -> None:
    """The function changes what a dispatch gave it. The forward and each recomputation do so once."""

    def function(x: Tensor) -> Tensor:
        sent = layer.dispatcher.dispatch(x, layer.route(x))
        sent.weights.mul_(2)
        rows = sent.grouped_mm(sent.grouped_mm(sent.rows, layer.first), layer.second)
        sent.real_tokens_per_expert.mul_(0)
        return layer.dispatcher.combine(rows, sent)

    loss = called(how, function, x).square().sum()
    loss.backward(retain_graph=True)
    loss.backward()


ORDERS = [nested, mixed, thrice, twice_backward, without_early_stop, asynchronous, again, with_a_plan, in_place]


@pytest.mark.parametrize("fields", [{}, SAFE], ids=["eager", "graph-safe"])
@pytest.mark.parametrize("order", ORDERS)
def test_orders(order: Any, fields: dict[str, Any]) -> None:
    def body(group: Group, how: str) -> list[Tensor]:
        layer, x = Layer(layer_config(**fields), group), tokens(group)
        order(layer, x, how)
        if fields:
            layer.dispatcher.check()
        layer.dispatcher.close()
        return gradients(x, layer)

    wanted = on_ranks(partial(body, how="plain"), 2)
    assert len(wanted[0]) >= 3
    # The switch is one of the process, and the ranks are threads.
    with set_checkpoint_early_stop(False) if order is without_early_stop else nullcontext():
        for how in ("kept",) if order in (nested, mixed, twice_backward, in_place) else ("kept", "reentrant"):
            assert_equal(on_ranks(partial(body, how=how), 2), wanted)


def with_own_plan(layer: Layer, x: Tensor, how: str) -> None:
    """The checkpointed function makes its plan."""

    def function(x: Tensor) -> Tensor:
        plan = layer.dispatcher.plan(like=x)
        sent = layer.dispatcher.dispatch(x, layer.route(x), plan)
        y = layer.dispatcher.combine(sent.grouped_mm(sent.grouped_mm(sent.rows, layer.first), layer.second), sent)
        return y * y.tanh()

    called(how, function, called(how, function, x)).square().sum().backward()


@pytest.mark.parametrize("recomputes", [False, True], ids=["", "chunks recomputed"])
@pytest.mark.parametrize("backend", ["alltoall", "allgather", V25], ids=names)
@pytest.mark.parametrize("how", ["plain", "kept"])
def test_chunks(backend: Any, recomputes: bool, how: str) -> None:
    """The chunks of a call take the routes of their forwards too, in ``chunks.recompute`` and in checkpoints."""
    config = layer_config(backend, chunks={"tokens": 4, "recompute": recomputes})
    wanted_config = layer_config(backend, chunks=4)

    def body(group: Group, config: Any, how: str) -> tuple[list[Tensor], Counter[str]]:
        layer, x = Layer(config, group), tokens(group, config.hidden_size)
        in_chunks(layer, x, how)
        collectives = Counter(layer.dispatcher.metrics().collectives)
        layer.dispatcher.close()
        return gradients(x, layer), collectives

    wanted = on_ranks(partial(body, config=wanted_config, how="plain"), 2)
    found = on_ranks(partial(body, config=config, how=how), 2)
    assert_equal([grads for grads, _ in found], [grads for grads, _ in wanted])
    for (_, mine), (_, its) in zip(found, wanted, strict=True):
        assert {mine[label] - its[label] for label in ("sizes", "counts")} == {0}


@pytest.mark.parametrize("backend", ["alltoall", "allgather"])
def test_plans_in_a_checkpoint(backend: str) -> None:
    """A recomputation takes what its forward has agreed on."""

    def body(group: Group, how: str) -> tuple[list[Tensor], Counter[str]]:
        layer, x = Layer(layer_config(backend), group), tokens(group)
        with_own_plan(layer, x, how)
        collectives = Counter(layer.dispatcher.metrics().collectives)
        layer.dispatcher.close()
        return gradients(x, layer), collectives

    wanted, found = (on_ranks(partial(body, how=how), 2) for how in ("plain", "kept"))
    assert_equal([grads for grads, _ in found], [grads for grads, _ in wanted])
    for (_, mine), (_, its) in zip(found, wanted, strict=True):
        assert set(mine - its) <= {"dispatch", "combine", "recompute"}


@pytest.mark.parametrize("fields", [{}, SAFE], ids=["eager", "graph-safe"])
def test_balanced_experts(fields: dict[str, Any]) -> None:
    config = layer_config(balance={"name": "exact", "min_rows": 0}, **fields)

    def body(group: Group, how: str) -> tuple[list[Tensor], dict[str, int]]:
        layer, x = Layer(config, group), tokens(group)
        weights = SlotWeights(layer.dispatcher)

        def experts(part: Any, first: Tensor, second: Tensor) -> Tensor:
            return part.grouped_mm(torch.tanh(part.grouped_mm(part.rows, first)), second)  # type: ignore[no-any-return]

        def function(x: Tensor) -> Tensor:
            routing = layer.route(x)
            sent = layer.dispatcher.dispatch(x, Routing(routing.topk_ids % 3, routing.topk_weights))  # busy experts
            sent, outputs = weights.run(sent, experts, layer.first, layer.second)
            return x + layer.dispatcher.combine(outputs, sent)

        called(how, function, called(how, function, x)).square().sum().backward()
        metrics = layer.dispatcher.metrics()
        assert layer.dispatcher.metrics(gather=True).expert_copies
        layer.dispatcher.close()
        return gradients(x, layer), {label: n for label, n in metrics.collectives.items() if label != "build"}

    plain, anew, kept = (on_ranks(partial(body, how=how), 2) for how in ("plain", "anew", "kept"))
    assert_equal([grads for grads, _ in kept], [grads for grads, _ in plain])
    for (_, before), (_, after) in zip(anew, kept, strict=True):
        # The recomputation fetches the weights of copies, so the backward does not.
        assert before["weights"] == after["weights"]
        assert sum(before.values()) > sum(after.values()) - after.get("recompute", 0)


def test_layouts_that_cut_and_mask_rows() -> None:
    def body(group: Group, how: str, safe: bool) -> list[Tensor]:
        layer = Layer(layer_config(**(SAFE if safe else {})), group)
        x = torch.randn(2, 5, D, generator=torch.Generator().manual_seed(group.rank())).requires_grad_()
        lengths = torch.tensor([3, 5 - group.rank()])

        def function(x: Tensor) -> Tensor:
            routing = layer.route(x)
            # Rows that are no tokens may get any ids.
            ids = torch.where(BSHD(lengths).valid_T(10).unsqueeze(1), routing.topk_ids, layer.calls % 8)  # type: ignore[union-attr]
            sent = layer.dispatcher.dispatch(x, Routing(ids, routing.topk_weights), BSHD(lengths))
            rows = torch.nan_to_num(sent.grouped_mm(sent.grouped_mm(sent.rows, layer.first), layer.second))
            return x + layer.dispatcher.combine(rows, sent)

        called(how, function, x).square().sum().backward()
        if safe:
            layer.dispatcher.check()
        layer.dispatcher.close()
        return gradients(x, layer)

    for safe in (False, True):
        wanted = on_ranks(partial(body, how="plain", safe=safe), 2)
        assert_equal(on_ranks(partial(body, how="kept", safe=safe), 2), wanted)


def test_contexts_of_the_caller_are_entered_too() -> None:
    entered: list[str] = []

    @contextmanager
    def noted(name: str) -> Iterator[None]:
        entered.append(name)
        yield
        entered.append(f"end of {name}")

    class Noted:
        def __init__(self, name: str) -> None:
            self.name = name

        def __enter__(self) -> None:
            entered.append(self.name)

        def __exit__(self, *error: object) -> None:
            entered.append(f"end of {self.name}")

    layer, x = Layer(layer_config("local"), None), tokens(None)
    pair = partial(keep_routes, lambda: (noted("forward"), Noted("recomputation")))
    loss = checkpoint(layer, x, use_reentrant=False, context_fn=pair).square().sum()
    loss.backward(retain_graph=True)
    loss.backward()
    assert entered == ["forward", "end of forward"] + 2 * ["recomputation", "end of recomputation"]


@pytest.mark.parametrize("backend", ["alltoall", V25], ids=names)
def test_selective_checkpointing(backend: Any) -> None:
    """A policy that keeps products works with it; on a backend that compiles, operators make the dispatches."""
    config = layer_config(backend)

    def policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        kept = {torch.ops.aten.mm.default, torch.ops.moe_dispatch.dispatch.default}
        return CheckpointPolicy.MUST_SAVE if op in kept else CheckpointPolicy.PREFER_RECOMPUTE

    def body(group: Group, selective: bool) -> tuple[list[Tensor], int]:
        layer, x = Layer(config, group), tokens(group, config.hidden_size)
        if selective:
            pair = partial(keep_routes, partial(create_selective_checkpoint_contexts, policy))
            y = checkpoint(layer, x, use_reentrant=False, context_fn=pair)
        else:
            y = layer(x)
        y.square().sum().backward()
        dispatches = layer.dispatcher.metrics().dispatches
        layer.dispatcher.close()
        return gradients(x, layer), dispatches

    plain, selective = (on_ranks(partial(body, selective=which), 2) for which in (False, True))
    assert_equal([grads for grads, _ in selective], [grads for grads, _ in plain])
    assert [dispatches for _, dispatches in selective] == [1, 1]


def test_a_function_for_one_call() -> None:
    layer, x = Layer(layer_config("local"), None), tokens(None)
    kept = keep_routes_of(layer)
    kept(x)
    with pytest.raises(StateError, match="its result is for one checkpointed call, got a second call"):
        kept(x)


def test_a_model_without_checkpoints() -> None:
    with pytest.raises(ConfigError, match="a module of the model must be checkpointed, got none in Layer"):
        keep_routes_in(Layer(layer_config("local"), None))


def test_a_checkpoint_that_keeps_routes_is_not_wrapped_again() -> None:
    """Also if another wrapper, as that of ``attach``, stands around it."""
    model: Any = checkpoint_wrapper(nn.Linear(2, 2))
    keep_routes_in(model)
    kept = model.checkpoint_fn
    model.checkpoint_fn = SimpleNamespace(checkpoint=kept)
    keep_routes_in(model)
    assert model.checkpoint_fn.checkpoint is kept


def fails_in_the_forward(layer: Layer, x: Tensor) -> None:
    def function(x: Tensor) -> Tensor:
        layer(x)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        called("kept", function, x)


def fails_in_the_recomputation(layer: Layer, x: Tensor) -> None:
    def function(x: Tensor) -> Tensor:
        y = layer(x)
        if torch._C._current_graph_task_id() != -1:
            raise ZeroDivisionError
        return y.square()

    with pytest.raises(ZeroDivisionError):
        called("kept", function, x).sum().backward()


def is_not_differentiated(layer: Layer, x: Tensor) -> None:
    called("kept", layer, x)


def is_differentiated(layer: Layer, x: Tensor) -> None:
    called("kept", layer, x).sum().backward()


def is_differentiated_twice(layer: Layer, x: Tensor) -> None:
    loss = called("kept", layer, x).sum()
    loss.backward(retain_graph=True)
    loss.backward()


USES = [
    fails_in_the_forward,
    fails_in_the_recomputation,
    is_not_differentiated,
    is_differentiated,
    is_differentiated_twice,
]


@pytest.mark.parametrize(("backend", "fields"), SETTINGS, ids=names)
def test_routes_are_freed_with_the_graph(backend: Any, fields: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    config, log = layer_config(backend, **fields), routes.Log
    logs: list[weakref.ref[routes.Log]] = []

    def noted(**given: bool) -> routes.Log:
        made = log(**given)
        logs.append(weakref.ref(made))
        return made

    monkeypatch.setattr(contexts, "Log", noted)

    def body(group: Group, use: Any) -> None:
        layer, x = Layer(config, group), tokens(group, config.hidden_size)
        use(layer, x)
        layer.dispatcher.close()

    gc.collect()
    gc.disable()  # routes must not wait for the garbage collector
    try:
        for use in USES:
            logs.clear()
            on_ranks(partial(body, use=use), 1 if backend == "local" else 2)
            assert logs
            for _ in range(50):  # the thread of a rank may still be ending
                if use in (fails_in_the_forward, fails_in_the_recomputation):
                    gc.collect()  # tracebacks hold frames, and frames hold tracebacks
                if all(each() is None for each in logs):
                    break
                time.sleep(0.02)
            assert not any(each() is not None for each in logs), use
    finally:
        gc.enable()


@pytest.mark.parametrize("how", ["kept", "reentrant"])
@pytest.mark.parametrize("fields", [{}, SAFE], ids=["eager", "graph-safe"])
def test_a_step_after_an_exception_in_the_middle(fields: dict[str, Any], how: str) -> None:
    """Another forward is live meanwhile. Its routes, and those of the next step, are its own."""

    def body(group: Group, how: str) -> list[Tensor]:
        layer, x = Layer(layer_config(**fields), group), tokens(group)

        def failing(x: Tensor, *, when: int) -> Tensor:
            x = layer(x)
            calls.append(when)
            if len(calls) == when:
                raise ZeroDivisionError
            return layer(x)

        live = called(how, layer, x)
        for when in (1, 2) if how != "plain" else (1,):  # in the forward, and in the recomputation
            calls: list[int] = []
            with pytest.raises(ZeroDivisionError):
                called(how, partial(failing, when=when), tokens(group)).sum().backward()
        live.square().sum().backward()
        found = gradients(x, layer)
        layer.zero_grad()
        found += step(layer, tokens(group, seed=1), how)
        layer.dispatcher.close()
        return found

    wanted, found = (on_ranks(partial(body, how=each), 2) for each in ("plain", how))
    assert_equal(found, wanted)


ELSEWHERE = (Lease, Channel, Backend, BackendContext, Communicator, ModuleType, FunctionType, type)


def memory_of(*roots: Any) -> dict[int, int]:
    """The bytes of each tensor that objects hold, by address; without what a channel holds."""
    found, seen, coming = dict[int, int](), set[int](), [*roots]
    while coming:
        each = coming.pop()
        if id(each) in seen or isinstance(each, ELSEWHERE):
            continue
        seen.add(id(each))
        if isinstance(each, Tensor):
            assert each.grad_fn is None
            found[each.untyped_storage().data_ptr()] = each.untyped_storage().nbytes()
        else:
            coming += gc.get_referents(each)
    return {address: count for address, count in found.items() if count}


@pytest.mark.parametrize(("backend", "fields"), SETTINGS, ids=names)
def test_memory_that_is_kept(backend: Any, fields: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """The formula of the page, beside the route: 2 bytes for each id, 4 for each weight, 8 for each count.

    Weights are those of the router, and of each row of the experts.

    No rows are kept, also not by the route.
    """
    config, log = layer_config(backend, hidden_size=256, **fields), routes.Log
    logs: list[routes.Log] = []
    monkeypatch.setattr(contexts, "Log", lambda **given: logs.append(log(**given)) or logs[-1])  # type: ignore[func-returns-value]

    def body(group: Group) -> None:
        layer, x = Layer(config, group), tokens(group, 256)
        y = called("kept", layer, x)
        (mine,) = [each for each in logs if layer.dispatcher._lease in each.kept]
        (kept,) = mine.kept[layer.dispatcher._lease]
        assert kept is not None
        assert kept.sent is not None
        whole, route = memory_of(mine), memory_of(kept.sent.state.route)
        counts = memory_of(kept.sent.tokens_per_expert, kept.sent.real_tokens_per_expert)
        with torch.no_grad():
            rows = len(layer.dispatcher.dispatch(x, layer.route(x)).in_graph)
        added = {address: count for address, count in whole.items() if address not in {*route, *counts}}
        assert sum(added.values()) <= (2 + 4) * len(x) * K + 4 * rows
        assert sum(whole.values()) < 0.5 * len(x) * 256 * 4 + 64 * rows + 4096
        y.sum().backward()
        layer.dispatcher.close()

    on_ranks(body, 1 if backend == "local" else 2)


@pytest.mark.parametrize("how", ["kept", "reentrant", "nested"])
@pytest.mark.parametrize("fields", [{}, SAFE], ids=["eager", "graph-safe"])
def test_two_hundred_steps_do_not_grow(fields: dict[str, Any], how: str) -> None:
    def body(group: Group) -> None:
        layer = Layer(layer_config(**fields), group)
        counts = []

        def nesting(x: Tensor) -> Tensor:
            return called("anew", layer, x).tanh()

        for number in range(200):
            if how == "nested":
                called("kept", nesting, tokens(group)).sum().backward()
            else:
                step(layer, tokens(group), how, calls=1)
            if number % 100 == 99:
                gc.collect()
                group.barrier().wait()
                counts.append(sum(isinstance(each, Tensor) for each in gc.get_objects()))
                group.barrier().wait()
        assert counts[1] <= counts[0] + 8
        layer.dispatcher.close()

    on_ranks(body, 2)


def test_ranks_that_differ() -> None:
    """One rank keeps routes, the other dispatches anew or does not recompute."""

    def body(group: Group, other: str, backend: str) -> None:
        layer = Layer(layer_config(backend), group)
        found = caught(step, layer, tokens(group), "kept" if group.rank() == 0 else other)
        layer.dispatcher.close()
        if isinstance(found, Exception):
            raise found

    for backend in ("alltoall", "allgather"):
        for other in ("plain", "anew"):
            raised = outcomes(partial(body, other=other, backend=backend), 2)
            raises_everywhere(raised, Exception, "grad mode", "and a recomputation takes the same route")


def test_ranks_that_differ_in_chunks() -> None:
    """On ``allgather`` the chunks have sizes, so what must be equal is compared where the sizes are agreed on."""

    def body(group: Group) -> None:
        layer = Layer(layer_config("allgather", chunks=4), group)
        found = caught(in_chunks, layer, tokens(group), "kept" if group.rank() == 0 else "anew")
        layer.dispatcher.close()
        assert isinstance(found, Exception)
        raise found

    raises_everywhere(outcomes(body, 2), Exception, "grad mode", "and a recomputation takes the same route")
