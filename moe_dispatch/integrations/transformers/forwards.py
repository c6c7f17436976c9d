"""One plan per forward of a model, for every layer of it, also when a checkpointed layer is recomputed.

No state of a call is kept on a module: the plan of the running forward is in a context variable, and a checkpointed
layer carries it in the closure that its backward runs again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import Any, final

import torch
from torch import Tensor, nn

from moe_dispatch.config import DispatcherConfig
from moe_dispatch.dispatchers import Dispatcher
from moe_dispatch.errors import LayoutError, StateError
from moe_dispatch.integrations.transformers.batch_slice import BatchSlice
from moe_dispatch.layouts import Layout, Masked, Rows
from moe_dispatch.types import Plan

# A module inside another may have a plan of its own: the last one applies.
_Plans = tuple[tuple[nn.Module, Plan], ...]
_PLANS: ContextVar[_Plans] = ContextVar("moe_dispatch_plans", default=())

# Where modules keep the function that checkpoints them: transformers' layers, and torch's CheckpointWrapper.
_CHECKPOINT_FUNCTIONS = ("_gradient_checkpointing_func", "checkpoint_fn")


def plan_in_force(config: DispatcherConfig) -> Plan | None:
    """Return the plan of the running forward, or outside of one None; raise if the layout may not be inferred."""
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
    """The forward pre-hook of a module that takes an attention mask and holds experts.

    Attributes:
        parameters: The names of the parameters of the module's forward, in order.
        dispatcher: The dispatcher of any of its experts; all share one channel.
        slices: Which rows of the batch this rank sends.
    """

    parameters: tuple[str, ...]
    dispatcher: Dispatcher
    slices: BatchSlice

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        call = {**dict(zip(self.parameters, args, strict=False)), **kwargs}
        positions = _positions_of(call)
        num_rows = positions.shape[0] * positions.shape[1]
        start, stop = self.slices.span(num_rows)
        # Stands for the rows of a later dispatch: the plan needs their number and device only.
        like = torch.empty(stop - start, 0, device=positions.device)
        plan = self.dispatcher.plan(self.slices.layout(layout_of(call), num_rows), like=like)
        if torch.is_grad_enabled() and module.training:
            _keep_plans_in_checkpoints(module)
        _PLANS.set((*_PLANS.get(), (module, plan)))


def end_plan(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
    """Drop the plan: the forward hook of the same module, which also runs if the forward or a pre-hook raised."""
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
    """Wrap checkpointing functions; in each forward, because checkpointing may be enabled at any time."""
    for module in model.modules():
        for name in _CHECKPOINT_FUNCTIONS:
            checkpoint = module.__dict__.get(name)
            if checkpoint is not None and not isinstance(checkpoint, CheckpointWithPlans):
                setattr(module, name, CheckpointWithPlans(checkpoint))


def layout_of(call: Mapping[str, Any]) -> Layout:
    """Return which rows of ``[B * S, D]`` are real, from the arguments of a forward, by name.

    ``attention_mask`` [B, M] is 0 on padding, which may be anywhere. With a cache, M counts earlier positions too, and
    the last S are used. Without a mask, rows behind the end of ``cu_seq_lens_q`` (n+1,) are padding. Without either,
    every row is real. No host sync.
    """
    batch, length = _positions_of(call).shape[:2]
    mask, ends = call.get("attention_mask"), call.get("cu_seq_lens_q")
    if mask is None:
        return Rows() if ends is None else Rows(num_real=ends[-1:])
    cached = call.get("past_key_values") is not None
    wanted = f"[{batch}, {length} or more]" if cached else f"[{batch}, {length}]"
    if not isinstance(mask, Tensor):
        raise LayoutError(
            f"attach: attention_mask must be {wanted}, got {type(mask).__name__}. Pass the tokenizer's 2-D mask."
        )
    fits = mask.dim() == 2 and mask.shape[0] == batch
    if not fits or mask.shape[1] < length or (mask.shape[1] > length and not cached):
        raise LayoutError(
            f"attach: attention_mask must be {wanted}, got {list(mask.shape)}. Pass the tokenizer's 2-D mask of this "
            "batch; transformers makes the one for attention of it."
        )
    return Masked((mask[:, mask.shape[1] - length :] != 0).flatten())


def _positions_of(call: Mapping[str, Any]) -> Tensor:
    """Return the argument that holds the positions of a call: ``inputs_embeds`` [B, S, D] or ``input_ids`` [B, S]."""
    embeds, ids = call.get("inputs_embeds"), call.get("input_ids")
    held = ids if embeds is None else embeds
    if not isinstance(held, Tensor) or held.dim() != (2 if embeds is None else 3):
        got = tuple(held.shape) if isinstance(held, Tensor) else held
        raise LayoutError(
            f"attach: a forward must be given input_ids [B, S] or inputs_embeds [B, S, D], got {got}. Pass one."
        )
    return held
