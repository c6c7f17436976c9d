"""Views of an experts module that hold the weights of expert slots, for frameworks whose experts are one module."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from moe_dispatch.config import DispatcherConfig
from moe_dispatch.errors import ConfigError


def has_spare_slots(config: DispatcherConfig) -> bool:
    """Return whether experts may run with the weights of other ranks."""
    return config.balance is not None or config.spare_experts_per_rank > 0


def own_weights(where: str, experts: nn.Module) -> dict[str, Tensor]:
    """Return the weights of the experts of a module, by name.

    Raises:
        ConfigError: A submodule holds weights, as with adapters or a module for each expert; or dtypes differ, as with
            quantised experts.
    """
    weights: dict[str, Tensor] = dict(experts.named_parameters(recurse=False))
    deeper = [name for name, _ in experts.named_parameters() if name not in weights]
    dtypes = sorted({str(weight.dtype) for weight in weights.values()})
    if deeper or len(dtypes) != 1:
        told = f"weights like {deeper[0]}" if deeper else f"{', '.join(dtypes) or 'no weights'}"
        raise ConfigError(
            f"{where}: with balance or spare expert slots, {type(experts).__name__} itself must hold all weights of "
            f"its experts, with one dtype, got {told}. Leave balance and spare_experts_per_rank out."
        )
    return weights


def view_of(experts: nn.Module, weights: Mapping[str, Any], **attributes: Any) -> Any:
    """Return a view of a module with other parameters and attributes. It shares the rest, and has no state of its own.

    ``copy.copy`` would run the constructor of modules under FSDP2.
    """
    view = object.__new__(type(experts))
    vars(view).update(vars(experts), _parameters={**experts._parameters, **weights}, **attributes)
    return view
