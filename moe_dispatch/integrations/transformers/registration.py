"""Register with transformers, and attach to a model. No other module of this package imports transformers."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, final

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from moe_dispatch.config import DispatcherConfig
from moe_dispatch.dispatchers import Dispatcher
from moe_dispatch.errors import ConfigError, IntegrationError
from moe_dispatch.integrations.checks import check_version, refuse_quantised_rows
from moe_dispatch.integrations.transformers.experts import WIRED, ExpertParallel, ExpertsFunction
from moe_dispatch.integrations.transformers.forwards import PlanBeforeForward, check_unwrapped, end_plan
from moe_dispatch.versions import SUPPORT


@final
@dataclass(frozen=True, slots=True)
class Registered:
    """An entry in transformers' registry of expert-parallel implementations. It wires each experts module."""

    config: DispatcherConfig

    def __call__(self, experts: nn.Module, ep_mesh: DeviceMesh, tp_mesh: DeviceMesh) -> ExpertParallel:
        return ExpertParallel(self.config, experts, ep_mesh, tp_mesh)


def register(
    config: DispatcherConfig,
    *,
    group: dist.ProcessGroup | DeviceMesh | None = None,
    name: str = "moe_dispatch",
) -> None:
    """Register a config with transformers under a name. A second call with an equal config does nothing.

    Args:
        config: Config from ``config_for(model_config, backend=...)``.
        group: None registers an expert-parallel implementation, for ``DistributedConfig(ep_size=...,
            ep_implementation=name)``. transformers then shards the experts and passes the ranks that share them.
            A group registers an experts function, for ``model.set_experts_implementation(name)``. Use it for versions
            without the first registry, and for models that transformers does not shard. Then every rank of the group
            must call ``register``, because it builds a dispatcher, which is collective.
        name: Name of the entry. A second config needs another name.

    Raises:
        ConfigError: Another config or transformers itself uses the name; or the config delivers quantised rows, which
            experts of transformers do not read.
        IntegrationError: transformers is missing or too old; or it has no registry of expert-parallel implementations,
            and no group is given.
    """
    found = check_version("transformers")
    refuse_quantised_rows("register", config)
    if group is not None:
        functions = _experts_functions()
        if not _is_registered(functions.get(name), config, group, name):
            functions.register(name, ExpertsFunction(config, group, functions["grouped_mm"]))
        return
    implementations = _expert_parallel_implementations()
    if implementations is None:
        raise IntegrationError(
            f"register: transformers {found} has no registry of expert-parallel implementations. Pass group= and call "
            f"model.set_experts_implementation({name!r}), or upgrade to {SUPPORT['transformers'].tested[-1]}."
        )
    if not _is_registered(implementations.get(name), config, None, name):
        implementations.register(name, Registered(config))


def attach(model: nn.Module, *, keep_routes: bool = False, only_added: bool = False) -> None:
    """Make each forward of a model plan for the padding of its batch, so that padding is not dispatched.

    Call it once, after the experts are wired. A second call does nothing. It hooks the modules that take an attention
    mask and hold experts. Each forward makes one plan for all layers. Dispatchers get the names of their modules, which
    errors, metrics and traces show.

    Args:
        model: The whole model.
        keep_routes: Whether layers that transformers' switch or torch's ``checkpoint_wrapper`` recomputes dispatch on
            the routes of their forwards, as ``moe_dispatch.recompute.keep_routes_in`` says. Equal on all ranks.
        only_added: What ``keep_routes_in`` is told, with ``keep_routes``.

    Raises:
        ConfigError: The model has no MoE layers, none of them is wired, or no module around them takes the mask. Or an
            adapter stands around experts with sharded weights; this is also raised in a forward.
    """
    wired = _wired_experts(model)
    keep: Callable[..., Any] | None = None
    if keep_routes:
        from moe_dispatch.capabilities.recompute import modules  # noqa: PLC0415 - other models never need it
        from moe_dispatch.recompute import keep_routes_of  # noqa: PLC0415 - other models never need it

        keep = partial(keep_routes_of, only_added=only_added)
        modules.keep_ids_in(model)
    for name, (experts, wiring) in wired.items():
        wiring.give_name(experts, name)
        owner = module_with_mask(model, name)
        if owner is None:
            raise ConfigError(
                "attach: a module around the experts must take attention_mask and inputs_embeds, got "
                f"{type(model).__name__} without such a module. Pass the whole model to attach."
            )
        before = next((hook for hook in owner._forward_pre_hooks.values() if isinstance(hook, PlanBeforeForward)), None)
        if before is None:
            parameters = tuple(inspect.signature(owner.forward).parameters)
            dispatcher = wiring.dispatcher_of(experts)
            before = PlanBeforeForward(parameters=parameters, dispatcher=dispatcher, slices=wiring.slices, keep=keep)
            owner.register_forward_pre_hook(before, with_kwargs=True)
            owner.register_forward_hook(end_plan, always_call=True)
        if isinstance(wiring, ExpertParallel):
            path, _, last = name.rpartition(".")
            place = (model.get_submodule(path), last, experts)
            check_unwrapped(*place)
            if place not in before.sharded:
                before.sharded.append(place)


def dispatchers_of(model: nn.Module) -> dict[str, Dispatcher]:
    """Return the dispatcher of each experts module, by the name of the module. Use it for metrics and checks."""
    return {name: wiring.dispatcher_of(experts) for name, (experts, wiring) in _wired_experts(model).items()}


def _is_registered(
    present: Any, config: DispatcherConfig, group: dist.ProcessGroup | DeviceMesh | None, name: str
) -> bool:
    if present is None:
        return False
    if not isinstance(present, Registered | ExpertsFunction):
        raise ConfigError(f"register: {name!r} must be a free name, got {present} of transformers. Pass another name=.")
    old = present.config if isinstance(present, Registered) else present.dispatcher.config
    changed = [field for field, value in config if getattr(old, field) != value]
    if changed:
        pairs = ", ".join(f"{field}={getattr(config, field)!r} after {getattr(old, field)!r}" for field in changed)
        raise ConfigError(
            f"register: {name!r} must stand for one config, got {pairs}. Pass another name= for a second config."
        )
    ranks = group.get_group() if isinstance(group, DeviceMesh) else group
    if isinstance(present, ExpertsFunction) and present.ranks.group is not ranks:
        raise ConfigError(
            f"register: {name!r} must stand for one group, got a second group. Pass another name= for it."
        )
    return True


def _wired_experts(model: nn.Module) -> dict[str, tuple[nn.Module, ExpertParallel | ExpertsFunction]]:
    """Return each experts module and its wiring, by name."""
    modules = experts_of("attach", model)
    wired = {name: (module, wiring) for name, module in modules.items() if (wiring := wiring_of(module)) is not None}
    for module, wiring in wired.values():
        if isinstance(wiring, ExpertsFunction):
            wiring.local(module)  # raises if the experts do not fit the config
    if not wired:
        raise ConfigError(
            f"attach: none of the {len(modules)} experts modules of {type(model).__name__} is wired. Call register "
            'first, then load with DistributedConfig(ep_size=..., ep_implementation="moe_dispatch").'
        )
    return wired


def experts_of(where: str, model: nn.Module) -> dict[str, nn.Module]:
    """Return the experts modules of a model, by name. transformers' decorator gives experts an ``_apply_gate``.

    Raises:
        ConfigError: There are none.
    """
    modules = {name: module for name, module in model.named_modules() if hasattr(module, "_apply_gate")}
    if not modules:
        raise ConfigError(f"{where}: {type(model).__name__} has no MoE layers. Use the model as it is.")
    return modules


def wiring_of(experts: Any) -> ExpertParallel | ExpertsFunction | None:
    """Return what runs an experts module, if it is ours."""
    wiring = getattr(experts, WIRED, None)
    if isinstance(wiring, ExpertParallel):
        return wiring
    function = _experts_functions().get(getattr(getattr(experts, "config", None), "_experts_implementation", None))
    return function if isinstance(function, ExpertsFunction) else None


def module_with_mask(model: nn.Module, name: str) -> nn.Module | None:
    """Return the nearest module around the experts whose forward takes the batch and its mask; None without one."""
    while name:
        name = name.rpartition(".")[0]
        module = model.get_submodule(name)
        if {"attention_mask", "inputs_embeds"} <= set(inspect.signature(module.forward).parameters):
            return module
    return None


def _experts_functions() -> Any:
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS  # noqa: PLC0415 - only when it is used

    return ALL_EXPERTS_FUNCTIONS


def _expert_parallel_implementations() -> Any:
    try:
        from transformers.distributed.expert_parallel import EPImplementationInterface  # noqa: PLC0415
    except ImportError:
        return None
    return EPImplementationInterface()
