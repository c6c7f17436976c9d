"""What observers hear, and how they refuse calls. Each observer of the package has tests of its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from moe_dispatch import BSHD, Dispatcher, Routing, build_dispatcher
from moe_dispatch.dispatchers import run_in_chunks
from moe_dispatch.dispatchers.channel import Lease
from moe_dispatch.errors import PeerError, StateError
from moe_dispatch.layouts import Layout
from moe_dispatch.seams.group_observers import CollectiveObserver, Work, observers_of
from moe_dispatch.seams.observers import Observer
from moe_dispatch_testing.ranks import run_ranks
from tests.dispatchers.layer import identity_round, outcomes, random_routing, random_rows, small_config


class Listener(Observer):
    """Keeps what it hears of the calls on a channel."""

    def __init__(self) -> None:
        self.heard: list[Any] = []

    def asked(self, x: Tensor, layout: Layout) -> None:
        self.heard.append(("asked", tuple(x.shape), type(layout).__name__))

    def traced(self) -> None:
        self.heard.append("traced")

    def started(self, lease: Lease, x: Tensor, routing: Routing, layout: Layout) -> None:
        self.heard.append(("started", lease.name, tuple(routing.topk_ids.shape)))

    def combined(self, lease: Lease, rows: Tensor) -> None:
        self.heard.append(("combined", lease.name, rows.shape[1]))


class Collectives(CollectiveObserver):
    """Keeps the collectives of a group, with the names of the dispatchers that make them, and may refuse one."""

    def __init__(self, refused: str = "") -> None:
        self.refused, self.name, self.heard = refused, "", list[tuple[str, str]]()

    def called(self, name: str) -> None:
        self.name = name

    def collective(self, label: str, nbytes: int, tensor: Tensor, start: Callable[[Any], Work], options: Any) -> Work:
        if label == self.refused:
            raise StateError(f"{label} is refused")
        self.heard.append((label, self.name))
        return start(options)


def observed(dispatcher: Dispatcher) -> list[Any]:
    """Attach a listener to the channel of a dispatcher. Return the list of what it hears."""
    listener = Listener()
    dispatcher._channel.observers.append(listener)
    return listener.heard


def test_an_observer_hears_of_each_dispatch_and_combine() -> None:
    dispatcher = build_dispatcher(small_config("local"), name="layers.0")
    other = build_dispatcher(small_config("local", hidden_size=32), name="other channel")
    heard = observed(dispatcher)
    x, routing = random_rows(6).view(2, 3, 16).requires_grad_(), random_routing(6)
    sent = dispatcher.dispatch(x, routing, BSHD(lengths=[3, 2]))
    dispatcher.combine(sent.rows, sent).sum().backward()
    identity_round(other)
    assert heard == [("asked", (2, 3, 16), "BSHD"), ("started", "layers.0", (6, 2)), ("combined", "layers.0", 16)]


def test_an_observer_without_whole_hears_of_each_chunk() -> None:
    dispatcher = build_dispatcher(small_config("local", chunks=4), name="layers.0")
    heard = observed(dispatcher)
    run_in_chunks(dispatcher, lambda sent: sent.rows, random_rows(6), random_routing(6))
    assert [each[2] for each in heard if each[0] == "started"] == [(3, 2), (3, 2)]


def test_an_observer_hears_of_operators() -> None:
    dispatcher = build_dispatcher(small_config("local", graph_safe=True, max_tokens_per_rank=8))
    heard = observed(dispatcher)
    torch.compile(dispatcher.dispatch, backend="eager")(random_rows(6), random_routing(6))
    assert heard[-1] == "traced"


def test_peers_learn_that_an_observer_refuses_a_dispatch() -> None:
    class Refusing(Observer):
        def asked(self, x: Tensor, layout: Layout) -> None:
            raise StateError("not now")

    def body(group: dist.ProcessGroup) -> None:
        dispatcher = build_dispatcher(small_config("alltoall"), group)
        if group.rank() == 1:
            dispatcher._channel.observers.append(Refusing())
        identity_round(dispatcher)

    first, second = outcomes(body, 2)
    assert isinstance(first, PeerError)
    assert "rank 1 refused: not now" in str(first)
    assert isinstance(second, StateError)


def test_collectives_have_the_names_of_their_dispatchers_also_in_the_backward() -> None:
    def body(group: dist.ProcessGroup) -> list[tuple[str, str]]:
        layers = [build_dispatcher(small_config("alltoall"), group, name=f"layers.{number}") for number in range(2)]
        observer = Collectives()
        observers_of(group).append(observer)
        x = random_rows(4).requires_grad_()
        for layer in layers:
            sent = layer.dispatch(x, random_routing(4))
            x = layer.combine(sent.rows, sent)
        x.sum().backward()
        return observer.heard

    for heard in run_ranks(body, 2):
        forward = [(label, f"layers.{number}") for number in range(2) for label in ("counts", "dispatch", "combine")]
        verbs = "combine.backward", "dispatch.backward"
        assert heard == [*forward, *((verb, f"layers.{number}") for number in (1, 0) for verb in verbs)]


def test_a_refused_collective_is_not_counted() -> None:
    def body(group: dist.ProcessGroup) -> dict[str, int]:
        dispatcher = build_dispatcher(small_config("alltoall"), group)
        observers_of(group).append(Collectives(refused="counts"))
        with pytest.raises(StateError, match="counts is refused"):
            identity_round(dispatcher)
        return dict(dispatcher._channel.communicator.calls)

    for calls in run_ranks(body, 2):
        assert "counts" not in calls
