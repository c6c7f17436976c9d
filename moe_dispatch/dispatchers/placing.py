"""Place experts in the expert slots of the ranks: check the placement on each rank, and compare it between ranks."""

from __future__ import annotations

import torch

from moe_dispatch.balance.placement import EMPTY, ExpertPlacement
from moe_dispatch.communication import device_types, raise_alike
from moe_dispatch.dispatchers.channel import Channel, Lease
from moe_dispatch.errors import ConfigError


def place(lease: Lease, placement: ExpertPlacement, device: torch.device) -> None:
    """Run ``Dispatcher.place``. Collective: a small all-reduce.

    Raises:
        ConfigError: The placement does not fit the dispatcher.
        InputError: The placements of the ranks differ. Raised on every rank.
        PeerError: Another rank has a placement that does not fit.
    """
    channel, problem, facts = lease.channel, None, {}
    try:
        if channel.config.balance is not None:
            raise ConfigError(
                f"Dispatcher.place: the config must have balance=None, got balance={channel.config.balance!r}, which "
                "plans a placement for each dispatch. Leave balance or this call out."
            )
        check_placement("Dispatcher.place", channel, placement)
        facts = facts_of(placement)
    except ConfigError as error:
        problem = error
    raise_alike(channel.control, problem, facts=facts, of_call=True, label="place")
    lease.place(placement, device)


def facts_of(placement: ExpertPlacement) -> dict[str, list[int]]:
    """Return the parts of a placement that must be equal on all ranks, with names for an error."""
    return {f"the expert slots of rank {rank}": list(slots) for rank, slots in enumerate(placement.slots)}


def check_placement(where: str, channel: Channel, placement: ExpertPlacement) -> None:
    """Refuse a placement that does not fit a channel.

    Raises:
        ConfigError: The value is no placement, its numbers differ from the channel's, or a rank has no expert and the
            backend does not allow it.
    """
    if not isinstance(placement, ExpertPlacement):
        raise ConfigError(
            f"{where}: placement must be an ExpertPlacement, got {type(placement).__name__}. "
            "Pass moe_dispatch.balance.ExpertPlacement(num_experts, slots)."
        )
    config, shape = channel.config, channel.shape
    if placement.num_experts != config.num_experts:
        raise ConfigError(
            f"{where}: the placement must have num_experts ({config.num_experts}), got {placement.num_experts}. "
            "Make it for this model."
        )
    if placement.num_ranks != shape.ep_size:
        raise ConfigError(
            f"{where}: the placement must have ep_size ({shape.ep_size}) ranks, got {placement.num_ranks}. "
            "Make it for this group."
        )
    if placement.slots_per_rank != shape.num_local_experts:
        raise ConfigError(
            f"{where}: every rank must have {shape.num_local_experts} expert slots (num_experts / ep_size + "
            f"spare_experts_per_rank), got {placement.slots_per_rank}. Set spare_experts_per_rank to "
            f"{max(placement.slots_per_rank - config.num_experts // shape.ep_size, 0)}, or use another placement."
        )
    idle = [rank for rank, slots in enumerate(placement.slots) if all(expert == EMPTY for expert in slots)]
    if idle and not channel.needs.idle_ranks:
        raise ConfigError(
            f"{where}: backend {channel.backend_name!r} needs an expert on every rank, got none on rank {idle[0]}. "
            "Put an expert there, or use another backend."
        )


def device_of_tables(channel: Channel, device: torch.device | str | None) -> torch.device:
    """Return the device for tables: the given one, the config's, CUDA if the group exchanges its tensors, else CPU."""
    chosen = device or channel.config.device
    if chosen is None:
        chosen = "cuda" if "cuda" in device_types(channel.communicator.group) and torch.cuda.is_available() else "cpu"
    return torch.device(chosen)
