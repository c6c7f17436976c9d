"""The rows of a dispatch of v2's ElasticBuffer: which ranks get a token, their counts, their exchange, their layout.

A token goes once to each rank that owns one of its experts. Of its choices that lead to one rank, the last is the
master choice. A rank receives rows into its receive buffer, by source rank. It then copies them to the tensors that
dispatch returns: compact, in the order of arrival, or expanded, with one row for each expert of a token.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, final

import torch
from torch import Generator, Tensor

from moe_dispatch.testing.emulation.elastic.call import DispatchInput
from moe_dispatch.testing.emulation.elastic.handle import EPHandle
from moe_dispatch.testing.emulation.elastic.sizes import aligned
from moe_dispatch.testing.emulation.exchange import Exchange
from moe_dispatch.testing.emulation.memory import grown, stacked, take, uninitialised


def owners(topk_idx: Tensor, num_experts: int, num_ranks: int) -> Tensor:
    """Rank of each choice, int64 (T, K); -1 for no selection."""
    return torch.where(topk_idx >= 0, topk_idx // (num_experts // num_ranks), -1)


def masters(keys: Tensor) -> Tensor:
    """Flag the last of the choices of a token with the same key, bool (T, K); none where the key is negative.

    Source: deep_ep/include/deep_ep/common/ptx.cuh:412-421 of v2 (the highest lane).
    """
    num_topk = keys.shape[1]
    later = torch.ones(num_topk, num_topk, dtype=torch.bool).triu(diagonal=1)
    has_later = ((keys[:, :, None] == keys[:, None, :]) & later).any(2)
    return ~has_later & (keys >= 0)


def has_duplicates(topk_idx: Tensor, num_experts: int, num_ranks: int) -> list[bool]:
    """Tell for each rank whether a token names one of its experts twice."""
    repeated = ~masters(topk_idx) & (topk_idx >= 0)
    of = owners(topk_idx, num_experts, num_ranks)
    return [bool((repeated & (of == rank)).any()) for rank in range(num_ranks)]


def new_buffer_rows(owner: Tensor, *, rank: int, num_ranks: int, capacity: int, generator: Generator) -> Tensor:
    """Number each token's row in the receive buffer of the rank of each master choice, int32 (T, K); -1 for others.

    This rank's rows start at ``rank * capacity``. An atomic counter hands them out, so their order is random
    (deep_ep/include/deep_ep/impls/dispatch.cuh:344-349 of v2).
    """
    buffer_rows = torch.full(owner.shape, -1, dtype=torch.int32)
    leads = masters(owner)
    for peer in range(num_ranks):
        goes = leads & (owner == peer)
        taken = torch.randperm(int(goes.sum()), generator=generator).int()
        buffer_rows[goes] = rank * capacity + taken
    return buffer_rows


def tokens_by_buffer_row(owner: Tensor, buffer_rows: Tensor, num_ranks: int) -> list[Tensor]:
    """List the tokens for each rank, in the order of their rows in its receive buffer."""
    found = []
    for peer in range(num_ranks):
        tokens, choices = ((buffer_rows >= 0) & (owner == peer)).nonzero(as_tuple=True)
        found.append(tokens[buffer_rows[tokens, choices].argsort()])
    return found


def expanded_places(local_ids: Tensor, starts: list[int], generator: Generator) -> Tensor:
    """Expanded row of each (token, expert) of this rank, int32 (R, K), random within an expert; -1 for other experts.

    Source: the atomic counter in deep_ep/include/deep_ep/impls/dispatch_copy_epilogue.cuh:121 of v2.
    """
    places = torch.full(local_ids.shape, -1, dtype=torch.int32)
    for expert, start in enumerate(starts):
        mine = local_ids == expert
        places[mine] = start + torch.randperm(int(mine.sum()), generator=generator).int()
    return places


def told(topk_idx: Tensor, owner: Tensor, *, num_experts: int, num_ranks: int) -> dict[str, Any]:
    """Tell the other ranks this rank's rows for each rank and each expert, and whose experts a token names twice."""
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
    """Number of rows that one rank receives from each rank, and for each of its experts."""

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
        """The first expanded row of each expert."""
        return list(accumulate(self.aligned, initial=0))[:-1]

    def padding(self) -> Tensor:
        """Rows between an expert's last row and the next expert's first."""
        spans = zip(self.starts, self.per_expert, self.aligned, strict=True)
        return torch.cat([torch.arange(start + real, start + padded) for start, real, padded in spans])

    def rows_psum(self) -> Tensor:
        return torch.tensor(list(accumulate(self.rows_from)), dtype=torch.int32)

    def experts_real(self) -> Tensor:
        return torch.tensor(self.per_expert, dtype=torch.int32)

    def experts_psum(self, *, do_expand: bool) -> Tensor:
        """Compact: inclusive sums of aligned counts. Expanded: the end of each expert's real rows."""
        ends = [start + rows for start, rows in zip(self.starts, self.per_expert, strict=True)]
        return torch.tensor(ends if do_expand else list(accumulate(self.aligned)), dtype=torch.int32)


def worst_rows(counts: Counts, *, num_max_tokens_per_rank: int, num_topk: int) -> tuple[int, int]:
    """Bound the compact and the expanded rows of any routing: a host that does not wait for counts allocates these.

    Source: csrc/elastic/buffer.hpp:1065-1071 of v2.
    """
    rows = num_max_tokens_per_rank * len(counts.rows_from)
    num_local_experts = len(counts.per_expert)
    expanded = rows * min(num_topk, num_local_experts) + (counts.alignment - 1) * num_local_experts
    return rows, aligned(expanded, counts.alignment)


@final
@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Arrived:
    """Rows as they lie in the receive buffer, by source rank."""

    x: Tensor
    sf: Tensor | None
    topk_idx: Tensor  # as this rank numbers its own experts, -1 for all others
    topk_weights: Tensor  # unwritten if the sender had none
    token: Tensor
    source: Tensor


def move(exchange: Exchange, sent: DispatchInput, tokens: list[Tensor], counts: Counts) -> Arrived:
    """Send ``tokens[p]`` to rank p; read as many rows of each rank as ``counts`` says, whatever it wrote there."""
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
    """Renumber ids as the rank numbers its own experts; other ids become -1."""
    local = topk_idx - rank * num_local_experts
    return torch.where((topk_idx >= 0) & (local >= 0) & (local < num_local_experts), local, -1)


@final
@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Rows:
    """Rows as the caller finds them: compact with ids and weights (R, K), expanded with weights (R,) and no ids."""

    x: Tensor
    sf: Tensor | None
    topk_idx: Tensor | None
    topk_weights: Tensor

    def with_column_major_sf(self) -> Rows:
        """Store scale packs with token stride 1 and columns of whole 16 bytes (csrc/elastic/buffer.hpp:1094-1099)."""
        if self.sf is None:
            return self
        rows, packs = self.sf.shape
        out = torch.empty_strided((rows, packs), (1, aligned(rows, 16 // self.sf.element_size())), dtype=self.sf.dtype)
        return replace(self, sf=out.copy_(self.sf))


def compact(arrived: Arrived, num_rows: int) -> Rows:
    """Keep the order of arrival, and the weights of other ranks' experts too (dispatch_copy_epilogue.cuh:184)."""
    return Rows(
        x=grown(arrived.x, num_rows),
        sf=None if arrived.sf is None else grown(arrived.sf, num_rows),
        topk_idx=grown(arrived.topk_idx, num_rows),
        topk_weights=grown(arrived.topk_weights, num_rows),
    )


def expanded(arrived: Arrived, places: Tensor, num_rows: int, *, zero: Tensor | None) -> Rows:
    """Copy each row to the ``places`` of its choices, and write zeros to the rows ``zero``."""
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

    The rows past the last received one stay unwritten, and the last K columns of a compact dispatch.
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
