"""``deep_ep.EPHandle``: the handle of a dispatch. Cached dispatches, combine and the caller read it."""

from __future__ import annotations

from typing import Any, final

import torch
from torch import Tensor

from moe_dispatch_testing.emulation.memory import take


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
        arrived = self.cached_recv_src_metadata_before_sort[: self._num_rows(do_cpu_sync)]
        tensors = [tensor for tensor in (recv_x, recv_sf, recv_topk_weights, recv_topk_idx) if tensor is not None]
        if not self.do_expand:
            order = arrived[:, 0].argsort()
            for tensor in [*tensors, *([] if is_cached_dispatch else [self.recv_src_metadata])]:
                _put(tensor, torch.arange(order.shape[0]), take(tensor, order))
        elif not is_cached_dispatch:
            self._sort_within_experts(arrived, tensors)

    def _num_rows(self, do_cpu_sync: bool) -> int:
        if do_cpu_sync:
            return self.recv_src_metadata.shape[0]
        return int(self.psum_num_recv_tokens_per_scaleup_rank[-1])

    def _sort_within_experts(self, arrived: Tensor, tensors: list[Tensor]) -> None:
        """Sort the rows of each expert by source.

        The rows of an expert fill a range without gaps, so the sorted rows take the same range.
        """
        places = arrived[:, 2:]
        row, choice = (places >= 0).nonzero(as_tuple=True)
        place = places[row, choice].long()
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
