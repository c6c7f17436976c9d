"""Routers that replay a table compute what the same routers compute if they are forced to its experts."""

from __future__ import annotations

import datetime
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh

from moe_dispatch.errors import ConfigError, InputError, StateError
from moe_dispatch.integrations.transformers import RoutingReplay, attach, config_for, dispatchers_of, register
from moe_dispatch.layouts import BSHD
from moe_dispatch.replay import RoutingTable
from moe_dispatch_testing.ranks import run_processes
from tests.integration.transformers.models import BATCHES, EXPERTS, FAMILIES, HIDDEN, LAYERS, TOP_K, build
from tests.integration.transformers.ranks import BALANCED, Case, Mesh, run_cases
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
)
from tests.integration.transformers.wiring import (
    gradients,
    largest_error,
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
    assert largest_error(gradients(model), wanted_gradients) < 1e-5
    table.check_used([f"{number}.{row}" for number in TWO for row in range(2)])
    return counts


@pytest.mark.parametrize("family", WEIGHTS)
def test_weights_are_those_of_the_forced_router(family: str) -> None:
    model = double(family)
    table = draw_table(len(experts_of(model)))
    drifted, replayed = check(model, family, table, replay_losses(model, table, TWO))
    assert drifted > replayed / 2 > 0  # the table is not what the routers choose


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


@pytest.mark.parametrize("wired", [False, True])
@pytest.mark.parametrize("how", ["reentrant", "non-reentrant", "wrapped by torch"])
def test_a_layer_is_recomputed_with_the_ids_of_its_forward(how: str, wired: bool, mesh: DeviceMesh) -> None:
    """Both forwards run before the first backward, and the backwards run outside of the blocks."""
    model = double(FAMILY)
    if wired:
        attach(wire(model, mesh, registered(model.config, name=f"replay-{how}")))
    if how == "wrapped by torch":
        model.model.layers = torch.nn.ModuleList(checkpoint_wrapper(layer) for layer in model.model.layers)
    else:
        model.activation_checkpointing_enable({"use_reentrant": how == "reentrant"})
    table = draw_table(LAYERS)
    losses = replay_losses(model, table, TWO)
    for loss in losses:
        loss.backward()
    _, wanted, counts = dense(FAMILY, table, TWO)
    got = {name.replace("_checkpoint_wrapped_module.", ""): grad for name, grad in gradients(model).items()}
    assert largest_error(got, wanted) < 1e-5
    assert not wired or drift_of(model) == counts, "a recomputation counts nothing"


CASES = {
    "qwen3_moe": Case(mesh=Mesh(fsdp=2, ep=2)),
    "deepseek_v3, checkpoint": Case(family="deepseek_v3", mesh=Mesh(fsdp=2, ep=2), checkpoint=True),
    "gpt_oss": Case(family="gpt_oss", mesh=Mesh(fsdp=2, ep=2)),
    "mixtral, tp 2": Case(family="mixtral", mesh=Mesh(tp=2, ep=2)),
    "balanced": Case(mesh=Mesh(fsdp=2, ep=2), fields=BALANCED),
    "in chunks": Case(mesh=Mesh(fsdp=2, ep=2), fields={"chunk_tokens": 4}),
}


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    jobs = {name: (on_two_ranks, case) for name, case in CASES.items()}
    return run_processes(run_cases, 2, jobs, timeout=datetime.timedelta(seconds=180))


@pytest.mark.parametrize("name", CASES)
def test_two_ranks_compute_what_the_forced_model_computes(ranks: list[dict[str, Any]], name: str) -> None:
    for of_rank in ranks:
        assert not isinstance(of_rank[name], str), of_rank[name]
        assert of_rank[name].pop("loss") < 1e-5
        assert of_rank[name].pop("gradients") < 1e-4
        assert of_rank[name] == {"drifted": 0, "replayed": 0, "recorded": 0}


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


@pytest.mark.parametrize("change", ["num_experts", "top_k"])
def test_a_table_of_another_model_is_refused(change: str) -> None:
    wanted = {"num_experts": f"{TOP_K} of 16 experts", "top_k": f"3 of {EXPERTS} experts"}[change]
    ids = torch.arange(3 if change == "top_k" else TOP_K).expand(4, LAYERS, -1)
    table = RoutingTable({"a": ids}, num_experts=16 if change == "num_experts" else EXPERTS)
    model = build(FAMILY)
    with (
        RoutingReplay(model).micro_batch(table.cut(BSHD([4]), ["a"], like=(1, 4, HIDDEN))),
        pytest.raises(ConfigError, match=rf"one torch\.topk of {wanted}, as the table has it, got 2 of \(4, 8\)\. Rep"),
    ):
        model(input_ids=torch.ones(1, 4, dtype=torch.int64))


def test_a_cut_of_another_batch_is_refused() -> None:
    model = build(FAMILY)
    with (
        RoutingReplay(model).micro_batch(cut_of(draw_table(LAYERS), TWO[0])),
        pytest.raises(InputError, match=r"got torch\.int64 \(16, 2\) and torch\.float32 \(24, 8\)\. Cut the table"),
    ):
        loss_of(model, BATCHES[TWO[1]], 1)


def test_an_entry_with_slots_that_go_nowhere_is_refused() -> None:
    table = RoutingTable({"a": torch.tensor([[[0, 1]], [[3, -1]]])}, num_experts=EXPERTS)
    replay = RoutingReplay(build(FAMILY))
    with (
        pytest.raises(InputError, match=r"each of 2 slots, got \[3, -1\] for sequence 'a', position 1, layer 0, and 1"),
        replay.micro_batch(table.cut(BSHD([2]), ["a"], like=(1, 2, HIDDEN))),
    ):
        pass


def test_a_router_without_a_top_k_is_refused_in_its_first_forward() -> None:
    model = build("phimoe")
    with (
        RoutingReplay(model).micro_batch(cut_of(draw_table(LAYERS), TWO[0])),
        pytest.raises(ConfigError, match=r"mlp\.router \(PhimoeTopKRouter\) must choose experts by .* got none\. Repl"),
    ):
        loss_of(model, BATCHES[TWO[0]], 1)


def test_a_router_that_drops_scores_before_it_chooses_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"DeepseekV2TopkRouter\) must keep the scores of all experts, got topk_meth"):
        RoutingReplay(build("deepseek_v2", topk_method="group_limited_greedy"))


def test_a_layer_without_a_router_of_a_known_name_is_refused() -> None:
    model = build(FAMILY)
    model.model.layers[0].mlp.selector = model.model.layers[0].mlp.gate
    del model.model.layers[0].mlp.gate
    with pytest.raises(
        ConfigError,
        match=r"layers\.0\.mlp \(Qwen3MoeSparse.*\) must hold one module called gate or router, got experts",
    ):
        RoutingReplay(model)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # PEFT asks for it
def test_routers_beside_adapted_experts_are_found() -> None:
    model, table = with_lora(double(FAMILY)), draw_table(LAYERS)
    replay_losses(model, table, TWO)
    table.check_used([name for number in TWO for name in names_of(number)])


def test_a_model_without_experts_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"RoutingReplay: Linear has no MoE layers"):
        RoutingReplay(torch.nn.Linear(2, 2))
