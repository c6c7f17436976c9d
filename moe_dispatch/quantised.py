"""Rows of 8 bits as experts get them, and adapters from ``sent.quantised`` to grouped GEMMs."""

from moe_dispatch.capabilities.quantised.adapters import (
    blocked_scales,
    deep_gemm_layout,
    deep_gemm_pair,
    gradient_as,
    grouped_gemm,
    mx_tensor,
    quantised_gradient,
    te_grouped_tensor,
    torch_arguments,
)
from moe_dispatch.capabilities.quantised.options import QuantisedOptions
from moe_dispatch.capabilities.quantised.rows import QuantisedRows

__all__ = [
    "QuantisedOptions",
    "QuantisedRows",
    "blocked_scales",
    "deep_gemm_layout",
    "deep_gemm_pair",
    "gradient_as",
    "grouped_gemm",
    "mx_tensor",
    "quantised_gradient",
    "te_grouped_tensor",
    "torch_arguments",
]
