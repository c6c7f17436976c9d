"""``hybrid_ep_cpp.HybridEPBuffer`` of releases from 34152ae on: buffers that grow, maps, dispatch and combine."""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import final

import torch

from moe_dispatch.testing.emulation.exchange import Exchange
from moe_dispatch.testing.emulation.hybrid.checks import (
    c_assert,
    check_combine,
    check_dispatch,
    failed_compilation,
    undefined_unless,
)
from moe_dispatch.testing.emulation.hybrid.config import BufferConfig, HybridEpConfigInstance
from moe_dispatch.testing.emulation.hybrid.handle import Handle
from moe_dispatch.testing.emulation.hybrid.maps import Place
from moe_dispatch.testing.emulation.hybrid.preprocess import Request, preprocess
from moe_dispatch.testing.emulation.hybrid.release import HybridRelease
from moe_dispatch.testing.emulation.hybrid.rows import (
    Places,
    Rows,
    detached,
    nowhere,
    permute,
    places_of_dense_map,
    places_of_row_ids,
    require_inside,
    unpermute,
)
from moe_dispatch.testing.emulation.hybrid.wire import combine_rows, dispatch_rows
from moe_dispatch.testing.emulation.memory import uninitialised
from moe_dispatch.testing.emulation.refusals import EmulatedAbort, EmulatedHang


@final
class Runtime:
    """One rank's buffers. Every method is collective and works outside autograd."""

    def __init__(
        self,
        release: HybridRelease,
        exchange: Exchange,
        place: Place,
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
        self._place = place
        self._shared = use_shared_buffer
        self._custom_allgather = custom_allgather
        with exchange.entrance("HybridEPBuffer.__init__"):
            rows = buffer_config.max_num_of_tokens_per_rank * exchange.size
            c_assert(rows % 4 == 0, f"max_num_of_tokens ({rows}) % 4 == 0", self._lines["buffer_rows"])
            undefined_unless(place.ranks_per_node <= 72, f"ranks per node must be <= 72, got {place.ranks_per_node}.")
            self._check_queues(buffer_config.max_num_of_tokens_per_rank)

    def _check_queues(self, rows: int) -> None:
        """Where no configuration has refused too many rows across nodes before, creating the queues aborts."""
        if self._place.nodes > 1 and 3 * rows + 1 >= 65536:
            raise EmulatedAbort(
                f"internode.cu:167: Assertion `tx_depth > 0 && tx_depth < 65536' failed: tx_depth is 3 * "
                f"max_num_of_tokens_per_rank + 1, got {3 * rows + 1}."
            )

    def update_buffer(self, config: HybridEpConfigInstance) -> None:
        """Grow to what ``config`` needs; growing gathers memory handles from all ranks, so all must do it.

        Raises:
            EmulatedHang: some ranks grow and others do not.
        """
        grown_config = self._grown(config)
        with self._exchange.entrance("HybridEPBuffer.update_buffer") as entry:
            self._check_queues(grown_config.max_num_of_tokens_per_rank)
            entry.told = grown_config != self.buffer_config
        growing = [rank for rank, grows in enumerate(entry.everyone) if grows]
        if growing and len(growing) < self._exchange.size:
            raise EmulatedHang(
                f"HybridEPBuffer.update_buffer ({self._lines['grow']}): all ranks must grow their buffer in the same "
                f"call, got growth on ranks {growing} of {self._exchange.size}. Growing gathers memory handles while "
                "the other ranks gather the routing map. Give every rank the same capacity and the same row count."
            )
        if growing:
            self.buffer_generation += 1
            if self._place.nodes > 1:
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
            self._release, self._exchange, self._place, replace(request, custom_allgather=self._custom_allgather)
        )

    def dispatch(self, handle: Handle, rows: Rows) -> Rows:
        """Received rows, by (source rank, token)."""
        with self._exchange.entrance("HybridEPBuffer.dispatch") as entry:
            self._check_dispatch(handle, rows)
            entry.same = self._alike(handle, rows)
        return dispatch_rows(self._exchange, self._place, handle, detached(rows))

    def dispatch_with_permute(self, handle: Handle, rows: Rows, *, pad_multiple: int | None, fused: bool) -> Rows:
        """Expert rows; those that neither a token nor padding fills are uninitialised."""
        with self._exchange.entrance("HybridEPBuffer.dispatch_with_permute") as entry:
            self._check_dispatch(handle, rows)
            self._check_blocks(handle.config.num_of_blocks_permute, fused=fused)
            places = self._places(handle, handle.config.pad_multiple if fused else pad_multiple or 0)
            if handle.num_permuted_tokens == 0 and not fused:  # nothing is launched
                places = nowhere(places)
            require_inside(places, handle.num_permuted_tokens, "permute_kernel writes", with_padding=True)
            entry.same = self._alike(handle, rows) | {"fuse_permute_dispatch": fused}
        dense = dispatch_rows(self._exchange, self._place, handle, detached(rows))
        return permute(dense, places, handle.num_permuted_tokens, first_column=self._first_column(handle))

    def _check_dispatch(self, handle: Handle, rows: Rows) -> None:
        given = {"hidden": rows.tokens, "probs": rows.probs, "scaling_factor": rows.scales}
        check_dispatch(handle.config, handle.valid_tokens, self._lines["dispatch"], given)
        self._check_chunk("dispatch", handle.config.num_of_tokens_per_chunk_dispatch_api)

    def _check_chunk(self, api: str, chunk: int) -> None:
        source = f"hybrid_ep_backend.cuh ({api} kernel)"
        if chunk % 16:
            raise failed_compilation("NUM_OF_TOKENS_PER_CHUNK must be multiple of rdma_to_attn_map_load_t.", source)
        if self._place.nodes > 1 and chunk % 32:
            raise failed_compilation("NUM_OF_TOKENS_PER_CHUNK must be multiple of 32.", source)

    def _check_blocks(self, blocks: int, *, fused: bool) -> None:
        if blocks == 0 and fused:
            raise EmulatedHang("HybridEPBuffer: no block of the fused kernel would permute, so the others wait.")
        c_assert(blocks > 0, "grid_size > 0", self._lines["unpermute"].partition(":")[0])

    def _alike(self, handle: Handle, rows: Rows) -> dict[str, object]:
        return {"num_of_tokens_per_rank": handle.num_of_tokens_per_rank, "with_probs": rows.probs is not None}

    def _places(self, handle: Handle, pad_multiple: int) -> Places:
        if handle.row_id_map is not None:
            return places_of_row_ids(handle.row_id_map, handle.num_dispatched, pad_multiple)
        assert handle.dense_to_expert_map is not None
        assert handle.tokens_per_expert is not None
        return places_of_dense_map(
            handle.dense_to_expert_map, handle.num_dispatched, handle.tokens_per_expert, pad_multiple
        )

    def _first_column(self, handle: Handle) -> int:
        return self._place.local_rank * handle.config.num_of_experts_per_rank

    def combine(self, handle: Handle, rows: Rows) -> Rows:
        """Sums over ranks of rows that each rank has already summed over its experts."""
        columns = self._node_columns(handle)
        with self._exchange.entrance("HybridEPBuffer.combine") as entry:
            self._check_combine(handle, rows)
            if rows.probs is not None and rows.probs.numel():
                c_assert(rows.probs.shape[1] == columns, f"probs.value().size(1) == {columns}", self._lines["combine"])
            entry.same = {"num_of_tokens_per_rank": handle.num_of_tokens_per_rank}
            entry.told = {"probs": rows.probs is not None}
        return self._combined(handle, rows, some_probs=any(one["probs"] for one in entry.everyone))

    def combine_with_unpermute(self, handle: Handle, rows: Rows, *, fused: bool) -> Rows:
        """Sums over experts, then over ranks."""
        with self._exchange.entrance("HybridEPBuffer.combine_with_unpermute") as entry:
            self._check_combine(handle, rows)
            c_assert(
                rows.tokens.dtype == torch.bfloat16,
                "args.permuted_tokens.dtype() == torch::kBFloat16",
                self._lines["unpermute"],
            )
            self._check_blocks(handle.config.num_of_blocks_unpermute, fused=fused)
            places = self._places(handle, 0)
            require_inside(places, rows.tokens.shape[0], "unpermute_kernel reads", with_padding=False)
            expert = detached(rows)
            dense = unpermute(
                expert,
                places,
                first_column=self._first_column(handle),
                num_columns=self._node_columns(handle),
            )
            entry.same = {
                "num_of_tokens_per_rank": handle.num_of_tokens_per_rank,
                "fuse_unpermute_combine": fused,
            }
            entry.told = {"waits": fused and places.dropped_whole, "probs": rows.probs is not None}
        if any(one["waits"] for one in entry.everyone):
            raise EmulatedHang(
                "HybridEPBuffer.combine_with_unpermute: the fused kernel waits for a row of every received token, and "
                "all rows of one were dropped: it is not compiled for dropping (hybrid_ep.cu leaves non_blocking off)."
            )
        return self._combined(handle, dense, some_probs=any(one["probs"] for one in entry.everyone))

    def _combined(self, handle: Handle, rows: Rows, *, some_probs: bool) -> Rows:
        """Whether to move probabilities is each rank's own choice: those of a rank that moves none are stale memory."""
        given = detached(rows)
        if some_probs and rows.probs is None:
            given = replace(given, probs=uninitialised((len(rows.tokens), self._node_columns(handle)), torch.float32))
        combined = combine_rows(self._exchange, self._place, handle, given, own_slice=self._release.ragged)
        valid = handle.valid_tokens
        probs = None if rows.probs is None or combined.probs is None else combined.probs[:valid]
        return Rows(tokens=combined.tokens[:valid], probs=probs)

    def _check_combine(self, handle: Handle, rows: Rows) -> None:
        check_combine(handle.config, rows.tokens, rows.probs, self._lines["combine"])
        config = handle.config
        chunk = config.num_of_tokens_per_chunk_combine_api
        self._check_chunk("combine", chunk)
        if config.max_num_of_tokens_per_rank % chunk:
            raise failed_compilation(
                "MAX_NUM_OF_TOKENS_PER_RANK must be multiple of NUM_OF_TOKENS_PER_CHUNK.",
                self._lines["static_assert"],
            )

    def _node_columns(self, handle: Handle) -> int:
        return handle.config.num_of_experts_per_rank * self._place.ranks_per_node
