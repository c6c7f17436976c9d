"""The checks of v1's Buffer on what it is called with, in the words of v1.2.1, where both of its transports share them.

csrc/deep_ep.cpp has the same checks within a node and between nodes, in the same order: ``line`` is the first of a run.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moe_dispatch.testing.emulation.config import Config
from moe_dispatch.testing.emulation.normal.calls import CPP, Sent
from moe_dispatch.testing.emulation.refusals import device_assert, host_assert

INT4_BYTES = 16


def check_config(config: Config, line: int) -> None:
    """A channel is a pair of SMs: one sends, one receives."""
    host_assert(config.has_even_sms, "config.num_sms % 2 == 0", f"{CPP}:{line}")


def check_matrix(tensor: Tensor, name: str, line: int) -> None:
    """``name`` is how the source reaches it: ``x.`` or ``topk_idx->``."""
    holds = tensor.dim() == 2 and tensor.is_contiguous()
    host_assert(holds, f"{name}dim() == 2 and {name}is_contiguous()", f"{CPP}:{line}")


def check_row_bytes(x: Tensor, size: str, line: int) -> None:
    """``size`` is how the source calls the width of a row."""
    holds = x.shape[1] * x.element_size() % INT4_BYTES == 0
    host_assert(holds, f"({size} * x.element_size()) % sizeof(int4) == 0", f"{CPP}:{line}")


def check_int32(tensor: Tensor, name: str, line: int) -> None:
    """Counts and prefix sums."""
    host_assert(tensor.dtype == torch.int32, f"{name}scalar_type() == torch::kInt32", f"{CPP}:{line}")


def check_size(holds: bool, condition: str, line: int) -> None:
    """Any condition of csrc/deep_ep.cpp."""
    host_assert(holds, condition, f"{CPP}:{line}")


def check_topk(sent: Sent, num_experts: int, *, line: int, kernel: str) -> None:
    """Ids and weights: :360-369 within a node, :725-734 between nodes; ``kernel`` names the trap for a large top-k."""
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
    """``data_ptr<int64_t>()`` refuses other types, as torch says it."""
    if topk_idx.dtype != torch.int64:
        found = {torch.int32: "Int", torch.int16: "Short", torch.uint8: "Byte"}.get(topk_idx.dtype, topk_idx.dtype)
        raise RuntimeError(f"expected scalar type Long but found {found}")


def check_scales(sent: Sent, *, line: int) -> None:
    """Scales of float8 rows: :377-380 within a node, :742-745 between nodes."""
    if sent.scales is None:
        return
    check_size(sent.x.element_size() == 1, "x.element_size() == 1", line)
    types = "x_scales->scalar_type() == torch::kFloat32 or x_scales->scalar_type() == torch::kInt"
    check_size(sent.scales.dtype in (torch.float32, torch.int32), types, line + 1)
    check_size(sent.scales.dim() == 2, "x_scales->dim() == 2", line + 2)
    check_size(sent.scales.shape[0] == sent.x.shape[0], "x_scales->size(0) == num_tokens", line + 3)


def check_combined_weights(topk_weights: Tensor | None, num_rows: int, *, line: int, kernel: str) -> None:
    """Weights of combine: :585-587 within a node, :987-989 between nodes."""
    if topk_weights is None:
        return
    check_matrix(topk_weights, "topk_weights->", line)
    check_size(topk_weights.shape[0] == num_rows, "topk_weights->size(0) == num_tokens", line + 1)
    check_size(topk_weights.dtype == torch.float32, "topk_weights->scalar_type() == torch::kFloat32", line + 2)
    device_assert(topk_weights.shape[1] <= 32, "num_topk <= 32", kernel)


def check_biases(biases: list[Tensor], x: Tensor, num_tokens: int, *, rows: str, line: int) -> None:
    """Biases of combine: :606-608 within a node, :1016-1018 between nodes; ``rows`` is the source's word for tokens."""
    for bias in biases:
        check_matrix(bias, "bias.", line)
        check_size(bias.dtype == x.dtype, "bias.scalar_type() == x.scalar_type()", line + 1)
        fits = bias.shape == (num_tokens, x.shape[1])
        check_size(fits, f"bias.size(0) == {rows} and bias.size(1) == hidden", line + 2)
