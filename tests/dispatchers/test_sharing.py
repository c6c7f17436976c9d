"""What dispatchers of a group share and how long it lives; modules that hold one; and groups of real processes."""

from __future__ import annotations

import copy
import gc
import io
import logging
import pickle
import weakref
from collections.abc import Callable
from typing import Any, ClassVar, final

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import HashStore
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from moe_dispatch import Dispatcher, Rows, build_dispatcher
from moe_dispatch.backends import (
    Backend,
    BackendContext,
    register_backend,
    registry,
)
from moe_dispatch.communication import control_device, device_of
from moe_dispatch.errors import ConfigError, StateError
from moe_dispatch_testing import count_collectives, run_processes
from moe_dispatch_testing.ranks import thread_group
from tests.cli.planted import Planted, PlantedBackend
from tests.dispatchers.layer import (
    NUM_EXPERTS,
    Group,
    identity_round,
    on_ranks,
    random_routing,
    random_rows,
    small_config,
)


class Told(Planted):
    """``alltoall``, which tells when a rank opens and closes it."""

    name = "told"
    collective: bool = False
    events: ClassVar[list[tuple[str, int]]] = []

    def open(self, context: BackendContext) -> Backend:
        return CollectiveBackend(context) if self.collective else ToldBackend(context)


class ToldBackend(PlantedBackend):
    def __init__(self, context: BackendContext) -> None:
        super().__init__(context)
        Told.events.append(("open", context.communicator.rank))

    def close(self) -> None:
        Told.events.append(("close", self.context.communicator.rank))


@final
class CollectiveBackend(ToldBackend):
    collective_close = True


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """What was opened and closed, with the rank."""
    monkeypatch.setattr(registry, "_REGISTERED", dict(registry._REGISTERED))
    register_backend(Told)
    Told.events.clear()
    return Told.events


OPEN, CLOSE = ("open", 0), ("close", 0)


class Layer(nn.Module):
    def __init__(self, backend: str = "local") -> None:
        super().__init__()
        self.router = nn.Linear(4, 4)
        self.dispatcher = build_dispatcher(small_config(backend))


def test_dispatchers_of_one_group_and_config_share(events: list[tuple[str, int]]) -> None:
    store = HashStore()

    def body(group: Group) -> None:
        layers = [build_dispatcher(small_config("told"), group) for _ in range(2)]
        layers.append(build_dispatcher(small_config("told"), thread_group(store, group.rank(), 2)))
        layers.append(build_dispatcher(small_config("told", pad_multiple=2), group))
        for layer in layers:
            identity_round(layer)

    on_ranks(body, 2)
    assert [events.count(("open", rank)) for rank in range(2)] == [3, 3]


def test_the_last_to_close_closes_the_backend(events: list[tuple[str, int]]) -> None:
    one, two = (build_dispatcher(small_config("told")) for _ in range(2))
    one.close()
    one.close()
    identity_round(two)
    assert events == [OPEN]
    two.close()
    assert events == [OPEN, CLOSE]
    with pytest.raises(StateError, match="must be open, got a closed one of backend 'told'"):
        two.plan()
    build_dispatcher(small_config("told")).close()
    assert events == [OPEN, CLOSE, OPEN, CLOSE]


def test_a_backward_keeps_open_what_a_collected_dispatcher_gives_back(events: list[tuple[str, int]]) -> None:
    dispatcher = build_dispatcher(small_config("told"))
    x, way = random_rows(5).requires_grad_(), random_routing(5)
    sent = dispatcher.dispatch(x, way)
    y = dispatcher.combine(dispatcher.dispatch(x, again=sent).rows, sent)
    del dispatcher, sent
    gc.collect()
    assert events == [OPEN]
    y.sum().backward()
    torch.testing.assert_close(x.grad, way.topk_weights.sum(1, keepdim=True).expand(5, 16))
    del y
    gc.collect()
    assert events == [OPEN, CLOSE]


def test_a_collective_close_is_left_to_the_caller(
    events: list[tuple[str, int]], caplog: pytest.LogCaptureFixture
) -> None:
    config = small_config({"name": "told", "collective": True})
    dispatcher = build_dispatcher(config)
    del dispatcher
    gc.collect()
    assert events == [OPEN]
    assert "was collected without close(): its buffers stay for the next dispatcher" in caplog.text
    identity_round(again := build_dispatcher(config))
    again.close()
    assert events == [OPEN, CLOSE]
    build_dispatcher(config).close()
    assert events == [OPEN, CLOSE, OPEN, CLOSE]


def test_what_one_rank_dropped_is_shared_again(events: list[tuple[str, int]]) -> None:
    """A rank that waits in a collective close would hang if another rank had made a channel of its own."""

    def body(group: Group) -> None:
        config = small_config({"name": "told", "collective": True})
        first = build_dispatcher(config, group)
        if group.rank() == 1:
            del first
            gc.collect()
        second = build_dispatcher(config, group)
        identity_round(second)
        if group.rank() == 0:
            first.close()
        second.close()

    on_ranks(body, 2)
    assert sorted(event for event, _ in events) == ["close", "close", "open", "open"]


def test_all_ranks_open_where_one_has_to(events: list[tuple[str, int]]) -> None:
    """Opening is collective, and a rank cannot know which channels its peers still have."""

    def body(group: Group) -> None:
        first = build_dispatcher(small_config("told"), group)
        if group.rank() == 1:
            del first
            gc.collect()
        second = build_dispatcher(small_config("told"), group)
        identity_round(second)
        if group.rank() == 0:
            first.close()
        identity_round(build_dispatcher(small_config("told"), group))

    on_ranks(body, 2)
    assert sorted(rank for event, rank in events if event == "open") == [0, 0, 1, 1]


def test_deepcopy_shares_the_channel_and_has_its_own_life(events: list[tuple[str, int]]) -> None:
    layer = Layer("told")
    twin = copy.deepcopy(layer)
    assert twin.dispatcher.config == layer.dispatcher.config
    sent = layer.dispatcher.dispatch(random_rows(3), random_routing(3))
    with pytest.raises(StateError, match="sent must come from this dispatcher"):
        twin.dispatcher.combine(sent.rows, sent)
    layer.dispatcher.close()
    identity_round(twin.dispatcher)
    assert events == [OPEN]
    del twin
    gc.collect()
    assert events == [OPEN, CLOSE]


def test_no_state_dict_keys_parameters_or_buffers() -> None:
    layer = Layer()
    layer.dispatcher.self_test()
    for backend in ("alltoall", "allgather", "deepep", "hybridep"):
        options: Any = {"name": backend, "emulate": True} if backend in ("deepep", "hybridep") else backend
        assert not build_dispatcher(small_config(options, hidden_size=256)).state_dict()
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


def test_repr_shows_the_group_the_sizes_and_submodules() -> None:
    def body(group: Group) -> str:
        return repr(build_dispatcher(small_config("alltoall"), group, name="layers.7"))

    for rank, shown in enumerate(on_ranks(body, 2)):
        assert shown.startswith(f"Dispatcher(backend='alltoall', rank {rank} of 2, num_experts=8, top_k=2, ")
        assert "name='layers.7'" in shown
    dispatcher = build_dispatcher(small_config("local"))
    dispatcher.experts = nn.ModuleList([nn.Linear(2, 3)])
    assert "(experts): ModuleList(\n    (0): Linear(in_features=2, out_features=3, bias=True)" in repr(dispatcher)
    dispatcher.close()
    assert "closed" in repr(dispatcher)


def test_repr_survives_a_build_that_failed() -> None:
    class Half(Dispatcher):
        def __init__(self, config: Any) -> None:
            try:
                super().__init__(config)
            finally:
                shown.append(repr(self))

    shown: list[str] = []
    with pytest.raises(ConfigError):
        Half({"backend": "local"})
    assert shown == ["Half()"]


@pytest.mark.parametrize("save", [pickle.dumps, lambda model: torch.save(model, io.BytesIO())], ids=["pickle", "torch"])
def test_a_model_with_a_dispatcher_is_saved_by_its_state_dict(save: Callable[[nn.Module], Any]) -> None:
    layer = Layer()
    text = r"Dispatcher: a process group cannot be saved\. Save model\.state_dict\(\)"
    with pytest.raises(StateError, match=text):
        save(layer)
    torch.save(layer.state_dict(), io.BytesIO())
    identity_round(layer.dispatcher)


def _on_mesh(rank: int) -> dict[str, Any]:
    torch.set_deterministic_debug_mode("error")  # use_deterministic_algorithms would import a compiler for it
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "ep"))
    told: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("moe_dispatch").addHandler(handler)
    groups: dict[str, DeviceMesh | dist.ProcessGroup | None] = {
        "part": mesh["ep"],
        "whole": DeviceMesh("cpu", list(range(4))),
        "group": dist.new_group([0, 1] if rank < 2 else [2, 3], use_local_synchronization=True),
        "world": dist.group.WORLD,
        "forgotten": None,
        "forgotten again": None,
    }
    control, alone = dist.new_group(list(range(4))), dist.new_group([0])
    sizes = {}
    for name, group in groups.items():
        dispatcher = build_dispatcher(small_config(), group)
        dispatcher.self_test()
        identity_round(dispatcher, rows=rank, seed=rank)
        sizes[name] = NUM_EXPERTS // len(dispatcher.metrics().real_tokens_per_expert)
    identity_round(build_dispatcher(small_config("allgather"), dist.group.WORLD, control_group=control), rows=rank)
    with pytest.raises(ConfigError, match=r'pass one dimension of a DeviceMesh.*mesh\["ep"\]'):
        build_dispatcher(small_config(), mesh)
    outside: list[dict[str, Any]] = [{"group": alone}, {"group": None, "control_group": alone}]
    for fields in outside if rank else ():
        with pytest.raises(ConfigError, match="group must be a process group that this rank is in, got int"):
            build_dispatcher(small_config(), **fields)
    return {"sizes": sizes, "told": told}


def test_meshes_and_groups_of_processes() -> None:
    """A group that was forgotten is told once, and one of other ranks is refused."""
    for found in run_processes(_on_mesh, 4):
        assert [*found["sizes"].values()] == [2, 4, 2, 4, 1, 1]
        (warning,) = found["told"]
        assert "built without a group in a job of several ranks" in warning
        assert "pass group=" in warning


def test_a_job_of_torchrun_without_init_process_group_is_told(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Then ``group.WORLD`` is None, which asks for a single rank."""
    assert dist.group.WORLD is None
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    monkeypatch.setenv("WORLD_SIZE", "2")
    build_dispatcher(small_config("alltoall"), dist.group.WORLD)
    assert "in a job of several ranks, so each rank works alone. Call init_process_group first" in caplog.text


@pytest.mark.parametrize("policy", ["agree", "check"])
def test_sizes_are_settled_on_the_control_group_alone(policy: str) -> None:
    store = HashStore()

    def body(group: Group) -> tuple[int, int, dict[str, int]]:
        control = thread_group(store, group.rank(), 2)
        config = small_config("allgather", row_counts=policy, debug=True)
        dispatcher = build_dispatcher(config, group, control_group=control)
        with count_collectives(control) as by_control, count_collectives(group) as by_group:
            plan = dispatcher.plan(Rows(), like=random_rows(4))
            dispatcher.dispatch(random_rows(4), random_routing(4), plan)
        return len(by_control.calls), len(by_group.calls), dispatcher.metrics().collectives

    for control, on_group, metrics in on_ranks(body, 2):
        assert (control, on_group) == (2, 1)  # sizes and debug marks go by the control group, rows by the group
        assert metrics["sizes"] == metrics["debug"] == metrics["dispatch"] == 1


def test_a_control_group_makes_another_channel() -> None:
    stores = [HashStore(), HashStore()]

    def body(group: Group) -> None:
        controls = [None, *(thread_group(store, group.rank(), 2) for store in stores)]
        built = [build_dispatcher(small_config(), group, control_group=control) for control in controls]
        for dispatcher in built:
            identity_round(dispatcher)
        assert [dispatcher.metrics().dispatches for dispatcher in built] == [1, 1, 1]  # counters are the channel's

    on_ranks(body, 2)


def test_a_group_of_nccl_exchanges_on_the_device_that_it_is_bound_to() -> None:
    """Without ``torch.cuda.set_device`` the current device is cuda:0 on every rank."""
    store = HashStore()
    group = dist.ProcessGroup(store, 0, 1)
    backend = dist.ProcessGroupGloo(store, 0, 1)  # type: ignore[call-arg]
    group._register_backend(torch.device("cuda"), dist.ProcessGroup.BackendType.GLOO, backend)
    assert control_device(group) == torch.device("cuda")
    group.bound_device_id = torch.device("cuda:3")
    assert control_device(group) == device_of(group, torch.device("cpu")) == torch.device("cuda:3")
    assert device_of(group, torch.device("cuda:1")) == torch.device("cuda:1")
