"""Both verbs and their backwards as operators of ``torch.ops.moe_dispatch``.

``torch.compile`` traces operators through their fake kernels. Selective checkpointing saves the results of operators.

Operators take and return only tensors, numbers and strings. A channel is passed as its name, and a route as the tensors
from which the backend restores it. Rows are passed in the model's shapes: an operator settles sizes, cuts, pads and
trims rows inside. So tracing knows all sizes except the number of rows that the experts get and some sizes of the
route.

An operator checks its arguments when it runs, with the errors of the eager call. Fake kernels only check that the
channel is open.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor
from torch.library import get_ctx

from moe_dispatch.backends.base import Sizes
from moe_dispatch.backends.capacity import Capacity
from moe_dispatch.balance.slot_table import SlotTable
from moe_dispatch.custom_operators import operator
from moe_dispatch.dispatchers.agreement import Caller, settle, tell_peers
from moe_dispatch.dispatchers.autograd import (
    Selection,
    profiler_range,
    refuse_double_backward,
    run_combine,
    run_combine_backward,
    run_dispatch,
    run_dispatch_backward,
)
from moe_dispatch.dispatchers.channel import Channel, named_channel
from moe_dispatch.dispatchers.planning import (
    check_again,
    check_combine,
    check_rows,
    check_tensors,
    check_values,
    draft_plan,
    prepare,
)
from moe_dispatch.errors import ConfigError
from moe_dispatch.layouts import Rows
from moe_dispatch.types import Routing


@operator(
    "(Tensor rows, Tensor ids, Tensor weights, Tensor? real_rows, Tensor? valid, Tensor[] table, str channel, "
    "bool recorded, "
    "SymInt? padded_rows, SymInt? group_max_rows, SymInt? fitting_rows, "
    "SymInt? buffer_rows, SymInt? pair_rows) -> Tensor[]"
)
def dispatch(
    rows: Tensor,
    ids: Tensor,
    weights: Tensor,
    real_rows: Tensor | None,
    valid: Tensor | None,
    table: Sequence[Tensor],
    channel: str,
    recorded: bool,
    *numbers: int | None,
) -> list[Tensor]:
    """Send rows to their experts.

    Args:
        rows: (T, D), rows of the model.
        ids: int64 (T, K). No row names an expert twice.
        weights: (T, K), in the accumulation dtype.
        real_rows: int64, the indices of the rows to send; None sends all rows.
        valid: bool (T,), whether each row is a token. None if all rows are tokens, or if the other rows are cut out.
        table: The two tensors of the ``SlotTable``; empty if there is none.
        channel: Name of the channel.
        recorded: Whether the call records gradients.
        *numbers: The five numbers of ``flat_sizes``. If the first two are None, the sizes are settled here.

    Returns:
        Rows grouped by expert, (R, D); their weights, (R,); real rows per expert, int64 (L,); and the tensors of the
        route.
    """
    link = compilable(named_channel(channel))
    if link.recorder is not None:
        link.recorder.refuse("torch.compile or selective checkpointing")
    given = _sizes_from(numbers)
    has_sizes = (given.padded_rows, given.group_max_rows) != (None, None)
    caller, routing = Caller(recorded), Routing(ids, weights)
    with torch.no_grad(), profiler_range("dispatch"):
        try:
            check_tensors(rows, routing, link.config, link.needs)
            if link.config.debug:
                check_values(routing, valid, link.config.num_experts)
            draft = draft_plan(link, Rows(), rows if real_rows is None else real_rows.unsqueeze(1))
            outgoing = prepare(
                link,
                rows,
                ids,
                weights,
                real_rows=real_rows,
                valid_T=valid,
                table=SlotTable(copies_EC=table[0], experts_L=table[1]) if table else None,
                mark=caller.mark(rows.dtype),
            )
        except Exception as error:
            tell_peers(link, error, in_dispatch=True, x=rows, has_sizes=has_sizes)
            raise
        known = draft.plan(link, given) if has_sizes else draft
        sizes = settle(link, known, x=rows, caller=caller, outgoing=outgoing).sizes
        # Use the traced capacity, because a recomputation may run after the dispatcher has grown.
        sizes = dataclasses.replace(sizes, capacity=given.capacity)
        foreseen = None if given.capacity is None else _foreseen_rows(link, len(outgoing.ids_TK))
        if foreseen is not None:
            sizes = dataclasses.replace(sizes, padded_rows=foreseen)
        _, finish = run_dispatch(link, outgoing, sizes, caller)
        arrived = finish()
    return _own(arrived.rows, arrived.weights, arrived.real_tokens_per_expert, *arrived.route.tensors())


@dispatch.register_fake
def _(
    rows: Tensor,
    ids: Tensor,
    weights: Tensor,
    real_rows: Tensor | None,
    valid: Tensor | None,
    table: Sequence[Tensor],
    channel: str,
    recorded: bool,
    *numbers: int | None,
) -> list[Tensor]:
    link = named_channel(channel)
    new_size = cast(Callable[[], int], get_ctx().new_dynamic_size)
    given = _sizes_from(numbers)
    padded = given.padded_rows
    if padded is None:
        padded = _foreseen_rows(link, rows.shape[0] if real_rows is None else real_rows.shape[0])
    counts = ids.new_empty(link.shape.num_local_experts)
    if not link.needs.compilable:  # the operator raises when it runs
        size = new_size()
        return [rows.new_empty(size, link.shape.hidden_size), weights.new_empty(size), counts]
    route = link.backend.blank_route(padded, weights, new_size, given.capacity)
    grouped = route.num_grouped
    return [rows.new_empty(grouped, link.shape.hidden_size), weights.new_empty(grouped), counts, *route.tensors()]


@operator(
    "(Tensor rows, Tensor[] route, Tensor? real_rows, str channel, SymInt num_rows, SymInt num_grouped) -> Tensor"
)
def dispatch_again(
    rows: Tensor, route: Sequence[Tensor], real_rows: Tensor | None, channel: str, num_rows: int, num_grouped: int
) -> Tensor:
    """Send other rows along the route of an earlier dispatch.

    ``num_rows`` is the number of rows that the earlier dispatch sent, ``num_grouped`` the number that the experts got.
    """
    link = named_channel(channel)
    with torch.no_grad(), profiler_range("dispatch"):
        taken = compilable(link).backend.restore(route)
        check_again(rows, num_rows, rows.device, link.config)
        check_rows("Dispatcher.dispatch", "x", rows, link.config, link.needs)
        selection = Selection(num_rows=num_rows, real_rows=real_rows, padded=taken.num_rows)
        (sent,) = _own(taken.send(selection.take(rows)))
    return sent


@dispatch_again.register_fake
def _(
    rows: Tensor, route: Sequence[Tensor], real_rows: Tensor | None, channel: str, num_rows: int, num_grouped: int
) -> Tensor:
    return rows.new_empty(num_grouped, rows.shape[1])


@operator(
    "(Tensor grad_rows, Tensor? grad_weights, Tensor[] route, Tensor? real_rows, str channel, SymInt[] rows_shape, "
    "SymInt[] weights_shape) -> Tensor[]"
)
def dispatch_backward(
    grad_rows: Tensor,
    grad_weights: Tensor | None,
    route: Sequence[Tensor],
    real_rows: Tensor | None,
    channel: str,
    rows_shape: Sequence[int],
    weights_shape: Sequence[int],
) -> list[Tensor]:
    """Return the gradients of the model's rows and, if ``grad_weights`` is given, of their weights."""
    with torch.no_grad():
        taken = named_channel(channel).backend.restore(route)
        selection = Selection(num_rows=rows_shape[0], real_rows=real_rows, padded=taken.num_rows)
        found = run_dispatch_backward(taken, selection, grad_rows, grad_weights)
        return _own(*(grad for grad in found if grad is not None))


@dispatch_backward.register_fake
def _(
    grad_rows: Tensor,
    grad_weights: Tensor | None,
    route: Sequence[Tensor],
    real_rows: Tensor | None,
    channel: str,
    rows_shape: Sequence[int],
    weights_shape: Sequence[int],
) -> list[Tensor]:
    rows = grad_rows.new_empty(rows_shape)
    return [rows] if grad_weights is None else [rows, grad_weights.new_empty(weights_shape)]


@operator("(Tensor rows, Tensor weights, Tensor[] route, Tensor? real_rows, str channel, SymInt num_rows) -> Tensor")
def combine(
    rows: Tensor, weights: Tensor, route: Sequence[Tensor], real_rows: Tensor | None, channel: str, num_rows: int
) -> Tensor:
    """Bring expert rows, (R, D), back to (T, D), weighted with the weights of the dispatch if the config says so."""
    link = named_channel(channel)
    with torch.no_grad(), profiler_range("combine"):
        taken = compilable(link).backend.restore(route)
        check_combine(rows, weights.unsqueeze(1).expand(-1, link.shape.hidden_size), link.config, link.needs)
        selection = Selection(num_rows=num_rows, real_rows=real_rows, padded=taken.num_rows)
        (y_TD,) = _own(run_combine(link, rows, weights, taken, selection))
    return y_TD


@combine.register_fake
def _(
    rows: Tensor, weights: Tensor, route: Sequence[Tensor], real_rows: Tensor | None, channel: str, num_rows: int
) -> Tensor:
    return rows.new_empty(num_rows, rows.shape[1])


@operator(
    "(Tensor grad, Tensor? rows, Tensor weights, Tensor[] route, Tensor? real_rows, str channel, SymInt num_grouped) "
    "-> Tensor[]"
)
def combine_backward(
    grad: Tensor,
    rows: Tensor | None,
    weights: Tensor,
    route: Sequence[Tensor],
    real_rows: Tensor | None,
    channel: str,
    num_grouped: int,
) -> list[Tensor]:
    """Return the gradients of the expert rows, (num_grouped, D), and, if ``rows`` is given, of their weights.

    ``rows`` are the expert rows that were combined.
    """
    link = named_channel(channel)
    with torch.no_grad():
        taken = link.backend.restore(route)
        selection = Selection(num_rows=grad.shape[0], real_rows=real_rows, padded=taken.num_rows)
        found = run_combine_backward(link, grad, (rows, weights), taken, selection)
        return _own(*(tensor for tensor in found if tensor is not None))


@combine_backward.register_fake
def _(
    grad: Tensor,
    rows: Tensor | None,
    weights: Tensor,
    route: Sequence[Tensor],
    real_rows: Tensor | None,
    channel: str,
    num_grouped: int,
) -> list[Tensor]:
    grad_rows = grad.new_empty(num_grouped, grad.shape[1])
    return [grad_rows] if rows is None else [grad_rows, torch.empty_like(weights)]


def _keep_dispatch(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    rows, _, weights, real_rows, _, table, ctx.channel, *_ = inputs
    ctx.num_tables = len(table)
    ctx.shapes = list(rows.shape), list(weights.shape)
    ctx.save_for_backward(real_rows, *output[3:])


def _dispatch_gradients(ctx: Any, grads: list[Tensor]) -> tuple[Any, ...]:
    real_rows, *route = ctx.saved_tensors
    # Always compute the gradient of the weights: all ranks must exchange it, even if this rank does not need it.
    grad_rows, grad_weights = dispatch_backward(*grads[:2], route, real_rows, ctx.channel, *ctx.shapes)
    return grad_rows, None, grad_weights, None, None, [None] * ctx.num_tables, *[None] * 7


def _keep_again(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    rows, route, real_rows, ctx.channel, *_ = inputs
    ctx.shape = list(rows.shape)
    ctx.save_for_backward(real_rows, *route)


def _again_gradients(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    real_rows, *route = ctx.saved_tensors
    (grad_rows,) = dispatch_backward(grad, None, route, real_rows, ctx.channel, ctx.shape, [])
    return grad_rows, [None] * len(route), None, None, None, None


def _keep_combine(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    rows, weights, route, real_rows, ctx.channel, _ = inputs
    ctx.num_grouped = rows.shape[0]
    wants_dots = named_channel(ctx.channel).config.weights == "combine" and ctx.needs_input_grad[1]
    ctx.save_for_backward(rows if wants_dots else None, weights, real_rows, *route)


def _combine_gradients(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    rows, weights, real_rows, *route = ctx.saved_tensors
    found = combine_backward(grad, rows, weights, route, real_rows, ctx.channel, ctx.num_grouped)
    return found[0], None if rows is None else found[1], [None] * len(route), None, None, None


dispatch.register_autograd(_dispatch_gradients, setup_context=_keep_dispatch)
dispatch_again.register_autograd(_again_gradients, setup_context=_keep_again)
combine.register_autograd(_combine_gradients, setup_context=_keep_combine)


def _once_only(verb: str, ctx: Any, *grads: Any) -> Any:
    with torch.enable_grad():
        refuse_double_backward(verb)


dispatch_backward.register_autograd(partial(_once_only, "dispatch"))
combine_backward.register_autograd(partial(_once_only, "combine"))


def compilable(link: Channel) -> Channel:
    """Return the channel if operators can run its backend.

    Raises:
        ConfigError: The routes of the backend cannot be restored from tensors.
    """
    if not link.needs.compilable:
        raise ConfigError(
            f"Dispatcher: torch.compile needs a backend whose state is tensors, got {link.backend_name!r}. Keep both "
            "verbs out of the compiled region with torch.compiler.disable and compile the experts alone, or use "
            'backend "alltoall".'
        )
    return link


def flat_sizes(sizes: Sizes, capacity: Capacity | None) -> tuple[int | None, ...]:
    """Return sizes as the five numbers that an operator takes: two from ``sizes``, three from the capacity."""
    room = (None,) * 3 if capacity is None else (capacity.rows, capacity.buffer_rows, capacity.pair_rows)
    return (sizes.padded_rows, sizes.group_max_rows, *room)


def _sizes_from(numbers: Sequence[int | None]) -> Sizes:
    padded_rows, group_max_rows, rows, buffer_rows, pair_rows = numbers
    capacity = None
    if rows is not None and buffer_rows is not None:
        capacity = Capacity(rows=rows, buffer_rows=buffer_rows, pair_rows=pair_rows)
    return Sizes(padded_rows=padded_rows, group_max_rows=group_max_rows, capacity=capacity)


def _foreseen_rows(link: Channel, brought: int) -> int | None:
    """Return how many rows with padding go to the backend; None if this cannot be known without a plan.

    In graph-safe mode it is the largest possible number, so that no shape depends on T.
    """
    if link.needs.equal_rows or link.config.graph_safe:
        largest = link.config.max_tokens_per_rank
        return link.needs.padded(largest) if link.config.row_counts_policy == "static" and largest is not None else None
    return brought if link.needs.row_multiple == 1 and not link.needs.min_rows else None


def _own(*tensors: Tensor) -> list[Tensor]:
    """Return the tensors with the strides that the fake kernels promise: contiguous, at the start of their memory."""

    def own(tensor: Tensor) -> Tensor:
        as_told = tensor.is_contiguous() and tensor.storage_offset() == 0
        return tensor if as_told else tensor.clone(memory_format=torch.contiguous_format)

    return list(map(own, tensors))
