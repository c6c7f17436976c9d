"""Values and objects in the wrong place: closed dispatchers, states and plans of others, finality, missing experts."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch

from moe_dispatch import Dispatched, Dispatcher, Plan, Rows, build_dispatcher
from moe_dispatch.errors import StateError
from tests.dispatchers.layer import Group, identity_round, outcomes_on, raises_everywhere, small_config
from tests.dispatchers.layer import random_routing as routing
from tests.dispatchers.layer import random_rows as rows

BACKENDS = [("local", 1), ("alltoall", 2), ("allgather", 2)]


@pytest.mark.parametrize("same_channel", [True, False])
@pytest.mark.parametrize("verb", ["combine", "dispatch"])
@pytest.mark.parametrize(("backend", "size"), BACKENDS)
def test_state_of_another_dispatcher(backend: str, size: int, verb: str, same_channel: bool) -> None:
    def body(group: Group) -> None:
        mine = build_dispatcher(small_config(backend), group)
        other = build_dispatcher(small_config(backend, pad_multiple=1 if same_channel else 4), group)
        assert (mine._channel is other._channel) == same_channel
        sent = other.dispatch(rows(6), routing(6))
        if verb == "combine":
            mine.combine(sent.rows, sent)
        else:
            mine.dispatch(rows(6), again=sent)

    texts = (f"Dispatcher.{verb}: sent must come from this dispatcher", "the dispatcher that dispatched")
    raises_everywhere(outcomes_on(body, size), StateError, *texts)


@pytest.mark.parametrize(("backend", "size"), BACKENDS)
def test_plan_of_another_config(backend: str, size: int) -> None:
    def body(group: Group) -> Exception:
        mine = build_dispatcher(small_config(backend), group)
        other = build_dispatcher(small_config(backend, pad_multiple=4), group)
        with pytest.raises(StateError) as caught:
            mine.dispatch(rows(6), routing(6), other.plan(Rows(), like=rows(6)))
        identity_round(mine)
        return caught.value

    texts = ("the plan must be made by a dispatcher of the same config and group", "this dispatcher's plan()")
    raises_everywhere(outcomes_on(body, size), StateError, *texts)


@pytest.mark.parametrize(("backend", "size"), BACKENDS)
def test_plan_of_another_layer_of_the_same_config_is_good(backend: str, size: int) -> None:
    def body(group: Group) -> Plan:
        first, second = (build_dispatcher(small_config(backend), group) for _ in range(2))
        plan = first.plan(Rows(), like=rows(6))
        sent = second.dispatch(rows(6), routing(6), plan)
        second.combine(sent.rows, sent)
        return plan

    assert all(isinstance(result, Plan) for result in outcomes_on(body, size))


@pytest.mark.parametrize("call", ["plan", "dispatch", "combine", "metrics", "self_test", "backend_name"])
@pytest.mark.parametrize(("backend", "size"), BACKENDS)
def test_closed_dispatcher(backend: str, size: int, call: str) -> None:
    def body(group: Group) -> None:
        dispatcher = build_dispatcher(small_config(backend), group)
        sent = dispatcher.dispatch(rows(6), routing(6))
        dispatcher.close()
        dispatcher.close()
        calls: dict[str, Any] = {
            "plan": lambda: dispatcher.plan(Rows(), like=rows(6)),
            "dispatch": lambda: dispatcher.dispatch(rows(6), routing(6)),
            "combine": lambda: dispatcher.combine(sent.rows, sent),
            "metrics": dispatcher.metrics,
            "self_test": dispatcher.self_test,
            "backend_name": lambda: dispatcher.backend_name,
        }
        calls[call]()

    raises_everywhere(
        outcomes_on(body, size),
        StateError,
        "Dispatcher: the dispatcher must be open",
        f"a closed one of backend {backend!r}",
        "build_dispatcher",
    )


@pytest.mark.parametrize("name", ["dispatch", "combine", "plan"])
def test_final_methods_cannot_be_overridden(name: str) -> None:
    with pytest.raises(
        TypeError, match=rf"Wrong overrides Dispatcher\.{name}, which is final.*run_experts or layout_of"
    ):
        type("Wrong", (Dispatcher,), {"__qualname__": "Wrong", name: lambda self: None})


@pytest.mark.parametrize(("backend", "size"), BACKENDS)
def test_forward_without_experts(backend: str, size: int) -> None:
    class Forgetful(Dispatcher):
        pass

    def body(group: Group) -> None:
        Forgetful(small_config(backend), group)(rows(6), routing(6))

    texts = (r"Forgetful.forward: run_experts(sent) must be defined", "Subclass Dispatcher")
    raises_everywhere(outcomes_on(body, size), StateError, *texts)


@pytest.mark.parametrize("backend", ["local", "alltoall"])
def test_waiting_twice_neither_repeats_the_dispatch_nor_lends_its_buffers_twice(backend: str) -> None:
    """Rows of over a megabyte, so that buffers are kept for the next calls; these must not share one."""
    hidden, count = 512, 800
    dispatcher = build_dispatcher(small_config(backend, hidden_size=hidden))
    x, way = rows(count, hidden), routing(count)
    flight = dispatcher.dispatch(x, way, async_op=True)
    first = flight.wait()
    with contextlib.suppress(StateError):  # refusing is as good as giving the same again
        assert flight.wait() is first
    assert isinstance(first, Dispatched)
    calls = [dispatcher.dispatch(x * (i + 1), way, async_op=True) for i in range(3)]
    for i, call in enumerate(calls):
        sent = call.wait()
        expected = x * (i + 1) * way.topk_weights.sum(1, keepdim=True)
        torch.testing.assert_close(dispatcher.combine(sent.rows, sent), expected)
