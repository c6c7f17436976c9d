"""Forecast the dispatches of a model on a cluster that need not exist: rows, bytes, buffers and overflows.

The figures are counted over dispatches of a recorded routing, or over simulated dispatches of a random routing.
Dimensions are those of ``moe_dispatch_tools.loads``.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor

from moe_dispatch.backends.base import MoEShape
from moe_dispatch.backends.capacity import CapacityFactor, capacity_of, worst_rows
from moe_dispatch.backends.volume import Volume
from moe_dispatch.config import DispatcherConfig
from moe_dispatch.errors import ConfigError
from moe_dispatch_tools.loads import (
    Loads,
    dtype_names,
    overflow_bounds,
    padded_rows,
    rows_between_nodes,
    rows_within_nodes,
)
from moe_dispatch_tools.names import NamedBackend
from moe_dispatch_tools.placements import (
    CHOICES,
    MOST_DISPATCHES,
    UNPLACED,
    Choice,
    ExpertCost,
    PlacementPlan,
    placement_plans,
)
from moe_dispatch_tools.plan.candidates import Candidate, candidates
from moe_dispatch_tools.plan.figures import BackendPlan, CapacityPlan, Figure
from moe_dispatch_tools.plan.job import Cluster, Job, make_job, without_slots
from moe_dispatch_tools.plan.models import Model
from moe_dispatch_tools.plan.routing import Source
from moe_dispatch_tools.plan.sequences import Sequences

# Collectives of the forward. All other collectives belong to the backward.
FORWARD = ("balance", "counts", "dispatch", "dispatch.within_node", "combine", "combine.within_node")
FACTORS = (1.0, 1.1, 1.25, 1.5, 2.0)


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Forecast:
    """A whole plan. All rows and bytes belong to one rank and one micro-batch.

    With spare expert slots, rows are counted by slot: those of a copy belong to the rank of the copy.

    Attributes:
        dispatches: Number of dispatches that the figures are counted over.
        simulated: Whether the dispatches are drawn at random.
        placements: Plans of placements; empty if they were not asked for, and the config has no spare expert slots.
    """

    model: dict[str, Any]
    cluster: Cluster
    sequences: Sequences
    routing: str
    dispatches: int
    simulated: bool
    received: Figure
    busiest_rank: Figure
    expert_padding: Figure
    busiest_expert: Figure
    backends: tuple[BackendPlan, ...]
    capacities: tuple[CapacityPlan, ...]
    placements: tuple[PlacementPlan, ...] = ()

    def as_json(self) -> dict[str, Any]:
        """Convert to plain data."""
        return dataclasses.asdict(self)


def graph_safe_config(config: DispatcherConfig, tokens: int, fields: Mapping[str, Any]) -> DispatcherConfig:
    """Switch a config to graph-safe mode.

    Args:
        config: Config in any mode.
        tokens: Rows that a rank brings. They become ``max_tokens_per_rank`` if the config has none.
        fields: Other fields that only graph-safe mode has.
    """
    most = config.max_tokens_per_rank or tokens
    return config.replace(**{"graph_safe": True, "max_tokens_per_rank": most, **fields})


def forecast(
    model: Model,
    cluster: Cluster,
    sequences: Sequences,
    source: Source,
    *,
    backends: Sequence[NamedBackend],
    factors: Sequence[float] = FACTORS,
    balance: bool = False,
) -> Forecast:
    """Make a plan. It starts no ranks and allocates no buffers.

    Args:
        model: Sizes and config.
        cluster: Ranks and nodes.
        sequences: Rows that a rank brings.
        source: Routing.
        backends: Backends to plan.
        factors: Capacity factors to plan.
        balance: Whether to plan placements of experts beside that of the config.

    Raises:
        ConfigError: Two numbers do not fit each other, for any backend.
    """
    config, tokens = model.config, sequences.rows_per_rank
    if config.max_tokens_per_rank is not None and tokens > config.max_tokens_per_rank:
        raise ConfigError(
            f"plan: a rank must bring at most max_tokens_per_rank ({config.max_tokens_per_rank}) rows, got {tokens}. "
            "Raise max_tokens_per_rank, or plan fewer tokens."
        )
    job = make_job(model, cluster, source, tokens)
    shape, loads = job.shape, job.loads
    return Forecast(
        model=_described(model),
        cluster=cluster,
        sequences=sequences,
        routing=source.text,
        dispatches=len(loads.rows_CP),
        simulated=source.simulated,
        received=job.figure(loads.received_CP),
        busiest_rank=job.figure(loads.received_CP.amax(1, keepdim=True)),
        expert_padding=job.figure(loads.expert_padding_CP(shape.pad_multiple)),
        busiest_expert=job.figure(job.experts_CPE.sum(1).amax(1, keepdim=True)),
        backends=tuple(
            _backend_plan(job, candidate, sequences)
            for named in backends
            for candidate in candidates(named, config, shape, tokens)
        ),
        # Balancing per dispatch is not possible in graph-safe mode.
        capacities=()
        if config.balance
        else tuple(_capacity_plan(job, factor) for factor in _all_factors(config, factors)),
        placements=tuple(_placement_plans(job, cluster, balance=balance)),
    )


def _placement_plans(job: Job, cluster: Cluster, *, balance: bool) -> Iterator[PlacementPlan]:
    """Plan the placement of the config, if it has spare expert slots, and others if ``balance``."""
    config, model = job.model.config, job.model
    own = Choice(config.balance or UNPLACED, config.spare_experts_per_rank)
    if not (balance or config.spare_experts_per_rank):
        return iter(())
    choices = dict.fromkeys([*(CHOICES if balance else CHOICES[:1]), own])
    cost = ExpertCost(itemsize=model.dtype.itemsize, nbytes=model.expert_bytes, flop_per_byte=cluster.flop_per_byte)
    return placement_plans(job.experts_CPE[:MOST_DISPATCHES], without_slots(job.shape, config), choices, cost)


def _described(model: Model) -> dict[str, Any]:
    config = model.config
    sizes = ("num_experts", "top_k", "hidden_size", "spare_experts_per_rank", "balance")
    fields = (*sizes, "wire_dtype", "graph_safe", "max_tokens_per_rank")
    return {
        "name": model.name,
        **{field: getattr(config, field) for field in fields},
        "num_groups": None if model.groups is None else model.groups.num_groups,
        "topk_groups": None if model.groups is None else model.groups.topk_groups,
        "pad_multiple": config.pad_multiple_rows,
        "layers": model.layers,
        "dtype": str(model.dtype).removeprefix("torch."),
    }


def _backend_plan(job: Job, candidate: Candidate, sequences: Sequences) -> BackendPlan:
    plan = BackendPlan(name=candidate.label, rules=candidate.rules, refused=candidate.refused)
    if candidate.needs is None or candidate.refused is not None:
        return plan
    padded_CP = padded_rows(job.loads.rows_CP, candidate.needs, job.model.config)
    found = dataclasses.replace(
        plan,
        rows_per_rank=job.figure(padded_CP),
        rank_padding=job.figure(padded_CP - job.loads.rows_CP),
        sequence_multiple=sequences.multiple_for(candidate.needs.row_multiple),
        buffers=_buffers(job, candidate, int(padded_CP.max())),
    )
    wire = candidate.wire(job.shape, _volume(job.loads, padded_CP, job.shape), job.model.dtype)
    if wire is None:
        return found
    zeros_CP = torch.zeros_like(padded_CP, dtype=torch.float64)
    sent_CP = dict(wire.sent)
    if counts := job.balance_bytes(job.shape.ep_size - 1):
        sent_CP["balance"] = zeros_CP + counts
    forward = job.figure(sum((of for label, of in sent_CP.items() if label in FORWARD), zeros_CP))
    backward = job.figure(sum((of for label, of in sent_CP.items() if label not in FORWARD), zeros_CP))
    layers, once = job.model.layers, candidate.agreement_bytes(job.model.config, job.shape)
    return dataclasses.replace(
        found,
        sent={label: job.figure(nbytes_CP) for label, nbytes_CP in sent_CP.items()},
        row_dtypes=dtype_names(wire.row_dtypes),
        forward=forward.times(layers).plus(once),
        backward=backward.times(layers),
        between_nodes=_between_nodes(job, candidate, padded_CP) * layers,
        payload_only=wire.payload_only,
    )


def _volume(loads: Loads, padded_CP: Tensor, shape: MoEShape, *, between_nodes: bool = False) -> Volume:
    """Count the rows that ranks exchange with other ranks.

    Args:
        loads: Counts of the dispatches.
        padded_CP: Rows that ranks bring, with padding.
        shape: Sizes, with the number of consecutive ranks on a node.
        between_nodes: Whether only rows that leave their node count.
    """
    assert shape.ranks_per_node is not None
    size, per_node = shape.ep_size, shape.ranks_per_node
    near = per_node if between_nodes else 1  # number of ranks to which sent rows do not count
    block_P = torch.arange(size) // near
    away_PP = block_P.unsqueeze(1) != block_P
    legs = None
    if 1 < per_node < size:
        nodes, counts = size // per_node, 0 if between_nodes else 1
        slots_CPN = loads.slots_CPP.unflatten(2, (nodes, per_node)).sum(3)
        across = [rows_between_nodes(table_CPN) for table_CPN in (loads.nodes_CPN, slots_CPN)]
        within = [counts * rows_within_nodes(table_CPP, nodes) for table_CPP in (loads.pairs_CPP, loads.slots_CPP)]
        legs = (
            _exchanged(padded_CP, *across, others=nodes - 1),
            _exchanged(padded_CP, *within, others=counts * (per_node - 1)),
        )
    return _exchanged(padded_CP, loads.pairs_CPP * away_PP, loads.slots_CPP * away_PP, others=size - near, legs=legs)


def _exchanged(
    padded_CP: Tensor,
    pairs_CPP: Tensor,
    slots_CPP: Tensor,
    *,
    others: int,
    legs: tuple[Volume, Volume] | None = None,
) -> Volume:
    """Make a volume from the rows and slots that each rank sends to each rank."""
    return Volume(
        rows=padded_CP.double(),
        others=torch.full_like(padded_CP, others).double(),
        pairs_out=pairs_CPP.sum(2).double(),
        pairs_in=pairs_CPP.sum(1).double(),
        slots_out=slots_CPP.sum(2).double(),
        slots_in=slots_CPP.sum(1).double(),
        legs=legs,
    )


def _between_nodes(job: Job, candidate: Candidate, padded_CP: Tensor) -> float:
    """Return the mean of the bytes that a rank sends to other nodes in a layer."""
    assert job.shape.ranks_per_node is not None
    volume = _volume(job.loads, padded_CP, job.shape, between_nodes=True)
    found = candidate.wire(job.shape, volume, job.model.dtype)
    assert found is not None
    if found.once_per_node and volume.legs is not None:
        found = candidate.wire(job.shape, volume.legs[0], job.model.dtype)
        assert found is not None
    counts = job.balance_bytes(job.shape.ep_size - job.shape.ranks_per_node)
    return counts + float(sum(nbytes_CP.mean() for nbytes_CP in found.sent.values()))


def _buffers(job: Job, candidate: Candidate, rows: int) -> dict[str, Figure]:
    if job.shape.graph_safe:
        found = candidate.footprint(job.shape, rows, job.model.dtype)
        return {purpose: Figure(expected=size, error=0.0, low=size, high=size) for purpose, size in found.items()}
    rows_CP = job.loads.received_CP + job.loads.expert_padding_CP(job.shape.pad_multiple)
    return {"rows": job.figure(rows_CP).times(job.shape.hidden_size * job.model.dtype.itemsize)}


def _capacity_plan(job: Job, factor: CapacityFactor) -> CapacityPlan:
    most = job.shape.max_tokens_per_rank or job.tokens
    shape = dataclasses.replace(job.shape, max_tokens_per_rank=most, capacity_factor=factor)
    capacity = capacity_of(shape)
    pair_rows = capacity_of(dataclasses.replace(shape, capacity_factor="worst"), pair_factor=factor).pair_rows
    assert pair_rows is not None
    worst = worst_rows(dataclasses.replace(shape, max_tokens_per_rank=job.tokens))
    overflow = _overflow(job, job.loads.slots_CPP, capacity.rows, worst, summed=True)
    return CapacityPlan(
        factor=factor,
        rows=capacity.rows,
        buffer_rows=capacity.buffer_rows,
        buffer_bytes=capacity.buffer_rows * shape.hidden_size * job.model.dtype.itemsize,
        overflow=overflow,
        step_overflow=(_in_step(overflow[0], job.model.layers), _in_step(overflow[1], job.model.layers)),
        pair_rows=pair_rows,
        pair_overflow=_overflow(job, job.loads.pairs_CPP, pair_rows, job.tokens, summed=False),
    )


def _overflow(job: Job, rows_CPP: Tensor, limit: int, worst: int, *, summed: bool) -> tuple[float, float]:
    """Return the share of dispatches in which some rank, or some pair of ranks, needs more than ``limit`` rows."""
    if limit >= worst:
        return 0.0, 0.0
    if job.simulated:
        return overflow_bounds(rows_CPP, limit, summed=summed)
    needed_CP = rows_CPP.sum(1) if summed else rows_CPP.amax(1)
    share = float((needed_CP.amax(1) > limit).double().mean())
    return share, share


def _in_step(chance: float, layers: int) -> float:
    """Return the chance that an event happens in at least one layer, if layers are independent."""
    return 1.0 if chance >= 1 else -math.expm1(layers * math.log1p(-chance))


def _all_factors(config: DispatcherConfig, factors: Sequence[float]) -> list[CapacityFactor]:
    own = config.capacity_factor
    for factor in factors:
        if not 0 < factor <= 1024:
            raise ConfigError(f"plan: a capacity factor must be above 0 and at most 1024, got {factor}. Try 1.25.")
    return [*sorted({*factors, *([] if own == "worst" else [own])}), "worst"]
