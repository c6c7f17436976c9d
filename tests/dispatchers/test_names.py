"""Names: what a subclass of Dispatcher may call its own attributes, and how a dispatcher may be called."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from moe_dispatch import Dispatched, Dispatcher, build_dispatcher
from moe_dispatch.errors import ConfigError, PeerError, StateError
from tests.dispatchers.layer import random_routing, random_rows, small_config
from tests.ranks import run_ranks

PUBLIC = {name for name in vars(Dispatcher) if not name.startswith("_")}
OPEN = {"forward", "run_experts", "layout_of", "extra_repr"}
OWN = sorted({*PUBLIC - OPEN, "config", "_lease", "_inferred"})
Step = Callable[[nn.Module], Any]


class Layer(Dispatcher):
    """Runs a step before or after ``super().__init__``."""

    def __init__(self, step: Step, *, early: bool = False) -> None:
        if early:
            step(self)
        super().__init__(small_config(backend="local"))
        if not early:
            step(self)


def assigned(name: str, value: object) -> Step:
    return lambda layer: setattr(layer, name, value)


def registered(name: str) -> dict[str, Step]:
    return {
        "submodule": lambda layer: layer.add_module(name, nn.Linear(2, 2)),
        "module": lambda layer: layer.register_module(name, nn.Linear(2, 2)),
        "buffer": lambda layer: layer.register_buffer(name, torch.ones(1)),
        "parameter": lambda layer: layer.register_parameter(name, nn.Parameter(torch.ones(1))),
    }


@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize("name", OWN)
def test_names_of_the_dispatcher_are_refused_when_they_are_set(name: str, early: bool) -> None:
    for value in (nn.Linear(2, 2), nn.Parameter(torch.ones(1)), torch.ones(1), 3, None, {"hidden_size": 8}):
        with pytest.raises(
            ConfigError, match=rf"Layer\.{name}: '{name}' must stay .* of Dispatcher, got .*another name"
        ):
            Layer(assigned(name, value), early=early)
    for step in registered(name).values():
        with pytest.raises(ConfigError, match=rf"'{name}' must stay .*such as 'own_{name.lstrip('_')}'"):
            Layer(step, early=early)


@pytest.mark.parametrize("name", OWN)
def test_classes_that_shadow_a_name_are_refused_when_they_are_defined(name: str) -> None:
    for value in (3, None, nn.Linear, lambda self: None, property(lambda self: None)):
        with pytest.raises(ConfigError, match=rf"Shadow\.{name}: '{name}' must stay"):
            type("Shadow", (Dispatcher,), {name: value})
        with pytest.raises(ConfigError, match=rf"Shadow\.{name}: '{name}' must stay"):
            type("Shadow", (type("Mixin", (), {name: value}), Dispatcher), {})


@pytest.mark.parametrize("name", sorted(OPEN))
def test_a_submodule_does_not_hide_behind_a_method(name: str) -> None:
    with pytest.raises(ConfigError, match=rf"'{name}' must stay a method of Dispatcher, got a value of type Linear"):
        Layer(assigned(name, nn.Linear(2, 2)))
    for step in registered(name).values():
        with pytest.raises(ConfigError, match=rf"'{name}' must stay a method"):
            Layer(step)
    assert Layer(assigned(name, len)).__dict__[name] is len  # as libraries do that wrap forward


def test_other_names_are_free() -> None:
    layer = Layer(assigned("experts", nn.Linear(2, 2)))
    layer.router, layer.model_config, layer.layout = nn.Linear(2, 2), {"hidden_size": 8}, 3
    layer.register_buffer("bias", torch.ones(1))
    layer.config = layer.config  # the same object
    assert {*layer.state_dict()} == {"experts.weight", "experts.bias", "router.weight", "router.bias", "bias"}
    assert layer.plan(like=torch.ones(3, layer.config.hidden_size)).layout

    class Doubling(Layer):
        """A method and a subclass of a subclass."""

        def run_experts(self, sent: Dispatched) -> Tensor:
            return 2 * sent.rows

    x, routing = random_rows(5), random_routing(5)
    y = Doubling(lambda layer: None)(x, routing)
    torch.testing.assert_close(y, 2 * x * routing.topk_weights.sum(1, keepdim=True))


def test_a_dispatcher_may_be_renamed() -> None:
    dispatcher = build_dispatcher(small_config(backend="local"), name="before")
    dispatcher.name = "layers.3"
    assert (dispatcher.name, copy.deepcopy(dispatcher).name) == ("layers.3", "layers.3")
    dispatcher.dispatch(random_rows(5), random_routing(5))
    assert [*dispatcher.metrics().tokens_by_layer] == ["layers.3"]


@pytest.mark.parametrize("name", ["layers.1\n", "a\rb", "a\tb", "\x00", "a\u2028b", "\ud800", "a\x7f", 3, None])
def test_a_name_must_be_printable(name: Any) -> None:
    with pytest.raises(ConfigError, match=r"Dispatcher: name must be a text of printable characters, got .*layers\.7"):
        build_dispatcher(small_config(backend="local"), name=name)
    dispatcher = build_dispatcher(small_config(backend="local"), name="layers.1")
    if isinstance(name, str):
        with pytest.raises(ConfigError, match=r"name must be a text of printable"):
            dispatcher.name = name
    assert dispatcher.name == "layers.1"


def test_a_name_that_one_rank_cannot_use_is_refused_on_all() -> None:
    def body(group: dist.ProcessGroup) -> str:
        with pytest.raises((ConfigError, PeerError), match=r"name must be a text of printable characters") as caught:
            build_dispatcher(small_config(backend="alltoall"), group, name="x\n" * group.rank())
        return type(caught.value).__name__

    assert run_ranks(body, 2) == ["PeerError", "ConfigError"]


def test_a_with_block_closes_the_dispatcher() -> None:
    with build_dispatcher(small_config(backend="local"), name="layers.0") as dispatcher:
        assert isinstance(dispatcher, Dispatcher)
    with pytest.raises(StateError, match=r"must be open, got a closed one"), dispatcher:
        pass
    with pytest.raises(ZeroDivisionError), build_dispatcher(small_config(backend="local")) as dispatcher:
        raise ZeroDivisionError
    with pytest.raises(StateError, match=r"MD10"):
        dispatcher.metrics()
