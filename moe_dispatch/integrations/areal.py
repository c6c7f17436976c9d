"""Convert the models of AReaL's Megatron engine, in every process that imports this module.

``MOE_DISPATCH_BACKEND`` names the backend. Import this module in the training script if ``torchrun`` starts it. If a
scheduler starts workers, let their command be ``python -m moe_dispatch.integrations.areal``, which runs AReaL's RPC
server. Workers of other roles that are forked from these run this module too.

This module imports neither AReaL nor megatron-core.
"""

from __future__ import annotations

import functools
import runpy
from collections.abc import Callable, Sequence
from typing import Any

from moe_dispatch.integrations.built_models import convert_built, wrap_function

_SERVER, _OURS = "areal.infra.rpc.rpc_server", "moe_dispatch.integrations.areal"


def _fork_ours(start: Callable[..., Any]) -> Callable[..., Any]:
    """Let a forked worker run this module. The scheduler names AReaL's own server for it, whatever the command was."""

    @functools.wraps(start)
    def start_ours(command: Sequence[str], *args: Any, **kwargs: Any) -> Any:
        return start([_OURS if word == _SERVER else word for word in command], *args, **kwargs)

    return start_ours


# The modules import these functions by name, so the modules are the places where the names must change.
convert_built("areal.engine.megatron_engine", "make_mcore_model")
wrap_function("areal.infra.rpc.guard.app", "run_with_streaming_logs", _fork_ours)

if __name__ == "__main__":
    runpy.run_module(_SERVER, run_name="__main__")
