"""``alltoall``: each row goes once to each rank that owns one of its experts, and one sum comes back from each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Literal, final

import torch
from torch import Tensor

from moe_dispatch.backends.alltoall.fixed import send_table, send_table_bytes, wanted_here
from moe_dispatch.backends.alltoall.route import AllToAllRoute, Splits, even_splits, splits_from
from moe_dispatch.backends.base import (
    Arrived,
    Backend,
    BackendContext,
    BackendOptions,
    Constraints,
    MoEShape,
    Sizes,
    grouped_bytes,
)
from moe_dispatch.backends.capacity import Capacity, CapacityFactor, Factor, capacity_of, tokens_of
from moe_dispatch.backends.rank_major import arrive, back_wire
from moe_dispatch.backends.volume import SentBytes, Volume
from moe_dispatch.backends.wire import Packet, id_dtype_for, packet, row_format
from moe_dispatch.communication import Started, read_host
from moe_dispatch.errors import PeerError
from moe_dispatch.permutation import SlotIndex, accumulation_dtype, count_values, group_slots, true_places

# The exchange of counts sends ``rows + mark * _MARK``, where ``mark`` is the mark of the sending rank. Every number of
# rows is smaller than ``_MARK``, so a floor division gives the mark, and the remainder is the number of rows.
_MARK = 2**40


@final
class AllToAllOptions(BackendOptions):
    """Options of ``alltoall``.

    Attributes:
        reduction: Where the outputs of a row's experts are summed. "fast" sums them in float32 on the rank of the
            experts, and sends one row back, which takes the fewest bytes. "exact" sends the output of every (row,
            expert) pair back and sums in slot order on the rank that sent the row. So the bits of the result are the
            same for every ep_size, but up to top_k times as many bytes travel back.
        pair_rows: In graph-safe mode, the number of rows that each rank sends to each rank. It is a multiple of the
            number that is expected if every token chooses its experts evenly, ``T * (1 - C(E-L, K) / C(E, K))``.
            "worst" stands for ``max_tokens_per_rank`` rows.
    """

    name = "alltoall"
    auto_reason = "is for several ranks"

    reduction: Literal["fast", "exact"] = "fast"
    pair_rows: Factor = "worst"

    def constraints(self, shape: MoEShape) -> Constraints:
        return Constraints(
            exchanges_counts=not shape.graph_safe,
            min_rows=int(shape.graph_safe),
            wire_dtypes=frozenset({"bfloat16", "float8_e4m3fn"}),
            graph_safe=self.reduction == "fast",
            graph_safe_reason='reduction="exact" brings back one row for each slot, as many as the routing says; '
            'reduction="fast" would work',
            drop_order="weight",
            compilable=True,
        )

    @property
    def capacity_bounds(self) -> dict[str, CapacityFactor]:
        return {"pair_rows": self.pair_rows}

    def capacity(self, shape: MoEShape) -> Capacity:
        return capacity_of(shape, pair_factor=self.pair_rows)

    def wire_bytes(self, shape: MoEShape, volume: Volume, dtype: torch.dtype) -> SentBytes:
        wide, back = accumulation_dtype(dtype), row_format(dtype, shape.hidden_size, back_wire(shape.wire_dtype))
        there = _form(shape, dtype, wide, note=shape.graph_safe)
        out, returned, slots = volume.pairs_out, volume.pairs_in, shape.top_k
        if self.reduction == "exact":
            returned, slots = volume.slots_in, 1
        if shape.graph_safe:
            out = returned = volume.others * (self.capacity(shape).pair_rows or 0)
        counts = {} if shape.graph_safe else {"counts": volume.others * 8 * (1 + shape.num_local_experts)}
        return SentBytes(
            sent={
                **counts,
                "dispatch": out * there.stride,
                "combine": returned * back.nbytes,
                "combine.backward": out * back.nbytes,
                "dispatch.backward": returned * packet(back, slots, wide).stride,
            },
            row_dtypes=(there.row.wire_dtype, back.wire_dtype),
        )

    def footprint(self, shape: MoEShape, sizes: Sizes, rows: int, dtype: torch.dtype) -> dict[str, int]:
        assert sizes.capacity is not None
        assert sizes.capacity.pair_rows is not None
        places = shape.ep_size * sizes.capacity.pair_rows
        found = grouped_bytes(shape, sizes, dtype, arrived_rows=places)
        found["index"] += send_table_bytes(shape.ep_size, rows, sizes.capacity.pair_rows)
        form = _form(shape, dtype, accumulation_dtype(dtype), note=True)
        return {**found, "wire": 2 * places * form.stride}

    def open(self, context: BackendContext) -> Backend:
        return AllToAll(context, exact=self.reduction == "exact")


@final
class AllToAll(Backend):
    """The backend over ``torch.distributed`` all-to-all.

    While counts travel, rows are packed, and on the CPU they are also ordered by destination. While rows travel, the
    order in which they will be summed is computed by a sort.

    Cost: one host sync and two collectives (counts, data) per dispatch; one collective per combine, and one per
    backward of either. Each distinct pair of a row and another rank takes these bytes: in dispatch, the row and 6 bytes
    per top_k slot; in combine, the row; in a backward, the row, and 4 bytes per slot for the gradient of the weights.

    Source: sending a row once per rank, as in DeepEP's normal mode (v1.2.1).
    """

    def __init__(self, context: BackendContext, *, exact: bool) -> None:
        super().__init__(context)
        self._exact = exact

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
        shifted_TK = ids_TK + shape.num_local_experts
        owner_TK = shifted_TK.div(shape.num_local_experts, rounding_mode="floor")
        members_PT = rank_members(owner_TK, comm.size)
        counts, counts_in, counting = self._send_counts(shifted_TK + owner_TK, members_PT, mark)
        form = _form(shape, rows_TD.dtype, weights_TK.dtype)
        packets = form.pack(rows_TD, weights_TK, ids_TK)
        # On the CPU, order the rows while the counts travel. On a GPU, the number of rows is known after the host read.
        in_order = self._outgoing(packets, members_PT) if packets.is_cpu else None
        if counting is not None:
            counting.wait()
        splits = self._read_counts(counts, counts_in)
        source_S, outgoing = in_order or self._outgoing(packets, members_PT, sum(splits.rows_out))
        received = space.take((sum(splits.rows_in), form.stride), rows_TD.device)
        work = comm.all_to_all(received, outgoing, splits.rows_in, splits.rows_out, label="dispatch")
        # While the rows travel, compute the order of the sums.
        by_row = source_S.sort(stable=True)
        cu_T = torch.searchsorted(by_row.values, torch.arange(rows_TD.shape[0] + 1, device=rows_TD.device))
        slots_by_rank = group_slots(owner_TK - 1, splits.slots_out) if self._exact else None

        def complete() -> Arrived:
            rows_SD, weights_SK, local_ids_SK = self._land(work, form, outgoing, received)
            real_L = counts[: shape.num_local_experts]
            index = group_slots(local_ids_SK, splits.tokens_per_expert, shape.pad_multiple, real_L=real_L)
            route = self._route(
                splits,
                (source_S, by_row.indices, cu_T),
                index=index,
                slots_by_rank=slots_by_rank,
                weights_TK=weights_TK if self._exact else None,
            )
            arrived = arrive(route, rows_SD, weights_SK, dtype)
            space.give(received)
            return arrived

        return complete

    def _dispatch_fixed(
        self, rows_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor, capacity: Capacity
    ) -> Callable[[], Arrived]:
        """Exchange ``pair_rows`` rows with every rank, without reading a count."""
        space, comm, shape = self.context.workspace, self.context.communicator, self.context.shape
        pair_rows, dtype = capacity.pair_rows, rows_TD.dtype
        assert pair_rows is not None
        owner_TK = (ids_TK + shape.num_local_experts).div(shape.num_local_experts, rounding_mode="floor")
        table = send_table(
            rank_members(owner_TK, comm.size),
            owner_TK,
            weights_TK,
            pair_rows,
            may_overflow=pair_rows < tokens_of(shape),
        )
        form = _form(shape, rows_TD.dtype, weights_TK.dtype, note=True)
        outgoing, received = (space.take((comm.size * pair_rows, form.stride), rows_TD.device) for _ in range(2))
        permutation = self.context.permutation_on(rows_TD.device)
        table.fill(outgoing, form.pack(rows_TD, weights_TK, ids_TK), form, permutation)
        splits = even_splits(pair_rows, comm.size)
        work = comm.all_to_all(received, outgoing, splits.rows_in, splits.rows_out, label="dispatch")

        def complete() -> Arrived:
            rows_SD, weights_SK, local_ids_SK = self._land(work, form, outgoing, received)
            index = self.context.group(local_ids_SK, weights_SK, capacity)
            arrived = arrive(
                self._route(splits, (table.source_S, table.member_N, table.cu_T), index=index),
                rows_SD,
                weights_SK,
                dtype,
                needed=wanted_here(received, form, pair_rows),
                busiest_pair=table.busiest,
            )
            space.give(received)
            return arrived

        return complete

    def _outgoing(self, packets: Tensor, members_PT: Tensor, count: int | None = None) -> tuple[Tensor, Tensor]:
        """Return which rows are sent, int64 (count,), and their packets. ``count`` may be None on the CPU."""
        source_S = true_places(members_PT, count).select(1, 1).contiguous()
        outgoing = self.context.workspace.take((source_S.shape[0], packets.shape[1]), packets.device)
        self.context.permutation_on(packets.device).gather(packets, source_S, outgoing)
        return source_S, outgoing

    def _land(
        self, work: Started | None, form: Packet, outgoing: Tensor, received: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Wait for packets. Return their rows, weights and local expert ids.

        Ids 0 to L-1 are experts of this rank. Other ids, which may be negative, are not.
        """
        if work is not None:
            work.wait()
        self.context.workspace.give(outgoing)
        rows_SD, weights_SK, ids_SK = form.unpack(received)
        return rows_SD, weights_SK, ids_SK - self.context.communicator.rank * self.context.shape.num_local_experts

    def _route(
        self,
        splits: Splits,
        tables: Sequence[Tensor],
        *,
        index: SlotIndex,
        slots_by_rank: SlotIndex | None = None,
        weights_TK: Tensor | None = None,
    ) -> AllToAllRoute:
        source_S, member_S, cu_T = tables
        return AllToAllRoute(
            context=self.context,
            permutation=self.context.permutation_on(source_S.device),
            splits=splits,
            index=index,
            wire_dtype=self.context.shape.wire_dtype,
            source_S=source_S,
            member_S=member_S,
            cu_T=cu_T,
            slots_by_rank=slots_by_rank,
            weights_TK=weights_TK,
        )

    def restore(self, tensors: Sequence[Tensor]) -> AllToAllRoute:
        shape, rest = self.context.shape, list(tensors)
        counts = None if shape.graph_safe else rest.pop(0)
        weights_TK, by_rank = None, None
        if self._exact:
            weights_TK = rest.pop(0)
            by_rank = SlotIndex.from_tensors([rest.pop(0) for _ in range(4)], shape.top_k, 1, fixed_size=False)
        tables, index = rest[:3], self.context.index_from(rest[3:])
        if counts is None:
            return self._route(even_splits(tables[0].shape[0] // shape.ep_size, shape.ep_size), tables, index=index)
        return self._route(
            splits_from(counts, shape.ep_size, exact=self._exact),
            tables,
            index=index,
            slots_by_rank=by_rank,
            weights_TK=weights_TK,
        )

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
            tables = table(places), table(num_rows * shape.ep_size), table(num_rows + 1)
            return self._route(even_splits(capacity.pair_rows, shape.ep_size), tables, index=index(places))
        sent, rows = new_size(), new_size() - 1 if num_rows is None else num_rows
        none, slots = [0] * shape.ep_size, [0] * (shape.ep_size if self._exact else 0)
        splits = Splits(
            rows_out=none,
            rows_in=none,
            slots_out=slots,
            slots_in=slots,
            tokens_per_expert=[0] * shape.num_local_experts,
        )
        tables = table(sent), table(sent), table(rows + 1)
        if not self._exact:
            return self._route(splits, tables, index=index(None))
        by_rank = SlotIndex.blank(rows, shape.top_k, 1, new_size=new_size, device=device)
        weights_TK = weights_TK.new_empty(new_size() if num_rows is None else num_rows, shape.top_k)
        return self._route(splits, tables, index=index(None), slots_by_rank=by_rank, weights_TK=weights_TK)

    def refuse(self, device: torch.device) -> None:
        shape, comm = self.context.shape, self.context.communicator
        mark = torch.full((comm.size, 1 + shape.num_local_experts), -1, dtype=torch.int64, device=device)
        ones = [1] * comm.size
        work = comm.all_to_all(torch.empty_like(mark), mark, ones, ones, label="counts")
        if work is not None:
            work.wait()

    def _send_counts(
        self, places_TK: Tensor, members_PT: Tensor, mark: Tensor | None
    ) -> tuple[Tensor, Tensor, Started | None]:
        """Start to tell every rank how many slots come for each of its experts, and how many rows.

        The counts stand in a table of L + 1 columns: the number of slots of each of L experts, then the number of rows.
        Row 0 is for the sums of all counts that come in. Rows 1 to P are the counts that go to ranks 0 to P-1. Rows P+1
        to 2P are the counts that come from ranks 0 to P-1.

        Args:
            places_TK: int64 (T, K), the entry of the flat table that counts the slot. It is (r + 1) * (L + 1) + e for
                local expert e of rank r. Slots without an expert are counted in row 0, which is overwritten later.
            members_PT: Result of ``rank_members``.
            mark: Mark of this rank, which is added to each number of rows as ``mark * _MARK``; None for no mark. The
                mark -1 makes the number negative.

        Returns:
            The table, int64 and flat; its last P rows, (P, L + 1), which the exchange fills; and the exchange under
            way, or None if it is complete.
        """
        size, width = self.context.communicator.size, 1 + self.context.shape.num_local_experts
        counts = count_values(places_TK.reshape(-1), (1 + 2 * size) * width)
        _, outgoing, received = counts.view(-1, width).split_with_sizes([1, size, size])
        num_rows_P = torch.sum(members_PT, 1, out=outgoing.select(1, -1))
        if mark is not None:
            num_rows_P.add_(mark, alpha=_MARK)
        ones = [1] * size  # row p of ``outgoing`` goes to rank p; started, not awaited
        return counts, received, self.context.communicator.all_to_all(received, outgoing, ones, ones, label="counts")

    def _read_counts(self, counts: Tensor, received: Tensor) -> Splits:
        """Sum the counts that came in, and read all counts on the host at once."""
        size, slots = self.context.communicator.size, self.context.shape.num_local_experts
        torch.sum(received, 0, out=counts[: 1 + slots])
        host = read_host(counts)
        rows = host[slots :: 1 + slots]
        marks = {count // _MARK for count in rows[1 + size :]}
        if len(marks) > 1 or min(marks) < 0:
            raise PeerError("Some rank refused its call, or made another one.")
        rows = [count % _MARK for count in rows]
        rows_out, rows_in = rows[1 : 1 + size], rows[1 + size :]
        slots_out, slots_in = [], []
        if self._exact:
            by_rank = [sum(host[start : start + slots]) for start in range(1 + slots, len(host), 1 + slots)]
            slots_out, slots_in = by_rank[:size], by_rank[size:]
        return Splits(
            rows_out=rows_out, rows_in=rows_in, slots_out=slots_out, slots_in=slots_in, tokens_per_expert=host[:slots]
        )


def _form(shape: MoEShape, row_dtype: torch.dtype, weight_dtype: torch.dtype, *, note: bool = False) -> Packet:
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
