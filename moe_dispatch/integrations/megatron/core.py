"""The parts of megatron-core that this package uses. No other module of the package imports megatron-core."""

from __future__ import annotations

from moe_dispatch.integrations.checks import check_version

# This check comes before the imports, which may fail with a less helpful error in an older version.
VERSION = check_version("megatron-core")

from megatron.core import tensor_parallel  # noqa: E402
from megatron.core.process_groups_config import ProcessGroupCollection  # noqa: E402
from megatron.core.transformer.moe.moe_layer import MoELayer  # noqa: E402
from megatron.core.transformer.moe.moe_utils import get_align_size_for_quantization  # noqa: E402
from megatron.core.transformer.moe.router import TopKRouter  # noqa: E402
from megatron.core.transformer.spec_utils import ModuleSpec  # noqa: E402
from megatron.core.transformer.transformer_block import TransformerBlock  # noqa: E402
from megatron.core.transformer.transformer_layer import TransformerLayer  # noqa: E402

__all__ = [
    "VERSION",
    "MoELayer",
    "ModuleSpec",
    "ProcessGroupCollection",
    "TopKRouter",
    "TransformerBlock",
    "TransformerLayer",
    "get_align_size_for_quantization",
    "tensor_parallel",
]
