"""Read the sizes of a model from a ``DispatcherConfig`` or from the ``config.json`` of a transformers model."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import torch

from moe_dispatch.config import DispatcherConfig
from moe_dispatch.errors import ConfigError
from moe_dispatch_tools.names import load_config
from moe_dispatch_tools.traces import Trace

DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in (torch.bfloat16, torch.float16, torch.float32)}
# The names of each number in the architectures of transformers 5. The first name that a config has is used.
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
# Names of the number of expert groups, and of the number of groups that a token may use: transformers, and Megatron.
_GROUP_NAMES = (("n_group", "topk_group"), ("moe_router_num_groups", "moe_router_group_topk"))
_MOST_LAYERS = 2**16
_NESTED = ("text_config", "thinker_config", "language_config", "llm_config")


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class GroupLimit:
    """The limit of a router that takes the experts of a token from a few groups of experts only, as in DeepSeek-V3.

    Attributes:
        num_groups: Number of groups. A group holds consecutive experts, and all groups have the same size.
        topk_groups: Number of groups that a token may use: those with the highest scores.
        scored_experts: Number of experts whose scores are added up to the score of their group: its best ones.
    """

    num_groups: int
    topk_groups: int
    scored_experts: int


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Model:
    """Sizes of a model.

    Attributes:
        name: Name of the model or of the file.
        config: Config of its dispatchers.
        layers: Number of layers with experts.
        dtype: Dtype of the rows.
        groups: Limit of the router to a few groups of experts; None for a router without such a limit.
        expert_bytes: Bytes of the three matrices of an expert in ``dtype``; None if the file does not tell its width.
    """

    name: str
    config: DispatcherConfig
    layers: int
    dtype: torch.dtype
    groups: GroupLimit | None = None
    expert_bytes: int | None = None


def read_model(
    path: Path, *, layers: int | None = None, dtype: str | None = None, changes: Mapping[str, Any] | None = None
) -> Model:
    """Read the sizes of a model.

    Args:
        path: Path of a ``.yaml`` or ``.json`` file for ``DispatcherConfig.load``, of a transformers ``config.json``, of
            the folder that holds it, or of a trace.
        layers: Number of layers with experts. By default it is counted in a transformers config, and else 1.
        dtype: Dtype of the rows. By default it is the dtype in a transformers config, and else "bfloat16".
        changes: Fields of the config with other values than in the file.

    Raises:
        ConfigError: The file cannot be read, or a number is missing or wrong.
    """
    if path.suffix == ".safetensors":
        trace = Trace.load(path)
        config = load_config(None, changes or {}, **trace.config.model_dump())
        recorded = next((str(call.parts[0].dtype).removeprefix("torch.") for call in trace.calls), "bfloat16")
        return Model(
            name=path.name, config=config, layers=layers or len(trace.layers) or 1, dtype=_dtype(dtype or recorded)
        )
    path = path / "config.json" if path.is_dir() else path
    found = _transformers_config(path)
    if found is None:
        config = load_config(path, changes or {})
        return Model(name=path.name, config=config, layers=layers or 1, dtype=_dtype(dtype or "bfloat16"))
    text, told = _text_part(found), {**found, **_text_part(found)}
    fields: dict[str, Any] = {name: _number(path, text, name) for name in ("num_experts", "top_k", "hidden_size")}
    config = load_config(None, changes or {}, **fields)
    row_dtype = _dtype(dtype or str(told.get("dtype") or told.get("torch_dtype") or "bfloat16"))
    width = text.get("moe_intermediate_size") or text.get("intermediate_size")
    return Model(
        name=str(found.get("model_type") or next(iter(found.get("architectures") or [path.name]))),
        config=config,
        layers=layers or _count_layers(path, text),
        dtype=row_dtype,
        groups=_group_limit(path, text, config),
        expert_bytes=3 * config.hidden_size * width * row_dtype.itemsize if isinstance(width, int) else None,
    )


def _dtype(name: str) -> torch.dtype:
    if name not in DTYPES:
        raise ConfigError(f"plan: dtype must be one of {', '.join(DTYPES)}, got {name!r}. Give --dtype.")
    return DTYPES[name]


def _transformers_config(path: Path) -> dict[str, Any] | None:
    """Read a transformers config. Return None if the file is a ``DispatcherConfig`` or cannot be read."""
    if path.suffix != ".json":
        return None
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):  # DispatcherConfig.load reports the error
        return None
    return value if isinstance(value, dict) and {"model_type", "architectures"} & value.keys() else None


def _text_part(config: dict[str, Any]) -> dict[str, Any]:
    """Return the part of the config with the experts: the language model, for a model of images or sound too."""
    if any(name in config for name in _NAMES["num_experts"]):
        return config
    nested = next((config[name] for name in _NESTED if isinstance(config.get(name), dict)), None)
    return config if nested is None else _text_part(nested)


def _number(path: Path, config: dict[str, Any], field: str) -> int:
    names = _NAMES[field]
    value = next((config[name] for name in names if config.get(name) is not None), None)
    if isinstance(value, list) and value and value.count(value[0]) == len(value):  # a number for each layer
        value = value[0]
    if not isinstance(value, int) or value < 1:
        raise ConfigError(
            f"plan: {path} must have a whole number under {' or '.join(names)}, got {value!r}. If the model has "
            "experts, write num_experts, top_k and hidden_size in a .yaml file."
        )
    return value


def _group_limit(path: Path, text: dict[str, Any], config: DispatcherConfig) -> GroupLimit | None:
    """Read the limit of the router to groups of experts; None if the router may use all groups."""
    for names in _GROUP_NAMES:
        groups, allowed = (text.get(name) for name in names)
        if groups is None and allowed is None:
            continue
        if allowed == groups or text.get("topk_method") == "greedy":
            return None
        experts, top_k = config.num_experts, config.top_k
        if (
            not (isinstance(groups, int) and isinstance(allowed, int))
            or not 1 <= allowed <= groups
            or experts % groups
            or allowed * (experts // groups) < top_k
        ):
            raise ConfigError(
                f"plan: {path} must have {names[0]} that divides num_experts ({experts}) into groups, and "
                f"{names[1]} groups that hold top_k ({top_k}) experts, got {groups!r} and {allowed!r}. Correct "
                "them, or leave out both."
            )
        scored = 1 if text.get("topk_method") == "group_limited_greedy" else 2  # DeepSeek-V2, or V3
        if "moe_router_num_groups" in text:
            scored = max(top_k // allowed, 1)
        return GroupLimit(num_groups=groups, topk_groups=allowed, scored_experts=min(scored, experts // groups))
    return None


def _count_layers(path: Path, config: dict[str, Any]) -> int:
    """Count the layers with experts."""
    total = _number(path, config, "layers")
    if total > _MOST_LAYERS:
        raise ConfigError(f"plan: {path} must have at most {_MOST_LAYERS} layers, got {total}. Give --layers.")
    try:
        found = sum(_has_experts(config, layer) for layer in range(total))
    except (TypeError, IndexError, ValueError) as error:
        raise ConfigError(
            f"plan: {path} must say for each of {total} layers whether it has experts, got fields that do not: "
            f"{error}. Give --layers."
        ) from error
    if not found:
        raise ConfigError(f"plan: {path} must have a layer with experts, got none of {total}. Give --layers.")
    return found


def _has_experts(config: dict[str, Any], layer: int) -> bool:
    """Apply the rules of transformers 5. A config may have several rules. A layer with experts obeys all of them."""
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
