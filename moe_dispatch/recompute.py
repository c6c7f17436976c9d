"""Recompute a dispatch on the route of its forward, in activation checkpointing.

    checkpoint(layer, x)

See ``docs/training.md``.
"""

from moe_dispatch.capabilities.recompute.contexts import checkpoint, keep_ids, keep_routes, keep_routes_of
from moe_dispatch.capabilities.recompute.modules import keep_routes_in

__all__ = ["checkpoint", "keep_ids", "keep_routes", "keep_routes_in", "keep_routes_of"]
