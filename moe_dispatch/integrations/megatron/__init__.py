"""megatron-core: MoE layers with the Dispatcher instead of Megatron's own token dispatchers.

``convert(model, backend=...)`` takes a built model; ``moe_layer_spec(spec, backend=...)`` takes the spec of a layer
that is still to be built.
"""

from moe_dispatch.integrations.megatron.dispatcher import MegatronDispatcher
from moe_dispatch.integrations.megatron.layers import (
    DispatchMoELayer,
    convert,
    follow_packed_sequences,
    moe_layer_spec,
)

__all__ = ["DispatchMoELayer", "MegatronDispatcher", "convert", "follow_packed_sequences", "moe_layer_spec"]
