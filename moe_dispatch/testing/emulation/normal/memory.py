"""How large v1's buffers must be, in the words of its checks, and what a wrong number of rows does to them."""

from __future__ import annotations

from typing import final

import torch
from torch import Tensor

from moe_dispatch.testing.emulation.config import NVL_PEERS, Config
from moe_dispatch.testing.emulation.normal.calls import CPP, Recipients, Sent
from moe_dispatch.testing.emulation.refusals import EmulatedAbort, EmulatedHang, host_assert

INT32_MAX = 2**31 - 1


@final
class NvlMemory:
    """The NVLink buffers of a node: of this rank, and the smallest of its peers, into which it writes too."""

    def __init__(self, num_ranks: int, num_bytes: int, of_peers: list[int]) -> None:
        self._num_ranks = num_ranks
        self._num_bytes = num_bytes
        self._smallest = min(of_peers)

    def check_dispatch(self, sent: Sent, config: Config, num_experts: int) -> None:
        """csrc/deep_ep.cpp:432 (not for cached dispatches, of 0 experts here) and :496-505."""
        ranks = self._num_ranks
        if num_experts > 0:
            counts = ranks * (ranks + num_experts // ranks) * 4
            self._require(counts, "num_ranks * (num_ranks + num_local_experts) * sizeof(int)", 432)
        queues = config.num_channels * ranks
        row = sent.x.shape[1] * sent.x.element_size() + 4 + sent.num_topk * (8 + 4) + sent.num_scales * 4
        needed = ranks * ranks * 4 + queues * 4 * 4 + queues * config.nvl_slots * row
        self._require(needed, "num_ranks * num_ranks * sizeof(int) + num_channels * num_ranks * sizeof(int) + ...", 496)

    def check_combine(self, x: Tensor, topk_weights: Tensor | None, config: Config) -> None:
        """csrc/deep_ep.cpp:614-618."""
        queues = config.num_channels * self._num_ranks
        num_topk = 0 if topk_weights is None else topk_weights.shape[1]
        row = x.shape[1] * x.element_size() + 4 + num_topk * 4
        needed = queues * 4 * 2 + queues * config.nvl_slots * row
        self._require(needed, "num_channels * num_ranks * sizeof(int) * 2 + ...", 614)

    def _require(self, needed: int, terms: str, line: int) -> None:
        holds = needed <= self._num_bytes
        host_assert(holds, f"{terms} <= num_nvl_bytes: {needed} <= {self._num_bytes}", f"{CPP}:{line}")
        if needed > self._smallest:
            raise EmulatedAbort(
                f"Buffer: num_nvl_bytes must be {needed} or more on every rank, got {self._smallest} on one of them. "
                "The kernels of its peers write past its end. Make the buffers of all ranks equally large."
            )


def check_sizes(num_ranks: int, num_nvl_bytes: int, num_rdma_bytes: int) -> None:
    """What the constructor asks: csrc/deep_ep.cpp:27-32."""
    host_assert(
        num_nvl_bytes % 128 == 0 and (num_nvl_bytes <= INT32_MAX or num_rdma_bytes == 0),
        "num_nvl_bytes % NUM_BUFFER_ALIGNMENT_BYTES == 0 and (num_nvl_bytes <= std::numeric_limits<int>::max() or "
        "num_rdma_bytes == 0)",
        f"{CPP}:27",
    )
    host_assert(
        num_rdma_bytes % 128 == 0 and num_rdma_bytes <= INT32_MAX,
        "num_rdma_bytes % NUM_BUFFER_ALIGNMENT_BYTES == 0 and (low_latency_mode or num_rdma_bytes <= "
        "std::numeric_limits<int>::max())",
        f"{CPP}:28",
    )
    whole_nodes = num_ranks < NVL_PEERS or num_ranks % NVL_PEERS == 0
    host_assert(whole_nodes, "num_ranks < NUM_MAX_NVL_PEERS or num_ranks % NUM_MAX_NVL_PEERS == 0", f"{CPP}:30")
    if num_rdma_bytes > 0:
        host_assert(num_ranks > NVL_PEERS, "num_ranks > NUM_MAX_NVL_PEERS or low_latency_mode", f"{CPP}:32")


def require_ranks_of_a_node(num_ranks: int) -> None:
    """Kernels are compiled for these numbers of ranks only."""
    host_assert(num_ranks in (2, 4, 8), 'false and "Unsupported ranks"', "csrc/kernels/launch.cuh:59")


def require_true_counts(to: Recipients) -> None:
    """Counts and flags are two inputs, and their agreement is not checked there.

    Source: num_tokens_per_rank sizes recv_x (csrc/kernels/intranode.cu:54-59), is_token_in_rank fills it (:286-293).
    """
    flagged = to.is_token_in_rank.sum(0, dtype=torch.int32)
    if not torch.equal(flagged, to.tokens_per_rank):
        raise EmulatedAbort(
            f"Buffer.dispatch: num_tokens_per_rank must count is_token_in_rank, got {to.tokens_per_rank.tolist()} for "
            f"{flagged.tolist()}. The kernel writes outside recv_x. Take both from get_dispatch_layout."
        )


def require_room(rank: int, counts: Tensor, num_worst_tokens: list[int]) -> None:
    """Every row that arrives is written, also past the end (csrc/kernels/intranode.cu:399); (P, P) rows, by rank."""
    for receiver, (rows, room) in enumerate(zip(counts.sum(0).tolist(), num_worst_tokens, strict=True)):
        if 0 < room < rows:
            kind = EmulatedAbort if receiver == rank else EmulatedHang
            raise kind(
                f"Buffer.dispatch: num_worst_tokens ({room}) must hold every row that rank {receiver} receives, got "
                f"{rows}. The kernel writes past the end of recv_x. Use the largest number of tokens times the ranks."
            )


def require_met(where: str, sent: list[list[int]], awaited: list[list[int]]) -> None:
    """Rows that the handles make ranks send, against those their receivers wait for; by rank and rank."""
    if sent != awaited:
        raise EmulatedHang(
            f"{where}: the handles of all ranks must come from one dispatch, got rows {sent} to send and "
            f"{awaited} to wait for. The kernels run into their time-out of 100 s."
        )
