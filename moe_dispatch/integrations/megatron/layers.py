"""MoE layers of Megatron with a MegatronDispatcher: by spec before they are built, or by ``convert`` afterwards.

Megatron passes packed sequences through its transformer layers as ``PackedSeqParams``. Hooks on these layers turn them
into a padding mask. Hooks on a transformer block let its MoE layers share plans.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterable, Mapping
from math import prod
from typing import Any, final

import torch
from torch import Tensor, nn

from moe_dispatch.backends.registry import BackendName
from moe_dispatch.errors import ConfigError
from moe_dispatch.integrations.megatron.core import (
    ModuleSpec,
    MoELayer,
    ProcessGroupCollection,
    TransformerBlock,
    TransformerLayer,
)
from moe_dispatch.integrations.megatron.dispatcher import MegatronDispatcher
from moe_dispatch.integrations.megatron.padding import leave_padding_out
from moe_dispatch.integrations.megatron.settings import check_settings, overlaps
from moe_dispatch.integrations.megatron.slots import SlotExperts
from moe_dispatch.layouts import THD, Layout, ShardKind
from moe_dispatch.types import Plan

# Experts that split rows by counts on the host. TEGroupedMLP with the op fuser does not.
_HOST_COUNTING = {"SequentialMLP", "GroupedMLP", "TEGroupedMLP"}


def convert(
    model: nn.Module | Iterable[nn.Module], *, backend: BackendName | str | Mapping[str, Any] = "alltoall", **given: Any
) -> None:
    """Give every MoE layer of a built model a MegatronDispatcher. Parameters and state-dict keys do not change.

    Args:
        model: A GPTModel or another module with MoE layers, wrapped or not; or the chunks of this pipeline stage.
            If the model has experts, a stage may have dense layers only.
        backend: As in a DispatcherConfig.
        **given: As for ``MegatronDispatcher``.

    Raises:
        ConfigError: There are no MoE layers, or a setting is not supported.

    Cost: collective over the ranks of each layer. It may be called again, with another backend.
    """
    chunks = [model] if isinstance(model, nn.Module) else list(model)
    found = False
    for chunk in chunks:
        for path, module in chunk.named_modules():
            if isinstance(module, MoELayer):
                found = True
                replace_dispatcher(module, **{"backend": backend, "name": path, **given})
    configs = [getattr(module, "config", None) for chunk in chunks for module in chunk.modules()]
    if not found and not any(getattr(config, "num_moe_experts", None) for config in configs):
        kinds = ", ".join(type(chunk).__name__ for chunk in chunks) or "nothing"
        raise ConfigError(
            f"convert: the model ({kinds}) has no MoE layers. Set num_moe_experts, or leave the model as it is."
        )
    for chunk in chunks:
        follow_packed_sequences(chunk)


def pre_wrap_hook(
    *, backend: BackendName | str | Mapping[str, Any] = "alltoall", **given: Any
) -> Callable[[list[nn.Module]], list[nn.Module]]:
    """Return a function that converts the chunks of a pipeline stage, for trainers that build through Megatron-Bridge.

    The Bridge calls such hooks on the built layers, before it wraps them for data parallelism. So this hook comes after
    every place where the Bridge chooses a dispatcher:

        provider.register_pre_wrap_hook(pre_wrap_hook(backend="hybridep"))
        model_config.pre_wrap_hooks.append(pre_wrap_hook(backend="hybridep"))

    Args:
        backend: As in a DispatcherConfig.
        **given: As for ``MegatronDispatcher``.

    Raises:
        ConfigError: As for ``convert``. The function raises it, not ``pre_wrap_hook``.
    """

    def convert_chunks(chunks: list[nn.Module]) -> list[nn.Module]:
        convert(chunks, backend=backend, **given)
        return chunks

    return convert_chunks


@final
class DispatchMoELayer(MoELayer):  # type: ignore[misc]
    """A MoELayer with a MegatronDispatcher, for ``moe_layer_spec``. ``dispatch`` holds keywords of the dispatcher."""

    def __init__(self, config: Any, *args: Any, dispatch: dict[str, Any], **kwargs: Any) -> None:
        check_settings(config)  # before Megatron builds its own dispatcher
        super().__init__(config, *args, **kwargs)
        named = {"name": kwargs["name"]} if kwargs.get("name") else {}  # Megatron 0.16 passes no names
        replace_dispatcher(self, **{**named, **dispatch})


def moe_layer_spec(
    spec: Any, *, backend: BackendName | str | Mapping[str, Any] = "alltoall", pg_collection: Any = None, **given: Any
) -> Any:
    """Return a copy of a spec in which every MoE layer has a MegatronDispatcher.

    Args:
        spec: The spec of an MoE layer, of a transformer layer, or of a block of layers: the result of Megatron's
            ``get_moe_module_spec``, ``get_gpt_layer_*_spec``, ``get_gpt_decoder_block_spec`` or
            ``get_gpt_mtp_block_spec``. It is not changed.
        backend: Backend, as in a DispatcherConfig.
        pg_collection: Groups of the layer. They are needed with Megatron 0.16 if its global groups are not initialised,
            because 0.16 passes groups to its own layer class only.
        **given: As for ``MegatronDispatcher``.

    Raises:
        ConfigError: The spec holds no MoE layer. Only the spec of a block may hold dense layers alone, because the
            block of a pipeline stage may. Such a spec is returned as it is.
    """
    params = {"dispatch": {"backend": backend, **given}}
    if pg_collection is not None:
        params["pg_collection"] = pg_collection
    found = _with_dispatch(spec, params)
    if found is spec and not hasattr(getattr(spec, "submodules", spec), "layer_specs"):
        raise ConfigError(
            f"moe_layer_spec: the spec must hold an MoE layer, got {spec!r:.200}. Pass the spec of an MoE layer, or of "
            "a layer or a block with MoE layers."
        )
    return found


def _with_dispatch(spec: Any, params: dict[str, Any]) -> Any:
    """Return a copy of the spec with our layer class, or the spec itself if it holds no MoE layer.

    The spec of an MoE layer is a ModuleSpec in 0.16, and a partial class in 0.19. Other ModuleSpecs hold a dataclass of
    submodules. Its fields are specs, or lists of specs.
    """
    layers = (MoELayer, DispatchMoELayer)
    if isinstance(spec, functools.partial) and spec.func in layers:
        return functools.partial(DispatchMoELayer, *spec.args, **{**spec.keywords, **params})
    if isinstance(spec, ModuleSpec) and spec.module in layers:
        changed = copy.copy(spec)
        changed.module, changed.params = DispatchMoELayer, {**spec.params, **params}
        return changed
    if isinstance(spec, list):
        items = [_with_dispatch(item, params) for item in spec]
        return items if any(new is not old for new, old in zip(items, spec, strict=True)) else spec
    if not dataclasses.is_dataclass(spec) or isinstance(spec, type):
        return spec
    fields = {field.name: getattr(spec, field.name) for field in dataclasses.fields(spec)}
    changes = {name: new for name, old in fields.items() if (new := _with_dispatch(old, params)) is not old}
    if not changes:
        return spec
    changed = copy.copy(spec)
    for name, new in changes.items():
        setattr(changed, name, new)
    return changed


def replace_dispatcher(layer: Any, **given: Any) -> None:
    """Replace the layer's dispatcher by a MegatronDispatcher on the same groups."""
    old = layer.token_dispatcher
    check_settings(layer.config)
    if (manager := getattr(old, "_comm_manager", None)) is not None:
        raise ConfigError(
            "MegatronDispatcher: the layer must be built with Megatron's alltoall or allgather dispatcher, got "
            f"{type(old).__name__} with {type(manager).__name__}, whose buffers and group would stay. Set "
            'moe_token_dispatcher_type="alltoall" before the model is built.'
        )
    groups = ProcessGroupCollection()
    groups.ep, groups.expt_tp, groups.tp_ep = old.ep_group, old.tp_group, old.tp_ep_group
    balanced = None if given.get("balance") is None else SlotExperts(layer.experts)
    new = MegatronDispatcher(
        layer.num_local_experts, layer.local_expert_indices, config=layer.config, pg_collection=groups, **given
    )
    _check_experts(layer.experts, new)
    layer.token_dispatcher = new
    layer.experts.__dict__.pop("forward", None)  # of an earlier call
    if balanced is not None:
        layer.experts.forward = functools.partial(balanced.run, new)
        new.has_slot_experts = True
    if layer.use_shared_expert and layer.shared_expert_overlap:
        new.set_shared_experts(layer.shared_experts)
    if isinstance(old, MegatronDispatcher):
        old.close()
    else:
        leave_padding_out(layer.router)
    experts_config = getattr(layer.experts, "config", None)
    if new.dispatcher.config.pad_multiple_rows > 1 and experts_config is not None:
        # Experts of megatron-core 0.19 look in their config to see whether a router has padded their rows. The other
        # layers keep the config as it was.
        layer.experts.config = copy.copy(experts_config)
        layer.experts.config.moe_router_padding_for_quantization = True


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


def follow_packed_sequences(model: nn.Module) -> None:
    """Make the MoE layers of a model use its ``packed_seq_params``. ``convert`` calls this function.

    If you use ``moe_layer_spec``, call it yourself.

    In every transformer layer with an MoE layer, rows in the gaps between padded sequences become padding. The router
    leaves these rows out of its losses, as with a ``padding_mask``, and they go to no expert. The MoE layers of a
    transformer block agree on sizes once per forward, with packed sequences or without.

    Cost: with gaps, a few small kernels per layer, and no host sync.
    """
    for module in model.modules():
        if overlaps(getattr(module, "config", None)):
            _follow_masks(module)
        if isinstance(module, TransformerLayer) and isinstance(module.mlp, MoELayer):
            hooks = (*module._forward_pre_hooks.values(), *module.mlp.router._forward_pre_hooks.values())
            if any(hook is _mark_gaps or isinstance(getattr(hook, "__self__", None), _SeenPadding) for hook in hooks):
                continue
            if overlaps(module.config):
                seen = _SeenPadding(module)
                module.self_attention.register_forward_pre_hook(seen.see, with_kwargs=True)
                module.mlp.router.register_forward_pre_hook(seen.mark, with_kwargs=True)
            else:
                module.register_forward_pre_hook(_mark_gaps, with_kwargs=True)
        elif isinstance(module, TransformerBlock):
            _share_plans(module)


def _mark_gaps(layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Add the gaps among the rows of this rank to the padding mask, as a forward pre-hook of a transformer layer.

    A recomputation calls the layer with the same arguments, so it marks the same rows.
    """
    padding = _gaps(layer, kwargs, kwargs["hidden_states"] if "hidden_states" in kwargs else args[0])
    if padding is None:
        return args, kwargs
    given = kwargs.get("padding_mask")
    return args, {**kwargs, "padding_mask": padding if given is None else given.bool() | padding}


def _gaps(layer: Any, kwargs: dict[str, Any], hidden: Tensor) -> Tensor | None:
    """Return a padding mask, [1, T], of the gaps among the rows of this rank; None if there are none."""
    params = kwargs.get("packed_seq_params")
    if params is None or params.qkv_format != "thd" or params.cu_seqlens_q_padded is None:
        return None
    layout, num_rows = packed_layout(layer, params, hidden), prod(hidden.shape[:-1])
    valid_T = layout.valid_T(num_rows, hidden.device)
    assert valid_T is not None  # cu_seqlens_q_padded is given
    return ~valid_T.unsqueeze(0)


@final
class _SeenPadding:
    """Marks padding under ``overlap_moe_expert_parallel_comm``: its schedule calls parts of a layer, but not the layer.

    ``_hand_on_mask`` gives the layer the padding mask of the model, and its attention gets ``packed_seq_params``. After
    both, the router of the same micro-batch gets the mask. Megatron recomputes none of them alone in this schedule.
    """

    def __init__(self, layer: Any) -> None:
        self._layer = layer
        self._padding: Tensor | None = None

    def see(self, attention: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Find the padding, as a forward pre-hook of the attention."""
        mask, gaps = self._layer.__dict__.pop("moe_dispatch_mask", None), _gaps(self._layer, kwargs, args[0])
        self._padding = gaps if mask is None else mask.bool() if gaps is None else mask.bool() | gaps

    def mark(
        self, router: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Add it to the padding mask, [S, B], as a forward pre-hook of the router."""
        padding, self._padding = self._padding, None
        if padding is None:
            return args, kwargs
        given, padding = kwargs.get("padding_mask", args[1] if len(args) > 1 else None), padding.transpose(0, 1)
        padding = padding if given is None else given | padding
        if len(args) > 1:
            return (args[0], padding, *args[2:]), kwargs
        return args, {**kwargs, "padding_mask": padding}


def _follow_masks(owner: Any) -> None:
    """Let the layers of a model, or of a part for multi-token prediction, see the padding masks of its forwards.

    The overlapped schedule calls these methods of an owner, and keeps the mask that they return to itself.
    """
    for name, position in {"_preprocess": 5, "_get_embeddings": 2}.items():
        method = getattr(owner, name, None)
        if isinstance(method, functools.partial) or method is None:
            continue
        if "padding_mask" in inspect.signature(method).parameters:  # multi-token prediction of 0.16 has no masks
            setattr(owner, name, functools.partial(_hand_on_mask, owner, method, position))


def _hand_on_mask(owner: Any, method: Callable[..., Any], position: int, *args: Any, **kwargs: Any) -> Any:
    returned = method(*args, **kwargs)
    for layer in getattr(owner, "decoder", owner).modules():
        if isinstance(layer, TransformerLayer) and isinstance(layer.mlp, MoELayer):
            layer.moe_dispatch_mask = returned[position]
    return returned


def packed_layout(layer: Any, params: Any, hidden: Tensor, *, host: bool = False) -> Layout:
    """Return the layout of the packed rows of this rank, with one more sequence for the rows after the last one.

    Args:
        layer: Transformer layer, whose groups divide the rows.
        params: PackedSeqParams of the micro-batch.
        hidden: Hidden states of this rank, [T, 1, D].
        host: Whether the offsets are needed on the host. Reading them from a device is a host sync.

    Raises:
        LayoutError: The parameters are of another batch.
    """
    groups, num_rows = layer.pg_collection, prod(hidden.shape[:-1])
    cp_group = params.cp_group or getattr(groups, "cp", None)
    cp_size, cp_rank = (cp_group.size(), cp_group.rank()) if cp_group is not None else (1, 0)
    split = layer.config.sequence_parallel and groups.tp is not None
    tp_size, tp_rank = (groups.tp.size(), groups.tp.rank()) if split else (1, 0)
    cu_seqlens = getattr(params, "moe_dispatch_cu_seqlens", params.cu_seqlens_q)  # verl's plug-in sets it
    padded = cu_seqlens if params.cu_seqlens_q_padded is None else params.cu_seqlens_q_padded
    if host:
        cu_seqlens, padded = cu_seqlens.cpu(), padded.cpu()
    kind: ShardKind = getattr(params, "cp_partition_mode", "zigzag")  # releases after 0.19.2 may have "contiguous"
    # Trainers that pad a batch to a multiple put rows after the last sequence. They become a sequence of length 0
    # with its own padding: lengths 5 and 3 in 8 and 4 rows and 6 more rows give [0, 5, 8, 8] and [0, 8, 12, 18].
    end = padded[-1:].clamp(min=num_rows * cp_size * tp_size)
    whole = THD(torch.cat([cu_seqlens, cu_seqlens[-1:]]), torch.cat([padded, end]))
    layout = whole.shard(cp_rank, cp_size, kind).shard(tp_rank, tp_size)
    layout.check(num_rows)
    return layout


def _share_plans(block: Any) -> None:
    """Let the MoE layers of a block share plans during a forward.

    A recomputation runs outside the forward. Then each layer agrees on sizes on its own, because the plans of another
    micro-batch may not fit.
    """
    chunks = [getattr(block.config, f"mlp_chunks_for_{phase}", 1) for phase in ("training", "prefill")]
    layers = [module for module in block.modules() if isinstance(module, MoELayer)]
    if max(chunks) > 1 or not layers:
        return  # with chunks, Megatron calls an MoE layer with pieces of the micro-batch, which differ in length
    first, last = block, block
    if overlaps(block.config):  # its schedule calls the first attention and the last experts, but no block
        first, last = block.layers[0].self_attention, layers[-1].experts
    if any(getattr(hook, "func", None) is _open_plans for hook in first._forward_pre_hooks.values()):
        return
    first.register_forward_pre_hook(functools.partial(_open_plans, layers))
    last.register_forward_hook(functools.partial(_close_plans, layers), always_call=True)


def _open_plans(layers: list[Any], first: Any, args: Any) -> None:
    _set_plans(layers, {})


def _close_plans(layers: list[Any], last: Any, args: Any, output: Any) -> None:
    _set_plans(layers, None)


def _set_plans(layers: list[Any], plans: dict[str, Plan] | None) -> None:
    for layer in layers:
        if isinstance(layer.token_dispatcher, MegatronDispatcher):
            layer.token_dispatcher.plans = plans
