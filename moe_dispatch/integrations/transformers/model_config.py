"""What a model's config says of its experts."""

from __future__ import annotations

from typing import Any

from moe_dispatch.config import DispatcherConfig
from moe_dispatch.errors import ConfigError

# Our fields by the names that transformers' configs have for them; the first that is there counts.
_NAMES = {
    "num_experts": ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"),
    "top_k": ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k"),
    "hidden_size": ("hidden_size",),
}


def config_for(model_config: Any, *, backend: str | dict[str, Any] = "auto", **fields: Any) -> DispatcherConfig:
    """A DispatcherConfig with what the model's config says: num_experts, top_k and hidden_size.

    Args:
        model_config: a ``PreTrainedConfig``; of a multimodal one its text part.
        backend: as in DispatcherConfig.
        **fields: more of its fields; one that the model's config says too must agree with it. ``infer_layout`` is False
            unless given: experts that are called outside a forward that ``attach`` watches are then refused.

    Raises:
        ConfigError: the model's config does not say a field and it is not given, or both say it differently.
    """
    said = shape_said(model_config)
    check_agreement("config_for", fields, said, model_config)
    missing = [field for field in _NAMES if field not in said and field not in fields]
    if missing:
        names = ", ".join(name for field in missing for name in _NAMES[field])
        raise ConfigError(
            f"config_for: {type(model_config).__name__} must say {', '.join(missing)}, got none of {names}. Pass "
            f"{', '.join(f'{field}=' for field in missing)} if the model has experts."
        )
    return DispatcherConfig(backend=backend, **{"infer_layout": False, **said, **fields})


def shape_said(model_config: Any) -> dict[str, int]:
    """The fields of DispatcherConfig that a model's config has under a known name, with one number for all layers."""
    text = model_config.get_text_config() if hasattr(model_config, "get_text_config") else model_config
    found = {field: _first_number(text, names) for field, names in _NAMES.items()}
    return {field: number for field, number in found.items() if number is not None}


def check_agreement(where: str, fields: dict[str, Any], said: dict[str, int], model_config: Any) -> None:
    """Raise ConfigError, with both numbers, where ``fields`` and the model's config differ."""
    for field, number in said.items():
        if fields.get(field, number) != number:
            raise ConfigError(
                f"{where}: {field} must be that of the model, got {fields[field]}, and {number} in "
                f"{type(model_config).__name__}. Leave it out of config_for(model.config), or take the model it is for."
            )


def _first_number(text: Any, names: tuple[str, ...]) -> int | None:
    for name in names:
        try:
            value = getattr(text, name, None)
        except Exception:  # a config whose layers differ refuses to name one number
            return None
        if isinstance(value, int) and value > 0:
            return value
    return None
