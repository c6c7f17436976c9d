"""What a conformance case calls, in which order. A program returns the outputs that then receive their gradients."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import final

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from moe_dispatch.testing.reference import Expected, reference
from moe_dispatch.testing.scenario import Batch, Experts, Scenario
from moe_dispatch.testing.seat import Seat

Outputs = Sequence[Tensor]


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Program:
    """A sequence of calls, and what each must give.

    Attributes:
        run: called on every rank; one output per call.
        calls: how many calls' data it works on.
        keeps_tokens: all calls have the same tokens per rank; otherwise T changes from call to call.
        expect: one rank's expectation from that rank's batches and the experts of each call.
        one_by_one: outputs are differentiated separately, the last first, instead of together.
    """

    run: Callable[[Seat], Outputs]
    calls: int = 1
    keeps_tokens: bool = False
    expect: Callable[[Scenario, Sequence[Batch], Sequence[Experts]], list[Expected]]
    one_by_one: bool = False


def separately(scenario: Scenario, batches: Sequence[Batch], experts: Sequence[Experts]) -> list[Expected]:
    """Each call for itself."""
    pairs = zip(batches, experts, strict=True)
    return [reference(batch, its_experts, scenario.wire_dtype) for batch, its_experts in pairs]


def same_tokens(scenario: Scenario, batches: Sequence[Batch], experts: Sequence[Experts]) -> list[Expected]:
    """The tokens of the first call go through the experts of each; their gradients add up."""
    same = [batches[0].replace(upstream_TD=batch.upstream_TD) for batch in batches]
    first, second = separately(scenario, same, experts)
    grad_x, grad_weights = first.grad_x_TD + second.grad_x_TD, first.grad_weights_TK + second.grad_weights_TK
    nothing = torch.zeros_like(grad_x), torch.zeros_like(grad_weights)
    return [
        dataclasses.replace(first, grad_x_TD=grad_x, grad_weights_TK=grad_weights),
        dataclasses.replace(second, grad_x_TD=nothing[0], grad_weights_TK=nothing[1]),
    ]


def same_way(scenario: Scenario, batches: Sequence[Batch], experts: Sequence[Experts]) -> list[Expected]:
    """The rows of a second call go the way of the first; the gradients of the weights add up."""
    first, second = batches
    follower = second.replace(ids_TK=first.ids_TK, weights_TK=first.weights_TK)
    before, after = separately(scenario, (first, follower), experts)
    grad_weights = before.grad_weights_TK + after.grad_weights_TK
    return [
        dataclasses.replace(before, grad_weights_TK=grad_weights),
        dataclasses.replace(after, grad_weights_TK=torch.zeros_like(second.weights_TK)),
    ]


def once(seat: Seat) -> Outputs:
    """One layer, with a plan."""
    return [seat.layer(call, seat.plan(call)) for call in seat.calls]


def with_layout(seat: Seat) -> Outputs:
    """The layout in the plan's place."""
    return [seat.layer(call, call.form.layout) for call in seat.calls]


def with_nothing(seat: Seat) -> Outputs:
    """Neither, where the dispatcher's own guess is the layout."""
    return [seat.layer(call, None if call.form.is_default else call.form.layout) for call in seat.calls]


def strided(seat: Seat) -> Outputs:
    """x without contiguous memory."""
    (call,) = seat.calls
    x = call.x.transpose(0, -1).contiguous().transpose(0, -1)
    return [seat.layer(call, seat.plan(call), x=x)]


def asynchronous(seat: Seat) -> Outputs:
    """``async_op=True``: both travel before either is waited for."""
    plans = [seat.plan(call) for call in seat.calls]
    pairs = zip(seat.calls, plans, strict=True)
    travelling = [seat.dispatcher.dispatch(call.x, call.routing, plan, async_op=True) for call, plan in pairs]
    outputs = []
    for call, in_flight in zip(seat.calls, travelling, strict=True):
        sent = in_flight.wait()
        seat.check(sent, call.batches)
        outputs.append(seat.dispatcher.combine(seat.run_experts(sent, call.experts), sent))
    return outputs


def two_in_flight(seat: Seat) -> Outputs:
    """Both are dispatched before either is combined; combined in the other order."""
    first, second = seat.calls
    sent = [seat.send(call, seat.plan(call)) for call in seat.calls]
    later = seat.dispatcher.combine(seat.run_experts(sent[1], second.experts), sent[1])
    return [seat.dispatcher.combine(seat.run_experts(sent[0], first.experts), sent[0]), later]


def combined_twice(seat: Seat) -> Outputs:
    """One dispatch, two sets of experts, two combines; the second set comes back first."""
    first, second = seat.calls
    sent = seat.send(first, seat.plan(first))
    rows = [seat.run_experts(sent, call.experts) for call in (first, second)]
    later = seat.dispatcher.combine(rows[1], sent)
    return [seat.dispatcher.combine(rows[0], sent), later]


def sent_again(seat: Seat) -> Outputs:
    """Other rows the same way, without routing or counts."""
    first, second = seat.calls
    sent = seat.send(first, seat.plan(first))
    more = seat.dispatcher.dispatch(second.x, again=sent)
    follower = tuple(
        after.replace(ids_TK=before.ids_TK, weights_TK=before.weights_TK)
        for before, after in zip(first.batches, second.batches, strict=True)
    )
    seat.check(more, follower)
    pairs = ((sent, first), (more, second))
    return [seat.dispatcher.combine(seat.run_experts(way, call.experts), way) for way, call in pairs]


def checkpointed(seat: Seat, *, reentrant: bool) -> Outputs:
    """The layer is computed again in the backward, with the plan of the forward."""
    outputs = []
    for call in seat.calls:
        plan = seat.plan(call)
        outputs.append(checkpoint(seat.layer, call, plan, call.x, use_reentrant=reentrant))
    return outputs


PROGRAMS: dict[str, Program] = {
    "once": Program(run=once, expect=separately),
    "three_calls": Program(run=once, expect=separately, calls=3),
    "three_calls_backward_one_by_one": Program(run=once, expect=separately, calls=3, one_by_one=True),
    "with_layout": Program(run=with_layout, expect=separately, calls=2),
    "with_nothing": Program(run=with_nothing, expect=separately, calls=2),
    "strided": Program(run=strided, expect=separately),
    "asynchronous": Program(run=asynchronous, expect=separately, calls=2),
    "two_in_flight": Program(run=two_in_flight, expect=separately, calls=2),
    "combined_twice": Program(run=combined_twice, expect=same_tokens, calls=2, keeps_tokens=True),
    "sent_again": Program(run=sent_again, expect=same_way, calls=2, keeps_tokens=True),
    "checkpointed": Program(run=partial(checkpointed, reentrant=False), expect=separately, calls=2),
    "checkpointed_reentrant": Program(run=partial(checkpointed, reentrant=True), expect=separately, calls=2),
}
