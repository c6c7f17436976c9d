"""Forecast the dispatches of a model on a cluster that need not exist: rows, bytes, buffers and overflows.

The figures are counted over dispatches of a recorded routing, or over simulated dispatches of a random routing.
Dimensions are those of ``moe_dispatch.cli.loads``.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor

from moe_dispatch.backends.base import MoEShape
from moe_dispatch.backends.capacity import CapacityFactor, capacity_of, worst_rows
from moe_dispatch.backends.volume import SentBytes, Volume
from moe_dispatch.cli.loads import Loads, count_loads, dtype_names, overflow_bounds, padded_rows
from moe_dispatch.cli.names import NamedBackend
from moe_dispatch.cli.plan.candidates import Candidate, candidates
from moe_dispatch.cli.plan.models import Model
from moe_dispatch.cli.plan.routing import Source
from moe_dispatch.cli.plan.sequences import Sequences
from moe_dispatch.config import DispatcherConfig
from moe_dispatch.dispatchers.requirements import shape_of
from moe_dispatch.errors import ConfigError

# Collectives of the forward. All other collectives belong to the backward.
FORWARD = ("counts", "dispatch", "combine")
FACTORS = (1.0, 1.1, 1.25, 1.5, 2.0)
_RANKS_PER_NODE = 8  # if the request does not give the number of nodes


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Cluster:
    """The ranks of one expert-parallel group, and their nodes. Consecutive ranks share a node."""

    ep_size: int
    nodes: int
    ranks_per_node: int


def cluster_of(ep_size: int, nodes: int | None) -> Cluster:
    """Describe a cluster, by default with 8 ranks per node.

    Raises:
        ConfigError: The ranks cannot be divided among the nodes.
    """
    if ep_size < 1:
        raise ConfigError(f"plan: ep must be 1 or more, got {ep_size}. Give the number of ranks of one group.")
    if nodes is None:
        nodes = ep_size // math.gcd(ep_size, _RANKS_PER_NODE)
    if nodes < 1 or ep_size % nodes:
        raise ConfigError(
            f"plan: ep ({ep_size}) must be divisible by nodes ({nodes}). Give the number of nodes of one group."
        )
    return Cluster(ep_size=ep_size, nodes=nodes, ranks_per_node=ep_size // nodes)


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Figure:
    """Statistics of a number that each rank has in each dispatch.

    Attributes:
        expected: Mean over ranks and dispatches.
        error: Standard error of ``expected``; 0 for recorded dispatches.
        low: Smallest number of any rank in any dispatch.
        high: Largest number of any rank in any dispatch.
    """

    expected: float
    error: float
    low: float
    high: float

    def times(self, factor: float) -> Figure:
        """Multiply all numbers, for example by the number of layers."""
        return Figure(**{name: value * factor for name, value in dataclasses.asdict(self).items()})

    def plus(self, number: float) -> Figure:
        """Add a number without an error."""
        return dataclasses.replace(
            self, expected=self.expected + number, low=self.low + number, high=self.high + number
        )


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class BackendPlan:
    """The plan of one backend.

    Attributes:
        name: Name of the backend, with the release if its library is not installed.
        rules: Source of the rules in this plan: an installed version, or the release that the emulation follows.
        refused: Error message of the backend if it cannot be used here. Then all other attributes are empty.
        rows_per_rank: Rows that a rank brings to the backend, including ``rank_padding`` rows of padding.
        sequence_multiple: Multiple of the sequence length that makes ``rank_padding`` 0.
        sent: Bytes that a rank sends to other ranks in a layer, by collective; None if the backend cannot say.
        row_dtypes: Names of the dtypes of the rows on the wire, dispatch first.
        forward: Bytes of all layers in the forward, and of one agreement on row counts.
        backward: Bytes of all layers in the backward.
        between_nodes: Mean of the bytes that a rank sends to other nodes in a step.
        payload_only: Whether ``sent`` counts only rows.
        buffers: Bytes by purpose. In graph-safe mode: the buffers of a dispatch. In eager mode: "rows", the rows of the
            experts.
    """

    name: str
    rules: str
    refused: str | None = None
    rows_per_rank: Figure | None = None
    rank_padding: Figure | None = None
    sequence_multiple: int | None = None
    sent: dict[str, Figure] | None = None
    row_dtypes: str = ""
    forward: Figure | None = None
    backward: Figure | None = None
    between_nodes: float | None = None
    payload_only: bool = False
    buffers: dict[str, Figure] | None = None


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class CapacityPlan:
    """The plan of one capacity factor of graph-safe mode. Each overflow is a share, given as two bounds.

    Attributes:
        factor: Capacity divided by the balanced load.
        rows: Capacity of the experts of a rank, in rows.
        buffer_rows: Rows of the buffer, which has room for expert padding.
        buffer_bytes: Bytes of the buffer.
        overflow: Share of dispatches in which some rank needs more rows.
        step_overflow: Share of steps with such a dispatch, if layers are independent.
        pair_rows: ``pair_rows`` of ``alltoall`` for this factor.
        pair_overflow: Share of dispatches in which some pair of ranks needs more rows than ``pair_rows``.
    """

    factor: CapacityFactor
    rows: int
    buffer_rows: int
    buffer_bytes: int
    overflow: tuple[float, float]
    step_overflow: tuple[float, float]
    pair_rows: int
    pair_overflow: tuple[float, float]


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Forecast:
    """A whole plan. All rows and bytes belong to one rank and one micro-batch.

    Attributes:
        dispatches: Number of dispatches that the figures are counted over.
        simulated: Whether the dispatches are drawn at random.
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
) -> Forecast:
    """Make a plan. It starts no ranks and allocates no buffers.

    Args:
        model: Sizes and config.
        cluster: Ranks and nodes.
        sequences: Rows that a rank brings.
        source: Routing.
        backends: Backends to plan.
        factors: Capacity factors to plan.

    Raises:
        ConfigError: Two numbers do not fit each other, for any backend.
    """
    config, tokens = model.config, sequences.rows_per_rank
    if config.max_tokens_per_rank is not None and tokens > config.max_tokens_per_rank:
        raise ConfigError(
            f"plan: a rank must bring at most max_tokens_per_rank ({config.max_tokens_per_rank}) rows, got {tokens}. "
            "Raise max_tokens_per_rank, or plan fewer tokens."
        )
    shape = shape_of(config, cluster.ep_size, cluster.ranks_per_node)
    loads = count_loads(source.dispatches(shape, tokens), shape)
    job = _Job(model=model, shape=shape, loads=loads, tokens=tokens, simulated=source.simulated)
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
        busiest_expert=job.figure(loads.tokens_CE.amax(1, keepdim=True)),
        backends=tuple(
            _backend_plan(job, candidate, sequences)
            for named in backends
            for candidate in candidates(named, config, shape, tokens)
        ),
        capacities=tuple(_capacity_plan(job, factor) for factor in _all_factors(config, factors)),
    )


@final
@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Job:
    """The inputs of all parts of a plan. ``tokens`` is the largest number of rows of a rank."""

    model: Model
    shape: MoEShape
    loads: Loads
    tokens: int
    simulated: bool

    def figure(self, values_CP: Tensor) -> Figure:
        """Compute the statistics of a number of each dispatch and rank."""
        values_CP = values_CP.double()
        error = float(values_CP.mean(1).std()) / math.sqrt(len(values_CP)) if self.simulated else 0.0
        return Figure(
            expected=float(values_CP.mean()), error=error, low=float(values_CP.min()), high=float(values_CP.max())
        )


def _described(model: Model) -> dict[str, Any]:
    config = model.config
    fields = ("num_experts", "top_k", "hidden_size", "wire_dtype", "graph_safe", "max_tokens_per_rank")
    return {
        "name": model.name,
        **{field: getattr(config, field) for field in fields},
        "num_groups": None if model.groups is None else model.groups.num_groups,
        "topk_groups": None if model.groups is None else model.groups.topk_groups,
        "pad_multiple": config.pad_multiple_rows,
        "layers": model.layers,
        "dtype": str(model.dtype).removeprefix("torch."),
    }


def _backend_plan(job: _Job, candidate: Candidate, sequences: Sequences) -> BackendPlan:
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
    wire = candidate.wire(job.shape, _volume(job.loads, padded_CP, ranks_per_node=1), job.model.dtype)
    if wire is None:
        return found
    sent = {label: job.figure(nbytes_CP) for label, nbytes_CP in wire.sent.items()}
    zeros_CP = torch.zeros_like(padded_CP, dtype=torch.float64)
    forward = job.figure(sum((of for label, of in wire.sent.items() if label in FORWARD), zeros_CP))
    backward = job.figure(sum((of for label, of in wire.sent.items() if label not in FORWARD), zeros_CP))
    layers, once = job.model.layers, candidate.agreement_bytes(job.model.config, job.shape.ep_size)
    return dataclasses.replace(
        found,
        sent=sent,
        row_dtypes=dtype_names(wire.row_dtypes),
        forward=forward.times(layers).plus(once),
        backward=backward.times(layers),
        between_nodes=_between_nodes(job, candidate, padded_CP) * layers,
        payload_only=wire.payload_only,
    )


def _volume(loads: Loads, padded_CP: Tensor, *, ranks_per_node: int, once_per_node: bool = False) -> Volume:
    """Count the rows that ranks exchange with ranks on other nodes.

    Args:
        loads: Counts of the dispatches.
        padded_CP: Rows that ranks bring, with padding.
        ranks_per_node: Number of consecutive ranks on a node. With 1, all other ranks are on other nodes.
        once_per_node: Whether a row enters another node only once. It then goes to the rank with the same position on
            its node as the sender.
    """
    size = padded_CP.shape[1]
    node_P = torch.arange(size) // ranks_per_node
    away_PP = node_P.unsqueeze(1) != node_P
    slots_CPP, pairs_CPP = loads.slots_CPP * away_PP, loads.pairs_CPP * away_PP
    others, pairs_out, pairs_in = size - ranks_per_node, pairs_CPP.sum(2), pairs_CPP.sum(1)
    if once_per_node:
        nodes = size // ranks_per_node
        away_CPN = loads.nodes_CPN * (node_P.unsqueeze(1) != torch.arange(nodes))
        others, pairs_out = nodes - 1, away_CPN.sum(2)
        pairs_in = away_CPN.unflatten(1, (nodes, -1)).sum(1).transpose(1, 2).flatten(1)
    return Volume(
        rows=padded_CP.double(),
        others=torch.full_like(padded_CP, others).double(),
        pairs_out=pairs_out.double(),
        pairs_in=pairs_in.double(),
        slots_out=slots_CPP.sum(2).double(),
        slots_in=slots_CPP.sum(1).double(),
    )


def _between_nodes(job: _Job, candidate: Candidate, padded_CP: Tensor) -> float:
    """Return the mean of the bytes that a rank sends to other nodes in a layer."""

    def wire(*, once_per_node: bool) -> SentBytes:
        assert job.shape.ranks_per_node is not None
        volume = _volume(job.loads, padded_CP, ranks_per_node=job.shape.ranks_per_node, once_per_node=once_per_node)
        found = candidate.wire(job.shape, volume, job.model.dtype)
        assert found is not None
        return found

    found = wire(once_per_node=False)
    if found.once_per_node:
        found = wire(once_per_node=True)
    return float(sum(nbytes_CP.mean() for nbytes_CP in found.sent.values()))


def _buffers(job: _Job, candidate: Candidate, rows: int) -> dict[str, Figure]:
    if job.shape.graph_safe:
        found = candidate.footprint(job.shape, rows, job.model.dtype)
        return {purpose: Figure(expected=size, error=0.0, low=size, high=size) for purpose, size in found.items()}
    rows_CP = job.loads.received_CP + job.loads.expert_padding_CP(job.shape.pad_multiple)
    return {"rows": job.figure(rows_CP).times(job.shape.hidden_size * job.model.dtype.itemsize)}


def _capacity_plan(job: _Job, factor: CapacityFactor) -> CapacityPlan:
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


def _overflow(job: _Job, rows_CPP: Tensor, limit: int, worst: int, *, summed: bool) -> tuple[float, float]:
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
