"""Routers that replay a table compute what the same routers compute if they are forced to its experts."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.checkpoint import CheckpointError

from moe_dispatch.capabilities.recompute import contexts
from moe_dispatch.capabilities.recompute.left_out import leave_out
from moe_dispatch.errors import ConfigError, InputError, StateError
from moe_dispatch.integrations.transformers import RoutingReplay, attach, config_for, dispatchers_of, register
from moe_dispatch.layouts import BSHD
from moe_dispatch.replay import Cut, RoutingTable
from tests.integration.jobs import require, run_checks
from tests.integration.steps import difference
from tests.integration.transformers.models import BATCHES, EXPERTS, FAMILIES, HIDDEN, LAYERS, TOP_K, build
from tests.integration.transformers.ranks import BALANCED, Case, Mesh
from tests.integration.transformers.replaying import (
    TWO,
    WEIGHTS,
    cut_of,
    dense,
    double,
    draw_table,
    drift_of,
    experts_of,
    names_of,
    on_two_ranks,
    replay_losses,
    routers_of,
)
from tests.integration.transformers.wiring import (
    gradients,
    loss_of,
    registered,
    targets,
    wire,
    with_lora,
)

FAMILY = "qwen3_moe"


def check(model: Any, family: str, table: RoutingTable, losses: list[torch.Tensor]) -> list[int]:
    """Compare with the forced model, and return its counts."""
    for loss in losses:
        loss.backward()
    wanted, wanted_gradients, counts = dense(family, table, TWO)
    assert sum(loss.item() for loss in losses) == pytest.approx(wanted, rel=1e-6)
    assert difference(gradients(model), wanted_gradients) < 1e-5
    table.check_used([f"{number}.{row}" for number in TWO for row in range(2)])
    return counts


@pytest.mark.parametrize("family", WEIGHTS)
def test_weights_are_those_of_the_forced_router(family: str) -> None:
    model = double(family)
    table = draw_table(len(experts_of(model)))
    drifted, replayed = check(model, family, table, replay_losses(model, table, TWO))
    assert drifted > replayed / 2 > 0  # the table is not what the routers choose


@pytest.mark.parametrize("family", ["hunyuan_v1_moe", "mixtral", "olmoe", "qwen3_moe", "gpt_oss", "deepseek_v3"])
def test_probabilities_of_0_at_replayed_experts_give_no_nan(family: str) -> None:
    """A router that is far from that of the table. Normalised, the weights would be 0 divided by 0."""
    model = double(family)
    found: list[torch.Tensor] = []
    for router in routers_of(model):
        for parameter in router.parameters():
            parameter.data.mul_(1e6)
    for name in experts_of(model):
        model.get_submodule(name).register_forward_pre_hook(lambda _, args: found.append(args[2].detach()))
    table = draw_table(len(experts_of(model)))
    for loss in replay_losses(model, table, TWO):
        loss.backward()
        assert loss.isfinite()
    assert all(grad.isfinite().all() for grad in gradients(model).values())
    weights_NK = torch.cat([weights_TK.view(-1, TOP_K) for weights_TK in found])
    vanished_N = (weights_NK == 0).all(1)
    if family in ("hunyuan_v1_moe", "mixtral", "olmoe", "qwen3_moe"):
        assert vanished_N.any()
        if family != "olmoe":  # which does not normalise
            assert torch.equal(weights_NK.sum(1) == 0, ~torch.isclose(weights_NK.sum(1), weights_NK.sum(1).max()))
    elif family == "gpt_oss":
        assert not vanished_N.any()  # its softmax is over the chosen logits


@pytest.mark.parametrize("family", FAMILIES)
def test_experts_that_are_wired_to_a_dispatcher_count_the_drift(family: str, mesh: DeviceMesh) -> None:
    model = double(family)
    attach(wire(model, mesh, registered(model.config, name=f"replay-{family}")))
    table = draw_table(LAYERS)
    assert check(model, family, table, replay_losses(model, table, TWO)) == drift_of(model)


def test_the_experts_function_counts_the_drift(mesh: DeviceMesh) -> None:
    model = double("mixtral")
    register(config_for(model.config, backend="local"), group=dist.group.WORLD, name="replay-function")
    model.set_experts_implementation("replay-function")
    attach(model.float())  # grouped_mm, which the function calls, does not take float64
    table = draw_table(LAYERS)
    losses = replay_losses(model, table, TWO)
    counts = dense("mixtral", table, TWO)
    assert sum(loss.item() for loss in losses) == pytest.approx(counts[0], rel=1e-5)
    assert drift_of(model)[1] == counts[2][1]
    assert drift_of(model)[0] > 0


@pytest.mark.parametrize("wired", ["", "wired", "keeps routes"])
@pytest.mark.parametrize("how", ["reentrant", "non-reentrant", "wrapped by torch"])
def test_a_layer_is_recomputed_with_the_ids_of_its_forward(how: str, wired: str, mesh: DeviceMesh) -> None:
    """Both forwards run before the first backward, and the backwards run outside of the blocks."""
    model = double(FAMILY)
    if wired:
        model = wire(model, mesh, registered(model.config, name=f"replay-{how}-{wired}"))
        attach(model, keep_routes=wired == "keeps routes")
    if how == "wrapped by torch":
        model.model.layers = torch.nn.ModuleList(checkpoint_wrapper(layer) for layer in model.model.layers)
    else:
        model.activation_checkpointing_enable({"use_reentrant": how == "reentrant"})
    table = draw_table(LAYERS)
    losses = replay_losses(model, table, TWO)
    dispatchers = [*dispatchers_of(model).values()] if wired else []
    before = [dispatcher.metrics().dispatches for dispatcher in dispatchers[:1]]
    for loss in losses:
        loss.backward()
    after = [dispatcher.metrics().dispatches for dispatcher in dispatchers[:1]]
    assert (before == after) == (wired != "wired"), "a dispatch on a kept route counts as none"
    _, wanted, counts = dense(FAMILY, table, TWO)
    got = {name.replace("_checkpoint_wrapped_module.", ""): grad for name, grad in gradients(model).items()}
    assert difference(got, wanted) < 1e-5
    assert not wired or drift_of(model) == counts, "a recomputation counts nothing"


@pytest.mark.parametrize(("kept", "only_added"), [(False, False), (True, False), (True, True)])
def test_a_router_that_chooses_otherwise_in_a_recomputation(
    kept: bool, only_added: bool, mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With ``keep_routes``, it gets the ids of its forward. With ``only_added``, shared experts need no combine."""
    left_out: list[torch.Tensor] = []

    def noted(*call: Any) -> torch.Tensor:
        left_out.append(leave_out(*call))
        return left_out[-1]

    monkeypatch.setattr(contexts, "leave_out", noted)

    def called(checkpointed: bool) -> dict[str, torch.Tensor]:
        model = double("deepseek_v3")
        model = wire(model, mesh, registered(model.config, name="chooses-otherwise"))
        attach(model, keep_routes=kept, only_added=only_added)
        if checkpointed:
            model.activation_checkpointing_enable({"use_reentrant": False})
        batch = BATCHES[TWO[0]]
        loss = loss_of(model, batch, targets(batch))
        biases = [each.e_score_correction_bias for each in model.modules() if hasattr(each, "e_score_correction_bias")]
        assert biases
        for bias in biases:
            bias += torch.arange(len(bias))
        loss.backward()
        return gradients(model)

    wanted = called(False)
    if kept:
        assert difference(called(True), wanted) == 0
        assert bool(left_out) == only_added
    else:
        with pytest.raises(CheckpointError):
            called(True)


CASES = {
    "qwen3_moe": Case(mesh=Mesh(fsdp=2, ep=2)),
    "deepseek_v3, checkpoint": Case(family="deepseek_v3", mesh=Mesh(fsdp=2, ep=2), checkpoint=True),
    "gpt_oss": Case(family="gpt_oss", mesh=Mesh(fsdp=2, ep=2)),
    "mixtral, tp 2": Case(family="mixtral", mesh=Mesh(tp=2, ep=2)),
    "balanced": Case(mesh=Mesh(fsdp=2, ep=2), fields=BALANCED),
    "in chunks": Case(mesh=Mesh(fsdp=2, ep=2), fields={"chunks": 4}),
}


@functools.cache
def results() -> dict[str, list[Any]]:
    return run_checks({name: functools.partial(on_two_ranks, case) for name, case in CASES.items()}, 2)


@pytest.mark.parametrize("name", CASES)
def test_two_ranks_compute_what_the_forced_model_computes(name: str) -> None:
    for found in require(results()[name]):
        assert found.pop("loss") < 1e-5
        assert found.pop("gradients") < 1e-4
        assert found == {"drifted": 0, "replayed": 0, "recorded": 0}


def test_a_closed_replay_leaves_the_model_as_it_was() -> None:
    model, batch = double(FAMILY), BATCHES[TWO[0]]
    wanted = loss_of(model, batch, targets(batch))
    replay = RoutingReplay(model)
    with replay.micro_batch(cut_of(draw_table(LAYERS), TWO[0])):
        assert loss_of(model, batch, targets(batch)) != wanted
    with pytest.raises(
        StateError, match=r"forward\(\) of model\.layers\.0\.mlp\.gate \(Qwen3MoeTopKRo.* was called outside"
    ):
        loss_of(model, batch, targets(batch))
    replay.close()
    assert loss_of(model, batch, targets(batch)) == wanted


def test_layers_that_run_twice_in_a_forward_are_neither_replayed_nor_recorded(mesh: DeviceMesh) -> None:
    """A table has one entry for a layer and a position. Several forwards in one block are something else."""
    model, batch = double(FAMILY), BATCHES[TWO[0]]
    attach(wire(model, mesh, registered(model.config, name="replay-twice")))
    table = draw_table(LAYERS)
    replay = RoutingReplay(model)
    with replay.micro_batch(cut_of(table, TWO[0])):
        assert loss_of(model, batch, 1) == loss_of(model, batch, 1)
    model.model.layers.append(model.model.layers[1])
    model.config.num_hidden_layers += 1
    with (
        replay.micro_batch(cut_of(table, TWO[0])),
        pytest.raises(ConfigError, match=r"layers\.1\.mlp\.gate \(Qwen.* must run once in a forward, got a second run"),
    ):
        loss_of(model, batch, 1)
    replay.close()
    with RoutingTable.record(list(dispatchers_of(model).values())) as recording:
        recording.micro_batch(names_of(TWO[0]))
        loss_of(model, batch, 1)
    with pytest.raises(InputError, match=r"layer 1 \('model\.layers\.1\.mlp\.experts'\) must run once .* got 2 runs"):
        recording.table()


def refused(model: Any, cut: Cut, number: int, error: type[Exception], told: str) -> None:
    """A forward with this cut is refused."""
    with RoutingReplay(model).micro_batch(cut), pytest.raises(error, match=told):
        loss_of(model, BATCHES[number], 1)


def test_a_table_of_another_model_or_batch_is_refused() -> None:
    cut, (first, second) = cut_of(draw_table(LAYERS), TWO[0]), TWO
    of_other_batch = r"got torch\.int64 \(16, 2\) and torch\.float32 \(24, 8\)\. Cut the table"
    refused(build(FAMILY), cut, second, InputError, of_other_batch)
    layout, names, like = BSHD([7, 3]), ["a", "b"], (2, 8, HIDDEN)
    for experts, top_k in ((16, TOP_K), (EXPERTS, 3)):
        ids = torch.arange(top_k).expand(7, LAYERS, -1)
        table = RoutingTable({"a": ids, "b": ids[:3]}, num_experts=experts)
        told = rf"one torch\.topk of {top_k} of {experts} experts, as the table has it, got 2 of \(16, 8\)\. Rep"
        refused(build(FAMILY), table.cut(layout, names, like=like), first, ConfigError, told)
    table = RoutingTable({"a": torch.tensor([[[0, 1]], [[3, -1]]])}, num_experts=EXPERTS)
    with (
        pytest.raises(InputError, match=r"each of 2 slots, got \[3, -1\] for sequence 'a', position 1, layer 0, and 1"),
        RoutingReplay(build(FAMILY)).micro_batch(table.cut(BSHD([2]), ["a"], like=(1, 2, HIDDEN))),
    ):
        pass


def test_a_router_that_cannot_replay_is_refused() -> None:
    without_top_k = r"mlp\.router \(PhimoeTopKRouter\) must choose experts by .* got none\. Repl"
    refused(build("phimoe"), cut_of(draw_table(LAYERS), TWO[0]), TWO[0], ConfigError, without_top_k)
    model = build(FAMILY)
    model.model.layers[0].mlp.selector = model.model.layers[0].mlp.gate
    del model.model.layers[0].mlp.gate
    for other, told in {
        build("deepseek_v2", topk_method="group_limited_greedy"): r"must keep the scores of all experts, got topk_meth",
        model: r"layers\.0\.mlp \(Qwen3MoeSparse.*\) must hold one module called gate or router, got experts",
        torch.nn.Linear(2, 2): r"RoutingReplay: Linear has no MoE layers",
    }.items():
        with pytest.raises(ConfigError, match=told):
            RoutingReplay(other)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # PEFT asks for it
def test_routers_beside_adapted_experts_are_found() -> None:
    model, table = with_lora(double(FAMILY)), draw_table(LAYERS)
    replay_losses(model, table, TWO)
    table.check_used([name for number in TWO for name in names_of(number)])
