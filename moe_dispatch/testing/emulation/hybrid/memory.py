"""How much shared memory the kernels of HybridEP take with the fewest stages that they can run with."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from moe_dispatch.testing.emulation.hybrid.config import HybridEpConfigInstance

_LIMIT_BYTES = 227 * 1024  # per block, opt-in, of compute capability 9.0 and 10.0
_STAGES = 2  # below this the configurer gives up (94a9f8f config.cuh:471)


def fits_shared_memory(config: HybridEpConfigInstance, *, fused: bool, sparse_probs: bool) -> bool:
    """Whether dispatch and combine, with probabilities, fit, to within the padding between their fields."""
    needed = [_dispatch(config), _combine(config, sparse_probs=sparse_probs)]
    if fused:
        needed += [_permute_block(config), _unpermute_block(config)]
    return max(needed) <= _LIMIT_BYTES


def _dispatch(config: HybridEpConfigInstance) -> int:
    chunk, remote = config.num_of_tokens_per_chunk_dispatch_api, config.num_of_nodes - 1
    fields = [
        (2 * chunk * config.num_of_ranks_per_node * 4, 128),
        *_staged(config),
        (24, 8),
    ]
    if remote:
        fields += [(chunk * remote, 16), (remote * 96, 8), (remote * 4, 4)]
    return _laid_out(fields)


def _permute_block(config: HybridEpConfigInstance) -> int:
    return _laid_out(_staged(config))


def _staged(config: HybridEpConfigInstance) -> list[tuple[int, int]]:
    token_bytes = config.token_data_type.value
    fields = [
        (_STAGES * config.hidden_dim * token_bytes, 128),
        (_STAGES * _node_experts(config) * 4, 16),
        (_STAGES * 2 * 8, 8),
    ]
    return fields if token_bytes > 1 else [*fields, (_STAGES * (config.hidden_dim // 128) * 4, 16)]


def _combine(config: HybridEpConfigInstance, *, sparse_probs: bool) -> int:
    experts, remote = _node_experts(config), config.num_of_nodes - 1
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


def _unpermute_block(config: HybridEpConfigInstance) -> int:
    return _laid_out(
        [
            *[(_STAGES * config.hidden_dim * 2, 128)] * 2,
            (_STAGES * _node_experts(config) * 4, 16),
            (_STAGES * 4, 16),
            (_STAGES * 2 * 8, 8),
            (_STAGES * 4, 4),
            (_STAGES, 1),
        ]
    )


def _node_experts(config: HybridEpConfigInstance) -> int:
    return config.num_of_experts_per_rank * config.num_of_ranks_per_node


def _laid_out(fields: Iterable[tuple[int, int]]) -> int:
    """Bytes of a struct with these (size, alignment), largest alignment first."""
    total = 0
    for size, alignment in sorted(fields, key=lambda field: -field[1]):
        total += -total % alignment + size
    return total + -total % 128
