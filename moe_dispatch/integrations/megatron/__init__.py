"""MoE layers of megatron-core with a Dispatcher instead of Megatron's own token dispatchers.

``convert(model, backend=...)`` changes a model that is built. ``moe_layer_spec(spec, backend=...)`` changes the spec of
a layer before the layer is built. ``pre_wrap_hook(backend=...)`` returns a hook for frameworks that build through
Megatron-Bridge. ``keep_routes()`` lets recomputed dispatches take the routes of their forwards.
"""

from moe_dispatch.integrations.megatron.dispatcher import MegatronDispatcher
from moe_dispatch.integrations.megatron.layers import (
    DispatchMoELayer,
    convert,
    follow_packed_sequences,
    moe_layer_spec,
    pre_wrap_hook,
)
from moe_dispatch.integrations.megatron.recompute import keep_routes
from moe_dispatch.integrations.megatron.replay import RoutingReplay

__all__ = [
    "DispatchMoELayer",
    "MegatronDispatcher",
    "RoutingReplay",
    "convert",
    "follow_packed_sequences",
    "keep_routes",
    "moe_layer_spec",
    "pre_wrap_hook",
]
