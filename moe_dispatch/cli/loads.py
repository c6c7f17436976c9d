"""What a routing comes to on every rank: rows, padding and pairs, known or to be expected."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, final, get_args

import torch
from torch import Tensor

from moe_dispatch.backends.base import MoEShape
from moe_dispatch.backends.capacity import Capacity
from moe_dispatch.backends.volume import Volume
from moe_dispatch.cli.picks import block_picks, draw_ids
from moe_dispatch.cli.tails import any_above, deviation, largest, padding_odds, sum_range

Bound = Literal["expected", "low", "high"]
BOUNDS: tuple[Bound, ...] = get_args(Bound)

# For the one number that is not computed exactly, how much ranks vary in the pairs they send, and what that allows for.
_DRAWN_TOKENS, _DRAWN_MARGIN = 4096, 1.1


@final
@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Range:
    """A number of each rank, float64 (P,): expected, and between which bounds those of all ranks lie."""

    expected: Tensor
    low: Tensor
    high: Tensor


@final
@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Loads:
    """One dispatch of all ranks. A rank is an entry of every tensor, float64 (P,).

    Attributes:
        tokens: rows that a rank brings.
        received: rows that its experts get.
        padding: of these rows, for ``pad_multiple``.
        busiest_rank: rows that the experts of the rank with the most get, (1,).
        busiest_expert: rows of the expert with the most, (1,).
        exchanged: what ranks send each other, by the names of ``Volume``.
        between_nodes: likewise, expected, where the other rank is on another node.
        once_per_node: likewise, where a row goes once to each other node: to the rank in the place of its own.
        overflow: how likely one dispatch needs more than a capacity on some rank or pair, between two bounds.
    """

    tokens: Tensor
    received: Range
    padding: Range
    busiest_rank: Range
    busiest_expert: Range
    exchanged: dict[str, Range]
    between_nodes: dict[str, Tensor]
    once_per_node: dict[str, Tensor]
    overflow: Callable[[Capacity], tuple[float, float]]

    def volume(self, rows: Tensor, bound: Bound) -> Volume:
        """To all other ranks, where each rank brings so many rows, padded."""
        exchanged = {name: getattr(found, bound) for name, found in self.exchanged.items()}
        return Volume(rows=rows, others=torch.full_like(rows, len(rows) - 1), **exchanged)

    def volume_between_nodes(self, rows: Tensor, ranks_per_node: int, *, once_per_node: bool) -> Volume:
        """To ranks on other nodes, or to those nodes; expected."""
        others = len(rows) // ranks_per_node - 1 if once_per_node else len(rows) - ranks_per_node
        exchanged = self.once_per_node if once_per_node else self.between_nodes
        return Volume(rows=rows, others=torch.full_like(rows, others), **exchanged)


def known_loads(ids: Sequence[Tensor], shape: MoEShape) -> Loads:
    """Those of a routing.

    Args:
        ids: of each rank, int64 (T, K), -1 where a slot goes nowhere. An expert that a row names twice counts once.
        shape: with ``ranks_per_node``.
    """
    chosen = [_chosen(ids_TK, shape.num_experts) for ids_TK in ids]
    nodes = shape.ep_size // _per_node(shape)
    # Not view(.., -1): a rank may bring no row, and what has no elements leaves -1 open.
    slots_PP = torch.stack([rows.unflatten(1, (shape.ep_size, -1)).sum((0, 2)) for rows in chosen]).double()
    pairs_PP, nodes_PN = (
        torch.stack([rows.unflatten(1, (count, -1)).any(2).sum(0) for rows in chosen]).double()
        for count in (shape.ep_size, nodes)
    )
    tokens_E = torch.stack([rows.sum(0) for rows in chosen]).sum(0)
    received = slots_PP.sum(0)

    def overflow(capacity: Capacity) -> tuple[float, float]:
        fits = capacity.holds(int(received.max()), int(pairs_PP.max()))
        return float(not fits), float(not fits)

    exchanged, *between = _exchanged(pairs_PP, slots_PP, nodes_PN)
    return Loads(
        tokens=torch.tensor([len(rows) for rows in chosen], dtype=torch.float64),
        received=_exactly(received),
        padding=_exactly((-tokens_E % shape.pad_multiple).view(shape.ep_size, -1).sum(1).double()),
        busiest_rank=_exactly(received.amax(0, keepdim=True)),
        busiest_expert=_exactly(tokens_E.amax(0, keepdim=True).double()),
        exchanged={name: _exactly(values) for name, values in exchanged.items()},
        between_nodes=between[0],
        once_per_node=between[1],
        overflow=overflow,
    )


def expected_loads(odds_E: Tensor, tokens: int, shape: MoEShape, *, seed: int = 0) -> Loads:
    """Those of tokens that choose their experts at random, each on its own.

    Args:
        odds_E: how popular experts are, float64 (E,), as for ``block_picks``.
        tokens: of each rank.
        shape: with ``ranks_per_node``.
        seed: of the tokens drawn for how much ranks vary in the pairs they send.

    Returns:
        Ranges that all ranks keep to in all but 1 of 1000 dispatches, each for itself.
    """
    size, top_k, everyone = shape.ep_size, shape.top_k, tokens * shape.ep_size
    picks = block_picks(odds_E, top_k, size)
    experts = picks if size == shape.num_experts else block_picks(odds_E, top_k, shape.num_experts)
    count = torch.arange(top_k + 1, dtype=torch.float64)
    slots, somewhere = (picks * count).sum(1), 1 - picks[:, 0]
    varies = (picks * count.square()).sum(1) - slots.square()
    per_node = block_picks(odds_E, top_k, size // _per_node(shape))
    brought = torch.full((size,), tokens, dtype=torch.float64)
    exchanged, *between = _exchanged(*(torch.outer(brought, odds) for odds in (somewhere, slots, 1 - per_node[:, 0])))
    variances = {
        "pairs_out": tokens * _variance_of_pairs(odds_E, shape, seed),
        "pairs_in": (everyone - tokens) * somewhere * (1 - somewhere),
        "slots_out": tokens * varies,
        "slots_in": (everyone - tokens) * varies,
    }
    most = min(top_k, shape.num_local_experts)
    steps = {"pairs_out": min(top_k, size - 1), "pairs_in": 1, "slots_out": most, "slots_in": most}
    most_sent = {"pairs_out": tokens * steps["pairs_out"], "pairs_in": everyone - tokens, "slots_out": tokens * top_k}
    chosen = experts[:, 1]

    def overflow(capacity: Capacity) -> tuple[float, float]:
        low, high = any_above(picks, everyone, capacity.rows)
        if capacity.pair_rows is not None:  # to each rank from each, which choose on their own
            to_rank = torch.stack([1 - somewhere, somewhere], 1)
            of_pairs = any_above(to_rank, tokens, capacity.pair_rows, times=size)
            low, high = max(low, of_pairs[0]), min(1.0, high + of_pairs[1])
        return low, high

    return Loads(
        tokens=brought,
        received=_spread(everyone * slots, everyone * varies, most, most=everyone * most),
        padding=_padding(chosen, everyone, shape),
        busiest_rank=_largest(picks, everyone),
        busiest_expert=_largest(torch.stack([1 - chosen, chosen], 1), everyone),
        exchanged={
            name: _spread(values, variances[name], steps[name], most=most_sent.get(name, everyone * most))
            for name, values in exchanged.items()
        },
        between_nodes=between[0],
        once_per_node=between[1],
        overflow=overflow,
    )


def _per_node(shape: MoEShape) -> int:
    return shape.ranks_per_node or shape.ep_size


def _chosen(ids_TK: Tensor, num_experts: int) -> Tensor:
    """bool (T, E)."""
    chosen = torch.zeros(len(ids_TK), num_experts + 1, dtype=torch.bool, device="cpu")
    return chosen.scatter_(1, ids_TK.cpu() + 1, True)[:, 1:]


def _exchanged(pairs_PP: Tensor, slots_PP: Tensor, nodes_PN: Tensor) -> list[dict[str, Tensor]]:
    """What ranks send: to all others, to ranks on other nodes, and once to each other node.

    Args:
        pairs_PP: rows of each rank that have an expert on each.
        slots_PP: rows and experts of each rank on each.
        nodes_PN: rows of each rank that have an expert on each node.
    """
    size, nodes = nodes_PN.shape
    node_P = torch.arange(size) // (size // nodes)
    found = []
    for other in (~torch.eye(size, dtype=torch.bool), node_P.unsqueeze(1) != node_P):
        pairs, slots = pairs_PP * other, slots_PP * other
        found.append(
            {"pairs_out": pairs.sum(1), "pairs_in": pairs.sum(0), "slots_out": slots.sum(1), "slots_in": slots.sum(0)}
        )
    away_PN = nodes_PN * (node_P.unsqueeze(1) != torch.arange(nodes))
    landed = away_PN.view(nodes, -1, nodes).sum(0).t().reshape(-1)  # by node, then by place on it
    return [*found, {**found[1], "pairs_out": away_PN.sum(1), "pairs_in": landed}]


def _variance_of_pairs(odds_E: Tensor, shape: MoEShape, seed: int) -> Tensor:
    """Of the number of other ranks that a token of each rank goes to, from drawn tokens; float64 (P,)."""
    chosen = _chosen(draw_ids(odds_E, shape.top_k, _DRAWN_TOKENS, seed), shape.num_experts)
    ranks = chosen.view(_DRAWN_TOKENS, shape.ep_size, -1).any(2).float()
    return (ranks.sum(1, keepdim=True) - ranks).double().var(0) * _DRAWN_MARGIN


def _exactly(values: Tensor) -> Range:
    return Range(expected=values, low=values, high=values)


def _spread(mean: Tensor, variance: Tensor, step: float, *, most: float) -> Range:
    """Of sums of independent terms that are not below 0."""
    off = deviation(variance, step, len(mean))
    # A count is a whole number; what was computed as one may lack its last digits.
    low, high = (mean - off - 1e-6).ceil(), (mean + off + 1e-6).floor()
    return Range(expected=mean, low=low.clamp(0, most) + 0.0, high=high.clamp(0, most) + 0.0)  # -0.0 becomes 0.0


def _padding(odds_E: Tensor, count: int, shape: MoEShape) -> Range:
    """Of each rank's experts, whose remainders are taken as independent."""
    odds = padding_odds(odds_E, count, shape.pad_multiple).view(shape.ep_size, -1, shape.pad_multiple)
    low, high = sum_range(odds)
    mean = (odds * torch.arange(shape.pad_multiple, dtype=torch.float64)).sum((1, 2))
    return Range(expected=mean, low=low, high=high)


def _largest(odds: Tensor, count: int) -> Range:
    median, low, high = (torch.tensor([float(found)], dtype=torch.float64) for found in largest(odds, count))
    return Range(expected=median, low=low, high=high)
