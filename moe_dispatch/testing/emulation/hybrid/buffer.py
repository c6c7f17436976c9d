"""``HybridEPBuffer`` from 34152ae on, but for the signatures that differ: those are the releases' own, in hybrid.py."""

from __future__ import annotations

import operator
import os
import warnings
from dataclasses import replace
from typing import Any, ClassVar

import torch.distributed as dist
from torch import Tensor

from moe_dispatch.testing.emulation.exchange import Exchange
from moe_dispatch.testing.emulation.hybrid.call import (
    Call,
    check_non_blocking,
    require_device_sync,
    slots_of,
    warn_deprecated,
)
from moe_dispatch.testing.emulation.hybrid.config import (
    Configurer,
    HybridEpConfigInstance,
    TokenDataType,
    capacity_is_valid,
)
from moe_dispatch.testing.emulation.hybrid.handle import Handle, unpacked
from moe_dispatch.testing.emulation.hybrid.maps import Place
from moe_dispatch.testing.emulation.hybrid.preprocess import Request
from moe_dispatch.testing.emulation.hybrid.release import HybridRelease
from moe_dispatch.testing.emulation.hybrid.routing import Routing, padded, ragged_routing_of, routing_of
from moe_dispatch.testing.emulation.hybrid.rows import Rows
from moe_dispatch.testing.emulation.hybrid.runtime import Runtime
from moe_dispatch.testing.host_syncs import allow_host_syncs

_DOMAIN = "NUM_OF_HYBRID_EP_RANKS_PER_NVLINK_DOMAIN"


class HybridBuffer:
    """What all signatures share. Attributes that drivers read have the real names.

    A group of None is one rank. The ranks of an NVLink domain are all ranks, or as many as the environment variable
    NUM_OF_HYBRID_EP_RANKS_PER_NVLINK_DOMAIN says, which stands for what the real one detects. Number of SMs and of
    blocks, kept kernels and shared buffers change no result.
    """

    release: ClassVar[HybridRelease]

    def _open(
        self,
        group: dist.ProcessGroup | None,
        sizes: dict[str, int],
        *,
        use_fp8: bool,
        blocks: dict[str, int | None],
        use_shared_buffer: bool,
        custom_allgather: bool,
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
            self.local_rank, self.node_rank = self.rank % domain, self.rank // domain
            self.num_of_nodes = self.group_size // domain
            self.configurer = Configurer(
                self.release,
                num_of_ranks_per_node=domain,
                num_of_nodes=self.num_of_nodes,
                use_fp8=use_fp8,
                blocks=blocks,
                **sizes,
            )
            entry.same = {_DOMAIN: domain, "num_local_experts": sizes["num_local_experts"]}
        self.runtime = Runtime(
            self.release,
            self._exchange,
            Place(rank=self.rank, ranks_per_node=domain, nodes=self.num_of_nodes),
            replace(self.configurer.buffer_config),
            use_shared_buffer=use_shared_buffer,
            custom_allgather=custom_allgather,
        )

    def empty_jit_cache(self) -> None:
        """The emulation compiles nothing, so there is nothing to remove."""

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
        """The configuration of one call, with ``kwargs`` set on it; the buffer grows to it. Collective.

        Raises:
            AttributeError: a name in ``kwargs`` that a configuration does not have.
            NotImplementedError: kernels that do not wait for each other.
            AssertionError: sizes that the kernels cannot have.
            EmulatedHang: some ranks grow their buffer and others do not.
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
                config.token_data_type = TokenDataType.UINT8 if use_fp8 else TokenDataType.UINT16
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
    def combine(
        self, hidden: Tensor, probs: Tensor | None = None, handle: tuple[Any, ...] | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Sum over ranks: hidden (n, H) of 2 bytes, probs float32 (n, experts of the node); returns (T, H), (T, E)."""
        with self._exchange.entrance("HybridEPBuffer.combine (arguments)"):
            assert handle is not None, "The handle is necessary for combine."
            kept = self._kept(self.release.dispatch_handle, handle)
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
        """Sum over experts and ranks: hidden bfloat16 (R, H), probs float32 (R,); returns (T, H) and (T, E) or None.

        ``pad_multiple`` has no effect: padding is never read.
        """
        if num_dispatched_tokens is not None:
            warn_deprecated("num_dispatched_tokens")
        names = self.release.fused_handle if fuse_unpermute_combine else self.release.permute_handle
        with self._exchange.entrance("HybridEPBuffer.combine_with_unpermute (arguments)"):
            assert handle is not None, "The handle is necessary in the combine pass."
            kept = self._kept(names, handle)
        rows = Rows(tokens=hidden, probs=probs)
        combined = self.runtime.combine_with_unpermute(kept, rows, fused=fuse_unpermute_combine)
        return combined.tokens, combined.probs

    def _kept(self, names: tuple[str, ...], handle: tuple[Any, ...]) -> Handle:
        kept = unpacked(names, handle)
        now = self.runtime.buffer_generation
        if self.release.ragged and kept.config.buffer_generation != now:
            raise RuntimeError(
                f"This handle was created against buffer generation {kept.config.buffer_generation}, but the buffers "
                f"have since been reallocated (current generation {now}). Buffer reallocation invalidates cached "
                "handles; redo the dispatch without a handle."
            )
        return kept

    def _dispatch(self, call: Call) -> tuple[Tensor, Tensor | None, Tensor | None, tuple[Any, ...]]:
        names = self.release.dispatch_handle
        handle, probs = self._handle_of(call, names)
        sent = Rows(tokens=call.hidden, probs=probs, scales=call.scaling_factor)
        rows = self.runtime.dispatch(handle, sent)
        return rows.tokens, rows.probs, self._scales(handle, rows), handle.packed(names)

    def _dispatch_with_permute(
        self, call: Call
    ) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None, tuple[Any, ...]]:
        names = self.release.fused_handle if call.fused else self.release.permute_handle
        handle, probs = self._handle_of(call, names)
        sent = Rows(tokens=call.hidden, probs=probs, scales=call.scaling_factor)
        rows = self.runtime.dispatch_with_permute(handle, sent, pad_multiple=call.pad_multiple, fused=call.fused)
        counts = handle.padded_tokens_per_expert
        return rows.tokens, rows.probs, self._scales(handle, rows), counts, handle.packed(names)

    def _scales(self, handle: Handle, rows: Rows) -> Tensor | None:
        return rows.scales if handle.config.token_data_type is TokenDataType.UINT8 else None

    def _handle_of(self, call: Call, names: tuple[str, ...]) -> tuple[Handle, Tensor | None]:
        """The handle of a new or a cached dispatch, and the probabilities to send."""
        where = "dispatch_with_permute" if call.permute else "dispatch"
        with self._exchange.entrance(f"HybridEPBuffer.{where} (arguments)") as entry:
            entry.same = {"handle": "cached" if call.handle is not None else "none"}
            _, hidden_dim = call.hidden.shape
            routing = self._routing(call)
            if call.permute and call.non_blocking:
                check_non_blocking(call)
            if call.handle is not None:
                return self._cached(call, names), routing.probs
            slots = slots_of(call, routing, ragged=self.release.ragged)
        config = self.update_template_config(
            hidden_dim=hidden_dim,
            num_of_tokens_per_rank=slots,
            num_local_experts=call.num_of_experts_per_rank,
            pad_multiple=call.pad_multiple,
            use_fp8=call.use_fp8,
            fuse_permute_dispatch=call.fused,
            **({"topk": routing.topk} if self.release.ragged else {}),
        )
        return self.runtime.metadata_preprocessing(self._request(call, config, routing, slots)), routing.probs

    def _request(self, call: Call, config: HybridEpConfigInstance, routing: Routing, slots: int) -> Request:
        assert routing.rows is not None
        return Request(
            config=config,
            routing=padded(routing, slots) if self.release.ragged else routing.rows,
            num_of_tokens_per_rank=slots,
            num_of_valid_tokens=call.hidden.shape[0] if self.release.ragged else -1,
            num_permuted_tokens=call.num_permuted_tokens,
            pad_multiple=call.pad_multiple,
            enable_permute=call.permute,
            fused=call.fused,
            non_blocking=call.non_blocking,
        )

    def _routing(self, call: Call) -> Routing:
        rows = call.hidden.shape[0]
        if not self.release.ragged:
            return routing_of(call.given, rows, experts_always=not call.permute)
        per_rank = call.num_of_experts_per_rank
        return ragged_routing_of(
            call.given,
            rows,
            experts_per_rank=self.configurer.buffer_config.num_of_experts_per_rank if per_rank is None else per_rank,
            ranks_per_node=self.num_of_hybrid_ep_ranks_per_nvlink_domain,
            nodes=self.num_of_nodes,
        )

    def _cached(self, call: Call, names: tuple[str, ...]) -> Handle:
        kept = self._kept(names, call.handle or ())
        if not call.permute:
            return kept
        try:  # an int64_t of pybind takes what has __index__, integer tensors of one element too
            kept.num_permuted_tokens = operator.index(call.num_permuted_tokens)  # type: ignore[arg-type]
        except TypeError as error:
            raise TypeError(
                "(): incompatible function arguments: HandleImpl.num_permuted_tokens takes an int, got "
                f"{call.num_permuted_tokens!r}."
            ) from error
        if kept.valid_tokens != call.hidden.shape[0]:
            warnings.warn("This handle could be invalid.", stacklevel=5)
        return kept
