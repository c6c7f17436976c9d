"""Expert parallelism for models of transformers, through its public registries.

    register(config_for(model_config, backend="alltoall"))
    model = AutoModelForCausalLM.from_pretrained(path, distributed_config=DistributedConfig(
        fsdp_size=8, ep_size=8, ep_implementation="moe_dispatch"))
    attach(model)

``register`` registers a config under a name. transformers then wires the experts to it. ``attach`` makes every forward
pass its padding to the dispatchers. ``RoutingReplay`` makes the routers choose the experts of a ``RoutingTable``.
"""

from moe_dispatch.integrations.transformers.model_config import config_for
from moe_dispatch.integrations.transformers.registration import attach, dispatchers_of, register
from moe_dispatch.integrations.transformers.replay import RoutingReplay

__all__ = ["RoutingReplay", "attach", "config_for", "dispatchers_of", "register"]
