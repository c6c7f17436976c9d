"""Recompute dispatches on the routes of their forwards in Megatron's activation checkpoints."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from types import FunctionType
from typing import Any

from moe_dispatch.capabilities.recompute.modules import KeepingCheckpoint, KeepingRouter
from moe_dispatch.integrations.megatron.core import MoELayer, TopKRouter, tensor_parallel

_AFTER_EXPERTS = "forward", "combine", "postprocess"  # methods of MoELayer


def keep_routes(*, only_added: bool = False) -> ExitStack:
    """Let all of Megatron's checkpoints in this process keep routes, as ``moe_dispatch.recompute.keep_routes`` does.

    ``tensor_parallel.checkpoint`` is replaced by a function that calls it. ``recompute_granularity="full"`` uses it,
    and ``"selective"`` with ``"moe"`` or ``"mlp"``. A recomputation of ``"moe_act"`` alone repeats no dispatch. With
    float8 or float4 recipes Megatron calls transformer-engine's own checkpoint, which dispatches anew. A second call
    does nothing. Call it on all ranks.

    Routers that choose by ``torch.topk`` get the ids of their forwards, so without ``moe_router_fusion``.

    Args:
        only_added: As in ``moe_dispatch.recompute.keep_routes``, for the calls of ``"full"``: that of one layer is
            such a call. ``"moe"`` and ``"mlp"`` leave out ``combine`` by themselves, unless ``moe_latent_size`` is set
            or a subclass of ``MoELayer`` has its own way to combine.

    Returns:
        What ends it: a context manager, and its ``close`` does the same. Forwards from before keep routes and ids.
    """
    ends = ExitStack()
    if not isinstance(vars(TopKRouter)["forward"], KeepingRouter):
        # It stays for forwards that are live when this ends. Without routes that are kept, it does nothing.
        TopKRouter.forward = KeepingRouter(TopKRouter.forward)
    if not isinstance(tensor_parallel.checkpoint, KeepingCheckpoint):
        ends.callback(setattr, tensor_parallel, "checkpoint", tensor_parallel.checkpoint)
        tensor_parallel.checkpoint = KeepingCheckpoint(
            tensor_parallel.checkpoint, lambda function: only_added or _is_moe_layer(function)
        )
    return ends


def _is_moe_layer(function: Callable[..., Any]) -> bool:
    """Return whether a checkpointed function runs an MoE layer, which adds shared experts to what it has combined."""
    layer: Any = function.func if isinstance(function, partial) else function
    if isinstance(layer, FunctionType):
        cells = dict(zip(layer.__code__.co_freevars, layer.__closure__ or (), strict=True))
        layer = cells["self"].cell_contents if "self" in cells else None
    return (
        isinstance(layer, MoELayer)
        and not getattr(layer.config, "moe_latent_size", None)
        and all(getattr(type(layer), name, None) is getattr(MoELayer, name, None) for name in _AFTER_EXPERTS)
    )
