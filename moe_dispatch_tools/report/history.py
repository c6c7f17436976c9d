"""Count the dispatches of a trace: loads, padding, bytes, and the rows that a capacity would have dropped.

Dimensions: ``C`` dispatches of the trace, ``E`` experts in the whole group, ``P`` its ranks.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from moe_dispatch.backends.base import BackendOptions, Constraints, MoEShape
from moe_dispatch.backends.capacity import CapacityFactor, balanced_rows, capacity_of
from moe_dispatch.backends.registry import known_backends, load_backend
from moe_dispatch.backends.volume import Volume
from moe_dispatch.config import DispatcherConfig
from moe_dispatch.dispatchers.requirements import check_group, shape_of
from moe_dispatch.errors import MoEDispatchError
from moe_dispatch_tools.loads import Loads, count_loads, padded_rows, rows_between_nodes, rows_within_nodes
from moe_dispatch_tools.placements import in_slots
from moe_dispatch_tools.report.load_sections import Timeline
from moe_dispatch_tools.traces import Part, Trace


@final
@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class History:
    """Counts of every dispatch, int64.

    Attributes:
        trace: The trace.
        layer_C: Index of the dispatcher.
        step_C: Number of earlier dispatches of the same dispatcher.
        loads: Rows that the backend gets, and their destinations.
        cut_CP: Padding rows of a rank that the dispatcher leaves out.
        masked_CP: Padding rows of a rank that the dispatcher keeps, with ids of -1.
        received_CP: Rows that the experts on each rank got if the run planned a placement for each dispatch; else None.
    """

    trace: Trace
    layer_C: Tensor
    step_C: Tensor
    loads: Loads
    cut_CP: Tensor
    masked_CP: Tensor
    received_CP: Tensor | None

    @property
    def timeline(self) -> Timeline:
        """The loads of the experts over time."""
        return Timeline(
            names=self.trace.layers,
            ep_size=self.trace.ep_size,
            layer_C=self.layer_C,
            step_C=self.step_C,
            tokens_CE=self.loads.tokens_CE,
            received_CP=self.received_CP,
        )


def history_of(trace: Trace) -> History:
    """Count the dispatches of a trace.

    Raises:
        TraceError: Some ranks are missing, or an expert id is out of range.
    """
    trace.require_whole("report")
    trace.check_ids("report")
    parts = [part for call in trace.calls for part in call.parts]
    idle_CP = torch.tensor([_idle_rows(part) for part in parts], dtype=torch.int64).view(-1, trace.ep_size)
    cuts_CP = torch.tensor([trace.cuts(part) for part in parts], dtype=torch.bool).view(-1, trace.ep_size)

    def sent() -> Iterator[list[Tensor]]:
        return ([part.sent_ids(cut=trace.cuts(part)) for part in call.parts] for call in trace.calls)

    received_CP = None
    if trace.config.balance is not None:  # planners are pure, so they give the placements of the run again
        shape = shape_of(trace.config, trace.ep_size, trace.ranks_per_node)
        received_CP = count_loads(in_slots(sent(), trace.config, shape, []), shape).received_CP
    return History(
        trace=trace,
        layer_C=torch.tensor([call.layer for call in trace.calls], dtype=torch.int64),
        step_C=torch.tensor([call.step for call in trace.calls], dtype=torch.int64),
        loads=count_loads(sent(), trace.shape),
        cut_CP=idle_CP * cuts_CP,
        masked_CP=idle_CP * ~cuts_CP,
        received_CP=received_CP,
    )


def _idle_rows(part: Part) -> int:
    """Return the number of padding rows."""
    real = part.layout.num_real(part.num_rows)
    return 0 if real is None else part.num_rows - real


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Share:
    """The totals of one backend over all dispatches and ranks.

    Attributes:
        name: Name of the backend.
        refused: Why the backend refuses this group or config. Then all other attributes are empty.
        rank_padding: Padding rows that make the row counts of ranks equal or aligned.
        expert_padding: Padding rows that round the rows of each expert up to ``pad_multiple``.
        sent: Bytes sent to other ranks, by collective.
        bytes_PP: Bytes by sender and receiver; None if the backend cannot say.
        payload_only: Whether ``sent`` counts only rows.
        row_dtypes: Dtypes of the rows on the wire, dispatch first.
    """

    name: str
    refused: str = ""
    rank_padding: int = 0
    expert_padding: int = 0
    sent: dict[str, int] = dataclasses.field(default_factory=dict)
    bytes_PP: Tensor | None = None
    payload_only: bool = False
    row_dtypes: tuple[torch.dtype, ...] = ()


def recorded_share(history: History) -> Share:
    """Total the recorded backend, with the needs that it had in the recorded run."""
    trace = history.trace
    options = trace.config.backend_options or load_backend(trace.backend_name)()
    return _share(history, options, trace.needs, trace.config)


def other_shares(history: History) -> list[Share]:
    """Total the other backends of this package, with their rules on this machine."""
    config, shape = history.trace.config, history.trace.shape
    shares = []
    for name in known_backends():
        cls = load_backend(name)
        if name == history.trace.backend_name or not cls.__module__.startswith("moe_dispatch."):
            continue
        try:
            options = cls()
            needs = dataclasses.replace(options.constraints(shape), **config.constraints.given())
            check_group(config, name, shape, needs)
            shares.append(_share(history, options, needs, config))
        except MoEDispatchError as error:
            shares.append(Share(name=name, refused=str(error)))
    return shares


def _share(history: History, options: BackendOptions, needs: Constraints, config: DispatcherConfig) -> Share:
    rows_CP = history.loads.rows_CP
    padded_CP = padded_rows(rows_CP, needs, config)
    share = Share(
        name=options.name,
        rank_padding=int((padded_CP - rows_CP).sum()),
        expert_padding=int(history.loads.expert_padding_CP(config.pad_multiple_rows).sum()),
    )
    return _with_traffic(share, history, options, padded_CP)


def _with_traffic(share: Share, history: History, options: BackendOptions, padded_CP: Tensor) -> Share:
    """Add the sent bytes to a share, if the backend can say how many it sends."""
    shape = history.trace.shape
    others_PP = 1.0 - torch.eye(shape.ep_size, dtype=torch.float64)
    total_PP, sent, payload_only = torch.zeros_like(others_PP), dict[str, float](), False
    row_dtypes: dict[torch.dtype, None] = {}
    loads, nodes = history.loads, history.loads.nodes_CPN.shape[2]
    for number, (call, pairs_PP, slots_PP, padded_P) in enumerate(
        zip(history.trace.calls, loads.pairs_CPP, loads.slots_CPP, padded_CP, strict=True)
    ):
        # ``wire_bytes`` takes the rows of each rank. Bytes are linear in rows, so it takes the rows of pairs as well.
        rows_PP, legs = padded_P.double().unsqueeze(1) * others_PP, None
        if 1 < nodes < shape.ep_size:
            slots_PN = slots_PP.unflatten(1, (nodes, -1)).sum(2)
            across = rows_between_nodes(torch.stack([loads.nodes_CPN[number], slots_PN]))
            within = rows_within_nodes(torch.stack([pairs_PP, slots_PP]), nodes)
            legs = (
                _of_pairs(rows_PP, others_PP, across[0], across[1]),
                _of_pairs(rows_PP, others_PP, within[0], within[1]),
            )
        volume = _of_pairs(rows_PP, others_PP, pairs_PP * others_PP, slots_PP * others_PP, legs)
        wire = options.wire_bytes(shape, volume, call.parts[0].dtype)
        if wire is None:
            return share
        payload_only |= wire.payload_only
        row_dtypes |= dict.fromkeys(wire.row_dtypes)
        for label, bytes_PP in wire.sent.items():
            total_PP += bytes_PP
            sent[label] = sent.get(label, 0.0) + float(bytes_PP.sum())
    return dataclasses.replace(
        share,
        sent={label: int(count) for label, count in sent.items()},
        bytes_PP=total_PP,
        payload_only=payload_only,
        row_dtypes=tuple(row_dtypes),
    )


def _of_pairs(
    rows_PP: Tensor,
    others_PP: Tensor,
    pairs_PP: Tensor,
    slots_PP: Tensor,
    legs: tuple[Volume, Volume] | None = None,
) -> Volume:
    """Make a volume whose entries belong to a sender and a receiver."""
    return Volume(
        rows=rows_PP,
        others=others_PP,
        pairs_out=pairs_PP,
        pairs_in=pairs_PP.t(),
        slots_out=slots_PP,
        slots_in=slots_PP.t(),
        legs=legs,
    )


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Overflow:
    """The overflow that a capacity would have had.

    Attributes:
        factor: Capacity divided by the balanced load.
        rows: Capacity of each rank, in rows.
        steps: Share of the steps in which some rank of some dispatcher needed more rows.
        dropped: Share of all rows at experts that would have been dropped.
    """

    factor: CapacityFactor
    rows: int
    steps: float
    dropped: float


def capacity_shape(history: History) -> MoEShape:
    """Return the shape for capacities. Its row limit is that of the config, or else the largest number of rows."""
    trace = history.trace
    return dataclasses.replace(trace.shape, max_tokens_per_rank=trace.config.max_tokens_per_rank or trace.max_rows or 1)


def needed_factor(history: History) -> float:
    """Return the smallest ``capacity_factor`` that drops no row."""
    return (
        int(history.loads.received_CP.max()) / balanced_rows(capacity_shape(history))
        if len(history.loads.received_CP)
        else 0.0
    )


def overflows(history: History, factors: Sequence[CapacityFactor]) -> list[Overflow]:
    """Count the overflow that each capacity would have had."""
    shape, rows_CP, found = capacity_shape(history), history.loads.received_CP, []
    num_steps = len(history.step_C.unique())
    for factor in factors:
        room = capacity_of(dataclasses.replace(shape, capacity_factor=factor)).rows
        excess_C = (rows_CP - room).clamp(min=0).sum(1)
        steps = len(history.step_C[excess_C > 0].unique())
        found.append(
            Overflow(
                factor=factor,
                rows=room,
                steps=steps / max(num_steps, 1),
                dropped=int(excess_C.sum()) / max(int(rows_CP.sum()), 1),
            )
        )
    return found
