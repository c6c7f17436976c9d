"""The inputs of a plan: a cluster, and the counts of its dispatches by expert slot."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import final

from torch import Tensor

from moe_dispatch.backends.base import MoEShape
from moe_dispatch.balance import ExpertPlacement
from moe_dispatch.config import DispatcherConfig
from moe_dispatch.dispatchers.requirements import shape_of
from moe_dispatch.errors import ConfigError
from moe_dispatch_tools.loads import Loads, count_loads
from moe_dispatch_tools.placements import in_slots, rows_of_experts
from moe_dispatch_tools.plan.figures import Figure
from moe_dispatch_tools.plan.models import Model
from moe_dispatch_tools.plan.routing import Source

_RANKS_PER_NODE = 8  # if the request does not give the number of nodes


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Cluster:
    """The ranks of one expert-parallel group, and their nodes. Consecutive ranks share a node.

    Attributes:
        flop_per_byte: As in ``ExpertCost``.
    """

    ep_size: int
    nodes: int
    ranks_per_node: int
    flop_per_byte: float | None = None


def cluster_of(ep_size: int, nodes: int | None, flop_per_byte: float | None = None) -> Cluster:
    """Describe a cluster, by default with 8 ranks per node.

    Raises:
        ConfigError: The ranks cannot be divided among the nodes, or ``flop_per_byte`` is not a number above 0.
    """
    if ep_size < 1:
        raise ConfigError(f"plan: ep must be 1 or more, got {ep_size}. Give the number of ranks of one group.")
    if nodes is None:
        nodes = ep_size // math.gcd(ep_size, _RANKS_PER_NODE)
    if nodes < 1 or ep_size % nodes:
        raise ConfigError(
            f"plan: ep ({ep_size}) must be divisible by nodes ({nodes}). Give the number of nodes of one group."
        )
    if flop_per_byte is not None and not 0 < flop_per_byte < math.inf:
        raise ConfigError(
            f"plan: flop-per-byte must be a number above 0, got {flop_per_byte:g}. Divide the FLOP per second of a "
            "device by the bytes per second that it sends to other ranks."
        )
    return Cluster(ep_size=ep_size, nodes=nodes, ranks_per_node=ep_size // nodes, flop_per_byte=flop_per_byte)


@final
@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Job:
    """The inputs of all parts of a plan.

    Attributes:
        model: Sizes and config.
        shape: Sizes of the group. Its experts are the expert slots.
        loads: Counts of the dispatches by expert slot.
        experts_CPE: Rows of each rank for each expert.
        tokens: Largest number of rows of a rank.
        simulated: Whether the dispatches are drawn at random.
    """

    model: Model
    shape: MoEShape
    loads: Loads
    experts_CPE: Tensor
    tokens: int
    simulated: bool

    def figure(self, values_CP: Tensor) -> Figure:
        """Compute the statistics of a number of each dispatch and rank."""
        values_CP = values_CP.double()
        error = float(values_CP.mean(1).std()) / math.sqrt(len(values_CP)) if self.simulated else 0.0
        return Figure(
            expected=float(values_CP.mean()), error=error, low=float(values_CP.min()), high=float(values_CP.max())
        )

    def balance_bytes(self, others: int) -> int:
        """Return the bytes of the counts that a rank sends to ``others`` ranks, so that all plan the same placement."""
        config = self.model.config
        return 0 if config.balance is None else 8 * (config.num_experts + 1) * others


def make_job(model: Model, cluster: Cluster, source: Source, tokens: int) -> Job:
    """Count the dispatches, by expert slot if the config has spare slots."""
    config = model.config
    shape = shape_of(config, cluster.ep_size, cluster.ranks_per_node)
    dispatches = source.dispatches(without_slots(shape, config), tokens)
    if config.spare_experts_per_rank:
        used: list[ExpertPlacement] = []
        loads = count_loads(in_slots(dispatches, config, shape, used), shape)
        experts_CPE = rows_of_experts(loads.experts_CPE, used)
    else:
        loads = count_loads(dispatches, shape)
        experts_CPE = loads.experts_CPE
    return Job(
        model=model, shape=shape, loads=loads, experts_CPE=experts_CPE, tokens=tokens, simulated=source.simulated
    )


def without_slots(shape: MoEShape, config: DispatcherConfig) -> MoEShape:
    """Return the sizes of a group whose experts are those of the model, instead of expert slots."""
    return dataclasses.replace(shape, num_experts=config.num_experts)
