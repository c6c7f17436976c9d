"""The rules in which the emulated releases of HybridEP differ, and where each rule is in the source."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import final

from moe_dispatch_testing.emulation.signatures import recorded


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class HybridRelease:
    """The rules of one commit of branch hybrid-ep.

    Attributes:
        name: Name of the release.
        chunk_tokens: Default number of tokens in a chunk. As in the release, the environment variables
            NUM_OF_TOKENS_PER_CHUNK_{DISPATCH,COMBINE,PREPROCESSING}_API override it.
        pads_capacity: Whether the capacity is rounded up to a multiple of the combine chunk (#638).
        limits_rows: Whether 3 * capacity + 1 must be less than 65536 across nodes (#638).
        scans_experts: Whether the scan always finds the expert rows (#625). If not, only a fused scan finds them.
        ragged: Whether ranks may send different numbers of rows, topk_idx may hold -1, and buffers have generations
            (#673, #744).
        lines: File and line of each rule at this commit, for error texts.
    """

    name: str
    chunk_tokens: int
    pads_capacity: bool = False
    limits_rows: bool = False
    scans_experts: bool = False
    ragged: bool = False
    lines: Mapping[str, str]

    def handle_fields(self, *, permute: bool, fused: bool = False) -> tuple[str, ...]:
        """Return the names of the items of a handle, which is a tuple that a dispatch returns for its combine."""
        method = "dispatch_with_permute" if permute else "dispatch"
        return tuple(recorded(self.name)["handles"][f"{method}(fuse_permute_dispatch=True)" if fused else method])


RELEASES: dict[str, HybridRelease] = {
    release.name: release
    for release in (
        HybridRelease(
            name="hybridep-34152ae",  # 2026-04-09, #602
            chunk_tokens=64,  # config.cuh:413
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
            name="hybridep-744",  # merged 2026-09-07 as 15f4acf. Lines refer to commit 0aa8753 of the author's fork.
            chunk_tokens=64,
            pads_capacity=True,
            limits_rows=True,
            scans_experts=True,
            ragged=True,
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
# Pull request 746 (2026-09-09) only moved overflow_flag back to the end of the handle, where callers look for it.
RELEASES["hybridep-746"] = replace(RELEASES["hybridep-744"], name="hybridep-746")
