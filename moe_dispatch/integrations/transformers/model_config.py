"""Make a DispatcherConfig from the config of a model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from moe_dispatch.backends.registry import BackendName
from moe_dispatch.config import DispatcherConfig
from moe_dispatch.errors import ConfigError, shown

# Names that transformers' configs use for our fields. The first name that is set counts.
_NAMES = {
    "num_experts": ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"),
    "top_k": ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "top_k_experts"),
    "hidden_size": ("moe_hidden_size", "moe_latent_size", "hidden_size"),  # experts may be narrower than the model
}


def config_for(
    model_config: Any, *, backend: BackendName | str | Mapping[str, Any] = "auto", **fields: Any
) -> DispatcherConfig:
    """Return a DispatcherConfig with the num_experts, top_k and hidden_size of a model's config.

    Args:
        model_config: A ``PreTrainedConfig``. If it is multimodal, its text part is used.
        backend: Backend, as in DispatcherConfig.
        **fields: Further fields of DispatcherConfig, which must agree with the model's config. ``infer_layout`` is
            False by default, so that experts raise if they are called outside a forward that ``attach`` hooks.

    Raises:
        ConfigError: A field is neither in the model's config nor in ``fields``; or they disagree; or the layers of the
            model have different numbers, and ``fields`` does not choose one.
    """
    said = shape_said(model_config)
    check_agreement("config_for", fields, said, model_config)
    kind = type(model_config).__name__
    for field, (name, numbers) in said.items():
        if field not in fields and len({*numbers}) > 1:
            raise ConfigError(
                f"config_for: {name} of {kind} must be one number, got a number for each layer, {shown([*numbers])}. "
                f"Pass {field}= with the number of the layers that this config is for, such as {field}={numbers[0]}, "
                "and make a config for each of the other numbers."
            )
    missing = [field for field in _NAMES if field not in said and field not in fields]
    if missing:
        raise ConfigError(
            f"config_for: {kind} must have {', '.join(missing)}, got {_found(model_config, missing)}. If the model has "
            f"experts, pass {', '.join(f'{field}=' for field in missing)}."
        )
    found = {field: numbers[0] for field, (_, numbers) in said.items()}
    return DispatcherConfig(backend=backend, **{"infer_layout": False, **found, **fields})


def shape_said(model_config: Any) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Return the fields of DispatcherConfig that a model's config has.

    Returns:
        For each field, the name that the model's config uses, and the number: several, by layer, if layers differ.
    """
    text = _text(model_config)
    found = {field: _first_numbers(text, names) for field, names in _NAMES.items()}
    return {field: said for field, said in found.items() if said is not None}


def check_agreement(
    where: str, fields: dict[str, Any], said: dict[str, tuple[str, tuple[int, ...]]], model_config: Any
) -> None:
    """Raise ConfigError, with both numbers, if ``fields`` and the model's config differ."""
    for field, (_, numbers) in said.items():
        if field in fields and fields[field] not in numbers:
            way_out = "Pass one of these" if len(numbers) > 1 else f"Leave {field} out of config_for(model.config)"
            raise ConfigError(
                f"{where}: {field} must be that of the model, got {fields[field]}, and "
                f"{' or '.join(map(str, dict.fromkeys(numbers)))} in {type(model_config).__name__}. {way_out}, or use "
                "another model."
            )


def _text(model_config: Any) -> Any:
    return model_config.get_text_config() if hasattr(model_config, "get_text_config") else model_config


def _first_numbers(text: Any, names: tuple[str, ...]) -> tuple[str, tuple[int, ...]] | None:
    """Return the first name that stands for a number, or for one of each layer, and the number or numbers."""
    for name in names:
        value = _value(text, name)
        # A number for each layer may be 0 or None for a layer without experts.
        numbers = tuple(filter(None, value)) if isinstance(value, list | tuple) else (value,)
        if numbers and all(isinstance(number, int) and number > 0 for number in numbers):
            return name, numbers[:1] if len({*numbers}) == 1 else numbers
    return None


def _value(text: Any, name: str) -> Any:
    """Return an attribute of a config, as a list by layer if transformers holds a config for each layer."""
    try:
        return getattr(text, name, None)
    except Exception:  # transformers raises if the layers have configs of their own
        return [getattr(layer, name, None) for layer in text.per_layer_config]


def _found(model_config: Any, fields: list[str]) -> str:
    """Return a text with what a model's config has in place of the numbers of some fields: wrong values, or nothing."""
    names = [name for field in fields for name in _NAMES[field]]
    values = {name: _value(_text(model_config), name) for name in names}
    wrong = [f"{name}={shown(value)}" for name, value in values.items() if value is not None]
    return ", ".join(wrong) or f"none of {', '.join(names)}"
