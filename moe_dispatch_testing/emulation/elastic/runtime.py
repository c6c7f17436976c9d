"""The C++ side of the buffers, within one NVLink domain.

Source: csrc/elastic/buffer.hpp of v2, csrc/buffers/ep.hpp of V2.5.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import final

import torch.distributed as dist
from torch import Generator, Tensor

from moe_dispatch_testing.emulation.elastic import checks
from moe_dispatch_testing.emulation.elastic.call import (
    HPP,
    CombineInput,
    DispatchInput,
    Options,
    Received,
    Timing,
)
from moe_dispatch_testing.emulation.elastic.combine import bring_back, combined_weights, reduced, returning
from moe_dispatch_testing.emulation.elastic.dispatch import (
    Arrived,
    Counts,
    Rows,
    compact,
    expanded,
    expanded_places,
    masters,
    message_to_peers,
    metadata,
    move,
    new_buffer_rows,
    owners,
    tokens_by_buffer_row,
    worst_rows,
)
from moe_dispatch_testing.emulation.elastic.handle import EPHandle, GuardedEPHandle
from moe_dispatch_testing.emulation.elastic.release import ElasticRelease
from moe_dispatch_testing.emulation.elastic.sizes import ALIGNMENT_BYTES, check_experts
from moe_dispatch_testing.emulation.exchange import Exchange
from moe_dispatch_testing.emulation.refusals import EmulatedAbort, EmulatedHang, device_assert


@final
class ElasticRuntime:
    """The buffer of one rank. All ranks of the group open and destroy their buffers together."""

    def __init__(
        self,
        release: ElasticRelease,
        group: dist.ProcessGroup | None,
        *,
        num_bytes: int,
        allow_multiple_reduction: bool,
    ) -> None:
        self._release = release
        self._exchange = Exchange(group)
        self._num_bytes = num_bytes
        self._calls = 0  # dispatches and combines so far
        self._allow_multiple_reduction = allow_multiple_reduction
        # Random orders differ between calls and between ranks, but every run of the program has the same orders.
        self._generator = Generator().manual_seed(1 + self._exchange.rank)
        with self._exchange.entrance(release.buffer) as entry:
            whole = num_bytes > 0 and num_bytes % ALIGNMENT_BYTES == 0
            rule = "num_buffer_bytes > 0 and num_buffer_bytes % symmetric::kNumAlignmentBytes == 0"
            release.check(whole, rule, f"{HPP}:98")
            # All ranks register a window of symmetric memory. It must have the same size everywhere.
            entry.same = {"num_bytes": num_bytes}

    def destroy(self) -> None:
        self._exchange.barrier(self._release.call("destroy"))

    def barrier(self) -> None:
        self._exchange.barrier(self._release.call("barrier"))

    def deferred(self, verb: str) -> Callable[[], None]:
        """Note that the last call has deferred its epilogue. Return a function that raises if it is too late for it.

        The epilogue reads the buffer, and the next call on the buffer writes there.
        """
        calls = self._calls

        def require_untouched() -> None:
            if self._calls != calls:
                raise EmulatedAbort(
                    f"{self._release.call(verb)}: a deferred epilogue must run before the next call on its buffer, got "
                    "such a call first, which wrote over the rows. Wait for the event before the next call."
                )

        return require_untouched

    def dispatch(self, sent: DispatchInput, options: Options, timing: Timing, handle: EPHandle | None) -> Received:
        """Exchange the counts, unless a handle holds them. Exchange the rows, and lay them out for the caller."""
        rank, size = self._exchange.rank, self._exchange.size
        with self._exchange.entrance(self._release.call("dispatch")) as entry:
            timing.check(self._release, "dispatch")
            sizes = checks.check_dispatch(self._release, sent, options, size, is_cached=handle is not None)
            self._require_memory(sizes.dispatch_bytes(size), "dispatch", 963)
            check_experts(self._release, options.num_experts, size)
            checks.check_compiles(self._release, sizes.num_topk)
            checks.check_ids(self._release, sent.topk_idx, options.num_experts)
            owner = owners(sent.topk_idx, options.num_experts, size)
            entry.same = {"row sizes": repr(sizes), "num_experts": options.num_experts, "use of a handle": bool(handle)}
            entry.told = message_to_peers(sent.topk_idx, owner, num_experts=options.num_experts, num_ranks=size)
        self._calls += 1
        self._require_distinct_experts([one["twice"] for one in entry.everyone])
        if handle is None:
            counts = Counts.of(entry.everyone, rank, options.expert_alignment)
            buffer_rows = new_buffer_rows(
                owner,
                rank=rank,
                num_ranks=size,
                capacity=options.num_max_tokens_per_rank,
                generator=self._generator,
            )
        else:
            counts, buffer_rows = Counts.of_handle(handle), handle.dst_buffer_slot_idx
        arrived = move(self._exchange, sent, tokens_by_buffer_row(owner, buffer_rows, size), counts)
        if handle is None:
            topk_idx = sent.topk_idx.clone() if options.do_handle_copy else sent.topk_idx
            handle = self._new_handle(
                options, arrived, counts, topk_idx=topk_idx, buffer_rows=buffer_rows, num_sms=timing.num_sms
            )
            if sent.stats is not None:
                sent.stats.add_(handle.num_unaligned_recv_tokens_per_expert)
        rows = _laid_out(self._release, options, arrived, counts, handle)
        weights = None if sent.topk_weights is None else rows.topk_weights
        return Received(x=rows.x, sf=rows.sf, topk_idx=rows.topk_idx, topk_weights=weights, handle=handle)

    def _new_handle(
        self, options: Options, arrived: Arrived, counts: Counts, *, topk_idx: Tensor, buffer_rows: Tensor, num_sms: int
    ) -> EPHandle:
        capacity, num_topk = options.num_max_tokens_per_rank, topk_idx.shape[1]
        num_rows, num_expanded = sum(counts.rows_from), sum(counts.aligned)
        if not options.do_cpu_sync:
            num_rows, num_expanded = worst_rows(counts, num_max_tokens_per_rank=capacity, num_topk=num_topk)
        places = expanded_places(arrived.topk_idx, counts.starts, self._generator) if options.do_expand else None
        return (GuardedEPHandle if self._release.is_v25 else EPHandle)(
            do_expand=options.do_expand,
            num_experts=options.num_experts,
            expert_alignment=options.expert_alignment,
            num_max_tokens_per_rank=capacity,
            num_sms=num_sms,
            topk_idx=topk_idx,
            num_recv_tokens=num_rows,
            num_expanded_tokens=num_expanded,
            num_recv_tokens_per_expert_list=counts.aligned if options.do_cpu_sync else [],
            psum_num_recv_tokens_per_scaleup_rank=counts.rows_psum(),
            psum_num_recv_tokens_per_expert=counts.experts_psum(do_expand=options.do_expand),
            num_unaligned_recv_tokens_per_expert=counts.experts_real(),
            recv_src_metadata=metadata(arrived, places, num_rows=num_rows, capacity=capacity),
            dst_buffer_slot_idx=buffer_rows,
            token_metadata_at_forward=None,
            channel_linked_list=None,
        )

    def combine(self, sent: CombineInput, handle: EPHandle, timing: Timing) -> tuple[Tensor, Tensor | None]:
        """Send rows back to the choices they came from, and add them up there. Weights come back unchanged."""
        size = self._exchange.size
        with self._exchange.entrance(self._release.call("combine")) as entry:
            timing.check(self._release, "combine")
            sizes = checks.check_combine(self._release, sent, handle, size)
            self._require_memory(sizes.combine_bytes(size, self._allow_multiple_reduction), "combine", 1254)
            sends_all = handle.do_expand and not self._allow_multiple_reduction
            source = self._release.line("deep_ep/include/deep_ep/impls/combine.cuh:69")
            is_forward = not sends_all or sent.topk_weights is None
            device_assert(is_forward, "topk_weights == nullptr", source, "expanded backward")
            entry.same = {"row sizes": repr(sizes), "num_experts": handle.num_experts, "places": sends_all}
        self._calls += 1
        owner = owners(handle.topk_idx, handle.num_experts, size)
        back = bring_back(self._exchange, returning(sent, handle, sends_all=sends_all), handle.topk_idx)
        combined = reduced(back.x, owner >= 0 if sends_all else masters(owner), sent.biases)
        return combined, None if back.topk_weights is None else combined_weights(back.topk_weights, owner)

    def _require_memory(self, needed: int, verb: str, line: int) -> None:
        rule = f"get_{verb}_buffer_size(num_max_tokens_per_rank, hidden, ...) <= num_buffer_bytes"
        holds = needed <= self._num_bytes
        self._release.check(holds, f"{rule}: {needed} <= {self._num_bytes}", f"{HPP}:{line}")

    def _require_distinct_experts(self, twice: list[list[bool]]) -> None:
        """Refuse a token that names an expert twice (dispatch_copy_epilogue.cuh:107).

        The rank that owns the expert traps, and its peers wait for it.
        """
        for rank in range(self._exchange.size):
            if any(seen[rank] for seen in twice):
                kind = EmulatedAbort if rank == self._exchange.rank else EmulatedHang
                source = self._release.line("deep_ep/include/deep_ep/impls/dispatch_copy_epilogue.cuh:107")
                raise kind(
                    f"Assertion failed: {source}, condition: "
                    "ptx::deduplicate(dst_expert_idx, lane_idx) or dst_expert_idx == -1 (a token names an expert of "
                    f"rank {rank} twice)"
                )


def _laid_out(release: ElasticRelease, options: Options, arrived: Arrived, counts: Counts, handle: EPHandle) -> Rows:
    if options.do_expand:
        _require_places(release, handle)
        places = handle.recv_src_metadata[: arrived.x.shape[0], 2:]
        zero = counts.padding() if options.do_zero_padding else None
        rows = expanded(arrived, places, handle.num_expanded_tokens, zero=zero)
    else:
        rows = compact(arrived, handle.num_recv_tokens)
    return rows.with_column_major_sf() if options.col_major_sf else rows


def _require_places(release: ElasticRelease, handle: EPHandle) -> None:
    """Refuse the handle of a compact dispatch, which holds no expanded rows."""
    if not handle.do_expand:
        raise EmulatedAbort(
            f"{release.call('dispatch')}: with do_expand, a handle must come from an expanded dispatch, got the handle "
            "of a compact dispatch. Its recv_src_metadata[:, 2:] is uninitialised, and the kernel takes addresses from "
            "it. Leave do_expand off."
        )
