"""The rows of v2 and V2.5: where they go, their counts, their layout, their handle, and the sums that come back.

A choice is one of the K expert ids of a token. A token goes once to each rank that owns one of its experts. If several
choices of a token lead to the same rank, the last one is the master choice for that rank.

A rank receives rows into its receive buffer, ordered by source rank. Then it copies them to the tensors that dispatch
returns. Compact rows keep the order of arrival. Expanded rows hold one row for each expert of a token.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, final

import torch
from torch import Generator, Tensor

from moe_dispatch_testing.emulation.exchange import RankExchange
from moe_dispatch_testing.emulation.memory import grown, stacked, take, uninitialised
from moe_dispatch_testing.emulation.refusals import EmulatedAbort, require


class EPHandle:
    """A handle of v2, with the attributes of the release (deep_ep/buffers/elastic.py:25-95).

    ``topk_idx`` is int64. The other tensors are int32.

    ``psum_num_recv_tokens_per_scaleup_rank`` (P,): Entry i is the number of rows received from ranks 0 to i.

    ``psum_num_recv_tokens_per_expert`` (L,): In a compact dispatch, the inclusive sums of the aligned counts. In an
    expanded dispatch, the end of the real rows of each expert.

    ``recv_src_metadata`` (R, 2 + K): Column 0 is source rank * ``num_max_tokens_per_rank`` + token. Column 1 is source
    rank * K + master choice. The last K columns are the expanded rows of this token, or uninitialised in a compact
    dispatch.

    ``dst_buffer_slot_idx`` (T, K): For a master choice, the row in the receive buffer of its rank. For all other
    choices -1.
    """

    def __init__(
        self,
        do_expand: bool,
        num_experts: int,
        expert_alignment: int,
        num_max_tokens_per_rank: int,
        num_sms: int,
        topk_idx: Tensor,
        num_recv_tokens: int,
        num_expanded_tokens: int,
        num_recv_tokens_per_expert_list: list[int],
        psum_num_recv_tokens_per_scaleup_rank: Tensor,
        psum_num_recv_tokens_per_expert: Tensor,
        num_unaligned_recv_tokens_per_expert: Tensor,
        recv_src_metadata: Tensor,
        dst_buffer_slot_idx: Tensor,
        token_metadata_at_forward: Tensor | None,
        channel_linked_list: Tensor | None,
    ) -> None:
        assert topk_idx is not None
        self.do_expand = do_expand
        self.num_experts = num_experts
        self.expert_alignment = expert_alignment
        self.num_max_tokens_per_rank = num_max_tokens_per_rank
        self.num_sms = num_sms
        self.topk_idx = topk_idx
        self.psum_num_recv_tokens_per_scaleup_rank = psum_num_recv_tokens_per_scaleup_rank
        self.psum_num_recv_tokens_per_expert = psum_num_recv_tokens_per_expert
        self.num_unaligned_recv_tokens_per_expert = num_unaligned_recv_tokens_per_expert
        self.num_recv_tokens_per_expert_list = num_recv_tokens_per_expert_list
        self.recv_src_metadata = recv_src_metadata
        self.dst_buffer_slot_idx = dst_buffer_slot_idx
        self.token_metadata_at_forward = token_metadata_at_forward
        self.channel_linked_list = channel_linked_list
        self.num_recv_tokens = num_recv_tokens
        self.num_expanded_tokens = num_expanded_tokens
        self.cached_recv_src_metadata_before_sort: Tensor | None = None

    def deterministic_sort(
        self,
        do_cpu_sync: bool,
        is_cached_dispatch: bool,
        recv_x: Tensor,
        recv_sf: Tensor | None,
        recv_topk_idx: Tensor | None,
        recv_topk_weights: Tensor | None,
        channel_linked_list: Any,
    ) -> None:
        """Sort rows by source rank and token, in place. Expanded rows are sorted within each expert."""
        if not is_cached_dispatch:
            self.cached_recv_src_metadata_before_sort = self.recv_src_metadata.clone()
        assert self.cached_recv_src_metadata_before_sort is not None
        received = len(self.recv_src_metadata) if do_cpu_sync else int(self.psum_num_recv_tokens_per_scaleup_rank[-1])
        arrived = self.cached_recv_src_metadata_before_sort[:received]
        tensors = [tensor for tensor in (recv_x, recv_sf, recv_topk_weights, recv_topk_idx) if tensor is not None]
        if not self.do_expand:
            order = arrived[:, 0].argsort()
            for tensor in [*tensors, *([] if is_cached_dispatch else [self.recv_src_metadata])]:
                _put(tensor, torch.arange(order.shape[0]), take(tensor, order))
        elif not is_cached_dispatch:
            # The rows of an expert fill a range without gaps, so the sorted rows take the same range.
            row, choice = (arrived[:, 2:] >= 0).nonzero(as_tuple=True)
            place = arrived[row, 2 + choice].long()
            starts = self.psum_num_recv_tokens_per_expert - self.num_unaligned_recv_tokens_per_expert
            expert = torch.searchsorted(starts[1:].contiguous(), place.int(), right=True)
            by_source = arrived[row, 0].argsort(stable=True)
            order = by_source[expert[by_source].argsort(stable=True)]
            sorted_place = place.sort().values
            for tensor in tensors:
                _put(tensor, sorted_place, take(tensor, place[order]))
            self.recv_src_metadata[row[order], 2 + choice[order]] = sorted_place.int()


@final
class GuardedEPHandle(EPHandle):
    """A handle of V2.5. It holds the ``topk_idx`` of the caller, not a copy, and refuses it after a change in place.

    A tensor that was made in inference mode has no version, so its changes are not seen.

    Source: deep_ep/buffers/ep.py:103-111.
    """

    @property
    def topk_idx(self) -> Tensor:
        unchanged = self._topk_idx_version is None or self._topk_idx._version == self._topk_idx_version
        assert unchanged, "`topk_idx` must not be modified while the EP handle is in use"
        return self._topk_idx

    @topk_idx.setter
    def topk_idx(self, topk_idx: Tensor) -> None:
        self._topk_idx = topk_idx
        self._topk_idx_version = None if topk_idx.is_inference() else topk_idx._version


GuardedEPHandle.__name__ = GuardedEPHandle.__qualname__ = "EPHandle"


def _put(tensor: Tensor, index: Tensor, rows: Tensor) -> None:
    """Set ``tensor[index] = rows`` in place. The tensor may be float8 or strided."""
    if tensor.element_size() == 1:
        tensor.view(torch.uint8)[index] = rows.view(torch.uint8)
    else:
        tensor[index] = rows


def aligned(number: int, multiple: int) -> int:
    """Round ``number`` up to a multiple of ``multiple``."""
    return -(-number // multiple) * multiple


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


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class ElasticCounts:
    """Numbers of rows that one rank receives, by source rank and by expert."""

    rows_from: list[int]
    per_expert: list[int]
    alignment: int

    @staticmethod
    def of(everyone: list[dict[str, Any]], rank: int, alignment: int) -> ElasticCounts:
        experts = torch.tensor([one["experts"] for one in everyone]).sum(0).view(len(everyone), -1)
        per_expert: list[int] = experts[rank].tolist()
        rows_from = [one["rows"][rank] for one in everyone]
        return ElasticCounts(rows_from=rows_from, per_expert=per_expert, alignment=alignment)

    @staticmethod
    def of_handle(handle: EPHandle) -> ElasticCounts:
        ends = handle.psum_num_recv_tokens_per_scaleup_rank
        rows_from: list[int] = ends.diff(prepend=ends.new_zeros(1)).tolist()
        per_expert: list[int] = handle.num_unaligned_recv_tokens_per_expert.tolist()
        return ElasticCounts(rows_from=rows_from, per_expert=per_expert, alignment=handle.expert_alignment)

    @property
    def aligned(self) -> list[int]:
        return [aligned(rows, self.alignment) for rows in self.per_expert]

    @property
    def starts(self) -> list[int]:
        """Return the first expanded row of each expert."""
        return list(accumulate(self.aligned, initial=0))[:-1]

    @property
    def ends(self) -> list[int]:
        """Return the end of the real expanded rows of each expert."""
        return [start + rows for start, rows in zip(self.starts, self.per_expert, strict=True)]

    def padding(self) -> Tensor:
        """Return the expanded rows between the last row of each expert and the first row of the next expert."""
        spans = zip(self.ends, accumulate(self.aligned), strict=True)
        return torch.cat([torch.arange(end, next_start) for end, next_start in spans])

    def worst_rows(self, capacity: int, num_topk: int) -> tuple[int, int]:
        """Return the largest numbers of compact and of expanded rows that any routing can need.

        A host that does not wait for the counts allocates this many rows (csrc/elastic/buffer.hpp:1065-1071 of v2).
        """
        rows, local = capacity * len(self.rows_from), len(self.per_expert)
        expanded = rows * min(num_topk, local) + (self.alignment - 1) * local
        return rows, aligned(expanded, self.alignment)


def received_rows(
    exchange: RankExchange,
    sent: tuple[Tensor, Tensor | None, Tensor, Tensor | None],
    owner: Tensor,
    counts: ElasticCounts,
    handle: EPHandle | None,
    *,
    make: Callable[..., EPHandle],
    generator: Generator,
    do_cpu_sync: bool,
    do_expand: bool,
    zeroes_padding: bool,
) -> tuple[tuple[Tensor, Tensor | None, Tensor | None, Tensor], EPHandle]:
    """RankExchange rows, lay them out for the caller, and make a handle if none is given.

    The kernel takes the rows of a receive buffer from an atomic counter, so their order is random.

    Args:
        exchange: Collectives of the group.
        sent: Rows (T, D), scales (T, S) or None, ids and weights (T, K).
        owner: Rank of the expert of each choice, (T, K).
        counts: Numbers of rows that this rank receives.
        handle: Handle of an earlier dispatch, or None.
        make: Class of a new handle, with the arguments that the caller knows.
        generator: Source of random orders.
        do_cpu_sync: Whether a new handle has the counts. If not, the tensors have room for the worst case.
        do_expand: Whether rows arrive expanded.
        zeroes_padding: Whether the padding of expanded rows is zero.

    Returns:
        Rows, scales, local ids (or None for expanded rows) and weights, and the handle.
    """
    x, sf, topk_idx, topk_weights = sent
    num_topk, capacity = topk_idx.shape[1], make.keywords["num_max_tokens_per_rank"]  # type: ignore[attr-defined]
    slots = _new_slots(owner, exchange, capacity, generator) if handle is None else handle.dst_buffer_slot_idx
    tokens = []
    for peer in range(exchange.size):
        token, choice = ((slots >= 0) & (owner == peer)).nonzero(as_tuple=True)
        tokens.append(token[slots[token, choice].argsort()])

    def arrived(rows: Tensor) -> Tensor:
        """Send rows. Read as many rows as ``counts`` says, even if the sender wrote another number of rows."""
        parts = exchange.rows([take(rows, index) for index in tokens])
        return stacked([grown(part[:count], count) for part, count in zip(parts, counts.rows_from, strict=True)])

    x, sf = arrived(x), None if sf is None else arrived(sf)
    weights = arrived(uninitialised(topk_idx.shape, torch.float32) if topk_weights is None else topk_weights)
    ids, local_experts = arrived(topk_idx) - exchange.rank * len(counts.per_expert), len(counts.per_expert)
    ids = torch.where((ids >= 0) & (ids < local_experts), ids, -1)
    if handle is None:
        token = arrived(torch.arange(len(topk_idx)))
        source = torch.arange(exchange.size).repeat_interleave(torch.tensor(counts.rows_from))
        sizes = sum(counts.rows_from), sum(counts.aligned)
        num_rows, num_expanded = sizes if do_cpu_sync else counts.worst_rows(capacity, num_topk)
        metadata = uninitialised((num_rows, 2 + num_topk), torch.int32)
        lanes = torch.arange(num_topk)
        master = torch.where(ids >= 0, lanes, -1).amax(1) if num_topk else torch.full((len(ids),), -1)
        metadata[: len(ids), 0] = (source * capacity + token).int()
        metadata[: len(ids), 1] = (source * num_topk + master).int()
        if do_expand:
            metadata[: len(ids), 2:] = _expanded_places(ids, counts.starts, generator)
        handle = make(
            num_recv_tokens=num_rows,
            num_expanded_tokens=num_expanded,
            num_recv_tokens_per_expert_list=counts.aligned if do_cpu_sync else [],
            psum_num_recv_tokens_per_scaleup_rank=_int32(list(accumulate(counts.rows_from))),
            psum_num_recv_tokens_per_expert=_int32(counts.ends if do_expand else list(accumulate(counts.aligned))),
            num_unaligned_recv_tokens_per_expert=_int32(counts.per_expert),
            recv_src_metadata=metadata,
            dst_buffer_slot_idx=slots,
            token_metadata_at_forward=None,
            channel_linked_list=None,
        )
    if not do_expand:  # compact rows keep the weights of other ranks' experts too (dispatch_copy_epilogue.cuh:184)
        rows = handle.num_recv_tokens
        compact = grown(x, rows), None if sf is None else grown(sf, rows), grown(ids, rows), grown(weights, rows)
        return compact, handle
    places, zero = handle.recv_src_metadata[: len(x), 2:], counts.padding() if zeroes_padding else None
    row, choice = (places >= 0).nonzero(as_tuple=True)
    place, room = places[row, choice].long(), handle.num_expanded_tokens

    def expanded(values: Tensor) -> Tensor:
        out = uninitialised((room, *values.shape[1:]), values.dtype)
        _put(out, place, values)
        if zero is not None:
            (out.view(torch.uint8) if out.element_size() == 1 else out)[zero] = 0
        return out

    expanded_sf = None if sf is None else expanded(take(sf, row))
    return (expanded(take(x, row)), expanded_sf, None, expanded(weights[row, choice])), handle


def _new_slots(owner: Tensor, exchange: RankExchange, capacity: int, generator: Generator) -> Tensor:
    """Choose the row of each token in the receive buffers of its destination ranks, int32 (T, K).

    The entry of a master choice is a row in the receive buffer of the rank of that choice. All other entries are -1. In
    each receive buffer the rows of this rank start at ``rank * capacity``.
    """
    slots = torch.full(owner.shape, -1, dtype=torch.int32)
    leads = masters(owner)
    for peer in range(exchange.size):
        goes = leads & (owner == peer)
        slots[goes] = exchange.rank * capacity + torch.randperm(int(goes.sum()), generator=generator).int()
    return slots


def _expanded_places(local_ids: Tensor, starts: list[int], generator: Generator) -> Tensor:
    """Choose the expanded row of each choice of the received tokens, int32 (R, K), or -1 for experts of other ranks."""
    places = torch.full(local_ids.shape, -1, dtype=torch.int32)
    for expert, start in enumerate(starts):
        mine = local_ids == expert
        places[mine] = start + torch.randperm(int(mine.sum()), generator=generator).int()
    return places


def _int32(values: list[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def combined_rows(
    exchange: RankExchange,
    x: Tensor,
    topk_weights: Tensor | None,
    biases: list[Tensor],
    handle: EPHandle,
    *,
    sends_all: bool,
) -> tuple[Tensor, Tensor | None]:
    """Send rows back to the choices they came from, and add them up there. Weights come back unchanged.

    Compact rows go back unchanged. With ``sends_all``, all expanded rows go back. Otherwise the expanded rows of a
    token are added up, and the sum goes back (deep_ep/include/deep_ep/impls/combine.cuh:121-224 of v2).

    Returns:
        The sums, bfloat16 (T, D), and for each choice the weight that its rank sent, float32 (T, K), or None.
    """
    x, weights = x.detach(), None if topk_weights is None else topk_weights.detach()
    # The tensors have more rows than were received if the dispatch did not wait for the counts.
    rows = int(handle.psum_num_recv_tokens_per_scaleup_rank[-1])
    metadata = handle.recv_src_metadata[:rows].long()
    num_topk = metadata.shape[1] - 2
    source, choice = metadata[:, 1] // num_topk, metadata[:, 1] % num_topk
    token = metadata[:, 0] % handle.num_max_tokens_per_rank
    if not handle.do_expand:
        x, weights = x[:rows], None if weights is None else weights[:rows]
    else:
        places = metadata[:, 2:]
        needed = int(places.max()) + 1 if places.numel() else 0
        require(needed <= len(x), f"x must have {needed} rows or more, got {len(x)}", EmulatedAbort)
        here = places >= 0
        if sends_all:
            row, choice = here.nonzero(as_tuple=True)
            x, source, token = x[places[row, choice]], source[row], token[row]
        else:
            at = places.clamp(min=0)
            if weights is not None:
                weights = torch.where(here, weights[at], 0.0) if rows else weights.new_zeros(0, num_topk)
            x = _reduced(x[at], here, []) if rows else x[:0]
    by_rank = [(source == rank).nonzero().flatten() for rank in range(exchange.size)]

    def arrived(values: Tensor) -> Tensor:
        return stacked(exchange.rows([take(values, index) for index in by_rank]))

    owner = owners(handle.topk_idx, handle.num_experts, exchange.size)
    index = arrived(torch.stack([token, choice], dim=1).long())
    is_inside = (index[:, 0] >= 0) & (index[:, 0] < len(owner))
    to = index[is_inside].unbind(1)
    back = uninitialised((*owner.shape, x.shape[1]), x.dtype)
    back[to] = arrived(x)[is_inside]
    combined = _reduced(back, owner >= 0 if sends_all else masters(owner), biases)
    if weights is None:
        return combined, None
    of_masters = uninitialised((*owner.shape, num_topk), torch.float32)
    of_masters[to] = arrived(weights)[is_inside]
    if owner.numel() == 0:
        return combined, torch.zeros(owner.shape, dtype=torch.float32)
    # A choice takes its weight from its master choice (combine_reduce_epilogue.cuh:128-139 of v2).
    is_master_of = (owner[:, :, None] == owner[:, None, :]) & masters(owner)[:, None, :]
    master = is_master_of.int().argmax(2)
    by_choice = of_masters.gather(1, master[:, :, None].expand_as(of_masters)).diagonal(dim1=1, dim2=2)
    return combined, torch.where(owner >= 0, by_choice, 0.0)


def _reduced(rows: Tensor, valid: Tensor, biases: list[Tensor]) -> Tensor:
    """Add up the biases, then the rows (T, N, D) that ``valid`` (T, N) flags, in the order of dim 1: bfloat16 (T, D).

    Here all sums are in float32 and are rounded once. The kernel does the same, except that it adds one or two rows
    without a bias in bfloat16, which gives the same number (deep_ep/include/deep_ep/impls/combine_utils.cuh:67-70 of
    v2).
    """
    total = torch.zeros(rows.shape[0], rows.shape[2], dtype=torch.float32)
    for addend in [*biases, *torch.where(valid[:, :, None], rows, 0).unbind(1)]:
        total += addend.float()
    return total.bfloat16()
