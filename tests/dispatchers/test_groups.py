"""Groups of real processes: a DeviceMesh, a part of one, sub-groups and a control group."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from moe_dispatch import Rows, build_dispatcher
from moe_dispatch.communication import control_device, device_of
from moe_dispatch.errors import ConfigError
from moe_dispatch_testing import count_collectives, run_processes
from moe_dispatch_testing.ranks import thread_group
from tests.dispatchers.layer import (
    NUM_EXPERTS,
    Group,
    identity_round,
    on_ranks,
    random_routing,
    random_rows,
    small_config,
)


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
