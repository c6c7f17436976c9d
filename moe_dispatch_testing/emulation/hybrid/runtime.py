"""``hybrid_ep_cpp.HybridEPBuffer`` of release 34152ae and later: growing buffers, maps, dispatch and combine."""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import final

import torch

from moe_dispatch_testing.emulation.exchange import Exchange
from moe_dispatch_testing.emulation.hybrid.checks import (
    c_assert,
    check_capacity,
    check_chunk,
    check_combine,
    check_dispatch,
    undefined_unless,
)
from moe_dispatch_testing.emulation.hybrid.config import BufferConfig, HybridEpConfigInstance
from moe_dispatch_testing.emulation.hybrid.handle import Handle
from moe_dispatch_testing.emulation.hybrid.maps import Topology
from moe_dispatch_testing.emulation.hybrid.preprocess import Request, preprocess
from moe_dispatch_testing.emulation.hybrid.release import HybridRelease
from moe_dispatch_testing.emulation.hybrid.rows import (
    Permutation,
    Rows,
    emptied,
    permutation_of_dense_map,
    permutation_of_row_ids,
    permute,
    require_inside,
    unpermute,
)
from moe_dispatch_testing.emulation.hybrid.wire import combine_rows, dispatch_rows
from moe_dispatch_testing.emulation.memory import uninitialised
from moe_dispatch_testing.emulation.refusals import EmulatedAbort, EmulatedHang


@final
class Runtime:
    """The buffers of one rank. Every method is collective and works outside autograd."""

    def __init__(
        self,
        release: HybridRelease,
        exchange: Exchange,
        topology: Topology,
        buffer_config: BufferConfig,
        *,
        use_shared_buffer: bool,
        custom_allgather: bool,
    ) -> None:
        self.buffer_config = buffer_config
        self.buffer_generation = 0
        self._release = release
        self._lines = release.lines
        self._exchange = exchange
        self._topology = topology
        self._shared = use_shared_buffer
        self._custom_allgather = custom_allgather
        with exchange.entrance("HybridEPBuffer.__init__"):
            rows = buffer_config.max_num_of_tokens_per_rank * exchange.size
            c_assert(rows % 4 == 0, f"max_num_of_tokens ({rows}) % 4 == 0", self._lines["buffer_rows"])
            undefined_unless(
                topology.ranks_per_node <= 72, f"ranks per node must be <= 72, got {topology.ranks_per_node}."
            )
            self._check_queues(buffer_config.max_num_of_tokens_per_rank)

    def _check_queues(self, rows: int) -> None:
        """Abort if the queues between nodes cannot hold this many rows.

        A release that does not limit the rows earlier aborts here, when it creates the queues.
        """
        if self._topology.nodes > 1 and 3 * rows + 1 >= 65536:
            raise EmulatedAbort(
                f"internode.cu:167: Assertion `tx_depth > 0 && tx_depth < 65536' failed: tx_depth is 3 * "
                f"max_num_of_tokens_per_rank + 1, got {3 * rows + 1}."
            )

    def update_buffer(self, config: HybridEpConfigInstance) -> None:
        """Grow the buffers to the sizes that ``config`` needs. Growing gathers memory handles, so it is collective.

        Raises:
            EmulatedHang: Some ranks grow and other ranks do not.
        """
        grown_config = self._grown(config)
        with self._exchange.entrance("HybridEPBuffer.update_buffer") as entry:
            self._check_queues(grown_config.max_num_of_tokens_per_rank)
            entry.told = grown_config != self.buffer_config
        growing = [rank for rank, grows in enumerate(entry.everyone) if grows]
        if growing and len(growing) < self._exchange.size:
            raise EmulatedHang(
                f"HybridEPBuffer.update_buffer ({self._lines['grow']}): all ranks must grow their buffer in the same "
                f"call, got growth only on ranks {growing} of {self._exchange.size}. These ranks gather memory handles "
                "while the other ranks gather the routing map. Give every rank the same capacity and the same row "
                "count."
            )
        if growing:
            self.buffer_generation += 1
            if self._topology.nodes > 1:
                warnings.warn(
                    "Reallocating HybridEP buffers in multi-node mode is very slow; adjust buffer_config to "
                    "pre-allocate sufficient capacity.",
                    stacklevel=2,
                )
        self.buffer_config = grown_config

    def _grown(self, config: HybridEpConfigInstance) -> BufferConfig:
        old = self.buffer_config
        larger = {
            name: max(getattr(old, name), getattr(config, name))
            for name in (
                "max_num_of_tokens_per_rank",
                "hidden_dim",
                "num_of_experts_per_rank",
                "num_of_ranks_per_node",
                "num_of_nodes",
                "num_of_blocks_preprocessing_api",
            )
        }
        keeps_type = self._shared or old.token_data_type.value >= config.token_data_type.value
        return replace(
            old,
            **larger,
            num_of_tokens_per_chunk_dispatch_api=config.num_of_tokens_per_chunk_dispatch_api,
            num_of_tokens_per_chunk_combine_api=config.num_of_tokens_per_chunk_combine_api,
            token_data_type=old.token_data_type if keeps_type else config.token_data_type,
        )

    def metadata_preprocessing(self, request: Request) -> Handle:
        return preprocess(
            self._release, self._exchange, self._topology, replace(request, custom_allgather=self._custom_allgather)
        )

    def dispatch(self, handle: Handle, rows: Rows) -> Rows:
        """Send rows, and return the received rows by source rank and token."""
        with self._exchange.entrance("HybridEPBuffer.dispatch") as entry:
            self._check_dispatch(handle, rows)
            entry.same = handle.agreed(with_probs=rows.probs is not None)
        return dispatch_rows(self._exchange, self._topology, handle, rows.detached())

    def dispatch_with_permute(self, handle: Handle, rows: Rows, *, pad_multiple: int | None, fused: bool) -> Rows:
        """Send rows, and return the expert rows. A row that holds neither a token nor padding is uninitialised."""
        with self._exchange.entrance("HybridEPBuffer.dispatch_with_permute") as entry:
            self._check_dispatch(handle, rows)
            self._check_blocks(handle.config.num_of_blocks_permute, fused=fused)
            permutation = self._permutation(handle, handle.config.pad_multiple if fused else pad_multiple or 0)
            if handle.num_permuted_tokens == 0 and not fused:  # the release launches no kernel
                permutation = emptied(permutation)
            require_inside(permutation, handle.num_permuted_tokens, "permute_kernel writes", with_padding=True)
            entry.same = handle.agreed(with_probs=rows.probs is not None) | {"fuse_permute_dispatch": fused}
        dense = dispatch_rows(self._exchange, self._topology, handle, rows.detached())
        return permute(dense, permutation, handle.num_permuted_tokens, first_column=self._first_column(handle))

    def _check_dispatch(self, handle: Handle, rows: Rows) -> None:
        given = {"hidden": rows.tokens, "probs": rows.probs, "scaling_factor": rows.scales}
        check_dispatch(handle.config, handle.valid_tokens, self._lines["dispatch"], given)
        chunk = handle.config.num_of_tokens_per_chunk_dispatch_api
        check_chunk(chunk, "hybrid_ep_backend.cuh (dispatch kernel)", nodes=self._topology.nodes)

    def _check_blocks(self, blocks: int, *, fused: bool) -> None:
        if blocks == 0 and fused:
            raise EmulatedHang(
                "HybridEPBuffer: the fused kernel must have blocks that permute, got 0. Its other blocks wait for "
                "them. Leave num_blocks_permute and num_blocks_unpermute at None."
            )
        c_assert(blocks > 0, "grid_size > 0", self._lines["unpermute"].partition(":")[0])

    def _permutation(self, handle: Handle, pad_multiple: int) -> Permutation:
        if handle.row_id_map is not None:
            return permutation_of_row_ids(handle.row_id_map, handle.num_dispatched, pad_multiple)
        assert handle.dense_to_expert_map is not None
        assert handle.tokens_per_expert is not None
        return permutation_of_dense_map(
            handle.dense_to_expert_map, handle.num_dispatched, handle.tokens_per_expert, pad_multiple
        )

    def _first_column(self, handle: Handle) -> int:
        return self._topology.local_rank * handle.config.num_of_experts_per_rank

    def combine(self, handle: Handle, rows: Rows) -> Rows:
        """Send rows back to their source ranks, and add them up there. Each row is a sum over one rank's experts."""
        columns = handle.config.experts_per_node
        with self._exchange.entrance("HybridEPBuffer.combine") as entry:
            self._check_combine(handle, rows)
            if rows.probs is not None and rows.probs.numel():
                c_assert(rows.probs.shape[1] == columns, f"probs.value().size(1) == {columns}", self._lines["combine"])
            entry.same = {"num_of_tokens_per_rank": handle.num_of_tokens_per_rank}
            entry.told = {"probs": rows.probs is not None}
        return self._combined(handle, rows, some_probs=any(one["probs"] for one in entry.everyone))

    def combine_with_unpermute(self, handle: Handle, rows: Rows, *, fused: bool) -> Rows:
        """Add up the expert rows of each token, over experts and then over ranks."""
        with self._exchange.entrance("HybridEPBuffer.combine_with_unpermute") as entry:
            self._check_combine(handle, rows)
            c_assert(
                rows.tokens.dtype == torch.bfloat16,
                "args.permuted_tokens.dtype() == torch::kBFloat16",
                self._lines["unpermute"],
            )
            self._check_blocks(handle.config.num_of_blocks_unpermute, fused=fused)
            permutation = self._permutation(handle, 0)
            require_inside(permutation, rows.tokens.shape[0], "unpermute_kernel reads", with_padding=False)
            expert = rows.detached()
            dense = unpermute(
                expert,
                permutation,
                first_column=self._first_column(handle),
                num_columns=handle.config.experts_per_node,
            )
            entry.same = {
                "num_of_tokens_per_rank": handle.num_of_tokens_per_rank,
                "fuse_unpermute_combine": fused,
            }
            entry.told = {"waits": fused and permutation.dropped_whole, "probs": rows.probs is not None}
        if any(one["waits"] for one in entry.everyone):
            raise EmulatedHang(
                "HybridEPBuffer.combine_with_unpermute: the fused kernel waits for an expert row of every received "
                "token, but all expert rows of one token were dropped. The kernel is not compiled for dropping "
                "(hybrid_ep.cu leaves non_blocking off). Leave fuse_unpermute_combine off, or raise "
                "num_permuted_tokens."
            )
        return self._combined(handle, dense, some_probs=any(one["probs"] for one in entry.everyone))

    def _combined(self, handle: Handle, rows: Rows, *, some_probs: bool) -> Rows:
        """Combine rows, and probabilities if some rank passed them. The other ranks then send stale memory."""
        given = rows.detached()
        if some_probs and rows.probs is None:
            given = replace(
                given, probs=uninitialised((len(rows.tokens), handle.config.experts_per_node), torch.float32)
            )
        combined = combine_rows(self._exchange, self._topology, handle, given, own_slice=self._release.ragged)
        valid = handle.valid_tokens
        probs = None if rows.probs is None or combined.probs is None else combined.probs[:valid]
        return Rows(tokens=combined.tokens[:valid], probs=probs)

    def _check_combine(self, handle: Handle, rows: Rows) -> None:
        check_combine(handle.config, rows.tokens, rows.probs, self._lines["combine"])
        chunk = handle.config.num_of_tokens_per_chunk_combine_api
        check_chunk(chunk, "hybrid_ep_backend.cuh (combine kernel)", nodes=self._topology.nodes)
        check_capacity(handle.config, self._lines["static_assert"])
