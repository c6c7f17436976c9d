"""One plan per forward of a model, in force for every layer of it, also when a layer is computed again.

Nothing of a call is kept on a module: the plan of the running forward is in a context variable, and a checkpointed
layer carries it in the closure that its backward runs again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import Any, final

import torch
from torch import nn

from moe_dispatch.config import DispatcherConfig
from moe_dispatch.dispatchers import Dispatcher
from moe_dispatch.errors import StateError
from moe_dispatch.integrations.transformers.batch_slice import BatchSlice
from moe_dispatch.integrations.transformers.padding import layout_of, positions_of
from moe_dispatch.types import Plan

# A module inside another may have a plan of its own: the last is in force.
_Plans = tuple[tuple[nn.Module, Plan], ...]
_PLANS: ContextVar[_Plans] = ContextVar("moe_dispatch_plans", default=())

# Where modules keep the function that checkpoints them: transformers' layers, and torch's CheckpointWrapper.
_CHECKPOINT_FUNCTIONS = ("_gradient_checkpointing_func", "checkpoint_fn")


def plan_in_force(config: DispatcherConfig) -> Plan | None:
    """The plan of the forward that is running; None outside of one, where the config lets the rows be taken as real.

    Raises:
        StateError: outside of one, and the config has ``infer_layout=False``.
    """
    plans = _PLANS.get()
    if not plans and not config.infer_layout:
        raise StateError(
            "moe_dispatch experts: they must be called in a forward of a model that was given to attach, got a call "
            "outside one. Call attach(model) once it is loaded; checkpoint layers with transformers' own switch."
        )
    return plans[-1][1] if plans else None


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class PlanBeforeForward:
    """The forward pre-hook of a module that is given an attention mask and holds experts.

    Attributes:
        parameters: the names of its forward's parameters, in order.
        dispatcher: any of its experts'; all share one channel.
        slices: which rows of the batch this rank sends.
    """

    parameters: tuple[str, ...]
    dispatcher: Dispatcher
    slices: BatchSlice

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        plan = self._plan({**dict(zip(self.parameters, args, strict=False)), **kwargs})
        if torch.is_grad_enabled() and module.training:
            _keep_plans_in_checkpoints(module)
        _PLANS.set((*_PLANS.get(), (module, plan)))

    def _plan(self, call: Mapping[str, Any]) -> Plan:
        held = positions_of(call)
        num_rows = held.shape[0] * held.shape[1]
        start, stop = self.slices.span(num_rows)
        # Of what is dispatched later only the shape and the device are told here.
        like = torch.empty(stop - start, 0, device=held.device)
        return self.dispatcher.plan(self.slices.layout(layout_of(call), num_rows), like=like)


def end_plan(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
    """The forward hook that goes with it; runs after a forward that raised, too, also in an earlier pre-hook."""
    plans = _PLANS.get()
    if plans and plans[-1][0] is module:
        _PLANS.set(plans[:-1])


@final
class CheckpointWithPlans:
    """A checkpointing function whose recomputation sees the plans that its forward saw."""

    def __init__(self, checkpoint: Callable[..., Any]) -> None:
        self.checkpoint = checkpoint

    def __call__(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return self.checkpoint(partial(_with_plans, _PLANS.get(), function), *args, **kwargs)


def _with_plans(plans: _Plans, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    token = _PLANS.set(plans)
    try:
        return function(*args, **kwargs)
    finally:
        _PLANS.reset(token)


def _keep_plans_in_checkpoints(model: nn.Module) -> None:
    """Here, in each forward, because checkpointing may be enabled at any time. Cost: one pass over the modules."""
    for module in model.modules():
        for name in _CHECKPOINT_FUNCTIONS:
            checkpoint = module.__dict__.get(name)
            if checkpoint is not None and not isinstance(checkpoint, CheckpointWithPlans):
                setattr(module, name, CheckpointWithPlans(checkpoint))
