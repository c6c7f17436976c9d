"""MoE layers of Megatron's with a MegatronDispatcher: by spec before they are built, or converted afterwards."""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterable
from typing import Any, final

from torch import Tensor, nn

from moe_dispatch.errors import ConfigError
from moe_dispatch.integrations.megatron.core import ModuleSpec, MoELayer, ProcessGroupCollection
from moe_dispatch.integrations.megatron.dispatcher import MegatronDispatcher
from moe_dispatch.integrations.megatron.packed import follow_packed_sequences
from moe_dispatch.integrations.megatron.settings import check_settings

# Experts that split rows by counts on the host; with the op fuser TEGroupedMLP does not.
_HOST_COUNTING = {"SequentialMLP", "GroupedMLP", "TEGroupedMLP"}


def convert(
    model: nn.Module | Iterable[nn.Module], *, backend: str | dict[str, Any] = "alltoall", **given: Any
) -> None:
    """Give every MoE layer of a built model a MegatronDispatcher. Parameters and state-dict keys stay as they are.

    Args:
        model: a GPTModel or any other module with MoE layers, wrapped or not; or the chunks of this pipeline stage. On
            a stage whose layers are all dense, in a model with experts, there is nothing to do.
        backend: as in a DispatcherConfig.
        **given: as for ``MegatronDispatcher``.

    Raises:
        ConfigError: there are no MoE layers, or a setting is not supported.

    Cost: collective over each layer's ranks, like building. May be called again, with another backend.
    """
    chunks = [model] if isinstance(model, nn.Module) else list(model)
    found = False
    for chunk in chunks:
        for path, module in chunk.named_modules():
            if isinstance(module, MoELayer):
                found = True
                replace_dispatcher(module, **{"backend": backend, "name": path, **given})
    if not found and not any(_has_experts(module) for chunk in chunks for module in chunk.modules()):
        kinds = ", ".join(type(chunk).__name__ for chunk in chunks) or "nothing"
        raise ConfigError(
            f"convert: the model must have MoE layers, got {kinds} without one. Set num_moe_experts, or leave the "
            "model as it is."
        )
    for chunk in chunks:
        follow_packed_sequences(chunk)


@final
class DispatchMoELayer(MoELayer):  # type: ignore[misc]
    """Megatron's MoELayer that is built with a MegatronDispatcher; ``moe_layer_spec`` puts it into a spec.

    Args:
        config: its TransformerConfig.
        *args: as for an MoELayer.
        dispatch: keywords of ``MegatronDispatcher``.
        **kwargs: as for an MoELayer.
    """

    def __init__(self, config: Any, *args: Any, dispatch: dict[str, Any], **kwargs: Any) -> None:
        check_settings(config)  # before Megatron builds a dispatcher of its own for them
        super().__init__(config, *args, **kwargs)
        named = {"name": kwargs["name"]} if kwargs.get("name") else {}  # 0.16 gives no names
        replace_dispatcher(self, **{**named, **dispatch})


def moe_layer_spec(
    spec: Any, *, backend: str | dict[str, Any] = "alltoall", pg_collection: Any = None, **given: Any
) -> Any:
    """The spec of an MoE layer, or of a transformer layer with one, with a MegatronDispatcher in it.

    Args:
        spec: what Megatron's ``get_moe_module_spec`` or ``get_gpt_layer_*_spec`` returned; it is not changed.
        backend: as in a DispatcherConfig.
        pg_collection: the layer's groups. Needed where Megatron's global ones are not initialised on 0.16, which gives
            groups to no class but its own.
        **given: as for ``MegatronDispatcher``.

    Raises:
        ConfigError: it holds no MoE layer.
    """
    params = {"dispatch": {"backend": backend, **given}}
    if pg_collection is not None:
        params["pg_collection"] = pg_collection
    found = _with_dispatch(spec, params)
    if found is None:
        raise ConfigError(
            f"moe_layer_spec: the spec must hold an MoE layer, got {spec!r:.200}. Pass that of an MoE layer."
        )
    return found


def _with_dispatch(spec: Any, params: dict[str, Any]) -> Any:
    """The spec with our layer for Megatron's, or None; specs are ModuleSpecs on 0.16, partial classes on 0.19."""
    if isinstance(spec, functools.partial):
        if spec.func not in (MoELayer, DispatchMoELayer):
            return None
        return functools.partial(DispatchMoELayer, *spec.args, **{**spec.keywords, **params})
    if not isinstance(spec, ModuleSpec):
        return None
    changed = copy.copy(spec)
    if spec.module in (MoELayer, DispatchMoELayer):
        changed.module, changed.params = DispatchMoELayer, {**spec.params, **params}
        return changed
    mlp = _with_dispatch(getattr(spec.submodules, "mlp", None), params)
    if mlp is None:
        return None
    changed.submodules = copy.copy(spec.submodules)
    changed.submodules.mlp = mlp
    return changed


def replace_dispatcher(layer: Any, **given: Any) -> None:
    """Put a MegatronDispatcher where the layer has its dispatcher, on the same groups."""
    old = layer.token_dispatcher
    groups = ProcessGroupCollection()
    groups.ep, groups.expt_tp, groups.tp_ep = old.ep_group, old.tp_group, old.tp_ep_group
    new = MegatronDispatcher(
        layer.num_local_experts, layer.local_expert_indices, config=layer.config, pg_collection=groups, **given
    )
    _check_experts(layer.experts, new)
    layer.token_dispatcher = new
    if layer.use_shared_expert and layer.shared_expert_overlap:
        new.set_shared_experts(layer.shared_experts)
    if isinstance(old, MegatronDispatcher):
        old.close()
    else:
        layer.router.register_forward_hook(_route_no_padding, with_kwargs=True)
    _own_padding(layer.experts, new)


def _route_no_padding(
    router: Any, args: tuple[Any, ...], kwargs: dict[str, Any], routed: tuple[Tensor, Tensor]
) -> tuple[Tensor, Tensor]:
    """Send rows of the padding mask nowhere. It is True where a row is padding, as Megatron's routers take it."""
    mask_SB = kwargs.get("padding_mask", args[1] if len(args) > 1 else None)
    if mask_SB is None:
        return routed
    probs_TE, routing_map_TE = routed
    return probs_TE, routing_map_TE & ~mask_SB.reshape(-1, 1)


def _own_padding(experts: Any, dispatcher: MegatronDispatcher) -> None:
    """Tell experts that their rows come padded: those of 0.19 ask their config whether a router has done it."""
    config = getattr(experts, "config", None)
    if dispatcher.dispatcher.config.pad_multiple_rows > 1 and config is not None:
        experts.config = copy.copy(config)  # not the model's, which its other layers read
        experts.config.moe_router_padding_for_quantization = True


def _check_experts(experts: Any, dispatcher: MegatronDispatcher) -> None:
    names = {cls.__name__ for cls in type(experts).__mro__}
    if not dispatcher.dispatcher.config.graph_safe or not names & _HOST_COUNTING:
        return
    if not ("TEGroupedMLP" in names and getattr(experts.config, "use_transformer_engine_op_fuser", False)):
        dispatcher.close()
        raise ConfigError(
            f"MegatronDispatcher: graph_safe=True needs experts that leave their counts on the device, got "
            f"{type(experts).__name__}. Use TEGroupedMLP with use_transformer_engine_op_fuser, or leave graph_safe out."
        )


def _has_experts(module: Any) -> bool:
    return bool(getattr(getattr(module, "config", None), "num_moe_experts", None))
