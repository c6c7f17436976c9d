"""Make a DispatcherConfig from the config of a model."""

from __future__ import annotations

from typing import Any

from moe_dispatch.backends.registry import BackendName
from moe_dispatch.config import DispatcherConfig
from moe_dispatch.errors import ConfigError

# Names that transformers' configs use for our fields. The first name that is set counts.
_NAMES = {
    "num_experts": ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"),
    "top_k": ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "top_k_experts"),
    "hidden_size": ("moe_hidden_size", "moe_latent_size", "hidden_size"),  # experts may be narrower than the model
}


def config_for(
    model_config: Any, *, backend: BackendName | str | dict[str, Any] = "auto", **fields: Any
) -> DispatcherConfig:
    """Return a DispatcherConfig with the num_experts, top_k and hidden_size of a model's config.

    Args:
        model_config: A ``PreTrainedConfig``. If it is multimodal, its text part is used.
        backend: Backend, as in DispatcherConfig.
        **fields: Further fields of DispatcherConfig, which must agree with the model's config. ``infer_layout`` is
            False by default, so that experts raise if they are called outside a forward that ``attach`` hooks.

    Raises:
        ConfigError: A field is neither in the model's config nor in ``fields``, or they disagree.
    """
    said = shape_said(model_config)
    check_agreement("config_for", fields, said, model_config)
    missing = [field for field in _NAMES if field not in said and field not in fields]
    if missing:
        names = ", ".join(name for field in missing for name in _NAMES[field])
        raise ConfigError(
            f"config_for: {type(model_config).__name__} must have {', '.join(missing)}, got none of {names}. If the "
            f"model has experts, pass {', '.join(f'{field}=' for field in missing)}."
        )
    return DispatcherConfig(backend=backend, **{"infer_layout": False, **said, **fields})


def shape_said(model_config: Any) -> dict[str, int]:
    """Return the fields of DispatcherConfig that a model's config has, if it has one number for all layers."""
    text = model_config.get_text_config() if hasattr(model_config, "get_text_config") else model_config
    found = {field: _first_number(text, names) for field, names in _NAMES.items()}
    return {field: number for field, number in found.items() if number is not None}


def check_agreement(where: str, fields: dict[str, Any], said: dict[str, int], model_config: Any) -> None:
    """Raise ConfigError, with both numbers, if ``fields`` and the model's config differ."""
    for field, number in said.items():
        if fields.get(field, number) != number:
            raise ConfigError(
                f"{where}: {field} must be that of the model, got {fields[field]}, and {number} in "
                f"{type(model_config).__name__}. Leave {field} out of config_for(model.config), or use another model."
            )


def _first_number(text: Any, names: tuple[str, ...]) -> int | None:
    for name in names:
        try:
            value = getattr(text, name, None)
        except Exception:  # a config raises if its layers have different numbers
            return None
        if isinstance(value, int) and value > 0:
            return value
    return None
