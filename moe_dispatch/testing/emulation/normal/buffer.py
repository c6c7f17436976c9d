"""``deep_ep.Buffer`` of v1.2.1 in normal mode: what its deep_ep/buffer.py does; the C++ side is in normal_runtime."""

from __future__ import annotations

from typing import Any, final

import torch.distributed as dist
from torch import Tensor

from moe_dispatch.testing.emulation.arguments import X, pack_rows, unpack_bias, unpack_rows
from moe_dispatch.testing.emulation.config import COMBINE_QUEUES, DISPATCH_QUEUES, NVL_PEERS, Config
from moe_dispatch.testing.emulation.events import EventHandle, EventOverlap
from moe_dispatch.testing.emulation.normal.calls import Asynchrony, Recipients, Sent
from moe_dispatch.testing.emulation.normal.internode import InternodeRuntime
from moe_dispatch.testing.emulation.normal.intranode import IntranodeRuntime
from moe_dispatch.testing.emulation.normal.runtime import Runtime
from moe_dispatch.testing.emulation.normal.unemulated import UnemulatedMethods, refuse_low_latency
from moe_dispatch.testing.host_syncs import allow_host_syncs


@final
class Buffer(UnemulatedMethods):
    """High-throughput dispatch and combine over a process group of CPU ranks.

    Within a node (2, 4 or 8 ranks) and across nodes (more, in eights). Low-latency mode is not emulated. ``runtime`` is
    what the C++ object is there: None after ``destroy``, so that a later use fails as it does there. Nothing is freed,
    and nothing said, when a buffer is collected without ``destroy``.

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
            refuse_low_latency()
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
        """Collective where there is an NVLink buffer: the ranks meet in a barrier."""
        assert self.explicitly_destroy, "`explicitly_destroy` flag must be set"
        self.runtime.destroy()
        self.runtime = None  # type: ignore[assignment]  # as there: what comes later is an AttributeError on None

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
        """Counts int32 per rank (P,), per node or None, per expert (E,), and which token goes to which rank (T, P)."""
        asynchrony = _asynchrony(previous_event, async_finish, allocate_on_comm_stream)
        to = self.runtime.get_dispatch_layout(topk_idx, num_experts, asynchrony)
        event = EventOverlap(asynchrony.event())
        return to.tokens_per_rank, to.tokens_per_rdma_rank, to.tokens_per_expert, to.is_token_in_rank, event

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
        """Each token once to each rank that ``is_token_in_rank`` names: rows by source rank, then token.

        With ``handle`` the rows go as they went then, and only rows come back (and Nones).
        """
        config = self.get_dispatch_config(self.group_size) if config is None else config
        if self.runtime.get_num_rdma_ranks() > 1:
            assert num_worst_tokens == 0, "Internode dispatch does not support `num_worst_tokens > 0`"
        asynchrony = _asynchrony(previous_event, async_finish, allocate_on_comm_stream)
        rows, scales = unpack_rows(x)
        sent = Sent(x=rows, scales=scales, topk_idx=topk_idx, topk_weights=topk_weights)
        if handle is not None:
            assert topk_idx is None
            assert topk_weights is None
            recv_x, recv_scales = self.runtime.cached_dispatch(sent, handle, config, asynchrony)
            return pack_rows(recv_x, recv_scales), None, None, None, None, EventOverlap(asynchrony.event())
        assert num_tokens_per_rank is not None
        assert is_token_in_rank is not None
        assert num_tokens_per_expert is not None
        to = Recipients(
            tokens_per_rank=num_tokens_per_rank,
            tokens_per_rdma_rank=num_tokens_per_rdma_rank,
            tokens_per_expert=num_tokens_per_expert,
            is_token_in_rank=is_token_in_rank,
        )
        received = self.runtime.dispatch(
            sent, to, config, asynchrony, expert_alignment=expert_alignment, num_worst_tokens=num_worst_tokens
        )
        return (
            pack_rows(received.x, received.scales),
            received.topk_idx,
            received.topk_weights,
            received.tokens_per_expert_list,
            received.handle,
            EventOverlap(asynchrony.event()),
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
        """Rows back to the ranks they came from, summed there in float32 without weights; weights are summed too."""
        config = self.get_combine_config(self.group_size) if config is None else config
        asynchrony = _asynchrony(previous_event, async_finish, allocate_on_comm_stream)
        combined = self.runtime.combine(x, handle, topk_weights, unpack_bias(bias), config, asynchrony)
        return *combined, EventOverlap(asynchrony.event())


def _default_config(num_ranks: int, queues: dict[int, tuple[int, int, int, int]]) -> Config:
    assert num_ranks in queues, f"Unsupported number of EP ranks: {num_ranks}"
    return Config(Buffer.num_sms, *queues[num_ranks])


def _asynchrony(previous_event: EventOverlap | None, async_finish: bool, allocate: bool) -> Asynchrony:
    waits_for = getattr(previous_event, "event", None)
    return Asynchrony(has_previous_event=waits_for is not None, async_finish=async_finish, allocate=allocate)
