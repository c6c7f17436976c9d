"""A token dispatcher for the MoE layers of DeepSpeed's automatic expert parallelism, AutoEP.

AutoEP replaces the MoE blocks of a model by its own layer, with its own router, experts and checkpoints. This module
exchanges only how the layer moves rows between ranks. AutoEP has no public hook for that, so each private name that is
used here is checked first. Importing this module imports DeepSpeed. ``moe_dispatch.types`` explains the suffixes T, D
and R.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from moe_dispatch.backends.registry import BackendName
from moe_dispatch.config import DispatcherConfig
from moe_dispatch.dispatched import Dispatched
from moe_dispatch.dispatchers import Dispatcher, build_dispatcher
from moe_dispatch.errors import ConfigError, IntegrationError
from moe_dispatch.integrations.checks import check_version, refuse_quantised_rows
from moe_dispatch.integrations.slot_experts import (
    clean_gradients,
    has_spare_slots,
    needs_clean_gradients,
    own_weights,
    run_layer,
    stacked_weights,
    view_of,
)
from moe_dispatch.layouts import Rows
from moe_dispatch.types import Routing

_VERSION = check_version("deepspeed")  # before the imports, whose errors explain less

try:
    from deepspeed.module_inject.auto_ep_comm import DEEPEP_BACKEND
    from deepspeed.module_inject.auto_ep_layer import AutoEPMoELayer, RouterOutput
except ImportError as error:
    raise IntegrationError(
        f"moe_dispatch.integrations.deepspeed: deepspeed {_VERSION} has changed a private name of AutoEP that this "
        f"integration needs: {error}. Install deepspeed 0.19.8."
    ) from error

__all__ = ["use_moe_dispatch"]

# Fields that come from AutoEP's layers. And "weights": its score_apply says who applies the scores.
_NOT_OPTIONS = ("hidden_size", "num_experts", "top_k", "weights")
_ROUTE = "_deepep_route"  # the method of AutoEP's layer that takes rows (T, D) and a RouterOutput, and returns (T, D)
_ATTRIBUTES = (
    "comm_backend",
    "ep_group",
    "ep_size",
    "experts",
    "folding_group_handles",
    "hidden_size",
    "num_experts",
    "score_apply",
    "top_k",
)


def use_moe_dispatch(
    engine: nn.Module, *, backend: BackendName | str | Mapping[str, Any] = "auto", **options: Any
) -> dict[str, Dispatcher]:
    """Make the MoE layers of AutoEP send their rows through dispatchers of this library. Collective.

    Call it on every rank after ``deepspeed.initialize``. Parameters, optimizer, router, experts and checkpoints of
    DeepSpeed stay as they are. A second call replaces the dispatchers of the first one; if it raises, those stay.
    With ``nccl_ep`` and another config, close those before it, because it has one group in a process.

    Args:
        engine: Engine that ``deepspeed.initialize`` returned, or a part of its model.
        backend: Backend, as in DispatcherConfig.
        **options: Other fields of DispatcherConfig.

    Returns:
        The dispatcher of each layer, by the name of the layer, for ``metrics``, ``expert_counts`` and ``check``.

    Raises:
        ConfigError: An option is unknown, wrong or comes from AutoEP; the model has no layers of AutoEP, or
            DeepSpeed has not set their groups; or the layers are combined with tensor parallelism; or ZeRO 3 with
            balance or chunks.
        IntegrationError: DeepSpeed has changed a private name that is used here.
    """
    layers = {name: layer for name, layer in engine.named_modules() if isinstance(layer, AutoEPMoELayer)}
    if not layers:
        raise ConfigError(
            f"use_moe_dispatch: {type(engine).__name__} has no MoE layers of AutoEP. Pass the engine of "
            'deepspeed.initialize, with "expert_parallel": {"enabled": true} in the config of DeepSpeed.'
        )
    if clash := sorted(set(_NOT_OPTIONS) & set(options)):
        raise ConfigError(
            f"use_moe_dispatch: options must not set {', '.join(_NOT_OPTIONS)}, which come from AutoEP's layers, got "
            f"{', '.join(clash)}. Leave these out."
        )
    configs = {}
    for name, layer in layers.items():
        _check_names(layer)
        configs[name] = DispatcherConfig(
            backend=backend,
            num_experts=layer.num_experts,
            top_k=layer.top_k,
            hidden_size=layer.hidden_size,
            weights="experts" if layer.score_apply == "pre" else "combine",
            **options,
        )
        _check_layer(name, layer, configs[name])
    dispatchers: dict[str, Dispatcher] = {}
    try:
        for name, layer in layers.items():
            dispatchers[name] = build_dispatcher(configs[name], layer.ep_group, name=name)
    except Exception:  # on all ranks alike; the layers keep the dispatchers of an earlier call
        for dispatcher in dispatchers.values():
            dispatcher.close()
        raise
    for name, layer in layers.items():
        before = vars(layer).get(_ROUTE)
        setattr(layer, _ROUTE, functools.partial(_route, layer, dispatchers[name]))
        layer.comm_backend = DEEPEP_BACKEND  # with which the layer calls _ROUTE
        if isinstance(before, functools.partial):  # of an earlier call
            before.args[1].close()
    return dispatchers


def _check_names(layer: nn.Module) -> None:
    """Refuse a DeepSpeed whose private names are not those that this module uses.

    Raises:
        IntegrationError: A name is missing, or is used in another way.
    """
    route = getattr(AutoEPMoELayer, _ROUTE, None)
    missing = [f"AutoEPMoELayer.{name}" for name in _ATTRIBUTES if not hasattr(layer, name)]
    missing += [
        f"RouterOutput.{name}" for name in ("top_scores", "selected_experts") if not hasattr(RouterOutput, name)
    ]
    if route is None or list(inspect.signature(route).parameters) != ["self", "tokens", "ro"]:
        missing.append(f"AutoEPMoELayer.{_ROUTE}(tokens, ro)")
    if _ROUTE not in getattr(getattr(AutoEPMoELayer, "_forward", None), "__code__", _route.__code__).co_names:
        missing.append(f"the call of {_ROUTE} in AutoEPMoELayer._forward")
    experts = getattr(layer, "experts", None)
    if experts is not None and len(inspect.signature(experts.forward).parameters) != 2:
        missing.append(f"{type(experts).__name__}.forward(x, num_tokens_per_expert)")
    if missing:
        raise IntegrationError(
            f"use_moe_dispatch: deepspeed {_VERSION} has changed private names of AutoEP that this integration needs: "
            f"no {', '.join(missing)}. Install deepspeed 0.19.8."
        )


def _check_layer(name: str, layer: Any, config: DispatcherConfig) -> None:
    """Refuse a layer, or a config for it, with which rows would not go through our dispatcher, or go wrong.

    Raises:
        ConfigError: See ``use_moe_dispatch``.
    """
    refuse_quantised_rows("use_moe_dispatch", config)
    if layer.ep_size == 1:
        raise ConfigError(
            f"{name}: with autoep_size=1 each rank holds all experts, and AutoEP moves no rows, got a backend for "
            "them. Set autoep_size in the config of DeepSpeed, or leave use_moe_dispatch out."
        )
    if layer.ep_group is None:
        raise ConfigError(
            f"{name}: the layer must have an expert-parallel group, which deepspeed.initialize sets, got none. Call "
            "use_moe_dispatch after deepspeed.initialize."
        )
    handles = layer.folding_group_handles
    if handles is not None and handles.spec.tp_size > 1:
        raise ConfigError(
            f"{name}: ranks of a tensor-parallel group hold the same rows, which this integration would send several "
            f"times, got autotp_size={handles.spec.tp_size}. Set autotp_size to 1, or leave use_moe_dispatch out."
        )
    partitioned = any(hasattr(weight, "ds_tensor") for weight in layer.experts.parameters())
    if partitioned and (has_spare_slots(config) or config.chunks is not None):
        raise ConfigError(
            f"{name}: ZeRO 3 gathers the weights of experts in each call of them, so every rank must call them once, "
            "and with its own weights, got balance or chunks with ZeRO stage 3. Use stage 2, or leave both out."
        )
    if has_spare_slots(config):
        own_weights("use_moe_dispatch", layer.experts)


def _route(layer: Any, dispatcher: Dispatcher, tokens_TD: Tensor, routed: Any) -> Tensor:
    """Send rows to their experts, run the experts of AutoEP, and combine: (T, D)."""
    experts = layer.experts
    own = own_weights("use_moe_dispatch", experts) if has_spare_slots(dispatcher.config) else {}
    scores_first = dispatcher.config.weights == "experts"

    def run(part: Dispatched, *slots: Tensor) -> Tensor:
        rows_RD, counts_L = part.rows, part.tokens_per_expert.to(torch.int32)
        if scores_first:
            rows_RD = (rows_RD.float() * part.weights.unsqueeze(1)).to(rows_RD.dtype)
        view = view_of(experts, dict(zip(own, slots, strict=True)), num_experts=len(slots[0])) if slots else experts
        if needs_clean_gradients(part):
            # Inside of the call, because ZeRO 3 gathers the weights in a hook of it.
            view.forward = functools.partial(_with_clean_gradients, view, part)
        try:
            output_RD: Tensor = view(rows_RD, counts_L)
        finally:
            vars(view).pop("forward", None)
        return output_RD

    routing = Routing(routed.selected_experts, routed.top_scores)
    return run_layer(dispatcher, run, list(own.values()), tokens_TD, routing, Rows())


def _with_clean_gradients(experts: Any, sent: Dispatched, *args: Tensor) -> Tensor:
    view = view_of(experts, clean_gradients(stacked_weights(experts), sent))
    output_RD: Tensor = type(experts).forward(view, *args)
    return output_RD
