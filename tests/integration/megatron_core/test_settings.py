"""What becomes of a TransformerConfig: fields of ours, or a refusal that names Megatron's and the way out."""

from __future__ import annotations

import functools
import warnings
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from moe_dispatch import DispatcherConfig
from moe_dispatch.errors import ConfigError, StateError
from moe_dispatch.integrations.checks import check_version
from moe_dispatch_testing import run_ranks
from tests.integration.megatron_core import layer
from tests.integration.needs import needs

pytestmark = [
    *needs("megatron"),
    pytest.mark.filterwarnings("ignore"),  # of Megatron's import
]


def transformer_config(**fields: Any) -> Any:
    """A real one; what its version, or a machine without transformer-engine, would refuse is set afterwards."""
    sizes = {"hidden_size": 64, "moe_router_topk": 2}
    return layer.transformer_config(layer.Case(parallel=layer.Parallel(ep=1), config=sizes, unchecked=fields))


def derived(given: dict[str, Any] | None = None, *, etp_size: int = 1, pad_multiple: int = 1, **fields: Any) -> Any:
    from moe_dispatch.integrations.megatron.settings import dispatcher_config

    config = transformer_config(**fields)
    return dispatcher_config(config, "alltoall", etp_size=etp_size, pad_multiple=pad_multiple, given=given or {})


def group(size: int = 1, rank: int = 0) -> Any:
    return SimpleNamespace(size=lambda: size, rank=lambda: rank)


def groups(*, ep: Any = None, expt_tp: Any = None, tp_ep: Any = None) -> Any:
    """Numbers in the place of groups where none is used: only the last one carries anything."""
    tp_ep = tp_ep or run_ranks(lambda alone: alone, 1)[0]
    return SimpleNamespace(ep=ep or group(), expt_tp=expt_tp or group(), tp_ep=tp_ep)


def dispatcher_of_one(given: dict[str, Any] | None = None, **fields: Any) -> Any:
    from moe_dispatch.integrations.megatron import MegatronDispatcher

    return MegatronDispatcher(8, range(8), transformer_config(**fields), groups(), backend="local", **given or {})


def test_the_fields_of_ours() -> None:
    config = derived(etp_size=2)  # a part of an expert is an expert
    assert config == DispatcherConfig(backend="alltoall", num_experts=16, top_k=4, hidden_size=64, weights="experts")
    assert derived(moe_latent_size=16).hidden_size == 16
    config = derived(
        {"max_tokens_per_rank": 32, "graph_safe": {"on_overflow": "drop"}}, moe_expert_rank_capacity_factor=1.5
    )
    assert config.graph_safe == {"capacity_factor": 1.5, "on_overflow": "drop"}


@pytest.mark.parametrize(
    ("fields", "multiple"),
    [
        ({}, 1),
        ({"fp8": "hybrid", "fp8_recipe": "tensorwise"}, 16),
        ({"fp8": "hybrid", "fp8_recipe": "mxfp8"}, 32),
        ({"fp4": "e2m1", "fp4_recipe": "nvfp4"}, None),
        ({"fp8": "hybrid", "use_transformer_engine_op_fuser": True}, None),
    ],
)
def test_padding_is_what_experts_of_this_version_need(fields: dict[str, Any], multiple: int | None) -> None:
    from megatron.core.transformer.moe.moe_utils import get_align_size_for_quantization

    asked = get_align_size_for_quantization(transformer_config(**fields)) if multiple is None else multiple
    assert dispatcher_of_one(**fields).dispatcher.config.pad_multiple_rows == asked


EXACT = {"balance": "exact"}
REFUSED: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({"moe_token_dispatcher_type": "flex"}, {}, r'moe_token_dispatcher_type=\'flex\' is not .* Set it to "alltoall"'),
    (
        {"moe_enable_deepep": True},
        {},
        'moe_enable_deepep=True is not supported. Leave it out, and pass backend="deepep"',
    ),
    ({"moe_permute_fusion_into_hybridep": True}, {}, "moe_permute_fusion_into_hybridep=True .*fuse_permute"),
    ({"moe_hybridep_pad_uneven_dispatch_inputs": True}, {}, "pad_uneven_dispatch_inputs=True .*row counts"),
    ({"moe_flex_dispatcher_num_sms": 24}, {}, "moe_flex_dispatcher_num_sms=24 .*num_sms"),
    ({"moe_ncclep_static_shape": True}, {}, "moe_ncclep_static_shape=True .*graph_safe=True"),
    ({"moe_ncclep_zero_copy": True}, {}, "moe_ncclep_zero_copy=True is not supported. Leave it out"),
    ({"moe_pad_expert_input_to_capacity": True}, {}, "moe_pad_expert_input_to_capacity=True .*capacity_factor"),
    ({"moe_pad_experts_for_cuda_graph_inference": True}, {}, "for_cuda_graph_inference=True .*graph_safe"),
    ({"moe_paged_stash": True}, {}, "moe_paged_stash=True .*retry_on_overflow"),
    ({"transformer_impl": "inference_optimized"}, {}, 'transformer_impl=.*Use "transformer_engine"'),
    ({"num_moe_experts": None}, {}, "num_moe_experts must be a positive number, got None"),
    ({"moe_expert_rank_capacity_factor": 1.5}, {}, "need max_tokens_per_rank"),
    ({"cuda_graph_impl": "local"}, {}, "cuda_graph_impl='local' captures the MoE layer, which needs graph_safe=True"),
    ({"cuda_graph_impl": "full_iteration"}, {}, "cuda_graph_impl='full_iteration' captures the MoE layer"),
    (
        {"overlap_moe_expert_parallel_comm": True, "cuda_graph_impl": "transformer_engine"},
        {},
        "cuda_graph_impl='transformer_engine' does not work with overlap_moe_expert_parallel_comm=True",
    ),
    ({"fp8": "hybrid"}, EXACT, "balance does not work with fp8='hybrid'"),
    ({"fp4": "e2m1"}, EXACT, "balance does not work with fp4='e2m1'"),
    ({"use_transformer_engine_op_fuser": True}, EXACT, "not work with use_transformer_engine_op_fuser=True"),
    (
        {"overlap_dispatch_backward_with_experts_wgrad": True},
        EXACT,
        "not work with overlap_dispatch_backward_with_experts_wgrad=True",
    ),
    (
        {},
        {"balance": {"name": "least_loaded", "spare_experts_per_rank": 1}},
        "'least_loaded', .* and graph_safe=False",
    ),
    ({}, EXACT | {"graph_safe": True, "max_tokens_per_rank": 8}, "balance='exact' and graph_safe=True. Leave one"),
    (
        {},
        {"balance": {"name": "manual", "spare_experts_per_rank": 1}},
        "balance must be .*, got .*'manual'",
    ),
    ({}, {"num_experts": 4}, "num_experts must be left to Megatron, got 4. It comes from num_moe_experts"),
    ({}, {"weights": "combine"}, "weights must be left to Megatron, got 'combine'. It comes from its experts"),
    ({}, {"chunks": 4}, r"runs its experts once for all rows of a call.* got chunks=4"),
    (
        {},
        {"wire": {"dtype": "mxfp8", "deliver": "quantised"}, "pad_multiple": 32},
        r'read no quantised rows, got wire\.deliver="quantised"\. Leave wire\.deliver out',
    ),
    ({}, {"pad_multiple": 24}, "pad_multiple must be a multiple of 16, which the precision of the experts needs, got"),
    ({}, {"padmultiple": 16}, "padmultiple"),
]


@pytest.mark.parametrize(("fields", "given", "text"), REFUSED, ids=[", ".join([*one, *two]) for one, two, _ in REFUSED])
def test_settings_that_cannot_be_are_refused_by_name(fields: dict[str, Any], given: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        derived(given, pad_multiple=16, **fields)


def test_balance_needs_parameters_for_each_expert() -> None:
    from moe_dispatch.integrations.megatron.slots import SlotExperts

    with pytest.raises(ConfigError, match=r"balance needs parameters for each expert, got 'weight' in Linear\. Use Se"):
        SlotExperts(nn.Linear(2, 2))
    one_for_all = nn.ModuleDict({"linear_fc1": nn.Linear(2, 2)})
    with pytest.raises(ConfigError, match=r"got 'linear_fc1\.weight' in .*, without moe_single_grouped_weight"):
        SlotExperts(one_for_all)


@pytest.mark.parametrize("field", ["cuda_graph_scope", "cuda_graph_modules"])
def test_graphs_of_the_router_alone_need_nothing(field: str) -> None:
    from moe_dispatch.integrations.megatron.settings import captures_experts

    def captured(scope: Any) -> bool:
        return captures_experts(SimpleNamespace(cuda_graph_impl="transformer_engine", **{field: scope}))

    assert not captured(["attn", "moe_router", "moe_preprocess"])
    assert not captured([SimpleNamespace(name="moe_router")])
    for scope in ([], ["moe"], "full", ["attn", "full_iteration"], [SimpleNamespace(name="moe")]):
        assert captured(scope)


@pytest.mark.parametrize(
    ("experts", "indices", "found", "text"),
    [
        (6, range(2), groups(ep=group(4)), r"num_moe_experts \(6\) must be divisible by the expert-parallel size"),
        (8, range(2, 4), groups(ep=group(4)), r"rank 0 of 4 must hold 2 experts from 0 on, got \[2, 3\]"),
        (8, range(4), groups(ep=group(2), tp_ep=group(4)), "must be 0 of 2 in tp_ep .*got 0 of 4. Use Megatron's own"),
        (
            8,
            range(4, 8),
            groups(ep=group(2, 1), expt_tp=group(2, 0), tp_ep=group(4, 1)),
            "must be 2 of 4 in tp_ep .*got 1 of 4",
        ),
    ],
)
def test_experts_in_other_places_are_refused(experts: int, indices: range, found: Any, text: str) -> None:
    from moe_dispatch.integrations.megatron import MegatronDispatcher

    with pytest.raises(ConfigError, match=text):
        MegatronDispatcher(len(indices), indices, transformer_config(num_moe_experts=experts), found)


def test_a_model_without_moe_layers_is_refused_but_not_a_stage_of_one() -> None:
    from moe_dispatch.integrations.megatron import convert

    with pytest.raises(ConfigError, match=r"convert: the model \(Linear\) has no MoE layers. Set num_moe_e"):
        convert(nn.Linear(2, 2))
    with pytest.raises(ConfigError, match=r"the model \(Linear, Linear\) has no MoE layers"):
        convert([nn.Linear(2, 2), nn.Linear(2, 2)])
    stage = nn.Linear(2, 2)
    stage.config = transformer_config()
    convert(stage)


def test_specs_of_blocks() -> None:
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
    from megatron.core.transformer import multi_token_prediction as mtp
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.transformer_block import TransformerBlock

    from moe_dispatch.integrations.megatron import moe_layer_spec

    def layers_of_ours(spec: Any) -> int:
        return str(spec).count("DispatchMoELayer")

    build = functools.partial(get_gpt_decoder_block_spec, use_transformer_engine=False, pp_rank=0)
    block = build(transformer_config(num_layers=2, moe_layer_freq=[1, 1]))
    assert layers_of_ours(moe_layer_spec(block)) == 2
    assert layers_of_ours(block) == 0
    assert layers_of_ours(moe_layer_spec(ModuleSpec(module=TransformerBlock, submodules=block))) == 2
    predicts = mtp.MultiTokenPredictionBlockSubmodules([mtp.get_mtp_layer_spec(block.layer_specs[-1], False)])
    assert layers_of_ours(moe_layer_spec(predicts)) == 1

    dense = build(transformer_config(num_layers=2, moe_layer_freq=[0, 0]))
    assert moe_layer_spec(dense) is dense
    for without in (dense.layer_specs[0], None):
        with pytest.raises(ConfigError, match="moe_layer_spec: the spec must hold an MoE layer, got"):
            moe_layer_spec(without)


def test_phases_out_of_order_are_refused() -> None:
    dispatcher, hidden = dispatcher_of_one({"name": "mlp 3"}), torch.zeros(4, 1, 64)
    with pytest.raises(StateError, match="token_dispatch: dispatch_preprocess must come before it, got no ids"):
        dispatcher.token_dispatch(hidden, torch.ones(4, 2))
    with pytest.raises(StateError, match="dispatch_postprocess: token_dispatch must come before it, got nothing in fl"):
        dispatcher.dispatch_postprocess(hidden, torch.ones(4, 2))
    with pytest.raises(StateError, match="token_combine: token_dispatch must come before it, got nothing in flight"):
        dispatcher.token_combine(hidden)


def test_a_balanced_dispatcher_that_was_set_by_hand_is_refused() -> None:
    dispatcher = dispatcher_of_one(EXACT)
    dispatcher.dispatch_preprocess(torch.zeros(3, 64), torch.eye(3, 8).bool(), torch.eye(3, 8))
    sent = dispatcher.token_dispatch(torch.zeros(3, 64), torch.ones(3, 2))
    with pytest.raises(StateError, match=r"balance needs experts that run on expert slots, got .* Call convert on the"):
        dispatcher.dispatch_postprocess(*sent)


def test_this_version_is_a_tested_one() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_version("megatron-core")


# Fields that the tested releases lack, with their defaults.
AFTER_0_19 = {"moe_megakernel_backend": None, "moe_dispatch_fwd_dtype": "bf16", "moe_combine_bwd_dtype": "bf16"}


def later_settings(**changes: Any) -> Any:
    return SimpleNamespace(**{"num_moe_experts": 8, "moe_token_dispatcher_type": "alltoall", **AFTER_0_19, **changes})


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        (
            {"moe_megakernel_backend": "mok"},
            r"moe_megakernel_backend='mok' is not .* takes the place of every dispatcher",
        ),
        (
            {"moe_megakernel_backend": "fk"},
            r"moe_megakernel_backend='fk' is not .* takes the place of every dispatcher",
        ),
        ({"moe_dispatch_fwd_dtype": "mxfp8"}, r"moe_dispatch_fwd_dtype='mxfp8' .* pass wire=\"mxfp8\""),
        ({"moe_combine_bwd_dtype": "mxfp8"}, r"moe_combine_bwd_dtype='mxfp8' .*gradients travel in their own dtype"),
        ({"moe_hybridep_pad_variable_tokens": True}, "moe_hybridep_pad_variable_tokens=True .*row counts equal"),
        ({"moe_ncclep_use_symm_mem": True}, "moe_ncclep_use_symm_mem=True is not supported. Leave it out"),
        ({"moe_flex_dispatcher_backend": "deepepv2", "moe_token_dispatcher_type": "flex"}, r'Set it to "alltoall"'),
    ],
)
def test_what_goes_around_every_dispatcher_in_core_0_20_is_refused(changes: dict[str, Any], told: str) -> None:
    from moe_dispatch.integrations.megatron.settings import check_settings

    check_settings(later_settings())
    with pytest.raises(ConfigError, match=rf"^MegatronDispatcher: .*{told}"):
        check_settings(later_settings(**changes))


@pytest.mark.parametrize("manager", ["_DeepepV2Manager", "_NCCLEPManager", "_HybridEPManager"])
def test_a_layer_that_was_built_with_a_library_is_refused(manager: str) -> None:
    """Its config may say something else by now."""
    from moe_dispatch.integrations.megatron.layers import replace_dispatcher

    built = type("MoEFlexTokenDispatcher", (), {"_comm_manager": type(manager, (), {})()})()
    text = rf"must be built with Megatron's alltoall.*got MoEFlexTokenDispatcher with {manager}, whose buffers"
    with pytest.raises(ConfigError, match=text):
        replace_dispatcher(SimpleNamespace(config=later_settings(), token_dispatcher=built))
