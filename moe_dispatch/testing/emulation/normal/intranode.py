"""v1's Buffer within one node: csrc/deep_ep.cpp:305-640 and csrc/kernels/intranode.cu of v1.2.1."""

from __future__ import annotations

from typing import final

import torch
import torch.distributed as dist
from torch import Tensor

from moe_dispatch.testing.emulation.config import Config
from moe_dispatch.testing.emulation.memory import grown
from moe_dispatch.testing.emulation.normal import checks as checks
from moe_dispatch.testing.emulation.normal.calls import CPP, Asynchrony, Received, Recipients, Sent
from moe_dispatch.testing.emulation.normal.handles import IntranodeHandle
from moe_dispatch.testing.emulation.normal.memory import (
    NvlMemory,
    require_met,
    require_ranks_of_a_node,
    require_room,
    require_true_counts,
)
from moe_dispatch.testing.emulation.normal.moves import (
    bring_back,
    move,
    source_tokens,
    starts_of_channels,
    tokens_for,
)
from moe_dispatch.testing.emulation.normal.rows import channel_counts, positions_in_channel, prefix_int32, summed
from moe_dispatch.testing.emulation.normal.runtime import COMBINE, DISPATCH, Runtime
from moe_dispatch.testing.emulation.refusals import EmulatedHang, device_assert, host_assert, require_cpu

KERNEL = "csrc/kernels/intranode.cu"


@final
class IntranodeRuntime(Runtime):
    """2, 4 or 8 ranks."""

    def __init__(self, group: dist.ProcessGroup, *, num_nvl_bytes: int, num_rdma_bytes: int) -> None:
        super().__init__(group, num_nvl_bytes=num_nvl_bytes, num_rdma_bytes=num_rdma_bytes)
        self._memory = NvlMemory(self.num_ranks, num_nvl_bytes, self.nvl_bytes_of_peers)

    def dispatch(
        self,
        sent: Sent,
        to: Recipients,
        config: Config,
        asynchrony: Asynchrony,
        *,
        expert_alignment: int,
        num_worst_tokens: int,
    ) -> Received:
        num_experts = to.tokens_per_expert.numel()
        with self.exchange.entrance(DISPATCH) as entry:
            self._check_dispatch(sent, to.is_token_in_rank, config, asynchrony)
            _check_counts(to, self.num_ranks)
            checks.check_topk(sent, num_experts, line=360, kernel=f"{KERNEL}:187")
            if num_worst_tokens > 0:
                host_assert(sent.topk_idx is not None, "topk_idx.has_value()", f"{CPP}:446")
            self._check_launch(sent, config, num_experts)
            require_true_counts(to)
            entry.same = {"layout": [*sent.layout(), *config.layout(), num_experts], "handle": None}
            entry.told = [to.tokens_per_rank.tolist(), to.tokens_per_expert.tolist(), num_worst_tokens]
        per_rank, per_expert, room = (list(told) for told in zip(*entry.everyone, strict=True))
        counts = torch.tensor(per_rank)
        require_room(self.exchange.rank, counts, room)
        num_rows = num_worst_tokens or int(counts[:, self.exchange.rank].sum())
        tokens = tokens_for(to.is_token_in_rank)
        experts_per_rank = num_experts // self.num_ranks
        arrived = move(self.exchange, sent, tokens, experts_per_rank=experts_per_rank, num_rows=num_rows)
        handle = self._handle(to.is_token_in_rank, counts, num_rows, config.num_channels)
        return Received(
            x=arrived.x,
            scales=arrived.scales,
            topk_idx=arrived.topk_idx,
            topk_weights=arrived.topk_weights,
            tokens_per_expert_list=[] if num_worst_tokens > 0 else self.aligned_rows(per_expert, expert_alignment),
            handle=handle.as_tuple(),
        )

    def cached_dispatch(
        self, sent: Sent, handle: tuple[Tensor, ...], config: Config, asynchrony: Asynchrony
    ) -> tuple[Tensor, Tensor | None]:
        route = IntranodeHandle.of(handle)
        with self.exchange.entrance(DISPATCH) as entry:
            self._check_dispatch(sent, route.is_token_in_rank, config, asynchrony)
            route.check_for_dispatch(self.num_ranks, config.num_channels)
            self._check_launch(sent, config, 0)
            entry.same = {"layout": [*sent.layout(), *config.layout(), 0], "handle": route.rank_prefix_matrix.tolist()}
            entry.told = route.is_token_in_rank.sum(0).tolist()
        require_met(DISPATCH, route.sent().tolist(), entry.everyone)
        tokens = tokens_for(route.is_token_in_rank)
        num_rows = route.recv_src_idx.shape[0]
        arrived = move(self.exchange, sent, tokens, experts_per_rank=0, num_rows=num_rows)
        return arrived.x, arrived.scales

    def combine(
        self,
        x: Tensor,
        handle: tuple[Tensor, ...],
        topk_weights: Tensor | None,
        biases: list[Tensor],
        config: Config,
        asynchrony: Asynchrony,
    ) -> tuple[Tensor, Tensor | None]:
        """In float32, in the order of ranks, rounded once (csrc/kernels/intranode.cu:805-871)."""
        route = IntranodeHandle.of(handle)
        num_tokens = route.send_head.shape[0]
        with self.exchange.entrance(COMBINE) as entry:
            require_cpu(COMBINE, x, topk_weights, *biases)
            checks.check_matrix(x, "x.", 547)
            route.check_for_combine(self.num_ranks, config.num_channels)
            checks.check_config(config, 554)
            num_rows = route.recv_src_idx.shape[0]
            host_assert(x.shape[0] == num_rows, "src_idx.size(0) == num_tokens", f"{CPP}:559")
            checks.check_row_bytes(x, "hidden", 563)
            asynchrony.check(569)
            checks.check_combined_weights(topk_weights, num_rows, line=585, kernel=f"{KERNEL}:592")
            require_ranks_of_a_node(self.num_ranks)
            checks.check_biases(biases, x, num_tokens, rows="num_recv_tokens", line=606)
            self._memory.check_combine(x, topk_weights, config)
            host_assert(x.dtype == torch.bfloat16, 'false and "Unsupported type"', "csrc/kernels/launch.cuh:84")
            _require_whole_warps(x)
            num_topk = 0 if topk_weights is None else topk_weights.shape[1]
            layout = [x.shape[1], num_topk, *config.layout()]
            entry.same = {"layout": layout, "handle": route.rank_prefix_matrix.tolist()}
            entry.told = (route.send_head >= 0).sum(0).tolist()
        require_met(COMBINE, route.sent().tolist(), entry.everyone)
        back = route.sent()[:, self.exchange.rank].tolist()
        came_from = tokens_for(route.send_head >= 0)

        def sums(rows: Tensor, start: list[Tensor]) -> Tensor:
            arrived = bring_back(self.exchange, rows, back)
            return summed(arrived, came_from, num_tokens, start=start, width=rows.shape[1])

        return sums(x, biases).to(x.dtype), None if topk_weights is None else sums(topk_weights, [])

    def _check_dispatch(self, sent: Sent, in_rank: Tensor, config: Config, asynchrony: Asynchrony) -> None:
        """csrc/deep_ep.cpp:315-339 and :377-391."""
        require_cpu(DISPATCH, sent.x, sent.scales, sent.topk_idx, sent.topk_weights, in_rank)
        checks.check_config(config, 315)
        checks.check_size(in_rank.dtype == torch.bool, "is_token_in_rank.scalar_type() == torch::kBool", 326)
        checks.check_matrix(sent.x, "x.", 336)
        checks.check_row_bytes(sent.x, "x.size(1)", 337)
        checks.check_matrix(in_rank, "is_token_in_rank.", 338)
        fits = in_rank.shape == (sent.x.shape[0], self.num_ranks)
        rule = "is_token_in_rank.size(0) == x.size(0) and is_token_in_rank.size(1) == num_ranks"
        checks.check_size(fits, rule, 339)
        checks.check_scales(sent, line=377)
        asynchrony.check(391)

    def _check_launch(self, sent: Sent, config: Config, num_experts: int) -> None:
        """The sm_90 build moves half a row by TMA (csrc/kernels/intranode.cu:235): bfloat16 rows up to 8176 wide."""
        require_ranks_of_a_node(self.num_ranks)
        self._memory.check_dispatch(sent, config, num_experts)
        int4s = sent.x.shape[1] * sent.x.element_size() // checks.INT4_BYTES
        device_assert(
            int4s % 2 == 0 and int4s // 2 * checks.INT4_BYTES + 8 <= 8192,
            "hidden_int4 % 2 == 0 and half_hidden_bytes + sizeof(uint64_t) <= kNumTMABytesPerWarp",
            f"{KERNEL}:235",
            f"hidden is {sent.x.shape[1]} of {sent.x.element_size()} bytes",
        )

    def _handle(self, in_rank: Tensor, counts: Tensor, num_rows: int, num_channels: int) -> IntranodeHandle:
        channels = channel_counts(in_rank, num_channels)
        return IntranodeHandle(
            rank_prefix_matrix=prefix_int32(counts, 0),
            channel_prefix_matrix=prefix_int32(channels, 1),
            recv_channel_prefix_matrix=starts_of_channels(self.exchange, channels),
            recv_src_idx=grown(source_tokens(self.exchange, tokens_for(in_rank)), num_rows),
            is_token_in_rank=in_rank,
            send_head=positions_in_channel(in_rank, num_channels),
        )


def _check_counts(to: Recipients, num_ranks: int) -> None:
    """csrc/deep_ep.cpp:331-332 and :346-350, csrc/kernels/intranode.cu:123."""
    per_expert, per_rank = to.tokens_per_expert, to.tokens_per_rank
    require_cpu(DISPATCH, per_expert, per_rank)
    checks.check_int32(per_expert, "num_tokens_per_expert->", 331)
    checks.check_int32(per_rank, "num_tokens_per_rank->", 332)
    experts = "num_tokens_per_expert->size(0)"
    checks.check_size(per_expert.dim() == 1, "num_tokens_per_expert->dim() == 1", 346)
    checks.check_size(per_expert.shape[0] % num_ranks == 0, f"{experts} % num_ranks == 0", 347)
    # NUM_MAX_LOCAL_EXPERTS is 1024, but the kernel that follows has 128 threads, one for each expert of a rank.
    per_rank_experts = per_expert.shape[0] // num_ranks
    checks.check_size(per_rank_experts <= 1024, f"{experts} / num_ranks <= NUM_MAX_LOCAL_EXPERTS", 348)
    checks.check_size(per_rank.dim() == 1, "num_tokens_per_rank->dim() == 1", 349)
    checks.check_size(per_rank.shape[0] == num_ranks, "num_tokens_per_rank->size(0) == num_ranks", 350)
    threads = "num_experts / num_ranks <= kNumThreads and num_ranks <= kNumThreads"
    host_assert(per_rank_experts <= 128, threads, f"{KERNEL}:123")


def _require_whole_warps(x: Tensor) -> None:
    """Mended after the release by commit abba6ad (#413): v1.2.1 itself leaves such a row to chance.

    Raises:
        EmulatedHang: a warp's last round has fewer than 32 lanes, and these wait for the others at ``__syncwarp``.
    """
    if x.shape[1] % 256 != 0:
        raise EmulatedHang(
            f"{COMBINE}: v1.2.1 needs bfloat16 rows that are a multiple of 256 wide, got hidden {x.shape[1]}: lanes of "
            f"a warp part ways before __syncwarp ({KERNEL}:805-845). Use such a hidden size, or a later deep_ep."
        )
