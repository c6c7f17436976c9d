"""Convert the models of AReaL's Megatron engine, in every process that imports this module.

``MOE_DISPATCH_BACKEND`` names the backend. Import this module in the training script if ``torchrun`` starts it. If a
scheduler starts workers, let their command be ``python -m moe_dispatch.integrations.areal``, which runs AReaL's RPC
server.

This module imports neither AReaL nor megatron-core.
"""

from __future__ import annotations

import runpy

from moe_dispatch.integrations.built_models import convert_built

# The engine imports make_mcore_model by name, so its own module is the place where the name must change.
convert_built("areal.engine.megatron_engine", "make_mcore_model")

if __name__ == "__main__":
    runpy.run_module("areal.infra.rpc.rpc_server", run_name="__main__")
