"""``alltoall``: each row goes once to each rank that owns one of its experts, and comes back once, already summed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal, final

import torch
import torch.distributed as dist
from torch import Tensor

from moe_dispatch.backends.alltoall.fixed import lane_bytes, lanes_of, wanted_here
from moe_dispatch.backends.alltoall.route import AllToAllRoute, Traffic, even_traffic, traffic_from
from moe_dispatch.backends.base import (
    Arrived,
    Backend,
    BackendOptions,
    Constraints,
    MoEShape,
    Sizes,
)
from moe_dispatch.backends.capacity import Capacity, Factor, capacity_of, tokens_of
from moe_dispatch.backends.rank_major import Received, arrive, arrive_statically, bring_home, gradient_wire, send_again
from moe_dispatch.backends.traceable import TracedRoutes
from moe_dispatch.backends.volume import Volume, Wire
from moe_dispatch.backends.wire import Packet, id_dtype_for, packet, row_format
from moe_dispatch.communication import read_host
from moe_dispatch.errors import PeerError, refusal
from moe_dispatch.permutation import (
    SlotIndex,
    accumulation_dtype,
    blank_index,
    count_values,
    group_slots,
    index_from,
    true_places,
)


@final
class AllToAllOptions(BackendOptions):
    """Options of ``alltoall``.

    Attributes:
        reduction: "fast" sums a row's experts on each rank, in float32, before it comes back: the fewest bytes. "exact"
            brings every (row, expert) result back and sums at home in slot order: bit-identical for every ep_size, at
            up to top_k times the bytes on the way back.
        pair_rows: graph-safe: rows that each rank sends to each, over the rows expected when every token chooses its
            experts evenly, ``T * (1 - C(E-L, K) / C(E, K))``; "worst" is ``max_tokens_per_rank``.
    """

    reduction: Literal["fast", "exact"] = "fast"
    pair_rows: Factor = "worst"


@final
class AllToAll(TracedRoutes, Backend):
    """Cost: one host sync and two collectives (counts, data) per dispatch, one per combine, one per backward of either.

    While counts travel, rows are packed, and on the CPU also put in order of destination; while rows travel, their way
    home is sorted.

    Bytes to other ranks: in dispatch, per distinct (row, other rank), the row and 6 bytes per top_k slot; in combine
    the row; in the backwards the row, and 4 bytes per slot for the gradient of the weights. Source: the de-duplication
    is that of DeepEP's normal mode (v1.2.1).
    """

    name = "alltoall"
    Options = AllToAllOptions

    @classmethod
    def constraints(cls, shape: MoEShape, options: BackendOptions) -> Constraints:
        assert isinstance(options, AllToAllOptions)
        return Constraints(
            exchanges_counts=not shape.graph_safe,
            min_rows=int(shape.graph_safe),
            wire_dtypes=frozenset({"bfloat16", "float8_e4m3fn"}),
            graph_safe=options.reduction == "fast",
            graph_safe_reason='reduction="exact" brings back one row for each slot, as many as the routing says; '
            'reduction="fast" would work',
            drop_order="weight",
            compilable=True,
        )

    @classmethod
    def capacity(cls, shape: MoEShape, options: BackendOptions) -> Capacity:
        assert isinstance(options, AllToAllOptions)
        return capacity_of(shape, pair_factor=options.pair_rows)

    @classmethod
    def wire_bytes(cls, shape: MoEShape, options: BackendOptions, volume: Volume, dtype: torch.dtype) -> Wire:
        assert isinstance(options, AllToAllOptions)
        wide, back = accumulation_dtype(dtype), row_format(dtype, shape.hidden_size, gradient_wire(shape.wire_dtype))
        there = _form(shape, dtype, wide, note=shape.graph_safe)
        out, home, slots = volume.pairs_out, volume.pairs_in, shape.top_k
        if options.reduction == "exact":
            home, slots = volume.slots_in, 1
        if shape.graph_safe:
            out = home = volume.others * (cls.capacity(shape, options).pair_rows or 0)
        counts = {} if shape.graph_safe else {"counts": volume.others * 8 * (1 + shape.num_local_experts)}
        return Wire(
            sent={
                **counts,
                "dispatch": out * there.stride,
                "combine": home * back.nbytes,
                "combine.backward": out * back.nbytes,
                "dispatch.backward": home * packet(back, slots, wide).stride,
            }
        )

    def footprint(self, sizes: Sizes, rows: int, dtype: torch.dtype) -> dict[str, int]:
        capacity, size = sizes.capacity, self.context.shape.ep_size
        assert capacity is not None
        assert capacity.pair_rows is not None
        places = size * capacity.pair_rows
        found = self.context.grouped_bytes(capacity, dtype, places)
        found["index"] += lane_bytes(size, rows, capacity.pair_rows)
        return {
            **found,
            "wire": 2 * places * _form(self.context.shape, dtype, accumulation_dtype(dtype), note=True).stride,
        }

    def dispatch(self, rows_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor, sizes: Sizes) -> Arrived:
        return self.dispatch_async(rows_TD, ids_TK, weights_TK, sizes)()

    def dispatch_async(
        self, rows_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor, sizes: Sizes
    ) -> Callable[[], Arrived]:
        if sizes.capacity is not None:
            return self._dispatch_statically(rows_TD, ids_TK, weights_TK, sizes.capacity)
        return self._dispatch_counted(rows_TD, ids_TK, weights_TK)

    def _dispatch_statically(
        self, rows_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor, capacity: Capacity
    ) -> Callable[[], Arrived]:
        space, comm, shape = self.context.workspace, self.context.communicator, self.context.shape
        permutation, pair_rows = self.context.permutation_on(rows_TD.device), capacity.pair_rows
        assert pair_rows is not None
        owner_TK = (ids_TK + shape.num_local_experts).div(shape.num_local_experts, rounding_mode="floor")
        lanes = lanes_of(
            rank_members(owner_TK, comm.size),
            owner_TK,
            weights_TK.detach(),
            pair_rows,
            may_overflow=pair_rows < tokens_of(shape),
        )
        form = _form(shape, rows_TD.dtype, weights_TK.dtype, note=True)
        outgoing, received = (space.take((comm.size * pair_rows, form.stride), rows_TD.device) for _ in range(2))
        lanes.fill(outgoing, form.pack(rows_TD.detach(), weights_TK.detach(), ids_TK), form, permutation)
        splits = [pair_rows] * comm.size
        work = comm.all_to_all(received, outgoing, splits, splits, label="dispatch")

        def complete() -> Arrived:
            delivered, keys_SK = self._landed(work, form, outgoing, received)
            route = self._route(
                even_traffic(pair_rows, comm.size),
                (lanes.source_S, lanes.member_N, lanes.cu_T),
                index=self.context.group_statically(keys_SK, delivered[1], capacity),
            )
            arrived = arrive_statically(
                rows_TD,
                weights_TK,
                route,
                delivered,
                needed=wanted_here(received, form, pair_rows),
                busiest_pair=lanes.busiest,
            )
            space.give(received)
            return arrived

        return complete

    def _dispatch_counted(self, rows_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Callable[[], Arrived]:
        space, comm, shape = self.context.workspace, self.context.communicator, self.context.shape
        shifted_TK = ids_TK + shape.num_local_experts
        owner_TK = shifted_TK.div(shape.num_local_experts, rounding_mode="floor")
        members_PT = rank_members(owner_TK, comm.size)
        counts, counts_in, counting = self._send_counts(shifted_TK + owner_TK, members_PT)
        form = _form(shape, rows_TD.dtype, weights_TK.dtype)
        packets = form.pack(rows_TD.detach(), weights_TK.detach(), ids_TK)
        # While the counts are under way; but how many rows leave a GPU is read together with them.
        in_order = self._outgoing(packets, members_PT) if packets.is_cpu else None
        if counting is not None:
            counting.wait()
        traffic = self._read_counts(counts, counts_in)
        source_S, outgoing = in_order or self._outgoing(packets, members_PT, sum(traffic.rows_out))
        received = space.take((sum(traffic.rows_in), form.stride), rows_TD.device)
        work = comm.all_to_all(received, outgoing, traffic.rows_in, traffic.rows_out, label="dispatch")
        # While the rows are under way.
        by_row = source_S.sort(stable=True)
        cu_T = torch.searchsorted(by_row.values, torch.arange(rows_TD.shape[0] + 1, device=rows_TD.device))
        home = group_slots(owner_TK - 1, traffic.slots_out) if self._exact else None

        def complete() -> Arrived:
            delivered, keys_SK = self._landed(work, form, outgoing, received)
            route = self._route(
                traffic,
                (source_S, by_row.indices, cu_T),
                index=group_slots(keys_SK, traffic.tokens_per_expert, shape.pad_multiple),
                home=home,
                weights_TK=None if home is None else weights_TK.detach(),
            )
            arrived = arrive(
                *(rows_TD, weights_TK, route, delivered, traffic.tokens_per_expert, shape.pad_multiple),
                real_L=counts[: shape.num_local_experts],
            )
            space.give(received)
            return arrived

        return complete

    def _outgoing(self, packets: Tensor, members_PT: Tensor, count: int | None = None) -> tuple[Tensor, Tensor]:
        """The home rows of what is sent, int64 (count,), and their packets. ``count`` may be None on the CPU."""
        source_S = true_places(members_PT, count).select(1, 1).contiguous()
        outgoing = self.context.workspace.take((source_S.shape[0], packets.shape[1]), packets.device)
        self.context.permutation_on(packets.device).gather(packets, source_S, outgoing)
        return source_S, outgoing

    def _landed(
        self, work: dist.Work | None, form: Packet, outgoing: Tensor, received: Tensor
    ) -> tuple[Received, Tensor]:
        """Wait for packets: their rows and weights; and their slots' experts, 0 to L-1 where they are of this rank."""
        if work is not None:
            work.wait()
        self.context.workspace.give(outgoing)
        rows_SD, weights_SK, ids_SK = form.unpack(received)
        return (rows_SD, weights_SK), ids_SK - self.context.communicator.rank * self.context.shape.num_local_experts

    def _route(
        self,
        traffic: Traffic,
        ways: Sequence[Tensor],
        *,
        index: SlotIndex,
        home: SlotIndex | None = None,
        weights_TK: Tensor | None = None,
    ) -> AllToAllRoute:
        source_S, member_S, cu_T = ways
        return AllToAllRoute(
            context=self.context,
            permutation=self.context.permutation_on(source_S.device),
            traffic=traffic,
            index=index,
            wire_dtype=self.context.shape.wire_dtype,
            source_S=source_S,
            member_S=member_S,
            cu_T=cu_T,
            home=home,
            weights_TK=weights_TK,
        )

    def restore(self, tensors: Sequence[Tensor]) -> AllToAllRoute:
        shape = self.context.shape
        if shape.graph_safe:
            traffic = even_traffic(tensors[0].shape[0] // shape.ep_size, shape.ep_size)
            return self._route(traffic, tensors[:3], index=self.context.index_from(tensors[3:]))
        (counts, *ways), rest = tensors[:4], list(tensors[4:])
        weights_TK = rest.pop(0) if self._exact else None
        home = index_from([rest.pop(0) for _ in range(4)], shape.top_k) if self._exact else None
        traffic = traffic_from(counts, shape.ep_size, exact=self._exact)
        return self._route(traffic, ways, index=index_from(rest, shape.top_k), home=home, weights_TK=weights_TK)

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
            ways = table(places), table(num_rows * shape.ep_size), table(num_rows + 1)
            return self._route(even_traffic(capacity.pair_rows, shape.ep_size), ways, index=index(places))
        sent, edges = new_size(), new_size() if num_rows is None else num_rows + 1
        none, slots = [0] * shape.ep_size, [0] * (shape.ep_size if self._exact else 0)
        counts = [0] * shape.num_local_experts
        traffic = Traffic(rows_out=none, rows_in=none, slots_out=slots, slots_in=slots, tokens_per_expert=counts)
        ways = table(sent), table(sent), table(edges)
        if not self._exact:
            return self._route(traffic, ways, index=index(None))
        home = blank_index(edges, shape.top_k, 1, new_size=new_size, device=device)
        weights_TK = weights_TK.new_empty(new_size() if num_rows is None else num_rows, shape.top_k)
        return self._route(traffic, ways, index=index(None), home=home, weights_TK=weights_TK)

    @property
    def _exact(self) -> bool:
        assert isinstance(self.options, AllToAllOptions)
        return self.options.reduction == "exact"

    def _send_counts(self, places_TK: Tensor, members_PT: Tensor) -> tuple[Tensor, Tensor, dist.Work | None]:
        """Start to tell every rank how many slots come for each of its experts, and how many rows.

        Args:
            places_TK: int64 (T, K), where a slot is counted: for local expert e of rank r at e + (r + 1) (L + 1), for
                none in the first row, which is overwritten.
            members_PT: as of ``rank_members``.

        Returns:
            A table of int64, flat, whose rows are L counts of slots, by expert, and one of rows: one row for sums of
            what comes in, P of what goes to each rank, P of what comes; and those last rows, (P, L + 1).
        """
        size, width = self.context.communicator.size, 1 + self.context.shape.num_local_experts
        counts = count_values(places_TK.reshape(-1), (1 + 2 * size) * width)
        _, outgoing, received = counts.view(-1, width).split_with_sizes([1, size, size])
        torch.sum(members_PT, 1, out=outgoing.select(1, -1))
        return counts, received, self._swap(outgoing, received)

    def _read_counts(self, counts: Tensor, received: Tensor) -> Traffic:
        """Sum what came in, and read both sides at once."""
        size, slots = self.context.communicator.size, self.context.shape.num_local_experts
        torch.sum(received, 0, out=counts[: 1 + slots])
        host = read_host(counts)
        rows = host[slots :: 1 + slots]
        rows_out, rows_in = rows[1 : 1 + size], rows[1 + size :]
        if min(rows_in) < 0:
            raise PeerError(refusal({rank: -count for rank, count in enumerate(rows_in) if count < 0}))
        slots_out, slots_in = [], []
        if self._exact:
            by_rank = [sum(host[start : start + slots]) for start in range(1 + slots, len(host), 1 + slots)]
            slots_out, slots_in = by_rank[:size], by_rank[size:]
        return Traffic(
            rows_out=rows_out, rows_in=rows_in, slots_out=slots_out, slots_in=slots_in, tokens_per_expert=host[:slots]
        )

    def _swap(self, outgoing: Tensor, received: Tensor) -> dist.Work | None:
        """Row p of ``outgoing`` to rank p; started, not awaited."""
        ones = [1] * self.context.shape.ep_size
        return self.context.communicator.all_to_all(received, outgoing, ones, ones, label="counts")

    def refuse(self, code: int, device: torch.device) -> None:
        shape, comm = self.context.shape, self.context.communicator
        mark = torch.full((comm.size, 1 + shape.num_local_experts), -code, dtype=torch.int64, device=device)
        work = self._swap(mark, torch.empty_like(mark))
        if work is not None:
            work.wait()

    def dispatch_again(self, rows_TD: Tensor, state: Any) -> Tensor:
        return send_again(rows_TD, state)

    def combine(self, rows_RD: Tensor, weights_R: Tensor, state: Any, *, weighted: bool) -> Tensor:
        return bring_home(rows_RD, weights_R, state, weighted=weighted)


def _form(shape: MoEShape, row_dtype: torch.dtype, weight_dtype: torch.dtype, *, note: bool = False) -> Packet:
    row = row_format(row_dtype, shape.hidden_size, shape.wire_dtype)
    return packet(row, shape.top_k, weight_dtype, id_dtype_for(shape.num_experts), note=note)


def rank_members(owner_TK: Tensor, ep_size: int) -> Tensor:
    """bool (P, T): which ranks own at least one expert of which row.

    Args:
        owner_TK: int64, 1 + the rank of each slot's expert, 0 for slots that go nowhere.
        ep_size: P.
    """
    members = torch.zeros(ep_size + 1, owner_TK.shape[0], dtype=torch.bool, device=owner_TK.device)
    return members.scatter_(0, owner_TK.t(), True)[1:]
