"""Choosing our dispatcher in torchtitan's configs, what is taken over from them, and what is refused."""

from __future__ import annotations

import copy
import shlex
import sys
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from moe_dispatch.errors import ConfigError, InputError, IntegrationError
from moe_dispatch.recompute import keep_routes_in
from tests.idle_groups import garbage_in_idle_groups
from tests.integration.needs import needs
from tests.integration.steps import difference
from tests.integration.titan.moe import EXPERTS, HIDDEN, TOP_K, built, moe_config
from tests.pages import blocks, run_page

pytestmark = [
    *needs("torchtitan"),
    # The router asks for an autocast that a CPU does not have.
    pytest.mark.filterwarnings("ignore:.*CPU [Aa]utocast"),
    # What torch's compiler imports uses what torch has deprecated.
    pytest.mark.filterwarnings("ignore:.*torch.jit.script_method:DeprecationWarning"),
]

MODULE = "moe_dispatch.integrations.torchtitan"
OVERRIDE = f"{MODULE}.moe_dispatch_override"


def use(config: Any, **fields: Any) -> list[str]:
    names: list[str] = import_module(MODULE).use_moe_dispatch(config, **{"backend": "local", **fields})
    return names


def overridden(config: Any, **fields: Any) -> Any:
    """``config`` after torchtitan applied our override to it, as its trainer does."""
    from torchtitan.config.override import OverrideConfig, apply_overrides

    import_module(MODULE)
    apply_overrides(OverrideConfig(imports=[(OVERRIDE, fields)]), config)
    return config


def qwen3() -> Any:
    from torchtitan.models.qwen3 import qwen3_configs

    return qwen3_configs["debugmodel_moe"]("flex")


def state_dict_keys(model_config: Any) -> list[str]:
    with torch.device("meta"):
        return list(model_config.build().state_dict())


def forward(moe: Any, tokens: int = 10) -> dict[str, Tensor]:
    torch.manual_seed(1)
    x_BLD = torch.randn(1, tokens, HIDDEN, requires_grad=True)
    y_BLD = moe(x_BLD)
    y_BLD.square().sum().backward()
    gradients = {name: parameter.grad for name, parameter in moe.named_parameters()}
    return {"y": y_BLD.detach(), "x": x_BLD.grad, **gradients}


def test_every_moe_layer_of_a_model_is_replaced_and_no_state_dict_key_changes() -> None:
    config = qwen3()
    keys = state_dict_keys(config)
    assert use(config, pad_multiple=16) == [f"layers.{layer}.moe" for layer in range(8)]
    for index, layer in enumerate(config.layers):
        chosen = layer.moe.routed_experts.token_dispatcher
        assert (chosen.num_experts, chosen.top_k, chosen.hidden_dim) == (64, 8, 256)
        assert (chosen.backend, chosen.options) == ("local", {"pad_multiple": 16})
        assert chosen.name == f"layers.{index}.moe.routed_experts"
    assert state_dict_keys(config) == keys


def test_override_takes_over_what_torchtitan_has_filled_in() -> None:
    from torchtitan.models.common.token_dispatcher import HybridEPTokenDispatcher, TorchAOTokenDispatcher

    quantised, hybrid = moe_config(), moe_config()
    sizes = {"num_experts": EXPERTS, "top_k": TOP_K}
    quantised.routed_experts.token_dispatcher = TorchAOTokenDispatcher.Config(**sizes, pad_multiple=16)
    hybrid.routed_experts.token_dispatcher = HybridEPTokenDispatcher.Config(**sizes, num_max_tokens_per_rank=48)
    chosen = overridden(quantised, backend="alltoall", row_counts="assume").routed_experts.token_dispatcher
    assert (chosen.hidden_dim, chosen.backend) == (HIDDEN, "alltoall")
    assert chosen.options == {"pad_multiple": 16, "row_counts": "assume"}
    hybrid.routed_experts.sharding_config = sharding = object()
    assert overridden(hybrid, graph_safe=True).routed_experts.sharding_config is sharding
    chosen = hybrid.routed_experts.token_dispatcher
    assert chosen.options == {"max_tokens_per_rank": 48, "graph_safe": True}


def test_one_rank_without_a_mesh_computes_what_their_local_dispatcher_does() -> None:
    config = moe_config()
    want = forward(built(config))
    use(config)
    got = forward(built(config))
    assert set(got) == set(want)
    for name, tensor in want.items():
        torch.testing.assert_close(got[name], tensor, rtol=1e-5, atol=1e-6, msg=name)


@pytest.mark.parametrize("fields", [{}, {"chunks": 2}, {"graph_safe": True, "max_tokens_per_rank": 8}])
def test_experts_without_rows_get_no_garbage(fields: dict[str, Any]) -> None:
    want = forward(built(moe_config()), tokens=1)
    config = moe_config()
    use(config, **fields)
    with garbage_in_idle_groups():
        got, alone = forward(built(config), tokens=1), forward(built(moe_config()), tokens=1)
    assert difference(got, want) < 1e-2
    assert difference(alone, want) > 1


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # dynamo asks for it
def test_routed_experts_compile_into_one_graph() -> None:
    config = moe_config()
    use(config)
    moe = built(config)
    want = forward(copy.deepcopy(moe))
    moe.routed_experts.token_dispatcher.wire_meshes(ep_mesh=None)
    moe.routed_experts.forward = torch.compile(moe.routed_experts.forward, fullgraph=True, backend="aot_eager")
    for name, tensor in forward(moe).items():
        torch.testing.assert_close(tensor, want[name], rtol=1e-5, atol=1e-6, msg=name)


def recomputed_dispatches(policy: Any) -> int:
    """How often one layer dispatches in a forward and backward under torchtitan's selective checkpointing."""
    config = moe_config()
    use(config)
    model = nn.Module()
    model.layers = nn.ModuleDict({"0": built(config)})
    policy(policy.Config(force_recompute_mm_shapes_by_fqns=[])).apply(model)
    layer: Any = model.layers["0"]
    forward(layer)
    return int(layer.routed_experts.token_dispatcher.dispatcher.metrics().dispatches)


def test_selective_checkpointing_repeats_dispatch_unless_our_operators_are_saved() -> None:
    from torchtitan.distributed.activation_checkpoint import SelectiveAC

    saving = run_page("integrations/torchtitan.md")["SavesDispatch"]
    assert recomputed_dispatches(SelectiveAC) == 2
    assert recomputed_dispatches(saving) == 1


def test_a_recomputed_layer_takes_the_route_of_its_forward() -> None:
    """The router of the recomputation would choose otherwise, and gets the ids of its forward."""
    config = moe_config()
    use(config)
    model = nn.Module()
    layer: Any = built(config)
    layer.expert_bias_E = torch.zeros(layer.router.num_experts)

    def change(router: nn.Module, args: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        return args[0], args[1] + (torch._C._current_graph_task_id() != -1) * torch.rand_like(args[1])

    layer.router.register_forward_pre_hook(change)
    model.layers = nn.ModuleDict({"0": layer})
    whole: Any = copy.deepcopy(model)
    want = forward(whole.layers["0"])
    before = whole.layers["0"].routed_experts.token_dispatcher.dispatcher.metrics().dispatches
    run_page("integrations/torchtitan.md")["recompute"](model)
    keep_routes_in(model)
    layer = model.layers["0"]
    got = {name.replace("_checkpoint_wrapped_module.", ""): tensor for name, tensor in forward(layer).items()}
    assert layer.routed_experts.token_dispatcher.dispatcher.metrics().dispatches == before + 1
    assert list(got) == list(want)
    for name, tensor in got.items():
        torch.testing.assert_close(tensor, want[name], rtol=0, atol=0)


OURS: list[tuple[dict[str, Any], str]] = [
    *(
        ({field: 1}, rf"options must not set .* got {field}\. Leave these out")
        for field in ("num_experts", "top_k", "hidden_size", "backend", "weights")
    ),
    ({"pad_multiples": 16}, "pad_multiples: Extra inputs are not permitted"),
    (
        {"wire": {"dtype": "mxfp8", "deliver": "quantised"}, "pad_multiple": 32},
        r'read no quantised rows, got wire\.deliver="quantised"\. Leave wire\.deliver out',
    ),
]


@pytest.mark.parametrize(("options", "told"), OURS)
def test_options_that_cannot_be_are_refused(options: dict[str, Any], told: str) -> None:
    config = moe_config()
    use(config)
    config.routed_experts.token_dispatcher.options = options
    with pytest.raises(ConfigError, match=told):
        config.build()


def test_a_model_without_experts_is_refused() -> None:
    from torchtitan.models.qwen3 import qwen3_configs

    with pytest.raises(ConfigError, match="RoutingReplay: Linear has no MoE layers"):
        import_module(MODULE).RoutingReplay(nn.Linear(2, 2))
    with pytest.raises(ConfigError, match=r"Qwen3Model\.Config has no MoE layer"):
        use(qwen3_configs["debugmodel"]("flex"))


def test_numbers_that_disagree_are_refused() -> None:
    for field, value in (("num_experts", 16), ("top_k", 3)):
        config = moe_config()
        setattr(config.router, field, value)
        with pytest.raises(ConfigError, match=r"dispatcher must have the num_experts and top_k of its rout"):
            use(config)
    config = moe_config()
    config.routed_experts.inner_experts.num_experts = 16
    with pytest.raises(ConfigError, match=r"the token dispatcher and the experts must have the same num_experts, got"):
        overridden(config, backend="local")


def test_static_shapes_asked_for_in_their_way_are_refused() -> None:
    from torchtitan.models.common.token_dispatcher import DeepEPTokenDispatcher, HybridEPTokenDispatcher

    sizes = {"num_experts": EXPERTS, "top_k": TOP_K}
    config = moe_config()
    config.routed_experts.token_dispatcher = HybridEPTokenDispatcher.Config(**sizes, non_blocking_capacity_factor=0.5)
    with pytest.raises(
        ConfigError, match=r"non_blocking_capacity_factor, got 0\.5\. Set graph_safe=.\"capacity_factor\""
    ):
        use(config)
    config.routed_experts.token_dispatcher = DeepEPTokenDispatcher.Config(**sizes, cudagraphable=True)
    with pytest.raises(ConfigError, match=r"cudagraphable, got True\. Set graph_safe=True instead"):
        use(config)


def test_a_call_with_another_number_of_experts_or_slots_is_refused() -> None:
    config = moe_config()
    use(config)
    dispatcher = config.routed_experts.token_dispatcher.build()
    x_TD, scores_TK, ids_TK = torch.randn(3, HIDDEN), torch.rand(3, TOP_K), torch.zeros(3, TOP_K, dtype=torch.int64)
    with pytest.raises(InputError, match=r"num_experts \(8\) must be that of the router, got counts of 4 experts"):
        dispatcher.dispatch(x_TD, scores_TK, ids_TK, torch.zeros(4))
    with pytest.raises(InputError, match=r"top_k") as raised:
        dispatcher.dispatch(x_TD, scores_TK[:, :1], ids_TK[:, :1], torch.zeros(EXPERTS))
    assert raised.value.__notes__ == ["In the dispatcher 'moe.routed_experts'."]


def test_code_of_the_page_runs_in_order() -> None:
    from torchtitan.config.override import apply_overrides

    namespace = run_page("integrations/torchtitan.md")
    assert namespace["layers"][0] == "layers.0.moe"
    config = moe_config()
    apply_overrides(namespace["override"], config)
    assert config.routed_experts.token_dispatcher.options == {"pad_multiple": "fp8"}


def test_command_of_the_page_gives_fields_to_the_config() -> None:
    from torchtitan.config import ConfigManager

    (command,) = blocks("docs/integrations/torchtitan.md", "sh")
    words = shlex.split(command)
    config = ConfigManager().parse_args(words[words.index("torchtitan.train") + 1 :])
    assert config.override.imports == [(OVERRIDE, {"backend": "alltoall", "pad_multiple": 16})]
    assert config.parallelism.expert_parallel_degree == 4


def test_page_is_right_about_what_torchtitan_refuses() -> None:
    from torchtitan.components.quantization.utils import swap_token_dispatcher
    from torchtitan.config.override import OverrideConfig, apply_overrides

    config = moe_config()
    experts = "torchtitan.overrides.fused_swiglu.fused_grouped_experts"
    with pytest.raises(ValueError, match="an ancestor of"):
        apply_overrides(OverrideConfig(imports=[(OVERRIDE, {}), experts]), config)
    use(config)
    with pytest.raises(ValueError, match="requires a token dispatcher that supports padding"):
        swap_token_dispatcher(config.routed_experts, 16)


def test_a_version_that_cannot_work_is_refused_when_the_integration_is_imported(tmp_path: Path) -> None:
    import_module(MODULE)
    older = tmp_path / "torchtitan-0.2.2.dist-info"
    older.mkdir()
    (older / "METADATA").write_text("Metadata-Version: 2.1\nName: torchtitan\nVersion: 0.2.2\n")
    with mock.patch.object(sys, "path", [str(tmp_path), *sys.path]), mock.patch.dict(sys.modules):
        del sys.modules[MODULE]
        with pytest.raises(IntegrationError, match=r"torchtitan 0\.2\.2 is older than 0\.3\.0"):
            import_module(MODULE)
