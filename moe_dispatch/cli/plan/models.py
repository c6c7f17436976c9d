"""A model's sizes, from a config of ours or the ``config.json`` of a transformers model."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import torch

from moe_dispatch.config import DispatcherConfig
from moe_dispatch.errors import ConfigError

DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in (torch.bfloat16, torch.float16, torch.float32)}
# Names of the same number in architectures of transformers 5. The first name that a config has counts.
_NAMES = {
    "num_experts": (
        "num_experts",
        "num_local_experts",
        "n_routed_experts",
        "moe_num_experts",
        "num_routed_experts",
    ),
    "top_k": ("num_experts_per_tok", "num_experts_per_token", "moe_k", "moe_topk", "moe_top_k", "top_k_experts"),
    "hidden_size": ("hidden_size", "d_model"),
    "layers": ("num_hidden_layers", "num_layers", "n_layers"),
}
_NESTED = ("text_config", "thinker_config", "language_config", "llm_config")


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Model:
    """Sizes of a model.

    Attributes:
        name: name for people.
        config: config of its dispatchers.
        layers: number of layers with experts.
        dtype: dtype of the rows.
    """

    name: str
    config: DispatcherConfig
    layers: int
    dtype: torch.dtype


def read_model(
    path: Path, *, layers: int | None = None, dtype: str | None = None, changes: Mapping[str, Any] | None = None
) -> Model:
    """Read a model's sizes.

    Args:
        path: ``.yaml`` or ``.json`` file that ``DispatcherConfig.load`` reads, or a transformers ``config.json`` or its
            folder.
        layers: number of layers with experts; by default counted in a transformers config, else 1.
        dtype: dtype of the rows; by default that of a transformers config, else "bfloat16".
        changes: other values of fields of the config.

    Raises:
        ConfigError: the file cannot be read, or a number is missing or wrong.
    """
    path = path / "config.json" if path.is_dir() else path
    found = _transformers_config(path)
    if found is None:
        config = DispatcherConfig.load(path, **(changes or {}))
        return Model(name=path.name, config=config, layers=layers or 1, dtype=_dtype(dtype or "bfloat16"))
    text, told = _text_part(found), {**found, **_text_part(found)}
    fields = {name: _number(path, text, name) for name in ("num_experts", "top_k", "hidden_size")}
    return Model(
        name=str(found.get("model_type") or found["architectures"][0]),
        config=DispatcherConfig.load(**{**fields, **(changes or {})}),
        layers=layers or _count_layers(path, text),
        dtype=_dtype(dtype or str(told.get("dtype") or told.get("torch_dtype") or "bfloat16")),
    )


def _dtype(name: str) -> torch.dtype:
    if name not in DTYPES:
        raise ConfigError(f"plan: dtype must be one of {', '.join(DTYPES)}, got {name!r}. Give --dtype.")
    return DTYPES[name]


def _transformers_config(path: Path) -> dict[str, Any] | None:
    """Read a transformers config; None if the file is a config of ours or cannot be read."""
    if path.suffix != ".json":
        return None
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):  # DispatcherConfig.load says what is wrong
        return None
    return value if isinstance(value, dict) and {"model_type", "architectures"} & value.keys() else None


def _text_part(config: dict[str, Any]) -> dict[str, Any]:
    """Return the part with the experts: that of the language model, if the model takes images or sound too."""
    if any(name in config for name in _NAMES["num_experts"]):
        return config
    nested = next((config[name] for name in _NESTED if isinstance(config.get(name), dict)), None)
    return config if nested is None else _text_part(nested)


def _number(path: Path, config: dict[str, Any], field: str) -> int:
    names = _NAMES[field]
    value = next((config[name] for name in names if config.get(name) is not None), None)
    if isinstance(value, list) and value and value.count(value[0]) == len(value):  # one number for each layer
        value = value[0]
    if not isinstance(value, int) or value < 1:
        raise ConfigError(
            f"plan: {path} must have a whole number under {' or '.join(names)}, got {value!r}. Is it a model with "
            f"experts? If so, write num_experts, top_k and hidden_size in a .yaml file."
        )
    return value


def _count_layers(path: Path, config: dict[str, Any]) -> int:
    """Count the layers with experts."""
    total = _number(path, config, "layers")
    found = sum(_has_experts(config, layer) for layer in range(total))
    if not found:
        raise ConfigError(f"plan: {path} must have a layer with experts, got none of {total}. Give --layers.")
    return found


def _has_experts(config: dict[str, Any], layer: int) -> bool:
    """Apply the rules of transformers 5. A config may have several rules, and all must hold."""
    kinds, listed, every = (config.get(name) for name in ("mlp_layer_types", "moe_layers", "moe_layer_freq"))
    if kinds:
        return bool(kinds[layer] == "sparse")
    if listed is not None:
        return layer in listed
    if isinstance(every, list):
        return bool(every[layer])
    first = max(
        config.get(name) or 0 for name in ("first_k_dense_replace", "num_dense_layers", "moe_layer_start_index")
    )
    end = config.get("moe_layer_end_index")
    steps = [
        config.get(name) or 1 for name in ("decoder_sparse_step", "interleave_moe_layer_step", "moe_layer_interval")
    ]
    return (
        first <= layer
        and (end in (None, -1) or layer <= end)
        and layer not in (config.get("mlp_only_layers") or ())
        and all((layer + 1) % step == 0 for step in steps)
        and layer % (every or 1) == 0
        and layer % (config.get("expert_layer_period") or 1) == (config.get("expert_layer_offset") or 0)
    )
