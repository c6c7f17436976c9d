"""The schedules of conformance cases. A schedule is the order in which a rank dispatches, runs experts and combines."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import final

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from moe_dispatch.dispatched import Dispatched
from moe_dispatch_testing.rank_context import LayerCall, RankContext
from moe_dispatch_testing.reference import Expected, reference
from moe_dispatch_testing.scenario import Batch, Experts, Scenario

Outputs = Sequence[Tensor]


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Schedule:
    """An order of calls, and the expected results of each call.

    Attributes:
        run: Function that runs all calls on one rank, and returns one output per call.
        calls: Number of calls.
        keeps_tokens: Whether a rank has the same number of tokens in all calls. If not, the number changes.
        expect: Function that computes the expected results of one rank, by call, from the batches and the experts of
            each call.
        one_by_one: Whether each output has its own backward, in reverse order. If not, all outputs share one backward.
    """

    run: Callable[[RankContext], Outputs]
    calls: int = 1
    keeps_tokens: bool = False
    expect: Callable[[Scenario, Sequence[Batch], Sequence[Experts]], list[Expected]]
    one_by_one: bool = False


def separately(scenario: Scenario, batches: Sequence[Batch], experts: Sequence[Experts]) -> list[Expected]:
    """Expect each call to be independent of the others."""
    pairs = zip(batches, experts, strict=True)
    wires = scenario.wire_dtype, scenario.grad_wire_dtype
    return [reference(batch, its_experts, *wires) for batch, its_experts in pairs]


def same_tokens(scenario: Scenario, batches: Sequence[Batch], experts: Sequence[Experts]) -> list[Expected]:
    """Expect the tokens of the first call to pass through the experts of both calls. Gradients of the tokens add up."""
    same = [batches[0].replace(upstream_TD=batch.upstream_TD) for batch in batches]
    first, second = separately(scenario, same, experts)
    grad_x, grad_weights = first.grad_x_TD + second.grad_x_TD, first.grad_weights_TK + second.grad_weights_TK
    nothing = torch.zeros_like(grad_x), torch.zeros_like(grad_weights)
    return [
        dataclasses.replace(first, grad_x_TD=grad_x, grad_weights_TK=grad_weights),
        dataclasses.replace(second, grad_x_TD=nothing[0], grad_weights_TK=nothing[1]),
    ]


def same_routing(scenario: Scenario, batches: Sequence[Batch], experts: Sequence[Experts]) -> list[Expected]:
    """Expect the rows of a second call to use the routing of the first call. Gradients of the weights add up."""
    first, second = batches
    follower = second.replace(ids_TK=first.ids_TK, weights_TK=first.weights_TK)
    before, after = separately(scenario, (first, follower), experts)
    grad_weights = before.grad_weights_TK + after.grad_weights_TK
    return [
        dataclasses.replace(before, grad_weights_TK=grad_weights),
        dataclasses.replace(after, grad_weights_TK=torch.zeros_like(second.weights_TK)),
    ]


def once(context: RankContext) -> Outputs:
    """Run the layer with a plan."""
    return [context.layer(call, context.plan(call)) for call in context.calls]


def with_layout(context: RankContext) -> Outputs:
    """Run the layer with a layout instead of a plan."""
    return [context.layer(call, call.layout) for call in context.calls]


def with_nothing(context: RankContext) -> Outputs:
    """Run the layer without a plan, and without a layout if the dispatcher reads x correctly without one."""
    return [context.layer(call, None if call.input_layout.is_default else call.layout) for call in context.calls]


def strided(context: RankContext) -> Outputs:
    """Run the layer with an x that is not contiguous."""
    (call,) = context.calls
    x = call.x.transpose(0, -1).contiguous().transpose(0, -1)
    return [context.layer(call, context.plan(call), x=x)]


def asynchronous(context: RankContext) -> Outputs:
    """Dispatch both calls with ``async_op=True``, and only then wait for them."""
    plans = [context.plan(call) for call in context.calls]
    pairs = zip(context.calls, plans, strict=True)
    pending = [context.dispatcher.dispatch(call.x, call.routing, plan, async_op=True) for call, plan in pairs]
    outputs = []
    for call, in_flight in zip(context.calls, pending, strict=True):
        sent = in_flight.wait()
        context.check(sent, call.batches)
        outputs.append(context.combine(call, sent))
    return outputs


def two_in_flight(context: RankContext) -> Outputs:
    """Dispatch both calls, then combine them in the opposite order."""
    first, second = context.calls
    sent = [context.dispatch(call, context.plan(call)) for call in context.calls]
    later = context.combine(second, sent[1])
    return [context.combine(first, sent[0]), later]


def combined_twice(context: RankContext) -> Outputs:
    """Dispatch once, and combine twice with different experts. Combine the second set of experts first."""
    first, second = context.calls
    sent = context.dispatch(first, context.plan(first))
    rows = [context.run_experts(sent, call.experts) for call in (first, second)]
    later = context.dispatcher.combine(rows[1], sent)
    return [context.dispatcher.combine(rows[0], sent), later]


def sent_again(context: RankContext) -> Outputs:
    """Dispatch again with other rows, reusing the routing and counts of the first dispatch."""
    first, second = context.calls
    sent = context.dispatch(first, context.plan(first))
    more = context.dispatcher.dispatch(second.x, again=sent)
    follower = tuple(
        after.replace(ids_TK=before.ids_TK, weights_TK=before.weights_TK)
        for before, after in zip(first.batches, second.batches, strict=True)
    )
    context.check(more, follower)
    return [context.combine(first, sent), context.combine(second, more)]


def checkpointed(context: RankContext, *, reentrant: bool) -> Outputs:
    """Recompute the layer in the backward, with the plan of the forward."""
    outputs = []
    for call in context.calls:
        plan = context.plan(call)
        outputs.append(checkpoint(context.layer, call, plan, call.x, use_reentrant=reentrant))
    return outputs


def on_routes(context: RankContext, *, reentrant: bool) -> Outputs:
    """Recompute the layer in the backward, on the routes of the forward."""
    from moe_dispatch.recompute import keep_routes, keep_routes_of  # noqa: PLC0415 - the kit works without it

    def run(call: LayerCall) -> Tensor:
        arguments = call, context.plan(call), call.x
        y: Tensor
        if reentrant:
            y = checkpoint(keep_routes_of(context.layer), *arguments, use_reentrant=True)
        else:
            y = checkpoint(context.layer, *arguments, use_reentrant=False, context_fn=keep_routes)
        return y

    return [run(call) for call in context.calls]


def in_chunks(context: RankContext) -> Outputs:
    """Run the layer in chunks of at most ``chunks.tokens`` rows."""
    from moe_dispatch.dispatchers import run_in_chunks  # noqa: PLC0415 - the kit works without it

    def run(call: LayerCall) -> Tensor:
        def experts(sent: Dispatched) -> Tensor:
            return context.run_experts(sent, call.experts)

        return run_in_chunks(context.dispatcher, experts, call.x, call.routing, context.plan(call))

    return [run(call) for call in context.calls]


SCHEDULES: dict[str, Schedule] = {
    "once": Schedule(run=once, expect=separately),
    "three_calls": Schedule(run=once, expect=separately, calls=3),
    "three_calls_backward_one_by_one": Schedule(run=once, expect=separately, calls=3, one_by_one=True),
    "with_layout": Schedule(run=with_layout, expect=separately, calls=2),
    "with_nothing": Schedule(run=with_nothing, expect=separately, calls=2),
    "strided": Schedule(run=strided, expect=separately),
    "asynchronous": Schedule(run=asynchronous, expect=separately, calls=2),
    "two_in_flight": Schedule(run=two_in_flight, expect=separately, calls=2),
    "combined_twice": Schedule(run=combined_twice, expect=same_tokens, calls=2, keeps_tokens=True),
    "sent_again": Schedule(run=sent_again, expect=same_routing, calls=2, keeps_tokens=True),
    "in_chunks": Schedule(run=in_chunks, expect=separately, calls=2),
    "checkpointed": Schedule(run=partial(checkpointed, reentrant=False), expect=separately, calls=2),
    "checkpointed_on_routes": Schedule(run=partial(on_routes, reentrant=False), expect=separately, calls=2),
    "checkpointed_reentrant_on_routes": Schedule(run=partial(on_routes, reentrant=True), expect=separately, calls=2),
    "checkpointed_reentrant": Schedule(run=partial(checkpointed, reentrant=True), expect=separately, calls=2),
}
