"""What belongs to one forward of a model: its plan and its replayed routing, also when a layer is recomputed.

Modules hold no state of a call. Context variables hold the plan and the cut of the running forward. For a checkpointed
layer, the closure that its backward runs again holds them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NoReturn, final

import torch
from torch import Tensor, nn

from moe_dispatch.config import DispatcherConfig
from moe_dispatch.dispatchers import Dispatcher
from moe_dispatch.errors import ConfigError, InputError, LayoutError, StateError
from moe_dispatch.integrations.transformers.batch_slice import BatchSlice
from moe_dispatch.layouts import Layout, Masked, Rows
from moe_dispatch.replay import Cut
from moe_dispatch.types import Plan, Routing


@final
@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class RunningForward:
    """A forward of a module that takes a batch of B sequences with S positions.

    Attributes:
        module: The module.
        plan: Plan for the rows that this rank sends.
        layout: Layout of all rows of the batch, of which this rank may send a slice.
        shape: B and S.
    """

    module: nn.Module
    plan: Plan
    layout: Layout
    shape: tuple[int, int]


# A module inside another module may have its own plan. The last plan applies.
_Plans = tuple[RunningForward, ...]
_PLANS: ContextVar[_Plans] = ContextVar("moe_dispatch_plans", default=())

# Each RoutingReplay has its own cut. The last cut of a replay applies.
_Cuts = tuple[tuple[object, Cut], ...]
_CUTS: ContextVar[_Cuts] = ContextVar("moe_dispatch_cuts", default=())

WRAPPED = "base_layer"  # PEFT's name of a module inside an adapter
# Attributes that hold a checkpointing function: in transformers' layers, and in torch's CheckpointWrapper.
_CHECKPOINT_FUNCTIONS = ("_gradient_checkpointing_func", "checkpoint_fn")


def plan_in_force(config: DispatcherConfig) -> Plan | None:
    """Return the plan of the running forward. Outside a forward, return None if layouts may be inferred, else raise."""
    plans = _PLANS.get()
    if not plans and not config.infer_layout:
        raise StateError(
            "moe_dispatch experts: they must be called in a forward of a model that was given to attach, got a call "
            "outside such a forward. Call attach(model) after loading it; checkpoint layers with transformers' switch."
        )
    return plans[-1].plan if plans else None


@contextmanager
def recorded_as_batch(dispatcher: Dispatcher, x_TD: Tensor, routing: Routing) -> Iterator[None]:
    """Let a ``RoutingTable`` record the dispatch of the block as one of B sequences, though its rows are flat.

    Args:
        dispatcher: Dispatcher of the layer.
        x_TD: All rows of the batch. Ranks of a tensor-parallel group, which dispatch slices of them, record all.
        routing: Routing of all rows.
    """
    observers, plans = dispatcher._channel.observers, _PLANS.get()
    with ExitStack() as stack:
        for observer in observers if plans else ():
            if observer.by_position:
                forward = plans[-1]
                batch = x_TD.view(*forward.shape, x_TD.shape[1])
                observer.asked(batch, forward.layout)
                stack.enter_context(observer.whole(dispatcher._lease, batch, routing, forward.layout))
        yield


def cut_in_force(replay: object) -> Cut | None:
    """Return the cut of the running forward for this replay, or None outside a block of its ``micro_batch``."""
    return next((cut for owner, cut in reversed(_CUTS.get()) if owner is replay), None)


@contextmanager
def cut_for_forwards(replay: object, cut: Cut) -> Iterator[None]:
    """Put a cut of this replay in force in the block."""
    token = _CUTS.set((*_CUTS.get(), (replay, cut)))
    try:
        yield
    finally:
        _CUTS.reset(token)


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class PlanBeforeForward:
    """The forward pre-hook of a module that takes an attention mask and holds experts.

    Attributes:
        parameters: Names of the parameters of the module's forward, in order.
        dispatcher: Dispatcher of one of its experts modules; all of them share one channel.
        slices: Slices of the batch, of which this rank sends one.
        keep: ``keep_routes_of``, with which a recomputed dispatch takes the route of its forward, or None.
        sharded: The modules whose weights transformers has sharded, each with its parent and its name there.
    """

    parameters: tuple[str, ...]
    dispatcher: Dispatcher
    slices: BatchSlice
    keep: Callable[..., Any] | None = None
    sharded: list[tuple[nn.Module, str, nn.Module]] = field(default_factory=list)

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        for parent, name, experts in self.sharded:
            check_unwrapped(parent, name, experts)
        call = {**dict(zip(self.parameters, args, strict=False)), **kwargs}
        if any(observer.by_position for observer in self.dispatcher._channel.observers):
            _refuse_beam_search(_cache_of(call))
        positions = _positions_of(call)
        batch, length = positions.shape[:2]
        layout, num_rows = layout_of(call), batch * length
        start, stop = self.slices.span(num_rows)
        # It stands for the rows of a later dispatch: the plan needs only their number and device.
        like = torch.empty(stop - start, 0, device=positions.device)
        plan = self.dispatcher.plan(self.slices.layout(layout, num_rows), like=like)
        if torch.is_grad_enabled() and module.training:
            keep_in_checkpoints(module, self.keep)
        forward = RunningForward(module=module, plan=plan, layout=layout, shape=(batch, length))
        _PLANS.set((*_PLANS.get(), forward))


def check_unwrapped(parent: nn.Module, name: str, experts: nn.Module) -> None:
    """Raise ConfigError if an adapter stands around experts with sharded weights."""
    wrapper = parent if name == WRAPPED else getattr(parent, name)
    if hasattr(wrapper, WRAPPED):
        raise ConfigError(
            f"attach: experts that DistributedConfig has sharded cannot have adapters, got {type(experts).__name__} "
            f"inside of {type(wrapper).__name__}. LoRA on stacked experts needs whole weights: leave ep_size out, and "
            "wire them by register(config, group=...) and set_experts_implementation."
        )


def end_plan(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
    """Drop the plan. This forward hook of the module also runs if the forward or a pre-hook raised."""
    plans = _PLANS.get()
    if plans and plans[-1].module is module:
        _PLANS.set(plans[:-1])


@final
class CheckpointWithContext:
    """A checkpointing function. Its recomputation uses plans and cuts of its forward, and may use its routes."""

    def __init__(self, checkpoint: Callable[..., Any]) -> None:
        self.checkpoint = checkpoint
        self.keep: Callable[..., Any] | None = None

    def __call__(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        run: Callable[..., Any] = partial(_in_context, _PLANS.get(), _CUTS.get(), function)
        if self.keep is not None:
            run = self.keep(run)
        return self.checkpoint(run, *args, **kwargs)


def _in_context(plans: _Plans, cuts: _Cuts, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    plans_token, cuts_token = _PLANS.set(plans), _CUTS.set(cuts)
    try:
        return function(*args, **kwargs)
    finally:
        _PLANS.reset(plans_token)
        _CUTS.reset(cuts_token)


def keep_in_checkpoints(model: nn.Module, keep: Callable[..., Any] | None = None) -> None:
    """Wrap checkpointing functions. Each forward does so, because checkpointing may be enabled at any time."""
    for module in model.modules():
        for name in _CHECKPOINT_FUNCTIONS:
            checkpoint = module.__dict__.get(name)
            if checkpoint is not None and not isinstance(checkpoint, CheckpointWithContext):
                checkpoint = CheckpointWithContext(checkpoint)
                setattr(module, name, checkpoint)
            if keep is not None and checkpoint is not None:
                checkpoint.keep = keep


def layout_of(call: Mapping[str, Any]) -> Layout:
    """Return the layout of ``[B * S, D]`` that follows from the arguments of a forward, by name.

    ``attention_mask`` [B, M] is 0 on padding, which may be anywhere. With a cache, M includes earlier positions, and
    the last S positions are used. Without a mask, rows after the last entry of ``cu_seq_lens_q`` (n+1,) are padding.
    Without both, every row holds a token. No host sync.
    """
    batch, length = _positions_of(call).shape[:2]
    mask, ends = call.get("attention_mask"), call.get("cu_seq_lens_q")
    if mask is None:
        return Rows() if ends is None else Rows(num_real=ends[-1:])
    cached = _cache_of(call) is not None
    wanted = f"[{batch}, {length} or more]" if cached else f"[{batch}, {length}]"
    if not isinstance(mask, Tensor):
        raise LayoutError(
            f"attach: attention_mask must be {wanted}, got {type(mask).__name__}. Pass the tokenizer's 2-D mask."
        )
    fits = mask.dim() == 2 and mask.shape[0] == batch
    if not fits or mask.shape[1] < length or (mask.shape[1] > length and not cached):
        raise LayoutError(
            f"attach: attention_mask must be {wanted}, got {list(mask.shape)}. Pass the tokenizer's 2-D mask of this "
            "batch: transformers makes the mask for attention from it."
        )
    return Masked((mask[:, mask.shape[1] - length :] != 0).flatten())


def _cache_of(call: Mapping[str, Any]) -> Any:
    cache = call.get("cache")  # the name in transformers 5.24
    return call.get("past_key_values") if cache is None else cache


def _refuse_beam_search(cache: Any) -> None:
    """Let a cache that is filled while a ``RoutingTable`` records refuse to move sequences between its rows."""
    if hasattr(cache, "reorder_cache"):
        cache.reorder_cache = _reorder_cache


def _reorder_cache(beam_idx: Tensor) -> NoReturn:
    raise InputError(
        "RoutingTable.record: each row must keep its sequence, got a beam search, which moves sequences between rows. "
        "Call generate() outside of the block, and record a forward over the sequences that it returns."
    )


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
