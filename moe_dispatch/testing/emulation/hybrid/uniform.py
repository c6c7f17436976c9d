"""``HybridEPBuffer`` of 34152ae and 94a9f8f, with exactly their signatures: they differ in one default."""

from __future__ import annotations

from typing import Any, final

import torch.distributed as dist
from torch import Tensor

from moe_dispatch.testing.emulation.hybrid.buffer import HybridBuffer
from moe_dispatch.testing.emulation.hybrid.call import Call, without_host_meta
from moe_dispatch.testing.emulation.hybrid.release import RELEASES
from moe_dispatch.testing.emulation.hybrid.routing import Given
from moe_dispatch.testing.host_syncs import allow_host_syncs


class _Uniform(HybridBuffer):
    """Every rank sends the same number of rows."""

    @allow_host_syncs()
    def dispatch(
        self,
        hidden: Tensor,
        scaling_factor: Tensor | None = None,
        topk_idx: Tensor | None = None,
        topk_weights: Tensor | None = None,
        num_of_experts: int | None = None,
        probs: Tensor | None = None,
        routing_map: Tensor | None = None,
        num_dispatched_tokens_tensor: Tensor | None = None,
        num_dispatched_tokens: int | None = None,
        handle: tuple[Any, ...] | None = None,
    ) -> tuple[Tensor, Tensor | None, Tensor | None, tuple[Any, ...]]:
        """Received rows (n, H) by (source rank, token), probs (n, experts of the node), scales, handle."""
        return self._dispatch(
            Call(
                hidden=hidden,
                given=Given(
                    topk_idx=topk_idx,
                    topk_weights=topk_weights,
                    num_of_experts=num_of_experts,
                    probs=probs,
                    routing_map=routing_map,
                ),
                scaling_factor=scaling_factor,
                handle=handle,
                permute=False,
            )
        )

    @allow_host_syncs()
    def dispatch_with_permute(
        self,
        *,
        hidden: Tensor,
        topk_idx: Tensor | None = None,
        topk_weights: Tensor | None = None,
        num_of_experts_per_rank: int | None = None,
        num_of_experts: int | None = None,
        use_fp8: bool | None = None,
        routing_map: Tensor | None = None,
        probs: Tensor | None = None,
        scaling_factor: Tensor | None = None,
        num_permuted_tokens: int | None = None,
        pad_multiple: int | None = None,
        handle: tuple[Any, ...] | None = None,
        non_blocking: bool = False,
        fuse_permute_dispatch: bool = False,
        num_dispatched_tokens: int | None = None,
        use_host_meta: bool | None = None,
    ) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None, tuple[Any, ...]]:
        """Expert rows (R, H), probs (R,), scales, padded rows per expert int64 (L,) or None if cached, handle."""
        return self._dispatch_with_permute(
            Call(
                hidden=hidden,
                given=Given(
                    topk_idx=topk_idx,
                    topk_weights=topk_weights,
                    num_of_experts=num_of_experts,
                    probs=probs,
                    routing_map=routing_map,
                ),
                scaling_factor=scaling_factor,
                handle=handle,
                permute=True,
                num_of_experts_per_rank=num_of_experts_per_rank,
                use_fp8=use_fp8,
                num_permuted_tokens=num_permuted_tokens,
                pad_multiple=pad_multiple,
                non_blocking=without_host_meta(use_host_meta, non_blocking, num_dispatched_tokens),
                fused=fuse_permute_dispatch,
            )
        )


@final
class BufferOf34152ae(_Uniform):
    """34152ae."""

    release = RELEASES["hybridep-34152ae"]

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        hidden_dim: int,
        max_num_of_tokens_per_rank: int,
        num_local_experts: int,
        use_fp8: bool = False,
        num_sms_dispatch_api: int | None = None,
        num_sms_combine_api: int | None = None,
        num_sms_preprocessing_api: int | None = None,
        num_blocks_permute: int | None = None,
        num_blocks_unpermute: int | None = None,
        load_cached_kernels: bool = False,
        use_shared_buffer: bool = True,
        enable_custom_allgather: bool = True,
        num_of_hybrid_ep_ranks_per_nvlink_domain: int | None = None,
        use_mnnvl: bool | None = None,
    ) -> None:
        self._open(
            group,
            {
                "hidden_dim": hidden_dim,
                "max_num_of_tokens_per_rank": max_num_of_tokens_per_rank,
                "num_local_experts": num_local_experts,
            },
            use_fp8=use_fp8,
            blocks={
                "dispatch": num_sms_dispatch_api,
                "combine": num_sms_combine_api,
                "preprocessing": num_sms_preprocessing_api,
                "permute": num_blocks_permute,
                "unpermute": num_blocks_unpermute,
            },
            use_shared_buffer=use_shared_buffer,
            custom_allgather=enable_custom_allgather,
        )


@final
class BufferOf94a9f8f(_Uniform):
    """94a9f8f."""

    release = RELEASES["hybridep-94a9f8f"]

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        hidden_dim: int,
        max_num_of_tokens_per_rank: int,
        num_local_experts: int,
        use_fp8: bool = False,
        num_sms_dispatch_api: int | None = None,
        num_sms_combine_api: int | None = None,
        num_sms_preprocessing_api: int | None = None,
        num_blocks_permute: int | None = None,
        num_blocks_unpermute: int | None = None,
        load_cached_kernels: bool = False,
        use_shared_buffer: bool = True,
        enable_custom_allgather: bool = False,
        num_of_hybrid_ep_ranks_per_nvlink_domain: int | None = None,
        use_mnnvl: bool | None = None,
    ) -> None:
        self._open(
            group,
            {
                "hidden_dim": hidden_dim,
                "max_num_of_tokens_per_rank": max_num_of_tokens_per_rank,
                "num_local_experts": num_local_experts,
            },
            use_fp8=use_fp8,
            blocks={
                "dispatch": num_sms_dispatch_api,
                "combine": num_sms_combine_api,
                "preprocessing": num_sms_preprocessing_api,
                "permute": num_blocks_permute,
                "unpermute": num_blocks_unpermute,
            },
            use_shared_buffer=use_shared_buffer,
            custom_allgather=enable_custom_allgather,
        )
