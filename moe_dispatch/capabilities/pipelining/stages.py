"""Take part in the life of torch's pipeline stages: a run that only learns shapes is no step, and a warning.

Importing this module wraps three methods of torch's stages.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from functools import wraps
from typing import Any, final

import torch
from torch import Tensor
from torch.distributed.pipelining import stage as stages

from moe_dispatch.dispatched import Dispatched, InFlight
from moe_dispatch.dispatchers.agreement import settle
from moe_dispatch.dispatchers.channel import Channel, Lease
from moe_dispatch.dispatchers.dispatcher import Dispatcher, bring_back, make
from moe_dispatch.layouts import Layout
from moe_dispatch.seams.call import Call
from moe_dispatch.seams.calls import Interceptor, of_thread
from moe_dispatch.seams.observers import Observer
from moe_dispatch.types import Plan, Routing

_Stage = stages._PipelineStageBase


@final
class Probing(Interceptor):
    """Takes the dispatches of a stage that torch runs to learn shapes. Its x may be memory that nobody has written."""

    def dispatch(self, dispatcher: Dispatcher, call: Call) -> Dispatched | InFlight:
        routing = call.routing
        if isinstance(routing, Routing) and isinstance(routing.topk_weights, Tensor):
            ids_TK, weights_TK = routing.topk_ids, routing.topk_weights
            is_expert = (ids_TK >= 0) & (ids_TK < dispatcher.config.num_experts)
            routing = Routing(torch.where(is_expert, ids_TK, -1), _Finite.apply(weights_TK))  # type: ignore[no-untyped-call]
        return make(dispatcher, replace(call, routing=routing, trains=False))

    def combine(self, dispatcher: Dispatcher, rows: Tensor, sent: Dispatched) -> Tensor:
        return bring_back(dispatcher, rows, sent)

    def settle(self, channel: Channel, draft: Plan, **call: Any) -> Plan:
        of_thread.interceptor = None
        try:
            return settle(channel, draft, **call)
        finally:
            of_thread.interceptor = self


class _Finite(torch.autograd.Function):
    """Replace NaN, and save nothing, because a recomputation must save what its forward has saved."""

    @staticmethod
    def forward(ctx: Any, weights_TK: Tensor) -> Tensor:
        return weights_TK.nan_to_num()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


@final
class RepetitionObserver(Observer):
    """Warns if a dispatch is repeated in the pass for weights, which torch's checkpoint does in each group of them."""

    told = False

    def started(self, lease: Lease, x: Tensor, routing: Routing, layout: Layout) -> None:
        """Warn, once in a process."""
        if not RepetitionObserver.told:
            RepetitionObserver.told = True
            name = f" of {lease.name!r}" * bool(lease.name)
            warnings.warn(
                f"Dispatcher.dispatch: torch's checkpoint repeats the dispatch{name} in the pass for weights, once for "
                "each group of weights, because the schedule splits the backward. Use checkpoint of "
                "moe_dispatch.recompute, or context_fn=keep_routes, which recompute once.",
                UserWarning,
                stacklevel=2,
            )


def _channels_of(stage: Any) -> list[Channel]:
    """Return the channels of the dispatchers below a stage."""
    leases = [module._lease for module in stage.submod.modules() if isinstance(module, Dispatcher)]
    return [*{lease.channel: None for lease in leases}]


@contextmanager
def probe(stage: Any) -> Iterator[None]:
    """Let the block count nothing, tell no observer and keep none of what it needs, on the channels of a stage."""
    before, of_thread.interceptor = of_thread.interceptor, Probing()
    try:
        with ExitStack() as stack:
            for channel in _channels_of(stage):
                stack.enter_context(_aside(channel))
            yield
    finally:
        of_thread.interceptor = before


@final
class _Nobody(list[Observer]):
    """The observers of a run that is no step. Those that would attach themselves look at the first micro-batch."""

    def append(self, observer: Observer) -> None:
        pass

    def remove(self, observer: Observer) -> None:
        pass


@contextmanager
def _aside(channel: Channel) -> Iterator[None]:
    """Replace what counts and observes the calls on a channel."""
    meter, observers = channel.meter, channel.observers
    ranks = {channel.communicator: None, channel.control: None}
    counts = [(each, each.calls, each.bytes_sent) for each in ranks]
    channel.meter, channel.observers = meter.like(), _Nobody()
    for each in ranks:
        each.calls, each.bytes_sent = Counter(), Counter()
    try:
        yield
    finally:
        channel.meter, channel.observers = meter, observers
        for each, calls, bytes_sent in counts:
            each.calls, each.bytes_sent = calls, bytes_sent


@contextmanager
def watch(stage: Any) -> Iterator[None]:
    """Look for repeated dispatches in the pass for the weights of a stage. The first stage has one pass for all."""
    channels = [] if stage.is_first or RepetitionObserver.told else _channels_of(stage)
    observer = RepetitionObserver()
    for channel in channels:
        channel.observers.append(observer)
    try:
        yield
    finally:
        for channel in channels:
            channel.observers.remove(observer)


def _wrap(owner: type, name: str, context: Callable[[Any], AbstractContextManager[None]]) -> None:
    """Let a method of a stage run in a context."""
    method = getattr(owner, name)

    @wraps(method)
    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        with context(self):
            return method(self, *args, **kwargs)

    setattr(owner, name, run)


_PROBES = ("_forward_metadata_inference", "_backward_metadata_inference", "_shape_inference")  # the last in torch 2.10
for _name in _PROBES:
    if hasattr(stages.PipelineStage, _name):
        _wrap(stages.PipelineStage, _name, probe)
_wrap(_Stage, "backward_weight_one_chunk", watch)
