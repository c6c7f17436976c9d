"""Models as transformers and our own files tell them. Numbers are of published configs, shortened."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from moe_dispatch.errors import ConfigError
from moe_dispatch_tools.plan.models import read_model

QWEN3: dict[str, Any] = {
    **{"model_type": "qwen3_moe", "num_experts": 128, "num_experts_per_tok": 8, "hidden_size": 2048},
    **{"num_hidden_layers": 48, "decoder_sparse_step": 1, "mlp_only_layers": [], "torch_dtype": "bfloat16"},
}
MIXTRAL: dict[str, Any] = {
    **{"model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2, "hidden_size": 4096},
    **{"num_hidden_layers": 32, "dtype": "float16"},
}
DEEPSEEK: dict[str, Any] = {
    **{"architectures": ["DeepseekV3ForCausalLM"], "n_routed_experts": 256, "num_experts_per_tok": 8},
    **{"hidden_size": 7168, "num_hidden_layers": 61, "first_k_dense_replace": 3, "moe_layer_freq": 1},
}
ERNIE: dict[str, Any] = {
    **{"model_type": "ernie4_5_moe", "moe_num_experts": 64, "moe_k": 6, "hidden_size": 2560, "num_hidden_layers": 28},
    **{"moe_layer_start_index": 1, "moe_layer_end_index": 27, "moe_layer_interval": 1},
}
LLAMA4: dict[str, Any] = {
    "model_type": "llama4",
    "torch_dtype": "bfloat16",
    "text_config": {
        "num_local_experts": 128,
        "num_experts_per_tok": 1,
        "hidden_size": 5120,
        "num_hidden_layers": 48,
        "interleave_moe_layer_step": 2,
    },
    "vision_config": {"hidden_size": 1408, "num_hidden_layers": 34},
}
JAMBA: dict[str, Any] = {
    **{"model_type": "jamba", "num_experts": 16, "num_experts_per_tok": 2, "hidden_size": 4096},
    **{"num_hidden_layers": 32, "expert_layer_period": 2, "expert_layer_offset": 1},
}
GROUPED = {**DEEPSEEK, "n_group": 8, "topk_group": 4, "topk_method": "noaux_tc"}


def written(folder: Path, value: Any, name: str = "config.json") -> Path:
    path = folder / name
    path.write_text(value if isinstance(value, str) else json.dumps(value))
    return path


@pytest.mark.parametrize(
    ("config", "sizes", "layers"),
    [
        (QWEN3, (128, 8, 2048), 48),
        ({**QWEN3, "decoder_sparse_step": 2, "mlp_only_layers": [1, 2]}, (128, 8, 2048), 23),
        (MIXTRAL, (8, 2, 4096), 32),
        (DEEPSEEK, (256, 8, 7168), 58),
        ({**DEEPSEEK, "moe_layer_freq": 2}, (256, 8, 7168), 29),
        ({**DEEPSEEK, "moe_layer_freq": [0] * 21 + [1] * 40}, (256, 8, 7168), 40),
        ({**DEEPSEEK, "mlp_layer_types": ["dense"] * 11 + ["sparse"] * 50}, (256, 8, 7168), 50),
        (ERNIE, (64, 6, 2560), 27),
        ({**ERNIE, "moe_num_experts": [64, 64], "moe_layer_end_index": -1, "moe_layer_interval": 2}, (64, 6, 2560), 14),
        (LLAMA4, (128, 1, 5120), 24),
        ({**LLAMA4, "text_config": {**LLAMA4["text_config"], "moe_layers": [3, 7]}}, (128, 1, 5120), 2),
        ({"model_type": "omni", "thinker_config": {"text_config": QWEN3}}, (128, 8, 2048), 48),
        ({**QWEN3, "num_dense_layers": 2}, (128, 8, 2048), 46),
        (JAMBA, (16, 2, 4096), 16),
    ],
)
def test_transformers_configs(config: dict[str, Any], sizes: tuple[int, ...], layers: int, tmp_path: Path) -> None:
    model = read_model(written(tmp_path, config))
    found = model.config
    assert (found.num_experts, found.top_k, found.hidden_size) == sizes
    assert model.layers == layers


def test_dtype_and_name_of_a_model(tmp_path: Path) -> None:
    assert read_model(written(tmp_path, MIXTRAL)).dtype == torch.float16
    assert read_model(written(tmp_path, LLAMA4)).dtype == torch.bfloat16
    assert read_model(written(tmp_path, DEEPSEEK)).name == "DeepseekV3ForCausalLM"
    assert read_model(tmp_path).name == "DeepseekV3ForCausalLM"  # the folder of a model
    model = read_model(tmp_path, layers=2, dtype="float32", changes={"pad_multiple": "fp8", "top_k": 4})
    assert (model.layers, model.dtype, model.config.pad_multiple, model.config.top_k) == (2, torch.float32, "fp8", 4)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"model_type": "llama"}, r"under num_experts or .*, got None"),
        ({**QWEN3, "num_experts_per_tok": None}, r"under num_experts_per_tok or .*, got None"),
        ({**QWEN3, "hidden_size": "2048"}, r"under hidden_size or d_model, got '2048'"),
        ({**ERNIE, "moe_num_experts": [64, 32]}, r"under num_experts or .*, got \[64, 32\]"),
        ({**QWEN3, "num_hidden_layers": 10**9}, r"must have at most 65536 layers, got 1000000000"),
        ({**QWEN3, "mlp_layer_types": ["sparse"]}, r"must say for each of 48 layers whether it has experts"),
        ({**QWEN3, "num_hidden_layers": 0}, r"under num_hidden_layers or .*, got 0"),
        ({**QWEN3, "mlp_only_layers": [*range(48)]}, r"must have a layer with experts, got none of 48"),
        ({**QWEN3, "torch_dtype": "int8"}, r"dtype must be one of bfloat16, float16, float32, got 'int8'"),
        ({**QWEN3, "num_experts_per_tok": 129}, r"top_k \(129\) must not exceed num_experts \(128\)"),
        ({**GROUPED, "n_group": 7}, r"n_group that divides num_experts \(256\) .*, got 7 and 4"),
        ({**GROUPED, "n_group": 64, "topk_group": 1}, r"topk_group groups that hold top_k \(8\) experts, got 64 and 1"),
        ({**GROUPED, "topk_group": 9}, r"got 8 and 9"),
        ({**GROUPED, "topk_group": None}, r"got 8 and None"),
        ({**GROUPED, "n_group": "8"}, r"got '8' and 4"),
        ("{", r"config\.json: .*line 1"),
        ({"num_experts": 8}, r"top_k: Field required"),
        (None, r"cannot read .*config\.json: .*No such file"),
    ],
)
def test_what_is_missing_or_does_not_fit_is_named(value: Any, message: str, tmp_path: Path) -> None:
    path = tmp_path / "config.json" if value is None else written(tmp_path, value)
    with pytest.raises(ConfigError, match=message):
        read_model(path)


DEEPSEEK_V2 = {**DEEPSEEK, "n_routed_experts": 160, "num_experts_per_tok": 6, "n_group": 8, "topk_group": 3}


@pytest.mark.parametrize(
    ("config", "groups"),
    [
        (GROUPED, (8, 4, 2)),
        ({**DEEPSEEK_V2, "topk_method": "group_limited_greedy"}, (8, 3, 1)),
        ({**DEEPSEEK_V2, "topk_method": "greedy"}, None),
        ({**DEEPSEEK, "n_group": 1, "topk_group": 1}, None),
        ({**DEEPSEEK, "n_group": None, "topk_group": None}, None),
        ({**GROUPED, "n_group": 256, "topk_group": 8}, (256, 8, 1)),
        ({**DEEPSEEK, "moe_router_num_groups": 8, "moe_router_group_topk": 2}, (8, 2, 4)),
        ({"model_type": "vl", "text_config": GROUPED}, (8, 4, 2)),
        (DEEPSEEK, None),
    ],
)
def test_groups_of_experts(config: dict[str, Any], groups: tuple[int, ...] | None, tmp_path: Path) -> None:
    """DeepSeek-V3 adds the best two scores of a group, V2 takes the best one, Megatron the best top_k / topk_group."""
    found = read_model(written(tmp_path, config)).groups
    assert (found and (found.num_groups, found.topk_groups, found.scored_experts)) == groups
