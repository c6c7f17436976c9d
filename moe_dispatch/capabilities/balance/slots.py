"""The expert slots of dispatchers: ``Placed`` slots keep a placement, ``Planned`` slots get one in every dispatch."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import final

import torch
from torch import Tensor

from moe_dispatch.backends.base import MoEShape
from moe_dispatch.capabilities.balance.exact import ExactPlan, ExactPlanner
from moe_dispatch.capabilities.balance.options import BalanceOptions, ExactOptions, PlannerOptions
from moe_dispatch.capabilities.balance.placement import EMPTY, ExpertPlacement
from moe_dispatch.capabilities.balance.planners import is_built_in, run_planner
from moe_dispatch.capabilities.balance.slot_table import SlotTable, slots_of
from moe_dispatch.communication import raise_alike, read_host
from moe_dispatch.config import DispatcherConfig
from moe_dispatch.dispatchers.channel import Channel, Lease, logger, profiler_range
from moe_dispatch.errors import ConfigError, PeerError
from moe_dispatch.permutation import choose_permutation, count_experts
from moe_dispatch.seams.plug_ins import import_whole
from moe_dispatch.seams.slots import Assigned, Placement, Slots

REFUSED = -1
"""Number of rows that a rank tells its peers instead of its own, if it refuses a call."""

_FAR = 1.1  # times the mean rows of a rank


@final
class Placed(Slots):
    """The slots of a placement.

    Args:
        placement: The placement; None in compiled code, which knows its table only.
        table: Table of the placement.

    Attributes:
        table: Table of the placement.
    """

    def __init__(self, placement: ExpertPlacement | None, table: SlotTable) -> None:
        self.placement: ExpertPlacement | None = placement
        self.table, self.device = table, table.copies_EC.device

    def assign(self, channel: Channel, ids_TK: Tensor) -> Assigned:
        table = self.table
        slots_TK = slots_of(ids_TK, table.copies_EC.to(ids_TK.device))
        return Assigned(ids_TK=slots_TK, placement=self.placement, experts_L=table.experts_L)

    def copied(self) -> Slots:
        return Placed(self.placement, self.table.copied())

    def tensors(self) -> list[Tensor]:
        return [self.table.copies_EC, self.table.experts_L]


@final
class Planned(Slots):
    """Slots that are planned anew in every dispatch, from the counts of all ranks. Dispatchers of a channel share them.

    Cost: in graph-safe mode, one all-gather of E integers of the device and no host sync. Otherwise one host sync, and
    one all-gather of E+1 integers on the control group. With ``debug``, or a planner of another package, also an
    all-reduce of three integers.

    Args:
        home: The placement without copies.
        device: Device of the rows, as far as it is known.
        options: Options of the planner.
        on_host: Whether the ranks exchange their counts on the host, as in eager mode.
    """

    collective = True

    def __init__(
        self, home: ExpertPlacement, device: torch.device, options: ExactOptions | PlannerOptions, *, on_host: bool
    ) -> None:
        self.placement = self._home = home
        self.device, self.hears_refusals, self._options = device, on_host, options
        self._planners: dict[torch.device, ExactPlanner] = {}  # made on use
        self._has_warned = False

    def copied(self) -> Slots:
        return self

    def let_go(self) -> None:
        self._planners.clear()

    def tensors(self) -> list[Tensor]:
        raise NotImplementedError  # operators refuse a config with balance before they ask

    def refuse(self, channel: Channel, error: Exception) -> None:
        channel.control.gather_integers([REFUSED, *[0] * channel.config.num_experts], label="balance")
        raise_alike(channel.control, error, label="refusal")

    def assign(self, channel: Channel, ids_TK: Tensor) -> Assigned:
        """Plan a dispatch. Collective.

        Raises:
            ConfigError: The planner raises, or its placement does not fit.
            InputError: The placements of the ranks differ. Raised on every rank.
            PeerError: Another rank refused its call, or has a planner that raises.
        """
        config = channel.config
        with profiler_range("balance"):
            if config.graph_safe:
                planner = self._planner(channel, ids_TK.device)
                counts_E, turns = planner.counts_and_turns(ids_TK)
                everyone = counts_E.new_empty(channel.communicator.size * config.num_experts)
                channel.communicator.all_gather(everyone, counts_E, label="balance")
                plan = planner(everyone.view(channel.communicator.size, -1))
                return _assigned(plan, plan.slots_of(ids_TK, turns))
            counts_E = count_experts(ids_TK, config.num_experts)
            mine = torch.tensor([len(ids_TK), *read_host(counts_E)], dtype=torch.int64, device="cpu")
            everyone = channel.control.gather_tensor(mine, label="balance")
            if refusing := [rank for rank, count in enumerate(everyone[:, 0].tolist()) if count == REFUSED]:
                raise_alike(channel.control, None, label="refusal")
                raise PeerError(f"Dispatcher.dispatch: ranks {refusing} refused their call.")
            if isinstance(self._options, PlannerOptions):
                return self._run_planner(channel, self._options, everyone[:, 1:], ids_TK)
            planner = self._planner(channel, ids_TK.device)
            plan, is_uneven = planner.on_host(everyone[:, 1:])
            if is_uneven:
                self._note_uneven(channel, everyone[:, 1:], planner.min_rows, plan)
            plan = plan.to(ids_TK.device)
            return _assigned(plan, plan.slots_of(ids_TK))

    def _planner(self, channel: Channel, device: torch.device) -> ExactPlanner:
        """Return the planner of ``balance="exact"`` for rows on a device."""
        if device not in self._planners:
            shape = dataclasses.replace(channel.shape, ranks_per_node=channel.ranks_per_node)
            comm = channel.communicator
            self._planners[device] = exact_planner(channel.config, shape, comm.rank, device, alike=comm.dry_run)
        return self._planners[device]

    def _note_uneven(self, channel: Channel, counts_PE: Tensor, min_rows: int, plan: ExactPlan) -> None:
        """Count a dispatch in which copies would have had too few rows. Warn once, if it is far from even."""
        channel.meter.count_rows(uneven=1)
        loads_P = counts_PE.sum(0).view(len(counts_PE), -1).sum(1) if plan.loads_P is None else plan.loads_P
        times = float(loads_P.max() / loads_P.double().mean())
        if times < _FAR or self._has_warned or channel.communicator.rank:
            return
        self._has_warned = True
        # Where no rank has a copy's rows to give away, the copies were not even planned, so their number is unknown.
        left_out = f"left out {plan.left_out} copies of experts" if plan.left_out else "made no copy of an expert"
        logger.warning(
            'balance="exact" has %s in a dispatch of %d rows, because each would have had fewer than balance.min_rows '
            "(%d) rows. The busiest rank has %.2f times the mean rows. balance.min_rows=0 makes every copy. This is "
            "said once; metrics().dispatches_left_uneven counts such dispatches.",
            left_out,
            int(counts_PE.sum()),
            min_rows,
            times,
        )

    def _run_planner(self, channel: Channel, options: PlannerOptions, counts_PE: Tensor, ids_TK: Tensor) -> Assigned:
        """Plan with a planner of the host.

        The planners of this package give the same placement on all ranks, because all ranks have the same counts. A
        planner of another package may fail on one rank, so ranks compare its results.
        """
        found, problem = self._home, None
        try:
            found = run_planner(options, counts_PE, self._home, ranks_per_node=channel.ranks_per_node)
            check_placement(f"Planner {options.name!r}", channel, found)
        except Exception as error:
            problem = error
        if channel.config.debug or not is_built_in(options.name):
            raise_alike(channel.control, problem, facts=facts_of_placement(found), of_call=True, label="balance")
        elif problem is not None:
            raise problem
        table = table_of(channel, found, ids_TK.device)
        return Assigned(ids_TK=slots_of(ids_TK, table.copies_EC), placement=found, experts_L=table.experts_L)


def _assigned(plan: ExactPlan, slots_TK: Tensor) -> Assigned:
    return Assigned(ids_TK=slots_TK, placement=plan.placement, experts_L=plan.experts_L, num_copies=plan.num_copies)


def home_of(channel: Channel) -> ExpertPlacement:
    """Return the placement in which every rank holds its own experts, and its spare slots are empty."""
    config, size = channel.config, channel.shape.ep_size
    return ExpertPlacement.contiguous(config.num_experts, size, spare=config.spare_slots(size))


def table_of(
    channel: Channel, placement: ExpertPlacement, device: torch.device, *, before: Slots | None = None
) -> SlotTable:
    """Return the table of a placement on this rank.

    In graph-safe mode all tables have the same shape, and the values of the table in force change in place, so captured
    graphs follow.

    Args:
        channel: Channel of the dispatcher.
        placement: The placement.
        device: Device of the table.
        before: The slots in force, which the placement replaces.
    """
    config, size = channel.config, channel.shape.ep_size
    most = min(size, 1 + size * config.spare_slots(size))
    table = SlotTable.make(
        placement,
        channel.communicator.rank,
        ranks_per_node=channel.ranks_per_node,
        nearest=not channel.communicator.dry_run,
        device=device,
        most_copies=most if config.graph_safe else None,
    )
    if config.graph_safe and isinstance(before, Placed) and before.table.update(table):
        return before.table
    return table


def exact_planner(
    config: DispatcherConfig, shape: MoEShape, rank: int, device: torch.device, *, alike: bool = False
) -> ExactPlanner:
    """Return the planner of ``balance="exact"`` for rows on a device. In eager mode it plans on the CPU."""
    options = config.slot_options
    assert isinstance(options, ExactOptions)
    by_kernels = (
        not alike and config.graph_safe and choose_permutation(config.permutation, device.type).name == "triton"
    )
    return ExactPlanner(
        config.num_experts,
        shape.ep_size,
        rank,
        spare=config.spare_slots(shape.ep_size),
        bound=options.bound,
        pad_multiple=config.pad_multiple_rows,
        ranks_per_node=shape.ranks_per_node,
        min_rows=options.fewest_rows(config, device.type),
        device=device if config.graph_safe else "cpu",
        kernels=import_whole("moe_dispatch.capabilities.balance.triton_plan", "triton") if by_kernels else None,
        alike=alike,
    )


def open_slots(options: BalanceOptions, channel: Channel) -> Slots | None:
    """Do what ``SlotOptions.open`` says."""
    config, size = channel.config, channel.shape.ep_size
    if options.plans and size % channel.ranks_per_node:
        raise ConfigError(
            f"balance needs nodes with equal numbers of ranks: ep_size ({size}) must be a multiple of "
            f"ranks_per_node, got {channel.ranks_per_node}. Give another ranks_per_node, or leave balance out."
        )
    if not config.spare_slots(size):
        return None
    home, device = home_of(channel), channel.device_of_rows()
    if isinstance(options, (ExactOptions, PlannerOptions)):
        return Planned(home, device, options, on_host=not config.graph_safe)
    return Placed(home, table_of(channel, home, device))


def restored(tensors: Sequence[Tensor]) -> Slots:
    """Do what ``SlotOptions.restored`` says."""
    copies_EC, experts_L = tensors
    return Placed(None, SlotTable(copies_EC=copies_EC, experts_L=experts_L))


def place(lease: Lease, placement: Placement, device: torch.device) -> None:
    """Run ``Dispatcher.place``. Collective: a small all-reduce.

    Raises:
        ConfigError: The placement does not fit the dispatcher.
        InputError: The placements of the ranks differ. Raised on every rank.
        PeerError: Another rank has a placement that does not fit.
    """
    channel, problem, facts = lease.enter(), None, dict[str, list[int]]()
    try:
        if channel.config.plans_placements:
            raise ConfigError(
                f'Dispatcher.place: balance must be "manual", got {channel.config.balance!r}, which plans a placement '
                "for each dispatch. Leave balance or this call out."
            )
        placement = check_placement("Dispatcher.place", channel, placement)
        facts = facts_of_placement(placement)
    except ConfigError as error:
        problem = error
    raise_alike(channel.control, problem, facts=facts, of_call=True, label="place")
    assert isinstance(placement, ExpertPlacement)
    lease.use(Placed(placement, table_of(channel, placement, device, before=lease.slots)))


def facts_of_placement(placement: ExpertPlacement) -> dict[str, list[int]]:
    """Return the parts of a placement that must be equal on all ranks, with names for an error."""
    return {f"the expert slots of rank {rank}": list(slots) for rank, slots in enumerate(placement.slots)}


def check_placement(where: str, channel: Channel, placement: object) -> ExpertPlacement:
    """Return a placement that fits a channel.

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
            f"{where}: every rank must have {shape.num_local_experts} expert slots (num_experts / ep_size and the "
            f"spare ones of balance), got {placement.slots_per_rank}. Set balance.spare_experts_per_rank to "
            f"{max(placement.slots_per_rank - config.num_experts // shape.ep_size, 0)}, or use another placement."
        )
    idle = [rank for rank, slots in enumerate(placement.slots) if all(expert == EMPTY for expert in slots)]
    if idle and not channel.needs.idle_ranks:
        raise ConfigError(
            f"{where}: backend {channel.backend_name!r} needs an expert on every rank, got none on rank {idle[0]}. "
            "Put an expert there, or use another backend."
        )
    return placement
