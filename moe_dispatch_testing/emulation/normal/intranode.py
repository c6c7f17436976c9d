"""The C++ side of v1's Buffer within one node (csrc/deep_ep.cpp:305-640 and csrc/kernels/intranode.cu of v1.2.1)."""

from __future__ import annotations

from dataclasses import replace
from typing import final

import torch
import torch.distributed as dist
from torch import Tensor

from moe_dispatch_testing.emulation.config import Config
from moe_dispatch_testing.emulation.memory import grown
from moe_dispatch_testing.emulation.normal import checks
from moe_dispatch_testing.emulation.normal.call import (
    COMBINE,
    CPP,
    DISPATCH,
    CombineInput,
    DispatchInput,
    DispatchLayout,
    Received,
    Settings,
)
from moe_dispatch_testing.emulation.normal.handles import IntranodeHandle
from moe_dispatch_testing.emulation.normal.rows import (
    bring_back,
    channel_counts,
    move,
    positions_in_channel,
    prefix_int32,
    source_tokens,
    starts_of_channels,
    summed,
    tokens_for,
)
from moe_dispatch_testing.emulation.normal.runtime import Runtime
from moe_dispatch_testing.emulation.refusals import (
    EmulatedAbort,
    EmulatedHang,
    device_assert,
    host_assert,
    require_cpu,
)

KERNEL = "csrc/kernels/intranode.cu"


@final
class IntranodeRuntime(Runtime):
    """The buffers of a group of 2, 4 or 8 ranks that are in one node."""

    def __init__(self, group: dist.ProcessGroup, *, num_nvl_bytes: int, num_rdma_bytes: int) -> None:
        super().__init__(group, num_nvl_bytes=num_nvl_bytes, num_rdma_bytes=num_rdma_bytes)
        self._memory = NvlMemory(self.num_ranks, num_nvl_bytes, self.nvl_bytes_of_peers)

    def dispatch(self, sent: DispatchInput, layout: DispatchLayout, settings: Settings) -> Received:
        config, num_experts = settings.config, layout.tokens_per_expert.numel()
        with self.exchange.entrance(DISPATCH) as entry:
            self._check_dispatch(sent, layout.is_token_in_rank, settings)
            _check_counts(layout, self.num_ranks)
            checks.check_topk(sent, num_experts, line=360, kernel=f"{KERNEL}:187")
            if settings.num_worst_tokens > 0:
                host_assert(sent.topk_idx is not None, "topk_idx.has_value()", f"{CPP}:446")
            self._check_launch(sent, config, num_experts)
            checks.require_true_counts(layout)
            entry.same = {"layout": [*sent.sizes(), *config.layout(), num_experts], "handle": None}
            entry.told = [
                layout.tokens_per_rank.tolist(),
                layout.tokens_per_expert.tolist(),
                settings.num_worst_tokens,
            ]
        per_rank, per_expert, capacities = (list(told) for told in zip(*entry.everyone, strict=True))
        counts = torch.tensor(per_rank)
        _require_capacity(self.exchange.rank, counts, capacities)
        num_rows = settings.num_worst_tokens or int(counts[:, self.exchange.rank].sum())
        tokens = tokens_for(layout.is_token_in_rank)
        received = move(self.exchange, sent, tokens, experts_per_rank=num_experts // self.num_ranks, num_rows=num_rows)
        is_counted = settings.num_worst_tokens == 0
        return replace(
            received,
            tokens_per_expert_list=self.aligned_rows(per_expert, settings.expert_alignment) if is_counted else [],
            handle=self._handle(layout.is_token_in_rank, counts, num_rows, config.num_channels).as_tuple(),
        )

    def cached_dispatch(self, sent: DispatchInput, handle: tuple[Tensor, ...], settings: Settings) -> Received:
        kept, config = IntranodeHandle.of(handle), settings.config
        with self.exchange.entrance(DISPATCH) as entry:
            self._check_dispatch(sent, kept.is_token_in_rank, settings)
            kept.check_for_dispatch(self.num_ranks, config.num_channels)
            self._check_launch(sent, config, 0)
            entry.same = {"layout": [*sent.sizes(), *config.layout(), 0], "handle": kept.rank_prefix_matrix.tolist()}
            entry.told = kept.is_token_in_rank.sum(0).tolist()
        checks.require_met(DISPATCH, kept.sent().tolist(), entry.everyone)
        tokens = tokens_for(kept.is_token_in_rank)
        return move(self.exchange, sent, tokens, experts_per_rank=0, num_rows=kept.recv_src_idx.shape[0])

    def combine(
        self, sent: CombineInput, handle: tuple[Tensor, ...], settings: Settings
    ) -> tuple[Tensor, Tensor | None]:
        """Send rows back to their source ranks, and add them up there.

        The sums are in float32, in the order of ranks, and are rounded once (csrc/kernels/intranode.cu:805-871).
        """
        kept, config, x = IntranodeHandle.of(handle), settings.config, sent.x
        num_tokens, num_rows = kept.send_head.shape[0], kept.recv_src_idx.shape[0]
        with self.exchange.entrance(COMBINE) as entry:
            require_cpu(COMBINE, x, sent.topk_weights, *sent.biases)
            checks.check_matrix(x, "x.", 547)
            kept.check_for_combine(self.num_ranks, config.num_channels)
            checks.check_config(config, 554)
            host_assert(x.shape[0] == num_rows, "src_idx.size(0) == num_tokens", f"{CPP}:559")
            checks.check_row_bytes(x, "hidden", 563)
            settings.check_events(569)
            checks.check_combined_weights(sent, num_rows, line=585, kernel=f"{KERNEL}:592")
            checks.require_ranks_of_a_node(self.num_ranks)
            checks.check_biases(sent, num_tokens, rows="num_recv_tokens", line=606)
            self._memory.check_combine(sent, config)
            host_assert(x.dtype == torch.bfloat16, 'false and "Unsupported type"', "csrc/kernels/launch.cuh:84")
            _require_whole_warps(x)
            layout = [x.shape[1], sent.num_topk, *config.layout()]
            entry.same = {"layout": layout, "handle": kept.rank_prefix_matrix.tolist()}
            entry.told = (kept.send_head >= 0).sum(0).tolist()
        checks.require_met(COMBINE, kept.sent().tolist(), entry.everyone)
        back = kept.sent()[:, self.exchange.rank].tolist()
        came_from = tokens_for(kept.send_head >= 0)

        def sums(rows: Tensor, start: list[Tensor]) -> Tensor:
            arrived = bring_back(self.exchange, rows, back)
            return summed(arrived, came_from, num_tokens, start=start, width=rows.shape[1])

        combined = sums(x, sent.biases).to(x.dtype)
        return combined, None if sent.topk_weights is None else sums(sent.topk_weights, [])

    def _check_dispatch(self, sent: DispatchInput, in_rank: Tensor, settings: Settings) -> None:
        """Make the checks of csrc/deep_ep.cpp:315-339 and :377-391."""
        require_cpu(DISPATCH, sent.x, sent.scales, sent.topk_idx, sent.topk_weights, in_rank)
        checks.check_config(settings.config, 315)
        checks.check_size(in_rank.dtype == torch.bool, "is_token_in_rank.scalar_type() == torch::kBool", 326)
        checks.check_matrix(sent.x, "x.", 336)
        checks.check_row_bytes(sent.x, "x.size(1)", 337)
        checks.check_matrix(in_rank, "is_token_in_rank.", 338)
        fits = in_rank.shape == (sent.x.shape[0], self.num_ranks)
        rule = "is_token_in_rank.size(0) == x.size(0) and is_token_in_rank.size(1) == num_ranks"
        checks.check_size(fits, rule, 339)
        checks.check_scales(sent, line=377)
        settings.check_events(391)

    def _check_launch(self, sent: DispatchInput, config: Config, num_experts: int) -> None:
        """Check the number of ranks, the buffer sizes and the width of a row.

        The sm_90 build moves half a row by TMA (csrc/kernels/intranode.cu:235), so bfloat16 rows have up to 8176
        columns.
        """
        checks.require_ranks_of_a_node(self.num_ranks)
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


def _check_counts(layout: DispatchLayout, num_ranks: int) -> None:
    """Make the checks of csrc/deep_ep.cpp:331-332 and :346-350, and of csrc/kernels/intranode.cu:123."""
    per_expert, per_rank = layout.tokens_per_expert, layout.tokens_per_rank
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
    """Refuse a row width that works only since commit abba6ad (#413), which is later than the release.

    Raises:
        EmulatedHang: In the last round of a warp, fewer than 32 lanes reach ``__syncwarp``. They wait for the others.
    """
    if x.shape[1] % 256 != 0:
        raise EmulatedHang(
            f"{COMBINE}: in v1.2.1 the width of bfloat16 rows must be a multiple of 256, got hidden {x.shape[1]}. "
            f"Lanes of a warp wait at __syncwarp for lanes that do not get there ({KERNEL}:805-845). Use a multiple of "
            "256, or a later deep_ep."
        )


def _require_capacity(rank: int, counts: Tensor, num_worst_tokens: list[int]) -> None:
    """Refuse more rows than ``num_worst_tokens``. The kernel would write them all (csrc/kernels/intranode.cu:399)."""
    for receiver, (rows, capacity) in enumerate(zip(counts.sum(0).tolist(), num_worst_tokens, strict=True)):
        if 0 < capacity < rows:
            kind = EmulatedAbort if receiver == rank else EmulatedHang
            raise kind(
                f"Buffer.dispatch: num_worst_tokens ({capacity}) must hold every row that rank {receiver} receives, "
                f"got {rows}. The kernel writes past the end of recv_x. Use the largest number of tokens of a rank, "
                "times the number of ranks."
            )


@final
class NvlMemory:
    """The size of this rank's NVLink buffer, and the smallest size of all ranks, which write into each other's."""

    def __init__(self, num_ranks: int, num_bytes: int, of_peers: list[int]) -> None:
        self._num_ranks = num_ranks
        self._num_bytes = num_bytes
        self._smallest = min(of_peers)

    def check_dispatch(self, sent: DispatchInput, config: Config, num_experts: int) -> None:
        """Check the bytes that a dispatch needs (csrc/deep_ep.cpp:432 and :496-505).

        A cached dispatch has ``num_experts`` 0. The release skips the first check for it.
        """
        ranks = self._num_ranks
        if num_experts > 0:
            counts = ranks * (ranks + num_experts // ranks) * 4
            self._require(counts, "num_ranks * (num_ranks + num_local_experts) * sizeof(int)", 432)
        queues = config.num_channels * ranks
        row = sent.x.shape[1] * sent.x.element_size() + 4 + sent.num_topk * (8 + 4) + sent.num_scales * 4
        needed = ranks * ranks * 4 + queues * 4 * 4 + queues * config.nvl_queue_rows * row
        self._require(needed, "num_ranks * num_ranks * sizeof(int) + num_channels * num_ranks * sizeof(int) + ...", 496)

    def check_combine(self, sent: CombineInput, config: Config) -> None:
        """Check the bytes that a combine needs (csrc/deep_ep.cpp:614-618)."""
        queues = config.num_channels * self._num_ranks
        row = sent.x.shape[1] * sent.x.element_size() + 4 + sent.num_topk * 4
        needed = queues * 4 * 2 + queues * config.nvl_queue_rows * row
        self._require(needed, "num_channels * num_ranks * sizeof(int) * 2 + ...", 614)

    def _require(self, needed: int, terms: str, line: int) -> None:
        holds = needed <= self._num_bytes
        host_assert(holds, f"{terms} <= num_nvl_bytes: {needed} <= {self._num_bytes}", f"{CPP}:{line}")
        if needed > self._smallest:
            raise EmulatedAbort(
                f"Buffer: num_nvl_bytes must be {needed} or more on every rank, got {self._smallest} on one rank. The "
                "kernels of its peers write past the end of its buffer. Use the same num_nvl_bytes on all ranks."
            )
