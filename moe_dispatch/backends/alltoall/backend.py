"""The backend ``alltoall``, open on a group. ``options`` describes it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import final

import torch
from torch import Tensor

from moe_dispatch.backends.alltoall.fixed import send_table, wanted_here
from moe_dispatch.backends.alltoall.route import AllToAllRoute, Leg, Splits, even_splits, splits_from
from moe_dispatch.backends.alltoall.two_level import WITHIN_NODE, Nodes
from moe_dispatch.backends.base import (
    Arrived,
    Backend,
    BackendContext,
    MoEShape,
    Sizes,
    marks_agree,
)
from moe_dispatch.backends.capacity import Capacity, tokens_of
from moe_dispatch.backends.rank_major import arrive
from moe_dispatch.backends.wire import Packet, id_dtype_for, packet, row_format
from moe_dispatch.communication import Started, read_host
from moe_dispatch.errors import PeerError
from moe_dispatch.permutation import (
    SlotIndex,
    group_slots,
    true_places,
)

# The exchange of counts sends ``rows + mark * _MARK``, where ``mark`` is the mark of the sending rank. Every number of
# rows is smaller than ``_MARK``, so a floor division gives the mark, and the remainder is the number of rows.
_MARK = 2**40


@final
class AllToAll(Backend):
    """The backend over ``torch.distributed`` all-to-all.

    While counts travel, rows are packed, and on the CPU they are also ordered by destination. While rows travel, the
    order in which they will be summed is computed by a sort.

    Cost: one host sync and two collectives (counts, data) per dispatch; one collective per combine, and one per
    backward of either. Each distinct pair of a row and another rank takes these bytes: in dispatch, the row and 6 bytes
    per top_k slot; in combine, the row; in a backward, the row, and 4 bytes per slot for the gradient of the weights.

    With ``levels=2``, every exchange of rows takes two collectives: one between nodes, and one on each node. The number
    of host syncs stays one. Between nodes, each distinct pair of a row and another node takes the bytes above. If a
    dispatch is asynchronous, its collective on the node starts in ``wait``.

    Source: sending a row once per rank, as in DeepEP's normal mode (v1.2.1).

    Args:
        context: The objects that the backend is built with.
        exact: Whether ``reduction`` is "exact".
        nodes: The nodes of the group if rows travel in two legs; None if they travel in one.
    """

    def __init__(self, context: BackendContext, *, exact: bool, nodes: Nodes | None = None) -> None:
        super().__init__(context)
        self._exact = exact
        self._nodes = nodes
        self._width = 1 + context.shape.num_local_experts + (0 if nodes is None else nodes.num_columns)
        self._first_expert = context.communicator.rank * context.shape.num_local_experts

    def dispatch(self, rows_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor, sizes: Sizes) -> Arrived:
        return self.dispatch_async(rows_TD, ids_TK, weights_TK, sizes)()

    def dispatch_async(
        self, rows_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor, sizes: Sizes, mark: Tensor | None = None
    ) -> Callable[[], Arrived]:
        """Exchange counts, then exactly the rows that are needed; in graph-safe mode ``_dispatch_fixed``."""
        if sizes.capacity is not None:
            return self._dispatch_fixed(rows_TD, ids_TK, weights_TK, sizes.capacity)
        space, comm, shape = self.context.workspace, self.context.communicator, self.context.shape
        dtype = rows_TD.dtype  # ``complete`` needs only the dtype, so it does not keep the rows alive
        owner_TK, counts = self._count_slots(ids_TK)
        members_PT = rank_members(owner_TK, comm.size)
        members, to = members_PT, range(comm.size)
        if self._nodes is not None:
            to, owner_TK = self._nodes.relays, self._nodes.node_of(owner_TK)
            members = rank_members(owner_TK, len(to))
        counts_in, work = self._send_counts(counts, members_PT, mark, members)
        form = form_of(shape, rows_TD.dtype, weights_TK.dtype)
        packets = form.pack(rows_TD, weights_TK, ids_TK)
        # On the CPU, order the rows while the counts travel. On a GPU, the number of rows is known after the host read.
        in_order = self._in_order(packets, members) if packets.is_cpu else None
        if work is not None:
            work.wait()
        found = self._read_counts(counts, counts_in)
        splits = found.splits[0]
        in_order = in_order or self._in_order(packets, members, sum(splits.rows_out))
        leg, land = self._send(in_order, owner_TK, splits, to)

        def complete() -> Arrived:
            received, legs = land(), [leg]
            if self._nodes is not None:
                second, received = self._forward(received, form, found.splits[1], self._nodes)
                legs.append(second)
            rows_SD, weights_SK, ids_SK = form.unpack(received)
            keys_SK, entries = ids_SK - self._first_expert, 1  # below 0 or above L-1 for experts of other ranks
            if self._nodes is not None:
                keys_SK, entries = self._nodes.keys(keys_SK, found.rows_in), self._nodes.num_nodes
            index = self.context.group(
                keys_SK,
                weights_SK,
                None,
                counts=found.tokens_per_expert,
                entries_per_key=entries,
                real_L=counts[: shape.num_local_experts],
            )
            route = AllToAllRoute(
                context=self.context,
                legs=tuple(legs),
                index=index,
                weights_TK=weights_TK if self._exact else None,
            )
            arrived = arrive(route, rows_SD, weights_SK, dtype)
            space.give(received)
            return arrived

        return complete

    def _forward(self, received: Tensor, form: Packet, splits: Splits, nodes: Nodes) -> tuple[Leg, Tensor]:
        """Send packets that arrived on this node to the ranks of the node that need them.

        Returns:
            The leg, and the packets that arrived on this rank. ``received`` is given back to the workspace.
        """
        owner_SK, to = nodes.neighbour_of(form.ids(received)), nodes.neighbours
        in_order = self._in_order(received, rank_members(owner_SK, len(to)), sum(splits.rows_out))
        self.context.workspace.give(received)
        leg, land = self._send(in_order, owner_SK, splits, to, suffix=WITHIN_NODE)
        return leg, land()

    def _send(
        self, in_order: tuple[Tensor, Tensor], owner_TK: Tensor, splits: Splits, to: range, *, suffix: str = ""
    ) -> tuple[Leg, Callable[[], Tensor]]:
        """Start to send packets.

        Args:
            in_order: Result of ``_in_order``.
            owner_TK: int64 (T, K), 1 + the place in ``to`` of the rank to which each slot goes; 0 for slots that go
                nowhere.
            splits: Counts of the exchange.
            to: The ranks to which packets go.
            suffix: Text behind the labels of the collectives of this leg.

        Returns:
            The leg, and a function that waits for the packets and returns them in memory of the workspace.
        """
        source_S, outgoing = in_order
        space, device = self.context.workspace, source_S.device
        received = space.take((sum(splits.rows_in), outgoing.shape[1]), device)
        label = f"dispatch{suffix}"
        work = self.context.communicator.all_to_all(received, outgoing, splits.rows_in, splits.rows_out, label=label)
        # While the rows travel, compute the order of the sums.
        by_row = source_S.sort(stable=True)
        cu_T = torch.searchsorted(by_row.values, torch.arange(owner_TK.shape[0] + 1, device=device))
        slots_by_rank = None
        if self._exact:
            slots_by_rank = group_slots(owner_TK - 1, [splits.slots_out[rank] for rank in to])
        leg = Leg(
            context=self.context,
            splits=splits,
            suffix=suffix,
            source_S=source_S,
            member_S=by_row.indices,
            cu_T=cu_T,
            slots_by_rank=slots_by_rank,
        )

        def land() -> Tensor:
            if work is not None:
                work.wait()
            space.give(outgoing)
            return received

        return leg, land

    def _dispatch_fixed(
        self, rows_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor, capacity: Capacity
    ) -> Callable[[], Arrived]:
        """Exchange ``pair_rows`` rows with every rank, without reading a count."""
        space, comm, shape = self.context.workspace, self.context.communicator, self.context.shape
        pair_rows, dtype = capacity.pair_rows, rows_TD.dtype
        assert pair_rows is not None
        owner_TK, counts = self._count_slots(ids_TK)
        wanted_P = counts.view(-1, self._width)[1 : 1 + comm.size].sum(1)
        table = send_table(
            rank_members(owner_TK, comm.size),
            owner_TK,
            weights_TK,
            pair_rows,
            may_overflow=pair_rows < tokens_of(shape),
        )
        form = form_of(shape, rows_TD.dtype, weights_TK.dtype, note=True)
        outgoing, received = (space.take((comm.size * pair_rows, form.stride), rows_TD.device) for _ in range(2))
        permutation = self.context.permutation_of(outgoing)
        table.fill(outgoing, form.pack(rows_TD, weights_TK, ids_TK), wanted_P, form, permutation)
        splits = even_splits(pair_rows, comm.size)
        work = comm.all_to_all(received, outgoing, splits.rows_in, splits.rows_out, label="dispatch")

        def complete() -> Arrived:
            if work is not None:
                work.wait()
            space.give(outgoing)
            rows_SD, weights_SK, ids_SK = form.unpack(received)
            index = self.context.group(ids_SK - self._first_expert, weights_SK, capacity)
            leg = Leg(
                context=self.context,
                splits=splits,
                source_S=table.source_S,
                member_S=table.member_N,
                cu_T=table.cu_T,
            )
            arrived = arrive(
                AllToAllRoute(context=self.context, legs=(leg,), index=index),
                rows_SD,
                weights_SK,
                dtype,
                needed=wanted_here(received, form, pair_rows),
                busiest_pair=table.busiest,
            )
            space.give(received)
            return arrived

        return complete

    def _in_order(self, packets: Tensor, members_PT: Tensor, count: int | None = None) -> tuple[Tensor, Tensor]:
        """Return which rows are sent, int64 (count,), and their packets. ``count`` may be None on the CPU."""
        source_S = true_places(members_PT, count).select(1, 1).contiguous()
        outgoing = self.context.workspace.take((source_S.shape[0], packets.shape[1]), packets.device)
        self.context.permutation_of(packets).gather(packets, source_S, outgoing)
        return source_S, outgoing

    @property
    def _suffixes(self) -> tuple[str, ...]:
        """Text behind the labels of the collectives of each leg."""
        return ("",) if self._nodes is None else ("", WITHIN_NODE)

    def restore(self, tensors: Sequence[Tensor]) -> AllToAllRoute:
        shape, rest = self.context.shape, list(tensors)

        def pop(count: int) -> list[Tensor]:
            return [rest.pop(0) for _ in range(count)]

        counts = [] if shape.graph_safe else pop(len(self._suffixes))
        weights_TK = rest.pop(0) if self._exact else None
        legs: list[Leg] = []
        for number, suffix in enumerate(self._suffixes):
            (source_S, member_S, cu_T), by_rank = pop(3), None
            if self._exact:
                by_rank = SlotIndex.from_tensors(pop(4), shape.top_k, 1, fixed_size=False)
            if shape.graph_safe:
                splits = even_splits(source_S.shape[0] // shape.ep_size, shape.ep_size)
            else:
                splits = splits_from(counts[number], shape.ep_size, exact=self._exact)
            legs.append(
                Leg(
                    context=self.context,
                    splits=splits,
                    suffix=suffix,
                    source_S=source_S,
                    member_S=member_S,
                    cu_T=cu_T,
                    slots_by_rank=by_rank,
                )
            )
        index = self.context.index_from(rest)
        return AllToAllRoute(context=self.context, legs=tuple(legs), index=index, weights_TK=weights_TK)

    def blank_route(
        self, num_rows: int | None, weights_TK: Tensor, new_size: Callable[[], int], capacity: Capacity | None
    ) -> AllToAllRoute:
        shape, device = self.context.shape, weights_TK.device
        table = partial(torch.empty, dtype=torch.int64, device=device)
        index = partial(self.context.blank_index, new_size=new_size, capacity=capacity, device=device)
        if capacity is not None:
            assert num_rows is not None
            assert capacity.pair_rows is not None
            places = capacity.pair_rows * shape.ep_size
            leg = Leg(
                context=self.context,
                splits=even_splits(capacity.pair_rows, shape.ep_size),
                source_S=table(places),
                member_S=table(num_rows * shape.ep_size),
                cu_T=table(num_rows + 1),
            )
            return AllToAllRoute(context=self.context, legs=(leg,), index=index(places))
        none, slots = [0] * shape.ep_size, [0] * (shape.ep_size if self._exact else 0)
        splits = Splits(rows_out=none, rows_in=none, slots_out=slots, slots_in=slots)
        legs: list[Leg] = []
        for suffix in self._suffixes:
            sent, edges = new_size(), new_size() if num_rows is None or legs else num_rows + 1
            by_rank = None
            if self._exact:
                by_rank = SlotIndex.blank(edges - 1, shape.top_k, 1, new_size=new_size, device=device)
            legs.append(
                Leg(
                    context=self.context,
                    splits=splits,
                    suffix=suffix,
                    source_S=table(sent),
                    member_S=table(sent),
                    cu_T=table(edges),
                    slots_by_rank=by_rank,
                )
            )
        weights = None
        if self._exact:
            weights = weights_TK.new_empty(new_size() if num_rows is None else num_rows, shape.top_k)
        return AllToAllRoute(context=self.context, legs=tuple(legs), index=index(None), weights_TK=weights)

    def refuse(self, device: torch.device) -> None:
        comm = self.context.communicator
        mark = torch.full((comm.size, self._width), -1, dtype=torch.int64, device=device)
        ones = [1] * comm.size
        work = comm.all_to_all(torch.empty_like(mark), mark, ones, ones, label="counts")
        if work is not None:
            work.wait()

    def _count_slots(self, ids_TK: Tensor) -> tuple[Tensor, Tensor]:
        """Return the owner of each slot as ``rank_members`` takes it, and the table of ``_send_counts`` with slots."""
        shape, tables = self.context.shape, self.context.permutation_of(ids_TK).tables
        length = (1 + 2 * shape.ep_size) * self._width
        return tables.count_owners(ids_TK, shape.num_local_experts, self._width, length, graph_safe=shape.graph_safe)

    def _send_counts(
        self, counts: Tensor, members_PT: Tensor, mark: Tensor | None, members_MT: Tensor
    ) -> tuple[Tensor, Started | None]:
        """Start to tell every rank how many slots come for each of its experts, and how many rows.

        The counts stand in a table of L + 1 columns: the number of slots of each of L experts, then the number of rows.
        Columns of ``Nodes.write_counts`` may follow.
        Row 0 is for the sums of all counts that come in. Rows 1 to P are the counts that go to ranks 0 to P-1. Rows P+1
        to 2P are the counts that come from ranks 0 to P-1.

        Args:
            counts: The table, int64 and flat. Entry (r + 1) * width + e counts the slots of local expert e of rank r.
                Slots without an expert are counted in row 0, which is overwritten later. This function fills the rest.
            members_PT: Result of ``rank_members``.
            mark: Mark of this rank, which is added to each number of rows as ``mark * _MARK``; None for no mark. The
                mark -1 makes the number negative.
            members_MT: bool (M, T), True if the node owns at least one expert of the row; used only with ``levels=2``.

        Returns:
            The last P rows of the table, which the exchange fills; and the exchange under way, or None if it is
            complete.
        """
        size, width, rows_at = self.context.communicator.size, self._width, self.context.shape.num_local_experts
        _, outgoing, received = counts.view(-1, width).split_with_sizes([1, size, size])
        num_rows_P = torch.sum(members_PT, 1, out=outgoing.select(1, rows_at))
        if self._nodes is not None:
            self._nodes.write_counts(outgoing, members_MT)
        if mark is not None:
            num_rows_P.add_(mark, alpha=_MARK)
        ones = [1] * size  # row p of ``outgoing`` goes to rank p; started, not awaited
        return received, self.context.communicator.all_to_all(received, outgoing, ones, ones, label="counts")

    def _read_counts(self, counts: Tensor, received: Tensor) -> _Counts:
        """Sum the counts that came in, and read all counts on the host at once."""
        size, slots, width = self.context.communicator.size, self.context.shape.num_local_experts, self._width
        torch.sum(received, 0, out=counts[:width])
        host = read_host(counts)
        rows = host[slots::width]
        if not marks_agree({count // _MARK for count in rows[1 + size :]}):
            raise PeerError("Some rank refused its call, or made another one.")
        rows = [count % _MARK for count in rows]
        rows_out, rows_in = rows[1 : 1 + size], rows[1 + size :]
        if self._nodes is not None:
            host[slots::width] = rows
            return _Counts(tokens_per_expert=host[:slots], rows_in=rows_in, splits=self._nodes.splits(host))
        slots_out, slots_in = [], []
        if self._exact:
            by_rank = [sum(host[start : start + slots]) for start in range(width, len(host), width)]
            slots_out, slots_in = by_rank[:size], by_rank[size:]
        splits = Splits(rows_out=rows_out, rows_in=rows_in, slots_out=slots_out, slots_in=slots_in)
        return _Counts(tokens_per_expert=host[:slots], rows_in=rows_in, splits=(splits,))


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class _Counts:
    """The counts of one dispatch, on the host.

    Attributes:
        tokens_per_expert: Number of slots of each local expert.
        rows_in: Number of rows of each rank with at least one expert here.
        splits: Splits of each leg.
    """

    tokens_per_expert: list[int]
    rows_in: list[int]
    splits: tuple[Splits, ...]


@cache
def form_of(shape: MoEShape, row_dtype: torch.dtype, weight_dtype: torch.dtype, *, note: bool = False) -> Packet:
    """Return the format of the packets of a dispatch. In graph-safe mode they have a note."""
    row = row_format(row_dtype, shape.hidden_size, shape.wire_dtype)
    return packet(row, shape.top_k, weight_dtype, id_dtype_for(shape.num_experts), note=note)


def rank_members(owner_TK: Tensor, ep_size: int) -> Tensor:
    """Return bool (P, T), True if the rank owns at least one expert of the row.

    Args:
        owner_TK: int64 (T, K), 1 + the rank of each slot's expert; 0 for slots that go nowhere.
        ep_size: P.
    """
    members = torch.zeros(ep_size + 1, owner_TK.shape[0], dtype=torch.bool, device=owner_TK.device)
    return members.scatter_(0, owner_TK.t(), True)[1:]
