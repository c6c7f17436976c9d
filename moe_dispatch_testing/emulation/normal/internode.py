"""The C++ side of v1's Buffer between nodes (csrc/deep_ep.cpp:642-1046 and csrc/kernels/internode.cu of v1.2.1)."""

from __future__ import annotations

from dataclasses import replace
from typing import final

import torch
import torch.distributed as dist
from torch import Tensor

from moe_dispatch_testing.emulation.config import NVL_PEERS, SOURCE_META_BYTES, Config
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
from moe_dispatch_testing.emulation.normal.handles import InternodeHandle
from moe_dispatch_testing.emulation.normal.rows import bring_back, move, summed, tokens_for
from moe_dispatch_testing.emulation.normal.runtime import Runtime
from moe_dispatch_testing.emulation.refusals import EmulatedAbort, device_assert, host_assert, require_cpu

KERNEL = "csrc/kernels/internode.cu"
RDMA_RANKS = (2, 4, 8, 16, 18, 20)  # csrc/kernels/launch.cuh:62-71
FORWARDER_WARPS = 24  # csrc/kernels/internode.cu:1832


@final
class InternodeRuntime(Runtime):
    """The buffers of a group of 16 or more ranks. Each node has 8 consecutive ranks."""

    def __init__(
        self, group: dist.ProcessGroup, *, num_nvl_bytes: int, num_rdma_bytes: int, num_qps_per_rank: int
    ) -> None:
        super().__init__(group, num_nvl_bytes=num_nvl_bytes, num_rdma_bytes=num_rdma_bytes)
        self._num_qps_per_rank = num_qps_per_rank

    def dispatch(self, sent: DispatchInput, layout: DispatchLayout, settings: Settings) -> Received:
        config, num_experts = settings.config, layout.tokens_per_expert.numel()
        with self.exchange.entrance(DISPATCH) as entry:
            to_nodes = _check_counts(layout, self.num_ranks)
            self._check_dispatch(sent, layout.is_token_in_rank, settings)
            checks.check_topk(sent, num_experts, line=725, kernel=f"{KERNEL}:408")
            self._check_launch(sent, config)
            checks.require_true_counts(layout)
            entry.same = {"layout": [*sent.sizes(), *config.layout(), num_experts], "use of a handle": False}
            entry.told = [layout.tokens_per_rank.tolist(), layout.tokens_per_expert.tolist(), to_nodes.tolist()]
        per_rank, per_expert, per_node = (list(told) for told in zip(*entry.everyone, strict=True))
        from_ranks = torch.tensor(per_rank)[:, self.exchange.rank]
        # A token is sent to another node once. It goes to the rank that has the sender's number within its node.
        node, number = divmod(self.exchange.rank, NVL_PEERS)
        from_nodes = torch.tensor(per_node)[number::NVL_PEERS, node]
        handle = InternodeHandle.of_dispatch(
            layout.is_token_in_rank, from_ranks, from_nodes, num_channels=config.num_channels
        )
        tokens, num_rows = tokens_for(layout.is_token_in_rank), int(from_ranks.sum())
        received = move(self.exchange, sent, tokens, experts_per_rank=num_experts // self.num_ranks, num_rows=num_rows)
        counts = self.aligned_rows(per_expert, settings.expert_alignment)
        return replace(received, tokens_per_expert_list=counts, handle=handle.as_tuple())

    def cached_dispatch(self, sent: DispatchInput, handle: tuple[Tensor, ...], settings: Settings) -> Received:
        kept, config = InternodeHandle.of(handle), settings.config
        with self.exchange.entrance(DISPATCH) as entry:
            self._check_dispatch(sent, kept.is_token_in_rank, settings)
            kept.check_for_dispatch(self.num_ranks, config.num_channels)
            self._check_launch(sent, config)
            entry.same = {"layout": [*sent.sizes(), *config.layout(), 0], "use of a handle": True}
            entry.told = [kept.is_token_in_rank.sum(0).tolist(), kept.received()]
        _require_met(DISPATCH, *zip(*entry.everyone, strict=True))
        tokens = tokens_for(kept.is_token_in_rank)
        return move(self.exchange, sent, tokens, experts_per_rank=0, num_rows=sum(kept.received()))

    def combine(
        self, sent: CombineInput, handle: tuple[Tensor, ...], settings: Settings
    ) -> tuple[Tensor, Tensor | None]:
        """Send rows back to their source ranks, and add them up there.

        Each node adds its rows up in float32 and rounds the sum. The source rank adds the sums of the nodes up in
        float32 and rounds again (internode.cu:1217-1358).
        """
        kept, config, x = InternodeHandle.of(handle), settings.config, sent.x
        num_tokens = kept.is_token_in_rank.shape[0]
        with self.exchange.entrance(COMBINE) as entry:
            require_cpu(COMBINE, x, sent.topk_weights, *sent.biases)
            checks.check_config(config, 943)
            checks.check_matrix(x, "x.", 946)
            checks.check_row_bytes(x, "hidden", 957)
            kept.check_for_combine(self.num_ranks, config.num_channels)
            settings.check_events(970)
            _require_rows(x, sum(kept.received()))
            checks.check_combined_weights(sent, x.shape[0], line=987, kernel=f"{KERNEL}:1393")
            _check_combine_queues(config, self.num_ranks)
            self._check_buffers(config, _row_bytes(x, num_topk_weights=sent.num_topk), line=1205, tma_line=1448)
            checks.check_biases(sent, num_tokens, rows="num_combined_tokens", line=1016)
            host_assert(x.dtype == torch.bfloat16, "type == CUDA_R_16BF", f"{KERNEL}:1859")
            _require_rdma_ranks(self.num_ranks)
            device_assert(x.shape[1] % 256 == 0, "hidden_int4 % 32 == 0", f"{KERNEL}:1250", f"hidden is {x.shape[1]}")
            entry.same = {"layout": [x.shape[1], sent.num_topk, *config.layout()]}
            entry.told = [kept.is_token_in_rank.sum(0).tolist(), kept.received()]
        _require_met(COMBINE, *zip(*entry.everyone, strict=True))
        came_from = tokens_for(kept.is_token_in_rank)

        def of_nodes(rows: Tensor) -> list[Tensor]:
            arrived = bring_back(self.exchange, rows, kept.received())
            nodes = [slice(first, first + NVL_PEERS) for first in range(0, self.num_ranks, NVL_PEERS)]
            width = rows.shape[1]
            sums = [summed(arrived[n], came_from[n], num_tokens, start=[], width=width) for n in nodes]
            return [total.to(rows.dtype) for total in sums]

        combined = sum(
            (part.float() for part in [*sent.biases, *of_nodes(x)]),
            torch.zeros(num_tokens, x.shape[1], dtype=torch.float32),
        )
        if sent.topk_weights is None:
            return combined.to(x.dtype), None
        return combined.to(x.dtype), sum(
            of_nodes(sent.topk_weights), torch.zeros(num_tokens, sent.num_topk, dtype=torch.float32)
        )

    def _check_dispatch(self, sent: DispatchInput, in_rank: Tensor, settings: Settings) -> None:
        """Make the checks of csrc/deep_ep.cpp:669-756, and check the flags, which the release does not check."""
        require_cpu(DISPATCH, sent.x, sent.scales, sent.topk_idx, sent.topk_weights, in_rank)
        checks.check_config(settings.config, 669)
        checks.check_matrix(sent.x, "x.", 697)
        checks.check_row_bytes(sent.x, "x.size(1)", 698)
        checks.check_scales(sent, line=742)
        settings.check_events(756)
        if in_rank.dtype != torch.bool or in_rank.shape != (sent.x.shape[0], self.num_ranks):
            raise EmulatedAbort(
                f"{DISPATCH}: is_token_in_rank must be bool with a row for each row of x and a column for each rank, "
                f"got {in_rank.dtype} of shape {tuple(in_rank.shape)}. Between nodes deep_ep does not check it, and "
                "the kernel reads past its end. Take it from get_dispatch_layout."
            )

    def _check_launch(self, sent: DispatchInput, config: Config) -> None:
        _require_rdma_ranks(self.num_ranks)
        topk = sent.num_topk
        num_bytes = _row_bytes(sent.x, num_scales=sent.num_scales, num_topk_idx=topk, num_topk_weights=topk)
        self._check_buffers(config, num_bytes, line=339, tma_line=453)
        _check_queue_pairs(config, self._num_qps_per_rank)

    def _check_buffers(self, config: Config, row_bytes: int, *, line: int, tma_line: int) -> None:
        """Check the sizes of the buffers and of a row (csrc/kernels/internode.cu:339-453 or :1205-1448).

        The release compares the NVLink bytes that it needs with the buffer. It compares the RDMA bytes with a size hint
        instead of the buffer (csrc/deep_ep.cpp:794), so it does not notice a small RDMA buffer.

        Args:
            config: Config whose queues hold the rows.
            row_bytes: Bytes of one row.
            line: Line of the RDMA comparison. The NVLink comparison is in the next line.
            tma_line: Line of the check of the bytes of a row.
        """
        nodes = self.num_ranks // NVL_PEERS
        queues = config.num_channels * NVL_PEERS
        needed = queues * config.nvl_queue_rows * row_bytes + queues * (2 * nodes + 2) * 4
        rule = "(nvl_clean_meta.first + nvl_clean_meta.second) * sizeof(int) <= num_nvl_bytes"
        holds = needed <= self.num_nvl_bytes
        host_assert(holds, f"{rule}: {needed} <= {self.num_nvl_bytes}", f"{KERNEL}:{line + 1}")
        _require_everywhere("num_nvl_bytes", needed, self.nvl_bytes_of_peers)
        rdma_queues = config.num_channels * nodes * 2
        needed = rdma_queues * config.rdma_queue_rows * row_bytes + rdma_queues * (NVL_PEERS * 2 + 4) * 4
        _require_everywhere("num_rdma_bytes", needed, self.rdma_bytes_of_peers)
        rule = "num_bytes_per_token + sizeof(uint64_t) <= kNumTMABytesPerWarp"
        device_assert(row_bytes + 8 <= 16384, rule, f"{KERNEL}:{tma_line}", f"a row has {row_bytes} bytes")


def _check_counts(layout: DispatchLayout, num_ranks: int) -> Tensor:
    """Make the checks of csrc/deep_ep.cpp:680, :691-693 and :709-715. Return the number of tokens for each node."""
    per_node = layout.tokens_per_rdma_rank
    checks.check_size(per_node is not None, "num_tokens_per_rdma_rank.has_value()", 680)
    assert per_node is not None
    require_cpu(DISPATCH, layout.tokens_per_rank, per_node, layout.tokens_per_expert)
    checks.check_int32(layout.tokens_per_rank, "num_tokens_per_rank->", 691)
    checks.check_int32(per_node, "num_tokens_per_rdma_rank->", 692)
    checks.check_int32(layout.tokens_per_expert, "num_tokens_per_expert->", 693)
    sizes = layout.tokens_per_rank.shape == (num_ranks,)
    checks.check_size(sizes, "num_tokens_per_rank->size(0) == num_ranks", 712)
    nodes = per_node.shape == (num_ranks // NVL_PEERS,)
    checks.check_size(nodes, "num_tokens_per_rdma_rank->size(0) == num_rdma_ranks", 713)
    experts = "num_tokens_per_expert->size(0)"
    num_experts = layout.tokens_per_expert.numel()
    checks.check_size(num_experts % num_ranks == 0, f"{experts} % num_ranks == 0", 714)
    # NUM_MAX_LOCAL_EXPERTS is 1024, but the kernel has 512 threads, one for each expert of a node.
    checks.check_size(num_experts // num_ranks <= 1024, f"{experts} / num_ranks <= NUM_MAX_LOCAL_EXPERTS", 715)
    per_node_experts = num_experts // (num_ranks // NVL_PEERS)
    device_assert(per_node_experts <= 512, "num_rdma_experts <= num_threads", f"{KERNEL}:191")
    return per_node


def _require_rows(x: Tensor, num_rows: int) -> None:
    """Refuse an x that does not have ``num_rows`` rows. Between nodes the release does not check this."""
    if x.shape[0] != num_rows:
        raise EmulatedAbort(
            f"{COMBINE}: x must have {num_rows} rows, as dispatch returned, got {x.shape[0]}. Between nodes deep_ep "
            "does not check it, and the kernel reads past its end. Pass a row for each row of recv_x."
        )


def _require_met(where: str, sent: tuple[list[int], ...], received: tuple[list[int], ...]) -> None:
    """Compare the row counts (P, P) in the flags of the senders with the row counts in the receivers' handles."""
    checks.require_met(where, [list(row) for row in sent], [list(column) for column in zip(*received, strict=True)])


def _row_bytes(x: Tensor, *, num_scales: int = 0, num_topk_idx: int = 0, num_topk_weights: int) -> int:
    """Return the bytes that are sent for a row (csrc/kernels/internode.cu:45-47)."""
    hidden_bytes = x.shape[1] * x.element_size()
    parts = hidden_bytes + SOURCE_META_BYTES + (num_scales + num_topk_idx + num_topk_weights) * 4
    return -(-parts // 16) * 16


def _require_everywhere(name: str, needed: int, sizes: list[int]) -> None:
    if min(sizes) < needed:
        raise EmulatedAbort(
            f"Buffer: {name} must be {needed} or more on every rank, got {min(sizes)} on one rank. Kernels write past "
            f"the end of its buffer. On all ranks, use the larger get_{name.split('_')[1]}_buffer_size_hint of the "
            "dispatch config and the combine config."
        )


def _require_rdma_ranks(num_ranks: int) -> None:
    """Refuse a number of nodes for which the release has no kernels."""
    known = num_ranks // NVL_PEERS in RDMA_RANKS
    host_assert(known, 'false and "Unsupported RDMA ranks"', "csrc/kernels/launch.cuh:70")


def _check_queue_pairs(config: Config, num_qps_per_rank: int) -> None:
    """Check that there are enough queue pairs (csrc/kernels/internode.cu:386)."""
    rule = "ibgda_get_state()->num_rc_per_pe == num_channels or ibgda_get_state()->num_rc_per_pe >= num_sms"
    enough = num_qps_per_rank == config.num_channels or num_qps_per_rank >= config.num_channels * 2
    device_assert(enough, rule, f"{KERNEL}:386", f"{num_qps_per_rank} queue pairs for {config.num_channels} channels")


def _check_combine_queues(config: Config, num_ranks: int) -> None:
    """Check that queues cannot block each other (csrc/deep_ep.cpp:997, csrc/kernels/internode.cu:1209 and :1856)."""
    nodes = num_ranks // NVL_PEERS
    nvl_send, nvl_recv, rdma_send = config.nvl_send, config.nvl_queue_rows, config.rdma_send
    per_node = nvl_recv // nodes
    warps = max(FORWARDER_WARPS // nodes, 1)
    whole = "config.num_max_nvl_chunked_recv_tokens % num_rdma_ranks == 0"
    host_assert(nvl_recv % nodes == 0, whole, f"{CPP}:997")
    fits = "config.num_max_nvl_chunked_send_tokens <= config.num_max_nvl_chunked_recv_tokens / num_rdma_ranks"
    host_assert(nvl_send <= per_node, fits, f"{CPP}:998")
    host_assert(config.num_channels * 2 > 3, "num_channels * 2 > 3", f"{KERNEL}:1209")
    longer = "num_max_nvl_chunked_recv_tokens / num_rdma_ranks > std::max(num_max_rdma_chunked_send_tokens, ...)"
    host_assert(per_node > max(rdma_send, nvl_send), longer, f"{KERNEL}:1856")
    spare = (
        "num_max_nvl_chunked_recv_tokens / num_rdma_ranks - num_warps_per_forwarder >= num_max_nvl_chunked_send_tokens"
    )
    host_assert(per_node - warps >= nvl_send, spare, f"{KERNEL}:1857")
    host_assert(rdma_send >= warps, "num_max_rdma_chunked_send_tokens >= num_warps_per_forwarder", f"{KERNEL}:1858")
