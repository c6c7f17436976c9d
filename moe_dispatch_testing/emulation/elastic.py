"""v2's ``deep_ep.ElasticBuffer`` and V2.5's ``deep_ep.EPBuffer``, within one NVLink domain.

Source: deep_ep/buffers/elastic.py and csrc/elastic/buffer.hpp of v2 (2.1.0), deep_ep/buffers/ep.py and
csrc/buffers/ep.hpp of V2.5 (2.5.0, commit def8651 for the C++ files and db8166d for the Python files).
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any, ClassVar, final

import torch
import torch.distributed as dist
from torch import Generator, Tensor

from moe_dispatch_testing.emulation.arguments import X, agreed, pack_rows, unpack_bias, unpack_rows, value_or
from moe_dispatch_testing.emulation.elastic_copies import BLOCK_BYTES, BufferAllocator, ExpertCopies
from moe_dispatch_testing.emulation.elastic_rows import (
    ElasticCounts,
    EPHandle,
    GuardedEPHandle,
    aligned,
    combined_rows,
    masters,
    owners,
    received_rows,
)
from moe_dispatch_testing.emulation.events import ElasticEventOverlap, EPEventOverlap, EventHandle
from moe_dispatch_testing.emulation.exchange import RankExchange
from moe_dispatch_testing.emulation.memory import torch_fills_memory
from moe_dispatch_testing.emulation.refusals import EmulatedAbort, EmulatedHang, require, require_cpu
from moe_dispatch_testing.emulation.signatures import follow_release
from moe_dispatch_testing.host_syncs import allow_host_syncs

# Result of a call: its values and an event, or with defer_epilogue only the event, whose wait returns the values.
_Outcome = tuple[Any, ...] | ElasticEventOverlap
_NUM_SMS = 24  # what the emulation recommends


@final
class _ElasticRuntime:
    """The state of an open buffer. Fresh memory for redundant experts holds NaN, as a stand-in for anything."""

    def __init__(self, name: str, group: dist.ProcessGroup | None, num_bytes: int, num_lb_bytes: int) -> None:
        self.exchange = RankExchange(group)
        self.num_bytes = num_bytes
        self.lb_storage = torch.full((num_lb_bytes,), 255, dtype=torch.uint8)
        self.calls = 0  # dispatches and combines so far
        # Random orders differ between calls and between ranks, but every run of the program has the same orders.
        self.generator = Generator().manual_seed(1 + self.exchange.rank)
        with self.exchange.entrance(name) as entry:
            whole = num_bytes > 0 and num_bytes % BLOCK_BYTES == 0
            require(whole, f"num_bytes must be a multiple of {BLOCK_BYTES}, got {num_bytes}")
            whole = num_lb_bytes % BLOCK_BYTES == 0
            require(whole, f"num_lb_bytes must be a multiple of {BLOCK_BYTES}, got {num_lb_bytes}")
            # All ranks register a window of symmetric memory. It must have the same size everywhere.
            entry.same = {"num_bytes": num_bytes + num_lb_bytes}


class _ElasticBase:
    """Emulates dispatch and combine over a process group of CPU ranks. All ranks are in one NVLink domain.

    ``group=None`` stands for one rank without torch.distributed, for tests. The real class needs a group of one rank
    instead. Service levels, queue pairs, time-outs and numbers of SMs have no effect. A buffer that is
    garbage-collected without ``destroy`` frees nothing and prints nothing.

    A method has the parameters of all releases. The class of a release narrows them to its own parameters.

    Attributes:
        has_gdaki: Whether the emulated machine has network cards that a GPU drives. Tests set it to False.
        kernels: Keys of the kernels that the real library would have compiled in this process. A call has two: one
            that sends, and its epilogue.
    """

    is_v25: ClassVar[bool]
    has_gdaki: ClassVar[bool] = True
    kernels: ClassVar[set[tuple[object, ...]]]

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        num_bytes: int | None = None,
        num_cpu_bytes: int = 0,
        num_max_tokens_per_rank: int = 0,
        hidden: int = 0,
        num_topk: int = 0,
        use_fp8_dispatch: bool = False,
        lb_allocation_plan_or_num_bytes: Any = 0,
        deterministic: bool = False,
        allow_hybrid_mode: bool = True,
        allow_multiple_reduction: bool = True,
        prefer_overlap_with_compute: bool = True,
        sl_idx: int | None = None,
        num_allocated_qps: int = 0,
        num_cpu_timeout_secs: int = 300,
        num_gpu_timeout_secs: int = 100,
        explicitly_destroy: bool = False,
    ) -> None:
        if num_cpu_bytes > 0:
            raise NotImplementedError(
                f"{type(self).__name__}: memory on the host is not emulated. Leave num_cpu_bytes at 0."
            )
        plan = lb_allocation_plan_or_num_bytes if isinstance(lb_allocation_plan_or_num_bytes, BufferAllocator) else None
        num_lb_bytes = lb_allocation_plan_or_num_bytes if plan is None else plan.num_bytes
        assert plan is None or not plan.materialized
        assert isinstance(num_lb_bytes, int)
        assert num_lb_bytes >= 0
        self.group = group
        self.rank_idx = 0 if group is None else group.rank()
        self.num_ranks = _size(group)
        # csrc/kernels/comm/context.cpp of V2.5; nccl.cu of v2 asks for the network only with several ranks.
        uses_gin = int(os.environ.get("EP_DISABLE_GIN", 0)) == 0 and (self.is_v25 or self.num_ranks > 1)
        require(self.has_gdaki or not uses_gin, "NCCL GDAKI is unavailable for this communicator")
        self.allow_hybrid_mode = allow_hybrid_mode
        self.allow_multiple_reduction = allow_multiple_reduction
        self.prefer_overlap_with_compute = prefer_overlap_with_compute
        self.deterministic = deterministic
        if num_bytes is None:
            num_bytes = self.get_buffer_size_hint(
                group,
                num_max_tokens_per_rank,
                hidden,
                num_topk,
                use_fp8_dispatch,
                allow_hybrid_mode,
                allow_multiple_reduction,
            )
        self.nccl_comm_handle = None  # the emulation does not use NCCL
        self.num_bytes = num_bytes
        self.num_max_tokens_per_rank = num_max_tokens_per_rank
        self.num_allocated_qps = num_allocated_qps or (129 if allow_hybrid_mode else 17)
        self.explicitly_destroy = explicitly_destroy
        if self.is_v25:
            self.num_lb_bytes, self.context = num_lb_bytes, None
        self.runtime = _ElasticRuntime(type(self).__name__, group, num_bytes, num_lb_bytes)
        if plan is not None:
            plan.materialize(self.runtime.lb_storage)
        self.num_scaleout_ranks, self.num_scaleup_ranks = self.get_logical_domain_size()
        self.scaleout_rank_idx, self.scaleup_rank_idx = divmod(self.rank_idx, self.num_scaleup_ranks)
        self.num_rdma_ranks, self.num_nvlink_ranks = self.get_physical_domain_size()

    def destroy(self) -> None:
        """Free the buffer. Collective. A second call does nothing."""
        assert self.explicitly_destroy
        if self.runtime is not None:
            self.runtime.exchange.barrier(f"{type(self).__name__}.destroy")
            self.runtime = None  # type: ignore[assignment]  # as in the release: a later call raises AttributeError

    @classmethod
    def get_buffer_size_hint(
        cls,
        group: dist.ProcessGroup | None,
        num_max_tokens_per_rank: int,
        hidden: int,
        num_topk: int = 0,
        use_fp8_dispatch: bool = False,
        allow_hybrid_mode: bool = True,
        allow_multiple_reduction: bool = True,
    ) -> int:
        """Return the bytes of a buffer that has room for every row of every rank, a multiple of 2 MiB."""
        sizes = num_max_tokens_per_rank > 0 and hidden > 0
        require(sizes, f"num_max_tokens_per_rank ({num_max_tokens_per_rank}) and hidden ({hidden}) must be positive")
        top_k = num_topk or 32
        row_bytes = hidden + -(-hidden // 32) * 4 if use_fp8_dispatch else hidden * 2
        sent = _row_bytes(row_bytes, top_k) * _size(group)
        back = _row_bytes(hidden * 2, top_k) * (min(_size(group), top_k) if allow_multiple_reduction else top_k)
        return aligned(max(sent, back) * num_max_tokens_per_rank, BLOCK_BYTES)

    def barrier(
        self,
        use_comm_stream: bool = True,
        with_cpu_sync: bool = False,
        sequential: bool = True,
        wait_comm_stream: bool = True,
        context_idx: int | None = None,
    ) -> None:
        self.runtime.exchange.barrier(f"{type(self).__name__}.barrier")

    @staticmethod
    def capture() -> EventHandle:
        return EventHandle()

    def get_physical_domain_size(self) -> tuple[int, int]:
        return 1, self.num_ranks

    def get_logical_domain_size(self, allow_hybrid_mode: bool | None = None) -> tuple[int, int]:
        return 1, self.num_ranks

    def get_theoretical_num_sms(
        self,
        num_experts: int,
        num_topk: int,
        num_scaleout_topk: int = 0,
        rdma_gbs: float = 0,
        nvlink_gbs: float = 0,
        sm_read_gbs: float = 0,
        sm_write_gbs: float = 0,
    ) -> int:
        """Return a number of SMs to use. As in the release, it raises if ``num_experts`` is None."""
        assert num_experts % self.num_ranks == 0
        return _NUM_SMS

    def get_theoretical_num_qps(self, num_sms: int) -> int:
        wanted = num_sms * 16 + 1 if self.allow_hybrid_mode else min(num_sms, 9)
        return min(wanted, self.num_allocated_qps)

    @allow_host_syncs()
    def dispatch(
        self,
        x: X,
        topk_idx: Tensor | None = None,
        topk_weights: Tensor | None = None,
        cumulative_local_expert_recv_stats: Tensor | None = None,
        num_experts: int | None = None,
        num_max_tokens_per_rank: int | None = None,
        expert_alignment: int | None = None,
        num_sms: int = 0,
        num_qps: int = 0,
        previous_event: EventHandle | None = None,
        previous_event_before_epilogue: EventHandle | None = None,
        async_with_compute_stream: bool = False,
        allocate_on_comm_stream: bool = False,
        handle: EPHandle | None = None,
        do_handle_copy: bool = False,
        do_cpu_sync: bool | None = None,
        do_expand: bool = False,
        do_zero_padding: bool = False,
        use_tma_aligned_col_major_sf: bool = False,
        defer_epilogue: bool = False,
    ) -> _Outcome:
        """Send each token once to each rank that owns one of its experts.

        Rows arrive compact, which means one row for each token. With ``do_expand`` they arrive expanded, which means
        one row for each expert of a token.

        Returns:
            The rows, their ids or None, their weights or None, the handle, and an event.
        """
        assert not (self.is_v25 and do_handle_copy), "`do_handle_copy` must be False; handle copying is not supported"
        assert not torch_fills_memory()  # utils/envs.py of v2
        if num_sms == 0:
            # With a handle, num_experts is often None, and this call raises. The releases raise too: they compute
            # num_sms before they take num_experts from the handle (elastic.py:928 of v2, ep.py:632 of V2.5).
            num_sms = self.get_theoretical_num_sms(num_experts, 0)  # type: ignore[arg-type]
        is_cached = handle is not None
        if handle is not None:
            assert topk_idx is None
            topk_idx = handle.topk_idx
            assert not do_cpu_sync, "Cannot do CPU sync with cached handle"
            num_experts = agreed(num_experts, handle.num_experts)
            expert_alignment = agreed(expert_alignment, handle.expert_alignment)
            num_max_tokens_per_rank = agreed(num_max_tokens_per_rank, handle.num_max_tokens_per_rank)
        assert topk_idx is not None
        if num_experts is None:
            raise TypeError("dispatch(): incompatible function arguments: num_experts must be an int, got None")
        capacity = value_or(num_max_tokens_per_rank, self.num_max_tokens_per_rank)
        do_cpu_sync = not is_cached if do_cpu_sync is None else do_cpu_sync
        rows, sf = unpack_rows(x)
        runtime, name = self.runtime, f"{type(self).__name__}.dispatch"
        exchange = runtime.exchange
        with exchange.entrance(name) as entry:
            _check_events(previous_event, async_with_compute_stream, allocate_on_comm_stream, defer_epilogue)
            self._check_dispatch(rows, sf, topk_idx, topk_weights, num_experts, capacity)
            self._check_stats(cumulative_local_expert_recv_stats, num_experts, is_cached=is_cached)
            require(do_expand or not do_zero_padding, "do_zero_padding needs do_expand")
            is_compact = handle is not None and do_expand and not handle.do_expand
            rule = "with do_expand, a handle must come from an expanded dispatch, got the handle of a compact dispatch"
            require(not is_compact, rule, EmulatedAbort)
            owner = owners(topk_idx, num_experts, exchange.size)
            width = [capacity, rows.shape[1], str(rows.dtype), 0 if sf is None else sf.shape[1], topk_idx.shape[1]]
            entry.same = {"row sizes": width, "num_experts": num_experts, "use of a handle": is_cached}
            entry.told = _message_to_peers(topk_idx, owner, num_experts, exchange.size)
        runtime.calls += 1
        # csrc/kernels/elastic/dispatch.hpp:55-65 of v2
        numbers = (num_experts, value_or(expert_alignment, 1), num_sms, is_cached, do_cpu_sync, do_expand)
        self.kernels.update((part, *width, *numbers) for part in ("dispatch", "dispatch epilogue"))
        self._require_distinct_experts([told["twice"] for told in entry.everyone])
        if handle is None:
            counts = ElasticCounts.of(entry.everyone, exchange.rank, value_or(expert_alignment, 1))
        else:
            counts = ElasticCounts.of_handle(handle)
        received, handle = received_rows(
            exchange,
            (rows, sf, topk_idx, topk_weights),
            owner,
            counts,
            handle,
            make=functools.partial(
                GuardedEPHandle if self.is_v25 else EPHandle,
                do_expand=do_expand,
                num_experts=num_experts,
                expert_alignment=counts.alignment,
                num_max_tokens_per_rank=capacity,
                num_sms=num_sms + num_sms % 2 if self.is_v25 else num_sms,
                topk_idx=topk_idx.clone() if do_handle_copy else topk_idx,
            ),
            generator=runtime.generator,
            do_cpu_sync=do_cpu_sync,
            do_expand=do_expand,
            zeroes_padding=do_zero_padding,
        )
        if cumulative_local_expert_recv_stats is not None:
            cumulative_local_expert_recv_stats.add_(handle.num_unaligned_recv_tokens_per_expert)
        recv_x, recv_sf, recv_ids, recv_weights = received
        if use_tma_aligned_col_major_sf and recv_sf is not None:
            # Scales by column, with columns padded to 16 bytes.
            strides = (1, aligned(recv_sf.shape[0], 16 // recv_sf.element_size()))
            recv_sf = torch.empty_strided(recv_sf.shape, strides, dtype=recv_sf.dtype).copy_(recv_sf)
        sort = functools.partial(
            handle.deterministic_sort, do_cpu_sync, is_cached, recv_x, recv_sf, recv_ids, recv_weights, None
        )
        values = (pack_rows(recv_x, recv_sf), recv_ids, None if topk_weights is None else recv_weights, handle)
        finish = sort if self.deterministic else None
        return self._outcome(name, values, finish, async_with_compute_stream, defer_epilogue)

    @allow_host_syncs()
    def combine(
        self,
        x: Tensor,
        handle: EPHandle,
        topk_weights: Tensor | None = None,
        bias: Tensor | tuple[Tensor, Tensor] | None = None,
        num_sms: int = 0,
        num_qps: int = 0,
        previous_event: EventHandle | None = None,
        previous_event_before_epilogue: EventHandle | None = None,
        async_with_compute_stream: bool = False,
        allocate_on_comm_stream: bool = False,
        defer_epilogue: bool = False,
    ) -> _Outcome:
        """Send rows back to their source ranks, and add them up there without weights.

        Returns:
            The sums, the weights (T, K), which come back unchanged, or None, and an event.
        """
        assert not torch_fills_memory()  # utils/envs.py of v2
        runtime, name, biases = self.runtime, f"{type(self).__name__}.combine", unpack_bias(bias)
        num_tokens, num_topk = handle.topk_idx.shape
        sends_all = handle.do_expand and not self.allow_multiple_reduction
        with runtime.exchange.entrance(name) as entry:
            _check_events(previous_event, async_with_compute_stream, allocate_on_comm_stream, defer_epilogue)
            require_cpu(x, topk_weights, *biases)
            is_bf16 = x.dim() == 2 and x.is_contiguous() and x.dtype == torch.bfloat16
            require(is_bf16, f"x must be contiguous bfloat16 rows, got {x.dtype} of shape {tuple(x.shape)}")
            require(x.shape[1] % 256 == 0, f"the width of rows must be a multiple of 256 in combine, got {x.shape[1]}")
            ranks = handle.psum_num_recv_tokens_per_scaleup_rank.shape[0]
            require(ranks == self.num_ranks, f"the handle is of {ranks} ranks, but the buffer of {self.num_ranks}")
            rows = f"x must have the {len(handle.recv_src_metadata)} rows of its dispatch, got {len(x)}"
            require(handle.do_expand or len(handle.recv_src_metadata) == len(x), rows)
            if topk_weights is not None:
                shape = (len(x),) if handle.do_expand else (len(x), num_topk)
                fits = topk_weights.dtype == torch.float32 and topk_weights.shape == shape
                require(fits and topk_weights.is_contiguous(), f"topk_weights must be contiguous float32 {shape}")
                rule = "topk_weights of expanded rows need allow_multiple_reduction"
                require(not sends_all, rule, EmulatedAbort)
            for one in biases:
                fits = one.dtype == x.dtype and one.shape == (num_tokens, x.shape[1]) and one.is_contiguous()
                require(fits, f"a bias must be contiguous bfloat16 {(num_tokens, x.shape[1])}, got {tuple(one.shape)}")
            slots = num_topk if sends_all else min(self.num_ranks, num_topk)
            self._require_memory(slots * handle.num_max_tokens_per_rank * _row_bytes(x.shape[1] * 2, num_topk))
            width = [handle.num_max_tokens_per_rank, x.shape[1], num_topk]
            entry.same = {"row sizes": width, "num_experts": handle.num_experts, "places": sends_all}
        runtime.calls += 1
        numbers = (*width, handle.num_experts, handle.num_sms, handle.do_expand, topk_weights is not None, len(biases))
        self.kernels.update((part, *numbers) for part in ("combine", "combine epilogue"))
        combined = combined_rows(runtime.exchange, x, topk_weights, biases, handle, sends_all=sends_all)
        return self._outcome(name, combined, None, async_with_compute_stream, defer_epilogue)

    def _outcome(
        self, name: str, values: tuple[Any, ...], finish: Callable[[], None] | None, is_async: bool, defers: bool
    ) -> _Outcome:
        """Return the values and the event of a call, or the event alone if its epilogue is deferred.

        Args:
            name: Name of the call, for errors.
            values: Values of the call.
            finish: Function that puts the values in order, or None.
            is_async: Whether the call has an event.
            defers: Whether the event runs the epilogue of the call.
        """
        event = (EPEventOverlap if self.is_v25 else ElasticEventOverlap)(EventHandle() if is_async else None)
        calls, runtime = self.runtime.calls, self.runtime

        def epilogue() -> tuple[Any, ...]:
            # The epilogue reads the buffer, and the next call on the buffer writes there.
            rule = f"{name}: a deferred epilogue must run before the next call on its buffer"
            require(runtime.calls == calls, f"{rule}. Wait for the event before the next call", EmulatedAbort)
            require(
                not torch_fills_memory(), f"{name}: torch must not fill memory in a deferred epilogue", EmulatedAbort
            )
            if finish is not None:
                finish()
            return values

        if defers:
            event.register_hook_after_wait(epilogue)
            return event
        if finish is not None and is_async:
            event.register_hook_after_wait(finish)
        elif finish is not None:
            finish()
        return *values, event

    def _check_dispatch(
        self, x: Tensor, sf: Tensor | None, ids: Tensor, weights: Tensor | None, num_experts: int, capacity: int
    ) -> None:
        require_cpu(x, sf, ids, weights)
        require(x.dim() == 2 and x.is_contiguous(), f"x must be contiguous and 2-D, got shape {tuple(x.shape)}")
        row_bytes = x.shape[1] * x.element_size()
        require(row_bytes % 32 == 0, f"a row must have a multiple of 32 bytes, got {x.shape[1]} of {x.dtype}")
        require(len(x) <= capacity, f"x must have at most num_max_tokens_per_rank rows ({capacity}), got {len(x)}")
        if sf is not None:
            fits = sf.dim() == 2 and len(sf) == len(x) and sf.element_size() == 4
            require(fits, f"scales must have 4 bytes and a row for each row of x, got {sf.dtype} {tuple(sf.shape)}")
        fits = ids.dtype == torch.int64 and ids.dim() == 2 and len(ids) == len(x) and ids.is_contiguous()
        require(fits, f"topk_idx must be contiguous int64 ({len(x)}, K), got {ids.dtype} of shape {tuple(ids.shape)}")
        require(ids.shape[1] <= 32, f"top-k must be at most 32, got {ids.shape[1]}")
        if weights is not None:
            fits = weights.dtype == torch.float32 and weights.shape == ids.shape and weights.is_contiguous()
            require(fits, f"topk_weights must be contiguous float32 {tuple(ids.shape)}, got {weights.dtype}")
        most = min(512 if self.is_v25 else 256, 2048 // self.num_ranks)
        per_rank, rest = divmod(num_experts, self.num_ranks)
        rule = f"num_experts must divide by {self.num_ranks} ranks, with at most {most} experts per rank"
        require(rest == 0 and per_rank <= most and self.num_ranks <= 1024, f"{rule}, got {num_experts}")
        largest = int(ids.max()) if ids.numel() else -1
        rule = f"topk_idx must be below num_experts ({num_experts}), got {largest}. Use -1 for no expert"
        require(largest < num_experts, rule, EmulatedAbort)
        sf_bytes = 0 if sf is None else sf.shape[1] * 4
        self._require_memory(self.num_ranks * capacity * _row_bytes(row_bytes + sf_bytes, ids.shape[1]))

    def _check_stats(self, stats: Tensor | None, num_experts: int, *, is_cached: bool) -> None:
        if stats is not None:
            require_cpu(stats)
            fits = stats.dtype == torch.int32 and stats.shape == (num_experts // self.num_ranks,) and not is_cached
            require(fits, "cumulative_local_expert_recv_stats must be int32 (L,), and goes without a handle")

    def _require_memory(self, needed: int) -> None:
        rule = f"num_bytes must be {needed} or more, got {self.runtime.num_bytes}. Use get_buffer_size_hint"
        require(needed <= self.runtime.num_bytes, rule)

    def _require_distinct_experts(self, twice: list[list[bool]]) -> None:
        """Refuse a token that names an expert twice. The rank that owns the expert traps, and its peers wait for it."""
        for rank in range(self.num_ranks):
            kind = EmulatedAbort if rank == self.rank_idx else EmulatedHang
            rule = f"a token must not name an expert twice, got one that does so with an expert of rank {rank}"
            require(not any(seen[rank] for seen in twice), rule, kind)


def _row_bytes(row_bytes: int, top_k: int) -> int:
    """Return the bytes of a row in a buffer, with its ids, weights and source."""
    return aligned(row_bytes + 4 + top_k * 12, 64)


def _check_events(previous: EventHandle | None, is_async: bool, on_comm_stream: bool, defers: bool) -> None:
    """Check the arguments about events and streams, which have no effect on a CPU."""
    if previous is not None and not isinstance(previous, EventHandle):
        raise TypeError(f"incompatible function arguments: an event must be an EventHandle, got {previous}")
    require(previous is None or on_comm_stream, "previous_event needs allocate_on_comm_stream")
    require(is_async or not defers, "defer_epilogue needs async_with_compute_stream")


def _message_to_peers(topk_idx: Tensor, owner: Tensor, num_experts: int, num_ranks: int) -> dict[str, Any]:
    """Make the values that this rank tells the other ranks.

    "rows" and "experts" are the numbers of rows for each rank and for each expert. "twice" says for each rank whether
    some token names one expert of that rank twice.
    """
    leads, repeated = masters(owner), ~masters(topk_idx) & (topk_idx >= 0)
    return {
        "rows": [int((leads & (owner == rank)).sum()) for rank in range(num_ranks)],
        "experts": torch.bincount(topk_idx[topk_idx >= 0], minlength=num_experts).tolist(),
        "twice": [bool((repeated & (owner == rank)).any()) for rank in range(num_ranks)],
    }


def _size(group: dist.ProcessGroup | None) -> int:
    return 1 if group is None else group.size()


ElasticBuffer: type[Any] = follow_release(
    "v2-2.1.0",
    type("ElasticBuffer", (_ElasticBase,), {"is_v25": False, "kernels": set(), "__doc__": _ElasticBase.__doc__}),
)
EPBuffer: type[Any] = follow_release(
    "v2.5.0",
    type("EPBuffer", (ExpertCopies, _ElasticBase), {"is_v25": True, "kernels": set(), "__doc__": _ElasticBase.__doc__}),
)
