"""The options of ``balance``: a class for "manual", one for "exact", and one from which other planners derive theirs.

A config loads this module and checks the options. What a dispatcher needs beside them is in ``slots``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, ClassVar, final

import torch
from pydantic import Field
from torch import Tensor

from moe_dispatch.capabilities.balance.exact import EXACT, exact_rows
from moe_dispatch.capabilities.balance.placement import ExpertPlacement
from moe_dispatch.capabilities.balance.planners import eplb, least_loaded, load_entry_point
from moe_dispatch.errors import ConfigError
from moe_dispatch.seams.options import Count
from moe_dispatch.seams.slots import MANUAL, Placement, SlotOptions, Slots

if TYPE_CHECKING:
    from moe_dispatch.config import DispatcherConfig
    from moe_dispatch.dispatchers.channel import Channel, Lease


class BalanceOptions(SlotOptions):
    """What the options of this plug-in share."""

    def open(self, channel: Channel) -> Slots | None:
        from moe_dispatch.capabilities.balance.slots import open_slots  # noqa: PLC0415 - a config alone needs no dispatchers

        return open_slots(self, channel)

    @staticmethod
    def place(lease: Lease, placement: Placement, device: torch.device) -> None:
        from moe_dispatch.capabilities.balance import slots  # noqa: PLC0415

        slots.place(lease, placement, device)

    @staticmethod
    def restored(tensors: Sequence[Tensor]) -> Slots:
        from moe_dispatch.capabilities.balance import slots  # noqa: PLC0415

        return slots.restored(tensors)


@final
class ManualOptions(BalanceOptions):
    """The options of ``balance="manual"``: placements change only by ``Dispatcher.place``.

    Attributes:
        spare_experts_per_rank: Number of expert slots that each rank has beside those of its own experts, for copies of
            busy experts.
    """

    plans: ClassVar[bool] = False

    name: str = MANUAL
    spare_experts_per_rank: Annotated[int, Field(ge=0, lt=2**31)] = 1

    def spare_slots(self, config: DispatcherConfig, ep_size: int) -> int:
        return self.spare_experts_per_rank


class PlannerOptions(BalanceOptions):
    """The options of a planner that plans each dispatch on the host. Calling them runs the planner.

    A planner with options of its own derives a class: it adds fields, and overrides ``__call__``. If it has rules, its
    ``check`` calls that of this class first, which refuses graph-safe mode. Its entry point in
    the group ``moe_dispatch.planners`` names the class, where a planner without options names a function.

    Attributes:
        name: Name of the planner, that of its entry point.
        spare_experts_per_rank: Number of expert slots that each rank has beside those of its own experts, for copies of
            busy experts.
    """

    spare_experts_per_rank: Count = 1

    def __call__(self, counts: Tensor, home: ExpertPlacement, *, ranks_per_node: int) -> ExpertPlacement:
        """Return a placement, as ``Planner`` says."""
        planned: ExpertPlacement = load_entry_point(self.name)(counts, home, ranks_per_node=ranks_per_node)
        return planned

    def check(self, config: DispatcherConfig) -> None:
        if config.graph_safe:
            raise ConfigError(
                f'balance must be "{EXACT}" or "{MANUAL}" with graph_safe, got {self.name!r}: it plans on the host.'
            )

    def spare_slots(self, config: DispatcherConfig, ep_size: int) -> int:
        return self.spare_experts_per_rank

    def promise(self, config: DispatcherConfig, ep_size: int) -> str:
        return f"Planner {self.name!r} proves no bound for the busiest rank."


@final
class LeastLoadedOptions(PlannerOptions):
    """The options of ``balance="least_loaded"``.

    Attributes:
        bound: Rows of the busiest rank divided by the mean at which no further copy is made.
    """

    name: str = "least_loaded"
    bound: Annotated[float, Field(ge=1, allow_inf_nan=False)] = 1.05

    def __call__(self, counts: Tensor, home: ExpertPlacement, *, ranks_per_node: int) -> ExpertPlacement:
        return least_loaded(counts, home, ranks_per_node=ranks_per_node, bound=self.bound)


@final
class EplbOptions(PlannerOptions):
    """The options of ``balance="eplb"``.

    Attributes:
        num_groups: Number of groups of consecutive experts that stay together on a node, as routers with limited groups
            need it; None for single experts.
    """

    name: str = "eplb"
    num_groups: Count | None = None

    def __call__(self, counts: Tensor, home: ExpertPlacement, *, ranks_per_node: int) -> ExpertPlacement:
        return eplb(counts, home, ranks_per_node=ranks_per_node, num_groups=self.num_groups)

    def check(self, config: DispatcherConfig) -> None:
        super().check(config)
        if self.num_groups is not None and config.num_experts % self.num_groups:
            raise ConfigError(
                f"balance.num_groups must divide num_experts ({config.num_experts}), got {self.num_groups}. Use the "
                "number of groups of the router."
            )


@final
class ExactOptions(BalanceOptions):
    """The options of ``balance="exact"``, which gives every rank the same number of rows.

    With ``graph_safe`` it also fixes the size of the buffers, and the device plans without the host.

    Attributes:
        bound: Rows of the busiest rank divided by the mean: 1.0 is exact, and 1.05 copies fewer experts. It holds for
            every routing if there are ``num_experts / ep_size`` spare slots. With fewer slots, a plan keeps the copies
            that relieve other ranks most, and the bound may be exceeded.
        min_rows: In eager mode, the fewest rows for which a copy of an expert is made, because its weights must travel
            too. None takes 512 rows on a CPU and 1024 on a GPU, 0 makes every copy.
        spare_experts_per_rank: Number of expert slots that each rank has beside those of its own experts. None takes
            ``num_experts / ep_size``, which is enough for every routing, so more slots are not made.
    """

    name: str = EXACT
    bound: Annotated[float, Field(ge=1, allow_inf_nan=False)] = 1.0
    min_rows: Annotated[int, Field(ge=0)] | None = None
    spare_experts_per_rank: Count | None = None

    def check(self, config: DispatcherConfig) -> None:
        if config.graph_safe and self.min_rows:
            raise ConfigError(
                f"balance.min_rows must be left out with graph_safe, got {self.min_rows}: without a copy, rows would "
                "not fit into the buffers."
            )

    def spare_slots(self, config: DispatcherConfig, ep_size: int) -> int:
        """One rank has nothing to balance, and a rank never uses more spare slots than it has experts."""
        enough = config.num_experts // ep_size
        return 0 if ep_size == 1 else min(self.spare_experts_per_rank or enough, enough)

    def is_proved(self, config: DispatcherConfig, ep_size: int) -> bool:
        return self.spare_slots(config, ep_size) in (0, config.num_experts // ep_size)

    def promise(self, config: DispatcherConfig, ep_size: int) -> str:
        bound = f"{self.bound:g} times the mean rows"
        if not self.is_proved(config, ep_size):
            spare, is_graph_safe = self.spare_slots(config, ep_size), bool(config.graph_safe)
            return (
                f"The busiest rank has the fewest rows that a plan with {spare} of {config.num_experts // ep_size} "
                f"spare slots finds, which may exceed {bound}.{' check() reports an overflow.' * is_graph_safe}"
            )
        if config.graph_safe or self.min_rows == 0:
            return f"The busiest rank has at most {bound}, rounded up, for every routing. Nothing overflows."
        return (
            f"The busiest rank has at most {bound}, rounded up, and the rows of copies that were not made because they "
            "had fewer than balance.min_rows. Nothing overflows."
        )

    def planned_rows(self, config: DispatcherConfig, ep_size: int) -> int | None:
        if not (config.graph_safe and self.is_proved(config, ep_size)) or config.max_rows_per_dispatch is None:
            return None
        return exact_rows(
            config.num_experts,
            ep_size,
            tokens=config.max_rows_per_dispatch,
            top_k=config.top_k,
            bound=self.bound,
            pad_multiple=config.pad_multiple_rows,
        )

    def fewest_rows(self, config: DispatcherConfig, device_type: str) -> int:
        """Return ``min_rows``, with None replaced by the default for rows on a device of this type."""
        if config.graph_safe:
            return 0
        return (1024 if device_type == "cuda" else 512) if self.min_rows is None else self.min_rows


_BUILT_IN: dict[str, type[SlotOptions]] = {
    MANUAL: ManualOptions,
    EXACT: ExactOptions,
    "least_loaded": LeastLoadedOptions,
    "eplb": EplbOptions,
}


def options_of(name: str) -> type[SlotOptions]:
    """Return the options class of a planner, or of "manual". The package of a planner is imported for it.

    Raises:
        ConfigError: The name is unknown, or the package of the planner fails to import.
    """
    if name in _BUILT_IN:
        return _BUILT_IN[name]
    found: type[SlotOptions] | object = load_entry_point(name)
    return found if isinstance(found, type) else PlannerOptions
