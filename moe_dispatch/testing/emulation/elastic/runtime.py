"""What the C++ object under v2's ElasticBuffer does (csrc/elastic/buffer.hpp of v2), within one NVLink domain."""

from __future__ import annotations

from typing import final

import torch.distributed as dist
from torch import Generator, Tensor

from moe_dispatch.testing.emulation.elastic import checks as checks
from moe_dispatch.testing.emulation.elastic import layout as layout
from moe_dispatch.testing.emulation.elastic.calls import HPP, Form, Received, Sent, Timing
from moe_dispatch.testing.emulation.elastic.counts import Counts, told, worst_rows
from moe_dispatch.testing.emulation.elastic.handle import EPHandle
from moe_dispatch.testing.emulation.elastic.moves import Arrived, bring_back, move
from moe_dispatch.testing.emulation.elastic.returns import returning
from moe_dispatch.testing.emulation.elastic.routes import expanded_places, masters, new_slots, owners, tokens_by_slot
from moe_dispatch.testing.emulation.elastic.sizes import ALIGNMENT_BYTES, check_experts
from moe_dispatch.testing.emulation.elastic.sums import combined_weights, reduced
from moe_dispatch.testing.emulation.exchange import Exchange
from moe_dispatch.testing.emulation.refusals import EmulatedAbort, EmulatedHang, device_assert, elastic_assert

DISPATCH, COMBINE = "ElasticBuffer.dispatch", "ElasticBuffer.combine"


@final
class ElasticRuntime:
    """A buffer on every rank of a group; opened and destroyed by all of them together."""

    def __init__(self, group: dist.ProcessGroup | None, *, num_bytes: int, allow_multiple_reduction: bool) -> None:
        self._exchange = Exchange(group)
        self._num_bytes = num_bytes
        self._allow_multiple_reduction = allow_multiple_reduction
        # Orders that the kernels leave to chance differ between calls and ranks, and are the same run after run.
        self._generator = Generator().manual_seed(1 + self._exchange.rank)
        with self._exchange.entrance("ElasticBuffer") as entry:
            whole = num_bytes > 0 and num_bytes % ALIGNMENT_BYTES == 0
            rule = "num_buffer_bytes > 0 and num_buffer_bytes % symmetric::kNumAlignmentBytes == 0"
            elastic_assert(whole, rule, f"{HPP}:98")
            # A window of symmetric memory is registered by all ranks, with the same size.
            entry.same = {"num_bytes": num_bytes}

    def destroy(self) -> None:
        self._exchange.barrier("ElasticBuffer.destroy")

    def barrier(self) -> None:
        self._exchange.barrier("ElasticBuffer.barrier")

    def dispatch(self, sent: Sent, form: Form, timing: Timing, handle: EPHandle | None) -> Received:
        """Counts, unless a handle holds them; then rows; then their places, in the order of arrival."""
        rank, size = self._exchange.rank, self._exchange.size
        with self._exchange.entrance(DISPATCH) as entry:
            timing.check("dispatch")
            sizes = checks.check_dispatch(sent, form, size, is_cached=handle is not None)
            self._require_memory(sizes.dispatch_bytes(size), "dispatch", 963)
            check_experts(form.num_experts, size)
            checks.check_compiles(sizes.num_topk)
            checks.check_ids(sent.topk_idx, form.num_experts)
            owner = owners(sent.topk_idx, form.num_experts, size)
            entry.same = {"row sizes": repr(sizes), "num_experts": form.num_experts, "use of a handle": bool(handle)}
            entry.told = told(sent.topk_idx, owner, num_experts=form.num_experts, num_ranks=size)
        self._require_distinct_experts([one["twice"] for one in entry.everyone])
        if handle is None:
            counts = Counts.of(entry.everyone, rank, form.expert_alignment)
            capacity = form.num_max_tokens_per_rank
            slots = new_slots(owner, rank=rank, num_ranks=size, capacity=capacity, generator=self._generator)
        else:
            counts, slots = Counts.of_handle(handle), handle.dst_buffer_slot_idx
        arrived = move(self._exchange, sent, tokens_by_slot(owner, slots, size), counts.rows_from)
        ids = layout.local_ids(arrived.topk_idx, rank, len(counts.per_expert))
        if handle is None:
            handle = self._new_handle(sent, form, timing, arrived=arrived, ids=ids, slots=slots, counts=counts)
            if sent.stats is not None:
                sent.stats.add_(handle.num_unaligned_recv_tokens_per_expert)
        rows = self._laid_out(form, arrived, ids, counts, handle)
        weights = None if sent.topk_weights is None else rows.topk_weights
        return Received(x=rows.x, sf=rows.sf, topk_idx=rows.topk_idx, topk_weights=weights, handle=handle)

    def _new_handle(
        self, sent: Sent, form: Form, timing: Timing, *, arrived: Arrived, ids: Tensor, slots: Tensor, counts: Counts
    ) -> EPHandle:
        num_rows, num_expanded = sum(counts.rows_from), sum(counts.aligned)
        if not form.do_cpu_sync:
            capacity = form.num_max_tokens_per_rank
            num_rows, num_expanded = worst_rows(counts, num_max_tokens_per_rank=capacity, num_topk=ids.shape[1])
        places = expanded_places(ids, counts.starts, self._generator) if form.do_expand else None
        capacity = form.num_max_tokens_per_rank
        return EPHandle(
            form.do_expand,
            form.num_experts,
            form.expert_alignment,
            form.num_max_tokens_per_rank,
            timing.num_sms,
            sent.topk_idx.clone() if form.do_handle_copy else sent.topk_idx,
            num_rows,
            num_expanded,
            counts.aligned if form.do_cpu_sync else [],
            counts.rows_psum(),
            counts.experts_psum(do_expand=form.do_expand),
            counts.experts_real(),
            layout.metadata(arrived, ids, places, num_rows=num_rows, capacity=capacity),
            slots,
            None,
            None,
        )

    def _laid_out(self, form: Form, arrived: Arrived, ids: Tensor, counts: Counts, handle: EPHandle) -> layout.Rows:
        if form.do_expand:
            _require_places(handle)
            places = handle.recv_src_metadata[: ids.shape[0], 2:]
            zero = layout.padding(counts) if form.do_zero_padding else None
            rows = layout.expanded(arrived, places, handle.num_expanded_tokens, zero=zero)
        else:
            rows = layout.compact(arrived, ids, handle.num_recv_tokens)
        return rows.with_column_major_sf() if form.col_major_sf else rows

    def combine(
        self, x: Tensor, topk_weights: Tensor | None, biases: list[Tensor], handle: EPHandle, timing: Timing
    ) -> tuple[Tensor, Tensor | None]:
        """Rows back to the choices they came from, and their sums there; weights come back as they are."""
        size = self._exchange.size
        with self._exchange.entrance(COMBINE) as entry:
            timing.check("combine")
            sizes = checks.check_combine(x, topk_weights, biases, handle, size)
            self._require_memory(sizes.combine_bytes(size, self._allow_multiple_reduction), "combine", 1254)
            sends_all = handle.do_expand and not self._allow_multiple_reduction
            source = "deep_ep/include/deep_ep/impls/combine.cuh:69"
            device_assert(not sends_all or topk_weights is None, "topk_weights == nullptr", source, "expanded backward")
            entry.same = {"row sizes": repr(sizes), "num_experts": handle.num_experts, "places": sends_all}
        owner = owners(handle.topk_idx, handle.num_experts, size)
        rows = returning(x.detach(), topk_weights, handle, sends_all=sends_all)
        back = bring_back(
            self._exchange,
            rows.x,
            rows.topk_weights,
            source=rows.source,
            token=rows.token,
            choice=rows.choice,
            like=handle.topk_idx,
        )
        combined = reduced(back.x, owner >= 0 if sends_all else masters(owner), biases)
        if back.topk_weights is None:
            return combined, None
        return combined, combined_weights(back.topk_weights, owner)

    def _require_memory(self, needed: int, verb: str, line: int) -> None:
        rule = f"get_{verb}_buffer_size(num_max_tokens_per_rank, hidden, ...) <= num_buffer_bytes"
        holds = needed <= self._num_bytes
        elastic_assert(holds, f"{rule}: {needed} <= {self._num_bytes}", f"{HPP}:{line}")

    def _require_distinct_experts(self, twice: list[list[bool]]) -> None:
        """The owner of the expert traps, and its peers wait for it (dispatch_copy_epilogue.cuh:107)."""
        for rank in range(self._exchange.size):
            if any(seen[rank] for seen in twice):
                kind = EmulatedAbort if rank == self._exchange.rank else EmulatedHang
                raise kind(
                    "Assertion failed: deep_ep/include/deep_ep/impls/dispatch_copy_epilogue.cuh:107, condition: "
                    f"ptx::deduplicate(dst_expert_idx, lane_idx) or dst_expert_idx == -1 (a token names an expert of "
                    f"rank {rank} twice)"
                )


def _require_places(handle: EPHandle) -> None:
    """A compact dispatch writes no places into its handle."""
    if not handle.do_expand:
        raise EmulatedAbort(
            f"{DISPATCH}: do_expand with a handle needs that of an expanded dispatch, got one of a compact dispatch. "
            "The kernel writes wherever its uninitialised recv_src_metadata[:, 2:] points "
            "(dispatch_copy_epilogue.cuh:119). Leave do_expand off."
        )
