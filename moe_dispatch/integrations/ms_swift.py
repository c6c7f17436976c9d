"""Convert the Megatron models that ms-swift builds. A file for ``--external_plugins`` imports this module.

``MOE_DISPATCH_BACKEND`` names the backend. This module imports neither ms-swift nor megatron-core.
"""

from __future__ import annotations

from moe_dispatch.integrations.built_models import convert_built

# The functions for its two values of bridge_backend, mcore-bridge and megatron-bridge.
convert_built("swift.megatron.model.utils", "_get_mcore_model", "_get_megatron_bridge_model")
