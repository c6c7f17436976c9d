"""The rows of a dispatch of v2 and V2.5: where they go, their counts, their exchange and their layout.

A choice is one of the K expert ids of a token. A token goes once to each rank that owns one of its experts. If several
choices of a token lead to the same rank, the last one is the master choice for that rank.

A rank receives rows into its receive buffer, ordered by source rank. Then it copies them to the tensors that dispatch
returns. Compact rows keep the order of arrival. Expanded rows hold one row for each expert of a token.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, final

import torch
from torch import Generator, Tensor

from moe_dispatch_testing.emulation.elastic.call import DispatchInput
from moe_dispatch_testing.emulation.elastic.handle import EPHandle
from moe_dispatch_testing.emulation.elastic.sizes import aligned
from moe_dispatch_testing.emulation.exchange import Exchange
from moe_dispatch_testing.emulation.memory import grown, stacked, take, uninitialised


def owners(topk_idx: Tensor, num_experts: int, num_ranks: int) -> Tensor:
    """Return the rank that owns the expert of each choice, int64 (T, K), or -1 for a choice without an expert."""
    return torch.where(topk_idx >= 0, topk_idx // (num_experts // num_ranks), -1)


def masters(keys: Tensor) -> Tensor:
    """Flag for each token and key the last choice with that key, bool (T, K). Negative keys are not flagged.

    Source: deep_ep/include/deep_ep/common/ptx.cuh:412-421 of v2 (the highest lane).
    """
    num_topk = keys.shape[1]
    later = torch.ones(num_topk, num_topk, dtype=torch.bool).triu(diagonal=1)
    has_later = ((keys[:, :, None] == keys[:, None, :]) & later).any(2)
    return ~has_later & (keys >= 0)


def has_duplicates(topk_idx: Tensor, num_experts: int, num_ranks: int) -> list[bool]:
    """Return for each rank whether some token names one expert of that rank twice."""
    repeated = ~masters(topk_idx) & (topk_idx >= 0)
    of = owners(topk_idx, num_experts, num_ranks)
    return [bool((repeated & (of == rank)).any()) for rank in range(num_ranks)]


def new_buffer_rows(owner: Tensor, *, rank: int, num_ranks: int, capacity: int, generator: Generator) -> Tensor:
    """Choose the row of each token in the receive buffers of its destination ranks, int32 (T, K).

    The entry of a master choice is a row in the receive buffer of the rank of that choice. All other entries are -1. In
    each receive buffer the rows of this rank start at ``rank * capacity``. The kernel takes them from an atomic
    counter, so their order is random (deep_ep/include/deep_ep/impls/dispatch.cuh:344-349 of v2).
    """
    buffer_rows = torch.full(owner.shape, -1, dtype=torch.int32)
    leads = masters(owner)
    for peer in range(num_ranks):
        goes = leads & (owner == peer)
        taken = torch.randperm(int(goes.sum()), generator=generator).int()
        buffer_rows[goes] = rank * capacity + taken
    return buffer_rows


def tokens_by_buffer_row(owner: Tensor, buffer_rows: Tensor, num_ranks: int) -> list[Tensor]:
    """List for each rank the tokens that go there, in the order of their rows in its receive buffer."""
    found = []
    for peer in range(num_ranks):
        tokens, choices = ((buffer_rows >= 0) & (owner == peer)).nonzero(as_tuple=True)
        found.append(tokens[buffer_rows[tokens, choices].argsort()])
    return found


def expanded_places(local_ids: Tensor, starts: list[int], generator: Generator) -> Tensor:
    """Choose the expanded row of each choice of the received tokens, int32 (R, K), or -1 for experts of other ranks.

    The order within an expert is random, because the kernel takes the rows from an atomic counter.

    Source: deep_ep/include/deep_ep/impls/dispatch_copy_epilogue.cuh:121 of v2.
    """
    places = torch.full(local_ids.shape, -1, dtype=torch.int32)
    for expert, start in enumerate(starts):
        mine = local_ids == expert
        places[mine] = start + torch.randperm(int(mine.sum()), generator=generator).int()
    return places


def message_to_peers(topk_idx: Tensor, owner: Tensor, *, num_experts: int, num_ranks: int) -> dict[str, Any]:
    """Make the values that this rank tells the other ranks.

    "rows" and "experts" are the numbers of rows for each rank and for each expert. "twice" says for each rank whether
    some token names one expert of that rank twice.
    """
    leads = masters(owner)
    chosen = topk_idx[topk_idx >= 0]
    return {
        "rows": [int((leads & (owner == rank)).sum()) for rank in range(num_ranks)],
        "experts": torch.bincount(chosen, minlength=num_experts).tolist(),
        "twice": has_duplicates(topk_idx, num_experts, num_ranks),
    }


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Counts:
    """Numbers of rows that one rank receives, by source rank and by expert."""

    rows_from: list[int]
    per_expert: list[int]
    alignment: int

    @staticmethod
    def of(everyone: list[dict[str, Any]], rank: int, alignment: int) -> Counts:
        experts = torch.tensor([one["experts"] for one in everyone]).sum(0).view(len(everyone), -1)
        per_expert: list[int] = experts[rank].tolist()
        return Counts(rows_from=[one["rows"][rank] for one in everyone], per_expert=per_expert, alignment=alignment)

    @staticmethod
    def of_handle(handle: EPHandle) -> Counts:
        ends = handle.psum_num_recv_tokens_per_scaleup_rank
        rows_from: list[int] = ends.diff(prepend=ends.new_zeros(1)).tolist()
        per_expert: list[int] = handle.num_unaligned_recv_tokens_per_expert.tolist()
        return Counts(rows_from=rows_from, per_expert=per_expert, alignment=handle.expert_alignment)

    @property
    def aligned(self) -> list[int]:
        return [aligned(rows, self.alignment) for rows in self.per_expert]

    @property
    def starts(self) -> list[int]:
        """Return the first expanded row of each expert."""
        return list(accumulate(self.aligned, initial=0))[:-1]

    def padding(self) -> Tensor:
        """Return the expanded rows between the last row of each expert and the first row of the next expert."""
        spans = zip(self.starts, self.per_expert, self.aligned, strict=True)
        return torch.cat([torch.arange(start + real, start + padded) for start, real, padded in spans])

    def rows_psum(self) -> Tensor:
        return torch.tensor(list(accumulate(self.rows_from)), dtype=torch.int32)

    def experts_real(self) -> Tensor:
        return torch.tensor(self.per_expert, dtype=torch.int32)

    def experts_psum(self, *, do_expand: bool) -> Tensor:
        """Return ``psum_num_recv_tokens_per_expert`` of a handle, int32 (L,).

        In a compact dispatch it holds the inclusive sums of the aligned counts. In an expanded dispatch it holds the
        end of the real rows of each expert.
        """
        ends = [start + rows for start, rows in zip(self.starts, self.per_expert, strict=True)]
        return torch.tensor(ends if do_expand else list(accumulate(self.aligned)), dtype=torch.int32)


def worst_rows(counts: Counts, *, num_max_tokens_per_rank: int, num_topk: int) -> tuple[int, int]:
    """Return the largest numbers of compact and of expanded rows that any routing can need.

    A host that does not wait for the counts allocates this many rows.

    Source: csrc/elastic/buffer.hpp:1065-1071 of v2.
    """
    rows = num_max_tokens_per_rank * len(counts.rows_from)
    num_local_experts = len(counts.per_expert)
    expanded = rows * min(num_topk, num_local_experts) + (counts.alignment - 1) * num_local_experts
    return rows, aligned(expanded, counts.alignment)


@final
@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Arrived:
    """Rows in the order of the receive buffer, which is by source rank."""

    x: Tensor
    sf: Tensor | None
    topk_idx: Tensor  # local ids of this rank's experts, -1 for experts of other ranks
    topk_weights: Tensor  # uninitialised if the sender passed no weights
    token: Tensor
    source: Tensor


def move(exchange: Exchange, sent: DispatchInput, tokens: list[Tensor], counts: Counts) -> Arrived:
    """Send the rows of ``tokens[p]`` to rank p, and read the rows that the other ranks sent here.

    The number of rows that are read is the one in ``counts``, even if the sender wrote another number of rows.
    """
    weights = sent.topk_weights
    if weights is None:
        weights = uninitialised(sent.topk_idx.shape, torch.float32)

    def arrived(rows: Tensor) -> Tensor:
        parts = exchange.rows([take(rows, index) for index in tokens])
        return stacked([grown(part[:count], count) for part, count in zip(parts, counts.rows_from, strict=True)])

    return Arrived(
        x=arrived(sent.x),
        sf=None if sent.sf is None else arrived(sent.sf),
        topk_idx=_local_ids(arrived(sent.topk_idx), exchange.rank, len(counts.per_expert)),
        topk_weights=arrived(weights),
        token=arrived(torch.arange(sent.x.shape[0])),
        source=torch.arange(exchange.size).repeat_interleave(torch.tensor(counts.rows_from)),
    )


def _local_ids(topk_idx: Tensor, rank: int, num_local_experts: int) -> Tensor:
    """Turn expert ids into local ids of the rank. Ids of other ranks' experts become -1."""
    local = topk_idx - rank * num_local_experts
    return torch.where((topk_idx >= 0) & (local >= 0) & (local < num_local_experts), local, -1)


@final
@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Rows:
    """Rows that dispatch returns. Compact rows have ids and weights (R, K). Expanded rows have only weights (R,)."""

    x: Tensor
    sf: Tensor | None
    topk_idx: Tensor | None
    topk_weights: Tensor

    def with_column_major_sf(self) -> Rows:
        """Store the scales by column, with columns padded to 16 bytes (csrc/elastic/buffer.hpp:1094-1099)."""
        if self.sf is None:
            return self
        rows, packs = self.sf.shape
        out = torch.empty_strided((rows, packs), (1, aligned(rows, 16 // self.sf.element_size())), dtype=self.sf.dtype)
        return replace(self, sf=out.copy_(self.sf))


def compact(arrived: Arrived, num_rows: int) -> Rows:
    """Keep the order of arrival. Keep the weights of other ranks' experts too (dispatch_copy_epilogue.cuh:184)."""
    return Rows(
        x=grown(arrived.x, num_rows),
        sf=None if arrived.sf is None else grown(arrived.sf, num_rows),
        topk_idx=grown(arrived.topk_idx, num_rows),
        topk_weights=grown(arrived.topk_weights, num_rows),
    )


def expanded(arrived: Arrived, places: Tensor, num_rows: int, *, zero: Tensor | None) -> Rows:
    """Copy each row to the ``places`` of its choices. Fill the rows ``zero`` with zeros."""
    row, choice = (places >= 0).nonzero(as_tuple=True)
    place = places[row, choice].long()

    def filled(values: Tensor) -> Tensor:
        out = uninitialised((num_rows, *values.shape[1:]), values.dtype)
        flat = out.view(torch.uint8) if out.element_size() == 1 else out
        flat[place] = take(values, row).view(flat.dtype)
        if zero is not None:
            flat[zero] = 0
        return out

    weights = uninitialised((num_rows,), torch.float32)
    weights[place] = arrived.topk_weights[row, choice]
    if zero is not None:
        weights[zero] = 0
    sf = None if arrived.sf is None else filled(arrived.sf)
    return Rows(x=filled(arrived.x), sf=sf, topk_idx=None, topk_weights=weights)


def metadata(arrived: Arrived, places: Tensor | None, *, num_rows: int, capacity: int) -> Tensor:
    """Make ``recv_src_metadata`` of a handle, int32 (num_rows, 2 + K) (dispatch_copy_epilogue.cuh:188-206).

    Rows after the last received row stay uninitialised. In a compact dispatch, the last K columns do too.
    """
    ids = arrived.topk_idx
    rows, num_topk = ids.shape
    out = uninitialised((num_rows, 2 + num_topk), torch.int32)
    lanes = torch.arange(num_topk)
    master = torch.where(ids >= 0, lanes, -1).amax(1) if num_topk else torch.full((rows,), -1)
    out[:rows, 0] = (arrived.source * capacity + arrived.token).int()
    out[:rows, 1] = (arrived.source * num_topk + master).int()
    if places is not None:
        out[:rows, 2:] = places
    return out
