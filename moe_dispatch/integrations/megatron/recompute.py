"""Recompute dispatches on the routes of their forwards in Megatron's activation checkpoints."""

from __future__ import annotations

from contextlib import ExitStack

from moe_dispatch.integrations.megatron.core import TopKRouter, tensor_parallel
from moe_dispatch.recompute.modules import KeepingCheckpoint, KeepingRouter


def keep_routes() -> ExitStack:
    """Let all of Megatron's checkpoints in this process keep routes, as ``moe_dispatch.recompute.keep_routes`` does.

    ``tensor_parallel.checkpoint`` is replaced by a function that calls it. ``recompute_granularity="full"`` uses it,
    and ``"selective"`` with ``"moe"`` or ``"mlp"``. A recomputation of ``"moe_act"`` alone repeats no dispatch. With
    float8 or float4 recipes Megatron calls transformer-engine's own checkpoint, which dispatches anew. A second call
    does nothing. Call it on all ranks.

    Routers that choose by ``torch.topk`` get the ids of their forwards, so without ``moe_router_fusion``.

    Returns:
        What ends it: a context manager, and its ``close`` does the same. Forwards from before keep routes and ids.
    """
    ends = ExitStack()
    if not isinstance(vars(TopKRouter)["forward"], KeepingRouter):
        # It stays for forwards that are live when this ends. Without routes that are kept, it does nothing.
        TopKRouter.forward = KeepingRouter(TopKRouter.forward)
    if not isinstance(tensor_parallel.checkpoint, KeepingCheckpoint):
        ends.callback(setattr, tensor_parallel, "checkpoint", tensor_parallel.checkpoint)
        tensor_parallel.checkpoint = KeepingCheckpoint(tensor_parallel.checkpoint)
    return ends
