"""``alltoall``: each row goes once to each rank that owns one of its experts, and comes back once, already summed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any, Literal, final

import torch
import torch.distributed as dist
from torch import Tensor

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
from moe_dispatch.backends.collectives import read_host
from moe_dispatch.backends.permutation import (
    Permutation,
    SlotIndex,
    blank_index,
    group_slots,
    index_from,
    running_total,
)
from moe_dispatch.backends.rank_major import arrive, bring_home, send_again
from moe_dispatch.backends.traceable import TraceableRoute, TracedRoutes
from moe_dispatch.backends.wire import Packet, id_dtype_for, packet, row_format
from moe_dispatch.errors import PeerError, refusal


@final
class AllToAllOptions(BackendOptions):
    """Options of ``alltoall``.

    Attributes:
        reduction: "fast" sums a row's experts on each rank, in float32, before it comes back: the fewest bytes. "exact"
            brings every (row, expert) result back and sums at home in slot order: bit-identical for every ep_size, at
            up to top_k times the bytes on the way back.
    """

    reduction: Literal["fast", "exact"] = "fast"


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Traffic:
    """Host counts of one dispatch: rows to and from each rank, slots too where exact, rows per local expert."""

    rows_out: list[int]
    rows_in: list[int]
    slots_out: list[int]
    slots_in: list[int]
    tokens_per_expert: list[int]

    def tensor(self) -> Tensor:
        """All counts in one int64 tensor on the CPU; ``traffic_from`` reads them again."""
        parts = (self.rows_out, self.rows_in, self.slots_out, self.slots_in, self.tokens_per_expert)
        return torch.tensor([count for part in parts for count in part], dtype=torch.int64, device="cpu")


def traffic_from(counts: Tensor, ep_size: int, *, exact: bool) -> Traffic:
    """The traffic whose ``tensor()`` this is. It is on the host, so reading it waits for nothing."""
    values = iter(read_host(counts))

    def part(length: int) -> list[int]:
        return list(islice(values, length))

    slots = ep_size if exact else 0
    return Traffic(
        rows_out=part(ep_size),
        rows_in=part(ep_size),
        slots_out=part(slots),
        slots_in=part(slots),
        tokens_per_expert=list(values),
    )


@final
@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class AllToAllRoute(TraceableRoute):
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
        with space.lease(sum(splits_in) * width, rows.device) as received:
            received = received.view(-1, width)
            with space.lease(source.shape[0] * width, rows.device) as outgoing:
                outgoing = outgoing.view(-1, width)
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
        with space.lease(self.source_S.shape[0] * form.stride, device) as received:
            received = received.view(-1, form.stride)
            with space.lease(self.index.num_rows * form.stride, device) as outgoing:
                outgoing = outgoing.view(-1, form.stride)
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

    def tensors(self) -> list[Tensor]:
        ways = [self.traffic.tensor(), self.source_S, self.member_S, self.cu_T]
        if self.home is not None and self.weights_TK is not None:
            ways += [self.weights_TK.clone(), *self.home.tensors()]
        return ways + self.index.tensors()

    @property
    def num_home_rows(self) -> int:
        return self.cu_T.shape[0] - 1


@final
@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Transit:
    """A dispatch between sending and receiving; its two buffers are the workspace's."""

    rows_TD: Tensor
    weights_TK: Tensor
    rank_TK: Tensor
    members_PT: Tensor
    source_S: Tensor
    traffic: Traffic
    form: Packet
    outgoing: Tensor
    received: Tensor
    work: dist.Work | None


@final
class AllToAll(TracedRoutes, Backend):
    """Cost: one host sync and two collectives (counts, data) per dispatch, one per combine, one per backward of either.

    Bytes to other ranks: in dispatch, per distinct (row, other rank), the row and 6 bytes per top_k slot; in combine
    the row; in the backwards the row, and 4 bytes per slot for the gradient of the weights. Source: the de-duplication
    is that of DeepEP's normal mode (v1.2.1).
    """

    name = "alltoall"
    Options = AllToAllOptions

    @classmethod
    def constraints(cls, shape: MoEShape, options: BackendOptions) -> Constraints:
        return Constraints(exchanges_counts=True, wire_dtypes=frozenset({"bfloat16", "float8_e4m3fn"}), compilable=True)

    def dispatch(self, rows_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor, sizes: Sizes) -> Arrived:
        return self.dispatch_async(rows_TD, ids_TK, weights_TK, sizes)()

    def dispatch_async(
        self, rows_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor, sizes: Sizes
    ) -> Callable[[], Arrived]:
        transit = self._send(rows_TD, ids_TK, weights_TK)
        return lambda: self._receive(transit)

    def _send(self, rows_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> _Transit:
        space, comm, shape = self.context.workspace, self.context.communicator, self.context.shape
        rank_TK = ids_TK.div(shape.num_local_experts, rounding_mode="floor")
        members_PT = rank_members(rank_TK, comm.size)
        traffic = self._exchange_counts(ids_TK, rank_TK, members_PT)
        source_S = torch.nonzero_static(members_PT, size=sum(traffic.rows_out))[:, 1].contiguous()
        form = packet(
            row_format(rows_TD.dtype, shape.hidden_size, self.context.shape.wire_dtype),
            shape.top_k,
            weights_TK.dtype,
            id_dtype_for(shape.num_experts),
        )
        packets = form.pack(rows_TD.detach(), weights_TK.detach(), ids_TK)
        outgoing = space.take(source_S.shape[0] * form.stride, rows_TD.device).view(-1, form.stride)
        received = space.take(sum(traffic.rows_in) * form.stride, rows_TD.device).view(-1, form.stride)
        self.context.permutation_on(packets.device).gather(packets, source_S, outgoing)
        work = comm.all_to_all(received, outgoing, traffic.rows_in, traffic.rows_out, label="dispatch")
        return _Transit(
            rows_TD=rows_TD,
            weights_TK=weights_TK,
            rank_TK=rank_TK,
            members_PT=members_PT,
            source_S=source_S,
            traffic=traffic,
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
        route = self._route(
            traffic,
            (transit.source_S, transit.source_S.argsort(stable=True), running_total(transit.members_PT.sum(0))),
            index=group_slots(keys_SK, traffic.tokens_per_expert, shape.pad_multiple),
            home=group_slots(transit.rank_TK, traffic.slots_out) if self._exact else None,
            weights_TK=transit.weights_TK.detach() if self._exact else None,
        )
        unpacked = self._unpack(transit)
        return arrive(
            transit.rows_TD, transit.weights_TK, route, unpacked, traffic.tokens_per_expert, shape.pad_multiple
        )

    @contextmanager
    def _unpack(self, transit: _Transit) -> Iterator[tuple[Tensor, Tensor]]:
        form, received = transit.form, transit.received
        yield form.row.read(form.rows(received)), form.weights(received)
        self.context.workspace.give(received)

    def _route(
        self,
        traffic: Traffic,
        ways: Sequence[Tensor],
        *,
        index: SlotIndex,
        home: SlotIndex | None,
        weights_TK: Tensor | None,
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
        shape, (counts, *ways), rest = self.context.shape, tensors[:4], list(tensors[4:])
        weights_TK = rest.pop(0) if self._exact else None
        home = index_from([rest.pop(0) for _ in range(4)], shape.top_k) if self._exact else None
        traffic = traffic_from(counts, shape.ep_size, exact=self._exact)
        return self._route(traffic, ways, index=index_from(rest, shape.top_k), home=home, weights_TK=weights_TK)

    def blank_route(self, num_rows: int | None, weights_TK: Tensor, new_size: Callable[[], int]) -> AllToAllRoute:
        shape, device = self.context.shape, weights_TK.device
        sent = new_size()
        edges = new_size() if num_rows is None else num_rows + 1
        none, slots = [0] * shape.ep_size, [0] * (shape.ep_size if self._exact else 0)
        table = partial(torch.empty, dtype=torch.int64, device=device)
        index = partial(blank_index, top_k=shape.top_k, new_size=new_size, device=device)
        return self._route(
            Traffic(
                rows_out=none,
                rows_in=none,
                slots_out=slots,
                slots_in=slots,
                tokens_per_expert=[0] * shape.num_local_experts,
            ),
            (table(sent), table(sent), table(edges)),
            index=index(new_size(), pad_multiple=shape.pad_multiple),
            home=index(edges, pad_multiple=1) if self._exact else None,
            weights_TK=weights_TK.new_empty(new_size() if num_rows is None else num_rows, shape.top_k)
            if self._exact
            else None,
        )

    @property
    def _exact(self) -> bool:
        assert isinstance(self.options, AllToAllOptions)
        return self.options.reduction == "exact"

    def _exchange_counts(self, ids_TK: Tensor, rank_TK: Tensor, members_PT: Tensor) -> Traffic:
        """Tell every rank how many rows come, and how many slots for each of its experts; read both sides at once."""
        comm, width = self.context.communicator, 1 + self.context.shape.num_local_experts
        # What goes out and what comes in, a row for each rank, behind a place where slots that go nowhere are counted:
        # expert e of rank r, whose rows begin with a count of rows, stands at e + r + 2, and -1 of rank -1 at 0.
        places = (ids_TK + rank_TK).add_(2).reshape(-1)
        table = torch.zeros(1 + 2 * comm.size * width, dtype=torch.int64, device=ids_TK.device)
        both = table.scatter_add_(0, places, torch.ones_like(places))[1:].view(2, comm.size, width)
        outgoing, received = both.unbind(0)
        torch.sum(members_PT, 1, out=outgoing[:, 0])
        self._swap(outgoing, received)
        host_out, host_in = read_host(both)
        refused = {rank: -row[0] for rank, row in enumerate(host_in) if row[0] < 0}
        if refused:
            raise PeerError(refusal(refused))
        return Traffic(
            rows_out=[row[0] for row in host_out],
            rows_in=[row[0] for row in host_in],
            slots_out=[sum(row[1:]) for row in host_out] if self._exact else [],
            slots_in=[sum(row[1:]) for row in host_in] if self._exact else [],
            tokens_per_expert=list(map(sum, zip(*(row[1:] for row in host_in), strict=True))),
        )

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
