"""What dispatchers share, how long it lives, and that a module which holds one stays an ordinary module."""

from __future__ import annotations

import copy
import gc
import io
import logging
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from moe_dispatch import Dispatcher, build_dispatcher
from moe_dispatch.backends import BackendContext
from moe_dispatch.backends.alltoall.options import AllToAllOptions
from moe_dispatch.backends.local import Local
from moe_dispatch.dispatchers import channel as channels
from moe_dispatch.errors import ConfigError, StateError
from tests.dispatchers.layer import Group, identity_round, on_ranks, random_routing, random_rows, small_config


@pytest.fixture
def closed(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The backends that were closed."""
    gc.collect()  # what other tests left behind
    found: list[Any] = []
    monkeypatch.setattr(Local, "close", lambda backend: found.append(backend))
    return found


class Layer(nn.Module):
    def __init__(self, **fields: Any) -> None:
        super().__init__()
        self.router = nn.Linear(4, 4)
        self.dispatcher = build_dispatcher(small_config("local", **fields))


def test_groups_do_not_share() -> None:
    def body(group: Group) -> str:
        return build_dispatcher(small_config(), group)._channel.name

    assert len({*on_ranks(body, 2), *on_ranks(body, 2)}) == 4


def test_the_last_to_close_closes_the_backend(closed: list[Any]) -> None:
    one, two = (build_dispatcher(small_config("local", top_k=3)) for _ in range(2))
    backend = one._channel.backend
    one.close()
    one.close()
    assert not closed
    two.dispatch(random_rows(3), random_routing(3, top_k=3))
    two.close()
    assert closed == [backend]
    with pytest.raises(StateError, match="must be open, got a closed one of backend 'local'"):
        two.plan()
    third = build_dispatcher(small_config("local", top_k=3))
    assert third._channel.backend is not backend
    third.close()


def test_a_dispatcher_that_is_collected_gives_its_share_back(closed: list[Any]) -> None:
    dispatcher = build_dispatcher(small_config("local", top_k=4))
    backend = dispatcher._channel.backend
    del dispatcher
    gc.collect()
    assert closed == [backend]
    assert all(channel.backend is not backend for channel in channels._channels.values())


def test_a_backward_keeps_the_channel_open(closed: list[Any]) -> None:
    dispatcher = build_dispatcher(small_config("local", top_k=4))
    x, way = random_rows(5).requires_grad_(), random_routing(5, top_k=4)
    sent = dispatcher.dispatch(x, way)
    y = dispatcher.combine(dispatcher.dispatch(x, again=sent).rows, sent)
    del dispatcher, sent
    gc.collect()
    assert not closed
    y.sum().backward()
    torch.testing.assert_close(x.grad, way.topk_weights.sum(1, keepdim=True).expand(5, 16))
    del y
    gc.collect()
    assert len(closed) == 1


def test_a_collective_close_is_left_to_the_caller(
    closed: list[Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(Local, "collective_close", True)
    dispatcher = build_dispatcher(small_config("local", top_k=5))
    del dispatcher
    gc.collect()
    assert not closed
    assert "was collected without close(): its buffers stay until the process ends" in caplog.text
    build_dispatcher(small_config("local", top_k=5)).close()
    assert len(closed) == 1


def test_all_ranks_open_where_one_has_to(monkeypatch: pytest.MonkeyPatch) -> None:
    """Opening is collective, and a rank cannot know which channels its peers still have."""
    opened: list[int] = []
    original = AllToAllOptions.open

    def recorded(options: AllToAllOptions, context: BackendContext) -> Any:
        opened.append(context.communicator.rank)
        return original(options, context)

    monkeypatch.setattr(AllToAllOptions, "open", recorded)

    def body(group: Group) -> None:
        first = build_dispatcher(small_config(), group)
        if group.rank() == 1:
            del first
            gc.collect()
        second = build_dispatcher(small_config(), group)
        identity_round(second)
        if group.rank() == 0:
            assert first._channel is not second._channel
            first.close()
        identity_round(build_dispatcher(small_config(), group))

    on_ranks(body, 2)
    assert sorted(opened) == [0, 0, 1, 1]


def test_a_state_outlives_the_dispatcher_of_another_layer() -> None:
    one, two = (build_dispatcher(small_config("local")) for _ in range(2))
    x, way = random_rows(5), random_routing(5)
    sent = one.dispatch(x, way)
    two.close()
    del two
    gc.collect()
    torch.testing.assert_close(one.combine(sent.rows, sent), x * way.topk_weights.sum(1, keepdim=True))


def test_deepcopy_shares_the_channel_and_has_its_own_life(closed: list[Any]) -> None:
    layer = Layer(top_k=2, pad_multiple=5)
    twin = copy.deepcopy(layer)
    backend = layer.dispatcher._channel.backend
    assert twin.dispatcher._channel is layer.dispatcher._channel
    assert twin.dispatcher.config == layer.dispatcher.config
    sent = layer.dispatcher.dispatch(random_rows(3), random_routing(3))
    with pytest.raises(StateError, match="sent must come from this dispatcher"):
        twin.dispatcher.combine(sent.rows, sent)
    layer.dispatcher.close()
    identity_round(twin.dispatcher)
    assert not closed
    del twin
    gc.collect()
    assert closed == [backend]


def test_no_state_dict_keys_parameters_or_buffers() -> None:
    layer = Layer()
    layer.dispatcher.self_test()
    assert list(layer.state_dict()) == ["router.weight", "router.bias"]
    assert not [*layer.dispatcher.parameters(), *layer.dispatcher.buffers()]
    layer.load_state_dict(Layer().state_dict(), strict=True)
    layer.to(torch.bfloat16).eval().train()
    identity_round(layer.dispatcher)


def test_nothing_of_a_call_is_kept_on_the_dispatcher_or_the_channel() -> None:
    dispatcher = build_dispatcher(small_config("alltoall"))
    x = random_rows(6).requires_grad_()
    sent = dispatcher.dispatch(x, random_routing(6))
    y = dispatcher.combine(sent.rows, sent)
    y.sum().backward()
    alive = [weakref.ref(tensor) for tensor in (x, sent.rows, sent.weights, y)]
    del x, sent, y
    gc.collect()
    assert [ref() for ref in alive] == [None] * 4


def test_auto_says_once_what_it_chose_and_why_not_the_others(caplog: pytest.LogCaptureFixture) -> None:
    def body(group: Group) -> list[str]:
        return [build_dispatcher(small_config("auto"), group).backend_name for _ in range(2)]

    with caplog.at_level(logging.INFO, logger="moe_dispatch"):
        assert on_ranks(body, 2) == [["alltoall", "alltoall"]] * 2
        text = "\n".join(record.getMessage() for record in caplog.records)
        assert text.count("using 'alltoall'") in (1, 2)  # once for each time the channel is opened
        assert {record.levelno for record in caplog.records} == {logging.INFO}  # the default config is no cause to warn
        assert "local: is for one rank" in text
        assert "allgather: sends more bytes" in text
        caplog.clear()
        keep = build_dispatcher(small_config("auto", top_k=5))
        again = build_dispatcher(small_config("auto", top_k=5))
        assert keep.backend_name == again.backend_name == "local"
        assert len(caplog.records) == 1


def test_an_explicit_name_is_never_replaced(caplog: pytest.LogCaptureFixture) -> None:
    for name in ("local", "alltoall", "allgather"):
        assert build_dispatcher(small_config(name)).backend_name == name
    assert not caplog.records


def test_a_dispatcher_is_a_module_with_a_readable_repr() -> None:
    dispatcher = build_dispatcher(small_config("local"), name="layers.7")
    sizes = "num_experts=8, top_k=2, hidden_size=16"
    assert isinstance(dispatcher, Dispatcher)
    assert repr(dispatcher) == f"Dispatcher(backend='local', rank 0 of 1, {sizes}, name='layers.7')"
    dispatcher.close()
    assert f"(backend='local', rank 0 of 1, closed, {sizes}, " in repr(dispatcher)
    assert on_ranks(lambda group: repr(build_dispatcher(small_config(), group)), 2) == [
        f"Dispatcher(backend='alltoall', rank {rank} of 2, {sizes})" for rank in range(2)
    ]


def test_repr_shows_submodules_and_survives_a_build_that_failed() -> None:
    class Half(Dispatcher):
        def __init__(self, config: Any) -> None:
            try:
                super().__init__(config)
                self.experts = nn.ModuleList([nn.Linear(2, 3)])
            finally:
                self.shown = repr(self)
                shown.append(self.shown)

    shown: list[str] = []
    Half(small_config("local"))
    assert "(experts): ModuleList(\n    (0): Linear(in_features=2, out_features=3, bias=True)" in shown[0]
    with pytest.raises(ConfigError):
        Half({"backend": "local"})
    assert shown[1] == "Half()"


@pytest.mark.parametrize("save", [pickle.dumps, lambda model: torch.save(model, io.BytesIO())], ids=["pickle", "torch"])
def test_a_model_with_a_dispatcher_is_saved_by_its_state_dict(save: Callable[[nn.Module], Any]) -> None:
    layer = Layer()
    text = r"Dispatcher: a process group cannot be saved\. Save model\.state_dict\(\)"
    with pytest.raises(StateError, match=text):
        save(layer)
    torch.save(layer.state_dict(), io.BytesIO())
    identity_round(layer.dispatcher)
