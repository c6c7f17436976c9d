"""Methods of v1's Buffer that are not emulated, refused one by one with the real signatures."""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch import Tensor

from moe_dispatch.testing.emulation.arguments import X
from moe_dispatch.testing.emulation.config import Config
from moe_dispatch.testing.emulation.events import EventOverlap


class UnemulatedMethods:
    """Low-latency mode, raw memory, streams, and what dispatch and combine call between nodes.

    Source: deep_ep/buffer.py of v1.2.1.
    """

    @staticmethod
    def get_low_latency_rdma_size_hint(
        num_max_dispatch_tokens_per_rank: int, hidden: int, num_ranks: int, num_experts: int
    ) -> int:
        refuse_low_latency()

    def get_comm_stream(self) -> NoReturn:
        raise NotImplementedError("Buffer.get_comm_stream: the emulation has no CUDA stream.")

    def get_local_buffer_tensor(
        self, dtype: torch.dtype, size: torch.Size | None = None, offset: int = 0, use_rdma_buffer: bool = False
    ) -> NoReturn:
        raise NotImplementedError("Buffer.get_local_buffer_tensor: the emulation has no raw buffer to show.")

    def internode_dispatch(
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
        config: Config | None = None,
        previous_event: EventOverlap | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> NoReturn:
        _refuse_direct_call()

    def internode_combine(
        self,
        x: Tensor,
        handle: tuple[Tensor, ...],
        topk_weights: Tensor | None = None,
        bias: Tensor | tuple[Tensor, Tensor] | None = None,
        config: Config | None = None,
        previous_event: EventOverlap | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> NoReturn:
        _refuse_direct_call()

    def clean_low_latency_buffer(self, num_max_dispatch_tokens_per_rank: int, hidden: int, num_experts: int) -> None:
        refuse_low_latency()

    def low_latency_dispatch(
        self,
        x: Tensor,
        topk_idx: Tensor,
        num_max_dispatch_tokens_per_rank: int,
        num_experts: int,
        cumulative_local_expert_recv_stats: Tensor | None = None,
        dispatch_wait_recv_cost_stats: Tensor | None = None,
        use_fp8: bool = True,
        round_scale: bool = False,
        use_ue8m0: bool = False,
        async_finish: bool = False,
        return_recv_hook: bool = False,
    ) -> NoReturn:
        refuse_low_latency()

    def low_latency_combine(
        self,
        x: Tensor,
        topk_idx: Tensor,
        topk_weights: Tensor,
        handle: tuple[Any, ...],
        use_logfmt: bool = False,
        zero_copy: bool = False,
        async_finish: bool = False,
        return_recv_hook: bool = False,
        out: Tensor | None = None,
        combine_wait_recv_cost_stats: Tensor | None = None,
    ) -> NoReturn:
        refuse_low_latency()

    def get_next_low_latency_combine_buffer(self, handle: tuple[Any, ...]) -> NoReturn:
        refuse_low_latency()


def refuse_low_latency() -> NoReturn:
    """For its methods, and for a buffer that is to be used by them."""
    raise NotImplementedError("Buffer: low-latency mode is not emulated. Use dispatch and combine.")


def _refuse_direct_call() -> NoReturn:
    raise NotImplementedError("Buffer: the internode methods are not emulated by name. Use dispatch and combine.")
