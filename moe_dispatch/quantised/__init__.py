"""The plug-in for rows of 8 bits: wire formats, and adapters from ``sent.quantised`` to grouped GEMMs.

- ``formats`` has the wire formats "float8_e4m3fn" and "mxfp8", and finds those of other packages.
- ``options`` has the options of ``wire``.
- ``rows`` has quantised rows as experts get them, and their gradients.
- ``adapters`` has the functions below, for torch, torchao, transformer-engine and DeepGEMM.

The core imports it when a config asks for a ``wire`` other than "bfloat16". The seam is
``moe_dispatch.backends.wire``.
"""

from moe_dispatch.quantised.adapters import (
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
from moe_dispatch.quantised.options import QuantisedOptions
from moe_dispatch.quantised.rows import QuantisedRows

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
