"""Ranks with unequal numbers of steps: one that is done answers the calls of the others."""

from __future__ import annotations

import copy
import functools
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any, cast

import pytest
import torch
from torch import Tensor
from torch._C._distributed_c10d import HashStore
from torch.utils.checkpoint import checkpoint

from moe_dispatch import Dispatched, Dispatcher, Routing, build_dispatcher
from moe_dispatch.balance import ExpertPlacement
from moe_dispatch.dispatchers import join
from moe_dispatch.errors import ConfigError, InputError, LostPeerError, PeerError, StateError
from moe_dispatch.replay import RoutingTable
from moe_dispatch_testing.ranks import thread_group
from tests.dispatchers.layer import (
    Group,
    apply_experts,
    by_operators,
    expert_weights,
    local_part,
    on_ranks,
    outcomes,
    raises_everywhere,
    random_routing,
    random_rows,
    small_config,
)
from tests.pages import relative

STEPS = (2, 0, 3, 1)


class Layer(Dispatcher):
    """A layer of experts, ``tanh(rows @ weights)``."""

    def __init__(self, seed: int, group: Group, *, hidden: int, **fields: Any) -> None:
        super().__init__(small_config(hidden_size=hidden, **fields), group, name=f"layer {seed}")
        self.ranks, self.dtype = lambda: group, torch.float32  # a group cannot be copied
        self.weights = local_part(expert_weights(hidden=hidden, seed=seed), group)

    def run_experts(self, sent: Dispatched) -> Tensor:
        outputs = apply_experts(sent, self.weights)
        assert outputs.dtype == self.dtype, "experts compute under the autocast of the call, also where they answer"
        return outputs


def two(group: Group, **fields: Any) -> list[Layer]:
    return [Layer(0, group, hidden=16), Layer(1, group, hidden=16, **fields)]


def micro_batch(rank: int, step: int, hidden: int) -> tuple[Tensor, list[Routing]]:
    """Return x and the routing of two layers. The number of rows changes, and is sometimes 0."""
    rows, seed = (7 * rank + 5 * step) % 11, 10 * rank + step
    routings = [random_routing(rows, seed + 100 * layer) for layer in range(2)]
    return random_rows(rows, hidden, seed).requires_grad_(), routings


def train(layers: list[Layer], rank: int, step: int, hidden: int, way: str = "plain") -> Tensor:
    """Run forward and backward of one micro-batch, and return the gradient of x."""
    x, routings = micro_batch(rank, step, hidden)
    y = x
    for layer, routing in zip(layers, routings, strict=True):
        if way == "plan":
            sent = layer.dispatch(y, routing, layer.plan(like=y))
            y = y + layer.combine(layer.run_experts(sent), sent)
        elif way in ("recomputed", "reentrant"):
            y = y + checkpoint(layer, y, routing, use_reentrant=way == "reentrant")
        else:
            with torch.autocast("cpu", torch.bfloat16, enabled=way == "autocast"):
                y = y + layer(y, routing)
    y.square().sum().backward()
    assert x.grad is not None
    return x.grad


@functools.cache
def dense(hidden: int) -> tuple[list[list[Tensor]], list[Tensor]]:
    """Return the gradients of x by rank and step, and those of all experts by layer, on one rank."""
    layers = [Layer(seed, None, hidden=hidden, backend="local") for seed in range(2)]
    grads = [[train(layers, rank, step, hidden) for step in range(count)] for rank, count in enumerate(STEPS)]
    return grads, [layer.weights.grad for layer in layers if layer.weights.grad is not None]


def joined(group: Group, hidden: int = 16, way: str = "plain", **fields: Any) -> tuple[list[Tensor], list[Tensor]]:
    layers = [Layer(seed, group, hidden=hidden, **fields) for seed in range(2)]
    for layer in layers:
        layer.dtype = torch.bfloat16 if way == "autocast" else torch.float32
    with join(layers):
        grads = [train(layers, group.rank(), step, hidden, way) for step in range(STEPS[group.rank()])]
    found = [layer.weights.grad.clone() for layer in layers if layer.weights.grad is not None]
    train(layers, group.rank(), 9, hidden, way)  # the ranks are in step again
    for layer in layers:
        layer.close()
    return grads, found


BFLOAT16: dict[str, Any] = {"wire": "bfloat16"}
QUANTISED: dict[str, Any] = {"wire": {"dtype": "float8_e4m3fn", "deliver": "quantised"}, "pad_multiple": 128}
# How a model calls its layers, its hidden size, the config, and how far results may be from those of the dense model.
RUNS: list[tuple[str, int, dict[str, Any], float]] = [
    ("plain", 16, {"backend": "alltoall", "debug": True, "watchdog": 30}, 1e-5),
    ("plan", 16, {"backend": "allgather"}, 1e-5),
    ("autocast", 16, {"backend": "alltoall"}, 0.02),
    ("recomputed", 16, {"backend": {"name": "alltoall", "reduction": "exact"}, "pad_multiple": 8}, 1e-5),
    ("recomputed", 16, {"backend": "allgather"}, 1e-5),
    ("recomputed", 16, {"backend": "alltoall", "chunks": 3}, 1e-5),
    ("reentrant", 16, {"backend": "alltoall"}, 1e-5),
    ("reentrant", 16, {"backend": {"name": "alltoall", "levels": 2, "ranks_per_node": 2}}, 1e-5),
    ("plain", 256, {"backend": {"name": "deepep", "emulate": "v1.2.1"}, **BFLOAT16}, 0.02),
    ("plain", 256, {"backend": {"name": "deepep", "emulate": "v2.5.0"}, **BFLOAT16}, 0.02),
    ("plain", 256, {"backend": {"name": "hybridep", "emulate": "hybridep-746"}, **BFLOAT16}, 0.02),
    ("plain", 256, {"backend": "alltoall", **QUANTISED}, 0.1),
]


@pytest.mark.parametrize(("way", "hidden", "fields", "tolerance"), RUNS, ids=str)
def test_gradients_are_those_of_the_dense_model(
    way: str, hidden: int, fields: dict[str, Any], tolerance: float
) -> None:
    """Up to the rounding of rows that travel in a narrower dtype."""
    expected_x, expected_experts = dense(hidden)
    results = on_ranks(lambda group: joined(group, hidden, way, **fields), 4)
    for (got, _), expected in zip(results, expected_x, strict=True):
        for one, other in zip(got, expected, strict=True):
            assert relative(one, other) <= tolerance
    for layer, experts in enumerate(expected_experts):
        assert relative(torch.cat([found[layer] for _, found in results]), experts) <= tolerance


class CountsOutputs(Layer):
    """A layer that counts how many outputs of its experts are alive at once."""

    alive: tuple[weakref.ref[Tensor], ...] = ()
    most_alive = 0

    def run_experts(self, sent: Dispatched) -> Tensor:
        outputs = super().run_experts(sent)
        self.alive = tuple(ref for ref in (*self.alive, weakref.ref(outputs)) if ref() is not None)
        self.most_alive = max(self.most_alive, len(self.alive))
        return outputs


@pytest.mark.parametrize("way", ["plain", "recomputed", "no_grad", "dropped"])
def test_a_rank_that_is_done_keeps_only_what_a_backward_needs(way: str) -> None:
    def body(group: Group) -> int:
        layer = CountsOutputs(0, group, hidden=16)
        layers = [layer, Layer(1, group, hidden=16)]
        with join(layers):
            for step in range(6 * group.rank()):
                x, routings = micro_batch(1, step, 16)
                if way == "no_grad":
                    with torch.no_grad():
                        layers[1](layer(x, routings[0]), routings[1])
                    continue
                if way == "dropped":
                    layer.dispatch(x, routings[0])
                train(layers, 1, step, 16, "plain" if way == "dropped" else way)
        return layer.most_alive

    assert 1 <= on_ranks(body, 2)[0] <= 2  # twice with recomputation or a dropped dispatch


def test_nothing_is_left_behind() -> None:
    def body(group: Group) -> None:
        layers = two(group)
        with join(layers):
            train(layers, group.rank(), 0, 16)
        announced = layers[0].metrics().collectives["join"]
        train(layers, group.rank(), 0, 16)
        assert layers[0].metrics().collectives["join"] == announced > 0

    on_ranks(body, 2)


def in_block(call: Callable[[list[Layer], int], Any], size: int = 4, *, first: int = 1, **fields: Any) -> list[Any]:
    """What ranks raise in a block in which those from ``first`` on ``call(layers, rank)``; others only enter it."""

    def body(group: Group) -> None:
        layers = [Layer(seed, group, hidden=16, **fields) for seed in range(2)]
        with join(layers):
            if group.rank() >= first:
                call(layers, group.rank())

    return outcomes(body, size)


@pytest.mark.parametrize(("backend", "wrong"), [("alltoall", "shape"), ("alltoall", "id"), ("allgather", "shape")])
def test_a_refused_call_is_told_to_all_ranks(backend: str, wrong: str) -> None:
    def call(layers: list[Layer], rank: int) -> None:
        routing = random_routing(3 if (rank, wrong) == (2, "shape") else 4)
        if (rank, wrong) == (2, "id"):
            routing.topk_ids[0, 0] = 8
        layers[0](random_rows(4), routing)

    results = in_block(call, backend=backend)
    assert isinstance(results.pop(2), InputError)
    raises_everywhere(results, PeerError, "has 4 tokens but routing has 3" if wrong == "shape" else "must lie in -1..7")


def test_a_call_that_all_ranks_refuse() -> None:
    done, calling = in_block(lambda layers, rank: layers[0](random_rows(4), random_routing(3)), 2)
    raises_everywhere([done], PeerError, "rank 1 refused: Dispatcher.dispatch: ", "has 4 tokens but routing has 3")
    raises_everywhere([calling], InputError, "has 4 tokens but routing has 3")


def test_a_failure_between_calls_is_told() -> None:
    def call(layers: list[Layer], rank: int) -> None:
        for step in range(rank):
            if (rank, step) == (2, 1):
                raise ValueError("no data")
            train(layers, rank, step, 16)

    results = in_block(call)
    assert isinstance(results.pop(2), ValueError)
    text = "join: rank 2 failed after the backward of dispatch 1 of the block ('layer 0'): ValueError: no data"
    raises_everywhere(results, LostPeerError, text)


class _Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor) -> Tensor:
        return rows.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        raise ValueError("in backward")


def raising(rows: Tensor) -> Tensor:
    raise ValueError("in forward")


FAILURES: list[tuple[Callable[[Tensor], Tensor], type[Exception], str, str]] = [
    (raising, ValueError, "in forward", "wait() of"),
    (lambda rows: cast(Tensor, _Fails.apply(rows)), ValueError, "in backward", "backward of the combine of"),  # type: ignore[no-untyped-call]
    (lambda rows: rows[:-1], InputError, "Dispatcher.combine: rows must be floating", "wait() of"),
]


@pytest.mark.parametrize(("experts_of_rank_0", "kind", "told", "last"), FAILURES)
def test_a_failure_of_experts_that_answer_is_told(
    experts_of_rank_0: Callable[[Tensor], Tensor], kind: type[Exception], told: str, last: str
) -> None:
    def body(group: Group) -> None:
        def experts(sent: Dispatched) -> Tensor:
            return sent.rows * 1 if group.rank() else experts_of_rank_0(sent.rows)

        dispatcher = build_dispatcher(small_config(), group)
        with join({dispatcher: experts}):
            for _ in range(group.rank()):
                sent = dispatcher.dispatch(random_rows(4).requires_grad_(), random_routing(4))
                dispatcher.combine(experts(sent), sent).sum().backward()

    first, *others = outcomes(body, 2)
    raises_everywhere([first], kind, told)
    raises_everywhere(others, LostPeerError, f"rank 0 failed after the {last} dispatch 1 of the block", str(first))


def test_experts_may_change_rows_in_place() -> None:
    def body(group: Group) -> Tensor:
        dispatcher, scale = build_dispatcher(small_config(), group), torch.full((16,), 2.0, requires_grad=True)
        x = random_rows(4).requires_grad_()
        with join({dispatcher: lambda sent: sent.rows.mul_(scale)}):
            for _ in range(group.rank()):
                sent = dispatcher.dispatch(x, random_routing(4))
                dispatcher.combine(sent.rows.mul_(scale), sent).sum().backward()
        assert scale.grad is not None
        return scale.grad if x.grad is None else x.grad

    answered, grad = on_ranks(body, 2)
    assert answered.abs().sum() > 0
    weights = random_routing(4).topk_weights.sum(1, keepdim=True)
    torch.testing.assert_close(grad, (2 * weights).expand_as(grad))


def loop_over_chunks(layer: Layer, chunks: int) -> None:
    """Dispatch each chunk before the experts of the chunk before it run."""
    coming = layer.dispatch(random_rows(2), random_routing(2), async_op=True)
    for _ in range(1, chunks):
        following = layer.dispatch(random_rows(2), random_routing(2), async_op=True)
        sent, coming = coming.wait(), following
        layer.combine(layer.run_experts(sent), sent)
    sent = coming.wait()
    layer.combine(layer.run_experts(sent), sent)


DIFFERENT: dict[str, tuple[Callable[[list[Layer], int], Any], str]] = {
    "another layer": (
        lambda layers, rank: layers[rank == 2](random_rows(4), random_routing(4)),
        "dispatch 1 of the block ('layer 0') on ranks 1, 3; dispatch 1 of the block ('layer 1') on rank 2. Make",
    ),
    "no combine": (
        lambda layers, rank: [
            layers[0].dispatch(random_rows(4), random_routing(4)) if rank == 2 else train(layers, rank, 0, 16)
            for _ in range(2)
        ],
        "the combine of dispatch 1 of the block ('layer 0') on ranks 1, 3; dispatch 2 of the block ('layer 0') on rank",
    ),
    "chunks": (
        lambda layers, rank: loop_over_chunks(layers[0], 2 + (rank == 2)),
        "the wait() of dispatch 2 of the block ('layer 0') on ranks 1, 3; dispatch 3 of the block ('layer 0') on rank "
        "2. Make the same calls on all ranks until one is done. A loop over chunks needs as many on every rank: let "
        "chunks cut",
    ),
    "another dtype": (
        lambda layers, rank: layers[0].dispatch(
            random_rows(4, dtype=torch.bfloat16 if rank == 2 else torch.float32), random_routing(4)
        ),
        "('layer 0'), torch.float32, torch.float32, no autocast on ranks 1, 3; dispatch 1 of the block ('layer 0'), "
        "torch.bfloat16, ",
    ),
}


@pytest.mark.parametrize("what", DIFFERENT)
def test_different_calls_are_named_on_all_ranks(what: str) -> None:
    call, text = DIFFERENT[what]
    raises_everywhere(in_block(call), InputError, "join: ranks make different calls: ", text)


def test_a_refused_call_that_meets_another_call() -> None:
    def call(layers: list[Layer], rank: int) -> None:
        sent = layers[0].dispatch(random_rows(4), random_routing(4))
        if rank == 2:
            layers[0].dispatch(random_rows(4), random_routing(3))
        layers[0].combine(sent.rows, sent)

    results = in_block(call, first=0)
    raises_everywhere([results.pop(2)], InputError, "has 4 tokens but routing has 3")
    raises_everywhere(results, InputError, "a refused call in place of dispatch 2 of the block ('layer 0') on rank 2")


def again(layer: Layer, x: Tensor, routing: Routing) -> None:
    layer.dispatch(x, again=layer.dispatch(x, routing))


def twice(layer: Layer, x: Tensor, routing: Routing) -> None:
    sent = layer.dispatch(x, routing)
    (layer.combine(sent.rows, sent) + layer.combine(sent.rows, sent)).sum().backward()


def by_operator(layer: Layer, x: Tensor, routing: Routing) -> None:
    by_operators(lambda x: layer.dispatch(x, routing).rows, x.requires_grad_())


def differentiated(layer: Layer, x: Tensor, routing: Routing) -> None:
    sent = layer.dispatch(x.requires_grad_(), routing)
    sent.rows.sum().backward(retain_graph=True)
    sent.rows.sum().backward()


OTHER = "join: a rank that is done does not answer {!r}. Make this call outside of the block"
REFUSED: list[tuple[Callable[[Layer, Tensor, Routing], Any], str]] = [
    (again, r"join: dispatch(again=...) is not answered"),
    (twice, "join: a dispatch was combined twice"),
    (differentiated, "join: a dispatch was differentiated twice"),
    (by_operator, "join: calls inside torch.compile and selective checkpointing are not answered"),
    (lambda layer, *_: layer.metrics(gather=True), OTHER.format("metrics")),
    (lambda layer, *_: layer.self_test(), OTHER.format("self_test")),
    (lambda layer, *_: layer.place(ExpertPlacement.contiguous(8, 2)), OTHER.format("place")),
    (lambda layer, *_: build_dispatcher(small_config(pad_multiple=2), layer.ranks()), OTHER.format("build")),
    (lambda layer, *_: RoutingTable.unknown({0: 4}, (0,), 2, 8).gathered(layer.ranks()), OTHER.format("replay")),
]


def test_calls_that_cannot_be_answered() -> None:
    for call, text in REFUSED:
        first, second = in_block(partial(refused, call), 2)
        raises_everywhere([first], LostPeerError, "join: rank 1 failed ", text)
        raises_everywhere([second], StateError, text)


def refused(call: Callable[[Layer, Tensor, Routing], Any], layers: list[Layer], rank: int) -> None:
    call(layers[0], random_rows(4), random_routing(4))


def test_what_begins_in_the_block_ends_there() -> None:
    """Also where no rank is done, so that the ranks could go on together."""

    def body(group: Group, *, what: str) -> None:
        layer, x = Layer(0, group, hidden=16), random_rows(4).requires_grad_()
        if what in ("begun before", "by an operator"):
            way = random_routing(4)
            y = layer(x, way) if what == "begun before" else by_operators(lambda x: layer(x, way), x)
            with join([layer]):
                y.sum().backward()
        with join([layer]):
            if what == "wait":
                coming = layer.dispatch(x, random_routing(4), async_op=True)
            else:
                sent = layer.dispatch(x, random_routing(4))
            if what == "backward":
                y = layer.combine(layer.run_experts(sent), sent)
        if what == "wait":
            coming.wait()
        elif what == "combine":
            layer.combine(sent.rows, sent)
        y.sum().backward()

    for what in ("wait", "combine", "backward"):
        text = "join: the block of this dispatch has ended. Call wait(), combine and backward in the block"
        raises_everywhere(outcomes(partial(body, what=what), 2), StateError, text)
    text = "join: a rank that is done does not answer 'combine.backward'"
    raises_everywhere(outcomes(partial(body, what="begun before"), 2), StateError, text)
    text = "join: calls inside torch.compile and selective checkpointing are not answered"
    raises_everywhere(outcomes(partial(body, what="by an operator"), 2), StateError, text)


def test_dispatchers_that_are_closed_or_copied_in_the_block() -> None:
    """A closed one answers until the end of the block, and a copy can be used behind it."""

    def body(group: Group) -> None:
        layers = two(group, pad_multiple=2)
        with join(layers):
            if group.rank():
                train(layers, 1, 0, 16)
            layers[0].close()
            copied = copy.deepcopy(layers[1])
        with pytest.raises(StateError, match="must be open"):
            layers[0](random_rows(4), random_routing(4))
        train([layers[1], copied], group.rank(), 0, 16)
        layers[1].close()
        train([copied, copied], group.rank(), 0, 16)

    on_ranks(body, 2)


def test_ranks_whose_router_trains_and_ranks_whose_router_does_not() -> None:
    def body(group: Group) -> Tensor | None:
        layer, routing = Layer(0, group, hidden=16), random_routing(4)
        routing.topk_weights.requires_grad_(group.rank() == 1)
        with join([layer]):
            if group.rank():
                layer(random_rows(4), routing).sum().backward()
        return routing.topk_weights.grad

    _, trained, *others = on_ranks(body, 4)
    assert others == [None, None]
    assert trained is not None
    assert trained.abs().sum() > 0


def test_a_rank_that_leaves_before_its_combine() -> None:
    def call(layers: list[Layer], rank: int) -> None:
        sent = layers[0].dispatch(random_rows(4), random_routing(4))
        if rank:
            layers[0].combine(sent.rows, sent)

    text = "join: rank 0 left the block before the combine of dispatch 1 of the block ('layer 0'), the next call of"
    raises_everywhere(in_block(call, first=0), InputError, text)


@pytest.mark.parametrize("wrong", ["refused", "different"])
def test_no_rank_waits_for_one_that_has_left_after_an_error(wrong: str) -> None:
    """Ranks 1 to 3 catch the error of a call and go on, but rank 0, which answered the call, has left."""

    def call(layers: list[Layer], rank: int) -> None:
        layer = layers[rank % 2 if wrong == "different" else 0]
        with pytest.raises((InputError, PeerError)):
            layer(random_rows(4), random_routing(2 + rank))
        train(layers, rank, 0, 16)

    first, *others = in_block(call)
    assert isinstance(first, PeerError if wrong == "refused" else InputError)
    raises_everywhere(others, LostPeerError, "join: rank 0 failed ", str(first))


@pytest.mark.parametrize("steps", [1, 2])
def test_a_rank_that_catches_the_failure_of_another_waits_for_nobody(steps: int) -> None:
    def call(layers: list[Layer], rank: int) -> None:
        layers[0](random_rows(4), random_routing(4))
        if rank == 2:
            raise ValueError("no data")
        for _ in range(steps * rank):
            with pytest.raises(LostPeerError):
                layers[0](random_rows(4), random_routing(4))

    results = in_block(call, first=0)
    assert isinstance(results.pop(2), ValueError)
    raises_everywhere(results, LostPeerError, "join: rank 2 failed after the combine of", "ValueError: no data")


@pytest.mark.parametrize("backend", ["alltoall", "allgather"])
def test_ranks_that_differ_in_grad_mode(backend: str) -> None:
    def call(layers: list[Layer], rank: int) -> None:
        with torch.set_grad_enabled(rank == 1):
            layers[0](random_rows(4), random_routing(4))

    text = "Ranks disagree on grad mode: rank 1 has 'enabled', rank 2 has 'disabled'"
    raises_everywhere(in_block(call, backend=backend), InputError, text)


@pytest.mark.parametrize(
    ("fields", "given", "text"),
    [
        ({"graph_safe": True, "max_tokens_per_rank": 4}, 2, "sizes must be exchanged, got graph_safe=True"),
        ({"balance": "exact"}, 2, "experts must stay at home"),
        ({"balance": {"name": "manual", "spare_experts_per_rank": 1}}, 2, "experts must stay at home"),
        ({}, 1, "pass all 2 open dispatchers of the group, got 1"),
        ({"pad_multiple": 2}, 1, "pass all 2 open dispatchers of the group, got 1"),
        ({}, 0, "join: there are no layers"),
        ({}, 2, "join: this block is inside of another join"),
    ],
)
def test_configs_and_layers_that_are_refused(fields: dict[str, Any], given: int, text: str) -> None:
    def body(group: Group) -> None:
        layers = two(group, **fields)
        with join(layers[:given]), join(layers):
            raise AssertionError("entered")

    raises_everywhere(outcomes(body, 2), ConfigError, text)


def entering(make: Callable[[Group], Any]) -> list[Any]:
    """What two ranks raise that enter a block with the layers that ``make`` makes."""

    def body(group: Group) -> None:
        with join(make(group)):
            raise AssertionError("entered")

    return outcomes(body, 2)


def test_layers_in_another_order_are_refused() -> None:
    digest = small_config(hidden_size=16).digest[:12]
    text = f"rank 0 has '{digest} 0, {digest} 1', rank 1 has '{digest} 1, {digest} 0'. Make the same call on every rank"
    results = entering(lambda group: two(group)[:: -1 if group.rank() else 1])
    raises_everywhere(results, InputError, "Ranks disagree on the layers of join, each as config", text)


def test_layers_of_two_groups_are_refused() -> None:
    store = HashStore()
    results = entering(lambda group: two(group)[:1] + two(thread_group(store, group.rank(), 2))[:1])
    raises_everywhere(results, ConfigError, "join: all layers must have one group")


def test_layers_without_experts_are_refused() -> None:
    results = entering(lambda group: [build_dispatcher(small_config(), group)])
    raises_everywhere(results, ConfigError, "join: Dispatcher does not define run_experts")


@pytest.mark.parametrize("closed", [0, 1])
def test_a_rank_with_a_closed_dispatcher(closed: int) -> None:
    def make(group: Group) -> list[Layer]:
        layers = two(group, pad_multiple=2)
        if group.rank():
            layers[closed].close()
        return layers

    first, second = entering(make)
    raises_everywhere([first], PeerError, "rank 1 refused: Dispatcher: the dispatcher must be open")
    raises_everywhere([second], StateError, "Dispatcher: the dispatcher must be open")


@pytest.mark.parametrize("nesting", [0, 1])
def test_a_join_inside_of_another_on_one_rank(nesting: int) -> None:
    def call(layers: list[Layer], rank: int) -> None:
        if rank == nesting:
            with join(layers):
                raise AssertionError("entered")
        for _ in range(rank):
            layers[0](random_rows(4), random_routing(4))

    results = in_block(call, first=0)
    raises_everywhere([results.pop(nesting)], ConfigError, "join: this block is inside of another join")
    raises_everywhere(results, LostPeerError, f"join: rank {nesting} failed before its first call: join: this block is")


@pytest.mark.parametrize("told", ["Layer alone", "Linear"])
def test_what_is_no_list_of_dispatchers_is_refused(told: str) -> None:
    given = Layer(0, None, hidden=16, backend="local") if told == "Layer alone" else [torch.nn.Linear(1, 1)]
    with pytest.raises(ConfigError, match=rf"^join: layers must be dispatchers, .*got {told}"), join(cast(Any, given)):
        raise AssertionError("entered")


def test_one_rank_alone() -> None:
    layers = [Layer(seed, None, hidden=16, backend="local") for seed in range(2)]
    with join(layers):
        train(layers, 0, 1, 16)
