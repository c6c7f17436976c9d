"""Prepare a dispatch: gather the routing of all ranks, and make the handle with its maps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from moe_dispatch_testing.emulation.exchange import Exchange
from moe_dispatch_testing.emulation.hybrid.checks import c_assert, undefined_unless
from moe_dispatch_testing.emulation.hybrid.config import HybridEpConfigInstance
from moe_dispatch_testing.emulation.hybrid.handle import Handle
from moe_dispatch_testing.emulation.hybrid.maps import (
    Scan,
    Topology,
    chunk_layout,
    expert_rows,
    rounded_up,
    routing_rows,
    row_ids,
    scan,
)
from moe_dispatch_testing.emulation.hybrid.release import HybridRelease
from moe_dispatch_testing.emulation.memory import uninitialised
from moe_dispatch_testing.emulation.refusals import EmulatedAbort, require_cpu


@final
@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Request:
    """The arguments of the scan. ``routing`` is a map bool (T, E), or ids int16 (T, K) if ``config.topk`` is K > 0."""

    config: HybridEpConfigInstance
    routing: Tensor
    num_of_tokens_per_rank: int
    num_of_valid_tokens: int = -1
    num_permuted_tokens: int | None = None
    pad_multiple: int | None = None
    enable_permute: bool = False
    fused: bool = False
    non_blocking: bool = False
    custom_allgather: bool = False

    @property
    def limit(self) -> int | None:
        """Return the number of expert rows that have room, or None if there is no limit."""
        given = self.num_permuted_tokens
        return None if given is None or given < 0 else given


def preprocess(release: HybridRelease, exchange: Exchange, topology: Topology, request: Request) -> Handle:
    """Gather the routing and scan it. Collective.

    If row counts differ between ranks, the gathering of the map by NCCL hangs. The custom all-gather does not hang, but
    writes maps of different sizes over each other and continues with wrong numbers (deepseek-ai/DeepEP#604). The
    emulation raises EmulatedHang in both cases.

    Raises:
        EmulatedHang: Ranks have different row counts.
        EmulatedAbort: A C assertion fails, or this rank has no rows.
        RuntimeError: TMA cannot load the last rows, which do not fill a chunk.
    """
    with exchange.entrance("HybridEPBuffer.metadata_preprocessing") as entry:
        _check(release, exchange, request)
        entry.same["num_of_tokens_per_rank"] = request.num_of_tokens_per_rank
        _check_alignment(release, topology, request)
    scanned = scan(_map_of_experts(torch.cat(exchange.gather(request.routing)), request.config), topology)
    handle = _handle(release, topology, request, scanned)
    if request.enable_permute:
        if release.scans_experts or request.fused:
            _add_dense_maps(release, topology, request, scanned, handle)
        else:
            _add_row_ids(exchange, request, scanned, handle)
        assert handle.tokens_per_expert is not None
        handle.padded_tokens_per_expert = rounded_up(handle.tokens_per_expert, request.pad_multiple or 0)
        if handle.num_permuted_tokens < 0:
            handle.num_permuted_tokens = int(handle.padded_tokens_per_expert.sum())
    return handle


def _check(release: HybridRelease, exchange: Exchange, request: Request) -> None:
    config, routing = request.config, request.routing
    require_cpu("HybridEPBuffer", routing)
    c_assert(routing.is_contiguous(), "local_routing_map.is_contiguous()", "hybrid_ep.cu:138")
    c_assert(
        routing.shape[1] == (config.topk or config.num_experts),
        f"num_of_expert ({routing.shape[1]}) == experts per rank * ranks ({config.topk or config.num_experts})",
        release.lines["map_columns"],
    )
    undefined_unless(
        routing.shape[0] == request.num_of_tokens_per_rank,
        f"The routing map must have a row for each of {request.num_of_tokens_per_rank} tokens, got {routing.shape[0]}.",
    )
    undefined_unless(
        request.num_of_tokens_per_rank > 0,
        "Every rank must have at least one row, got 0. Kernels take an empty remainder for a whole chunk.",
    )
    if config.num_of_nodes == 1 and request.custom_allgather and not release.ragged:
        c_assert(routing.nbytes % 16 == 0, f"bytes_per_rank ({routing.nbytes}) % 16 == 0", release.lines["allgather"])
    most = 1024 if release.scans_experts or request.fused else 256
    if request.enable_permute and not 0 < config.num_of_experts_per_rank <= most:
        raise EmulatedAbort(
            f"{release.lines['local_experts']}: experts per rank must be in 1..{most}, got "
            f"{config.num_of_experts_per_rank}."
        )


def _check_alignment(release: HybridRelease, topology: Topology, request: Request) -> None:
    remainder = request.num_of_tokens_per_rank % request.config.num_of_tokens_per_chunk_dispatch_api
    load_bytes = remainder * topology.ranks_per_node * 4
    if load_bytes % 16:
        raise RuntimeError(
            f"TMA 16B alignment error: tma_load_size = remainder_chunk({remainder}) * "
            f"ranks_per_node({topology.ranks_per_node}) * 4 = {load_bytes}B, must be multiple of 16B. "
            f"({release.lines['tma']})"
        )


def _map_of_experts(routing: Tensor, config: HybridEpConfigInstance) -> Tensor:
    """Turn ids into a map. An id outside 0..E-1, such as -1, routes nowhere."""
    if not config.topk:
        return routing
    experts = config.num_experts
    ids = routing.to(torch.int64)
    ids = torch.where((ids >= 0) & (ids < experts), ids, experts)
    return torch.zeros(ids.shape[0], experts + 1, dtype=torch.bool).scatter_(1, ids, True)[:, :experts]


def _handle(release: HybridRelease, topology: Topology, request: Request, scanned: Scan) -> Handle:
    rows_of_all = scanned.received_PT.shape[0]
    shape = (rows_of_all, request.config.num_of_experts_per_rank)
    fused_scan = request.enable_permute and (release.scans_experts or request.fused)
    return Handle(
        sparse_to_dense_map=scanned.sparse_to_dense_map,
        rdma_to_attn_map=scanned.rdma_to_attn_map,
        attn_to_rdma_map=scanned.attn_to_rdma_map,
        num_dispatched_tokens_tensor=torch.tensor([scanned.num_dispatched], dtype=torch.int32),
        # A scan that finds the expert rows leaves this map uninitialised.
        local_expert_routing_map=uninitialised(shape, torch.bool) if fused_scan else routing_rows(scanned, rows_of_all),
        num_of_tokens_per_rank=request.num_of_tokens_per_rank,
        num_of_valid_tokens=request.num_of_valid_tokens,
        config=request.config,
        overflow_flag=torch.zeros(1, dtype=torch.int32) if release.ragged else uninitialised((1,), torch.int32),
        num_permuted_tokens=-1 if request.limit is None else request.limit,
    )


def _add_dense_maps(
    release: HybridRelease, topology: Topology, request: Request, scanned: Scan, handle: Handle
) -> None:
    config = request.config
    # Only the kernels of non-blocking calls drop rows (94a9f8f jit/compiler.cu:132). Other kernels do not set the flag.
    limit = request.limit if request.non_blocking else None
    found = expert_rows(scanned.local_RL, pad_multiple=config.pad_multiple, limit=limit)
    by_preprocessing = release.scans_experts
    handle.dense_chunk_layout = chunk_layout(
        scanned,
        ranks=topology.ranks_per_node * topology.nodes,
        chunk=config.num_of_tokens_per_chunk_preprocessing_api
        if by_preprocessing
        else config.num_of_tokens_per_chunk_dispatch_api,
    )
    handle.dense_to_expert_map = uninitialised(tuple(handle.local_expert_routing_map.shape), torch.int32)
    handle.dense_to_expert_map[: scanned.num_dispatched] = found.dense_to_expert_RL
    handle.tokens_per_expert = found.tokens_per_expert
    if limit is not None:
        handle.overflow_flag = torch.tensor([found.overflowed], dtype=torch.int32)


def _add_row_ids(exchange: Exchange, request: Request, scanned: Scan, handle: Handle) -> None:
    handle.row_id_map, handle.tokens_per_expert, overflowed = row_ids(
        scanned.local_RL,
        pad_multiple=request.pad_multiple or 0,
        limit=request.limit,
        capacity=request.config.max_num_of_tokens_per_rank * exchange.size,
    )
    handle.overflow_flag = torch.tensor([overflowed], dtype=torch.int32)
