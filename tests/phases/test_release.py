"""``release`` gives back what a channel holds, and the next call goes on with the same bits, on the group as it is."""

from __future__ import annotations

import datetime
import gc
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import HashStore, PrefixStore
from torch.utils.checkpoint import checkpoint

from moe_dispatch import Dispatched, Dispatcher, Routing, Rows, build_dispatcher
from moe_dispatch.balance import ExpertPlacement
from moe_dispatch.cuda_graphs import Captured
from moe_dispatch.dispatchers import channel as channels
from moe_dispatch.dispatchers import release, reopen
from moe_dispatch.errors import MoEDispatchError, StateError
from moe_dispatch.recompute import keep_routes, keep_routes_of
from moe_dispatch_testing import run_ranks
from moe_dispatch_testing.ranks import _run_threads, thread_group
from tests.dispatchers.layer import Group, by_operators, on_ranks, random_routing, random_rows, small_config
from tests.phases.cycles import CASES
from tests.phases.cycles import Trainee as Trained

ROWS = (5, 2)
MANUAL: dict[str, Any] = {"balance": {"name": "manual", "spare_experts_per_rank": 1}}


class Layer(Dispatcher):
    def run_experts(self, sent: Dispatched) -> Tensor:
        return sent.rows * 2


def step(layer: Dispatcher, rank: int, seed: int = 0) -> Tensor:
    """Train a micro-batch; return its output and its gradient."""
    x = random_rows(ROWS[rank], seed=seed).requires_grad_()
    y = layer(x, random_routing(ROWS[rank], seed))
    y.sum().backward()
    assert x.grad is not None
    return torch.cat([y.detach(), x.grad])


def message(call: Callable[[], object]) -> str:
    try:
        call()
    except MoEDispatchError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


@pytest.mark.parametrize("case", [name for name in CASES if "node" not in name])
def test_a_released_model_goes_on_with_the_same_bits(case: str) -> None:
    def losses(*, releases: bool) -> list[Any]:
        def body(group: Group) -> Any:
            trainee, found, held = Trained(case, group), [], []
            for _ in range(3):
                found += [trainee.train(), trainee.train(), trainee.evaluate()]
                if releases:
                    held.append(trainee.state())
                    release(trainee.layers)
                    trainee.layers[1].release()  # type: ignore[operator]  # a second call does nothing
                    held.append(trainee.state())
            return found, held

        return on_ranks(body, 4)

    plain, released = losses(releases=False), losses(releases=True)
    for (wanted, _), (found, held) in zip(plain, released, strict=True):
        assert found == wanted
        for (_, before), (memory, after) in zip(held[::2], held[1::2], strict=True):
            assert memory == 0
            assert after == before
        assert ("emulate" in str(CASES[case]["backend"])) == (held[0][0] > 0)


def test_memory_that_calls_reuse_is_given_back() -> None:
    def body(group: Group) -> list[int]:
        torch.use_deterministic_algorithms(False)  # which takes fresh memory in each call; conftest.py restores it
        layer = Layer(small_config(hidden_size=512), group)
        x = random_rows(2000, 512)
        with torch.no_grad():
            layer(x, random_routing(2000))
        seen = [layer.metrics().memory_held]
        layer.release()
        return [*seen, layer.metrics().memory_held, layer.metrics(gather=True).memory_held]

    for before, after, opened in on_ranks(body, 2):
        assert before > 1_000_000
        assert after == opened == 0


IN_FLIGHT: dict[str, Callable[[Layer, Tensor, Routing], object]] = {
    "rows that travel": lambda layer, x, routing: layer.dispatch(x, routing, async_op=True),
    "no combine": lambda layer, x, routing: layer.dispatch(x, routing),
    "no backward": lambda layer, x, routing: layer(x.requires_grad_(), routing),
    "a checkpoint": lambda layer, x, routing: checkpoint(layer, x.requires_grad_(), routing, use_reentrant=False),
    "kept routes": lambda layer, x, routing: checkpoint(
        layer, x.requires_grad_(), routing, use_reentrant=False, context_fn=keep_routes
    ),
    "kept routes of a reentrant one": lambda layer, x, routing: checkpoint(
        keep_routes_of(layer), x.requires_grad_(), routing, use_reentrant=True
    ),
    "operators": lambda layer, x, routing: by_operators(lambda x: layer(x, routing), x.requires_grad_()),
}


@pytest.mark.parametrize("how", IN_FLIGHT)
@pytest.mark.parametrize("graph_safe", [False, True])
def test_a_call_in_flight_on_one_rank_is_refused_on_all(how: str, graph_safe: bool) -> None:
    fields: dict[str, Any] = {"graph_safe": True, "max_tokens_per_rank": 5} if graph_safe else {}

    def body(group: Group) -> tuple[str, bool]:
        rank = group.rank()
        layer = Layer(small_config(**fields), group, name="layers.3")
        x, routing = random_rows(ROWS[rank]), random_routing(ROWS[rank])
        wanted = step(layer, rank)
        live: Any = IN_FLIGHT[how](layer, x, routing)
        if rank:  # it drops the results
            if hasattr(live, "wait"):
                live.wait()
            del live
        told = message(layer.release)
        if not rank and hasattr(live, "wait"):
            live.wait()
        live = None
        layer.release()
        return told, torch.equal(step(layer, rank), wanted)

    told, equal = zip(*on_ranks(body, 2), strict=True)
    wanted = "Dispatcher.release: no call may be in flight, got 1"
    assert told[0].startswith(f"StateError: {wanted}")
    assert told[1].startswith(f"PeerError: rank 0 refused: {wanted}")
    assert how == "rows that travel" or "'layers.3'" in told[0]
    assert all(equal)


def test_results_and_plans_from_before_are_refused() -> None:
    def body(group: Group) -> list[str]:
        rank = group.rank()
        layer = Layer(small_config(pad_multiple=4), group)
        x, routing, plan = random_rows(ROWS[rank]), random_routing(ROWS[rank]), layer.plan(Rows())
        with torch.no_grad():
            sent = layer.dispatch(x, routing)
            layer.combine(sent.rows, sent)
        y = layer(x.requires_grad_(), routing).sum()
        y.backward(retain_graph=True)
        layer.release()
        told = [message(lambda: layer.combine(sent.rows, sent)), message(lambda: layer.dispatch(x, again=sent))]
        layer.reopen()
        told += [
            message(lambda: layer.combine(sent.rows, sent)),
            message(lambda: layer.dispatch(x, again=sent)),
            message(y.backward),
            message(lambda: layer.dispatch(x, routing, plan)),
        ]
        step(layer, rank)
        return told

    old = "the dispatch must be of the time since the last release(), which gave its route back, got an older one. "
    for told in on_ranks(body, 2):
        assert told[0] == told[2] == f"StateError: Dispatcher.combine: {old}Dispatch again."
        assert told[1] == told[3] == f"StateError: Dispatcher.dispatch: {old}Dispatch again."
        assert told[4] == f"StateError: Dispatcher.combine: {old}Dispatch again."
        assert told[5] == "StateError: Dispatcher.dispatch: the plan was made before release(). Make the plan again."


def test_a_graph_from_before_is_refused_and_opens_nothing() -> None:
    def body(group: Group) -> list[str]:
        layer = Layer(small_config(graph_safe=True, max_tokens_per_rank=5), group)
        step(layer, group.rank())
        channel, replayed = layer._channel, SimpleNamespace(replay=lambda: None)
        graph = Captured([(layer, channel.opening, channel.capacity)], (), None, replayed, "outputs")
        assert graph.replay() == "outputs"
        layer.release()
        told = [message(graph.replay)]
        assert channel.waken is not None
        layer.reopen()
        return [*told, message(graph.replay)]

    for told in on_ranks(body, 2):
        assert told == ["StateError: Captured.replay: a dispatcher was released since the capture. Capture again."] * 2


def test_placement_capacity_and_names_stay() -> None:
    placement = ExpertPlacement(8, ((7, 6, 5, 4, 0), (3, 2, 1, 0, -1)))

    def body(group: Group) -> None:
        rank = group.rank()
        layer = Layer(small_config(**MANUAL), group, name="placed")
        layer.place(placement)
        wanted, counts = step(layer, rank), layer.expert_counts()
        layer.release()
        assert (layer.placement, layer.name) == (placement, "placed")
        assert torch.equal(layer.expert_counts(), counts)
        assert torch.equal(step(layer, rank), wanted)

        safe = Layer(
            small_config(graph_safe={"capacity_factor": 1.0, "on_overflow": "drop"}, max_tokens_per_rank=5), group
        )
        skewed = Routing(torch.tensor([[0, 1]]).expand(5, 2).contiguous(), torch.ones(5, 2))

        def run() -> Tensor:
            with torch.no_grad():
                y: Tensor = safe(random_rows(5), skewed)
                return y

        safe.retry_on_overflow(run)
        whole = run()
        safe.release()
        assert torch.equal(run(), whole)
        assert not safe.check().overflowed

    on_ranks(body, 2)


@pytest.mark.parametrize("backend", ["alltoall", "allgather"])
def test_a_rank_that_dispatches_instead_is_named_at_once(backend: str) -> None:
    def body(group: Group) -> str:
        layer = Layer(small_config(backend, num_experts=9), group)
        step(layer, 0)
        if group.rank() == 2:
            return message(lambda: layer(random_rows(5), random_routing(5)))
        return message(layer.release)

    for told in run_ranks(body, 3):
        assert told.startswith("InputError: Ranks disagree on the call: rank 0 has 'release', rank 2 has 'dispatch")


def test_a_rank_that_does_not_come_is_named() -> None:
    store, seconds = HashStore(), datetime.timedelta(seconds=2)

    def body(rank: int) -> str:
        group = thread_group(store, rank, 3, seconds)
        layer = Layer(small_config("alltoall", num_experts=9), group)
        if rank == 1:
            return "elsewhere"
        return message(layer.release)

    told = _run_threads(body, 3)
    expected = "PeerError: Dispatcher.release: every rank must call it, got no call on rank 1 within the timeout"
    assert told[0].startswith(expected)
    assert told[2].startswith(expected)


class Wrapper(dist.ProcessGroup):
    """A stable group around one that is destroyed and made anew."""

    def __init__(self, make: Callable[[], dist.ProcessGroup]) -> None:
        self.made: Any = make()
        super().__init__(self.made.rank(), self.made.size())  # type: ignore[call-arg]
        self.make = make


@pytest.mark.parametrize("backend", ["alltoall", {"name": "deepep", "emulate": True}])
def test_a_group_in_a_wrapper_is_freed_and_found(backend: Any) -> None:
    store = HashStore()
    fields = {} if backend == "alltoall" else {"hidden_size": 256, "wire": "bfloat16"}

    def body(rank: int) -> bool:
        numbers = iter(range(2))

        def make() -> dist.ProcessGroup:
            return thread_group(PrefixStore(str(next(numbers)), store), rank, 2)

        group = Wrapper(make)
        dispatcher = build_dispatcher(small_config(backend, **fields), group)

        def run() -> Tensor:
            x = random_rows(ROWS[rank], dispatcher.config.hidden_size)
            with torch.no_grad():
                sent = dispatcher.dispatch(x, random_routing(ROWS[rank]))
                return dispatcher.combine(sent.rows, sent)

        wanted, inside = run(), weakref.ref(group.made)
        dispatcher.release()
        group.made = None
        assert inside() is None
        group.made = make()
        return torch.equal(run(), wanted)

    assert _run_threads(body, 2) == [True, True]


def test_another_group_is_given_to_reopen() -> None:
    store = HashStore()

    def body(rank: int) -> list[str]:
        one, two = (thread_group(PrefixStore(str(number), store), rank, 2) for number in range(2))
        turned = thread_group(PrefixStore("2", store), 1 - rank, 2)
        model = nn.Sequential(Layer(small_config(), one), Layer(small_config(), one), Layer(small_config(top_k=1), one))
        wanted = step(model[0], rank)  # type: ignore[arg-type]
        release(model)
        told = [message(lambda: reopen(model, turned)), message(lambda: reopen(model, object()))]  # type: ignore[arg-type]
        reopen(model, two)
        for layer in model:
            assert layer._channel.communicator.group is two  # type: ignore[union-attr]
        shares = Layer(small_config(), two)
        assert shares.metrics().dispatches == model[0].metrics().dispatches  # type: ignore[operator]
        assert torch.equal(step(model[0], rank), wanted)  # type: ignore[arg-type]
        return told

    for rank, (told, no_group) in enumerate(_run_threads(body, 2)):
        assert told == (
            "StateError: Dispatcher: after release() the group must have the rank and the size that the dispatcher was "
            f"built with, {rank} of 2, got {1 - rank} of 2. Close the dispatcher and build another."
        )
        assert "Dispatcher.reopen: a group must be a process group that this rank is in, got object" in no_group


def test_close_and_a_second_dispatcher_while_released() -> None:
    def body(group: Group) -> None:
        rank = group.rank()
        one, other = (Layer(small_config(), group) for _ in range(2))
        wanted = step(one, rank)
        one.release()
        newer = Layer(small_config(), group)  # opens a channel of its own
        assert torch.equal(step(newer, rank), wanted)
        assert torch.equal(step(other, rank), wanted)
        newer.close()
        other.release()
        other.close()
        with pytest.raises(StateError, match=r"must be open, got a closed one"):
            other.release()
        assert torch.equal(step(one, rank), wanted)
        one.close()

    on_ranks(body, 2)


def test_a_group_that_was_dropped_stays_nowhere() -> None:
    store = HashStore()

    def body(rank: int) -> bool:
        group = thread_group(store, rank, 2)
        layer = Layer(small_config({"name": "hybridep", "emulate": True}, hidden_size=256), group)
        alive = weakref.ref(group)
        layer.release()
        del group, layer
        gc.collect()
        return alive() is None

    assert _run_threads(body, 2) == [True, True]


def test_channels_of_destroyed_groups_do_not_add_up() -> None:
    """Dispatchers that were dropped, not closed, before their group was destroyed."""
    before = set(channels._channels.values())
    for _ in range(3):
        dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
        dispatcher = build_dispatcher(
            small_config({"name": "hybridep", "emulate": True}, hidden_size=256), dist.group.WORLD
        )
        with torch.no_grad():
            sent = dispatcher.dispatch(random_rows(4, 256).bfloat16(), random_routing(4))
            dispatcher.combine(sent.rows, sent)
        del dispatcher, sent
        gc.collect()
        dist.destroy_process_group()
        kept = [channel for channel in channels._channels.values() if channel not in before]
        assert len(kept) <= 1
    build_dispatcher(small_config("local")).close()
    assert {*channels._channels.values()} <= before


def test_a_model_without_a_dispatcher_is_refused() -> None:
    with pytest.raises(StateError, match=r"release: the model must have a dispatcher, got none\. Pass the module"):
        release(nn.Linear(2, 2))


def test_compiled_code_opens_the_channel() -> None:
    layer = Layer(small_config("local"))
    compiled = torch.compile(lambda x, routing: layer(x, routing), fullgraph=True, backend="aot_eager")
    x, routing = random_rows(5).requires_grad_(), random_routing(5)
    wanted = compiled(x, routing)
    live = compiled(x, routing).sum()
    layer.release()
    with pytest.raises(StateError, match=r"the dispatch must be of the time since the last release"):
        live.backward()
    assert torch.equal(compiled(x, routing), wanted)


def test_one_rank_alone() -> None:
    layer = Layer(small_config("local"))
    wanted = step(layer, 0)
    layer.release()
    assert "closed" not in repr(layer)
    assert torch.equal(step(layer, 0), wanted)
    sent = layer.dispatch(random_rows(5).requires_grad_(), random_routing(5))
    with pytest.raises(StateError, match=r"no call may be in flight, got 1 whose rows, combine or backward"):
        layer.release()
    layer.combine(sent.rows, sent).sum().backward()
    layer.release()
