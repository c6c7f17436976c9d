"""Copies, checkpoints and conversions of models whose experts are wired: each model computes with its own experts."""

from __future__ import annotations

import copy
import functools
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.optim.swa_utils import AveragedModel

from moe_dispatch.errors import StateError
from moe_dispatch.integrations.transformers import RoutingReplay, attach, config_for, dispatchers_of, register
from tests.integration.jobs import require, run_checks
from tests.integration.steps import difference
from tests.integration.transformers.models import BATCHES, LAYERS, build
from tests.integration.transformers.replaying import cut_of, draw_table
from tests.integration.transformers.wiring import gradients, loss_of, ready, registered, targets, unsharded, wire

FAMILY = "qwen3_moe"
BATCH = BATCHES[1]


def by_registry(mesh: DeviceMesh, *, keep_routes: bool = False) -> Any:
    name = registered(build(FAMILY).config, name="uses", backend="alltoall" if mesh.size() > 1 else "local")
    model = wire(build(FAMILY), mesh, name)
    attach(model, keep_routes=keep_routes)
    return model


def by_function(mesh: DeviceMesh, *, keep_routes: bool = False) -> Any:
    model = build(FAMILY)
    backend = "alltoall" if mesh.size() > 1 else "local"
    register(config_for(model.config, backend=backend), group=dist.group.WORLD, name="uses_function")
    model.set_experts_implementation("uses_function")
    attach(model, keep_routes=keep_routes)
    return model


WAYS = {"registry": by_registry, "function": by_function}


def spoil(model: Any) -> None:
    """Change the experts of a model, so that another model that reads them shows it."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".experts." in name:
                parameter.data.fill_(torch.nan)


@pytest.mark.parametrize("keep_routes", [False, True])
@pytest.mark.parametrize("way", WAYS)
def test_a_copy_computes_with_its_own_experts(way: str, keep_routes: bool, mesh: DeviceMesh) -> None:
    model = WAYS[way](mesh, keep_routes=keep_routes)
    model.activation_checkpointing_enable({"use_reentrant": False})
    twin = copy.deepcopy(copy.deepcopy(model))
    spoil(model)
    twin.train()
    loss_of(twin, BATCH, targets(BATCH)).backward()
    assert difference(gradients(twin), unsharded(FAMILY, (BATCH,))[1]) < 1e-4
    assert not gradients(model)
    ours, theirs = dispatchers_of(twin), dispatchers_of(model)
    assert ours.keys() == theirs.keys()
    assert all(ours[name] is not theirs[name] for name in ours)
    assert all(dispatcher.expert_counts().sum() > 0 for dispatcher in ours.values())
    assert all(dispatcher.expert_counts().sum() == 0 for dispatcher in theirs.values())


@pytest.mark.parametrize("way", WAYS)
def test_an_average_of_weights_follows_its_model(way: str, mesh: DeviceMesh) -> None:
    model = WAYS[way](mesh)
    averaged = AveragedModel(model)
    averaged.update_parameters(model)
    want = loss_of(model, BATCH, 1)
    spoil(model)
    torch.testing.assert_close(loss_of(averaged.module, BATCH, 1), want)


@pytest.mark.parametrize("save", [lambda model: torch.save(model, io.BytesIO()), pickle.dumps])
def test_a_wired_model_is_saved_by_its_state_dict(save: Callable[[Any], Any], mesh: DeviceMesh) -> None:
    unwatched = wire(build(FAMILY), mesh, registered(build(FAMILY).config, name="uses"))
    with pytest.raises(StateError, match=r"Qwen3MoeExperts is wired to process groups, .* Save model\.state_dict\(\)"):
        save(unwatched)
    model = by_registry(mesh)
    with pytest.raises(
        StateError, match=r"a process group cannot be saved\. Save model\.state_dict\(\) instead of the"
    ):
        save(model)
    other = by_registry(mesh)  # a second model by the same entry
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.data.zero_()
    other.load_state_dict(model.state_dict())
    want = loss_of(model, BATCH, 1)
    spoil(model)
    torch.testing.assert_close(loss_of(other, BATCH, 1), want)


def freeze(model: Any) -> Any:
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    loss_of(model, BATCH, 1)
    return model.requires_grad_(True)


def evaluate(model: Any) -> Any:
    with torch.inference_mode():
        loss_of(model.eval(), BATCH, 1)
    return model


@pytest.mark.parametrize("use", [freeze, evaluate])
@pytest.mark.parametrize("way", WAYS)
def test_a_model_trains_afterwards(way: str, use: Callable[[Any], Any], mesh: DeviceMesh) -> None:
    model = use(WAYS[way](mesh)).train()
    loss_of(model, BATCH, targets(BATCH)).backward()
    assert difference(gradients(model), unsharded(FAMILY, (BATCH,))[1]) < 1e-4


@pytest.mark.parametrize("way", WAYS)
def test_another_dtype(way: str, mesh: DeviceMesh) -> None:
    model = WAYS[way](mesh).to(torch.bfloat16)
    want = loss_of(build(FAMILY).to(torch.bfloat16), BATCH, 1)
    torch.testing.assert_close(loss_of(model, BATCH, 1), want, rtol=2e-2, atol=2e-2)


def test_a_copy_is_replayed_with_its_original(mesh: DeviceMesh) -> None:
    model = ready(FAMILY, mesh, name="uses-replay")
    replay, table = RoutingReplay(model), draw_table(LAYERS)
    twin = copy.deepcopy(model)
    with replay.micro_batch(cut_of(table, 1)):
        torch.testing.assert_close(loss_of(twin, BATCH, 1), loss_of(model, BATCH, 1))
    with pytest.raises(StateError, match=r"called outside `with replay\.micro_batch"):
        loss_of(twin, BATCH, 1)
    replay.close()
    torch.testing.assert_close(loss_of(twin, BATCH, 1), loss_of(build(FAMILY), BATCH, 1), rtol=1e-4, atol=1e-4)


def on_rank(rank: int, way: str) -> float:
    world = init_device_mesh("cpu", (dist.get_world_size(), 1), mesh_dim_names=("ep", "tp"))
    model = WAYS[way](world)
    twin = copy.deepcopy(model).train()
    spoil(model)
    wanted, want = unsharded(FAMILY, BATCHES[:2])
    loss = loss_of(twin, BATCHES[rank], targets(*BATCHES[:2]))
    loss.backward()
    total = loss.detach().clone()
    dist.all_reduce(total)
    own = {name: grad for name, grad in gradients(twin).items() if ".experts." in name}
    if way == "function":  # every rank holds all experts, and trains those that it runs
        for grad in own.values():
            dist.all_reduce(grad)
    return max(abs(float(total) - wanted), difference(own, {name: want[name] for name in own}))


def test_copies_on_two_ranks() -> None:
    found = run_checks({way: functools.partial(on_rank, way=way) for way in WAYS}, 2)
    for way in WAYS:
        assert max(require(found[way])) < 1e-4
