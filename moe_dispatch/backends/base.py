"""The contract every backend stands behind (``PROTOCOL = 1``)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Literal, final

import torch
from pydantic import BaseModel, ConfigDict
from torch import Tensor

from moe_dispatch.backends.capacity import Capacity, CapacityFactor, capacity_of, worst_rows
from moe_dispatch.backends.volume import SentBytes, Volume
from moe_dispatch.backends.workspace import Workspace
from moe_dispatch.communication import Communicator
from moe_dispatch.errors import StateError
from moe_dispatch.permutation import (
    Permutation,
    SlotIndex,
    TorchPermutation,
    accumulation_dtype,
    choose_permutation,
    group_slots,
    group_statically,
    index_bytes,
)
from moe_dispatch.probing import Rejected, Usable

PROTOCOL = 1
"""Version of the contract between dispatchers and backends. A backend states the version it was written for."""

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
        group_sizes: allowed ep sizes, None for any; ``group_sizes_hint`` says what to do about another one.
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
    group_sizes_hint: str = "Use another ep_size or another backend."
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
        """The rows that a rank with ``rows`` rows brings."""
        return -(-max(rows, self.min_rows) // self.row_multiple) * self.row_multiple

    def brought(self, rows: int, sizes: Sizes) -> int:
        """The rows that a rank with ``rows`` rows brings to a call: as ranks agreed, else its own rows, padded."""
        return self.padded(rows) if sizes.padded_rows is None else sizes.padded_rows

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


class BackendOptions(BaseModel, ABC):
    """The options of a backend, and all that can be said of it before it is open.

    A config's ``backend`` is parsed into one of these. Fields are frozen and strict; unknown ones are refused.

    Attributes:
        name: what a config writes.
        protocol: the version of this contract that the backend was written for.
        auto_reason: why ``backend="auto"`` does not choose this backend, for the log.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    name: ClassVar[str]
    protocol: ClassVar[int] = PROTOCOL
    auto_reason: ClassVar[str] = "must be chosen by name"

    def probe(self) -> Usable | Rejected:
        """Whether it can run on this machine with these options. Never raises, imports nothing that is missing."""
        return Usable(version=torch.__version__)

    @abstractmethod
    def constraints(self, shape: MoEShape) -> Constraints:
        """What the installed version needs for this shape."""

    @property
    def capacity_bounds(self) -> dict[str, CapacityFactor]:
        """Options that bound the rows of a graph-safe dispatch, by name; "worst" bounds nothing."""
        return {}

    def capacity(self, shape: MoEShape) -> Capacity:
        """Room of a graph-safe dispatch, from the config's factors. Asked only where ``shape.graph_safe``."""
        return capacity_of(shape)

    def wire_bytes(self, shape: MoEShape, volume: Volume, dtype: torch.dtype) -> SentBytes | None:
        """Bytes that ranks send each other in one dispatch, one combine and their backwards. Nothing is exchanged.

        Args:
            shape: graph-safe or eager.
            volume: rows and slots that ranks exchange.
            dtype: of the rows, and of what experts give back.

        Returns:
            Bytes; None where the backend does not tell.
        """
        return None

    def footprint(self, shape: MoEShape, sizes: Sizes, rows: int, dtype: torch.dtype) -> dict[str, int]:
        """Bytes that one graph-safe dispatch allocates, by purpose: what ``Plan.bytes`` tells.

        Args:
            shape: graph-safe.
            sizes: of the dispatch, with a capacity.
            rows: Tp, the rows that a rank brings.
            dtype: of the rows.
        """
        return grouped_bytes(shape, sizes, dtype)

    @abstractmethod
    def open(self, context: BackendContext) -> Backend:
        """The open backend, with its buffers. Collective, in the same order on all ranks."""


def grouped_bytes(
    shape: MoEShape, sizes: Sizes, dtype: torch.dtype, *, arrived_rows: int | None = None
) -> dict[str, int]:
    """Bytes of what experts are given in graph-safe mode; with ``arrived_rows``, S, also of the index behind it."""
    capacity, wide = sizes.capacity, accumulation_dtype(dtype).itemsize
    assert capacity is not None
    # A buffer that our permutation fills has one row more than it gives out, for slots without a place.
    grouped = capacity.buffer_rows if arrived_rows is None else capacity.buffer_rows + 1
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
        """The implementation that reorders rows on a device: as named, or for "auto" the best at hand there."""
        chosen = choose_permutation(self.permutation, device.type)
        if chosen.name != "torch":
            return chosen
        return TorchPermutation(self.workspace.lend, fixed_size=self.shape.graph_safe)

    def group(
        self,
        local_ids_SK: Tensor,
        weights_SK: Tensor,
        capacity: Capacity | None,
        *,
        counts: Sequence[int] = (),
    ) -> SlotIndex:
        """Group slots by this rank's experts, 0 to L-1; slots with another id belong to no expert here.

        Args:
            local_ids_SK: integer (S, K).
            weights_SK: floating (S, K); with a ``capacity`` that may be too small the lightest slots are dropped.
            capacity: room of a graph-safe dispatch; None where the index has as many rows as the routing needs.
            counts: slots per local expert, on the host; only without a capacity.
        """
        shape = self.shape
        if capacity is None:
            return group_slots(local_ids_SK, counts, shape.pad_multiple)
        return group_statically(
            local_ids_SK,
            shape.num_local_experts,
            rows=capacity.rows,
            buffer_rows=capacity.buffer_rows,
            pad_multiple=shape.pad_multiple,
            weights_SK=weights_SK if capacity.rows < worst_rows(shape, capacity.pair_rows) else None,
        )

    def index_from(self, tensors: Sequence[Tensor]) -> SlotIndex:
        """The index of a dispatch, whose ``tensors()`` these are."""
        shape = self.shape
        return SlotIndex.from_tensors(tensors, shape.top_k, shape.pad_multiple, fixed_size=shape.graph_safe)

    def blank_index(
        self, rows: int | None, new_size: Callable[[], int], *, capacity: Capacity | None, device: torch.device
    ) -> SlotIndex:
        """The index of a dispatch that delivers ``rows`` rows, without values, for tracing.

        Args:
            rows: S; None where only running tells.
            new_size: makes a symbol for a size that only running tells.
            capacity: of a graph-safe dispatch, whose sizes are all known.
            device: of the tables.
        """
        return SlotIndex.blank(
            rows,
            self.shape.top_k,
            self.shape.pad_multiple,
            new_size=new_size,
            device=device,
            num_keys=self.shape.num_local_experts,
            buffer_rows=None if capacity is None else capacity.buffer_rows,
        )


class Route(ABC):
    """The way that the rows of one dispatch took, frozen: all that ``combine`` and the backwards need.

    The methods are raw: they are called with gradients off, and autograd is the dispatcher's. All of them but
    ``tensors`` are collective. Padding is never read: expert rows and gradients may hold anything there, NaN included.
    """

    __slots__ = ()

    @abstractmethod
    def send(self, rows_TD: Tensor) -> Tensor:
        """Send other rows the same way, without exchanging counts: (Tp, D) to expert-major rows (R, D)."""

    @abstractmethod
    def combine(self, rows_RD: Tensor, weights_R: Tensor | None) -> Tensor:
        """Bring expert rows back, summed over top_k.

        Args:
            rows_RD: (R, D).
            weights_R: multiply each row by its weight, in ``max(float32, dtype)``; None for a plain sum.

        Returns:
            (Tp, D) in the dtype of ``rows_RD``.
        """

    @abstractmethod
    def dispatch_backward(self, grad_RD: Tensor, grad_R: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Gradients of the dispatched rows, (Tp, D), and of their weights, (Tp, K), where ``grad_R`` is given.

        What a rank passes for ``grad_R``, a tensor or None, is alike on all ranks.
        """

    @abstractmethod
    def combine_backward(
        self, grad_TD: Tensor, rows_RD: Tensor | None, weights_R: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Gradients of the expert rows, (R, D), and of their weights, (R,), where ``rows_RD`` is given.

        Args:
            grad_TD: (Tp, D), the gradient of what ``combine`` gave.
            rows_RD: the rows that were combined; None where no gradient of the weights is wanted. Ranks may differ.
            weights_R: as ``combine`` was given them.
        """

    @property
    def num_rows(self) -> int:
        """Tp, the rows that this rank brought. Only where ``Constraints.compilable``."""
        raise _not_compilable(self)

    @property
    def num_grouped(self) -> int:
        """R, the expert-major rows. Only where ``Constraints.compilable``."""
        raise _not_compilable(self)

    def tensors(self) -> list[Tensor]:
        """The route as tensors, for ``Backend.restore``. Only where ``Constraints.compilable``.

        No tensor shares memory with another one or with what was dispatched. What lives on the host, such as the sizes
        of messages, becomes an int64 tensor on the CPU.
        """
        raise _not_compilable(self)


def _not_compilable(owner: object) -> StateError:
    return StateError(
        f"{type(owner).__qualname__}: a backend that declares compilable must turn its routes into tensors and back, "
        "got one that does not. Define tensors, num_rows and num_grouped of the route, restore and blank_route of the "
        "backend, or declare compilable=False."
    )


@final
@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Arrived:
    """What a backend's dispatch gives back; fields as in ``Dispatched``.

    Attributes:
        route: the backend's own, frozen: for combine and the backwards.
        demand: graph-safe: int64 (2,) on the device, the real rows that this rank's experts needed room for, dropped
            ones included, and the rows that this rank had for its busiest pair, 0 where pairs have no bound.
    """

    rows: Tensor
    weights: Tensor
    tokens_per_expert: Tensor
    real_tokens_per_expert: Tensor
    tokens_per_expert_list: tuple[int, ...] | None
    route: Route
    demand: Tensor | None = None


class Backend(ABC):
    """An open backend: moves aligned rows between ranks; knows nothing of models, layouts or padding of tokens.

    Attributes are set only in ``__init__`` and ``close``; what a call leaves behind lives in its ``Route``. All methods
    are called with gradients off.

    Attributes:
        collective_close: whether ``close`` waits for the peers. A dispatcher that is merely collected then leaves the
            backend open.
    """

    collective_close: ClassVar[bool] = False

    def __init__(self, context: BackendContext) -> None:
        self.context = context

    def reserve(self, sizes: Sizes) -> None:  # noqa: B027 - most backends hold nothing
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
            weights_TK: float32 or float64 (Tp, K), 0 or anything where the id is -1.
            sizes: what the ranks agreed on; with a ``capacity`` in graph-safe mode, where nothing here may read a
                device or have a shape that depends on the routing. Rows beyond ``sum(tokens_per_expert)`` then hold
                anything.
        """

    def dispatch_async(
        self, rows_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor, sizes: Sizes, mark: Tensor | None = None
    ) -> Callable[[], Arrived]:
        """Start ``dispatch``; the returned function completes it. A backend that cannot overlap completes at once.

        Args:
            rows_TD: as in ``dispatch``.
            ids_TK: as in ``dispatch``.
            weights_TK: as in ``dispatch``.
            sizes: as in ``dispatch``.
            mark: only where ``constraints.exchanges_counts``: int64 () on the device, in -1..2**22-1, to be sent to
                every rank with the counts.

        Raises:
            PeerError: some rank has the mark -1, or the marks of the ranks differ; on every rank alike.
        """
        arrived = self.dispatch(rows_TD, ids_TK, weights_TK, sizes)
        return lambda: arrived

    def refuse(self, device: torch.device) -> None:  # noqa: B027 - only where constraints.exchanges_counts
        """Join the count exchange of a dispatch that this rank refuses, with the mark -1.

        ``dispatch_async`` of the peers raises ``PeerError`` where it finds the mark; all ranks then hear the error's
        text.
        """

    def restore(self, tensors: Sequence[Tensor]) -> Route:
        """The route whose ``tensors()`` these are; no device is read. Only where ``Constraints.compilable``."""
        raise _not_compilable(self)

    def blank_route(
        self, num_rows: int | None, weights_TK: Tensor, new_size: Callable[[], int], capacity: Capacity | None
    ) -> Route:
        """The route of a dispatch, its tensors without values, for fake kernels. Only where ``Constraints.compilable``.

        Args:
            num_rows: Tp; None where only running tells.
            weights_TK: for its dtype and device; it may be wrong in all else, which running it refuses.
            new_size: makes a symbol for a size that only running tells. Each must be the length of some tensor of the
                route; sizes that are static need none.
            capacity: of a graph-safe dispatch, whose sizes are all static.
        """
        raise _not_compilable(self)
