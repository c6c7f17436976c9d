"""Columns of backends without packets of ours: one all-gather of ids and columns, and the order of rows does the rest.

The rows of each expert arrive in the order of source rank and token. So if a rank knows the ids of all ranks, it knows
which token each of its rows is.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from moe_dispatch.backends.base import MoEShape
from moe_dispatch.backends.wire import id_dtype_for
from moe_dispatch.dispatched import Dispatched
from moe_dispatch.dispatchers.channel import Channel
from moe_dispatch.permutation.index import count_values, running_total
from moe_dispatch.permutation.strides import dense
from moe_dispatch.types import Sizes


@final
@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Everyone:
    """The ids and columns of all ranks, of S = P * most rows. Rows that a rank does not have go nowhere.

    Attributes:
        ids_SK: int64, the place of the expert on this rank; below 0 or above L-1 for others.
        columns_SC: uint8.
    """

    ids_SK: Tensor
    columns_SC: Tensor


def gather(channel: Channel, sizes: Sizes, ids_TK: Tensor, columns_TC: Tensor) -> Everyone:
    """Bring ids and columns of all ranks to each rank.

    Cost: one all-gather of 2 bytes for each slot, or 4 with more than 16,383 experts, and of the columns. If the ranks
    have not agreed on the largest number of rows, as on ``deepep`` v1, also an all-reduce and a host sync.
    """
    shape, comm, context = channel.shape, channel.communicator, channel.context
    count, most = len(ids_TK), sizes.padded_rows or sizes.group_max_rows
    if most is None:
        most = context.most_rows if shape.graph_safe else channel.control.max([count], label="carry")[0]
    assert most is not None
    parts = [dense(ids_TK.to(id_dtype_for(shape.num_experts))).view(torch.uint8), columns_TC]
    widths = [part.shape[1] for part in parts]
    # Bytes of 255 are an id of -1.
    mine = torch.full((most, sum(widths)), 255, dtype=torch.uint8, device=ids_TK.device)
    mine[:count].copy_(torch.cat(parts, 1))
    everyone = mine.new_empty(comm.size * most, mine.shape[1])
    comm.all_gather(everyone, mine, label="carry")
    # Copies, because a view of one row could not be read as longer numbers.
    split = everyone.split_with_sizes(widths, 1)
    ids, columns = (part.clone(memory_format=torch.contiguous_format) for part in split)
    ids_SK = ids.view(id_dtype_for(shape.num_experts)).long()
    return Everyone(
        ids_SK=torch.where(ids_SK < 0, -1, ids_SK - comm.rank * shape.num_local_experts),
        columns_SC=columns,
    )


def gathered_bytes(shape: MoEShape, sizes: Sizes) -> int:
    """Return the bytes that ``gather`` and ``source_of_rows`` hold at most at one time in graph-safe mode."""
    rows = sizes.padded_rows or sizes.group_max_rows or 0
    row = shape.top_k * id_dtype_for(shape.num_experts).itemsize + shape.column_bytes
    # The rows of all ranks as they came, and split; then some int64 tables of the slots.
    slots, columns = shape.ep_size * rows * shape.top_k, shape.ep_size * rows * shape.column_bytes
    return max(rows * row * (2 + 2 * shape.ep_size), columns + 8 * 9 * slots)


def source_of_rows(channel: Channel, everyone: Everyone, sent: Dispatched) -> Tensor:
    """Return which row of ``everyone`` each expert row is a copy of, int64 (R,); -1 on padding. No host sync."""
    shape, ids_SK, rows = channel.shape, everyone.ids_SK, sent.in_graph.shape[0]
    experts = shape.num_local_experts
    key_N = torch.where((ids_SK < 0) | (ids_SK >= experts), experts, ids_SK).flatten()
    counts = count_values(key_N, experts + 1, graph_safe=shape.graph_safe)
    padded = -(-counts // shape.pad_multiple) * shape.pad_multiple
    # Of the slots in the order of their experts, number n of all stands at n plus the padding before its expert.
    order_N = key_N.sort(stable=True)
    shift = running_total(padded) - running_total(counts)
    place_N = torch.arange(len(key_N), device=key_N.device) + shift[order_N.values]
    # What a library drops for want of room stands behind the last row.
    place_N = torch.where((order_N.values == experts) | (place_N >= rows), rows, place_N)
    source = place_N.new_full((rows + 1,), -1)
    return source.index_copy_(0, place_N, order_N.indices // ids_SK.shape[1])[:rows]
