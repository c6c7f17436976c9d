"""Refuse configs whose expert slots an integration cannot fill."""

from __future__ import annotations

from moe_dispatch.config import DispatcherConfig
from moe_dispatch.errors import ConfigError


def refuse_spare_slots(where: str, config: DispatcherConfig) -> None:
    """Refuse spare expert slots. The experts of a framework are those that a rank owns, without copies.

    Raises:
        ConfigError: The config has spare expert slots.
    """
    if config.spare_experts_per_rank:
        raise ConfigError(
            f"{where}: spare_experts_per_rank must be 0, because this integration runs the experts that a rank owns, "
            f"got {config.spare_experts_per_rank}. Leave it and balance out, or call a Dispatcher with SlotWeights."
        )
