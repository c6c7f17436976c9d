"""``alltoall``: each row goes once to each rank that owns one of its experts, and comes back once, already summed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, final

import torch
import torch.distributed as dist
from torch import Tensor

from moe_dispatch.backends.alltoall_static import lane_bytes, lanes_of, wanted_here
from moe_dispatch.backends.base import (
    Arrived,
    Backend,
    BackendContext,
    BackendOptions,
    Constraints,
    MoEShape,
    Sizes,
    WireDtype,
)
from moe_dispatch.backends.capacity import Capacity, Factor, capacity_of, tokens_of
from moe_dispatch.backends.collectives import read_host
from moe_dispatch.backends.permutation import (
    Permutation,
    SlotIndex,
    accumulation_dtype,
    count_values,
    group_slots,
    true_places,
)
from moe_dispatch.backends.rank_major import Route, arrive, arrive_statically, bring_home, send_again
from moe_dispatch.backends.wire import Packet, id_dtype_for, packet, row_format
from moe_dispatch.errors import PeerError, refusal


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
@dataclass(frozen=True, kw_only=True, slots=True)
class Traffic:
    """Host counts of one dispatch: rows to and from each rank, slots too where exact, rows per local expert."""

    rows_out: list[int]
    rows_in: list[int]
    slots_out: list[int]
    slots_in: list[int]
    tokens_per_expert: list[int]


@final
@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class AllToAllRoute(Route):
    """One data collective each way.

    Attributes:
        source_S: int64, the home row of each row sent, by destination rank, then row.
        member_S: int64, the sent rows in the order of their home rows; ``cu_T`` int64 (T+1,) where each home row
            begins.
        home: for ``reduction="exact"``, the slots grouped by destination rank, and ``weights_TK`` to apply at home;
            else both None.
    """

    context: BackendContext
    permutation: Permutation
    traffic: Traffic
    index: SlotIndex
    wire_dtype: WireDtype | None
    source_S: Tensor
    member_S: Tensor
    cu_T: Tensor
    home: SlotIndex | None
    weights_TK: Tensor | None

    @contextmanager
    def spread(self, rows_TD: Tensor, wire: WireDtype | None, *, label: str) -> Iterator[Tensor]:
        row = row_format(rows_TD.dtype, rows_TD.shape[1], wire)
        encoded = row.encode(rows_TD)
        with self._exchange(encoded, self.source_S, self.traffic.rows_out, self.traffic.rows_in, label) as received:
            yield row.read(received)

    @contextmanager
    def _exchange(
        self, rows: Tensor, source: Tensor, splits_out: Sequence[int], splits_in: Sequence[int], label: str
    ) -> Iterator[Tensor]:
        """Gather ``rows[source]``, uint8, and exchange them; the received rows, uint8, valid inside the block."""
        space, width = self.context.workspace, rows.shape[1]
        with space.lease((sum(splits_in), width), rows.device) as received:
            with space.lease((source.shape[0], width), rows.device) as outgoing:
                self.permutation.gather(rows, source, outgoing)
                self._all_to_all(received, outgoing, splits_in, splits_out, label)
            yield received

    def _all_to_all(
        self, out: Tensor, inp: Tensor, out_splits: Sequence[int], in_splits: Sequence[int], label: str
    ) -> None:
        work = self.context.communicator.all_to_all(out, inp, out_splits, in_splits, label=label)
        if work is not None:
            work.wait()

    def collect(
        self, rows_RD: Tensor, weights_R: Tensor | None, values_R: Tensor | None, *, label: str
    ) -> tuple[Tensor, Tensor | None]:
        if self.home is not None:
            weights_TK = None if weights_R is None else self.weights_TK
            return self._collect_exact(self.home, rows_RD, weights_TK, values_R, label)
        form = packet(
            row_format(rows_RD.dtype, rows_RD.shape[1], self.gradient_wire),
            self.index.top_k,
            None if values_R is None else values_R.dtype,
        )
        space, device = self.context.workspace, rows_RD.device
        with space.lease((self.source_S.shape[0], form.stride), device) as received:
            with space.lease((self.index.num_rows, form.stride), device) as outgoing:
                self.permutation.reduce(rows_RD, self.index, weights_R, form.row.read(form.rows(outgoing)))
                if values_R is not None:
                    form.weights(outgoing).copy_(self.index.to_slots(values_R))
                self._all_to_all(received, outgoing, self.traffic.rows_out, self.traffic.rows_in, label)
            return self._sum_at_home(form, received, rows_RD.dtype)

    def _sum_at_home(self, form: Packet, received: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
        num_rows = self.cu_T.shape[0] - 1
        out = torch.empty(num_rows, form.row.hidden, dtype=dtype, device=received.device)
        # The whole packets are summed, as numbers of the row's dtype: sums over what is behind the row are not kept.
        self.permutation.sum_bags(received.view(form.row.wire_dtype), self.member_S, self.cu_T, None, out)
        if form.weight_dtype is None:
            return out, None
        values = torch.empty(num_rows, form.top_k, dtype=form.weight_dtype, device=received.device)
        self.permutation.sum_bags(form.weights(received).contiguous(), self.member_S, self.cu_T, None, values)
        return out, values

    def _collect_exact(
        self, home: SlotIndex, rows_RD: Tensor, weights_TK: Tensor | None, values_R: Tensor | None, label: str
    ) -> tuple[Tensor, Tensor | None]:
        row = row_format(rows_RD.dtype, rows_RD.shape[1], self.gradient_wire)
        form = packet(row, 1, None if values_R is None else values_R.dtype)
        if values_R is None:
            packets = row.encode(rows_RD)
        else:
            packets = torch.empty(rows_RD.shape[0], form.stride, dtype=torch.uint8, device=rows_RD.device)
            row.write(rows_RD, form.rows(packets))
            form.weights(packets).copy_(values_R.unsqueeze(1))
        traffic = self.traffic
        with self._exchange(packets, self.index.byrow_N, traffic.slots_in, traffic.slots_out, label) as received:
            out = torch.empty(home.num_rows, row.hidden, dtype=rows_RD.dtype, device=rows_RD.device)
            weights_N = None if weights_TK is None else home.in_row_order(weights_TK)
            self.permutation.sum_bags(received.view(row.wire_dtype), home.byrow_N, home.cu_S, weights_N, out)
            values = None if values_R is None else home.to_slots(form.weights(received).reshape(-1))
        return out, values


@final
@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Transit:
    """A dispatch between sending and receiving; its two buffers are the workspace's."""

    rows_TD: Tensor
    weights_TK: Tensor
    rank_TK: Tensor
    source_S: Tensor
    traffic: Traffic
    tokens_per_expert_L: Tensor
    form: Packet
    outgoing: Tensor
    received: Tensor
    work: dist.Work | None


@final
class AllToAll(Backend):
    """Cost: one host sync and two collectives (counts, data) per dispatch, one per combine, one per backward of either.

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
        )

    @classmethod
    def capacity(cls, shape: MoEShape, options: BackendOptions) -> Capacity:
        assert isinstance(options, AllToAllOptions)
        return capacity_of(shape, pair_factor=options.pair_rows)

    def footprint(self, sizes: Sizes, rows: int, dtype: torch.dtype) -> dict[str, int]:
        capacity, size = sizes.capacity, self.context.communicator.size
        assert capacity is not None
        assert capacity.pair_rows is not None
        places = size * capacity.pair_rows
        found = self.context.grouped_bytes(capacity, dtype, places)
        found["index"] += lane_bytes(size, rows, capacity.pair_rows)
        return {**found, "wire": 2 * places * self._form(dtype, accumulation_dtype(dtype), note=True).stride}

    def dispatch(self, rows_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor, sizes: Sizes) -> Arrived:
        return self.dispatch_async(rows_TD, ids_TK, weights_TK, sizes)()

    def dispatch_async(
        self, rows_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor, sizes: Sizes
    ) -> Callable[[], Arrived]:
        if sizes.capacity is not None:
            return self._dispatch_statically(rows_TD, ids_TK, weights_TK, sizes.capacity)
        transit = self._send(rows_TD, ids_TK, weights_TK)
        return lambda: self._receive(transit)

    def _dispatch_statically(
        self, rows_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor, capacity: Capacity
    ) -> Callable[[], Arrived]:
        space, comm, shape = self.context.workspace, self.context.communicator, self.context.shape
        permutation, pair_rows = self.context.permutation_on(rows_TD.device), capacity.pair_rows
        assert pair_rows is not None
        rank_TK = ids_TK.div(shape.num_local_experts, rounding_mode="floor")
        lanes = lanes_of(
            rank_members(rank_TK, comm.size),
            rank_TK,
            weights_TK.detach(),
            pair_rows,
            may_overflow=pair_rows < tokens_of(shape),
        )
        form = self._form(rows_TD.dtype, weights_TK.dtype, note=True)
        outgoing, received = (space.take((comm.size * pair_rows, form.stride), rows_TD.device) for _ in range(2))
        lanes.fill(outgoing, form.pack(rows_TD.detach(), weights_TK.detach(), ids_TK), form, permutation)
        splits = [pair_rows] * comm.size
        work = comm.all_to_all(received, outgoing, splits, splits, label="dispatch")

        def complete() -> Arrived:
            if work is not None:
                work.wait()
            space.give(outgoing)
            keys_SK = form.ids(received) - comm.rank * shape.num_local_experts
            route = AllToAllRoute(
                context=self.context,
                permutation=permutation,
                traffic=Traffic(rows_out=splits, rows_in=splits, slots_out=[], slots_in=[], tokens_per_expert=[]),
                index=self.context.group_statically(keys_SK, form.weights(received), capacity),
                wire_dtype=shape.wire_dtype,
                source_S=lanes.source_S,
                member_S=lanes.member_N,
                cu_T=lanes.cu_T,
                home=None,
                weights_TK=None,
            )
            return arrive_statically(
                rows_TD,
                weights_TK,
                route,
                self._unpack(form, received),
                needed=wanted_here(received, form, pair_rows),
                busiest_pair=lanes.busiest,
            )

        return complete

    def _form(self, row_dtype: torch.dtype, weight_dtype: torch.dtype, *, note: bool = False) -> Packet:
        shape = self.context.shape
        row = row_format(row_dtype, shape.hidden_size, shape.wire_dtype)
        return packet(row, shape.top_k, weight_dtype, id_dtype_for(shape.num_experts), note=note)

    def _send(self, rows_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> _Transit:
        space, comm, shape = self.context.workspace, self.context.communicator, self.context.shape
        rank_TK = ids_TK.div(shape.num_local_experts, rounding_mode="floor")
        members_PT = rank_members(rank_TK, comm.size)
        traffic, tokens_per_expert_L = self._exchange_counts(ids_TK, rank_TK, members_PT)
        source_S = true_places(members_PT, sum(traffic.rows_out)).select(1, 1).contiguous()
        form = self._form(rows_TD.dtype, weights_TK.dtype)
        packets = form.pack(rows_TD.detach(), weights_TK.detach(), ids_TK)
        outgoing = space.take((source_S.shape[0], form.stride), rows_TD.device)
        received = space.take((sum(traffic.rows_in), form.stride), rows_TD.device)
        self.context.permutation_on(packets.device).gather(packets, source_S, outgoing)
        work = comm.all_to_all(received, outgoing, traffic.rows_in, traffic.rows_out, label="dispatch")
        return _Transit(
            rows_TD=rows_TD,
            weights_TK=weights_TK,
            rank_TK=rank_TK,
            source_S=source_S,
            traffic=traffic,
            tokens_per_expert_L=tokens_per_expert_L,
            form=form,
            outgoing=outgoing,
            received=received,
            work=work,
        )

    def _receive(self, transit: _Transit) -> Arrived:
        shape, traffic, form = self.context.shape, transit.traffic, transit.form
        if transit.work is not None:
            transit.work.wait()
        self.context.workspace.give(transit.outgoing)
        first = self.context.communicator.rank * shape.num_local_experts
        keys_SK = form.ids(transit.received) - first
        by_row = transit.source_S.sort(stable=True)
        rows_T = torch.arange(transit.rows_TD.shape[0] + 1, device=transit.received.device)
        route = AllToAllRoute(
            context=self.context,
            permutation=self.context.permutation_on(transit.received.device),
            traffic=traffic,
            index=group_slots(keys_SK, traffic.tokens_per_expert, shape.pad_multiple),
            wire_dtype=self.context.shape.wire_dtype,
            source_S=transit.source_S,
            member_S=by_row.indices,
            cu_T=torch.searchsorted(by_row.values, rows_T),
            home=group_slots(transit.rank_TK, traffic.slots_out) if self._exact else None,
            weights_TK=transit.weights_TK.detach() if self._exact else None,
        )
        unpacked = self._unpack(form, transit.received)
        return arrive(
            *(transit.rows_TD, transit.weights_TK, route, unpacked, traffic.tokens_per_expert, shape.pad_multiple),
            real_L=transit.tokens_per_expert_L,
        )

    @contextmanager
    def _unpack(self, form: Packet, received: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        yield form.row.read(form.rows(received)), form.weights(received)
        self.context.workspace.give(received)

    @property
    def _exact(self) -> bool:
        assert isinstance(self.options, AllToAllOptions)
        return self.options.reduction == "exact"

    def _exchange_counts(self, ids_TK: Tensor, rank_TK: Tensor, members_PT: Tensor) -> tuple[Traffic, Tensor]:
        """Tell every rank how many rows come, and how many slots for each of its experts; read both sides at once.

        Returns:
            All counts, and those per local expert on the device, int64 (L,).
        """
        comm, width = self.context.communicator, 1 + self.context.shape.num_local_experts
        # A row for the sums of what comes in, then a row for each rank of what goes out, then of what comes in. A row
        # begins with a count of rows, so expert e of rank r is counted e + r + 1 places into the second. Slots that go
        # nowhere, -1 of rank -1, are counted at the end of the first, which is overwritten.
        places = (ids_TK + rank_TK).add_(width + 1).reshape(-1)
        table = count_values(places, (1 + 2 * comm.size) * width).view(-1, width)
        total, outgoing, received = table[0], table[1 : 1 + comm.size], table[1 + comm.size :]
        torch.sum(members_PT, 1, out=outgoing.select(1, 0))
        self._swap(outgoing, received)
        torch.sum(received, 0, out=total)
        host_total, *host = read_host(table)
        host_out, host_in = host[: comm.size], host[comm.size :]
        refused = {rank: -row[0] for rank, row in enumerate(host_in) if row[0] < 0}
        if refused:
            raise PeerError(refusal(refused))
        traffic = Traffic(
            rows_out=[row[0] for row in host_out],
            rows_in=[row[0] for row in host_in],
            slots_out=[sum(row[1:]) for row in host_out] if self._exact else [],
            slots_in=[sum(row[1:]) for row in host_in] if self._exact else [],
            tokens_per_expert=host_total[1:],
        )
        return traffic, total[1:]

    def _swap(self, outgoing: Tensor, received: Tensor) -> None:
        """Row p of ``outgoing`` to rank p."""
        ones = [1] * self.context.shape.ep_size
        work = self.context.communicator.all_to_all(received, outgoing, ones, ones, label="counts")
        if work is not None:
            work.wait()

    def refuse(self, code: int, device: torch.device) -> None:
        shape, comm = self.context.shape, self.context.communicator
        mark = torch.full((comm.size, 1 + shape.num_local_experts), -code, dtype=torch.int64, device=device)
        self._swap(mark, torch.empty_like(mark))

    def dispatch_again(self, rows_TD: Tensor, state: Any) -> Tensor:
        return send_again(rows_TD, state)

    def combine(self, rows_RD: Tensor, weights_R: Tensor, state: Any, *, weighted: bool) -> Tensor:
        return bring_home(rows_RD, weights_R, state, weighted=weighted)


def rank_members(rank_TK: Tensor, ep_size: int) -> Tensor:
    """bool (P, T): which ranks own at least one expert of which row. ``rank_TK`` is -1 for slots that go nowhere."""
    members = torch.zeros(ep_size + 1, rank_TK.shape[0], dtype=torch.bool, device=rank_TK.device)
    return members.scatter_(0, rank_TK.t() + 1, True)[1:]
