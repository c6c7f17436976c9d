"""What differs between the emulated releases of HybridEP, each fact with where its source states it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import final

DISPATCH_FIELDS = (
    "sparse_to_dense_map",
    "rdma_to_attn_map",
    "attn_to_rdma_map",
    "num_dispatched_tokens_tensor",
    "local_expert_routing_map",
)
_DENSE_FIELDS = ("dense_chunk_layout", "dense_to_expert_map", "tokens_per_expert")
_TAIL = ("num_of_tokens_per_rank", "config")


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class HybridRelease:
    """The rules of one commit of branch hybrid-ep.

    ``lines`` names where each rule stands at that commit, for the messages. Chunk sizes are defaults: the environment
    variables NUM_OF_TOKENS_PER_CHUNK_{DISPATCH,COMBINE,PREPROCESSING}_API change them, as in the real one.
    """

    name: str
    chunk_tokens: int
    pads_capacity: bool = False  # capacity rounded up to the combine chunk (#638)
    limits_rows: bool = False  # 3 * capacity + 1 < 65536 across nodes (#638)
    scans_experts: bool = False  # the scan finds the expert rows, fused or not (#625); before: only when fused
    ragged: bool = False  # num_of_tokens_per_rank as slots, -1 in topk_idx, buffer generations (#673, #744)
    dispatch_handle: tuple[str, ...]
    permute_handle: tuple[str, ...]  # of a call that is not fused
    fused_handle: tuple[str, ...]
    lines: Mapping[str, str]


_DENSE_HANDLE = (*DISPATCH_FIELDS, *_DENSE_FIELDS, *_TAIL, "overflow_flag")
_ROW_ID_HANDLE = (*DISPATCH_FIELDS, "row_id_map", *_TAIL, "overflow_flag")
_VALID = "num_of_valid_tokens"

RELEASES: dict[str, HybridRelease] = {
    release.name: release
    for release in (
        HybridRelease(
            name="hybridep-34152ae",  # 2026-04-09, #602
            chunk_tokens=64,  # config.cuh:413
            dispatch_handle=(*DISPATCH_FIELDS, *_TAIL),
            permute_handle=_ROW_ID_HANDLE,
            fused_handle=_DENSE_HANDLE,
            lines={
                "static_assert": "hybrid_ep_backend.cuh(4448)",
                "tma": "executor.cu:74",
                "map_columns": "executor.cu:34",
                "allgather": "allgather.cu:97",
                "dispatch": "hybrid_ep.cu:280-291",
                "combine": "hybrid_ep.cu:354-362",
                "unpermute": "permute.cu:528",
                "local_experts": "permute.cu:261",
                "buffer_rows": "intranode.cu:130",
                "sm_count": "config.cuh:320",
                "grow": "hybrid_ep.cu:109-133",
            },
        ),
        HybridRelease(
            name="hybridep-94a9f8f",  # 2026-07-10, #682
            chunk_tokens=64,  # config.cuh:428
            pads_capacity=True,
            limits_rows=True,
            scans_experts=True,
            dispatch_handle=(*DISPATCH_FIELDS, *_TAIL),
            permute_handle=_DENSE_HANDLE,
            fused_handle=_DENSE_HANDLE,
            lines={
                "static_assert": "hybrid_ep_backend.cuh(4573)",
                "tma": "executor.cu:75",
                "map_columns": "executor.cu:35",
                "allgather": "allgather.cu:97",
                "dispatch": "hybrid_ep.cu:279-290",
                "combine": "hybrid_ep.cu:348-356",
                "unpermute": "permute.cu:413",
                "local_experts": "permute.cu:59",
                "buffer_rows": "intranode.cu:130",
                "sm_count": "config.cuh:371",
                "grow": "hybrid_ep.cu:109-133",
            },
        ),
        HybridRelease(
            name="hybridep-744",  # merged 2026-09-07 as 15f4acf; read at 0aa8753 of its author's fork
            chunk_tokens=64,
            pads_capacity=True,
            limits_rows=True,
            scans_experts=True,
            ragged=True,
            dispatch_handle=(*DISPATCH_FIELDS, *_TAIL, _VALID),
            permute_handle=(*_DENSE_HANDLE, _VALID),
            fused_handle=(*_DENSE_HANDLE, _VALID),
            lines={
                "static_assert": "hybrid_ep_backend.cuh",
                "tma": "executor.cu:metadata_preprocess_core",
                "map_columns": "executor.cu:allgather_routing_map",
                "allgather": "allgather.cu",
                "dispatch": "hybrid_ep.cu:dispatch_with_permute",
                "combine": "hybrid_ep.cu:combine_with_unpermute",
                "unpermute": "permute.cu:unpermute_launcher",
                "local_experts": "permute.cu:pad_tokens_per_expert",
                "buffer_rows": "intranode.cu:NVLCoordinator::init",
                "sm_count": "config.cuh:Configurer",
                "grow": "hybrid_ep.cu:update_buffer",
            },
        ),
    )
}
