"""The least that a layer can cost in torch: its collectives on the fewest bytes, and the row passes it cannot avoid.

Everything else is given away: routing is known, exchanged and sorted before the clock starts, all memory is there, and
rows are weighted in their own dtype. It computes the layer all the same, and is checked like every other contender.

The passes, over T rows at home, S rows on the wire and R grouped rows, each block by block where that is faster:

====================================  =======  ======  =========================================
pass                                  reads    writes  primitive
====================================  =======  ======  =========================================
pack                                  T        S       ``index_select(out=)``
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

from moe_dispatch.backends.permutation import SlotIndex, group_slots
from moe_dispatch.cli.bench.contenders import Contender, Experts
from moe_dispatch.cli.bench.workload import Shape, Tokens

_BLOCK_BYTES = 2 << 20  # of rows on the CPU, so that the next operation finds them in the cache


@final
class Floor(Contender):
    """A contender that knows the routing of the tokens it is first given, and takes no others."""

    def __init__(self, shape: Shape, group: dist.ProcessGroup) -> None:
        self._shape, self._group = shape, group
        self._way: Way | None = None

    def layer(self, x_TD: Tensor, weights_TK: Tensor, tokens: Tokens, experts: Experts) -> Tensor:
        if self._way is None:
            with tokens.x_TD.device:
                self._way = find_way(tokens, self._shape, self._group)
        way = self._way
        rows_RD, weights_R = _Dispatch.apply(x_TD, weights_TK, way)  # type: ignore[no-untyped-call]
        y_TD: Tensor = _Combine.apply(experts(rows_RD, lambda: way.local_ids_R), weights_R, way)  # type: ignore[no-untyped-call]
        return y_TD


@final
@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Way:
    """Where rows go, known beforehand, and memory for them.

    Attributes:
        counts_out: int64 (P, L + 1), what ranks tell each other first; ``counts_in`` is room for their answers.
        source_S: int64, the home row of each row sent, by destination rank.
        member_S: int64, the sent rows by home row, which begin at ``cu_T``.
        index: received rows grouped by local expert; ``local_ids_R`` their experts.
        buffers: rows by name, each written once in forward and backward.
    """

    group: dist.ProcessGroup
    rows_out: Sequence[int]
    rows_in: Sequence[int]
    counts_out: Tensor
    counts_in: Tensor
    source_S: Tensor
    member_S: Tensor
    cu_T: Tensor
    index: SlotIndex
    local_ids_R: Tensor
    buffers: dict[str, Tensor]

    def exchange(self, out: Tensor, given: Tensor, *, home: bool = False) -> None:
        """Rows to the ranks of their experts, or back home."""
        splits_out, splits_in = (self.rows_in, self.rows_out) if home else (self.rows_out, self.rows_in)
        self.group.alltoall_base(out, given, list(splits_in), list(splits_out)).wait()


def find_way(tokens: Tokens, shape: Shape, group: dist.ProcessGroup) -> Way:
    """Exchange and sort what routing says. Collective."""
    size, local = group.size(), shape.experts // group.size()
    rank_TK = tokens.ids_TK // local
    members_PT = torch.zeros(size, shape.tokens, dtype=torch.bool).scatter_(0, rank_TK.t(), True)
    source_S = members_PT.nonzero()[:, 1].contiguous()
    by_row = source_S.sort(stable=True)
    rows_out = members_PT.sum(1)
    rows_in = torch.empty_like(rows_out)
    group.alltoall_base(rows_in, rows_out, [1] * size, [1] * size).wait()
    ids_SK = torch.empty(int(rows_in.sum()), shape.top_k, dtype=torch.int64)
    group.alltoall_base(ids_SK, tokens.ids_TK[source_S], rows_in.tolist(), rows_out.tolist()).wait()
    keys_SK = ids_SK - group.rank() * local
    keys_SK[keys_SK >= local] = -1
    counts = torch.bincount(keys_SK[keys_SK >= 0], minlength=local)
    index = group_slots(keys_SK, counts.tolist())
    return Way(
        group=group,
        rows_out=rows_out.tolist(),
        rows_in=rows_in.tolist(),
        counts_out=rows_out.new_zeros(size, local + 1),
        counts_in=rows_out.new_zeros(size, local + 1),
        source_S=source_S,
        member_S=by_row.indices,
        cu_T=torch.searchsorted(by_row.values, torch.arange(shape.tokens + 1)),
        index=index,
        local_ids_R=torch.arange(local).repeat_interleave(counts),
        buffers=_buffers(tokens, len(source_S), index),
    )


def _buffers(tokens: Tokens, sent: int, index: SlotIndex) -> dict[str, Tensor]:
    (count, hidden), slots = tokens.x_TD.shape, tokens.ids_TK.shape[1]
    lengths = {"out": sent, "in": index.num_rows, "rows": index.num_grouped, "gradient": index.num_grouped}
    lengths |= {"y": count, "x": count}
    rows = {name: tokens.x_TD.new_zeros(length, hidden) for name, length in lengths.items()}
    rows |= {name: rows["rows"].new_zeros(_block_rows(rows["rows"]), hidden) for name in ("block", "products")}
    sides = {"in": index.num_rows, "out": sent}
    slots_of = {f"slots {side}": torch.zeros(length, slots) for side, length in sides.items()}
    # Ids take no part any more: two bytes a slot, which travel with the weights, stand for them.
    ids_of = {f"ids {side}": torch.zeros(length, 2 * slots, dtype=torch.uint8) for side, length in sides.items()}
    return {**rows, **slots_of, **ids_of, "dots": tokens.x_TD.new_zeros(index.num_grouped)}


class _Dispatch(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, weights_TK: Tensor, way: Way) -> tuple[Tensor, Tensor]:
        ctx.way = way
        space, index, ones = way.buffers, way.index, [1] * way.group.size()
        way.group.alltoall_base(way.counts_in, way.counts_out, ones, ones).wait()
        torch.index_select(weights_TK, 0, way.source_S, out=space["slots out"])
        torch.index_select(x_TD, 0, way.source_S, out=space["out"])
        way.exchange(space["slots in"], space["slots out"])
        way.exchange(space["ids in"], space["ids out"])
        way.exchange(space["in"], space["out"])
        torch.index_select(space["in"], 0, index.source_R, out=space["rows"])
        return space["rows"].detach(), space["slots in"].take(index.slot_N)

    @staticmethod
    def backward(ctx: Any, grad_RD: Tensor, dots_R: Tensor) -> Any:
        way: Way = ctx.way
        space, index = way.buffers, way.index
        sum_rows(grad_RD, index.byrow_N, index.cu_S, None, space["in"])
        space["slots in"].zero_().view(-1).index_copy_(0, index.slot_N, dots_R)
        way.exchange(space["out"], space["in"], home=True)
        way.exchange(space["slots out"], space["slots in"], home=True)
        sum_rows(space["out"], way.member_S, way.cu_T, None, space["x"])
        return space["x"].detach(), torch.embedding_bag(space["slots out"], way.member_S, way.cu_T[:-1])[0], None


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows_RD: Tensor, weights_R: Tensor, way: Way) -> Tensor:
        ctx.way = way
        ctx.save_for_backward(rows_RD, weights_R)
        space, index = way.buffers, way.index
        sum_rows(rows_RD.detach(), index.byrow_N, index.cu_S, weights_R[index.byrow_N].to(rows_RD.dtype), space["in"])
        way.exchange(space["out"], space["in"], home=True)
        sum_rows(space["out"], way.member_S, way.cu_T, None, space["y"])
        return space["y"].detach()

    @staticmethod
    def backward(ctx: Any, grad_TD: Tensor) -> Any:
        way: Way = ctx.way
        rows_RD, weights_R = ctx.saved_tensors
        space, source = way.buffers, way.index.source_R
        torch.index_select(grad_TD, 0, way.source_S, out=space["out"])
        way.exchange(space["in"], space["out"])
        weights_R1 = weights_R.to(rows_RD.dtype).unsqueeze(1)
        for block in _blocks(rows_RD):
            count = block.stop - block.start
            gradient = torch.index_select(space["in"], 0, source[block], out=space["block"][:count])
            product = torch.mul(gradient, rows_RD[block], out=space["products"][:count])
            torch.sum(product, 1, out=space["dots"][block])
            torch.mul(gradient, weights_R1[block], out=space["gradient"][block])
        return space["gradient"].detach(), space["dots"].float(), None


def sum_rows(rows: Tensor, members: Tensor, cu: Tensor, weights: Tensor | None, out: Tensor) -> None:
    """``embedding_bag`` in blocks: the whole would write into fresh memory, which takes longer than the copy here."""
    blocks = list(_blocks(out))
    edges = cu[torch.tensor([0, *(block.stop for block in blocks)])].tolist()
    for block, begin, end in zip(blocks, edges, edges[1:], strict=False):
        offsets, part = cu[block.start : block.stop + 1] - begin, None if weights is None else weights[begin:end]
        out[block].copy_(torch.embedding_bag(rows, members[begin:end], offsets, False, 0, False, part, True)[0])


def _blocks(rows: Tensor) -> list[slice]:
    step = _block_rows(rows)
    return [slice(begin, min(begin + step, len(rows))) for begin in range(0, len(rows), step)]


def _block_rows(rows: Tensor) -> int:
    if rows.device.type != "cpu":
        return max(1, len(rows))
    return max(1, _BLOCK_BYTES // max(1, rows.shape[1] * rows.itemsize))
