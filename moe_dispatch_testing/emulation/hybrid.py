"""``HybridEPBuffer`` of DeepEP's branch hybrid-ep, release 94a9f8f and later.

The signatures come from the newest release, pull request 746. ``hybrid_ep_buffer`` makes the class of a release.
"""

from __future__ import annotations

import operator
import os
import warnings
from collections import defaultdict
from dataclasses import dataclass, replace
from enum import Enum
from functools import cache
from types import SimpleNamespace
from typing import Any, ClassVar, final

import torch
import torch.distributed as dist
from torch import Tensor

from moe_dispatch_testing.emulation.arguments import unpacked
from moe_dispatch_testing.emulation.exchange import RankExchange, require_one_dispatch
from moe_dispatch_testing.emulation.hybrid_rows import (
    HybridPath,
    HybridRows,
    indices_to_map,
    scattered,
    unread_maps,
)
from moe_dispatch_testing.emulation.memory import grown, uninitialised
from moe_dispatch_testing.emulation.refusals import EmulatedAbort, EmulatedHang, require, require_cpu
from moe_dispatch_testing.emulation.signatures import follow_release, recorded
from moe_dispatch_testing.host_syncs import allow_host_syncs

_DOMAIN = "NUM_OF_HYBRID_EP_RANKS_PER_NVLINK_DOMAIN"
_CHUNK = 64  # rows of a chunk, if NUM_OF_TOKENS_PER_CHUNK_{DISPATCH,COMBINE,PREPROCESSING}_API are not set
_RAGGED = ("hybridep-744", "hybridep-746")
# Keys of compiled kernels, by the folder that the real library would keep them in. It has a folder for each process;
# here ranks may be threads, so each rank has its own.
_kernels_in: defaultdict[tuple[str, str, int, int], set[tuple[object, ...]]] = defaultdict(set)


@final
class TokenDataType(Enum):
    """The element type in which tokens are sent. The value is its size in bytes."""

    UINT16 = 2
    UINT8 = 1


@final
@dataclass(kw_only=True)
class HybridEpConfigInstance:
    """The numbers that the kernels of one call are compiled for. Every handle holds such an object.

    It may get more attributes, which are settings of the kernels without an effect on results. ``route`` belongs to the
    emulation: it stands for the maps of the handle, which stay uninitialised.
    """

    hidden_dim: int
    max_num_of_tokens_per_rank: int
    num_of_experts_per_rank: int
    num_of_ranks_per_node: int
    num_of_nodes: int
    token_data_type: TokenDataType
    num_of_tokens_per_chunk_preprocessing_api: int
    num_of_tokens_per_chunk_dispatch_api: int
    num_of_tokens_per_chunk_combine_api: int
    pad_multiple: int = 0
    buffer_generation: int = -1
    num_of_valid_tokens: int = 0
    kernel_mode: tuple[bool, bool] = (False, False)  # fused, non-blocking
    route: HybridPath | None = None

    @property
    def experts_per_node(self) -> int:
        return self.num_of_experts_per_rank * self.num_of_ranks_per_node

    def sizes_are_valid(self) -> bool:
        """Return whether TMA can copy rows and maps of these sizes (94a9f8f config.cuh:86-93 and 163-170)."""
        hidden_multiple = 512 if self.token_data_type is TokenDataType.UINT8 else 16
        chunk_entries = self.num_of_tokens_per_chunk_dispatch_api * self.num_of_ranks_per_node
        return self.hidden_dim % hidden_multiple == 0 and self.experts_per_node % 4 == 0 and chunk_entries % 4 == 0


class _HybridBuffer:
    """Emulates dispatch and combine of HybridEP.

    Attributes that drivers read have the names of the real class. ``group=None`` stands for a group of one rank.

    The real library detects the NVLink domain from the hardware. Here a domain holds all ranks of the group, unless the
    environment variable NUM_OF_HYBRID_EP_RANKS_PER_NVLINK_DOMAIN gives another number of ranks. The numbers of SMs and
    blocks, ``use_shared_buffer`` and ``enable_custom_allgather`` do not change results.

    Nothing is compiled, but ``compilations`` counts how often the real library would have run nvcc: once for each
    kernel of a buffer that is not in the folder from which ``load_cached_kernels`` makes it read.
    """

    release: ClassVar[str]
    compilations: ClassVar[list[tuple[object, ...]]]

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
        self._exchange = RankExchange(group)
        self.rank, self.group_size = self._exchange.rank, self._exchange.size
        domain = int(os.environ.get(_DOMAIN, self.group_size))
        self.num_of_hybrid_ep_ranks_per_nvlink_domain = domain
        with self._exchange.entrance("HybridEPBuffer.__init__") as entry:
            assert self.group_size % domain == 0, (
                f"The number of ranks {self.group_size} should be divisible by the number of ranks per node {domain} "
                f"at rank={self.rank}."
            )
            require(domain <= 72, f"a node must have at most 72 ranks, got {domain}", EmulatedAbort)
            self.num_of_nodes = self.group_size // domain
            self.node_rank, self.local_rank = divmod(self.rank, domain)
            buffer = HybridEpConfigInstance(
                hidden_dim=hidden_dim,
                max_num_of_tokens_per_rank=max(max_num_of_tokens_per_rank, 512),
                num_of_experts_per_rank=num_local_experts,
                num_of_ranks_per_node=domain,
                num_of_nodes=self.num_of_nodes,
                token_data_type=TokenDataType.UINT8 if use_fp8 else TokenDataType.UINT16,
                **_chunks(),
            )
            self._pad_capacity(buffer)
            require(buffer.sizes_are_valid(), "The buffer config is not valid")
            self._check_queues(buffer)
            rows = buffer.max_num_of_tokens_per_rank * self.group_size
            require(rows % 4 == 0, f"the rows of all ranks must be a multiple of 4, got {rows}", EmulatedAbort)
            entry.same = {_DOMAIN: domain, "num_local_experts": num_local_experts}
        self.configurer = SimpleNamespace(buffer_config=buffer)
        self._generation = 0
        self._folder = _kernels_in[self.release, os.environ.get("HYBRID_EP_CACHE_DIR", ""), os.getpid(), self.rank]
        self._kernels = set(self._folder) if load_cached_kernels else set()

    def _compile(self, kernel: str, config: HybridEpConfigInstance, *numbers: object) -> None:
        """Count a compilation unless the buffer knows the kernel (jit/compiler.cu of 94a9f8f)."""
        sizes = (config.hidden_dim, config.max_num_of_tokens_per_rank, config.num_of_experts_per_rank)
        key = (kernel, *sizes, config.num_of_ranks_per_node, config.num_of_nodes, *config.kernel_mode, *numbers)
        if key not in self._kernels:
            self._kernels.add(key)
            self._folder.add(key)
            self.compilations.append(key)

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
            AssertionError: The kernels do not support these sizes.
            EmulatedHang: Some ranks grow their buffer and other ranks do not.
        """
        old: HybridEpConfigInstance = self.configurer.buffer_config
        with self._exchange.entrance("HybridEPBuffer.update_template_config") as entry:
            rows = 0 if num_of_tokens_per_rank is None else num_of_tokens_per_rank
            sizes = {"hidden_dim": hidden_dim, "num_of_experts_per_rank": num_local_experts}
            given: dict[str, Any] = {name: number for name, number in sizes.items() if number is not None}
            config = replace(
                old,
                max_num_of_tokens_per_rank=max(rows + -rows % 16, old.max_num_of_tokens_per_rank),
                pad_multiple=max(pad_multiple or 0, 0),
                **given,
                **_chunks(),
            )
            if use_fp8 is not None:
                config.token_data_type = TokenDataType.UINT8 if use_fp8 else TokenDataType.UINT16
            for name, value in kwargs.items():
                setattr(config, name, value)
            self._pad_capacity(config)
            is_fusible = len(set(_chunks().values())) == 1 or not fuse_permute_dispatch
            assert config.sizes_are_valid(), "The config is not valid."
            assert is_fusible, "The config is not valid: fused kernels need equal chunks."
            self._check_queues(config)
            wider: dict[str, Any] = {
                name: max(getattr(old, name), getattr(config, name))
                for name in ("max_num_of_tokens_per_rank", "hidden_dim", "num_of_experts_per_rank")
            }
            # Raising a buffer gathers memory handles, while the other ranks would gather the routing map.
            entry.told = wider["max_num_of_tokens_per_rank"] > old.max_num_of_tokens_per_rank or (
                wider["hidden_dim"],
                wider["num_of_experts_per_rank"],
            ) != (old.hidden_dim, old.num_of_experts_per_rank)
        growing = [rank for rank, grows in enumerate(entry.everyone) if grows]
        rule = f"all ranks must grow their buffer in the same call, got growth only on ranks {growing}"
        require(len(growing) in (0, self.group_size), f"{rule} of {self.group_size}", EmulatedHang)
        self._generation += bool(growing)
        self.configurer.buffer_config = replace(old, **wider, **_chunks())
        config.buffer_generation = self._generation
        return config

    def _pad_capacity(self, config: HybridEpConfigInstance) -> None:
        config.max_num_of_tokens_per_rank += (
            -config.max_num_of_tokens_per_rank % config.num_of_tokens_per_chunk_combine_api
        )

    def _check_queues(self, config: HybridEpConfigInstance) -> None:
        """Refuse more rows than a queue between nodes holds. A dispatch queues 3 requests per row, and one more."""
        requests = 3 * config.max_num_of_tokens_per_rank + 1
        rule = f"3 * max_num_of_tokens_per_rank + 1 must be below 65536 across nodes, got {requests}"
        require(self.num_of_nodes == 1 or requests < 65536, rule)

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
        with self._exchange.entrance("HybridEPBuffer.dispatch (arguments)") as entry:
            map_TE, probs = self._routing(hidden, topk_idx, topk_weights, num_of_experts, routing_map, probs)
            entry.same = {"handle": "none" if handle is None else "cached"}
        names = self._fields(permute=False)
        if handle is None:
            config = self._preprocess(hidden, map_TE, num_of_tokens_per_rank)
            handle = self._packed(names, config, permutes=False)
        else:
            config = self._kept(names, handle)
        rows = self._sent(config, HybridRows(tokens=hidden, probs=probs, scales=scaling_factor))
        return rows.tokens, rows.probs, rows.scales, handle

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
        for name, value in (("num_dispatched_tokens", num_dispatched_tokens), ("use_host_meta", use_host_meta)):
            if value is not None:
                warnings.warn(f"The {name} is deprecated, it will be removed in the future.", stacklevel=3)
        non_blocking = non_blocking if use_host_meta is None else not use_host_meta
        fused, room, pad = fuse_permute_dispatch, num_permuted_tokens, pad_multiple or 0
        with self._exchange.entrance("HybridEPBuffer.dispatch_with_permute (arguments)") as entry:
            map_TE, probs = self._routing(hidden, topk_idx, topk_weights, num_of_experts, routing_map, probs)
            if non_blocking:
                needed = "The num_permuted_tokens is required for non-blocking mode."
                assert room is not None, needed
                assert room >= 0, needed
                assert pad <= 0 or room % pad == 0, (
                    f"num_permuted_tokens ({room}) must be a multiple of pad_multiple ({pad}) in non-blocking mode."
                )
            if handle is not None:  # pybind11 accepts any object with __index__, even an integer tensor of one element
                assert room is not None, "num_permuted_tokens takes an int with a handle, got None"
                room = operator.index(room)
            entry.same = {"handle": "none" if handle is None else "cached", "fuse_permute_dispatch": fused}
        names, counts = self._fields(permute=True, fused=fused), None
        if handle is None:
            # Only non-blocking calls drop rows (94a9f8f jit/compiler.cu:132).
            limit = room if non_blocking and room is not None and room >= 0 else None
            config = self._preprocess(
                hidden,
                map_TE,
                num_of_tokens_per_rank,
                limit=limit,
                num_local_experts=num_of_experts_per_rank,
                pad_multiple=pad_multiple,
                use_fp8=use_fp8,
                fuse_permute_dispatch=fused,
                kernel_mode=(fused, non_blocking),
            )
            assert config.route is not None
            counts = config.route.padded_tokens_per_expert(pad)
            room = int(counts.sum()) if room is None or room < 0 else room
            # Other kernels leave the flag as it is. Ragged releases clear it before.
            flagged = limit is not None or self.release in _RAGGED
            handle = self._packed(names, config, permutes=True, flagged=flagged)
        else:
            config = self._kept(names, handle)
        assert config.route is not None
        assert room is not None
        dense = self._sent(config, HybridRows(tokens=hidden, probs=probs, scales=scaling_factor))
        rows = config.route.permute(dense, room, config.pad_multiple if fused else pad)
        return rows.tokens, rows.probs, rows.scales, counts, handle

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
        assert handle is not None, "The handle is necessary for combine."
        return self._combined("combine", self._fields(permute=False), handle, HybridRows(tokens=hidden, probs=probs))

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
        assert handle is not None, "The handle is necessary in the combine pass."
        names = self._fields(permute=True, fused=fuse_unpermute_combine)
        rows = HybridRows(tokens=hidden, probs=probs)
        return self._combined(
            "combine_with_unpermute", names, handle, rows, unpermutes=True, fused=fuse_unpermute_combine
        )

    def _fields(self, *, permute: bool, fused: bool = False) -> tuple[str, ...]:
        """Return the names of the items of a handle, which is a tuple that a dispatch returns for its combine."""
        method = "dispatch_with_permute" if permute else "dispatch"
        return tuple(recorded(self.release)["handles"][f"{method}(fuse_permute_dispatch=True)" if fused else method])

    def _routing(
        self,
        hidden: Tensor,
        ids: Tensor | None,
        weights: Tensor | None,
        num_experts: int | None,
        routing_map: Tensor | None,
        probs: Tensor | None,
    ) -> tuple[Tensor | None, Tensor | None]:
        """Return the map (T, E) and the probabilities (T, E) of a call. Before ragged releases, ids must be experts."""
        if routing_map is not None:
            assert routing_map.dtype == torch.bool
            return routing_map, probs
        if ids is None:
            return None, probs
        assert num_experts is not None, "The number of experts should be provided on index-based routing."
        if self.release not in _RAGGED:
            return indices_to_map(ids, weights, len(hidden), num_experts)
        routing_map, scattered_probs = scattered(ids, weights, len(hidden), num_experts)
        return routing_map, scattered_probs if probs is None else probs

    def _preprocess(
        self, hidden: Tensor, map_TE: Tensor | None, slots: int | None, *, limit: int | None = None, **sizes: Any
    ) -> HybridEpConfigInstance:
        """Make the configuration of a call, with the way of its rows. Collective.

        All ranks must send the same number of rows. In ragged releases, that is the number of slots: the largest number
        of rows of a rank, rounded up to a multiple of 16.
        """
        with self._exchange.entrance("HybridEPBuffer.preprocess (arguments)") as entry:
            require_cpu(hidden, map_TE)
            require(hidden.dim() == 2, f"hidden must be 2-D, got shape {tuple(hidden.shape)}")
            require(map_TE is not None, "a dispatch needs a routing_map, topk_idx or a handle")
            assert map_TE is not None
            rows = len(hidden)
            assert rows == len(map_TE), "The hidden and the routing_map should have the same row number."
            if self.release in _RAGGED:
                slots = rows if slots is None else int(slots)
                assert slots >= rows, f"num_of_tokens_per_rank ({slots}) must be >= the local token count ({rows})"
                slots = max(16, slots + -slots % 16)
            else:
                slots = rows
                require(rows > 0, "every rank must have at least one row, got 0", EmulatedAbort)
            entry.same = {"num_of_tokens_per_rank": slots}
        config = self.update_template_config(hidden_dim=hidden.shape[1], num_of_tokens_per_rank=slots, **sizes)
        with self._exchange.entrance("HybridEPBuffer.metadata_preprocessing"):
            experts = config.experts_per_node * self.num_of_nodes
            shape = f"the routing map must be contiguous with {experts} columns, got {tuple(map_TE.shape)}"
            require(map_TE.is_contiguous() and map_TE.shape[1] == experts, shape, EmulatedAbort)
            rule = f"a rank must have at most 1024 experts, got {config.num_of_experts_per_rank}"
            require(config.num_of_experts_per_rank <= 1024, rule, EmulatedAbort)
            load_bytes = slots % config.num_of_tokens_per_chunk_dispatch_api * config.num_of_ranks_per_node * 4
            rule = f"TMA 16B alignment error: the last chunk loads {load_bytes}B, which must be a multiple of 16B"
            require(load_bytes % 16 == 0, rule)
        padded = torch.zeros(slots, map_TE.shape[1], dtype=torch.bool)
        padded[:rows] = map_TE
        pad = config.pad_multiple
        self._compile("preprocess", config, pad, config.num_of_tokens_per_chunk_preprocessing_api)
        config.num_of_valid_tokens = rows
        config.route = HybridPath.of(
            self._exchange, config.num_of_ranks_per_node, padded, pad_multiple=pad, limit=limit
        )
        return config

    def _packed(
        self,
        names: tuple[str, ...],
        config: HybridEpConfigInstance,
        *,
        permutes: bool,
        flagged: bool = False,
    ) -> tuple[Any, ...]:
        """Make a handle. Maps that only kernels read are uninitialised."""
        route = config.route
        assert route is not None
        made = unread_maps(route)
        all_rows = route.exchange.size * len(route.in_rank_TP)
        made["local_expert_routing_map"] = (
            uninitialised((all_rows, route.local_RL.shape[1]), torch.bool)
            if permutes  # the scan of such a dispatch does not write the map of experts
            else grown(route.local_RL, all_rows)
        )
        made["num_dispatched_tokens_tensor"] = torch.tensor([route.num_received], dtype=torch.int32)
        made["tokens_per_expert"] = route.tokens_per_expert().to(torch.int32)
        made["num_of_tokens_per_rank"] = len(route.in_rank_TP)
        made["num_of_valid_tokens"] = config.num_of_valid_tokens
        flag = torch.tensor([route.overflowed], dtype=torch.int32)
        made["overflow_flag"] = flag if flagged else uninitialised((1,), torch.int32)
        made["config"] = config
        return tuple(made[name] for name in names)

    def _kept(self, names: tuple[str, ...], handle: tuple[Any, ...]) -> HybridEpConfigInstance:
        """Return the configuration in a handle.

        Raises:
            ValueError: It is the handle of another kind of dispatch.
            RuntimeError: In ragged releases, the buffer has grown since the dispatch.
        """
        items = unpacked(names, handle)
        config = items["config"]
        assert isinstance(config, HybridEpConfigInstance)
        made, now = config.buffer_generation, self._generation
        grew = f"this handle was created against buffer generation {made}, but the current generation is {now}"
        require(self.release not in _RAGGED or made == now, f"{grew}. Redo the dispatch without a handle")
        return config

    def _sent(self, config: HybridEpConfigInstance, rows: HybridRows) -> HybridRows:
        route = config.route
        assert route is not None
        hidden, kind = rows.tokens, config.token_data_type
        with self._exchange.entrance("HybridEPBuffer.dispatch") as entry:
            require_cpu(hidden, rows.probs, rows.scales)
            wanted, columns = config.num_of_valid_tokens, config.experts_per_node * self.num_of_nodes
            _check_matrix("hidden", hidden, (wanted, config.hidden_dim))
            element = f"hidden must have {kind.value} bytes an element ({kind.name}), got {hidden.dtype}"
            require(hidden.dtype.itemsize == kind.value, element, EmulatedAbort)
            if rows.probs is not None:
                _check_matrix("probs", rows.probs, (wanted, columns), torch.float32)
            if kind is TokenDataType.UINT8:
                require(rows.scales is not None, "float8 rows need a scaling_factor", EmulatedAbort)
                assert rows.scales is not None
                _check_matrix("scaling_factor", rows.scales, (wanted, config.hidden_dim // 128), torch.float32)
            _check_chunk(config.num_of_tokens_per_chunk_dispatch_api, self.num_of_nodes)
            entry.same = {"with_probs": rows.probs is not None}
            entry.told = route.told()
        require_one_dispatch("HybridEPBuffer.dispatch", entry.everyone)
        numbers = (config.pad_multiple, config.num_of_tokens_per_chunk_dispatch_api, rows.probs is not None)
        self._compile("dispatch", config, kind.value, *numbers)
        return route.send((rows if kind is TokenDataType.UINT8 else replace(rows, scales=None)).each(Tensor.detach))

    def _combined(
        self,
        verb: str,
        names: tuple[str, ...],
        handle: tuple[Any, ...],
        rows: HybridRows,
        *,
        unpermutes: bool = False,
        fused: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        with self._exchange.entrance(f"HybridEPBuffer.{verb}") as entry:
            config = self._kept(names, handle)
            route = config.route
            assert route is not None
            require_cpu(rows.tokens, rows.probs)
            hidden = rows.tokens
            is_bf16 = hidden.dtype == torch.bfloat16 if unpermutes else hidden.dtype.itemsize == 2
            require(is_bf16, f"hidden must be bfloat16, got {hidden.dtype}", EmulatedAbort)
            least = 0 if unpermutes else route.num_received
            _check_matrix("hidden", hidden, (least, config.hidden_dim))
            if rows.probs is not None:
                fits = rows.probs.dtype == torch.float32 and rows.probs.is_contiguous()
                require(fits, f"probs must be contiguous float32, got {rows.probs.dtype}", EmulatedAbort)
            _check_chunk(config.num_of_tokens_per_chunk_combine_api, self.num_of_nodes)
            dense = rows.each(Tensor.detach)
            dense = route.unpermute(dense) if unpermutes else dense.each(lambda values: values[: route.num_received])
            entry.same = {"fuse_unpermute_combine": fused}
            entry.told = [*route.told(), rows.probs is not None, fused and route.lost_a_token]
        require_one_dispatch(f"HybridEPBuffer.{verb}", [told[:2] for told in entry.everyone])
        rule = (
            "the fused combine waits for an expert row of every received row, but all expert rows of one were dropped. "
            "Leave fuse_unpermute_combine off, or raise num_permuted_tokens"
        )
        require(not any(told[3] for told in entry.everyone), rule, EmulatedHang)
        self._compile("combine", config, fused, config.num_of_tokens_per_chunk_combine_api, rows.probs is not None)
        if rows.probs is None and any(told[2] for told in entry.everyone):  # this rank sends stale memory
            stale = uninitialised((route.num_received, config.experts_per_node), torch.float32)
            dense = replace(dense, probs=stale)
        back, valid = route.bring_back(dense, own_slice=self.release in _RAGGED), config.num_of_valid_tokens
        return back.tokens[:valid], None if rows.probs is None or back.probs is None else back.probs[:valid]


def _chunks() -> dict[str, Any]:
    """Read the rows per chunk from the environment, at each use, as the real library does."""
    return {
        f"num_of_tokens_per_chunk_{api}_api": int(os.environ.get(f"NUM_OF_TOKENS_PER_CHUNK_{api.upper()}_API", _CHUNK))
        for api in ("preprocessing", "dispatch", "combine")
    }


def _check_matrix(name: str, tensor: Tensor, shape: tuple[int, int], dtype: torch.dtype | None = None) -> None:
    """Refuse another shape or dtype. More rows are allowed. The release checks only a part of this."""
    fits = tensor.dim() == 2 and len(tensor) >= shape[0] and tensor.shape[1] == shape[1] and tensor.is_contiguous()
    rule = f"{name} must be contiguous {shape}, got shape {tuple(tensor.shape)}"
    require(fits, rule, EmulatedAbort)
    require(dtype in (None, tensor.dtype), f"{name} must be {dtype}, got {tensor.dtype}", EmulatedAbort)


def _check_chunk(chunk: int, nodes: int) -> None:
    """Raise the error of a failed static_assert in a kernel. nvcc prints the text, and then fails (jit/compiler.cu)."""
    multiple = 32 if nodes > 1 else 16
    if chunk % multiple:
        raise RuntimeError(
            "Failed to compile the code, compile command: nvcc (emulated). nvcc printed: hybrid_ep_backend.cuh: error: "
            f'static assertion failed with "NUM_OF_TOKENS_PER_CHUNK must be multiple of {multiple}."'
        )


@cache
def hybrid_ep_buffer(release: str) -> type[Any]:
    """Return the class ``HybridEPBuffer`` of a release. Its methods take the recorded parameters."""
    own: dict[str, Any] = {"release": release, "compilations": [], "__doc__": _HybridBuffer.__doc__}
    return follow_release(release, type("HybridEPBuffer", (_HybridBuffer,), own))
