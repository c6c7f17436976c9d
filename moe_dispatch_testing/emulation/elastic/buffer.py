"""The Python side of v2's ``deep_ep.ElasticBuffer`` and V2.5's ``deep_ep.EPBuffer``. The C++ side is in ``runtime``.

Source: deep_ep/buffers/elastic.py of v2 (2.1.0), deep_ep/buffers/ep.py of V2.5 (2.5.0).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

from moe_dispatch_testing.emulation.arguments import X, agreed, pack_rows, unpack_bias, unpack_rows, value_or
from moe_dispatch_testing.emulation.elastic.call import CombineInput, DispatchInput, Options, Timing
from moe_dispatch_testing.emulation.elastic.handle import EPHandle
from moe_dispatch_testing.emulation.elastic.release import V2, V25, ElasticRelease
from moe_dispatch_testing.emulation.elastic.runtime import ElasticRuntime
from moe_dispatch_testing.emulation.elastic.sizes import buffer_bytes, theoretical_num_sms
from moe_dispatch_testing.emulation.events import ElasticEventOverlap, EPEventOverlap, EventHandle
from moe_dispatch_testing.emulation.signatures import narrowed, recorded, refuse_unemulated
from moe_dispatch_testing.host_syncs import allow_host_syncs

__all__ = ["EPBuffer", "ElasticBuffer"]

# Result of a call: its values and an event, or with defer_epilogue only the event, whose wait returns the values.
Outcome = tuple[Any, ...] | ElasticEventOverlap


class _Buffer:
    """Emulates dispatch and combine over a process group of CPU ranks. All ranks are in one NVLink domain.

    ``group=None`` stands for one rank without torch.distributed, for tests. The real class needs a group of one rank
    instead. Service levels, queue pairs and time-outs have no effect. A buffer that is garbage-collected without
    ``destroy`` frees nothing and prints nothing.

    A method has the parameters of all releases. The class of a release narrows them to its own parameters.
    """

    release: ClassVar[ElasticRelease]

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
            raise NotImplementedError("ElasticBuffer: host memory is not emulated. Leave num_cpu_bytes at 0.")
        if lb_allocation_plan_or_num_bytes != 0:
            raise NotImplementedError(
                "EPBuffer: memory for redundant experts is not emulated. Leave lb_allocation_plan_or_num_bytes at 0."
            )
        self.group = group
        self.rank_idx = 0 if group is None else group.rank()
        self.num_ranks = _size(group)
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
        if self.release.is_v25:
            self.num_lb_bytes, self.context = 0, None
        self.runtime = ElasticRuntime(
            self.release, group, num_bytes=num_bytes, allow_multiple_reduction=allow_multiple_reduction
        )
        self.num_scaleout_ranks, self.num_scaleup_ranks = self.get_logical_domain_size()
        self.scaleout_rank_idx, self.scaleup_rank_idx = divmod(self.rank_idx, self.num_scaleup_ranks)
        self.num_rdma_ranks, self.num_nvlink_ranks = self.get_physical_domain_size()

    def destroy(self) -> None:
        """Free the buffer. Collective. A second call does nothing."""
        assert self.explicitly_destroy
        if self.runtime is not None:
            self.runtime.destroy()
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
        """Return the bytes of a buffer, a multiple of 2 MiB.

        ``allow_hybrid_mode`` has no effect, because all ranks are in one NVLink domain.
        """
        return buffer_bytes(
            cls.release,
            _size(group),
            num_max_tokens_per_rank=num_max_tokens_per_rank,
            hidden=hidden,
            num_topk=num_topk,
            use_fp8_dispatch=use_fp8_dispatch,
            allow_multiple_reduction=allow_multiple_reduction,
        )

    def barrier(
        self,
        use_comm_stream: bool = True,
        with_cpu_sync: bool = False,
        sequential: bool = True,
        wait_comm_stream: bool = True,
        context_idx: int | None = None,
    ) -> None:
        self.runtime.barrier()

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
        """Return the number of SMs to use, on the GPUs that the emulation stands for.

        A bandwidth of 0 is the default of the release. ``rdma_gbs`` has no effect, because it matters only between
        NVLink domains.
        """
        assert num_scaleout_topk == 0
        read_gbs, write_gbs = self.release.sm_gbs
        return theoretical_num_sms(
            self.release,
            self.num_ranks,
            num_experts,
            num_topk,
            nvlink_gbs=nvlink_gbs,
            sm_gbs=(sm_read_gbs or read_gbs, sm_write_gbs or write_gbs),
            prefer_overlap_with_compute=self.prefer_overlap_with_compute,
        )

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
    ) -> Outcome:
        """Send each token once to each rank that owns one of its experts.

        Rows arrive compact, which means one row for each token. With ``do_expand`` they arrive expanded, which means
        one row for each expert of a token.

        Returns:
            The rows, their ids or None, their weights or None, the handle, and an event.
        """
        if self.release.is_v25:
            assert not do_handle_copy, "`do_handle_copy` must be False; handle copying is no longer supported"
        _check_torch_deterministic()
        num_topk = (handle.topk_idx if topk_idx is None else topk_idx).shape[1]  # type: ignore[union-attr]
        if num_sms == 0:
            # With a handle, num_experts is often None, and this call raises. The releases raise too: elastic.py of v2
            # computes num_sms in line 928, before it takes num_experts from the handle in line 940. ep.py of V2.5 does
            # so in lines 632 and 646.
            num_sms = self.get_theoretical_num_sms(num_experts, num_topk)  # type: ignore[arg-type]
        num_sms = self._even(num_sms)
        self._require_qps(num_sms, num_qps)
        if handle is not None:
            assert topk_idx is None
            topk_idx = handle.topk_idx
            assert not do_cpu_sync, "Cannot do CPU sync with cached handle"
            num_experts = agreed(num_experts, handle.num_experts)
            expert_alignment = agreed(expert_alignment, handle.expert_alignment)
            num_max_tokens_per_rank = agreed(num_max_tokens_per_rank, handle.num_max_tokens_per_rank)
        if num_experts is None:
            raise TypeError("dispatch(): incompatible function arguments: num_experts must be an int, got None")
        options = Options(
            num_max_tokens_per_rank=value_or(num_max_tokens_per_rank, self.num_max_tokens_per_rank),
            num_experts=num_experts,
            expert_alignment=value_or(expert_alignment, 1),
            do_handle_copy=do_handle_copy,
            do_cpu_sync=(handle is None) if do_cpu_sync is None else do_cpu_sync,
            do_expand=do_expand,
            do_zero_padding=do_zero_padding,
            col_major_sf=use_tma_aligned_col_major_sf,
        )
        timing = Timing(
            num_sms=num_sms,
            previous_event=previous_event,
            previous_event_before_epilogue=previous_event_before_epilogue,
            async_with_compute_stream=async_with_compute_stream,
            allocate_on_comm_stream=allocate_on_comm_stream,
            defer_epilogue=defer_epilogue,
        )
        assert topk_idx is not None
        rows, sf = unpack_rows(x)
        stats = cumulative_local_expert_recv_stats
        sent = DispatchInput(x=rows, sf=sf, topk_idx=topk_idx, topk_weights=topk_weights, stats=stats)
        received = self.runtime.dispatch(sent, options, timing, handle)
        recv_x = pack_rows(received.x, received.sf)
        values = (recv_x, received.topk_idx, received.topk_weights, received.handle)
        finish = received.sorting(options, is_cached=handle is not None) if self.deterministic else None
        return self._outcome(values, timing, finish, "dispatch")

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
    ) -> Outcome:
        """Send rows back to their source ranks, and add them up there without weights.

        Returns:
            The sums, the weights (T, K), which come back unchanged, or None, and an event.
        """
        _check_torch_deterministic()
        num_sms = handle.num_sms if num_sms == 0 else self._even(num_sms)
        self._require_qps(num_sms, num_qps)
        timing = Timing(
            num_sms=num_sms,
            previous_event=previous_event,
            previous_event_before_epilogue=previous_event_before_epilogue,
            async_with_compute_stream=async_with_compute_stream,
            allocate_on_comm_stream=allocate_on_comm_stream,
            defer_epilogue=defer_epilogue,
        )
        sent = CombineInput(x=x, topk_weights=topk_weights, biases=unpack_bias(bias))
        combined = self.runtime.combine(sent, handle, timing)
        return self._outcome(combined, timing, None, "combine")

    def _outcome(
        self, values: tuple[Any, ...], timing: Timing, finish: Callable[[], None] | None, verb: str
    ) -> Outcome:
        """Return the values and the event of a call, or the event alone if its epilogue is deferred.

        Args:
            values: Values of the call.
            timing: Arguments of the call about events.
            finish: Function that puts the values in order, or None.
            verb: Name of the method.
        """
        event = EPEventOverlap(timing.event()) if self.release.is_v25 else ElasticEventOverlap(timing.event())
        if timing.defer_epilogue:
            is_overwritten = self.runtime.deferred(verb)

            def epilogue() -> tuple[Any, ...]:
                is_overwritten()
                if finish is not None:
                    finish()
                return values

            event.register_hook_after_wait(epilogue)
            return event
        if finish is not None and timing.async_with_compute_stream:
            event.register_hook_after_wait(finish)
        elif finish is not None:
            finish()
        return *values, event

    def _even(self, num_sms: int) -> int:
        """Return the number of SMs that the release uses if the caller gives this number."""
        return num_sms + num_sms % 2 if self.release.is_v25 else num_sms

    def _require_qps(self, num_sms: int, num_qps: int) -> None:
        num_qps = self.get_theoretical_num_qps(num_sms) if num_qps == 0 else num_qps
        assert num_qps <= self.num_allocated_qps, "Allocated QPs are not enough"


def _check_torch_deterministic() -> None:
    """Refuse to run while torch fills uninitialised memory (utils/envs.py of v2).

    Torch fills on another stream than the kernel, so it might overwrite what the kernel has written.
    """
    filled = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    assert not (torch.are_deterministic_algorithms_enabled() and filled)


def _size(group: dist.ProcessGroup | None) -> int:
    return 1 if group is None else group.size()


# Methods whose parameters differ between the releases.
_CHANGED = (
    "__init__",
    "barrier",
    "get_physical_domain_size",
    "get_logical_domain_size",
    "get_theoretical_num_sms",
    "dispatch",
    "combine",
)


def _narrowed(release: ElasticRelease, *, unemulated: tuple[str, ...]) -> type:
    """Make the class of a release. Its methods take the recorded parameters."""
    text = f"{release.buffer}.{{}}: this method is not emulated. Use only dispatch and combine, or the real deep_ep."
    taken = recorded(release.name)["classes"][release.buffer]
    methods = {name: narrowed(getattr(_Buffer, name), taken[name]) for name in _CHANGED}
    cls = type(release.buffer, (_Buffer,), {"release": release, "__doc__": _Buffer.__doc__, **methods})
    return refuse_unemulated(release.name, {name: text.format(name) for name in unemulated})(cls)


# v2 has methods for Engram storage, pipeline-parallel sends, all-gather sessions and streams
# (deep_ep/buffers/elastic.py:412-727).
ElasticBuffer = _narrowed(
    V2,
    unemulated=(
        "get_comm_stream",
        "get_engram_storage_size_hint",
        "engram_write",
        "engram_fetch",
        "get_pp_buffer_size_hint",
        "pp_set_config",
        "pp_send",
        "pp_recv",
        "get_agrs_num_max_session_bytes",
        "get_agrs_buffer_size_hint",
        "create_agrs_session",
        "destroy_agrs_session",
        "agrs_new_session",
        "agrs_set_config",
        "agrs_get_inplace_tensor",
        "all_gather",
    ),
)
# V2.5 has methods for the weights and gradients of redundant experts (deep_ep/buffers/ep.py:845-906).
EPBuffer = _narrowed(
    V25,
    unemulated=(
        "get_comm_stream",
        "lb_get_theoretical_num_sms",
        "lb_prefetch_weights",
        "lb_reduce_grads",
        "print_memory_usage",
    ),
)
