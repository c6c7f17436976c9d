"""What the dispatches of a trace came to: loads, padding, bytes, and what a capacity would have dropped.

Dimensions: ``C`` dispatches of the trace, ``E`` experts in the whole group, ``P`` its ranks.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from moe_dispatch.backends.base import Backend, BackendOptions, Constraints, MoEShape
from moe_dispatch.backends.capacity import CapacityFactor, balanced_rows, capacity_of
from moe_dispatch.backends.registry import known_backends, load_backend
from moe_dispatch.backends.volume import Volume
from moe_dispatch.cli.timeline import Timeline
from moe_dispatch.config import DispatcherConfig
from moe_dispatch.dispatchers.requirements import check_group
from moe_dispatch.errors import MoEDispatchError
from moe_dispatch.traces import Part, Trace


@final
@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class History:
    """Counts of every dispatch, int64.

    Attributes:
        layer_C: which dispatcher; ``step_C`` how many dispatches it had before.
        tokens_CE: rows that went to each expert.
        pairs_CPP: rows of a rank, of which at least one expert is on the other (or the same).
        slots_CPP: of a rank's rows, pairs of a row and one of its experts on the other (or the same).
        kept_CP: rows of a rank that are given to the backend, before padding.
        cut_CP: rows that are no tokens and are left out; ``masked_CP`` likewise, but sent nowhere with an id of -1.
    """

    trace: Trace
    layer_C: Tensor
    step_C: Tensor
    tokens_CE: Tensor
    pairs_CPP: Tensor
    slots_CPP: Tensor
    kept_CP: Tensor
    cut_CP: Tensor
    masked_CP: Tensor

    @property
    def rows_CP(self) -> Tensor:
        """Rows that a rank's experts got, without padding."""
        return self.slots_CPP.sum(1)

    @property
    def timeline(self) -> Timeline:
        """The loads of experts alone."""
        return Timeline(
            names=self.trace.layers,
            ep_size=self.trace.ep_size,
            layer_C=self.layer_C,
            step_C=self.step_C,
            tokens_CE=self.tokens_CE,
        )


def history_of(trace: Trace) -> History:
    """Count everything.

    Raises:
        TraceError: some ranks are missing, or a row names an expert that there is none of.
    """
    trace.require_whole("report")
    trace.check_ids("report")
    size, num_calls = trace.ep_size, len(trace.calls)

    def zeros(*shape: int) -> Tensor:
        return torch.zeros(num_calls, *shape, dtype=torch.int64)

    history = History(
        trace=trace,
        layer_C=torch.tensor([call.layer for call in trace.calls], dtype=torch.int64),
        step_C=torch.tensor([call.step for call in trace.calls], dtype=torch.int64),
        tokens_CE=zeros(trace.config.num_experts),
        pairs_CPP=zeros(size, size),
        slots_CPP=zeros(size, size),
        kept_CP=zeros(size),
        cut_CP=zeros(size),
        masked_CP=zeros(size),
    )
    for index, call in enumerate(trace.calls):
        for rank, part in enumerate(call.parts):
            _count(history, part, index, rank)
    return history


def _count(history: History, part: Part, index: int, rank: int) -> None:
    """Enter what one rank brought to one dispatch."""
    trace, experts = history.trace, history.trace.config.num_experts
    cut = trace.cuts(part)
    ids = part.sent_ids(cut=cut)
    chosen = torch.zeros(len(ids), experts + 1, dtype=torch.bool).scatter_(1, ids + 1, True)[:, 1:]
    ranks = chosen.view(len(ids), trace.ep_size, experts // trace.ep_size)
    history.tokens_CE[index] += chosen.sum(0)
    history.slots_CPP[index, rank] = ranks.sum((0, 2))
    history.pairs_CPP[index, rank] = ranks.any(2).sum(0)
    real = part.layout.num_real(part.num_rows)
    idle = part.num_rows - (part.num_rows if real is None else real)
    history.kept_CP[index, rank] = len(ids)
    (history.cut_CP if cut else history.masked_CP)[index, rank] = idle


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Share:
    """What one backend makes of the routing: totals over all dispatches and ranks.

    Attributes:
        name: of the backend.
        refused: why it does not take this group or config; then the rest is empty.
        rank_padding: rows without a token that ranks bring, for equal or aligned numbers of rows.
        expert_padding: rows that experts work on, for ``pad_multiple``.
        sent: bytes to other ranks, by collective.
        bytes_PP: the same by sender and receiver; None where the backend does not tell.
        payload_only: only rows are counted.
    """

    name: str
    refused: str = ""
    rank_padding: int = 0
    expert_padding: int = 0
    sent: dict[str, int] = dataclasses.field(default_factory=dict)
    bytes_PP: Tensor | None = None
    payload_only: bool = False


def recorded_share(history: History) -> Share:
    """That of the backend that was recorded, by what it needed there."""
    trace = history.trace
    cls = load_backend(trace.backend_name)
    options = cls.Options() if trace.config.backend_name == "auto" else trace.config.backend_options
    return _share(history, cls, options, trace.needs, trace.config)


def other_shares(history: History) -> list[Share]:
    """Those of the other backends of this package, as they are here, or as newest where they are not."""
    config, shape = history.trace.config, history.trace.shape
    shares = []
    for name in known_backends():
        cls = load_backend(name)
        if name == history.trace.backend_name or not cls.__module__.startswith("moe_dispatch."):
            continue
        try:
            options = cls.Options()
            needs = dataclasses.replace(cls.constraints(shape, options), **config.constraints.given())
            check_group(config, name, shape, needs)
            shares.append(_share(history, cls, options, needs, config))
        except MoEDispatchError as error:
            shares.append(Share(name=name, refused=str(error)))
    return shares


def _share(
    history: History, cls: type[Backend], options: BackendOptions, needs: Constraints, config: DispatcherConfig
) -> Share:
    padded_CP = padded_rows(history.kept_CP, needs, config)
    sent, bytes_PP, payload_only = _traffic(history, cls, options, padded_CP)
    return Share(
        name=cls.name,
        rank_padding=int((padded_CP - history.kept_CP).sum()),
        expert_padding=expert_padding(history, config.pad_multiple_rows),
        sent=sent,
        bytes_PP=bytes_PP,
        payload_only=payload_only,
    )


def padded_rows(kept_CP: Tensor, needs: Constraints, config: DispatcherConfig) -> Tensor:
    """How many rows ranks bring, in each dispatch."""
    if not needs.equal_rows:
        return kept_CP.clone().apply_(needs.padded)
    static = config.graph_safe or config.row_counts == "static"
    largest_C = kept_CP.amax(1)
    if static and config.max_tokens_per_rank is not None:
        largest_C = torch.full_like(largest_C, config.max_tokens_per_rank)
    return largest_C.apply_(needs.padded).unsqueeze(1).expand_as(kept_CP)


def expert_padding(history: History, pad_multiple: int) -> int:
    """Rows that are added so that each expert has a multiple of so many."""
    return int((-history.tokens_CE % pad_multiple).sum())


def _traffic(
    history: History, cls: type[Backend], options: BackendOptions, padded_CP: Tensor
) -> tuple[dict[str, int], Tensor | None, bool]:
    """Bytes by collective, by pair of ranks, and whether they are the rows' alone."""
    shape = history.trace.shape
    others_PP = 1.0 - torch.eye(shape.ep_size, dtype=torch.float64)
    total_PP, sent, payload_only = torch.zeros_like(others_PP), dict[str, float](), False
    for call, pairs_PP, slots_PP, padded_P in zip(
        history.trace.calls, history.pairs_CPP, history.slots_CPP, padded_CP, strict=True
    ):
        # Backends say bytes for each rank; they are linear, so asked for each pair of ranks they say those.
        volume = Volume(
            rows=padded_P.double().unsqueeze(1) * others_PP,
            others=others_PP,
            pairs_out=pairs_PP * others_PP,
            pairs_in=pairs_PP.t() * others_PP,
            slots_out=slots_PP * others_PP,
            slots_in=slots_PP.t() * others_PP,
        )
        wire = cls.wire_bytes(shape, options, volume, call.parts[0].dtype)
        if wire is None:
            return {}, None, False
        payload_only |= wire.payload_only
        for label, bytes_PP in wire.sent.items():
            total_PP += bytes_PP
            sent[label] = sent.get(label, 0.0) + float(bytes_PP.sum())
    return {label: int(count) for label, count in sent.items()}, total_PP, payload_only


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Overflow:
    """What a capacity would have come to.

    Attributes:
        factor: over the balanced load.
        rows: room of each rank.
        steps: share of the steps in which some rank of some dispatcher needed more.
        dropped: share of all rows at experts that would not have fitted.
    """

    factor: CapacityFactor
    rows: int
    steps: float
    dropped: float


def capacity_shape(history: History) -> MoEShape:
    """The shape that capacities are counted for: the config's largest number of rows, or the trace's."""
    trace = history.trace
    return dataclasses.replace(trace.shape, max_tokens_per_rank=trace.config.max_tokens_per_rank or trace.max_rows or 1)


def needed_factor(history: History) -> float:
    """The least ``capacity_factor`` that drops nothing."""
    return int(history.rows_CP.max()) / balanced_rows(capacity_shape(history)) if len(history.rows_CP) else 0.0


def overflows(history: History, factors: Sequence[CapacityFactor]) -> list[Overflow]:
    """What each of some capacities would have come to."""
    shape, rows_CP, found = capacity_shape(history), history.rows_CP, []
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
