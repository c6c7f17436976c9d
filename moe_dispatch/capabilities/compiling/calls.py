"""What takes the place of a verb in a call that torch traces: the calls of operators, ``moe_dispatch.seams.tracing``.

These functions are traced, so they must not read a device, change a counter or exchange anything with other ranks. The
operators do that when they run.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Size, Tensor

from moe_dispatch.capabilities.compiling import operators
from moe_dispatch.capabilities.compiling.expert_rows import aligned_product as aligned_product
from moe_dispatch.capabilities.compiling.expert_rows import split as split
from moe_dispatch.capabilities.compiling.operators import (
    AgainArguments,
    CombineArguments,
    DispatchArguments,
    DispatchResults,
)
from moe_dispatch.communication import to_device
from moe_dispatch.dispatched import Dispatched, check_plain
from moe_dispatch.dispatchers import checks
from moe_dispatch.dispatchers.autograd import anchor_for
from moe_dispatch.dispatchers.channel import Channel, Lease
from moe_dispatch.dispatchers.meter import Tally
from moe_dispatch.errors import StateError
from moe_dispatch.layouts import Layout
from moe_dispatch.permutation import accumulation_dtype, merge_slots
from moe_dispatch.seams.tracing import refuse_traced
from moe_dispatch.types import Plan, Routing, Sizes


@final
@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class TracedState:
    """The private state of a ``Dispatched`` of a traced call, in the place of ``autograd.State``.

    Attributes:
        lease: The dispatcher's share of its channel.
        layout: Layout of the dispatched x.
        shape: Shape of the dispatched x.
        num_rows: T, the number of the rows of x.
        real_rows: int64, the indices of the rows that went to the backend; None if all of them did.
        route: The tensors of the route.
        tally: What counts its rows as trained; None in compiled code, which does not know its layer.
    """

    lease: Lease
    layout: Layout
    shape: Size
    num_rows: int
    real_rows: Tensor | None
    route: tuple[Tensor, ...]
    tally: Tally | None = None


del TracedState.__dataclass_fields__  # for FSDP2, as of ``autograd.State``


def dispatch(
    lease: Lease, x: Tensor, routing: Routing | None, layout: Layout, plan: Plan | Layout | None
) -> Dispatched:
    """Run ``Dispatcher.dispatch``. The operator settles the sizes if there is no plan."""
    channel = lease.enter()
    routing = _check_traced(channel, x, routing)
    x_TD = layout.flatten(x)
    sizes, real_rows, valid_T = _sizes_and_rows(channel, layout, plan, x_TD)
    ids_TK, weights_TK = _merged(channel, routing, x.dtype)
    # Layers with the same code share a compiled graph, so a compiled call must not depend on its layer.
    layer = -1 if torch.compiler.is_compiling() else lease.layer
    given = DispatchArguments(
        rows=x_TD,
        ids=ids_TK,
        weights=weights_TK,
        real_rows=real_rows,
        valid=valid_T,
        table=[] if lease.slots is None else lease.slots.tensors(),
        channel=channel.name,
        grad_enabled=torch.is_grad_enabled(),
        numbers=list(operators.Numbers.of(sizes, channel.capacity, layer)),
        anchor=anchor_for(x, channel),
    )
    found = DispatchResults.named(operators.dispatch(*given), quantised=channel.shape.quantised)
    real_L, pad_multiple = found.real_tokens_per_expert, channel.shape.pad_multiple
    padded_L = real_L if pad_multiple == 1 else real_L + (-real_L % pad_multiple)
    sent = Dispatched(
        in_graph=found.rows,
        tokens_per_expert=padded_L,
        real_tokens_per_expert=real_L,
        host_counts=None,
        weights=found.weights,
        pad_multiple=pad_multiple,
        placement=None if lease.slots is None else lease.slots.placement,
        state=TracedState(
            lease=lease,
            layout=layout,
            shape=x.shape,
            num_rows=x_TD.shape[0],
            real_rows=real_rows,
            route=tuple(found.route),
            tally=None if layer < 0 else _tally(lease, real_L),
        ),
    )
    return operators.with_parts(channel, sent, found.parts)


def _tally(lease: Lease, real_L: Tensor) -> Tally | None:
    """Return what counts the rows of a dispatch as trained; None if tensors have no values."""
    if type(real_L) is not Tensor:
        return None
    experts_L = None if lease.slots is None else lease.slots.tensors()[-1]
    return Tally(lease, real_L.clone() if torch.is_grad_enabled() else real_L, experts_L)


class _Counted(torch.autograd.Function):
    """Count a tally in the backward of a combine."""

    @staticmethod
    def forward(ctx: Any, rows_RD: Tensor, weights_R: Tensor, tally: Tally) -> tuple[Tensor, Tensor]:
        ctx.tally = tally
        ctx.set_materialize_grads(False)
        return rows_RD.view_as(rows_RD), weights_R.view_as(weights_R)

    @staticmethod
    def backward(ctx: Any, grad_RD: Tensor | None, grad_R: Tensor | None) -> Any:
        ctx.tally.count()
        return grad_RD, grad_R, None


def dispatch_again(x: Tensor, again: Dispatched) -> Dispatched:
    """Run ``Dispatcher.dispatch(x, again=again)`` if an operator made the first dispatch."""
    state: TracedState = again.state
    channel = state.lease.enter()
    given = AgainArguments(
        rows=state.layout.flatten(x),
        weights=again.weights,
        route=state.route,
        real_rows=state.real_rows,
        channel=channel.name,
        num_rows=state.num_rows,
        num_grouped=again.in_graph.shape[0],
        anchor=anchor_for(x, channel),
    )
    weights, rows, *parts = operators.dispatch_again(*given)
    return operators.with_parts(channel, dataclasses.replace(again, in_graph=rows, weights=weights), parts)


def combine(rows: Tensor, sent: Dispatched) -> Tensor:
    """Run ``Dispatcher.combine`` if an operator made the dispatch."""
    state: TracedState = sent.state
    channel = state.lease.enter()
    check_plain("Dispatcher.combine", rows=rows)
    rows, weights = rows.to(sent.in_graph.dtype), sent.weights
    if state.tally is not None:
        rows, weights = _Counted.apply(rows, weights, state.tally)  # type: ignore[no-untyped-call]
        if not (rows.requires_grad or weights.requires_grad):
            state.tally.end()
    given = CombineArguments(
        rows=rows,
        weights=weights,
        route=state.route,
        real_rows=state.real_rows,
        channel=channel.name,
        num_rows=state.num_rows,
    )
    return state.layout.unflatten(operators.combine(*given), state.shape)


def _check_traced(channel: Channel, x: Tensor, routing: Routing | None) -> Routing:
    """Refuse a config that operators cannot serve, and arguments of other types. Return the routing."""
    if not isinstance(routing, Routing):
        raise checks.no_routing(routing)
    check_plain("Dispatcher.dispatch", x=x, topk_ids=routing.topk_ids, topk_weights=routing.topk_weights)
    if channel.config.plans_placements:  # also on one rank, where a plan would change nothing
        refuse_traced(
            "Dispatcher.dispatch: operators carry no plan of balance, so keep both verbs out of torch.compile and "
            "selective checkpointing. Or use dispatcher.place(placement)."
        )
    if channel.config.chunks is not None:
        refuse_traced(
            "Dispatcher.dispatch: chunks do not work in torch.compile and selective checkpointing. Keep both verbs out "
            "of them, or set chunks=None."
        )
    return routing


def _sizes_and_rows(
    channel: Channel, layout: Layout, plan: Plan | Layout | None, x_TD: Tensor
) -> tuple[Sizes, Tensor | None, Tensor | None]:
    """Return the sizes of a plan, the indices of the rows to send, and whether each row is a token.

    Without a plan, rows that are no tokens are masked. To cut them out, their number would have to be read here.
    """
    num_rows, sizes, real_rows, valid_T = x_TD.shape[0], Sizes(), None, None
    if not torch.compiler.is_compiling():  # under tracing, the number of rows is a symbol, and lengths are unknown
        layout.check(num_rows, values=channel.config.debug)
    if isinstance(plan, Plan):
        _check_plan_by_shape(channel, plan, num_rows)
        sizes, valid_T = plan.sizes, plan.valid_T
        real_rows = None if plan.real_rows is None else to_device(plan.real_rows, x_TD.device)
    if real_rows is None and valid_T is None:
        valid_T = layout.valid_T(num_rows, x_TD.device)
    return sizes, real_rows, valid_T


def _check_plan_by_shape(channel: Channel, plan: Plan, num_rows: int) -> None:
    """Check a plan as ``check_call`` does, as far as a traced call can.

    The number of rows may be a symbol, so it is compared when the compiled code runs.
    """
    if plan.owner != channel.name or plan.sizes.capacity != channel.capacity:
        raise checks.foreign_plan(channel, plan)
    if plan.num_rows is not None:
        torch._check(
            plan.num_rows == num_rows, lambda: "Dispatcher.dispatch: the plan is for another number of tokens."
        )
    elif plan.layout.on_host and not plan.layout.all_real:  # the rows to cut would have to be found here, on the host
        raise StateError("Dispatcher.dispatch: for a compiled region, make the plan with plan(layout, like=x).")


def _merged(channel: Channel, routing: Routing, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return ids and weights without an expert that a row names twice, the weights in the accumulation dtype."""
    ids_TK, weights_TK = routing.topk_ids, routing.topk_weights
    if not _fit(ids_TK, weights_TK):
        return ids_TK, weights_TK
    weights_TK = weights_TK.to(accumulation_dtype(dtype))
    if torch.compiler.is_compiling():  # a kernel cannot be traced, and a value cannot be asked for
        return merge_slots(ids_TK, weights_TK, asks=False)
    permutation = channel.context.permutation_of(ids_TK)
    return permutation.merge_slots(ids_TK, weights_TK, asks=channel.capacity is None)


def _fit(ids_TK: Tensor, weights_TK: Tensor) -> bool:
    """Return whether ids and weights fit each other. If they do not, the operator refuses them when it runs."""
    # Imported here because this module imports sympy, which selective checkpointing never needs.
    from torch.fx.experimental.symbolic_shapes import guard_or_true  # noqa: PLC0415

    fit = ids_TK.dim() == weights_TK.dim() == 2 and ids_TK.shape[1] == weights_TK.shape[1]
    return fit and weights_TK.is_floating_point() and guard_or_true(ids_TK.shape[0] == weights_TK.shape[0])
