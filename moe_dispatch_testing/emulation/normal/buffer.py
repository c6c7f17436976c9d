"""The Python side of v1.2.1's ``deep_ep.Buffer`` in normal mode (deep_ep/buffer.py). The C++ side is in ``runtime``."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, final

import torch.distributed as dist
from torch import Tensor

from moe_dispatch_testing.emulation.arguments import X, pack_rows, unpack_bias, unpack_rows
from moe_dispatch_testing.emulation.config import COMBINE_QUEUES, DISPATCH_QUEUES, NVL_PEERS, Config
from moe_dispatch_testing.emulation.events import EventHandle, EventOverlap
from moe_dispatch_testing.emulation.normal.call import CombineInput, DispatchInput, DispatchLayout, Settings
from moe_dispatch_testing.emulation.normal.internode import InternodeRuntime
from moe_dispatch_testing.emulation.normal.intranode import IntranodeRuntime
from moe_dispatch_testing.emulation.normal.runtime import Runtime
from moe_dispatch_testing.emulation.signatures import refuse_unemulated
from moe_dispatch_testing.host_syncs import allow_host_syncs

_NO_LOW_LATENCY = "Buffer: low-latency mode is not emulated. Use dispatch and combine."
_NO_INTERNODE = (
    "Buffer: the internode methods are not emulated. Use dispatch and combine, which work between nodes too."
)


@final
@refuse_unemulated(
    "v1.2.1",
    {
        "get_comm_stream": "Buffer.get_comm_stream: the emulation has no CUDA stream.",
        "get_local_buffer_tensor": "Buffer.get_local_buffer_tensor: the emulation has no raw buffer to return.",
        "internode_dispatch": _NO_INTERNODE,
        "internode_combine": _NO_INTERNODE,
        "get_low_latency_rdma_size_hint": _NO_LOW_LATENCY,
        "clean_low_latency_buffer": _NO_LOW_LATENCY,
        "low_latency_dispatch": _NO_LOW_LATENCY,
        "low_latency_combine": _NO_LOW_LATENCY,
        "get_next_low_latency_combine_buffer": _NO_LOW_LATENCY,
    },
)
class Buffer:
    """Emulates high-throughput dispatch and combine over a process group of CPU ranks.

    A group of 2, 4 or 8 ranks is one node. A larger group has nodes of 8 ranks. Low-latency mode is not emulated.

    ``runtime`` stands for the C++ object. It is None after ``destroy``, so that a later call fails as in the release. A
    buffer that is garbage-collected without ``destroy`` frees nothing and prints nothing.

    Source: deep_ep/buffer.py of v1.2.1.
    """

    num_sms: int = 20

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        num_nvl_bytes: int = 0,
        num_rdma_bytes: int = 0,
        low_latency_mode: bool = False,
        num_qps_per_rank: int = 24,
        allow_nvlink_for_low_latency_mode: bool = True,
        allow_mnnvl: bool = False,
        explicitly_destroy: bool = False,
        comm: Any = None,
    ) -> None:
        if group is None and comm is None:
            raise ValueError("Either 'group' or 'comm' must be provided.")
        if group is None:
            raise NotImplementedError("Buffer: a communicator of mpi4py is not emulated. Pass a ProcessGroup as group.")
        if low_latency_mode:
            raise NotImplementedError(_NO_LOW_LATENCY)
        self.rank = group.rank()
        self.group = group
        self.group_size = group.size()
        self.num_nvl_bytes = num_nvl_bytes
        self.num_rdma_bytes = num_rdma_bytes
        self.low_latency_mode = low_latency_mode
        self.explicitly_destroy = explicitly_destroy
        self.runtime: Runtime
        if self.group_size <= NVL_PEERS:
            self.runtime = IntranodeRuntime(group, num_nvl_bytes=num_nvl_bytes, num_rdma_bytes=num_rdma_bytes)
        else:
            assert num_qps_per_rank > 0
            self.runtime = InternodeRuntime(
                group, num_nvl_bytes=num_nvl_bytes, num_rdma_bytes=num_rdma_bytes, num_qps_per_rank=num_qps_per_rank
            )

    def destroy(self) -> None:
        """Free the buffer. If there is an NVLink buffer, all ranks must call this, because they meet in a barrier."""
        assert self.explicitly_destroy, "`explicitly_destroy` flag must be set"
        self.runtime.destroy()
        self.runtime = None  # type: ignore[assignment]  # as in the release: a later call raises AttributeError

    @staticmethod
    def is_sm90_compiled() -> bool:
        return True

    @staticmethod
    def set_num_sms(new_num_sms: int) -> None:
        assert new_num_sms % 2 == 0, "The SM count must be even"
        Buffer.num_sms = new_num_sms

    @staticmethod
    def capture() -> EventOverlap:
        return EventOverlap(EventHandle())

    @staticmethod
    def get_dispatch_config(num_ranks: int) -> Config:
        return _default_config(num_ranks, DISPATCH_QUEUES)

    @staticmethod
    def get_combine_config(num_ranks: int) -> Config:
        return _default_config(num_ranks, COMBINE_QUEUES)

    @allow_host_syncs()
    def get_dispatch_layout(
        self,
        topk_idx: Tensor,
        num_experts: int,
        previous_event: EventOverlap | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[Tensor, Tensor | None, Tensor, Tensor, EventOverlap]:
        """Count this rank's tokens for each rank, node and expert. No exchange.

        Returns:
            The number of tokens for each rank, int32 (P,); for each node, or None within one node; for each expert,
            int32 (E,). Then the flags that say which token goes to which rank, bool (T, P), and an event.
        """
        # The layout does not depend on a config.
        settings = _settings(Config(), previous_event, async_finish, allocate_on_comm_stream)
        layout = self.runtime.get_dispatch_layout(topk_idx, num_experts, settings)
        return (
            layout.tokens_per_rank,
            layout.tokens_per_rdma_rank,
            layout.tokens_per_expert,
            layout.is_token_in_rank,
            EventOverlap(settings.event()),
        )

    @allow_host_syncs()
    def dispatch(
        self,
        x: X,
        handle: tuple[Tensor, ...] | None = None,
        num_tokens_per_rank: Tensor | None = None,
        num_tokens_per_rdma_rank: Tensor | None = None,
        is_token_in_rank: Tensor | None = None,
        num_tokens_per_expert: Tensor | None = None,
        topk_idx: Tensor | None = None,
        topk_weights: Tensor | None = None,
        expert_alignment: int = 1,
        num_worst_tokens: int = 0,
        config: Config | None = None,
        previous_event: EventOverlap | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[X, Tensor | None, Tensor | None, list[int] | None, tuple[Tensor, ...] | None, EventOverlap]:
        """Send each token once to each rank that ``is_token_in_rank`` names. Rows arrive by source rank, then token.

        With ``handle``, rows go to the same ranks as in the dispatch that made the handle, and only rows are returned.
        """
        config = self.get_dispatch_config(self.group_size) if config is None else config
        if self.runtime.get_num_rdma_ranks() > 1:
            assert num_worst_tokens == 0, "Internode dispatch does not support `num_worst_tokens > 0`"
        settings = replace(
            _settings(config, previous_event, async_finish, allocate_on_comm_stream),
            expert_alignment=expert_alignment,
            num_worst_tokens=num_worst_tokens,
        )
        rows, scales = unpack_rows(x)
        sent = DispatchInput(x=rows, scales=scales, topk_idx=topk_idx, topk_weights=topk_weights)
        if handle is not None:
            assert topk_idx is None
            assert topk_weights is None
            received = self.runtime.cached_dispatch(sent, handle, settings)
        else:
            assert num_tokens_per_rank is not None
            assert is_token_in_rank is not None
            assert num_tokens_per_expert is not None
            layout = DispatchLayout(
                tokens_per_rank=num_tokens_per_rank,
                tokens_per_rdma_rank=num_tokens_per_rdma_rank,
                tokens_per_expert=num_tokens_per_expert,
                is_token_in_rank=is_token_in_rank,
            )
            received = self.runtime.dispatch(sent, layout, settings)
        return (
            pack_rows(received.x, received.scales),
            received.topk_idx,
            received.topk_weights,
            received.tokens_per_expert_list,
            received.handle,
            EventOverlap(settings.event()),
        )

    @allow_host_syncs()
    def combine(
        self,
        x: Tensor,
        handle: tuple[Tensor, ...],
        topk_weights: Tensor | None = None,
        bias: Tensor | tuple[Tensor, Tensor] | None = None,
        config: Config | None = None,
        previous_event: EventOverlap | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[Tensor, Tensor | None, EventOverlap]:
        """Send rows back to their source ranks, and add them up there in float32, without weights.

        ``topk_weights`` are sent back and added up in the same way.
        """
        config = self.get_combine_config(self.group_size) if config is None else config
        settings = _settings(config, previous_event, async_finish, allocate_on_comm_stream)
        sent = CombineInput(x=x, topk_weights=topk_weights, biases=unpack_bias(bias))
        combined = self.runtime.combine(sent, handle, settings)
        return *combined, EventOverlap(settings.event())


def _default_config(num_ranks: int, queues: dict[int, tuple[int, int, int, int]]) -> Config:
    assert num_ranks in queues, f"Unsupported number of EP ranks: {num_ranks}"
    return Config(Buffer.num_sms, *queues[num_ranks])


def _settings(config: Config, previous_event: EventOverlap | None, async_finish: bool, allocate: bool) -> Settings:
    waits_for = getattr(previous_event, "event", None)
    return Settings(
        config=config, has_previous_event=waits_for is not None, async_finish=async_finish, allocate=allocate
    )
