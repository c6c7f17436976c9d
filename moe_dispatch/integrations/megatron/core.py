"""The parts of megatron-core that this package uses. No other module of the package imports megatron-core."""

from __future__ import annotations

from moe_dispatch.errors import IntegrationError
from moe_dispatch.integrations.checks import check_version
from moe_dispatch.versions import SUPPORT

# This check comes before the imports, which may fail with a less helpful error in an older version.
VERSION = check_version("megatron-core")

try:
    from megatron.core import tensor_parallel
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer.moe.moe_layer import MoELayer
    from megatron.core.transformer.moe.moe_utils import get_align_size_for_quantization
    from megatron.core.transformer.moe.router import TopKRouter
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.transformer_block import TransformerBlock
    from megatron.core.transformer.transformer_layer import TransformerLayer
except ImportError as error:
    raise IntegrationError(
        f"megatron-core {VERSION} lacks a part that this integration needs: {error}. Tested versions: "
        f"{', '.join(SUPPORT['megatron-core'].tested)}. Install one of them."
    ) from error

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
