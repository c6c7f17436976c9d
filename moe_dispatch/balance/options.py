"""What the fields of a config say about expert slots: ``balance``, its settings, and ``spare_experts_per_rank``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

import torch
from torch import Tensor

from moe_dispatch._slots import Placement, SlotOptions, Slots
from moe_dispatch.balance.exact import EXACT, exact_rows
from moe_dispatch.balance.planners import check_planner
from moe_dispatch.balance.slot_table import SlotTable
from moe_dispatch.balance.slots import Placed, Planned, home_of, place, table_of
from moe_dispatch.dispatchers.channel import Channel, Lease
from moe_dispatch.errors import ConfigError


@final
class BalanceOptions(SlotOptions):
    """The options of this plug-in."""

    def check(self) -> None:
        config, exact, balanced = self.config, self.config.balance == EXACT, self.config.balance is not None
        if config.balance is not None:
            check_planner(config.balance)
        for broken, rule in (
            (
                balanced and not exact and not config.spare_experts_per_rank,
                "balance needs spare_experts_per_rank. Set it to 1 or 2.",
            ),
            (
                balanced and not exact and config.graph_safe,
                f'balance must be "{EXACT}" or None with graph_safe=True, got {config.balance!r}: it plans on the '
                "host.",
            ),
            (
                not exact and (config.balance_bound != 1 or config.balance_min_rows is not None),
                f'balance_bound and balance_min_rows are settings of balance="{EXACT}", got balance='
                f"{config.balance!r}.",
            ),
            (
                config.graph_safe and bool(config.balance_min_rows),
                "balance_min_rows needs graph_safe=False: without a copy, rows would not fit into the buffers.",
            ),
        ):
            if broken:
                raise ConfigError(rule)

    def spare_slots(self, ep_size: int) -> int:
        """One rank has nothing to balance, and "exact" never uses more slots than a rank has experts."""
        if self.config.balance != EXACT:
            return self.config.spare_experts_per_rank
        enough = self.config.num_experts // ep_size
        return 0 if ep_size == 1 else min(self.config.spare_experts_per_rank or enough, enough)

    def is_proved(self, ep_size: int) -> bool:
        return self.config.balance == EXACT and self.spare_slots(ep_size) in (0, self.config.num_experts // ep_size)

    def promise(self, ep_size: int) -> str:
        config = self.config
        if config.balance is None:
            return ""
        bound = f"{config.balance_bound:g} times the mean rows"
        if config.balance != EXACT:
            return f"Planner {config.balance!r} proves no bound for the busiest rank."
        if not self.is_proved(ep_size):
            spare = self.spare_slots(ep_size)
            return (
                f"The busiest rank has the fewest rows that a plan with {spare} of {config.num_experts // ep_size} "
                f"spare slots finds, which may exceed {bound}.{' check() reports an overflow.' * config.graph_safe}"
            )
        if config.graph_safe or config.balance_min_rows == 0:
            return f"The busiest rank has at most {bound}, rounded up, for every routing. Nothing overflows."
        return (
            f"The busiest rank has at most {bound}, rounded up, and the rows of copies that were not made because they "
            "had fewer than balance_min_rows. Nothing overflows."
        )

    def planned_rows(self, ep_size: int) -> int | None:
        config = self.config
        if not (config.graph_safe and self.is_proved(ep_size)) or config.max_rows_per_dispatch is None:
            return None
        return exact_rows(
            config.num_experts,
            ep_size,
            tokens=config.max_rows_per_dispatch,
            top_k=config.top_k,
            bound=config.balance_bound,
            pad_multiple=config.pad_multiple_rows,
        )

    def open(self, channel: Channel) -> Slots | None:
        config, size = self.config, channel.shape.ep_size
        if config.balance is not None and size % channel.ranks_per_node:
            raise ConfigError(
                f"balance needs nodes with equal numbers of ranks: ep_size ({size}) must be a multiple of "
                f"ranks_per_node, got {channel.ranks_per_node}. Give another ranks_per_node, or leave balance out."
            )
        if not self.spare_slots(size):
            return None
        home, device = home_of(channel), channel.device_of_rows()
        if config.balance is None:
            return Placed(home, table_of(channel, home, device))
        return Planned(home, device, on_host=not config.graph_safe)

    @staticmethod
    def place(lease: Lease, placement: Placement, device: torch.device) -> None:
        place(lease, placement, device)

    @staticmethod
    def restored(tensors: Sequence[Tensor]) -> Slots:
        copies_EC, experts_L = tensors
        return Placed(None, SlotTable(copies_EC=copies_EC, experts_L=experts_L))
