"""The configuration objects of ``hybrid_ep_cpp`` and their checks. Attributes have the names that drivers read."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import final

from moe_dispatch_testing.emulation.hybrid.maps import Topology
from moe_dispatch_testing.emulation.hybrid.release import HybridRelease
from moe_dispatch_testing.emulation.refusals import EmulatedAbort

SM_COUNT = 132  # streaming multiprocessors of an H100 or H200, because the emulation has no device to ask
_QUEUE_DEPTH = 65536  # config.cuh:18
_SHARED_BYTES = 227 * 1024  # shared memory that a block can have at most, on compute capability 9.0 and 10.0
_STAGES = 2  # the smallest number of stages that the configurer tries (94a9f8f config.cuh:471)


@final
class TokenDataType(Enum):
    """The element type in which tokens are sent. The value is its size in bytes."""

    UINT16 = 2
    UINT8 = 1

    @staticmethod
    def of(use_fp8: bool) -> TokenDataType:
        return TokenDataType.UINT8 if use_fp8 else TokenDataType.UINT16


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Sizes:
    """The sizes and the token type with which a buffer is created."""

    hidden_dim: int
    max_num_of_tokens_per_rank: int
    num_local_experts: int
    use_fp8: bool


@final
@dataclass(kw_only=True, slots=True)
class BufferConfig:
    """Sizes of the allocated buffers. Drivers read ``max_num_of_tokens_per_rank``."""

    hidden_dim: int
    max_num_of_tokens_per_rank: int
    num_of_experts_per_rank: int
    num_of_ranks_per_node: int
    num_of_nodes: int
    token_data_type: TokenDataType
    num_of_blocks_preprocessing_api: int
    num_of_blocks_dispatch_api: int
    num_of_blocks_combine_api: int
    num_of_tokens_per_chunk_dispatch_api: int
    num_of_tokens_per_chunk_combine_api: int


@final
@dataclass(kw_only=True, slots=True)
class HybridEpConfigInstance:
    """The numbers that the kernels of one call are compiled for. Every handle holds such an object."""

    hidden_dim: int
    max_num_of_tokens_per_rank: int
    num_of_experts_per_rank: int
    num_of_ranks_per_node: int
    num_of_nodes: int
    pad_multiple: int
    token_data_type: TokenDataType
    num_of_tokens_per_chunk_preprocessing_api: int
    num_of_tokens_per_chunk_dispatch_api: int
    num_of_tokens_per_chunk_combine_api: int
    num_of_blocks_preprocessing_api: int
    num_of_blocks_dispatch_api: int
    num_of_blocks_combine_api: int
    num_of_blocks_permute: int
    num_of_blocks_unpermute: int
    # Settings of the kernels that do not change results.
    num_of_threads_per_block_preprocessing_api: int = 256
    num_of_stages_dispatch_api: int = 10
    num_of_stages_permute_block_dispatch_api: int = 10
    num_of_in_flight_s2g_dispatch_api: int = 8
    num_of_in_flight_s2g_permute_block_dispatch_api: int = 8
    num_of_additional_in_flight_s2g_dispatch_api: int = 6
    num_of_stages_g2s_combine_api: int = 10
    num_of_stages_s2g_combine_api: int = 2
    num_of_tokens_per_group_combine_api: int = 4
    num_of_additional_in_flight_s2g_combine_api: int = 2
    forward_dispatch_api: bool = True
    backward_combine_api: bool = True
    device_side_sync_dispatch_api: bool = True
    device_side_sync_combine_api: bool = True
    topk: int = 0  # only ragged releases set it: the columns of topk_idx, or 0 if the routing is a bool map
    buffer_generation: int = -1  # only ragged releases set it

    @property
    def experts_per_node(self) -> int:
        return self.num_of_experts_per_rank * self.num_of_ranks_per_node

    @property
    def num_experts(self) -> int:
        return self.experts_per_node * self.num_of_nodes

    def is_valid(self, fuse_permute_dispatch: bool = False) -> bool:
        chunks = {
            self.num_of_tokens_per_chunk_preprocessing_api,
            self.num_of_tokens_per_chunk_dispatch_api,
            self.num_of_tokens_per_chunk_combine_api,
        }
        return sizes_are_valid(self) and (len(chunks) == 1 or not fuse_permute_dispatch)


def sizes_are_valid(config: BufferConfig | HybridEpConfigInstance) -> bool:
    """Return whether TMA can copy rows and maps of these sizes (94a9f8f config.cuh:86-93 and 163-170)."""
    hidden_multiple = 512 if config.token_data_type is TokenDataType.UINT8 else 16
    experts = config.num_of_experts_per_rank * config.num_of_ranks_per_node
    chunk_entries = config.num_of_tokens_per_chunk_dispatch_api * config.num_of_ranks_per_node
    return config.hidden_dim % hidden_multiple == 0 and experts % 4 == 0 and chunk_entries % 4 == 0


def capacity_is_valid(release: HybridRelease, config: BufferConfig | HybridEpConfigInstance) -> bool:
    """Return whether a queue between nodes can hold a dispatch of this many rows (94a9f8f config.cuh:22-50).

    A dispatch queues up to 3 work requests for each token, and one more.
    """
    one_node = config.num_of_nodes <= 1 or not release.limits_rows
    return one_node or 3 * config.max_num_of_tokens_per_rank + 1 < _QUEUE_DEPTH


def chunk_from_environment(api: str, default: int) -> int:
    """Read a chunk size from the environment. Callers read it at each use, as the real library does.

    Args:
        api: "DISPATCH", "COMBINE" or "PREPROCESSING".
        default: Number of tokens in a chunk if the variable is not set.
    """
    return int(os.environ.get(f"NUM_OF_TOKENS_PER_CHUNK_{api}_API", default))


@final
class Configurer:
    """Makes configurations from the constructor's arguments and the environment (94a9f8f config.cuh:327-470)."""

    def __init__(
        self, release: HybridRelease, topology: Topology, sizes: Sizes, blocks: Mapping[str, int | None]
    ) -> None:
        """Choose the buffer sizes.

        Args:
            release: The emulated release.
            topology: Position of this rank in the group.
            sizes: Sizes that the caller asks for.
            blocks: Number of blocks of each kernel, or None for the default. The keys are "dispatch", "combine",
                "preprocessing", "permute" and "unpermute".

        Raises:
            RuntimeError: The sizes are not valid. The release raises the same text.
            EmulatedAbort: A kernel has more blocks than there are streaming multiprocessors, which is a C assertion.
        """
        self._release = release
        self._blocks = blocks
        sms = 24 if topology.nodes == 1 else 8
        dispatch, combine, preprocessing = (
            default if chosen is None else chosen
            for chosen, default in ((blocks["dispatch"], sms), (blocks["combine"], sms), (blocks["preprocessing"], 108))
        )
        if max(dispatch, combine) > SM_COUNT:
            raise EmulatedAbort(
                f"{release.lines['sm_count']}: sm_count ({SM_COUNT}) >= num_sms_dispatch_api ({dispatch}) and >= "
                f"num_sms_combine_api ({combine})"
            )
        self.buffer_config = BufferConfig(
            hidden_dim=sizes.hidden_dim,
            max_num_of_tokens_per_rank=max(sizes.max_num_of_tokens_per_rank, 512),
            num_of_experts_per_rank=sizes.num_local_experts,
            num_of_ranks_per_node=topology.ranks_per_node,
            num_of_nodes=topology.nodes,
            token_data_type=TokenDataType.of(sizes.use_fp8),
            num_of_blocks_preprocessing_api=preprocessing,
            num_of_blocks_dispatch_api=dispatch,
            num_of_blocks_combine_api=combine,
            num_of_tokens_per_chunk_dispatch_api=chunk_from_environment("DISPATCH", release.chunk_tokens),
            num_of_tokens_per_chunk_combine_api=chunk_from_environment("COMBINE", release.chunk_tokens),
        )
        self._pad_capacity(self.buffer_config)
        if not (sizes_are_valid(self.buffer_config) and capacity_is_valid(release, self.buffer_config)):
            raise RuntimeError("The buffer config is not valid.")

    def get_default_config(self, fuse_permute_dispatch: bool = False) -> HybridEpConfigInstance:
        buffer, chunk = self.buffer_config, self._release.chunk_tokens
        return HybridEpConfigInstance(
            hidden_dim=buffer.hidden_dim,
            max_num_of_tokens_per_rank=buffer.max_num_of_tokens_per_rank,
            num_of_experts_per_rank=buffer.num_of_experts_per_rank,
            num_of_ranks_per_node=buffer.num_of_ranks_per_node,
            num_of_nodes=buffer.num_of_nodes,
            pad_multiple=1,
            token_data_type=buffer.token_data_type,
            num_of_tokens_per_chunk_preprocessing_api=chunk_from_environment("PREPROCESSING", chunk),
            num_of_tokens_per_chunk_dispatch_api=chunk_from_environment("DISPATCH", chunk),
            num_of_tokens_per_chunk_combine_api=chunk_from_environment("COMBINE", chunk),
            num_of_blocks_preprocessing_api=buffer.num_of_blocks_preprocessing_api,
            num_of_blocks_dispatch_api=buffer.num_of_blocks_dispatch_api,
            num_of_blocks_combine_api=buffer.num_of_blocks_combine_api,
            num_of_blocks_permute=self._permute_blocks("permute", "dispatch", fuse_permute_dispatch),
            num_of_blocks_unpermute=self._permute_blocks("unpermute", "combine", fuse_permute_dispatch),
        )

    def _permute_blocks(self, name: str, beside: str, fused: bool) -> int:
        chosen = self._blocks[name]
        if chosen is not None and chosen >= 0:
            return chosen
        taken = getattr(self.buffer_config, f"num_of_blocks_{beside}_api")
        return min(108, SM_COUNT - taken) if fused else SM_COUNT * 16

    def adjust_template(self, config: HybridEpConfigInstance, fuse_permute_dispatch: bool = False) -> None:
        """Round the capacity of ``config`` up, and raise the capacity of the buffer to it, where the release does so.

        Raises:
            RuntimeError: The kernels do not fit into the shared memory of a multiprocessor.
        """
        self._pad_capacity(config)
        if not fits_shared_memory(config, fused=fuse_permute_dispatch, sparse_probs=self._release.ragged):
            raise RuntimeError("Cannot fit kernels into shared memory even with minimum stages.")
        if self._release.pads_capacity:
            buffer = self.buffer_config
            rows = max(buffer.max_num_of_tokens_per_rank, config.max_num_of_tokens_per_rank)
            buffer.max_num_of_tokens_per_rank = rows

    def _pad_capacity(self, config: BufferConfig | HybridEpConfigInstance) -> None:
        chunk = config.num_of_tokens_per_chunk_combine_api
        if self._release.pads_capacity and chunk > 0:
            config.max_num_of_tokens_per_rank += -config.max_num_of_tokens_per_rank % chunk


def fits_shared_memory(config: HybridEpConfigInstance, *, fused: bool, sparse_probs: bool) -> bool:
    """Return whether the kernels fit into shared memory with the fewest stages.

    The result is exact except for the padding between fields, which is estimated.
    """
    needed = [_dispatch_bytes(config), _combine_bytes(config, sparse_probs=sparse_probs)]
    if fused:
        needed += [_laid_out(_staged(config)), _unpermute_bytes(config)]
    return max(needed) <= _SHARED_BYTES


def _dispatch_bytes(config: HybridEpConfigInstance) -> int:
    chunk, remote = config.num_of_tokens_per_chunk_dispatch_api, config.num_of_nodes - 1
    fields = [
        (2 * chunk * config.num_of_ranks_per_node * 4, 128),
        *_staged(config),
        (24, 8),
    ]
    if remote:
        fields += [(chunk * remote, 16), (remote * 96, 8), (remote * 4, 4)]
    return _laid_out(fields)


def _staged(config: HybridEpConfigInstance) -> list[tuple[int, int]]:
    token_bytes = config.token_data_type.value
    fields = [
        (_STAGES * config.hidden_dim * token_bytes, 128),
        (_STAGES * config.experts_per_node * 4, 16),
        (_STAGES * 2 * 8, 8),
    ]
    return fields if token_bytes > 1 else [*fields, (_STAGES * (config.hidden_dim // 128) * 4, 16)]


def _combine_bytes(config: HybridEpConfigInstance, *, sparse_probs: bool) -> int:
    experts, remote = config.experts_per_node, config.num_of_nodes - 1
    loaded = config.num_of_experts_per_rank if sparse_probs else experts
    levels = 2 if remote else 1
    fields = [(_STAGES * config.hidden_dim * 2, 128)] * (2 * levels)
    fields += [(_STAGES * loaded * 4, 16), (_STAGES * experts * config.num_of_nodes * 4, 16)]
    fields += [(_STAGES * 4, 4)] * (levels if sparse_probs else 0)
    fields += [(_STAGES * 2 * 8, 8), (_STAGES, 1)] * levels
    if remote:
        chunks = config.max_num_of_tokens_per_rank // config.num_of_tokens_per_chunk_combine_api
        fields += [(_STAGES * experts * 4, 16)] * 2
        fields += [(remote * chunks * 8, 8), (remote * 72, 8), (remote * 4, 4)]
    return _laid_out(fields)


def _unpermute_bytes(config: HybridEpConfigInstance) -> int:
    return _laid_out(
        [
            *[(_STAGES * config.hidden_dim * 2, 128)] * 2,
            (_STAGES * config.experts_per_node * 4, 16),
            (_STAGES * 4, 16),
            (_STAGES * 2 * 8, 8),
            (_STAGES * 4, 4),
            (_STAGES, 1),
        ]
    )


def _laid_out(fields: Iterable[tuple[int, int]]) -> int:
    """Return the bytes of a struct with fields of these (size, alignment), the largest alignment first."""
    total = 0
    for size, alignment in sorted(fields, key=lambda field: -field[1]):
        total += -total % alignment + size
    return total + -total % 128
