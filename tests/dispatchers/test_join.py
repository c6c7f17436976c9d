"""Ranks with unequal numbers of steps: one that is done answers the calls of the others."""

from __future__ import annotations

import copy
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
from moe_dispatch.dispatchers import channel as channels
from moe_dispatch.dispatchers import join, unequal_steps
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

STEPS = (3, 0, 5, 1)


class Layer(Dispatcher):
    """A layer of experts, ``tanh(rows @ weights)``."""

    def __init__(self, seed: int, group: Group, *, hidden: int, **fields: Any) -> None:
        super().__init__(small_config(hidden_size=hidden, **fields), group, name=f"layer {seed}")
        self.weights = local_part(expert_weights(hidden=hidden, seed=seed), group)

    def run_experts(self, sent: Dispatched) -> Tensor:
        return apply_experts(sent, self.weights)


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
        if way == "plain":
            y = y + layer(y, routing)
        else:
            y = y + checkpoint(layer, y, routing, use_reentrant=way == "reentrant")
    y.square().sum().backward()
    assert x.grad is not None
    return x.grad


def dense(hidden: int, steps: tuple[int, ...] = STEPS) -> tuple[list[list[Tensor]], list[Tensor]]:
    """Return the gradients of x by rank and step, and those of all experts by layer, on one rank."""
    layers = [Layer(seed, None, hidden=hidden, backend="local") for seed in range(2)]
    grads = [[train(layers, rank, step, hidden) for step in range(count)] for rank, count in enumerate(steps)]
    return grads, [layer.weights.grad for layer in layers if layer.weights.grad is not None]


def joined(group: Group, hidden: int = 16, way: str = "plain", **fields: Any) -> tuple[list[Tensor], list[Tensor]]:
    layers = [Layer(seed, group, hidden=hidden, **fields) for seed in range(2)]
    with join(layers):
        grads = [train(layers, group.rank(), step, hidden, way) for step in range(STEPS[group.rank()])]
    found = [layer.weights.grad.clone() for layer in layers if layer.weights.grad is not None]
    train(layers, group.rank(), 9, hidden)  # the ranks are in step again
    for layer in layers:
        layer.close()
    return grads, found


@pytest.mark.parametrize("way", ["plain", "recomputed", "reentrant"])
@pytest.mark.parametrize(
    "fields",
    [
        {"backend": "alltoall"},
        {"backend": {"name": "alltoall", "reduction": "exact"}, "pad_multiple": 8},
        {"backend": {"name": "alltoall", "levels": 2, "ranks_per_node": 2}},
        {"backend": "allgather"},
        {"backend": "alltoall", "chunk_tokens": 3},
        {"backend": "alltoall", "debug": True, "watchdog": 30},
    ],
    ids=str,
)
def test_gradients_are_those_of_the_dense_model(fields: dict[str, Any], way: str) -> None:
    expected_x, expected_experts = dense(16)
    results = on_ranks(lambda group: joined(group, way=way, **fields), 4)
    for (got, _), expected in zip(results, expected_x, strict=True):
        assert len(got) == len(expected)
        for one, other in zip(got, expected, strict=True):
            torch.testing.assert_close(one, other)
    for layer, expected_all in enumerate(expected_experts):
        torch.testing.assert_close(torch.cat([experts[layer] for _, experts in results]), expected_all)


BFLOAT16: dict[str, Any] = {"wire_dtype": "bfloat16"}
QUANTISED: dict[str, Any] = {"wire_dtype": "float8_e4m3fn", "deliver": "quantised", "pad_multiple": 128}


@pytest.mark.parametrize(
    ("backend", "fields", "tolerance"),
    [
        ({"name": "deepep", "emulate": "v1.2.1"}, BFLOAT16, 0.02),
        ({"name": "deepep", "emulate": "v2.5.0"}, BFLOAT16, 0.02),
        ({"name": "hybridep", "emulate": "hybridep-746"}, BFLOAT16, 0.02),
        ("alltoall", QUANTISED, 0.1),
    ],
    ids=str,
)
def test_narrow_rows_and_emulated_libraries(backend: Any, fields: dict[str, Any], tolerance: float) -> None:
    """Results differ from those of the dense model by the rounding of rows that travel."""
    expected_x, expected_experts = dense(512)
    results = on_ranks(lambda group: joined(group, 512, backend=backend, **fields), 4)
    pairs: list[tuple[Tensor, Tensor]] = []
    for (x, _), expected in zip(results, expected_x, strict=True):
        pairs += zip(x, expected, strict=True)
    for layer, experts in enumerate(expected_experts):
        pairs.append((torch.cat([found[layer] for _, found in results]), experts))
    for got, expected_one in pairs:
        assert len(got) == 0 or float((got - expected_one).norm() / expected_one.norm().clamp(min=1e-6)) < tolerance


def test_experts_of_verbs_and_plans() -> None:
    """Dispatch with a plan and combine, without a subclass. The last rank calls alone, forward only at the end."""

    def body(group: Group) -> Tensor:
        dispatcher, weights = build_dispatcher(small_config("allgather"), group), local_part(expert_weights(), group)
        with join({dispatcher: lambda sent: apply_experts(sent, weights)}):
            for step in range(group.rank() * 2):
                x, routing = random_rows(5, seed=step), random_routing(5, step)
                with torch.set_grad_enabled(step < 1):
                    sent = dispatcher.dispatch(x, routing, dispatcher.plan(like=x))
                    y = dispatcher.combine(apply_experts(sent, weights), sent)
                if step < 1:
                    y.sum().backward()
        assert weights.grad is not None
        return weights.grad

    def alone() -> Tensor:
        dispatcher, weights = build_dispatcher(small_config("local")), local_part(expert_weights(), None)
        sent = dispatcher.dispatch(random_rows(5, seed=0), random_routing(5, 0))
        dispatcher.combine(apply_experts(sent, weights), sent).sum().backward()
        assert weights.grad is not None
        return weights.grad

    torch.testing.assert_close(torch.cat(on_ranks(body, 2)), alone())


@pytest.mark.parametrize("way", ["plain", "recomputed", "reentrant", "no_grad", "dropped"])
def test_a_rank_that_is_done_keeps_only_what_a_backward_needs(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = [0, 0]
    answer = unequal_steps._Session.answer

    def counting(session: unequal_steps._Session) -> bool:
        rank = session.control.rank
        kept[rank] = max(kept[rank], len(session._calls))
        return answer(session)

    def body(group: Group) -> None:
        layers = [Layer(seed, group, hidden=16) for seed in range(2)]
        with join(layers):
            for step in range(6 * group.rank()):
                if way == "no_grad":
                    with torch.no_grad():
                        x, routings = micro_batch(1, step, 16)
                        layers[1](layers[0](x, routings[0]), routings[1])
                    continue
                if way == "dropped":
                    x, routings = micro_batch(1, step, 16)
                    layers[0].dispatch(x, routings[0], async_op=True)
                train(layers, 1, step, 16, "plain" if way == "dropped" else way)

    monkeypatch.setattr(unequal_steps._Session, "answer", counting)
    on_ranks(body, 2)
    assert 1 <= kept[0] <= 5  # two layers, twice with recomputation or a dropped dispatch, and one that starts


def test_nothing_is_left_behind() -> None:
    def body(group: Group) -> None:
        layers = [Layer(seed, group, hidden=16) for seed in range(2)]
        channel, before = layers[0]._channel, vars(layers[0]._channel).copy()
        with join(layers):
            assert layers[0]._channel is not channel
        assert layers[0]._channel is channel
        assert vars(channel) == before
        calls = channel.communicator.calls["join"]
        train(layers, group.rank(), 0, 16)
        assert channel.communicator.calls["join"] == calls

    on_ranks(body, 2)


@pytest.mark.parametrize("backend", ["alltoall", "allgather"])
@pytest.mark.parametrize("wrong", ["shape", "id"])
def test_a_refused_call_is_told_to_all_ranks(backend: str, wrong: str) -> None:
    def body(group: Group) -> None:
        layer = Layer(0, group, hidden=16, backend=backend)
        with join([layer]):
            if group.rank():
                routing = random_routing(4)
                if group.rank() == 2:
                    routing = random_routing(3) if wrong == "shape" else routing
                    routing.topk_ids[0, 0] = 8 if wrong == "id" else 0
                layer(random_rows(4), routing)

    results = outcomes(body, 4)
    assert isinstance(results.pop(2), InputError)
    raises_everywhere(results, PeerError, "has 4 tokens but routing has 3" if wrong == "shape" else "must lie in -1..7")


def test_a_call_that_all_ranks_refuse() -> None:
    def body(group: Group) -> None:
        layer = Layer(0, group, hidden=16)
        with join([layer]):
            if group.rank():
                layer(random_rows(4), random_routing(3))

    done, calling = outcomes(body, 2)
    raises_everywhere([done], PeerError, "rank 1 refused: Dispatcher.dispatch: ", "has 4 tokens but routing has 3")
    raises_everywhere([calling], InputError, "has 4 tokens but routing has 3")


def test_a_failure_between_calls_is_told() -> None:
    def body(group: Group) -> None:
        layers = [Layer(seed, group, hidden=16) for seed in range(2)]
        with join(layers):
            for step in range(group.rank()):
                if (group.rank(), step) == (2, 1):
                    raise ValueError("no data")
                train(layers, group.rank(), step, 16)

    results = outcomes(body, 4)
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


@pytest.mark.parametrize("where", ["in forward", "in backward"])
def test_a_failure_of_experts_that_answer_is_told(where: str) -> None:
    def body(group: Group) -> None:
        def experts(sent: Dispatched) -> Tensor:
            if group.rank():
                return sent.rows * 1
            if where == "in forward":
                raise ValueError(where)
            return cast(Tensor, _Fails.apply(sent.rows))  # type: ignore[no-untyped-call]

        dispatcher = build_dispatcher(small_config(), group)
        with join({dispatcher: experts}):
            for _ in range(group.rank()):
                sent = dispatcher.dispatch(random_rows(4).requires_grad_(), random_routing(4))
                dispatcher.combine(experts(sent), sent).sum().backward()

    first, *others = outcomes(body, 4)
    assert isinstance(first, ValueError)
    last = {"in forward": "wait() of", "in backward": "backward of the combine of"}[where]
    raises_everywhere(others, LostPeerError, f"rank 0 failed after the {last} dispatch 1 of the block", where)


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
        "chunk_tokens",
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
    def body(group: Group) -> None:
        layers = [Layer(seed, group, hidden=16) for seed in range(2)]
        with join(layers):
            if group.rank():
                DIFFERENT[what][0](layers, group.rank())

    raises_everywhere(outcomes(body, 4), InputError, "join: ranks make different calls: ", DIFFERENT[what][1])


def test_a_refused_call_that_meets_another_call() -> None:
    def body(group: Group) -> None:
        layer = Layer(0, group, hidden=16)
        with join([layer]):
            sent = layer.dispatch(random_rows(4), random_routing(4))
            if group.rank() == 2:
                layer.dispatch(random_rows(4), random_routing(3))
            layer.combine(sent.rows, sent)

    results = outcomes(body, 4)
    raises_everywhere([results.pop(2)], InputError, "has 4 tokens but routing has 3")
    raises_everywhere(results, InputError, "a refused call in place of dispatch 2 of the block ('layer 0') on rank 2")


def refused(call: Any, *texts: str, **fields: Any) -> None:
    """Check that rank 1 raises an error with the texts in a block that rank 0 only enters."""

    def body(group: Group) -> None:
        layer = Layer(0, group, hidden=16, **fields)
        with join([layer]):
            if group.rank():
                call(layer, random_rows(4), random_routing(4))

    first, second = outcomes(body, 2)
    raises_everywhere([first], LostPeerError, "join: rank 1 failed ", *texts)
    raises_everywhere([second], StateError, *texts)


def test_other_collectives_are_refused() -> None:
    def group_of(layer: Layer) -> Group:
        return layer._channel.communicator.group

    before = [Tensor()]

    def dispatched_before(layer: Layer, x: Tensor, routing: Routing) -> None:
        before[0].sum().backward()

    for text, call in {
        "'metrics'": lambda layer, *_: layer.metrics(gather=True),
        "'self_test'": lambda layer, *_: layer.self_test(),
        "'place'": lambda layer, *_: layer.place(ExpertPlacement.contiguous(8, 2)),
        "'build'": lambda layer, *_: build_dispatcher(small_config(pad_multiple=2), group_of(layer)),
        "'replay'": lambda layer, *_: RoutingTable.unknown({0: 4}, (0,), 2, 8).gathered(group_of(layer)),
    }.items():
        refused(call, f"join: a rank that is done does not answer {text}. Make this call outside of the block")


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


def test_experts_compute_in_the_dtype_of_the_others() -> None:
    """Autocast around the call is not in the function that answers."""

    def body(group: Group, *, joins: bool) -> list[Tensor]:
        weights = local_part(expert_weights(), group)
        dispatcher = build_dispatcher(small_config(), group)

        def run_experts(sent: Dispatched) -> Tensor:
            parts = sent.rows.split(sent.tokens_per_expert_list)
            return torch.cat([part @ expert for part, expert in zip(parts, weights, strict=True)])

        def step(rows: int) -> Tensor:
            x = random_rows(rows).requires_grad_()
            with torch.autocast("cpu", torch.bfloat16, enabled=True):
                sent = dispatcher.dispatch(x, random_routing(rows))
                outputs = run_experts(sent)
                y = dispatcher.combine(outputs, sent)
            assert outputs.dtype == torch.bfloat16
            y.square().sum().backward()
            assert x.grad is not None
            return x.grad

        if joins:
            with join({dispatcher: run_experts}):
                grads = [step(4) for _ in range(group.rank())]
        else:
            grads = [step(4 * group.rank())]
        assert weights.grad is not None
        return [weights.grad, *(grads if group.rank() else [])]

    for got, expected in zip(
        on_ranks(partial(body, joins=True), 2), on_ranks(partial(body, joins=False), 2), strict=True
    ):
        for one, other in zip(got, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=0)


def test_dispatchers_that_are_closed_or_copied_in_the_block() -> None:
    """A closed one answers until the end of the block, and a copy can be used behind it. Both count as users."""

    def body(group: Group) -> bool:
        layers = [Layer(seed, group, hidden=16) for seed in range(2)]
        channel = layers[0]._channel
        with join(layers):
            if group.rank():
                train(layers, 1, 0, 16)
            layers[0].close()
            copied = copy.deepcopy(layers[1])
        assert channel.users == 2
        train([layers[1], copied], group.rank(), 0, 16)
        layers[1].close()
        copied.close()
        return any(each is channel for each in channels._channels.values())

    assert on_ranks(body, 2) == [False, False]


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
    def body(group: Group) -> None:
        layer = Layer(0, group, hidden=16)
        with join([layer]):
            sent = layer.dispatch(random_rows(4), random_routing(4))
            if group.rank():
                layer.combine(sent.rows, sent)

    text = "join: rank 0 left the block before the combine of dispatch 1 of the block ('layer 0'), the next call of"
    raises_everywhere(outcomes(body, 4), InputError, text)


@pytest.mark.parametrize("wrong", ["refused", "different"])
def test_no_rank_waits_for_one_that_has_left_after_an_error(wrong: str) -> None:
    """Ranks 1 to 3 catch the error of a call and go on, but rank 0, which answered the call, has left."""

    def body(group: Group) -> None:
        layers = [Layer(seed, group, hidden=16) for seed in range(2)]
        with join(layers):
            if group.rank():
                with pytest.raises((InputError, PeerError)):
                    layers[group.rank() % 2 if wrong == "different" else 0](
                        random_rows(4), random_routing(2 + group.rank())
                    )
                train(layers, group.rank(), 0, 16)

    first, *others = outcomes(body, 4)
    assert isinstance(first, PeerError if wrong == "refused" else InputError)
    raises_everywhere(others, LostPeerError, "join: rank 0 failed ", str(first))


def test_a_rank_that_catches_the_failure_of_another_waits_for_nobody() -> None:
    def body(group: Group, *, steps: int) -> None:
        layer = Layer(0, group, hidden=16)
        with join([layer]):
            layer(random_rows(4), random_routing(4))
            if group.rank() == 2:
                raise ValueError("no data")
            for _ in range(steps * group.rank()):
                with pytest.raises(LostPeerError):
                    layer(random_rows(4), random_routing(4))

    for steps in (1, 2):
        results = outcomes(partial(body, steps=steps), 4)
        assert isinstance(results.pop(2), ValueError)
        raises_everywhere(results, LostPeerError, "join: rank 2 failed after the combine of", "ValueError: no data")


def test_ranks_that_differ_in_grad_mode() -> None:
    def body(group: Group, *, backend: str) -> None:
        layer = Layer(0, group, hidden=16, backend=backend)
        with join([layer]), torch.set_grad_enabled(group.rank() == 1):
            if group.rank():
                layer(random_rows(4), random_routing(4))

    for backend in ("alltoall", "allgather"):
        text = "Ranks disagree on grad mode: rank 1 has 'enabled', rank 2 has 'disabled'"
        raises_everywhere(outcomes(partial(body, backend=backend), 4), InputError, text)


def test_outputs_that_do_not_fit_are_told() -> None:
    def body(group: Group) -> None:
        def experts(sent: Dispatched) -> Tensor:
            return sent.rows if group.rank() else sent.rows[:-1]

        dispatcher = build_dispatcher(small_config(), group)
        with join({dispatcher: experts}):
            for _ in range(group.rank()):
                sent = dispatcher.dispatch(random_rows(4), random_routing(4))
                dispatcher.combine(experts(sent), sent)

    first, second = outcomes(body, 2)
    raises_everywhere([first], InputError, "Dispatcher.combine: rows must be floating")
    raises_everywhere([second], LostPeerError, "join: rank 0 failed after the wait() of dispatch 1", str(first))


def test_calls_that_cannot_be_answered() -> None:
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

    refused(again, r"join: dispatch(again=...) is not answered")
    refused(twice, "join: a dispatch was combined twice")
    refused(differentiated, "join: a dispatch was differentiated twice")
    refused(by_operator, "join: calls inside torch.compile and selective checkpointing are not answered")


def test_configs_and_layers_that_are_refused() -> None:
    def body(group: Group, *, fields: dict[str, Any], given: int) -> None:
        layers = [Layer(seed, group, hidden=16, **fields) for seed in range(2)]
        with join(layers[:given]), join(layers):
            raise AssertionError("entered")

    for fields, given, text in (
        ({"graph_safe": True, "max_tokens_per_rank": 4}, 2, "sizes must be exchanged, got graph_safe=True"),
        ({"balance": "exact"}, 2, "experts must stay at home"),
        ({"spare_experts_per_rank": 1}, 2, "experts must stay at home"),
        ({}, 1, "pass all 2 open dispatchers of the group, got 1"),
        ({}, 0, "join: there are no layers"),
        ({}, 2, "join: this block is inside of another join"),
    ):
        raises_everywhere(outcomes(partial(body, fields=fields, given=given), 2), ConfigError, text)


def test_dispatchers_of_another_config_must_be_passed() -> None:
    def body(group: Group) -> None:
        layers = [Layer(0, group, hidden=16), Layer(1, group, hidden=16, pad_multiple=2)]
        with join(layers):
            train(layers, group.rank(), 0, 16)
        with join(layers[:1]):
            raise AssertionError("entered")

    raises_everywhere(outcomes(body, 2), ConfigError, "pass all 2 open dispatchers of the group, got 1")


def test_layers_in_another_order_are_refused() -> None:
    def body(group: Group) -> None:
        layers = [Layer(seed, group, hidden=16) for seed in range(2)]
        with join(reversed(layers) if group.rank() else layers):
            raise AssertionError("entered")

    digest = small_config(hidden_size=16).digest[:12]
    text = f"rank 0 has '{digest} 0, {digest} 1', rank 1 has '{digest} 1, {digest} 0'. Make the same call on every rank"
    raises_everywhere(outcomes(body, 2), InputError, "Ranks disagree on the layers of join, each as config", text)


def test_layers_of_two_groups_are_refused() -> None:
    store = HashStore()

    def body(group: Group) -> None:
        layers = [
            Layer(seed, each, hidden=16) for seed, each in enumerate([group, thread_group(store, group.rank(), 2)])
        ]
        with join(layers):
            raise AssertionError("entered")

    raises_everywhere(outcomes(body, 2), ConfigError, "join: all layers must have one group")


def test_a_rank_with_a_closed_dispatcher() -> None:
    def body(group: Group, *, closed: int) -> None:
        layers = [Layer(seed, group, hidden=16, pad_multiple=1 + seed) for seed in range(2)]
        if group.rank():
            layers[closed].close()
        with join(layers):
            raise AssertionError("entered")

    for closed in range(2):
        first, second = outcomes(partial(body, closed=closed), 2)
        raises_everywhere([first], PeerError, "rank 1 refused: Dispatcher: the dispatcher must be open")
        raises_everywhere([second], StateError, "Dispatcher: the dispatcher must be open")


@pytest.mark.parametrize("nesting", [0, 1])
def test_a_join_inside_of_another_on_one_rank(nesting: int) -> None:
    def body(group: Group) -> None:
        layer = Layer(0, group, hidden=16)
        with join([layer]):
            if group.rank() == nesting:
                with join([layer]):
                    raise AssertionError("entered")
            for _ in range(group.rank()):
                layer(random_rows(4), random_routing(4))

    results = outcomes(body, 4)
    raises_everywhere([results.pop(nesting)], ConfigError, "join: this block is inside of another join")
    raises_everywhere(results, LostPeerError, f"join: rank {nesting} failed before its first call: join: this block is")


@pytest.mark.parametrize("alone", [True, False])
def test_what_is_no_list_of_dispatchers_is_refused(alone: bool) -> None:
    given = Layer(0, None, hidden=16, backend="local") if alone else [torch.nn.Linear(1, 1)]
    told = "Layer alone" if alone else "Linear"
    text = rf"^join: layers must be dispatchers, .*, got {told}\. Pass join\(\["
    with pytest.raises(ConfigError, match=text), join(cast(Any, given)):
        raise AssertionError("entered")


def test_layers_without_experts_are_refused() -> None:
    def body(group: Group) -> None:
        with join([build_dispatcher(small_config(), group)]):
            raise AssertionError("entered")

    raises_everywhere(outcomes(body, 2), ConfigError, "join: Dispatcher does not define run_experts")


def test_one_rank_alone() -> None:
    layers = [Layer(seed, None, hidden=16, backend="local") for seed in range(2)]
    with join(layers):
        train(layers, 0, 1, 16)
