"""The contract that every backend fulfils (``PROTOCOL = 1``)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, final

import torch
from torch import Tensor

from moe_dispatch.backends.capacity import CapacityFactor, GraphSafeSupport, capacity_of, worst_rows
from moe_dispatch.backends.volume import SentBytes, Volume
from moe_dispatch.backends.wire import Encoded, WireSupport
from moe_dispatch.backends.workspace import Workspace
from moe_dispatch.communication import Communicator
from moe_dispatch.permutation import Permutation, TorchPermutation, choose_permutation
from moe_dispatch.permutation.index import SlotIndex
from moe_dispatch.seams.options import Options
from moe_dispatch.seams.plug_ins import Rejected, Usable
from moe_dispatch.types import Capacity, Sizes

PROTOCOL = 1
"""Version of the contract between dispatchers and backends. A backend states the version it was written for."""

PermutationName = Literal["auto", "torch", "triton"]


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Constraints:
    """The needs of a backend, as data. The dispatcher meets them or refuses.

    Attributes:
        row_multiple: The rows of a rank are padded to a multiple of this number.
        equal_rows: Whether every rank must bring the same number of rows.
        group_max: Whether ranks must agree on the largest number of rows that any rank brings, even if each rank
            brings its own number.
        min_rows: Fewest rows per rank. The rows of a rank with fewer are padded to this number.
        max_rows: Most rows per rank; None for no limit.
        hidden_multiple: The hidden size must be a multiple of this number.
        max_hidden: Largest hidden size; None for no limit.
        dtypes: Dtypes that rows may have; None for any floating dtype.
        devices: Types of devices that rows may be on; None for any.
        max_top_k: Largest top_k; None for no limit.
        group_sizes: Allowed values of ep_size; None for any.
        group_sizes_hint: What to do about another ep_size, for the error message.
        local_experts_multiple: The number of experts per rank must be a multiple of this number.
        max_local_experts: Most experts per rank; None for no limit.
        idle_ranks: Whether a rank may receive no row at all. If not, the backend raises when it happens.
        pads_experts: Whether the library behind the backend rounds the rows per expert up to ``pad_multiple``. If not,
            our permutation does.
        exchanges_counts: Whether ranks exchange counts in every dispatch, so that a rank can refuse a call by a mark
            among its counts (``Backend.refuse``).
        counts_with_sizes: Whether the backend uses ``Sizes.tokens_per_expert``. If so, ranks that agree on the sizes of
            a dispatch sum the counts in the same exchange.
        wire: The wire formats that the backend carries.
        graph_safe: How the backend works without host syncs and data-dependent shapes; None if it cannot.
        graph_safe_reason: Why it cannot, for the error message.
        compilable: Whether torch.compile can trace the backend with ``fullgraph=True``.
        differentiable: Whether both verbs have a backward. If not, the dispatcher refuses tensors that require grad.
        carries: How data travels with rows: "packets" if the backend adds ``Sizes.columns`` to the format of its
            packets, and its route is a ``RankMajorRoute``; "gather" if the rows of each expert are in the order of
            source rank and token, so that an all-gather beside the dispatch is enough; and "no" if their order changes
            from run to run.
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
    counts_with_sizes: bool = False
    wire: WireSupport = field(default_factory=WireSupport)
    graph_safe: GraphSafeSupport | None = None
    graph_safe_reason: str = "it has no static path"
    compilable: bool = False
    differentiable: bool = True
    carries: Literal["packets", "gather", "no"] = "gather"

    @property
    def most_rows(self) -> int | None:
        """Most rows that a rank may bring, padding included; None for no limit."""
        return None if self.max_rows is None else self.max_rows // self.row_multiple * self.row_multiple

    def padded(self, rows: int) -> int:
        """Return the number of rows that a rank with ``rows`` rows brings, padding included."""
        return -(-max(rows, self.min_rows) // self.row_multiple) * self.row_multiple

    def brought(self, rows: int, sizes: Sizes) -> int:
        """Return the rows that a rank with ``rows`` rows brings to a call: the agreed number, or its own, padded."""
        return self.padded(rows) if sizes.padded_rows is None else sizes.padded_rows

    def sizes(self, largest: int) -> Sizes:
        """Return the sizes of a call in which ``largest`` is the largest number of rows of any rank."""
        padded = self.padded(largest)
        return Sizes(padded_rows=padded if self.equal_rows else None, group_max_rows=padded)


def listed_sizes(sizes: frozenset[int]) -> str:
    """Write group sizes for a message: "2, 4, 8", or "2 to 72"."""
    ordered = sorted(sizes)
    if len(ordered) > 2 and ordered == list(range(ordered[0], ordered[-1] + 1)):
        return f"{ordered[0]} to {ordered[-1]}"
    return ", ".join(map(str, ordered))


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class MoEShape:
    """The sizes and settings on which the constraints of a backend may depend.

    Attributes:
        num_experts: E. With spare expert slots, or experts in other slots than their own, a backend takes each slot of
            the group for an expert: it sees ids and counts of slots.
        top_k: K.
        hidden_size: D.
        ep_size: P.
        pad_multiple: The number of rows per expert is rounded up to a multiple of this.
        wire_dtype: Dtype in which rows travel; None for their own dtype.
        grad_wire_dtype: ``wire_dtype`` if the gradient rows of combine travel in this format; None for at least
            bfloat16.
        quantised: Whether experts get the rows quantised, as ``wire_dtype`` says.
        max_tokens_per_rank: Most rows that a rank brings, if the config states it.
        ranks_per_node: Number of consecutive ranks that share a host. It is detected when the dispatcher is built, and
            None before.
        graph_safe: Whether both verbs must neither wait for the device nor have a shape that depends on the routing.
        capacity_factor: Capacity of graph-safe mode for the experts of one rank, as a multiple of the balanced load, or
            "worst" for the worst case.
        planned_rows: Most rows of the experts of one rank, padding included, if a plan bounds them for any routing;
            None without such a plan.
        weighs: Whether combine multiplies the outputs of experts by their weights. Read by formulas of bytes only.
        column_bytes: Bytes of what travels with each row (``carry``). Read by formulas of bytes only; 0 in a call.
    """

    num_experts: int
    top_k: int
    hidden_size: int
    ep_size: int
    pad_multiple: int
    wire_dtype: str | None = None
    grad_wire_dtype: str | None = None
    quantised: bool = False
    max_tokens_per_rank: int | None = None
    ranks_per_node: int | None = None
    graph_safe: bool = False
    capacity_factor: CapacityFactor = "worst"
    planned_rows: int | None = None
    weighs: bool = True
    column_bytes: int = 0

    @property
    def num_local_experts(self) -> int:
        """L, the number of experts on each rank."""
        return self.num_experts // self.ep_size


class BackendOptions(Options, ABC):
    """The options of a backend, and everything that is known about it before it is open.

    The ``backend`` of a config is parsed into such an object. Fields are frozen and strict; unknown fields are refused.

    Attributes:
        name: Name of the backend in a config.
        protocol: Version of this contract that the backend was written for.
        auto_reason: Why ``backend="auto"`` does not choose this backend, for the log.
    """

    name: ClassVar[str]
    protocol: ClassVar[int] = PROTOCOL
    auto_reason: ClassVar[str] = "must be chosen by name"

    def probe(self) -> Usable | Rejected:
        """Return whether the backend can run on this machine with these options. Never raises.

        A package that is not installed must not be imported.
        """
        return Usable(version=torch.__version__)

    @abstractmethod
    def constraints(self, shape: MoEShape) -> Constraints:
        """Return the needs of the installed version for this shape."""

    @property
    def capacity_bounds(self) -> dict[str, CapacityFactor]:
        """Values of the options that limit the rows of a graph-safe dispatch, by name; "worst" is no limit."""
        return {}

    def capacity(self, shape: MoEShape) -> Capacity:
        """Compute the capacity of a dispatch from the config's factors. Called only if ``shape.graph_safe``."""
        return capacity_of(shape)

    def wire_bytes(self, shape: MoEShape, volume: Volume, dtype: torch.dtype) -> SentBytes | None:
        """Compute the bytes that ranks send each other in one dispatch, one combine and their backwards.

        No rank sends anything for this.

        Args:
            shape: Shape of the dispatch, in graph-safe or eager mode.
            volume: Rows and slots that ranks exchange.
            dtype: Dtype of the rows, and of the outputs of the experts.

        Returns:
            The bytes; None if the backend cannot tell.
        """
        return None

    def footprint(self, shape: MoEShape, sizes: Sizes, rows: int, dtype: torch.dtype) -> dict[str, int]:
        """Compute the bytes that a graph-safe dispatch and what follows it allocate, by purpose, for ``Plan.bytes``.

        Args:
            shape: Shape of the dispatch, in graph-safe mode.
            sizes: Sizes of the dispatch, with a capacity.
            rows: Tp, the number of rows that a rank brings.
            dtype: Dtype of the rows.
        """
        from moe_dispatch.backends.footprint import delivered  # noqa: PLC0415 - formulas only

        return delivered(shape, sizes, dtype)

    @abstractmethod
    def open(self, context: BackendContext) -> Backend:
        """Open the backend and make its buffers. Collective: all ranks open their backends in the same order."""


@final
class Permutations(dict[tuple[type, str], Permutation]):
    """The permutation for each type of tensor and of device; chosen at the first use of a key.

    A subclass of Tensor may have no memory that a kernel could read, so it gets torch's.

    Args:
        name: Name of the permutation in the config.
        workspace: Memory that calls reuse.
        fixed_size: Whether all indices have a fixed size.
    """

    def __init__(self, name: str, workspace: Workspace, *, fixed_size: bool) -> None:
        super().__init__()
        self._name, self._workspace, self._fixed_size = name, workspace, fixed_size

    def __missing__(self, key: tuple[type, str]) -> Permutation:
        cls, device_type = key
        is_plain = cls in (Tensor, torch.nn.Parameter)
        chosen: Permutation = choose_permutation(self._name, device_type) if is_plain else TorchPermutation()
        if chosen.name == "torch":
            chosen = TorchPermutation(self._workspace.lend, fixed_size=self._fixed_size)
        self[key] = chosen
        return chosen


@final
@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class BackendContext:
    """The objects that a backend is built with, once per channel.

    Attributes:
        shape: Sizes and settings.
        communicator: The group. All collectives of the backend go through it.
        needs: Constraints of the backend, after the overrides of the config.
        permutation_name: Name of the configured one-rank reorder.
        workspace: Memory that calls reuse.
        debug: Whether each call checks what it can, at the cost of host syncs.
        deliver: Function that returns, from a ``RankMajorRoute`` and rows as they arrived, what stands for the rows of
            experts; None to copy the rows to their experts at once.
        permutations: The reorder itself, by type of tensor and of device. ``permutation_of`` looks it up for a tensor;
            what runs in every call looks it up here, which saves a function call.
    """

    shape: MoEShape
    communicator: Communicator
    needs: Constraints = field(default_factory=Constraints)
    permutation_name: PermutationName = "auto"
    workspace: Workspace = field(default_factory=Workspace)
    debug: bool = False
    deliver: Callable[[Any, Any], Encoded] | None = None
    permutations: Permutations = field(init=False, repr=False)

    def __post_init__(self) -> None:
        """Make the table of permutations, which is filled on use."""
        table = Permutations(self.permutation_name, self.workspace, fixed_size=self.shape.graph_safe)
        object.__setattr__(self, "permutations", table)

    @property
    def most_rows(self) -> int | None:
        """Most rows that a rank will ever bring, padding included; None if there is no limit."""
        known = self.shape.max_tokens_per_rank
        bounds = [self.needs.most_rows, None if known is None else self.needs.padded(known)]
        return min((bound for bound in bounds if bound is not None), default=None)

    def for_arrivals(self, rows: int, nbytes: int, device: torch.device) -> Tensor:
        """Return memory for packets that arrive, uint8 (rows, nbytes). What ``deliver`` keeps is not lent by a pool."""
        if self.deliver is None:
            return self.workspace.lend(rows, nbytes, device=device)
        return torch.empty(rows, nbytes, dtype=torch.uint8, device=device)

    def permutation_of(self, tensor: Tensor) -> Permutation:
        """Return the permutation for a tensor: the one that is named, or for "auto" the best on the tensor's device."""
        return self.permutations[type(tensor), tensor.device.type]

    def group(
        self,
        ids_SK: Tensor,
        weights_SK: Tensor,
        capacity: Capacity | None,
        *,
        first: int = 0,
        counts: Sequence[int] = (),
    ) -> SlotIndex:
        """Make the index that groups slots by the L experts of this rank.

        Args:
            ids_SK: integer (S, K), expert ids. A slot with another id belongs to no expert of this rank.
            weights_SK: floating (S, K). If the capacity is too small, the slots with the smallest weights are dropped.
            capacity: Capacity of a graph-safe dispatch; None for an index with as many rows as the routing needs.
            first: Id of the first expert of this rank.
            counts: Number of slots of each local expert, on the host; needed only without a capacity.
        """
        shape, permutation = self.shape, self.permutation_of(ids_SK)
        if capacity is None:
            return permutation.group_slots(ids_SK, counts, shape.pad_multiple, first=first)
        return permutation.group_statically(
            ids_SK,
            shape.num_local_experts,
            rows=capacity.rows,
            buffer_rows=capacity.buffer_rows,
            pad_multiple=shape.pad_multiple,
            first=first,
            weights_SK=weights_SK if capacity.rows < worst_rows(shape, capacity.pair_rows) else None,
        )


class Route(ABC):
    """A frozen record of how the rows of one dispatch travelled. ``combine`` and the backwards follow it.

    The dispatcher does autograd, and calls all methods with gradients off. All methods are collective. Padding of
    expert rows and of their gradients is never read; it may hold anything, NaN included.
    """

    __slots__ = ()

    @abstractmethod
    def send(self, rows_TD: Tensor) -> Tensor | Encoded:
        """Send other rows, (Tp, D), along the route of the dispatch, without an exchange of counts.

        Returns:
            (R, D), expert-major; as they travelled if ``MoEShape.quantised``.
        """

    @abstractmethod
    def combine(self, rows_RD: Tensor, weights_R: Tensor | None) -> Tensor:
        """Bring expert rows back to their ranks, and sum them over top_k.

        Args:
            rows_RD: The expert rows, (R, D).
            weights_R: The weight by which each row is multiplied in ``max(float32, dtype)``; None for a plain sum.

        Returns:
            The sums, (Tp, D), in the dtype of ``rows_RD``.
        """

    @abstractmethod
    def dispatch_backward(self, grad_RD: Tensor, grad_R: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Compute the gradients of the dispatched rows, (Tp, D), and of their weights, (Tp, K).

        Args:
            grad_RD: (R, D), the gradient of the expert-major rows.
            grad_R: (R,), the gradient of their weights; None if the second result is not wanted. Either all ranks pass
                a tensor, or all pass None.
        """

    @abstractmethod
    def combine_backward(
        self, grad_TD: Tensor, rows_RD: Tensor | None, weights_R: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Compute the gradients of the expert rows, (R, D), and of their weights, (R,).

        Args:
            grad_TD: (Tp, D), the gradient of the result of ``combine``.
            rows_RD: The rows that ``combine`` was given; None if the gradient of the weights is not wanted. One rank
                may pass rows and another None.
            weights_R: The weights that ``combine`` was given.
        """


@final
@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Arrived:
    """The result of a backend's dispatch. The fields that are not described here are fields of ``Dispatched``.

    Attributes:
        rows: The rows; as they travelled if ``MoEShape.quantised``.
        route: Route of this dispatch, for combine and the backwards.
        wants_weights: Whether the weights of some rank require grad. The marks of a dispatch tell it; a backend without
            marks leaves True.
        demand: int64 (2,) on the device, in graph-safe mode; else None. The first entry is the number of real rows that
            this rank's experts needed room for, dropped rows included. The second is the largest number of rows that
            this rank had for any one rank, or 0 if the backend has no ``pair_rows``.
    """

    rows: Tensor | Encoded
    weights: Tensor
    tokens_per_expert: Tensor
    real_tokens_per_expert: Tensor
    tokens_per_expert_list: tuple[int, ...] | None
    route: Route
    wants_weights: bool = True
    demand: Tensor | None = None


class Backend(ABC):
    """An open backend. It moves aligned rows between ranks, and knows nothing of models, layouts or padding of tokens.

    Attributes are set only in ``__init__`` and ``close``. The state of a call is kept in its ``Route``. All methods are
    called with gradients off.

    Attributes:
        collective_close: Whether ``close`` waits for the peers. If so, the backend stays open when a dispatcher is
            garbage-collected without a call of ``close``.
        brings_copies: Whether the backend has ``bring_copies``. If not, ranks exchange expert weights all-to-all.
    """

    collective_close: ClassVar[bool] = False
    brings_copies: bool = False

    def __init__(self, context: BackendContext) -> None:
        self.context = context

    def reserve(self, sizes: Sizes) -> None:  # noqa: B027 - most backends hold nothing
        """Make room for dispatches of these sizes. Called whenever ranks have agreed on sizes, with the same on all.

        Buffers grow here and never inside ``dispatch``, so that no rank decides alone that its buffers grow.
        """

    def memory_held(self) -> int:
        """Return the bytes of memory that stay with the backend between calls, as far as they are known."""
        return self.context.workspace.nbytes

    def close(self) -> None:  # noqa: B027
        """Release buffers. It is safe to call this twice."""

    @abstractmethod
    def dispatch(self, rows_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor, sizes: Sizes) -> Arrived:
        """Send every row to the experts that it names.

        In graph-safe mode this method must not read a device or have a shape that depends on the routing. Rows behind
        the first ``sum(tokens_per_expert)`` may then hold anything.

        Args:
            rows_TD: (Tp, D). The number of rows meets the constraints.
            ids_TK: int64 (Tp, K), global expert ids; -1 for no expert. A row does not name an expert twice.
            weights_TK: float32 or float64 (Tp, K). A weight may be anything where the id is -1.
            sizes: Sizes that the ranks agreed on, with a ``capacity`` in graph-safe mode.
        """

    def start(
        self, rows_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor, sizes: Sizes, mark: Tensor | None = None
    ) -> Any:
        """Start ``dispatch``, and return what ``finish`` needs. A backend without overlap does all of it here.

        Called for ``async_op=True``, and for every dispatch if ``Constraints.exchanges_counts``.

        Args:
            rows_TD: As in ``dispatch``.
            ids_TK: As in ``dispatch``.
            weights_TK: As in ``dispatch``.
            sizes: As in ``dispatch``.
            mark: int64 () on the device, in -1..2**22-1. It is sent to every rank with the counts. Given only if
                ``Constraints.exchanges_counts``.

        Raises:
            PeerError: ``marks.marks_agree`` is false for the marks of the ranks. All ranks raise it.
        """
        return self.dispatch(rows_TD, ids_TK, weights_TK, sizes)

    def finish(self, started: Any) -> Arrived:
        """Wait for the rows of a dispatch. Called once with each result of ``start``."""
        arrived: Arrived = started
        return arrived

    def refuse(self, device: torch.device) -> None:  # noqa: B027 - only where constraints.exchanges_counts
        """Take part in the exchange of counts of a dispatch that this rank refuses, with the mark -1.

        The peers' ``start`` finds the mark and raises ``PeerError``. Then all ranks get the text of the error.
        """

    def bring_copies(self, own_MW: Tensor, copies_PS: Tensor) -> Callable[[], Tensor]:
        """Start to bring the weights of copied experts to their spare slots, without a host sync. Collective.

        ``SlotWeights`` calls this in graph-safe mode with ``balance="exact"``, if ``brings_copies``.

        Args:
            own_MW: (M, W), the weights of the M experts whose home is this rank, contiguous.
            copies_PS: int64 (P, S), the expert in each spare slot of each rank, equal on all ranks. Expert e has the
                home e // M, and no rank holds a copy of its own expert. P * M stands for an empty slot.

        Returns:
            A function that waits for the weights and returns (S, W), valid until the next call. Empty slots hold any
            finite weights.
        """
        raise NotImplementedError
