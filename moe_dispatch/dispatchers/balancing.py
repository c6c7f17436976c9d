"""Plan a placement for one dispatch: count rows per expert, exchange the counts, and run the planner of the config."""

from __future__ import annotations

import torch
from torch import Tensor

from moe_dispatch.balance.placement import ExpertPlacement
from moe_dispatch.balance.planners import is_built_in, run_planner
from moe_dispatch.balance.slot_table import SlotTable
from moe_dispatch.communication import raise_alike, read_host
from moe_dispatch.dispatchers.autograd import profiler_range
from moe_dispatch.dispatchers.channel import Channel
from moe_dispatch.dispatchers.placing import check_placement, facts_of
from moe_dispatch.dispatchers.planning import REFUSED
from moe_dispatch.errors import PeerError
from moe_dispatch.permutation import count_values


def plan_balance(channel: Channel, ids_TK: Tensor) -> tuple[ExpertPlacement, SlotTable]:
    """Return the placement of a dispatch, and its table on this rank. Collective; call with gradients off.

    The planners of this package give the same placement on all ranks, because all ranks have the same counts. A planner
    of another package may fail on one rank, so ranks compare its results.

    Args:
        channel: Channel of the dispatcher; its config has ``balance``.
        ids_TK: Valid ids of the rows that are sent, as in ``SentIds``.

    Raises:
        ConfigError: The planner raises, or its placement does not fit.
        InputError: The placements of the ranks differ. Raised on every rank.
        PeerError: Another rank refused its call, or has a planner that raises.

    Cost: one host sync, and one all-gather of E+1 integers on the control group. With ``debug``, or a planner of
    another package, also an all-reduce of three integers.
    """
    config, shape, name = channel.config, channel.shape, channel.config.balance
    assert name is not None
    with profiler_range("balance"):
        counts = read_host(count_values(ids_TK.flatten() + 1, config.num_experts + 1)[1:])
        everyone = channel.control.gather_integers([len(ids_TK), *counts], label="balance")
        if any(rows == REFUSED for rows, *_ in everyone):
            raise_alike(channel.control, None, label="refusal")
            raise PeerError("Dispatcher.dispatch: another rank refused its call.")
        home = ExpertPlacement.contiguous(config.num_experts, shape.ep_size, spare=config.spare_experts_per_rank)
        counts_PE = torch.tensor([of_rank[1:] for of_rank in everyone], dtype=torch.int64, device="cpu")
        found, problem = home, None
        try:
            found = run_planner(name, counts_PE, home, ranks_per_node=channel.ranks_per_node)
            check_placement(f"Planner {name!r}", channel, found)
        except Exception as error:
            problem = error
        if config.debug or not is_built_in(name):
            raise_alike(channel.control, problem, facts=facts_of(found), of_call=True, label="balance")
        elif problem is not None:
            raise problem
        return found, channel.table_of(found, ids_TK.device)
