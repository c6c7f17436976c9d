"""Compute how many rows each rank gets under a placement."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from moe_dispatch.balance.placement import ExpertPlacement
from moe_dispatch.errors import ConfigError


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Demand:
    """The rows that experts get, by expert.

    Attributes:
        by_rank: Rows of each rank for each expert, (E, P).
        by_node: Rows of each node for each expert, (E, number of nodes).
        totals: Rows of all ranks for each expert, (E,).
        ranks_per_node: Number of consecutive ranks that share a node.
    """

    by_rank: list[list[float]]
    by_node: list[list[float]]
    totals: list[float]
    ranks_per_node: int


def demand_of(counts: Tensor, placement: ExpertPlacement, ranks_per_node: int) -> Demand:
    """Check the counts, and add them up.

    Args:
        counts: (P, E), the rows of each rank for each expert. Or (E,), if each rank has the same share of them.
        placement: A placement for P ranks and E experts.
        ranks_per_node: Number of consecutive ranks that share a node.

    Raises:
        ConfigError: The counts or the nodes do not fit the placement, or a count is negative or not finite.
    """
    ranks, experts = placement.num_ranks, placement.num_experts
    if tuple(counts.shape) not in ((ranks, experts), (experts,)):
        raise ConfigError(
            f"planner: counts must have shape ({ranks}, {experts}) or ({experts},), got {tuple(counts.shape)}. "
            "Count the rows of each rank for each expert."
        )
    if ranks_per_node < 1 or ranks % ranks_per_node:
        raise ConfigError(
            f"planner: ranks_per_node must divide the number of ranks ({ranks}), got {ranks_per_node}. "
            "Use the number of ranks, if all ranks share a node."
        )
    rows = counts.detach().to("cpu", torch.float64)
    if not bool(((rows >= 0) & rows.isfinite()).all()):
        raise ConfigError(
            f"planner: counts must be finite and at least 0, got {rows.min().item()} to {rows.max().item()}. "
            "Count rows."
        )
    if rows.dim() == 1:
        rows = (rows / ranks).expand(ranks, experts)
    return Demand(
        by_rank=rows.t().tolist(),
        by_node=rows.reshape(-1, ranks_per_node, experts).sum(1).t().tolist(),
        totals=rows.sum(0).tolist(),
        ranks_per_node=ranks_per_node,
    )


def expert_shares(demand: Demand, expert: int, ranks: Sequence[int]) -> Mapping[int, float]:
    """Return the rows of an expert that each of the ranks with a copy gets.

    A rank sends rows to its own copy; without one, to the copies on its node in equal parts; without these, to all
    copies in equal parts.
    """
    size, by_rank, by_node = demand.ranks_per_node, demand.by_rank[expert], demand.by_node[expert]
    if len(ranks) == 1:
        return {ranks[0]: demand.totals[expert]}
    on_node: dict[int, list[int]] = {}
    for rank in ranks:
        on_node.setdefault(rank // size, []).append(rank)
    elsewhere = (demand.totals[expert] - sum(by_node[node] for node in on_node)) / len(ranks)
    shares = {}
    for node, members in on_node.items():
        rest = (by_node[node] - sum(by_rank[rank] for rank in members)) / len(members)
        for rank in members:
            shares[rank] = by_rank[rank] + rest + elsewhere
    return shares


def rank_loads(demand: Demand, placement: ExpertPlacement) -> list[float]:
    """Return the rows that each rank gets."""
    loads = [0.0] * placement.num_ranks
    for expert, slots in enumerate(placement.slots_of_expert):
        for rank, share in expert_shares(demand, expert, [slot // placement.slots_per_rank for slot in slots]).items():
            loads[rank] += share
    return loads


def expected_rows(counts: Tensor, placement: ExpertPlacement, *, ranks_per_node: int) -> Tensor:
    """Return the rows that each rank is expected to get, float64 (P,).

    Args:
        counts: (P, E), the rows of each rank for each expert. Or (E,), if each rank has the same share of them.
        placement: A placement for P ranks and E experts.
        ranks_per_node: Number of consecutive ranks that share a node.

    Raises:
        ConfigError: The counts or the nodes do not fit the placement.
    """
    return torch.tensor(rank_loads(demand_of(counts, placement, ranks_per_node), placement), dtype=torch.float64)
