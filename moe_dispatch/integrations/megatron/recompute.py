"""Recompute dispatches on the routes of their forwards in Megatron's activation checkpoints."""

from __future__ import annotations

from contextlib import ExitStack

from moe_dispatch.integrations.megatron.core import tensor_parallel
from moe_dispatch.recompute.modules import KeepingCheckpoint


def keep_routes() -> ExitStack:
    """Let all of Megatron's checkpoints in this process keep routes, as ``moe_dispatch.recompute.keep_routes`` does.

    ``tensor_parallel.checkpoint`` is replaced by a function that calls it. ``recompute_granularity="full"`` uses it,
    and ``"selective"`` with ``"moe"`` or ``"mlp"``. A recomputation of ``"moe_act"`` alone repeats no dispatch. With
    float8 or float4 recipes Megatron calls transformer-engine's own checkpoint, which dispatches anew. A second call
    does nothing. Call it on all ranks.

    Returns:
        What ends it: a context manager, and its ``close`` does the same. Forwards from before keep their routes.
    """
    ends, before = ExitStack(), tensor_parallel.checkpoint
    if not isinstance(before, KeepingCheckpoint):
        tensor_parallel.checkpoint = KeepingCheckpoint(before)
        ends.callback(setattr, tensor_parallel, "checkpoint", before)
    return ends
