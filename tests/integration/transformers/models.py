"""Tiny random models of the real classes, and batches with padding."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any, Literal, final

import torch
from torch import Tensor

VOCABULARY = 61
EXPERTS, TOP_K, HIDDEN, LAYERS = 8, 2, 32, 2

_COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": HIDDEN,
    "intermediate_size": 48,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "num_experts_per_tok": TOP_K,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}
_MOE = {"num_experts": EXPERTS, "moe_intermediate_size": 16}
_FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_moe": {**_MOE, "head_dim": 8, "norm_topk_prob": True},
    "mixtral": {"num_local_experts": EXPERTS, "head_dim": 8},
    "deepseek_v3": {
        "n_routed_experts": EXPERTS,
        "moe_intermediate_size": 16,
        "n_shared_experts": 1,
        "first_k_dense_replace": 0,
        "n_group": 2,
        "topk_group": 1,
        "kv_lora_rank": 8,
        "q_lora_rank": 8,
        "qk_rope_head_dim": 4,
        "qk_nope_head_dim": 8,
        "v_head_dim": 8,
    },
    "qwen3_5_moe_text": {
        **_MOE,
        "shared_expert_intermediate_size": 16,
        "head_dim": 8,
        "layer_types": ["linear_attention", "full_attention"],
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
    },
}
FAMILIES = tuple(_FAMILIES)
# For every other family, under all names that their configs use. A config takes the names that it has.
_SIZES: dict[str, Any] = {
    **_COMMON,
    **_MOE,
    **dict.fromkeys(("num_local_experts", "n_routed_experts", "moe_num_experts"), EXPERTS),
    **dict.fromkeys(("moe_k", "moe_topk", "top_k_experts"), TOP_K),
    **dict.fromkeys(("routed_scaling_factor", "route_scale", "router_scaling_factor"), 2.5),
    **dict.fromkeys(("first_k_dense_replace", "num_dense_layers", "moe_layer_start_index"), 0),
    **dict.fromkeys(("head_dim", "qk_nope_head_dim", "v_head_dim", "kv_lora_rank", "q_lora_rank"), 8),
    "qk_rope_head_dim": 4,
    "n_group": 2,
    "topk_group": 1,
    "shared_expert_intermediate_size": 16,
    "layer_types": ["full_attention"] * LAYERS,
    "mlp_layer_types": ["sparse"] * LAYERS,
    "enable_moe_block": True,
    "vocab_size_per_layer_input": VOCABULARY,
    "hidden_size_per_layer_input": 8,
}


def config_of(family: str, **changes: Any) -> Any:
    from transformers import AutoConfig
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    if family in _FAMILIES:
        return AutoConfig.for_model(family, **{**_COMMON, **_FAMILIES[family], **changes})
    known = {*inspect.signature(CONFIG_MAPPING[family].__init__).parameters, *CONFIG_MAPPING[family].attribute_map}
    sizes = {name: value for name, value in _SIZES.items() if name in known}
    return AutoConfig.for_model(family, **{**sizes, **changes})


def build(family: str, *, dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    """An unsharded model, the same on every rank."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(7)
    model = AutoModelForCausalLM.from_config(config_of(family, **changes))
    with torch.no_grad():
        for parameter in model.parameters():  # as initialised, outputs of experts would vanish beside the rest
            parameter.normal_(0, 0.2)
    return model.to(dtype)


@final
@dataclass(frozen=True, kw_only=True)
class Batch:
    """What one rank trains on; ``num_real`` real tokens in each sequence."""

    input_ids: Tensor
    attention_mask: Tensor
    labels: Tensor

    @property
    def num_real(self) -> int:
        return int(self.attention_mask.sum())


def draw_batch(seed: int, lengths: list[int], width: int, side: Literal["left", "right", "holes"]) -> Batch:
    """Sequences of the given lengths in rows of ``width``; with "holes" some positions inside are masked too."""
    generator = torch.Generator().manual_seed(seed)
    shape = (len(lengths), width)
    ids = torch.randint(3, VOCABULARY, shape, generator=generator)
    positions, lengths_B1 = torch.arange(width), torch.tensor(lengths)[:, None]
    real = positions >= width - lengths_B1 if side == "left" else positions < lengths_B1
    if side == "holes":
        real &= positions % 3 != 1
    # A label behind padding would be predicted from a row that is none.
    predicted = real & torch.nn.functional.pad(real[:, :-1], (1, 0))
    return Batch(
        input_ids=torch.where(real, ids, 0), attention_mask=real.long(), labels=torch.where(predicted, ids, -100)
    )


# Unequal batches: one padded on the right, one on the left, one with holes, and one without a single real token.
BATCHES = (
    draw_batch(0, [5, 9, 1], 9, "right"),
    draw_batch(1, [7, 3], 8, "left"),
    draw_batch(2, [0, 0], 4, "right"),
    draw_batch(3, [11, 6], 12, "holes"),
)
# New tokens follow the last position, so prompts are padded on the left.
PROMPTS = (draw_batch(4, [5, 2, 6], 6, "left"), BATCHES[1])
