"""Recompute dispatches on the routes of their forwards in Megatron's activation checkpoints."""

from __future__ import annotations

from moe_dispatch.integrations.megatron.core import tensor_parallel
from moe_dispatch.recompute.modules import KeepingCheckpoint


def keep_routes() -> None:
    """Let all of Megatron's checkpoints in this process keep routes, as ``moe_dispatch.recompute.keep_routes`` does.

    ``tensor_parallel.checkpoint`` is replaced by a function that calls it. ``recompute_granularity="full"`` uses it,
    and ``"selective"`` with ``"moe"`` or ``"mlp"``. A recomputation of ``"moe_act"`` alone repeats no dispatch. With
    float8 or float4 recipes Megatron calls transformer-engine's own checkpoint, which dispatches anew. A second call
    does nothing. Call it on all ranks.
    """
    if not isinstance(tensor_parallel.checkpoint, KeepingCheckpoint):
        tensor_parallel.checkpoint = KeepingCheckpoint(tensor_parallel.checkpoint)
