"""Place experts in the expert slots of the ranks: for many dispatches, or for one by a planner from its counts."""

from __future__ import annotations

import torch
from torch import Tensor

from moe_dispatch.balance.exact import EXACT, ExactPlacement, ExactPlanner
from moe_dispatch.balance.placement import EMPTY, ExpertPlacement
from moe_dispatch.balance.planners import is_built_in, run_planner
from moe_dispatch.balance.slot_table import slots_of
from moe_dispatch.communication import device_types, own_device, raise_alike, read_host
from moe_dispatch.dispatchers.agreement import REFUSED
from moe_dispatch.dispatchers.channel import Channel, Lease, logger, profiler_range
from moe_dispatch.errors import ConfigError, PeerError
from moe_dispatch.permutation import count_experts

_FAR = 1.1  # times the mean rows of a rank


def place(lease: Lease, placement: ExpertPlacement, device: torch.device) -> None:
    """Run ``Dispatcher.place``. Collective: a small all-reduce.

    Raises:
        ConfigError: The placement does not fit the dispatcher.
        InputError: The placements of the ranks differ. Raised on every rank.
        PeerError: Another rank has a placement that does not fit.
    """
    channel, problem, facts = lease.enter(), None, {}
    try:
        if channel.config.balance is not None:
            raise ConfigError(
                f"Dispatcher.place: the config must have balance=None, got balance={channel.config.balance!r}, which "
                "plans a placement for each dispatch. Leave balance or this call out."
            )
        check_placement("Dispatcher.place", channel, placement)
        facts = facts_of_placement(placement)
    except ConfigError as error:
        problem = error
    raise_alike(channel.control, problem, facts=facts, of_call=True, label="place")
    lease.place(placement, device)


def facts_of_placement(placement: ExpertPlacement) -> dict[str, list[int]]:
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
    own = own_device(channel.communicator.group, chosen)
    return torch.empty(0, device=own).device  # with its number, as tensors have it


def plan_balance(channel: Channel, ids_TK: Tensor) -> tuple[ExpertPlacement | ExactPlacement, Tensor, Tensor]:
    """Plan a dispatch under ``balance``. Collective; call with gradients off.

    Args:
        channel: Channel of the dispatcher; its config has ``balance``.
        ids_TK: Valid ids of the rows that are sent, int64 (T, K).

    Returns:
        The placement; the expert in each slot of this rank, int64 (L,), or E for an empty one; and the numbers of the
        slots that take the place of the ids, int64 (T, K).

    Raises:
        ConfigError: The planner raises, or its placement does not fit.
        InputError: The placements of the ranks differ. Raised on every rank.
        PeerError: Another rank refused its call, or has a planner that raises.

    Cost: in graph-safe mode, one all-gather of E integers of the device and no host sync. Otherwise one host sync, and
    one all-gather of E+1 integers on the control group. With ``debug``, or a planner of another package, also an
    all-reduce of three integers.
    """
    config, size = channel.config, channel.communicator.size
    with profiler_range("balance"):
        if config.graph_safe:
            planner = channel.planner(ids_TK.device)
            if size == 1:
                plan = planner.nothing
                return plan.placement, plan.experts_L, plan.slots_of(ids_TK)
            counts_E, turns_TK = planner.counts_and_turns(ids_TK)
            everyone = counts_E.new_empty(size * config.num_experts)
            channel.communicator.all_gather(everyone, counts_E, label="balance")
            plan = planner(everyone.view(size, -1))
            return plan.placement, plan.experts_L, plan.slots_of(ids_TK, turns_TK)
        counts_E = count_experts(ids_TK, config.num_experts)
        mine = torch.tensor([len(ids_TK), *read_host(counts_E)], dtype=torch.int64, device="cpu")
        everyone = channel.control.gather_tensor(mine, label="balance")
        if refusing := [rank for rank, count in enumerate(everyone[:, 0].tolist()) if count == REFUSED]:
            raise_alike(channel.control, None, label="refusal")
            raise PeerError(f"Dispatcher.dispatch: ranks {refusing} refused their call.")
        if config.balance == EXACT:
            planner = channel.planner(ids_TK.device)
            plan, is_uneven = planner.on_host(everyone[:, 1:])
            if is_uneven:
                _note_uneven(channel, everyone[:, 1:], planner, plan.loads_P)
            plan = plan.to(ids_TK.device)
            return plan.placement, plan.experts_L, plan.slots_of(ids_TK)
        return _run_planner(channel, everyone[:, 1:], ids_TK)


def _note_uneven(channel: Channel, counts_PE: Tensor, planner: ExactPlanner, loads_P: Tensor | None) -> None:
    """Count a dispatch in which copies would have had too few rows. Warn once, if it is far from even.

    ``loads_P`` are the rows of each rank if other copies are made, else None.
    """
    channel.meter.count_rows(uneven=1)
    loads_P = counts_PE.sum(0).view(len(counts_PE), -1).sum(1) if loads_P is None else loads_P
    times = float(loads_P.max() / loads_P.double().mean())
    if times < _FAR or channel.has_warned or channel.communicator.rank:
        return
    channel.has_warned, left_out = True, planner(counts_PE).left_out
    assert left_out is not None
    logger.warning(
        'balance="exact" has left out %d copies of experts in a dispatch of %d rows, because each would have had fewer '
        "than balance_min_rows (%d) rows. The busiest rank has %.2f times the mean rows. balance_min_rows=0 makes "
        "every copy. This is said once; metrics().dispatches_left_uneven counts such dispatches.",
        int(left_out),
        int(counts_PE.sum()),
        planner.min_rows,
        times,
    )


def _run_planner(channel: Channel, counts_PE: Tensor, ids_TK: Tensor) -> tuple[ExpertPlacement, Tensor, Tensor]:
    """Plan with a planner of the host.

    The planners of this package give the same placement on all ranks, because all ranks have the same counts. A planner
    of another package may fail on one rank, so ranks compare its results.
    """
    config, name = channel.config, channel.config.balance
    assert name is not None
    home = ExpertPlacement.contiguous(
        config.num_experts, channel.shape.ep_size, spare=config.spare_slots(channel.shape.ep_size)
    )
    found, problem = home, None
    try:
        found = run_planner(name, counts_PE, home, ranks_per_node=channel.ranks_per_node)
        check_placement(f"Planner {name!r}", channel, found)
    except Exception as error:
        problem = error
    if config.debug or not is_built_in(name):
        raise_alike(channel.control, problem, facts=facts_of_placement(found), of_call=True, label="balance")
    elif problem is not None:
        raise problem
    table = channel.table_of(found, ids_TK.device)
    return found, table.experts_L, slots_of(ids_TK, table.copies_EC)
