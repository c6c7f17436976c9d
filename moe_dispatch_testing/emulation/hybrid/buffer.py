"""``HybridEPBuffer`` of release 34152ae and later. The signatures come from the newest release, pull request 746."""

from __future__ import annotations

import operator
import os
import warnings
from dataclasses import replace
from typing import Any, ClassVar

import torch.distributed as dist
from torch import Tensor

from moe_dispatch_testing.emulation.exchange import Exchange
from moe_dispatch_testing.emulation.hybrid.call import (
    Call,
    Routing,
    check_non_blocking,
    non_blocking_of,
    padded,
    ragged_routing_of,
    require_device_sync,
    routing_of,
    rows_per_rank,
    warn_deprecated,
)
from moe_dispatch_testing.emulation.hybrid.config import (
    Configurer,
    HybridEpConfigInstance,
    Sizes,
    TokenDataType,
    capacity_is_valid,
)
from moe_dispatch_testing.emulation.hybrid.handle import Handle, handle_of
from moe_dispatch_testing.emulation.hybrid.maps import Topology
from moe_dispatch_testing.emulation.hybrid.preprocess import Request
from moe_dispatch_testing.emulation.hybrid.release import HybridRelease
from moe_dispatch_testing.emulation.hybrid.rows import Rows
from moe_dispatch_testing.emulation.hybrid.runtime import Runtime
from moe_dispatch_testing.host_syncs import allow_host_syncs

_DOMAIN = "NUM_OF_HYBRID_EP_RANKS_PER_NVLINK_DOMAIN"


class HybridBuffer:
    """Emulates dispatch and combine of HybridEP.

    Attributes that drivers read have the names of the real class. ``group=None`` stands for a group of one rank.

    The real library detects the NVLink domain from the hardware. Here a domain holds all ranks of the group, unless the
    environment variable NUM_OF_HYBRID_EP_RANKS_PER_NVLINK_DOMAIN gives another number of ranks. The numbers of SMs and
    blocks, ``load_cached_kernels`` and ``use_shared_buffer`` do not change results.

    ``hybrid_ep_buffer`` makes a subclass for each release. The subclass sets ``release`` and narrows the signatures.
    """

    release: ClassVar[HybridRelease]

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
        self.group = group
        self._exchange = Exchange(group)
        self.rank, self.group_size = self._exchange.rank, self._exchange.size
        domain = int(os.environ.get(_DOMAIN, self.group_size))
        self.num_of_hybrid_ep_ranks_per_nvlink_domain = domain
        with self._exchange.entrance("HybridEPBuffer.__init__ (arguments)") as entry:
            assert self.group_size % domain == 0, (
                f"The number of ranks {self.group_size} should be divisible by the number of ranks per node {domain} "
                f"at rank={self.rank}."
            )
            topology = Topology(rank=self.rank, ranks_per_node=domain, nodes=self.group_size // domain)
            self.local_rank, self.node_rank, self.num_of_nodes = topology.local_rank, topology.node, topology.nodes
            sizes = Sizes(
                hidden_dim=hidden_dim,
                max_num_of_tokens_per_rank=max_num_of_tokens_per_rank,
                num_local_experts=num_local_experts,
                use_fp8=use_fp8,
            )
            blocks = {
                "dispatch": num_sms_dispatch_api,
                "combine": num_sms_combine_api,
                "preprocessing": num_sms_preprocessing_api,
                "permute": num_blocks_permute,
                "unpermute": num_blocks_unpermute,
            }
            self.configurer = Configurer(self.release, topology, sizes, blocks)
            entry.same = {_DOMAIN: domain, "num_local_experts": num_local_experts}
        self.runtime = Runtime(
            self.release,
            self._exchange,
            topology,
            replace(self.configurer.buffer_config),
            use_shared_buffer=use_shared_buffer,
            custom_allgather=enable_custom_allgather,
        )

    def empty_jit_cache(self) -> None:
        """Do nothing, because the emulation compiles no kernels."""

    def update_template_config(
        self,
        hidden_dim: int | None = None,
        num_of_tokens_per_rank: int | None = None,
        num_local_experts: int | None = None,
        pad_multiple: int | None = None,
        use_fp8: bool | None = None,
        fuse_permute_dispatch: bool = False,
        **kwargs: Any,
    ) -> HybridEpConfigInstance:
        """Make the configuration of one call, and set ``kwargs`` on it. Grow the buffer if it is too small. Collective.

        Raises:
            AttributeError: A configuration has no attribute of a name in ``kwargs``.
            NotImplementedError: ``kwargs`` turn device-side sync off, so that kernels would not wait for each other.
            AssertionError: The kernels do not support these sizes.
            EmulatedHang: Some ranks grow their buffer and other ranks do not.
        """
        with self._exchange.entrance("HybridEPBuffer.update_template_config"):
            require_device_sync(kwargs)
            config = self.configurer.get_default_config(fuse_permute_dispatch)
            if hidden_dim is not None:
                config.hidden_dim = hidden_dim
            if num_of_tokens_per_rank is not None:
                self._require_rows(config, num_of_tokens_per_rank + -num_of_tokens_per_rank % 16)
            if num_local_experts is not None:
                config.num_of_experts_per_rank = num_local_experts
            if pad_multiple is not None and pad_multiple > 0:
                config.pad_multiple = pad_multiple
            if use_fp8 is not None:
                config.token_data_type = TokenDataType.of(use_fp8)
            for name, value in kwargs.items():
                setattr(config, name, value)
            self.configurer.adjust_template(config, fuse_permute_dispatch)
            valid = config.is_valid(fuse_permute_dispatch) and capacity_is_valid(self.release, config)
            assert valid, "The config is not valid."
        self.runtime.update_buffer(config)
        if self.release.ragged:
            config.buffer_generation = self.runtime.buffer_generation
        return config

    def _require_rows(self, config: HybridEpConfigInstance, rows: int) -> None:
        buffer = self.configurer.buffer_config
        buffer.max_num_of_tokens_per_rank = max(rows, buffer.max_num_of_tokens_per_rank)
        config.max_num_of_tokens_per_rank = buffer.max_num_of_tokens_per_rank

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
        num_of_tokens_per_rank: int | None = None,
    ) -> tuple[Tensor, Tensor | None, Tensor | None, tuple[Any, ...]]:
        """Send rows to the ranks of their experts.

        Returns:
            The rows that this rank receives, (n, H), by source rank and token; their probs (n, experts of the node) or
            None; their scales or None; the handle.
        """
        call = Call(
            hidden=hidden,
            scaling_factor=scaling_factor,
            topk_idx=topk_idx,
            topk_weights=topk_weights,
            num_of_experts=num_of_experts,
            probs=probs,
            routing_map=routing_map,
            handle=handle,
            permute=False,
            num_of_tokens_per_rank=num_of_tokens_per_rank,
        )
        names = self.release.handle_fields(permute=False)
        kept, probs = self._handle_of(call, names)
        rows = self.runtime.dispatch(kept, Rows(tokens=hidden, probs=probs, scales=scaling_factor))
        return rows.tokens, rows.probs, _scales(kept, rows), kept.packed(names)

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
        num_of_tokens_per_rank: int | None = None,
        handle: tuple[Any, ...] | None = None,
        non_blocking: bool = False,
        fuse_permute_dispatch: bool = False,
        num_dispatched_tokens: int | None = None,
        use_host_meta: bool | None = None,
    ) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None, tuple[Any, ...]]:
        """Send rows to the ranks of their experts, and order the received rows by expert.

        Returns:
            The expert rows (R, H); their probs (R,) or None; their scales or None; the number of rows of each expert
            with padding, int64 (L,), or None if ``handle`` was given; the handle.
        """
        fused = fuse_permute_dispatch
        call = Call(
            hidden=hidden,
            scaling_factor=scaling_factor,
            topk_idx=topk_idx,
            topk_weights=topk_weights,
            num_of_experts=num_of_experts,
            probs=probs,
            routing_map=routing_map,
            handle=handle,
            permute=True,
            num_of_tokens_per_rank=num_of_tokens_per_rank,
            num_of_experts_per_rank=num_of_experts_per_rank,
            use_fp8=use_fp8,
            num_permuted_tokens=num_permuted_tokens,
            pad_multiple=pad_multiple,
            non_blocking=non_blocking_of(use_host_meta, non_blocking, num_dispatched_tokens),
            fused=fused,
        )
        names = self.release.handle_fields(permute=True, fused=fused)
        kept, probs = self._handle_of(call, names)
        sent = Rows(tokens=hidden, probs=probs, scales=scaling_factor)
        rows = self.runtime.dispatch_with_permute(kept, sent, pad_multiple=pad_multiple, fused=fused)
        return rows.tokens, rows.probs, _scales(kept, rows), kept.padded_tokens_per_expert, kept.packed(names)

    @allow_host_syncs()
    def combine(
        self, hidden: Tensor, probs: Tensor | None = None, handle: tuple[Any, ...] | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Send rows back to their source ranks, and add up the rows of each token there.

        Args:
            hidden: Rows (n, H) with elements of 2 bytes.
            probs: Probabilities (n, experts of the node), or None.
            handle: Handle of the dispatch.

        Returns:
            The sums of the rows, (T, H), and of the probabilities, (T, E) or None.
        """
        with self._exchange.entrance("HybridEPBuffer.combine (arguments)"):
            assert handle is not None, "The handle is necessary for combine."
            kept = self._kept(self.release.handle_fields(permute=False), handle)
        combined = self.runtime.combine(kept, Rows(tokens=hidden, probs=probs))
        return combined.tokens, combined.probs

    @allow_host_syncs()
    def combine_with_unpermute(
        self,
        *,
        hidden: Tensor,
        probs: Tensor | None = None,
        handle: tuple[Any, ...] | None = None,
        pad_multiple: int | None = None,
        fuse_unpermute_combine: bool = False,
        num_dispatched_tokens: int | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Add up the bfloat16 expert rows (R, H) and probs (R,) of each token, over experts and then over ranks.

        ``pad_multiple`` has no effect, because padding is never read.

        Returns:
            The sums of the rows, (T, H), and of the probabilities, (T, E) or None.
        """
        if num_dispatched_tokens is not None:
            warn_deprecated("num_dispatched_tokens")
        names = self.release.handle_fields(permute=True, fused=fuse_unpermute_combine)
        with self._exchange.entrance("HybridEPBuffer.combine_with_unpermute (arguments)"):
            assert handle is not None, "The handle is necessary in the combine pass."
            kept = self._kept(names, handle)
        rows = Rows(tokens=hidden, probs=probs)
        combined = self.runtime.combine_with_unpermute(kept, rows, fused=fuse_unpermute_combine)
        return combined.tokens, combined.probs

    def _kept(self, names: tuple[str, ...], handle: tuple[Any, ...]) -> Handle:
        kept = handle_of(names, handle)
        now = self.runtime.buffer_generation
        if self.release.ragged and kept.config.buffer_generation != now:
            raise RuntimeError(
                f"This handle was created against buffer generation {kept.config.buffer_generation}, but the buffers "
                f"have since been reallocated (current generation {now}). Buffer reallocation invalidates cached "
                "handles; redo the dispatch without a handle."
            )
        return kept

    def _handle_of(self, call: Call, names: tuple[str, ...]) -> tuple[Handle, Tensor | None]:
        """Make the handle of a new dispatch, or unpack the handle of a cached one. Return it and the probs to send."""
        where = "dispatch_with_permute" if call.permute else "dispatch"
        with self._exchange.entrance(f"HybridEPBuffer.{where} (arguments)") as entry:
            entry.same = {"handle": "cached" if call.handle is not None else "none"}
            _, hidden_dim = call.hidden.shape
            routing = self._routing(call)
            if call.permute and call.non_blocking:
                check_non_blocking(call)
            if call.handle is not None:
                return self._cached(call, call.handle, names), routing.probs
            num_rows = rows_per_rank(call, routing, ragged=self.release.ragged)
        config = self.update_template_config(
            hidden_dim=hidden_dim,
            num_of_tokens_per_rank=num_rows,
            num_local_experts=call.num_of_experts_per_rank,
            pad_multiple=call.pad_multiple,
            use_fp8=call.use_fp8,
            fuse_permute_dispatch=call.fused,
            **({"topk": routing.topk} if self.release.ragged else {}),
        )
        assert routing.rows is not None
        request = Request(
            config=config,
            routing=padded(routing, num_rows) if self.release.ragged else routing.rows,
            num_of_tokens_per_rank=num_rows,
            num_of_valid_tokens=call.num_rows if self.release.ragged else -1,
            num_permuted_tokens=call.num_permuted_tokens,
            pad_multiple=call.pad_multiple,
            enable_permute=call.permute,
            fused=call.fused,
            non_blocking=call.non_blocking,
        )
        return self.runtime.metadata_preprocessing(request), routing.probs

    def _routing(self, call: Call) -> Routing:
        if not self.release.ragged:
            return routing_of(call)
        per_rank = call.num_of_experts_per_rank
        return ragged_routing_of(
            call,
            experts_per_rank=self.configurer.buffer_config.num_of_experts_per_rank if per_rank is None else per_rank,
            ranks_per_node=self.num_of_hybrid_ep_ranks_per_nvlink_domain,
            nodes=self.num_of_nodes,
        )

    def _cached(self, call: Call, handle: tuple[Any, ...], names: tuple[str, ...]) -> Handle:
        kept = self._kept(names, handle)
        if not call.permute:
            return kept
        try:  # pybind11 accepts any object with __index__ as an int64_t, even an integer tensor with one element
            kept.num_permuted_tokens = operator.index(call.num_permuted_tokens)  # type: ignore[arg-type]
        except TypeError as error:
            raise TypeError(
                "(): incompatible function arguments: HandleImpl.num_permuted_tokens takes an int, got "
                f"{call.num_permuted_tokens!r}."
            ) from error
        if kept.valid_tokens != call.num_rows:
            warnings.warn("This handle could be invalid.", stacklevel=5)
        return kept


def _scales(handle: Handle, rows: Rows) -> Tensor | None:
    return rows.scales if handle.config.token_data_type is TokenDataType.UINT8 else None
