"""What register, attach and config_for accept, derive and refuse, with the registry of transformers and without it."""

from __future__ import annotations

import copy
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from moe_dispatch import DispatcherConfig
from moe_dispatch.errors import ConfigError, IntegrationError, StateError
from moe_dispatch.integrations.transformers import attach, config_for, dispatchers_of, register
from moe_dispatch.replay import RoutingTable
from tests.integration.steps import difference
from tests.integration.transformers.models import BATCHES, EXPERTS, FAMILIES, HIDDEN, LAYERS, TOP_K, build, config_of
from tests.integration.transformers.wiring import (
    gradients,
    loss_of,
    registered,
    rows_cut,
    targets,
    unsharded,
    wire,
)

FAMILY = "qwen3_moe"
SHAPE: dict[str, Any] = {"num_experts": EXPERTS, "top_k": TOP_K, "hidden_size": HIDDEN}


def config(**changes: Any) -> DispatcherConfig:
    return DispatcherConfig(backend="local", infer_layout=False, **{**SHAPE, **changes})


def test_config_is_derived_from_the_models() -> None:
    from transformers import Gemma4Config, MuseSparkTextConfig, NemotronHConfig, Qwen3_5MoeConfig

    for family in FAMILIES:
        assert config_for(config_of(family), backend="local") == config()
        assert config_for(config_of(family), backend="local", infer_layout=True).infer_layout
    qwen = Qwen3_5MoeConfig(text_config=config_of("qwen3_5_moe_text").to_dict())
    sizes = {"hidden_size": HIDDEN, "num_experts": EXPERTS, "top_k_experts": TOP_K, "moe_intermediate_size": 16}
    for multimodal in (qwen, Gemma4Config(text_config=sizes)):  # the text part says it, by names of its own
        assert config_for(multimodal, backend="local") == config()
    # Experts may be narrower than the model.
    assert config_for(MuseSparkTextConfig(moe_hidden_size=48), backend="local").hidden_size == 48
    assert config_for(NemotronHConfig(moe_latent_size=48), backend="local").hidden_size == 48
    assert config_for(NemotronHConfig(hidden_size=64), backend="local").hidden_size == 64


def test_config_that_is_not_the_models_is_refused() -> None:
    from transformers import LlamaConfig

    with pytest.raises(ConfigError, match=r"config_for: num_experts must be that of the model, got 16, and 8 in Qwen3"):
        config_for(config_of(FAMILY), num_experts=16)
    with pytest.raises(ConfigError, match=r"LlamaConfig must have num_experts, top_k, got none of num_experts, num_lo"):
        config_for(LlamaConfig())
    given = config_for(LlamaConfig(hidden_size=HIDDEN), backend="local", num_experts=EXPERTS, top_k=TOP_K)
    assert given == config()


def test_layers_with_numbers_of_their_own_are_named() -> None:
    from transformers import HunYuanMoEV1Config

    sizes = {"num_experts": EXPERTS, "hidden_size": HIDDEN, "num_hidden_layers": 2}
    uneven = HunYuanMoEV1Config(moe_topk=[2, 4], **sizes)
    text = (
        r"config_for: num_experts_per_tok of HunYuanMoEV1Config must be one number, got a number for each layer, "
        r"\[2, 4\]\. Pass top_k= with the number of the layers that this config is for, such as top_k=2"
    )
    with pytest.raises(ConfigError, match=text):
        config_for(uneven)
    assert [config_for(uneven, top_k=number).top_k for number in (2, 4)] == [2, 4]
    with pytest.raises(
        ConfigError, match=r"top_k must be that of the model, got 3, and 2 or 4 in .* Pass one of these"
    ):
        config_for(uneven, top_k=3)
    assert config_for(HunYuanMoEV1Config(moe_topk=[TOP_K] * 2, **sizes), backend="local") == config()
    assert config_for(HunYuanMoEV1Config(moe_topk=[0, TOP_K], **sizes), backend="local") == config()  # a dense layer
    for wrong in (2.0, "2", 0, [2, "4"], [0], []):
        other = SimpleNamespace(
            num_experts=EXPERTS, hidden_size=HIDDEN, num_experts_per_tok=wrong
        )  # of another library
        with pytest.raises(ConfigError, match=r"must have top_k, got num_experts_per_tok=" + re.escape(repr(wrong))):
            config_for(other)


def test_configs_by_layer_of_transformers_are_read() -> None:
    base = {**config_of(FAMILY).to_dict(), "num_hidden_layers": 2}
    kind = type(config_of(FAMILY))
    layered = kind(**base, per_layer_config={1: {"num_experts_per_tok": 4}})
    with pytest.raises(ConfigError, match=rf"num_experts_per_tok of Qwen3MoeConfig must be .* \[{TOP_K}, 4\]"):
        config_for(layered)
    assert config_for(layered, top_k=4).top_k == 4
    assert config_for(layered.per_layer_config[1]).top_k == 4


def test_quantised_rows_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"register: .* read no quantised rows"):
        register(config(wire={"dtype": "mxfp8", "deliver": "quantised"}, pad_multiple=32), name="quantised")


def test_a_name_stands_for_one_config() -> None:
    from transformers.distributed.expert_parallel import EPImplementationInterface

    register(config())
    assert "moe_dispatch" in EPImplementationInterface()
    register(config(), name="twice")
    register(config(), name="twice")
    with pytest.raises(ConfigError, match=r"'twice' must stand for one config, got pad_multiple=16 after 1\. Pass ano"):
        register(config(pad_multiple=16), name="twice")
    register(config(pad_multiple=16), name="second")
    with pytest.raises(ConfigError, match=r"'all_to_all' must be a free name, got .*AllToAllEP.* of transformers"):
        register(config(), name="all_to_all")


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"num_experts": 16}, "Qwen3MoeExperts: the 1 ranks must hold num_experts (16) together, got 8"),
        ({"top_k": 4}, "Qwen3MoeExperts: top_k must be that of the model, got 4, and 2 in Qwen3MoeConfig"),
        ({"hidden_size": 64}, "Qwen3MoeExperts: hidden_size must be that of the model, got 64, and 32 in Qwen3Moe"),
    ],
)
def test_a_config_of_another_model_is_refused_when_experts_are_wired(
    changes: dict[str, Any], text: str, mesh: DeviceMesh
) -> None:
    name = f"other-{'-'.join(changes)}"
    register(config(**changes), name=name)
    with pytest.raises(ConfigError, match=re.escape(text)):
        wire(build(FAMILY), mesh, name)


def test_attach_refuses_what_it_cannot_watch(mesh: DeviceMesh) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    not_wired = r"none of the 2 experts modules of Qwen3MoeForCausalLM is wired\. Call register"
    part = wire(build(FAMILY), mesh, registered(config_of(FAMILY), name="part")).model.layers
    for model, told in {
        LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=9)): r"LlamaForCausalLM has no MoE layers",
        build(FAMILY): not_wired,
        wire(build(FAMILY), mesh, "all_to_all"): not_wired,
        part: r"must take attention_mask and inputs_embeds, got ModuleList without such a",
    }.items():
        with pytest.raises(ConfigError, match=told):
            attach(model)


@pytest.fixture
def older(monkeypatch: pytest.MonkeyPatch) -> None:
    """A release of transformers without a registry of expert-parallel implementations."""
    monkeypatch.setitem(sys.modules, "transformers.distributed.expert_parallel", None)


@pytest.mark.parametrize("hidden", [False, True])
def test_experts_function_with_the_registry_and_without(
    hidden: bool, mesh: DeviceMesh, request: pytest.FixtureRequest
) -> None:
    name = f"function-{hidden}"
    if hidden:
        request.getfixturevalue("older")
        with pytest.raises(IntegrationError, match=r"has no registry of expert-parallel .* Pass group= and call"):
            register(config(), name=name)
    register(config(), group=dist.group.WORLD, name=name)
    register(config(), group=dist.group.WORLD, name=name)
    model = build(FAMILY).train()
    model.set_experts_implementation(name)
    attach(model)
    loss_of(model, BATCHES[1], targets(BATCHES[1])).backward()
    assert difference(gradients(model), unsharded(FAMILY, (BATCHES[1],))[1]) < 1e-4
    assert rows_cut(model) == LAYERS * (BATCHES[1].attention_mask.numel() - BATCHES[1].num_real)
    dispatchers = dispatchers_of(model)
    assert list(dispatchers) == [f"model.layers.{i}.mlp.experts" for i in range(LAYERS)]
    assert list(model.state_dict()) == list(build(FAMILY).state_dict())
    copy.deepcopy(model)


@pytest.mark.parametrize("how", ["registry", "function"])
def test_layers_have_dispatchers_with_their_names(how: str, mesh: DeviceMesh) -> None:
    """Metrics, traces and recordings tell layers apart by their dispatchers."""
    model, name = build(FAMILY), f"names-{how}"
    register(config(), group=dist.group.WORLD if how == "function" else None, name=name)
    if how == "function":
        model.set_experts_implementation(name)
    else:
        wire(model, mesh, name)
    attach(model)
    dispatchers = dispatchers_of(model)
    attach(model)
    assert list(dispatchers_of(model).values()) == list(dispatchers.values())
    assert [dispatcher.name for dispatcher in dispatchers.values()] == list(dispatchers)
    with RoutingTable.record(list(dispatchers.values())) as recording, torch.no_grad():
        recording.micro_batch(["a", "b"])
        loss_of(model, BATCHES[1], 1)
    table = recording.table()
    assert table.layers == tuple(range(LAYERS))
    assert table.lengths == {"a": 7, "b": 3}
    assert not torch.equal(table.entries("a")[:, 0], table.entries("a")[:, 1])
    next(iter(dispatchers.values())).close()
    with pytest.raises(StateError) as caught:
        loss_of(model, BATCHES[1], 1)
    assert "In the dispatcher 'model.layers.0.mlp.experts'." in caught.value.__notes__


def test_experts_function_is_for_one_config_and_group(mesh: DeviceMesh) -> None:
    register(config(), group=dist.group.WORLD, name="function")
    with pytest.raises(ConfigError, match=r"'function' must stand for one config, got debug=True after False"):
        register(config(debug=True), group=dist.group.WORLD, name="function")
    with pytest.raises(ConfigError, match=r"'function' must stand for one group, got a second group"):
        register(config(), group=dist.new_group([0]), name="function")
    register(config(), group=init_device_mesh("cpu", (1,)), name="function")  # a mesh of the same group
    with pytest.raises(ConfigError, match=r"graph_safe must be False with group=.*got True"):
        register(config(graph_safe=True, max_tokens_per_rank=8), group=dist.group.WORLD, name="static")


def test_experts_function_refuses_a_share_that_is_not_one(mesh: DeviceMesh) -> None:
    register(config(num_experts=16), group=dist.group.WORLD, name="share")
    model = build(FAMILY)
    model.set_experts_implementation("share")
    with pytest.raises(ConfigError, match=r"the 1 ranks must hold num_experts \(16\) together, got 8"):
        attach(model)


@pytest.mark.parametrize(
    ("version", "outcome"),
    [
        ("6.1.0", pytest.warns(UserWarning, match=r"not run with transformers 6\.1\.0\. Tested versions: 5\.20\.1, 5")),
        ("4.57.1", pytest.raises(IntegrationError, match=r"transformers 4\.57\.1 is older than 5\.20\.1")),
    ],
)
def test_versions_that_were_not_tested(version: str, outcome: Any, tmp_path: Path) -> None:
    other = tmp_path / f"transformers-{version}.dist-info"
    other.mkdir()
    (other / "METADATA").write_text(f"Metadata-Version: 2.1\nName: transformers\nVersion: {version}\n")
    with mock.patch.object(sys, "path", [str(tmp_path), *sys.path]), outcome:
        register(config(), name=version)


# Families of 5.23 whose default config leaves a field open, and the fields that the config of a checkpoint fills.
OPEN: dict[str, dict[str, int]] = {
    "deepseek_ocr2_text": {"num_experts_per_tok": 6},
    "deepseek_v2": {"num_experts_per_tok": 6},
    "diffusion_gemma_text": {"num_experts": 128, "top_k_experts": 6, "moe_intermediate_size": 64},
    "dots1": {"n_routed_experts": 128, "num_experts_per_tok": 6},
    "gemma4_text": {"num_experts": 128, "top_k_experts": 6, "moe_intermediate_size": 64},
}


def test_configs_of_all_models_that_can_be_wired_say_what_is_needed() -> None:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    silent = set()
    for family in CONFIG_MAPPING:
        plan = getattr(CONFIG_MAPPING[family], "base_model_ep_plan", None) or {}
        if "ep_dispatch_experts" not in plan.values():
            continue
        try:
            config_for(CONFIG_MAPPING[family](), backend="local")
        except ConfigError:
            silent.add(family)
    # The layers of this encoder have different numbers of experts.
    assert silent == {*OPEN, "dots3_note_vision_encoder"}


@pytest.mark.parametrize("family", OPEN)
def test_a_config_is_read_by_the_names_that_its_family_uses(family: str) -> None:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    found = config_for(CONFIG_MAPPING[family](**OPEN[family]), backend="local")
    assert found.top_k == 6
    assert found.num_experts in (64, 128)
