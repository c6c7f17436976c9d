"""How large v1's buffers must be between nodes, and which queues work there, in the words of v1.2.1."""

from __future__ import annotations

from moe_dispatch.testing.emulation.config import NVL_PEERS, SOURCE_META_BYTES, Config
from moe_dispatch.testing.emulation.normal.calls import CPP
from moe_dispatch.testing.emulation.refusals import EmulatedAbort, device_assert, host_assert

KERNEL = "csrc/kernels/internode.cu"
RDMA_RANKS = (2, 4, 8, 16, 18, 20)  # csrc/kernels/launch.cuh:62-71
FORWARDER_WARPS = 24  # csrc/kernels/internode.cu:1832


def row_bytes(hidden_bytes: int, *, num_scales: int, num_topk_idx: int, num_topk_weights: int) -> int:
    """A row on the wire (csrc/kernels/internode.cu:45-47)."""
    parts = hidden_bytes + SOURCE_META_BYTES + num_scales * 4 + num_topk_idx * 4 + num_topk_weights * 4
    return -(-parts // 16) * 16


def check_buffers(
    bytes_of_row: int, config: Config, num_ranks: int, *, nvl: list[int], rdma: list[int], line: int
) -> None:
    """csrc/kernels/internode.cu:339-340 and :1205-1206.

    These compare the NVLink need with the buffer, and the RDMA need with a size hint instead of the buffer
    (csrc/deep_ep.cpp:794): a small one is not noticed.

    Args:
        bytes_of_row: as ``row_bytes`` says.
        config: whose queues hold the rows.
        num_ranks: of the group.
        nvl: NVLink bytes, of this rank first and then of all.
        rdma: RDMA bytes of all ranks.
        line: of the RDMA comparison.
    """
    nodes = num_ranks // NVL_PEERS
    queues = config.num_channels * NVL_PEERS
    needed = queues * config.nvl_slots * bytes_of_row + queues * (2 * nodes + 2) * 4
    rule = "(nvl_clean_meta.first + nvl_clean_meta.second) * sizeof(int) <= num_nvl_bytes"
    host_assert(needed <= nvl[0], f"{rule}: {needed} <= {nvl[0]}", f"{KERNEL}:{line + 1}")
    _require_everywhere("num_nvl_bytes", needed, nvl)
    rdma_queues = config.num_channels * nodes * 2
    needed = rdma_queues * config.rdma_slots * bytes_of_row + rdma_queues * (NVL_PEERS * 2 + 4) * 4
    _require_everywhere("num_rdma_bytes", needed, rdma)


def _require_everywhere(name: str, needed: int, sizes: list[int]) -> None:
    if min(sizes) < needed:
        raise EmulatedAbort(
            f"Buffer: {name} must be {needed} or more on every rank, got {min(sizes)} on one of them. Kernels write "
            f"past its end. Use the largest get_{name.split('_')[1]}_buffer_size_hint of both configs on all ranks."
        )


def require_rdma_ranks(num_ranks: int) -> None:
    """Kernels are compiled for these numbers of nodes only."""
    known = num_ranks // NVL_PEERS in RDMA_RANKS
    host_assert(known, 'false and "Unsupported RDMA ranks"', "csrc/kernels/launch.cuh:70")


def check_queue_pairs(config: Config, num_qps_per_rank: int) -> None:
    """csrc/kernels/internode.cu:386."""
    rule = "ibgda_get_state()->num_rc_per_pe == num_channels or ibgda_get_state()->num_rc_per_pe >= num_sms"
    enough = num_qps_per_rank == config.num_channels or num_qps_per_rank >= config.num_channels * 2
    device_assert(enough, rule, f"{KERNEL}:386", f"{num_qps_per_rank} queue pairs for {config.num_channels} channels")


def check_combine_queues(config: Config, num_ranks: int) -> None:
    """Queues that cannot block each other: csrc/deep_ep.cpp:997-998, csrc/kernels/internode.cu:1209 and :1856-1858."""
    nodes = num_ranks // NVL_PEERS
    nvl_send, nvl_recv, rdma_send = config.nvl_send, config.nvl_slots, config.rdma_send
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
