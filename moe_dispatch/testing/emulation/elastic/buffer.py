"""The Python side of v2's ``deep_ep.ElasticBuffer`` (deep_ep/buffers/elastic.py). Its C++ side is in ``runtime``."""

from __future__ import annotations

from typing import final

import torch
import torch.distributed as dist
from torch import Tensor

from moe_dispatch.testing.emulation.arguments import X, agreed, pack_rows, unpack_bias, unpack_rows, value_or
from moe_dispatch.testing.emulation.elastic.call import CombineInput, DispatchInput, Options, Timing
from moe_dispatch.testing.emulation.elastic.handle import EPHandle
from moe_dispatch.testing.emulation.elastic.runtime import ElasticRuntime
from moe_dispatch.testing.emulation.elastic.sizes import buffer_bytes, theoretical_num_sms
from moe_dispatch.testing.emulation.events import ElasticEventOverlap, EventHandle
from moe_dispatch.testing.emulation.signatures import refuse_unemulated
from moe_dispatch.testing.host_syncs import allow_host_syncs

__all__ = ["EPHandle", "ElasticBuffer"]


# Methods for Engram storage, pipeline-parallel sends, all-gather sessions and streams
# (deep_ep/buffers/elastic.py:412-727 of v2).
_UNEMULATED = (
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
)
_NOT_EMULATED = "ElasticBuffer.{}: this method is not emulated. Use only dispatch and combine, or the real deep_ep."


@final
@refuse_unemulated("v2-2.1.0", {name: _NOT_EMULATED.format(name) for name in _UNEMULATED})
class ElasticBuffer:
    """Emulates dispatch and combine over a process group of CPU ranks. All ranks are in one NVLink domain.

    ``group=None`` stands for one rank without torch.distributed, for tests. The real class needs a group of one rank
    instead. Service levels, queue pairs and time-outs have no effect. A buffer that is garbage-collected without
    ``destroy`` frees nothing and prints nothing.

    Source: deep_ep/buffers/elastic.py of v2 (2.1.0).
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        num_bytes: int | None = None,
        num_cpu_bytes: int = 0,
        num_max_tokens_per_rank: int = 0,
        hidden: int = 0,
        num_topk: int = 0,
        use_fp8_dispatch: bool = False,
        deterministic: bool = False,
        allow_hybrid_mode: bool = True,
        allow_multiple_reduction: bool = True,
        prefer_overlap_with_compute: bool = True,
        sl_idx: int = 3,
        num_allocated_qps: int = 0,
        num_cpu_timeout_secs: int = 300,
        num_gpu_timeout_secs: int = 100,
        explicitly_destroy: bool = False,
    ) -> None:
        if num_cpu_bytes > 0:
            raise NotImplementedError("ElasticBuffer: host memory is not emulated. Leave num_cpu_bytes at 0.")
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
        self.runtime = ElasticRuntime(group, num_bytes=num_bytes, allow_multiple_reduction=allow_multiple_reduction)
        self.num_scaleout_ranks, self.num_scaleup_ranks = self.get_logical_domain_size()
        self.scaleout_rank_idx, self.scaleup_rank_idx = divmod(self.rank_idx, self.num_scaleup_ranks)
        self.num_rdma_ranks, self.num_nvlink_ranks = self.get_physical_domain_size()

    def destroy(self) -> None:
        """Free the buffer. Collective. A second call does nothing."""
        assert self.explicitly_destroy
        if self.runtime is not None:
            self.runtime.destroy()
            self.runtime = None  # type: ignore[assignment]  # as in the release: a later call raises AttributeError

    @staticmethod
    def get_buffer_size_hint(
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
            _size(group),
            num_max_tokens_per_rank=num_max_tokens_per_rank,
            hidden=hidden,
            num_topk=num_topk,
            use_fp8_dispatch=use_fp8_dispatch,
            allow_multiple_reduction=allow_multiple_reduction,
        )

    def barrier(self, use_comm_stream: bool = True, with_cpu_sync: bool = False, sequential: bool = True) -> None:
        self.runtime.barrier()

    @staticmethod
    def capture() -> EventHandle:
        return EventHandle()

    def get_physical_domain_size(self) -> tuple[int, int]:
        return 1, self.num_ranks

    def get_logical_domain_size(self) -> tuple[int, int]:
        return 1, self.num_ranks

    def get_theoretical_num_sms(
        self,
        num_experts: int,
        num_topk: int,
        num_scaleout_topk: int = 0,
        rdma_gbs: float = 0,
        nvlink_gbs: float = 0,
        sm_read_gbs: float = 200,
        sm_write_gbs: float = 50,
    ) -> int:
        """Return the number of SMs to use, on the GPUs that the emulation stands for.

        ``rdma_gbs`` has no effect, because it matters only between NVLink domains.
        """
        assert num_scaleout_topk == 0
        return theoretical_num_sms(
            self.num_ranks,
            num_experts,
            num_topk,
            nvlink_gbs=nvlink_gbs,
            sm_read_gbs=sm_read_gbs,
            sm_write_gbs=sm_write_gbs,
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
        do_handle_copy: bool = True,
        do_cpu_sync: bool | None = None,
        do_expand: bool = False,
        do_zero_padding: bool = False,
        use_tma_aligned_col_major_sf: bool = False,
    ) -> tuple[X, Tensor | None, Tensor | None, EPHandle, ElasticEventOverlap]:
        """Send each token once to each rank that owns one of its experts.

        Rows arrive compact, which means one row for each token. With ``do_expand`` they arrive expanded, which means
        one row for each expert of a token.
        """
        _check_torch_deterministic()
        num_topk = (handle.topk_idx if topk_idx is None else topk_idx).shape[1]  # type: ignore[union-attr]
        if num_sms == 0:
            # With a handle, num_experts is often None, and this call raises. The release raises too: its elastic.py
            # computes num_sms in line 928, before it takes num_experts from the handle in line 940.
            num_sms = self.get_theoretical_num_sms(num_experts, num_topk)  # type: ignore[arg-type]
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
        )
        assert topk_idx is not None
        rows, sf = unpack_rows(x)
        stats = cumulative_local_expert_recv_stats
        sent = DispatchInput(x=rows, sf=sf, topk_idx=topk_idx, topk_weights=topk_weights, stats=stats)
        received = self.runtime.dispatch(sent, options, timing, handle)
        event = ElasticEventOverlap(timing.event())
        if self.deterministic:
            received.sort(options, event, is_cached=handle is not None)
        recv_x = pack_rows(received.x, received.sf)
        return recv_x, received.topk_idx, received.topk_weights, received.handle, event

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
    ) -> tuple[Tensor, Tensor | None, ElasticEventOverlap]:
        """Send rows back to their source ranks, and add them up there without weights.

        The weights (T, K) come back unchanged.
        """
        _check_torch_deterministic()
        num_sms = handle.num_sms if num_sms == 0 else num_sms
        self._require_qps(num_sms, num_qps)
        timing = Timing(
            num_sms=num_sms,
            previous_event=previous_event,
            previous_event_before_epilogue=previous_event_before_epilogue,
            async_with_compute_stream=async_with_compute_stream,
            allocate_on_comm_stream=allocate_on_comm_stream,
        )
        sent = CombineInput(x=x, topk_weights=topk_weights, biases=unpack_bias(bias))
        combined = self.runtime.combine(sent, handle, timing)
        return *combined, ElasticEventOverlap(timing.event())

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
