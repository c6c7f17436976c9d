"""The checks of v1's Buffer that are the same within a node and between nodes, with the texts of v1.2.1.

csrc/deep_ep.cpp makes these checks twice, in the same order. The argument ``line`` of a function is the line of its
first check.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moe_dispatch_testing.emulation.config import NVL_PEERS, Config
from moe_dispatch_testing.emulation.normal.call import CPP, CombineInput, DispatchInput, DispatchLayout
from moe_dispatch_testing.emulation.refusals import EmulatedAbort, EmulatedHang, device_assert, host_assert

INT4_BYTES = 16
INT32_MAX = 2**31 - 1


def check_config(config: Config, line: int) -> None:
    """Check that the number of SMs is even, because one SM of a channel sends and one receives."""
    host_assert(config.has_even_sms, "config.num_sms % 2 == 0", f"{CPP}:{line}")


def check_matrix(tensor: Tensor, name: str, line: int) -> None:
    """Check that a tensor is contiguous and 2-D. ``name`` is its prefix in the source, as ``x.`` or ``topk_idx->``."""
    holds = tensor.dim() == 2 and tensor.is_contiguous()
    host_assert(holds, f"{name}dim() == 2 and {name}is_contiguous()", f"{CPP}:{line}")


def check_row_bytes(x: Tensor, size: str, line: int) -> None:
    """Check that the bytes of a row are a multiple of 16. ``size`` is the source's expression for the row width."""
    holds = x.shape[1] * x.element_size() % INT4_BYTES == 0
    host_assert(holds, f"({size} * x.element_size()) % sizeof(int4) == 0", f"{CPP}:{line}")


def check_int32(tensor: Tensor, name: str, line: int) -> None:
    """Check the dtype of counts or prefix sums."""
    host_assert(tensor.dtype == torch.int32, f"{name}scalar_type() == torch::kInt32", f"{CPP}:{line}")


def check_size(holds: bool, condition: str, line: int) -> None:
    """Check a condition of csrc/deep_ep.cpp."""
    host_assert(holds, condition, f"{CPP}:{line}")


def check_topk(sent: DispatchInput, num_experts: int, *, line: int, kernel: str) -> None:
    """Check ids and weights (:360-369 within a node, :725-734 between nodes).

    ``kernel`` is the file and line of the kernel's assertion that traps if top-k is too large.
    """
    ids, weights = sent.topk_idx, sent.topk_weights
    paired = (ids is None) == (weights is None)
    check_size(paired, "topk_idx.has_value() == topk_weights.has_value()", line)
    if ids is None or weights is None:
        return
    check_size(num_experts > 0, "num_experts > 0", line + 3)
    check_matrix(ids, "topk_idx->", line + 4)
    check_matrix(weights, "topk_weights->", line + 5)
    rows = "num_tokens == topk_idx->size(0) and num_tokens == topk_weights->size(0)"
    check_size(sent.x.shape[0] == ids.shape[0] == weights.shape[0], rows, line + 6)
    check_size(ids.shape[1] == weights.shape[1], "num_topk == topk_weights->size(1)", line + 7)
    check_size(weights.dtype == torch.float32, "topk_weights->scalar_type() == torch::kFloat32", line + 8)
    check_ids(ids)
    device_assert(ids.shape[1] <= 32, "num_topk <= 32", kernel)


def check_ids(topk_idx: Tensor) -> None:
    """Refuse ids that are not int64, with the text of torch's ``data_ptr<int64_t>()``."""
    if topk_idx.dtype != torch.int64:
        found = {torch.int32: "Int", torch.int16: "Short", torch.uint8: "Byte"}.get(topk_idx.dtype, topk_idx.dtype)
        raise RuntimeError(f"expected scalar type Long but found {found}")


def check_scales(sent: DispatchInput, *, line: int) -> None:
    """Check the scales of float8 rows (:377-380 within a node, :742-745 between nodes)."""
    if sent.scales is None:
        return
    check_size(sent.x.element_size() == 1, "x.element_size() == 1", line)
    types = "x_scales->scalar_type() == torch::kFloat32 or x_scales->scalar_type() == torch::kInt"
    check_size(sent.scales.dtype in (torch.float32, torch.int32), types, line + 1)
    check_size(sent.scales.dim() == 2, "x_scales->dim() == 2", line + 2)
    check_size(sent.scales.shape[0] == sent.x.shape[0], "x_scales->size(0) == num_tokens", line + 3)


def check_combined_weights(sent: CombineInput, num_rows: int, *, line: int, kernel: str) -> None:
    """Check the weights of combine (:585-587 within a node, :987-989 between nodes)."""
    weights = sent.topk_weights
    if weights is None:
        return
    check_matrix(weights, "topk_weights->", line)
    check_size(weights.shape[0] == num_rows, "topk_weights->size(0) == num_tokens", line + 1)
    check_size(weights.dtype == torch.float32, "topk_weights->scalar_type() == torch::kFloat32", line + 2)
    device_assert(weights.shape[1] <= 32, "num_topk <= 32", kernel)


def check_biases(sent: CombineInput, num_tokens: int, *, rows: str, line: int) -> None:
    """Check the biases of combine (:606-608 within a node, :1016-1018 between nodes).

    ``rows`` is the name of the number of tokens in the source.
    """
    for bias in sent.biases:
        check_matrix(bias, "bias.", line)
        check_size(bias.dtype == sent.x.dtype, "bias.scalar_type() == x.scalar_type()", line + 1)
        fits = bias.shape == (num_tokens, sent.x.shape[1])
        check_size(fits, f"bias.size(0) == {rows} and bias.size(1) == hidden", line + 2)


def check_sizes(num_ranks: int, num_nvl_bytes: int, num_rdma_bytes: int) -> None:
    """Make the checks of the constructor (csrc/deep_ep.cpp:27-32)."""
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
    """Refuse a number of ranks in a node for which the release has no kernels."""
    host_assert(num_ranks in (2, 4, 8), 'false and "Unsupported ranks"', "csrc/kernels/launch.cuh:59")


def require_true_counts(layout: DispatchLayout) -> None:
    """Abort if ``num_tokens_per_rank`` does not count ``is_token_in_rank``. The release does not compare the two.

    Source: num_tokens_per_rank gives the size of recv_x (csrc/kernels/intranode.cu:54-59), and is_token_in_rank decides
    which rows are written to it (:286-293).
    """
    flagged = layout.is_token_in_rank.sum(0, dtype=torch.int32)
    if not torch.equal(flagged, layout.tokens_per_rank):
        raise EmulatedAbort(
            "Buffer.dispatch: num_tokens_per_rank must count is_token_in_rank, got "
            f"{layout.tokens_per_rank.tolist()} for {flagged.tolist()}. "
            "The kernel writes outside recv_x. Take both from get_dispatch_layout."
        )


def require_met(where: str, sent: list[list[int]], awaited: list[list[int]]) -> None:
    """Hang if ranks send other numbers of rows (P, P) than their receivers wait for, because their handles differ."""
    if sent != awaited:
        raise EmulatedHang(
            f"{where}: the handles of all ranks must come from one dispatch, got rows {sent} to send and "
            f"{awaited} to wait for. The kernels run into their time-out of 100 s."
        )
