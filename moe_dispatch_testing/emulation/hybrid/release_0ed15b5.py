"""``HybridEpBuffer`` of 0ed15b5 (2025-10-10): one NVLink domain, a fixed capacity, chunks of 128 rows."""

from __future__ import annotations

import os
from typing import Any, final

import torch.distributed as dist
from torch import Tensor

from moe_dispatch_testing.emulation.exchange import Exchange
from moe_dispatch_testing.emulation.hybrid.call import Call, require_device_sync, routing_of, rows_per_rank
from moe_dispatch_testing.emulation.hybrid.config import SM_COUNT, HybridEpConfigInstance, TokenDataType
from moe_dispatch_testing.emulation.hybrid.handle import Handle, handle_of
from moe_dispatch_testing.emulation.hybrid.maps import Topology
from moe_dispatch_testing.emulation.hybrid.rows import Rows
from moe_dispatch_testing.emulation.hybrid.runtime_0ed15b5 import RuntimeOf0ed15b5
from moe_dispatch_testing.emulation.refusals import EmulatedAbort
from moe_dispatch_testing.emulation.signatures import recorded
from moe_dispatch_testing.host_syncs import allow_host_syncs

_CHUNK = 128
_PERMUTE_HANDLE = tuple(recorded("hybridep-0ed15b5")["handles"]["dispatch_with_permute"])
_DISPATCH_HANDLE = tuple(name for name in _PERMUTE_HANDLE if name != "row_id_map")
_TOO_MANY = "The number of tokens should be less than or equal to the max number of tokens per rank."


@final
class HybridEpBuffer:
    """Emulates dispatch and combine of this release, which spells the name ``HybridEpBuffer``.

    The emulation assumes that the ranks of the group are neighbours (a stride of one).
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        hidden_dim: int,
        max_num_of_tokens_per_rank: int,
        num_local_experts: int,
        num_of_experts: int,
        use_fp8: bool = False,
        num_sms_dispatch_api: int = 32,
        num_sms_combine_api: int = 32,
        num_sms_preprocessing_api: int = 128,
        nvlink_domain_size: int | None = None,
    ) -> None:
        self.group = group
        self._exchange = Exchange(group)
        self.rank, self.group_size = self._exchange.rank, self._exchange.size
        self.hidden_dim = hidden_dim
        self.max_num_of_tokens_per_rank = max_num_of_tokens_per_rank
        self.num_local_experts = num_local_experts
        self.num_of_experts = num_of_experts
        self.use_fp8 = use_fp8
        self.num_sms_preprocessing_api = num_sms_preprocessing_api
        self.num_sms_dispatch_api = num_sms_dispatch_api
        self.num_sms_combine_api = num_sms_combine_api
        with self._exchange.entrance("HybridEpBuffer.__init__ (arguments)"):
            self._set_topology(nvlink_domain_size)
            most = max(num_sms_preprocessing_api, num_sms_dispatch_api, num_sms_combine_api)
            assert most <= SM_COUNT, "check the sms occupancy setting"
        self.init_config()
        self.init_buffer()

    def _set_topology(self, nvlink_domain_size: int | None) -> None:
        assert self.group_size > 1, (
            f"The hybrid-ep kernel should be used with at least 2 ranks, but got {self.group_size}."
        )
        if nvlink_domain_size is None:
            nvlink_domain_size = int(os.environ.get("NVLINK_DOMAIN_SIZE", "8"))
        assert nvlink_domain_size >= 1, "The rank stride should be less than or equal to the nvlink domain size."
        self.nvlink_domain_size = nvlink_domain_size
        self.num_of_ranks_per_node = min(nvlink_domain_size, self.group_size)
        assert self.group_size % self.num_of_ranks_per_node == 0, (
            "The number of ranks should be divisible by the number of ranks per node."
        )
        self.local_rank = self.rank % self.num_of_ranks_per_node
        self.node_rank = self.rank // self.num_of_ranks_per_node
        self.num_of_nodes = self.group_size // self.num_of_ranks_per_node
        if self.num_of_nodes > 1:
            raise EmulatedAbort(
                f"hybrid_ep.cu:14: assert(false): inter-node communication is not supported, got {self.group_size} "
                f"ranks and {self.num_of_ranks_per_node} a node."
            )

    def init_config(
        self,
        num_of_threads_per_block_preprocessing_api: int | None = None,
        num_of_stages_dispatch_api: int | None = None,
        num_of_tokens_per_chunk_dispatch_api: int | None = None,
        device_side_sync_dispatch_api: bool = True,
        num_of_stages_g2s_combine_api: int | None = None,
        num_of_stages_s2g_combine_api: int | None = None,
        num_of_tokens_per_chunk_combine_api: int | None = None,
        num_of_tokens_per_group_combine_api: int | None = None,
        num_of_additional_in_flight_s2g_combine_api: int | None = None,
        device_side_sync_combine_api: bool = True,
    ) -> None:
        """Set the chunk sizes. Numbers of threads, stages and groups do not change results.

        Raises:
            NotImplementedError: Device-side sync is off, so kernels would not wait for each other.
        """
        require_device_sync(
            {
                "device_side_sync_dispatch_api": device_side_sync_dispatch_api,
                "device_side_sync_combine_api": device_side_sync_combine_api,
            }
        )
        self.config = HybridEpConfigInstance(
            hidden_dim=self.hidden_dim,
            max_num_of_tokens_per_rank=self.max_num_of_tokens_per_rank,
            num_of_experts_per_rank=self.num_local_experts,
            num_of_ranks_per_node=self.num_of_ranks_per_node,
            num_of_nodes=self.num_of_nodes,
            pad_multiple=1,
            token_data_type=TokenDataType.of(self.use_fp8),
            num_of_tokens_per_chunk_preprocessing_api=_CHUNK,
            num_of_tokens_per_chunk_dispatch_api=_chunk("DISPATCH", num_of_tokens_per_chunk_dispatch_api),
            num_of_tokens_per_chunk_combine_api=_chunk("COMBINE", num_of_tokens_per_chunk_combine_api),
            num_of_blocks_preprocessing_api=self.num_sms_preprocessing_api,
            num_of_blocks_dispatch_api=self.num_sms_dispatch_api,
            num_of_blocks_combine_api=self.num_sms_combine_api,
            num_of_blocks_permute=1,
            num_of_blocks_unpermute=1,
        )

    def init_buffer(self) -> None:
        """Allocate buffers of the configured capacity. They never grow. Collective."""
        topology = Topology(rank=self.rank, ranks_per_node=self.num_of_ranks_per_node, nodes=self.num_of_nodes)
        self.runtime = RuntimeOf0ed15b5(self._exchange, topology, self.config, self.num_of_experts)

    @allow_host_syncs()
    def dispatch(
        self,
        hidden: Tensor,
        scaling_factor: Tensor | None = None,
        topk_idx: Tensor | None = None,
        topk_weights: Tensor | None = None,
        probs: Tensor | None = None,
        routing_map: Tensor | None = None,
        num_dispatched_tokens_tensor: Tensor | None = None,
        num_dispatched_tokens: int = -1,
        handle: tuple[Any, ...] | None = None,
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None, tuple[Any, ...]]:
        """Send rows to the ranks of their experts.

        Returns:
            The received rows; their probs (n, experts of the node) or None; their scales or None; the handle. The first
            three are None if no row arrived.
        """
        call = Call(
            hidden=hidden,
            scaling_factor=scaling_factor,
            topk_idx=topk_idx,
            topk_weights=topk_weights,
            num_of_experts=self.num_of_experts,
            probs=probs,
            routing_map=routing_map,
            handle=handle,
            permute=False,
        )
        kept, probs = self._handle_of(call, _DISPATCH_HANDLE)
        sent = Rows(tokens=hidden, probs=probs, scales=scaling_factor)
        rows = self.runtime.dispatch(kept, sent, num_dispatched_tokens)
        out = kept.packed(_DISPATCH_HANDLE)
        return (None, None, None, out) if rows is None else (rows.tokens, rows.probs, rows.scales, out)

    @allow_host_syncs()
    def combine(
        self, hidden: Tensor, probs: Tensor | None = None, handle: tuple[Any, ...] | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Send rows back to their source ranks, and add up the rows of each token there."""
        with self._exchange.entrance("HybridEpBuffer.combine (arguments)"):
            assert handle is not None, "The handle is necessary for combine."
            kept = handle_of(_DISPATCH_HANDLE, handle, config=self.config)
        combined = self.runtime.combine(kept, Rows(tokens=hidden, probs=probs))
        return combined.tokens, combined.probs

    @allow_host_syncs()
    def dispatch_with_permute(
        self,
        *,
        hidden: Tensor,
        topk_idx: Tensor | None = None,
        topk_weights: Tensor | None = None,
        routing_map: Tensor | None = None,
        probs: Tensor | None = None,
        scaling_factor: Tensor | None = None,
        num_dispatched_tokens: int = -1,
        num_permuted_tokens: int = -1,
        pad_multiple: int = 0,
        handle: tuple[Any, ...] | None = None,
        use_host_meta: bool = True,
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None, tuple[Any, ...]]:
        """Send rows to the ranks of their experts, and order the received rows by expert.

        ``use_host_meta`` has no effect: it chooses between counts on the host and on the device, which a CPU does not
        tell apart.

        Returns:
            The expert rows; their probs (R,) or None; their scales or None; the number of rows of each expert with
            padding, int32 (L,), or None with a cached handle; the handle. The first four are None on a rank that
            receives no row.
        """
        call = Call(
            hidden=hidden,
            scaling_factor=scaling_factor,
            topk_idx=topk_idx,
            topk_weights=topk_weights,
            num_of_experts=self.num_of_experts,
            probs=probs,
            routing_map=routing_map,
            handle=handle,
            permute=True,
        )
        kept, probs = self._handle_of(call, _PERMUTE_HANDLE)
        rows = self.runtime.dispatch_with_permute(
            kept,
            Rows(tokens=hidden, probs=probs, scales=scaling_factor),
            received=num_dispatched_tokens,
            num_out=num_permuted_tokens,
            pad_multiple=pad_multiple,
        )
        out = kept.packed(_PERMUTE_HANDLE)
        if rows is None:
            return None, None, None, None, out
        return rows.tokens, rows.probs, rows.scales, kept.tokens_per_expert, out

    @allow_host_syncs()
    def combine_with_unpermute(
        self,
        *,
        hidden: Tensor,
        probs: Tensor | None = None,
        num_dispatched_tokens: int = -1,
        handle: tuple[Any, ...] | None = None,
        pad_multiple: int = 0,
    ) -> tuple[Tensor, Tensor | None]:
        """Add up the expert rows of each token, over experts and then over ranks. ``pad_multiple`` has no effect."""
        with self._exchange.entrance("HybridEpBuffer.combine_with_unpermute (arguments)"):
            assert handle is not None, "The handle is necessary in the combine pass."
            kept = handle_of(_PERMUTE_HANDLE, handle, config=self.config)
        rows = Rows(tokens=hidden, probs=probs)
        combined = self.runtime.combine_with_unpermute(kept, rows, received=num_dispatched_tokens)
        return combined.tokens, combined.probs

    def _handle_of(self, call: Call, names: tuple[str, ...]) -> tuple[Handle, Tensor | None]:
        """Make the handle of a new dispatch, or unpack the handle of a cached one. Return it and the probs to send."""
        where = "dispatch_with_permute" if call.permute else "dispatch"
        with self._exchange.entrance(f"HybridEpBuffer.{where} (arguments)") as entry:
            entry.same = {"handle": "cached" if call.handle is not None else "none"}
            assert call.num_rows <= self.max_num_of_tokens_per_rank, _TOO_MANY
            routing = routing_of(call)
            if call.handle is not None:
                return handle_of(names, call.handle, config=self.config), routing.probs
            assert call.permute or routing.rows is not None, "The handle and routing_map should be both None"
            num_rows = rows_per_rank(call, routing, ragged=False)
        assert routing.rows is not None
        return self.runtime.metadata_preprocessing(routing.rows, num_rows), routing.probs


def _chunk(api: str, chosen: int | None) -> int:
    from_environment = int(os.environ.get(f"NUM_OF_TOKENS_PER_CHUNK_{api}_API", _CHUNK))
    return from_environment if chosen is None else chosen
