"""What a model's dispatches come to on a cluster, before there is one."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor

from moe_dispatch.backends.base import Constraints, MoEShape
from moe_dispatch.backends.capacity import Capacity, CapacityFactor, capacity_of
from moe_dispatch.cli.candidates import Candidate, candidates
from moe_dispatch.cli.loads import BOUNDS, Loads, Range
from moe_dispatch.cli.models import Model
from moe_dispatch.cli.names import NamedBackend
from moe_dispatch.cli.sequences import Batch, Parallelism, Sequences, sequences_of
from moe_dispatch.cli.sources import Source
from moe_dispatch.config import DispatcherConfig
from moe_dispatch.dispatchers.requirements import shape_of
from moe_dispatch.errors import ConfigError

# The labels of a forward; what else is sent belongs to the backward.
FORWARD = ("counts", "dispatch", "combine")
FACTORS = (1.0, 1.1, 1.25, 1.5, 2.0)
_RANKS_PER_NODE = 8  # where nobody says
_ANY = 2**62  # rows that nothing needs


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Figure:
    """A number: in the mean of ranks and dispatches, expected, and the least and the most that any of them has."""

    expected: float
    low: float
    high: float

    def times(self, factor: float) -> Figure:
        """The same of so many layers, or so many bytes each."""
        return Figure(expected=self.expected * factor, low=self.low * factor, high=self.high * factor)

    def plus(self, number: float) -> Figure:
        """The same with a number that is known."""
        return Figure(expected=self.expected + number, low=self.low + number, high=self.high + number)


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class BackendPlan:
    """One backend.

    Attributes:
        name: of the backend, with the release where it is not installed.
        rules: where its needs are known from.
        refused: why it cannot be used so, in its words; then nothing else is known.
        rows_per_rank: that a rank brings to the backend, ``rank_padding`` of them for its needs.
        sequence_multiple: a data loader that pads sequences to this leaves no rank padding.
        sent: bytes that a rank sends to others in a layer, by collective; None where the backend does not tell.
        forward: of all layers, ``backward`` likewise; agreement on row counts is in ``forward``, once.
        between_nodes: bytes of a step that a rank sends to other nodes, expected.
        payload_only: only rows are counted.
        buffers: bytes by purpose: of a graph-safe dispatch, or in eager mode "rows", what experts are given.
    """

    name: str
    rules: str
    refused: str | None = None
    rows_per_rank: Figure | None = None
    rank_padding: Figure | None = None
    sequence_multiple: int | None = None
    sent: dict[str, Figure] | None = None
    forward: Figure | None = None
    backward: Figure | None = None
    between_nodes: float | None = None
    payload_only: bool = False
    buffers: dict[str, Figure] | None = None


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class CapacityPlan:
    """A capacity factor of graph-safe mode.

    Attributes:
        factor: over the balanced load.
        rows: that a rank's experts take; ``buffer_rows`` with room for expert padding; ``buffer_bytes`` of them.
        overflow: how likely one dispatch needs more on some rank, between two bounds.
        step_overflow: likewise any dispatch of a step.
        pair_rows: what the factor is as alltoall's ``pair_rows``; ``pair_overflow`` how likely some pair needs more.
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
    """All of a plan. Rows and bytes are of one rank, one micro-batch."""

    model: dict[str, Any]
    cluster: dict[str, Any]
    sequences: Sequences
    routing: str
    received: Figure
    busiest_rank: Figure
    expert_padding: Figure
    busiest_expert: Figure
    backends: tuple[BackendPlan, ...]
    capacities: tuple[CapacityPlan, ...]

    def as_json(self) -> dict[str, Any]:
        """As plain data."""
        return dataclasses.asdict(self)


def forecast(
    model: Model,
    *,
    ep_size: int,
    nodes: int | None,
    parallelism: Parallelism,
    batch: Batch,
    source: Source,
    backends: Sequence[NamedBackend],
    graph_safe: Mapping[str, Any] | None = None,
    factors: Sequence[float] = FACTORS,
) -> Forecast:
    """Work out a plan. Nothing is exchanged, allocated or probed on other ranks.

    Args:
        model: sizes.
        ep_size: P.
        nodes: over which the ranks of the group lie, in order; by default 8 ranks to each.
        parallelism: what else divides a sequence.
        batch: rows of a rank, or the sequences they come from.
        source: the routing.
        backends: to be planned.
        graph_safe: plan graph-safe mode with these fields of the config; None leaves it as it is.
        factors: capacity factors to look at.

    Raises:
        ConfigError: numbers that do not fit each other, whichever the backend.
    """
    config = model.config
    ranks_per_node = _ranks_per_node(ep_size, nodes)
    sequences = sequences_of(config, parallelism, batch, recorded=source.tokens)
    tokens = sequences.rows_per_rank
    if graph_safe is not None:
        most = config.max_tokens_per_rank or tokens
        config = config.replace(**{"graph_safe": True, "max_tokens_per_rank": most, **graph_safe})
    if config.max_tokens_per_rank is not None and tokens > config.max_tokens_per_rank:
        raise ConfigError(
            f"plan: a rank must bring at most max_tokens_per_rank ({config.max_tokens_per_rank}) rows, got {tokens}. "
            "Raise max_tokens_per_rank, or plan fewer tokens."
        )
    shape = shape_of(config, ep_size, ranks_per_node)
    loads = source.loads(shape, tokens)
    job = _Job(model=dataclasses.replace(model, config=config), shape=shape, loads=loads, tokens=tokens)
    return Forecast(
        model=_described(job.model),
        cluster={"ep_size": ep_size, "nodes": ep_size // ranks_per_node, "ranks_per_node": ranks_per_node},
        sequences=sequences,
        routing=source.text,
        received=_figure([one.received for one in loads]),
        busiest_rank=_figure([one.busiest_rank for one in loads]),
        expert_padding=_figure([one.padding for one in loads]),
        busiest_expert=_figure([one.busiest_expert for one in loads]),
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
    model: Model
    shape: MoEShape
    loads: list[Loads]
    tokens: int


def _ranks_per_node(ep_size: int, nodes: int | None) -> int:
    if ep_size < 1:
        raise ConfigError(f"plan: ep must be 1 or more, got {ep_size}. Give the ranks of one expert-parallel group.")
    if nodes is None:
        return math.gcd(ep_size, _RANKS_PER_NODE)
    if nodes < 1 or ep_size % nodes:
        raise ConfigError(
            f"plan: ep ({ep_size}) must be divisible by nodes ({nodes}). Give the nodes of one expert-parallel group."
        )
    return ep_size // nodes


def _described(model: Model) -> dict[str, Any]:
    config = model.config
    fields = ("num_experts", "top_k", "hidden_size", "wire_dtype", "graph_safe", "max_tokens_per_rank")
    return {
        "name": model.name,
        **{field: getattr(config, field) for field in fields},
        "pad_multiple": config.pad_multiple_rows,
        "layers": model.layers,
        "dtype": str(model.dtype).removeprefix("torch."),
    }


def _backend_plan(job: _Job, candidate: Candidate, sequences: Sequences) -> BackendPlan:
    plan = BackendPlan(name=candidate.label, rules=candidate.rules, refused=candidate.refused)
    if candidate.needs is None or candidate.refused is not None:
        return plan
    brought = [_brought(job, candidate.needs, loads.tokens) for loads in job.loads]
    padding = [rows - loads.tokens for rows, loads in zip(brought, job.loads, strict=True)]
    found = dataclasses.replace(
        plan,
        rows_per_rank=_figure(brought),
        rank_padding=_figure(padding),
        sequence_multiple=sequences.multiple_for(candidate.needs.row_multiple),
        buffers=_buffers(job, candidate, max(int(rows.max()) for rows in brought)),
    )
    sent = _sent(job, candidate, brought)
    if sent is None:
        return found
    layers, once = job.model.layers, candidate.agreement_bytes(job.model.config, job.shape.ep_size)
    across, payload_only = _between_nodes(job, candidate, brought)
    return dataclasses.replace(
        found,
        sent=sent,
        forward=_total([of for label, of in sent.items() if label in FORWARD]).times(layers).plus(once),
        backward=_total([of for label, of in sent.items() if label not in FORWARD]).times(layers),
        between_nodes=across * layers,
        payload_only=payload_only,
    )


def _brought(job: _Job, needs: Constraints, tokens: Tensor) -> Tensor:
    """Rows of each rank with padding, float64 (P,): as many as the most, where the backend needs equal rows."""
    counts = [int(count) for count in tokens]
    if needs.equal_rows:
        most = job.shape.max_tokens_per_rank if job.shape.graph_safe else None
        counts = [max(counts) if most is None else most] * len(counts)
    return torch.tensor([needs.padded(count) for count in counts], dtype=torch.float64)


def _sent(job: _Job, candidate: Candidate, brought: Sequence[Tensor]) -> dict[str, Figure] | None:
    ranges: dict[str, list[Range]] = {}
    for loads, rows in zip(job.loads, brought, strict=True):
        of_bounds: dict[str, dict[str, Tensor]] = {}
        for bound in BOUNDS:
            wire = candidate.wire(job.shape, loads.volume(rows, bound), job.model.dtype)
            if wire is None:
                return None
            of_bounds[bound] = wire.sent
        for label in of_bounds["expected"]:
            ranges.setdefault(label, []).append(Range(**{bound: sent[label] for bound, sent in of_bounds.items()}))
    return {label: _figure(several) for label, several in ranges.items()}


def _between_nodes(job: _Job, candidate: Candidate, brought: Sequence[Tensor]) -> tuple[float, bool]:
    """Bytes of a layer that a rank sends to other nodes, and whether only rows are counted."""
    assert job.shape.ranks_per_node is not None
    once = payload_only = False
    for _ in range(2):  # the backend says only with its bytes whether a row enters a node once
        total = 0.0
        for loads, rows in zip(job.loads, brought, strict=True):
            volume = loads.volume_between_nodes(rows, job.shape.ranks_per_node, once_per_node=once)
            wire = candidate.wire(job.shape, volume, job.model.dtype)
            assert wire is not None
            total += sum(float(nbytes.mean()) for nbytes in wire.sent.values()) / len(job.loads)
            said = wire.once_per_node, wire.payload_only
        once, payload_only = said
    return total, payload_only


def _buffers(job: _Job, candidate: Candidate, rows: int) -> dict[str, Figure]:
    if job.shape.graph_safe:
        found = candidate.footprint(job.shape, rows, job.model.dtype)
        return {purpose: Figure(expected=nbytes, low=nbytes, high=nbytes) for purpose, nbytes in found.items()}
    received, padding = _figure([one.received for one in job.loads]), _figure([one.padding for one in job.loads])
    return {"rows": _total([received, padding]).times(job.shape.hidden_size * job.model.dtype.itemsize)}


def _capacity_plan(job: _Job, factor: CapacityFactor) -> CapacityPlan:
    most = job.shape.max_tokens_per_rank or job.tokens
    shape = dataclasses.replace(job.shape, max_tokens_per_rank=most, capacity_factor=factor)
    capacity = capacity_of(shape)
    pairs = capacity_of(dataclasses.replace(shape, capacity_factor="worst"), pair_factor=factor)
    assert pairs.pair_rows is not None
    overflow = _overflow(job, capacity)
    return CapacityPlan(
        factor=factor,
        rows=capacity.rows,
        buffer_rows=capacity.buffer_rows,
        buffer_bytes=capacity.buffer_rows * shape.hidden_size * job.model.dtype.itemsize,
        overflow=overflow,
        step_overflow=(_in_step(overflow[0], job.model.layers), _in_step(overflow[1], job.model.layers)),
        pair_rows=pairs.pair_rows,
        pair_overflow=_overflow(job, Capacity(rows=_ANY, buffer_rows=_ANY, pair_rows=pairs.pair_rows)),
    )


def _overflow(job: _Job, capacity: Capacity) -> tuple[float, float]:
    low, high = zip(*(loads.overflow(capacity) for loads in job.loads), strict=True)
    return sum(low) / len(low), sum(high) / len(high)


def _in_step(odds: float, layers: int) -> float:
    """Of any of so many dispatches, each on its own."""
    return 1.0 if odds >= 1 else -math.expm1(layers * math.log1p(-odds))


def _all_factors(config: DispatcherConfig, factors: Sequence[float]) -> list[CapacityFactor]:
    own = config.capacity_factor
    for factor in factors:
        if not 0 < factor <= 1024:
            raise ConfigError(f"plan: a capacity factor must be above 0 and at most 1024, got {factor}. Try 1.25.")
    return [*sorted({*factors, *([] if own == "worst" else [own])}), "worst"]


def _figure(of: Sequence[Range | Tensor]) -> Figure:
    """Over ranks and dispatches."""
    ranges = [one if isinstance(one, Range) else Range(expected=one, low=one, high=one) for one in of]
    return Figure(
        expected=sum(float(one.expected.mean()) for one in ranges) / len(ranges),
        low=min(float(one.low.min()) for one in ranges),
        high=max(float(one.high.max()) for one in ranges),
    )


def _total(figures: Sequence[Figure]) -> Figure:
    """Of figures added up; bounds are those of all at once."""
    return Figure(
        expected=sum(of.expected for of in figures),
        low=sum(of.low for of in figures),
        high=sum(of.high for of in figures),
    )
