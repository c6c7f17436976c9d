"""The contract every backend stands behind (``PROTOCOL = 1``)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, final

import torch
from pydantic import BaseModel, ConfigDict
from torch import Tensor

from moe_dispatch.backends.capacity import Capacity, CapacityFactor, capacity_of, worst_rows
from moe_dispatch.backends.volume import Volume, Wire
from moe_dispatch.backends.workspace import Workspace
from moe_dispatch.communication import Communicator
from moe_dispatch.permutation import (
    Permutation,
    SlotIndex,
    StaticIndex,
    StaticTorchPermutation,
    TorchPermutation,
    accumulation_dtype,
    blank_index,
    blank_static_index,
    choose_permutation,
    group_statically,
    index_bytes,
    index_from,
    round_up,
    static_index_from,
)
from moe_dispatch.probing import Rejected, Usable

PROTOCOL = 1

WireDtype = Literal["bfloat16", "float8_e4m3fn"]
PermutationName = Literal["auto", "torch", "triton", "te"]
DropOrder = Literal["weight", "position"]


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Sizes:
    """What the ranks agreed on for one dispatch, or for all of a forward.

    Attributes:
        padded_rows: rows that every rank brings; None where each brings its own count.
        group_max_rows: the most rows that any rank brings, padded; None where nobody asked.
        capacity: room of a graph-safe dispatch; None where sizes follow the routing.
    """

    padded_rows: int | None = None
    group_max_rows: int | None = None
    capacity: Capacity | None = None


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Constraints:
    """What a backend needs, as data; the dispatcher meets the needs or refuses.

    Attributes:
        row_multiple: rows per rank are padded up to a multiple of this.
        equal_rows: every rank must bring the same number of rows.
        group_max: ranks agree on the largest number of rows that any of them brings, even where each brings its own.
        min_rows: fewest rows per rank; fewer are padded up to it.
        max_rows: most rows per rank, None for no limit.
        hidden_multiple: hidden size must be a multiple of this.
        max_hidden: largest hidden size, None for no limit.
        dtypes: dtypes of rows it carries, None for any floating dtype.
        devices: device types of rows, None for any.
        max_top_k: largest top_k, None for no limit.
        group_sizes: allowed ep sizes, None for any.
        local_experts_multiple: experts per rank must be a multiple of this.
        max_local_experts: most experts per rank, None for no limit.
        idle_ranks: a rank may receive no row at all; where it may not, the backend raises.
        pads_experts: its library rounds rows per expert up to ``pad_multiple``; elsewhere our permutation does.
        exchanges_counts: ranks exchange counts in every dispatch, so a refusing rank can mark it (``refuse``).
        wire_dtypes: the ``wire_dtype`` values it can honour besides None.
        graph_safe: it has a path without host syncs or data-dependent shapes; ``graph_safe_reason`` says why not.
        drop_order: in which order it drops rows beyond a capacity: "weight" (the lightest slots first; of equal ones
            the last by source rank, token, slot), or "position" (the last of its expert-major rows, that is the
            highest experts first); None where it can only have room for the worst case.
        compilable: it can be traced by torch.compile with ``fullgraph=True``.
        differentiable: both verbs have a backward; else the dispatcher refuses tensors that require grad.
    """

    row_multiple: int = 1
    equal_rows: bool = False
    group_max: bool = False
    min_rows: int = 0
    max_rows: int | None = None
    hidden_multiple: int = 1
    max_hidden: int | None = None
    dtypes: frozenset[torch.dtype] | None = None
    devices: frozenset[str] | None = None
    max_top_k: int | None = None
    group_sizes: frozenset[int] | None = None
    local_experts_multiple: int = 1
    max_local_experts: int | None = None
    idle_ranks: bool = True
    pads_experts: bool = False
    exchanges_counts: bool = False
    wire_dtypes: frozenset[WireDtype] = frozenset()
    graph_safe: bool = False
    graph_safe_reason: str = "it has no static path"
    drop_order: DropOrder | None = None
    compilable: bool = False
    differentiable: bool = True

    @property
    def most_rows(self) -> int | None:
        """The most rows that a rank may bring, padded; None for no limit."""
        return None if self.max_rows is None else self.max_rows // self.row_multiple * self.row_multiple

    def padded(self, rows: int) -> int:
        """How many rows a rank brings that has so many."""
        return round_up(max(rows, self.min_rows), self.row_multiple)

    def sizes(self, largest: int) -> Sizes:
        """What follows from the largest count of any rank."""
        padded = self.padded(largest)
        return Sizes(padded_rows=padded if self.equal_rows else None, group_max_rows=padded)


def listed_sizes(sizes: frozenset[int]) -> str:
    """Group sizes for a text: "2, 4, 8", or "2 to 72"."""
    ordered = sorted(sizes)
    if len(ordered) > 2 and ordered == list(range(ordered[0], ordered[-1] + 1)):
        return f"{ordered[0]} to {ordered[-1]}"
    return ", ".join(map(str, ordered))


class BackendOptions(BaseModel):
    """Base of a backend's typed options; unknown fields are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class MoEShape:
    """What a backend's constraints may depend on.

    Attributes:
        num_experts: E.
        top_k: K.
        hidden_size: D.
        ep_size: P.
        pad_multiple: rows per expert are rounded up to this.
        wire_dtype: what rows travel in; None is their own dtype.
        max_tokens_per_rank: the most rows a rank brings, where the config says.
        ranks_per_node: how many consecutive ranks share a host, detected when the dispatcher is built; None before.
        graph_safe: neither verb may wait for the device or have a shape that depends on the routing.
        capacity_factor: graph-safe room for a rank's experts, over the balanced load, or for the worst case.
    """

    num_experts: int
    top_k: int
    hidden_size: int
    ep_size: int
    pad_multiple: int
    wire_dtype: WireDtype | None = None
    max_tokens_per_rank: int | None = None
    ranks_per_node: int | None = None
    graph_safe: bool = False
    capacity_factor: CapacityFactor = "worst"

    @property
    def num_local_experts(self) -> int:
        """L, experts on each rank."""
        return self.num_experts // self.ep_size


@final
@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class BackendContext:
    """What a backend is built with, once per channel.

    Attributes:
        shape: the sizes.
        communicator: the group, and the one way to its collectives.
        needs: its constraints, with what the config overrides.
        permutation: the one-rank reorder asked for; ``permutation_on`` gives it.
        workspace: reused memory.
    """

    shape: MoEShape
    communicator: Communicator
    needs: Constraints = field(default_factory=Constraints)
    permutation: PermutationName = "auto"
    workspace: Workspace = field(default_factory=Workspace)

    @property
    def most_rows(self) -> int | None:
        """The most rows that a rank will ever bring, padded; None where nothing bounds them."""
        known = self.shape.max_tokens_per_rank
        bounds = [self.needs.most_rows, None if known is None else self.needs.padded(known)]
        return min((bound for bound in bounds if bound is not None), default=None)

    def permutation_on(self, device: torch.device) -> Permutation:
        """What reorders rows on a device: as named, or for "auto" the best at hand there."""
        chosen = choose_permutation(self.permutation, device.type)
        if chosen.name != "torch":
            return chosen
        return (StaticTorchPermutation if self.shape.graph_safe else TorchPermutation)(self.workspace.lend)

    def grouped_bytes(self, capacity: Capacity, dtype: torch.dtype, arrived_rows: int | None = None) -> dict[str, int]:
        """Bytes of what experts are given, and with ``arrived_rows``, S, of the ``StaticIndex`` behind it."""
        shape, wide = self.shape, accumulation_dtype(dtype).itemsize
        grouped = capacity.buffer_rows if arrived_rows is None else capacity.buffer_rows + StaticIndex.spare
        found = {"rows": grouped * shape.hidden_size * dtype.itemsize, "weights": grouped * wide}
        if arrived_rows is not None:
            found["index"] = index_bytes(
                arrived_rows,
                shape.top_k,
                shape.num_local_experts,
                buffer_rows=capacity.buffer_rows,
                pad_multiple=shape.pad_multiple,
            )
        return found

    def index_from(self, tensors: Sequence[Tensor]) -> SlotIndex:
        """The index of a dispatch, whose ``tensors()`` these are."""
        return (static_index_from if self.shape.graph_safe else index_from)(tensors, self.shape.top_k)

    def blank_index(
        self, rows: int | None, new_size: Callable[[], int], *, capacity: Capacity | None, device: torch.device
    ) -> SlotIndex:
        """The index of a dispatch that delivers so many rows, without values: for tracing, by symbols of sizes.

        Args:
            rows: S; None where only running tells.
            new_size: makes a symbol for a size that only running tells.
            capacity: of a graph-safe dispatch, whose sizes are all known.
            device: of the tables.
        """
        shape = self.shape
        if capacity is None:
            edges = new_size() if rows is None else rows + 1
            return blank_index(edges, shape.top_k, shape.pad_multiple, new_size=new_size, device=device)
        assert rows is not None
        sizes = {"buffer_rows": capacity.buffer_rows, "pad_multiple": shape.pad_multiple}
        return blank_static_index(rows, shape.top_k, shape.num_local_experts, **sizes, device=device)

    def group_statically(self, local_ids_SK: Tensor, weights_SK: Tensor, capacity: Capacity) -> StaticIndex:
        """Group slots by this rank's experts, 0 to L-1, in a buffer of fixed size; by weight where not all fit."""
        return group_statically(
            local_ids_SK,
            self.shape.num_local_experts,
            rows=capacity.rows,
            buffer_rows=capacity.buffer_rows,
            pad_multiple=self.shape.pad_multiple,
            weights_SK=weights_SK if capacity.rows < worst_rows(self.shape, capacity.pair_rows) else None,
        )


@final
@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Arrived:
    """What a backend's dispatch gives back; fields as in ``Dispatched``, ``state`` is the backend's own and frozen.

    Attributes:
        demand: graph-safe: int64 (2,) on the device, the real rows that this rank's experts needed room for, dropped
            ones included, and the rows that this rank had for its busiest pair, 0 where pairs have no bound.
    """

    rows: Tensor
    weights: Tensor
    tokens_per_expert: Tensor
    real_tokens_per_expert: Tensor
    tokens_per_expert_list: tuple[int, ...] | None
    state: Any
    demand: Tensor | None = None


class Backend(ABC):
    """Moves aligned rows between ranks; knows nothing of models, layouts or padding of tokens.

    A backend sets attributes only in ``__init__``, ``open`` and ``close``; a call's state lives in ``Arrived.state``.
    """

    name: ClassVar[str]
    protocol: ClassVar[int] = PROTOCOL
    Options: ClassVar[type[BackendOptions]] = BackendOptions
    # Whether close() is collective: then a dispatcher that is merely collected leaves the backend open.
    collective_close: ClassVar[bool] = False

    def __init__(self, context: BackendContext, options: BackendOptions) -> None:
        self.context = context
        self.options = options

    @classmethod
    def probe(cls, options: BackendOptions) -> Usable | Rejected:
        """Whether it can run on this machine, with these options. Never raises, imports nothing that is not there."""
        return Usable(version=torch.__version__)

    @classmethod
    @abstractmethod
    def constraints(cls, shape: MoEShape, options: BackendOptions) -> Constraints:
        """What the installed version needs for this shape."""

    @classmethod
    def capacity(cls, shape: MoEShape, options: BackendOptions) -> Capacity:
        """Room of a graph-safe dispatch, from the config's factors. Asked only where ``shape.graph_safe``."""
        return capacity_of(shape)

    @classmethod
    def wire_bytes(cls, shape: MoEShape, options: BackendOptions, volume: Volume, dtype: torch.dtype) -> Wire | None:
        """What ranks send each other in one dispatch, combine and their backwards: for plans, nothing is exchanged.

        Args:
            shape: graph-safe or eager.
            options: of the backend.
            volume: what the routing comes to.
            dtype: of the rows, and of what experts give back.

        Returns:
            Bytes; None where the backend does not tell.
        """
        return None

    def footprint(self, sizes: Sizes, rows: int, dtype: torch.dtype) -> dict[str, int]:
        """Bytes that one graph-safe dispatch allocates, by purpose: what ``Plan.bytes`` tells.

        Args:
            sizes: of the dispatch, with a capacity.
            rows: how many this rank brings, padded.
            dtype: of the rows.
        """
        assert sizes.capacity is not None
        return self.context.grouped_bytes(sizes.capacity, dtype)

    def open(self) -> None:  # noqa: B027 - most backends hold nothing
        """Acquire buffers; collective, in the same order on all ranks."""

    def reserve(self, sizes: Sizes) -> None:  # noqa: B027
        """Have room for dispatches of these sizes; called whenever sizes are settled, with the same ones on all ranks.

        Buffers grow here and never inside ``dispatch``, so that no rank decides to on its own.
        """

    def close(self) -> None:  # noqa: B027
        """Release buffers; safe to call twice."""

    @abstractmethod
    def dispatch(self, rows_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor, sizes: Sizes) -> Arrived:
        """Bring every row to the experts it names.

        Args:
            rows_TD: (Tp, D), as many rows as the constraints ask for.
            ids_TK: int64 (Tp, K), global expert ids, no expert twice in a row, -1 for none.
            weights_TK: float32 or float64 (Tp, K), 0 or anything where the id is -1. Wherever gradients are recorded
                they require grad, so that the backward of dispatch runs on every rank alike.
            sizes: what the ranks agreed on; with a ``capacity`` in graph-safe mode, where nothing here may read a
                device or have a shape that depends on the routing. Rows beyond ``sum(tokens_per_expert)`` then hold
                anything.
        """

    def dispatch_async(
        self, rows_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor, sizes: Sizes
    ) -> Callable[[], Arrived]:
        """Start ``dispatch``; the returned function completes it. A backend that cannot overlap completes at once."""
        arrived = self.dispatch(rows_TD, ids_TK, weights_TK, sizes)
        return lambda: arrived

    @abstractmethod
    def dispatch_again(self, rows_TD: Tensor, state: Any) -> Tensor:
        """Send other rows the way of an earlier dispatch, without exchanging counts; expert-major rows (R, D)."""

    @abstractmethod
    def combine(self, rows_RD: Tensor, weights_R: Tensor, state: Any, *, weighted: bool) -> Tensor:
        """Bring expert rows home, summed over top_k.

        Args:
            rows_RD: (R, D); rows that are padding are never read.
            weights_R: the dispatch's weights. They are an input even where ``weighted`` is False, so that the backward
                of combine always leads to the backward of dispatch, on every rank alike.
            state: of the dispatch.
            weighted: multiply each row by its weight in ``max(float32, dtype)``.

        Returns:
            (Tp, D) in the dtype of ``rows_RD``.
        """

    def refuse(self, code: int, device: torch.device) -> None:  # noqa: B027 - only where constraints.exchanges_counts
        """Join the count exchange of a dispatch this rank refuses, so that its peers raise instead of waiting."""
