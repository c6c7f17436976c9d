"""The peer ``floor``: a lower bound for the time of a layer in torch.

The floor runs only the collectives, on the fewest bytes, and the passes over rows that no implementation can avoid. It
knows the routing before the clock starts, it has allocated all memory, and it weights rows in their own dtype. It still
computes the layer, and its results are checked like the results of every other contender. A row and its slots travel in
one packet, because a second collective costs more than the copy into the packet.

A rank has T rows, S rows on the wire, and R rows grouped by expert. A pass works in blocks if this is faster. These are
the passes:

====================================  =======  ======  =========================================
pass                                  reads    writes  primitive
====================================  =======  ======  =========================================
pack                                  2 T      T + S   ``copy_``, ``index_select(out=)``
expand                                S        R       ``index_select(out=)``
weighted reduce                       R        S       ``embedding_bag`` with weights
final sum                             S        T       ``embedding_bag``
backward of final sum: pack           T        S       ``index_select(out=)``
backward of weighted reduce: expand   S        R       ``index_select``, ``mul(out=)``
weight-gradient dot                   2 R      -       ``mul(out=)``, ``sum(out=)``, in the cache
backward of expand: reduce            R        S       ``embedding_bag``
backward of pack: final sum           S        T       ``embedding_bag``
====================================  =======  ======  =========================================
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor

from moe_dispatch.backends.wire import packet_format, row_format
from moe_dispatch.permutation import SlotIndex, group_slots
from moe_dispatch_testing.rank_context import LayerCall
from moe_dispatch_tools.compare.contenders import Peer, RowFunction

_BLOCK_BYTES = 2 << 20  # bytes of rows in a block on the CPU, so that the next operation finds them in the cache


@final
class Floor(Peer):
    """A contender that learns the routing of a call, and makes memory for it, before the clock starts."""

    def prepare(self, call: LayerCall) -> None:
        with call.x.device:
            self._way = find_way(call.x.detach(), call.ids_TK, self.local, self.group)

    def layer(self, call: LayerCall, experts: RowFunction) -> Tensor:
        way = self._way
        rows_RD, weights_R = _FloorDispatch.apply(call.x, call.weights_TK, way)  # type: ignore[no-untyped-call]
        y_TD: Tensor = _FloorCombine.apply(experts(rows_RD, lambda: way.local_ids_R), weights_R, way)  # type: ignore[no-untyped-call]
        return y_TD


@final
@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Way:
    """The destination of every row, and memory for the rows.

    Attributes:
        source_S: Index of the row of this rank that each sent row is a copy of, int64, in the order of destinations.
        member_S: Indices of the sent rows in the order of their source rows, int64. The copies of row t start at
            ``cu_T[t]``.
        index: The received rows, grouped by local expert.
        local_ids_R: Local expert of each grouped row.
        buffers: Memory for packets and rows by name, and for the counts that ranks exchange before the rows, int64
            (P, L + 1). A forward and backward writes each buffer once.
    """

    group: dist.ProcessGroup
    rows_out: Sequence[int]
    rows_in: Sequence[int]
    source_S: Tensor
    member_S: Tensor
    cu_T: Tensor
    index: SlotIndex
    local_ids_R: Tensor
    buffers: dict[str, Tensor]

    def exchange(self, out: Tensor, given: Tensor, *, back: bool = False) -> None:
        """Send rows to the ranks of their experts, or back."""
        splits_out, splits_in = (self.rows_in, self.rows_out) if back else (self.rows_out, self.rows_in)
        self.group.alltoall_base(out, given, list(splits_in), list(splits_out)).wait()


def find_way(x_TD: Tensor, ids_TK: Tensor, local: int, group: dist.ProcessGroup) -> Way:
    """Exchange the routing with the other ranks, and sort it. Collective."""
    size, (count, top_k), rank_TK = group.size(), ids_TK.shape, ids_TK // local
    members_PT = torch.zeros(size, count, dtype=torch.bool).scatter_(0, rank_TK.t(), True)
    source_S = members_PT.nonzero()[:, 1].contiguous()
    by_row = source_S.sort(stable=True)
    rows_out = members_PT.sum(1)
    rows_in = torch.empty_like(rows_out)
    group.alltoall_base(rows_in, rows_out, [1] * size, [1] * size).wait()
    ids_SK = torch.empty(int(rows_in.sum()), top_k, dtype=torch.int64)
    group.alltoall_base(ids_SK, ids_TK[source_S], rows_in.tolist(), rows_out.tolist()).wait()
    keys_SK = ids_SK - group.rank() * local
    keys_SK[keys_SK >= local] = -1
    counts = torch.bincount(keys_SK[keys_SK >= 0], minlength=local)
    index = group_slots(keys_SK, counts.tolist())
    return Way(
        group=group,
        rows_out=rows_out.tolist(),
        rows_in=rows_in.tolist(),
        source_S=source_S,
        member_S=by_row.indices,
        cu_T=torch.searchsorted(by_row.values, torch.arange(count + 1)),
        index=index,
        local_ids_R=torch.arange(local).repeat_interleave(counts),
        buffers=_buffers(x_TD, top_k, len(source_S), index)
        | {name: rows_out.new_zeros(size, local + 1) for name in ("counts out", "counts in")},
    )


def _buffers(tokens: Tensor, top_k: int, sent: int, index: SlotIndex) -> dict[str, Tensor]:
    """Allocate the buffers, filled with zeros.

    A packet "there" holds a row with the weights and ids of its slots. A packet "back" holds a row with the gradients
    of the weights.
    """
    (count, hidden), row = tokens.shape, row_format(tokens.dtype, tokens.shape[1])
    there, back = packet_format(row, top_k, torch.float32, torch.int16), packet_format(row, top_k, torch.float32)
    packets = {
        "packets": (count, there),
        **{"there out": (sent, there), "there in": (index.num_rows, there)},
        **{"back out": (index.num_rows, back), "back in": (sent, back)},
    }
    block = _block_rows(tokens, index.num_grouped)
    rows = {"rows": index.num_grouped, "gradient": index.num_grouped, "block": block, "products": block}
    rows |= {"here": sent, "away": index.num_rows, "y": count, "x": count}
    return {
        **{name: tokens.new_zeros(length, form.stride, dtype=torch.uint8) for name, (length, form) in packets.items()},
        **{name: tokens.new_zeros(length, hidden) for name, length in rows.items()},
        "dots": tokens.new_zeros(index.num_grouped),
    }


class _FloorDispatch(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, weights_TK: Tensor, way: Way) -> tuple[Tensor, Tensor]:
        ctx.way = way
        space, index, ones = way.buffers, way.index, [1] * way.group.size()
        way.group.alltoall_base(space["counts in"], space["counts out"], ones, ones).wait()
        form = packet_format(row_format(x_TD.dtype, x_TD.shape[1]), weights_TK.shape[1], torch.float32, torch.int16)
        form.rows(space["packets"]).copy_(x_TD)
        form.weights(space["packets"]).copy_(weights_TK)
        torch.index_select(space["packets"], 0, way.source_S, out=space["there out"])
        way.exchange(space["there in"], space["there out"])
        torch.index_select(form.rows(space["there in"]), 0, index.source_R, out=space["rows"])
        return space["rows"].detach(), form.weights(space["there in"]).take(index.slot_N)

    @staticmethod
    def backward(ctx: Any, grad_RD: Tensor, dots_R: Tensor) -> Any:
        way: Way = ctx.way
        space, index = way.buffers, way.index
        form = packet_format(row_format(grad_RD.dtype, grad_RD.shape[1]), index.top_k, torch.float32)
        sum_rows(grad_RD, index.byrow_N, index.cu_S, None, form.rows(space["back out"]))
        form.weights(space["back out"]).copy_(index.to_slots(dots_R))
        way.exchange(space["back in"], space["back out"], back=True)
        sum_rows(space["back in"].view(grad_RD.dtype), way.member_S, way.cu_T, None, space["x"])
        grad_weights_TK = torch.embedding_bag(form.weights(space["back in"]).contiguous(), way.member_S, way.cu_T[:-1])
        return space["x"].detach(), grad_weights_TK[0], None


class _FloorCombine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows_RD: Tensor, weights_R: Tensor, way: Way) -> Tensor:
        ctx.way = way
        ctx.save_for_backward(rows_RD, weights_R)
        space, index = way.buffers, way.index
        weights_N = weights_R[index.byrow_N].to(rows_RD.dtype)
        sum_rows(rows_RD.detach(), index.byrow_N, index.cu_S, weights_N, space["away"])
        way.exchange(space["here"], space["away"], back=True)
        sum_rows(space["here"], way.member_S, way.cu_T, None, space["y"])
        return space["y"].detach()

    @staticmethod
    def backward(ctx: Any, grad_TD: Tensor) -> Any:
        way: Way = ctx.way
        rows_RD, weights_R = ctx.saved_tensors
        space, source = way.buffers, way.index.source_R
        torch.index_select(grad_TD, 0, way.source_S, out=space["here"])
        way.exchange(space["away"], space["here"])
        weights_R1 = weights_R.to(rows_RD.dtype).unsqueeze(1)
        for block in _blocks(rows_RD):
            count = block.stop - block.start
            gradient = torch.index_select(space["away"], 0, source[block], out=space["block"][:count])
            product = torch.mul(gradient, rows_RD[block], out=space["products"][:count])
            torch.sum(product, 1, out=space["dots"][block])
            torch.mul(gradient, weights_R1[block], out=space["gradient"][block])
        return space["gradient"].detach(), space["dots"].float(), None


def sum_rows(rows: Tensor, members: Tensor, cu: Tensor, weights: Tensor | None, out: Tensor) -> None:
    """Run ``embedding_bag`` in blocks.

    One call for all rows would write into fresh memory, which takes longer than the copy of each block.
    """
    blocks = list(_blocks(out))
    edges = cu[torch.tensor([0, *(block.stop for block in blocks)])].tolist()
    for block, begin, end in zip(blocks, edges, edges[1:], strict=False):
        offsets, part = cu[block.start : block.stop + 1] - begin, None if weights is None else weights[begin:end]
        sums = torch.embedding_bag(rows, members[begin:end], offsets, False, 0, False, part, True)[0]
        out[block].copy_(sums[:, : out.shape[1]])


def _blocks(rows: Tensor) -> list[slice]:
    step = _block_rows(rows, len(rows))
    return [slice(begin, min(begin + step, len(rows))) for begin in range(0, len(rows), step)]


def _block_rows(rows: Tensor, most: int) -> int:
    """Return the number of rows of a block, at most ``most``."""
    fitting = most if rows.device.type != "cpu" else _BLOCK_BYTES // (rows.shape[1] * rows.itemsize)
    return max(1, min(fitting, most))
