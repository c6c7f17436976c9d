"""Both verbs as operators of torch, for ``torch.compile`` and selective checkpointing.

``torch.compile`` traces operators through their fake kernels. Selective checkpointing saves the results of operators.
An operator runs the functions of ``autograd`` that an eager call runs. A backend's route travels as a list of tensors,
and rows are passed in the model's shapes: an operator settles sizes, cuts, pads and trims rows inside. So tracing knows
all sizes except the number of rows that the experts get and some sizes of the route.

An operator checks its arguments when it runs, with the errors of the eager call. Fake kernels only check that the
channel is open. The last part of this file is what is traced: it must not read a device, change a counter or exchange
anything with other ranks, because the operators do that when they run.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NoReturn, cast

import torch
from torch import Tensor
from torch.library import get_ctx
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils.checkpoint import _CachedTorchDispatchMode, _CachingTorchDispatchMode

from moe_dispatch._custom_operators import operator
from moe_dispatch._slots import load_slot_options
from moe_dispatch.backends.base import Route, Tables
from moe_dispatch.backends.wire import Encoded, row_format, wire_format
from moe_dispatch.communication import to_device
from moe_dispatch.dispatchers import checks
from moe_dispatch.dispatchers.agreement import tell_peers
from moe_dispatch.dispatchers.autograd import (
    State,
    anchor_for,
    double_backward,
    finish,
    pad,
    start,
    trim,
)
from moe_dispatch.dispatchers.channel import Channel, Lease, named_channel, profiler_range
from moe_dispatch.errors import ConfigError, StateError
from moe_dispatch.layouts import Layout, Rows
from moe_dispatch.permutation import accumulation_dtype, merge_slots
from moe_dispatch.types import Capacity, Dispatched, Plan, Routing, Sizes, check_plain


@operator
def dispatch(
    rows: Tensor,
    ids: Tensor,
    weights: Tensor,
    real_rows: Tensor | None,
    valid: Tensor | None,
    table: Sequence[Tensor],
    channel: str,
    grad_enabled: bool,
    numbers: Sequence[int],
    anchor: Tensor | None,
) -> list[Tensor]:
    """Send rows to their experts.

    Args:
        rows: (T, D), rows of the model.
        ids: int64 (T, K). No row names an expert twice.
        weights: (T, K), in the accumulation dtype.
        real_rows: int64, the indices of the rows to send; None sends all rows.
        valid: bool (T,), whether each row is a token. None if all rows are tokens, or if the other rows are cut out.
        table: The tensors of the expert slots; empty if every rank holds its own experts only.
        channel: Name of the channel.
        grad_enabled: Whether the call records gradients.
        numbers: The five numbers of ``_flat_sizes``, and the number of the layer for the meter, or -1 if the call is
            compiled. If the first two are -1, the sizes are settled here.
        anchor: Tensor that ``anchor_for`` gives, so that the backward runs on every rank; None without peers.

    Returns:
        Rows grouped by expert, (R, D); their weights, (R,); real rows per expert, int64 (L,); if rows are delivered
        quantised, their values and scales as uint8; and the tensors of the route. Quantised rows have their edge in
        place of the first tensor.
    """
    link = named_channel(channel)
    if not link.needs.compilable:
        raise ConfigError(
            f"Dispatcher: torch.compile needs a backend whose state is tensors, got {link.backend_name!r}. Keep both "
            'verbs out of the compiled region with torch.compiler.disable, or use backend "alltoall".'
        )
    for observer in link.observers:
        observer.traced()
    *sizes, layer = numbers
    given, routing = _sizes_from(sizes), Routing(ids, weights)
    if given.capacity is not None:
        # The traced capacity is used, because a recomputation may run after the dispatcher has grown.
        rows_sent = _foreseen_rows(link, None)
        given = dataclasses.replace(given, padded_rows=rows_sent, group_max_rows=rows_sent)
    has_sizes = given.padded_rows is not None or given.group_max_rows is not None
    with torch.no_grad(), profiler_range("dispatch"):
        try:
            checks.check_tensors(rows, routing, link.config, link.needs)
            if link.config.debug:
                checks.check_values(routing, valid, link.config.num_experts)
            plan = checks.draft_plan(link, Rows(), rows if real_rows is None else real_rows.unsqueeze(1))
        except Exception as error:
            tell_peers(link, error, in_dispatch=True, x=rows, has_sizes=has_sizes)
            raise
        departed = start(
            link,
            rows,
            ids,
            weights,
            dataclasses.replace(plan, sizes=given, settled=True) if has_sizes else plan,
            real_rows=real_rows,
            valid_T=valid,
            slots=load_slot_options().restored(table) if table else None,
            grad_enabled=grad_enabled,
            layer=layer,
        )
        arrived = finish(departed)
    edge, *quantised = _results(arrived.rows, rows.dtype)
    others = _own(arrived.weights, arrived.real_tokens_per_expert, *arrived.route.tensors())
    return [edge, *others[:2], *quantised, *others[2:]]


@dispatch.register_fake
def _(rows: Tensor, ids: Tensor, weights: Tensor, real_rows: Tensor | None, *others: Any) -> list[Tensor]:
    _, _, channel, _, numbers, *_ = others
    link = named_channel(channel)
    new_size = cast(Callable[[], int], get_ctx().new_dynamic_size)
    given = _sizes_from(numbers[:-1])
    padded = given.padded_rows
    if padded is None:
        padded = _foreseen_rows(link, rows.shape[0] if real_rows is None else real_rows.shape[0])
    counts = ids.new_empty(link.shape.num_local_experts)
    if not link.needs.compilable:  # the operator raises when it runs
        size = new_size()
        edge, *quantised = _unfilled(link, rows, size)
        return [edge, weights.new_empty(size), counts, *quantised]
    route = link.backend.route_from(Tables(new_size, weights), padded, given.capacity)
    grouped = route.num_grouped
    edge, *quantised = _unfilled(link, rows, grouped)
    return [edge, weights.new_empty(grouped), counts, *quantised, *route.tensors()]


@operator
def dispatch_again(
    rows: Tensor,
    weights: Tensor,
    route: Sequence[Tensor],
    real_rows: Tensor | None,
    channel: str,
    num_rows: int,
    num_grouped: int,
    anchor: Tensor | None,
) -> list[Tensor]:
    """Send other rows along the route of an earlier dispatch.

    ``num_rows`` is the number of rows that the earlier dispatch sent, ``num_grouped`` the number that the experts got.
    Returns the weights of the earlier dispatch, so that their gradient comes through here: a rank whose experts detach
    their outputs must not leave out this backward, or run it before that of combine. Then the rows, or the edge, values
    and scales of quantised rows, as ``dispatch`` does.
    """
    with torch.no_grad(), profiler_range("dispatch"):
        link, taken = _restored(channel, route)
        checks.check_again(rows, num_rows, rows.device, link)
        return [weights.clone(), *_results(taken.send(pad(rows, real_rows, taken.num_rows)), rows.dtype)]


@dispatch_again.register_fake
def _(rows: Tensor, weights: Tensor, *others: Any) -> list[Tensor]:
    _, _, channel, _, num_grouped, *_ = others
    return [torch.empty_like(weights), *_unfilled(named_channel(channel), rows, num_grouped)]


def _results(rows: Tensor | Encoded, dtype: torch.dtype) -> list[Tensor]:
    """Return rows that arrived as results of an operator: the rows, or their stand-in and their parts as uint8.

    An operator has no float8 results, because autograd would give them gradients of their own dtype.
    """
    return _own(rows) if isinstance(rows, Tensor) else [rows.stand_in(dtype), *_own(*rows.tensors())]


def _unfilled(link: Channel, rows: Tensor, grouped: int) -> list[Tensor]:
    """Return tensors like those of ``_results``, for tracing."""
    hidden = link.shape.hidden_size
    if not link.shape.quantised:
        return [rows.new_empty(grouped, hidden)]
    widths = row_format(rows.dtype, hidden, link.shape.wire_dtype).part_bytes()
    parts = (rows.new_empty(grouped, width, dtype=torch.uint8) for width in widths)
    return [rows.new_empty_strided((grouped, hidden), (0, 0)), *parts]


def _with_parts(link: Channel, sent: Dispatched, parts: Sequence[Tensor]) -> Dispatched:
    """Return the result of a dispatch with the parts of its rows, from the results of ``_results``."""
    if not parts:
        return sent
    wire = link.shape.wire_dtype
    return wire_format(wire).restored(parts).added_to(sent, wire)


@operator
def dispatch_backward(
    grad_rows: Tensor,
    grad_weights: Tensor | None,
    route: Sequence[Tensor],
    real_rows: Tensor | None,
    channel: str,
    rows_shape: Sequence[int],
    weights_shape: Sequence[int],
    anchor: Tensor | None,
    behind: Tensor | None,
) -> list[Tensor]:
    """Return the gradients of the model's rows and, if given, of their weights (``grad_weights``) and of the anchor.

    The empty gradient of the anchor is a result of this operator, so a compiler keeps the operator on a rank that needs
    no other gradient. ``behind`` is what must have been computed before.
    """
    with torch.no_grad(), profiler_range("dispatch.backward"):
        _, taken = _restored(channel, route)
        found = taken.dispatch_backward(grad_rows, grad_weights)
        grads = _own(*(trim(grad, real_rows, rows_shape[0]) for grad in found if grad is not None))
        return grads if anchor is None else [*grads, anchor.new_empty(0)]


@dispatch_backward.register_fake
def _(grad_rows: Tensor, grad_weights: Tensor | None, *others: Any) -> list[Tensor]:
    rows_shape, weights_shape, anchor, *_ = others[3:]
    grads = [grad_rows.new_empty(rows_shape)]
    grads += [] if grad_weights is None else [grad_weights.new_empty(weights_shape)]
    return grads if anchor is None else [*grads, anchor.new_empty(0)]


@operator
def combine(
    rows: Tensor, weights: Tensor, route: Sequence[Tensor], real_rows: Tensor | None, channel: str, num_rows: int
) -> Tensor:
    """Bring expert rows, (R, D), back to (T, D), weighted with the weights of the dispatch if the config says so."""
    with torch.no_grad(), profiler_range("combine"):
        link, taken = _restored(channel, route)
        checks.check_combine(rows, rows.new_empty(()).expand(weights.shape[0], link.shape.hidden_size), link)
        y_TD = taken.combine(rows, weights if link.config.weights == "combine" else None)
        (y_TD,) = _own(trim(y_TD, real_rows, num_rows))
    return y_TD


@combine.register_fake
def _(rows: Tensor, *others: Any) -> Tensor:
    return rows.new_empty(others[-1], rows.shape[1])  # the last argument is the number of result rows


@operator
def combine_backward(
    grad: Tensor,
    rows: Tensor | None,
    weights: Tensor,
    route: Sequence[Tensor],
    real_rows: Tensor | None,
    channel: str,
    num_grouped: int,
) -> list[Tensor]:
    """Return the gradients of the expert rows, (num_grouped, D), and of their weights: zeros without ``rows``.

    ``rows`` are the expert rows that were combined. The weights always have a gradient, so a compiler keeps the
    operator on a rank whose experts need none.
    """
    with torch.no_grad(), profiler_range("combine.backward"):
        link, taken = _restored(channel, route)
        applied = weights if link.config.weights == "combine" else None
        grad_rows, dots = taken.combine_backward(pad(grad, real_rows, taken.num_rows), rows, applied)
        return _own(grad_rows, torch.zeros_like(weights) if dots is None else dots)


@combine_backward.register_fake
def _(grad: Tensor, rows: Tensor | None, weights: Tensor, *others: Any) -> list[Tensor]:
    return [grad.new_empty(others[-1], grad.shape[1]), torch.empty_like(weights)]


def _keep_dispatch(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    rows, _, weights, real_rows, _, table, ctx.channel, *_, anchor = inputs
    ctx.num_tables, ctx.shapes = len(table), (list(rows.shape), list(weights.shape))
    quantised = named_channel(ctx.channel).shape.quantised
    ctx.save_for_backward(anchor, real_rows, *output[5 if quantised else 3 :])


def _dispatch_gradients(ctx: Any, grads: list[Tensor]) -> tuple[Any, ...]:
    anchor, real_rows, *route = ctx.saved_tensors
    # Always compute the gradient of the weights: all ranks must exchange it, even if this rank does not need it.
    found = dispatch_backward(*grads[:2], route, real_rows, ctx.channel, *ctx.shapes, anchor, None)
    grad_rows, grad_weights, *of_anchor = found
    return grad_rows, None, grad_weights, None, None, [None] * ctx.num_tables, None, None, None, *(of_anchor or [None])


def _keep_again(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    rows, _, route, real_rows, ctx.channel, *_, anchor = inputs
    ctx.shape = list(rows.shape)
    ctx.save_for_backward(anchor, real_rows, *route)


def _again_gradients(ctx: Any, grads: list[Tensor]) -> tuple[Any, ...]:
    anchor, real_rows, *route = ctx.saved_tensors
    grad_weights, grad_rows, *_ = grads
    grad_x, *of_anchor = dispatch_backward(
        grad_rows, None, route, real_rows, ctx.channel, ctx.shape, [], anchor, grad_weights
    )
    return grad_x, grad_weights, [None] * len(route), None, None, None, None, *(of_anchor or [None])


def _keep_combine(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    rows, weights, route, real_rows, ctx.channel, _ = inputs
    ctx.num_grouped = rows.shape[0]
    wants_dots = named_channel(ctx.channel).config.weights == "combine" and ctx.needs_input_grad[1]
    ctx.save_for_backward(rows if wants_dots else None, weights, real_rows, *route)


def _combine_gradients(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    rows, weights, real_rows, *route = ctx.saved_tensors
    found = combine_backward(grad, rows, weights, route, real_rows, ctx.channel, ctx.num_grouped)
    return *found, [None] * len(route), None, None, None


dispatch.register_autograd(_dispatch_gradients, setup_context=_keep_dispatch)
dispatch_again.register_autograd(_again_gradients, setup_context=_keep_again)
combine.register_autograd(_combine_gradients, setup_context=_keep_combine)


def _once_only(verb: str, ctx: Any, *grads: Any) -> Any:
    raise double_backward(verb)


dispatch_backward.register_autograd(partial(_once_only, "dispatch"))
combine_backward.register_autograd(partial(_once_only, "combine"))


def _restored(channel: str, route: Sequence[Tensor]) -> tuple[Channel, Route]:
    link = named_channel(channel)
    return link, link.backend.restore(route)


def _flat_sizes(sizes: Sizes, capacity: Capacity | None) -> list[int]:
    """Return sizes as the five numbers that an operator takes: two from ``sizes``, three from the capacity."""
    room = (None,) * 3 if capacity is None else (capacity.rows, capacity.buffer_rows, capacity.pair_rows)
    return [-1 if number is None else number for number in (sizes.padded_rows, sizes.group_max_rows, *room)]


def _sizes_from(numbers: Sequence[int]) -> Sizes:
    padded_rows, group_max_rows, rows, buffer_rows, pair_rows = (None if each < 0 else each for each in numbers)
    capacity = None
    if rows is not None and buffer_rows is not None:
        capacity = Capacity(rows=rows, buffer_rows=buffer_rows, pair_rows=pair_rows)
    return Sizes(padded_rows=padded_rows, group_max_rows=group_max_rows, capacity=capacity)


def _foreseen_rows(link: Channel, brought: int | None) -> int | None:
    """Return how many rows with padding go to the backend; None if this cannot be known without a plan.

    In graph-safe mode it is the largest possible number, so that no shape depends on T.
    """
    if link.needs.equal_rows or link.config.graph_safe:
        largest = link.config.max_tokens_per_rank
        return link.needs.padded(largest) if link.config.row_counts_policy == "static" and largest is not None else None
    return brought if link.needs.row_multiple == 1 and not link.needs.min_rows else None


def _own(*tensors: Tensor) -> list[Tensor]:
    """Return the tensors with the strides that the fake kernels promise: contiguous, at the start of their memory."""
    return [
        tensor
        if tensor.is_contiguous() and tensor.storage_offset() == 0
        else tensor.clone(memory_format=torch.contiguous_format)
        for tensor in tensors
    ]


def is_traced(lease: Lease) -> bool:
    """Return whether a mode of torch traces the call, or a selective checkpoint, which can save results of operators.

    Then a verb calls operators. Other calls go to the backend directly, which saves 20 to 50 us a call.
    """
    return lease.enter().needs.compilable and any(
        isinstance(mode, (_CachingTorchDispatchMode, _CachedTorchDispatchMode))
        # Only torch's own modes for tracing (fake tensors, proxies) have this key; modes of users have none.
        or getattr(mode, "_mode_key", None) is not None
        for mode in _get_current_dispatch_mode_stack()
    )


def trace_dispatch(
    lease: Lease, x: Tensor, routing: Routing | None, layout: Layout, plan: Plan | Layout | None
) -> Dispatched:
    """Run ``Dispatcher.dispatch`` in a traced call. The operator settles the sizes if there is no plan."""
    channel = lease.enter()
    routing = _check_traced(channel, x, routing)
    x_TD, sizes, real_rows, valid_T = layout.flatten(x), Sizes(), None, None
    num_rows = x_TD.shape[0]
    if not torch.compiler.is_compiling():  # under tracing, the number of rows is a symbol, and lengths are unknown
        layout.check(num_rows, values=channel.config.debug)
    if isinstance(plan, Plan):
        _check_plan_by_shape(channel, plan, num_rows)
        sizes, valid_T = plan.sizes, plan.valid_T
        real_rows = None if plan.real_rows is None else to_device(plan.real_rows, x.device)
    # Without a plan, rows that are no tokens are masked. To cut them out, their number would have to be read here.
    if real_rows is None and valid_T is None:
        valid_T = layout.valid_T(num_rows, x.device)
    capacity = channel.capacity
    ids_TK, weights_TK = routing.topk_ids, routing.topk_weights
    if _fit(ids_TK, weights_TK):
        weights_TK = weights_TK.to(accumulation_dtype(x.dtype))
        merge = merge_slots
        if not torch.compiler.is_compiling():  # a kernel cannot be traced
            merge = channel.context.permutation_of(ids_TK).merge_slots
        ids_TK, weights_TK = merge(ids_TK, weights_TK, asks=capacity is None)
    rows_RD, weights_R, real_L, *route = dispatch(
        x_TD,
        ids_TK,
        weights_TK,
        real_rows,
        valid_T,
        [] if lease.slots is None else lease.slots.tensors(),
        channel.name,
        torch.is_grad_enabled(),
        # Layers with the same code share a compiled graph, so a compiled call must not depend on its layer.
        [*_flat_sizes(sizes, capacity), -1 if torch.compiler.is_compiling() else lease.layer],
        anchor_for(x, channel),
    )
    pad_multiple = channel.shape.pad_multiple
    padded_L = real_L if pad_multiple == 1 else real_L + (-real_L % pad_multiple)
    parts = route[:2] if channel.shape.quantised else []
    sent = Dispatched(
        rows=rows_RD,
        tokens_per_expert=padded_L,
        real_tokens_per_expert=real_L,
        host_counts=None,
        weights=weights_R,
        pad_multiple=pad_multiple,
        placement=None if lease.slots is None else lease.slots.placement,
        state=State(
            lease=lease,
            layout=layout,
            shape=x.shape,
            num_rows=num_rows,
            real_rows=real_rows,
            padded=None,
            wants_weights=True,
            tensors=tuple(route[len(parts) :]),
        ),
    )
    return _with_parts(channel, sent, parts)


def _check_traced(channel: Channel, x: Tensor, routing: Routing | None) -> Routing:
    """Refuse a config that operators cannot serve, and arguments of other types. Return the routing."""
    if not isinstance(routing, Routing):
        raise checks.no_routing(routing)
    check_plain("Dispatcher.dispatch", x=x, topk_ids=routing.topk_ids, topk_weights=routing.topk_weights)
    if channel.config.balance is not None:  # also on one rank, where a plan would change nothing
        refuse_compiled(
            "Dispatcher.dispatch: operators carry no plan of balance, so keep both verbs out of torch.compile and "
            "selective checkpointing. Or use dispatcher.place(placement)."
        )
    if channel.config.chunk_tokens is not None:
        refuse_compiled(
            "Dispatcher.dispatch: chunk_tokens does not work in torch.compile and selective checkpointing. Keep both "
            "verbs out of them, or set chunk_tokens=None."
        )
    return routing


def trace_dispatch_again(x: Tensor, again: Dispatched) -> Dispatched:
    """Run ``Dispatcher.dispatch(x, again=again)`` if an operator made the first dispatch."""
    state: State = again.state
    channel = state.lease.enter()
    weights, rows, *parts = dispatch_again(
        state.layout.flatten(x),
        again.weights,
        state.tensors,
        state.real_rows,
        channel.name,
        state.num_rows,
        again.in_graph.shape[0],
        anchor_for(x, channel),
    )
    return _with_parts(channel, dataclasses.replace(again, rows=rows, weights=weights), parts)


def trace_combine(rows: Tensor, sent: Dispatched) -> Tensor:
    """Run ``Dispatcher.combine`` if an operator made the dispatch."""
    state: State = sent.state
    channel = state.lease.enter()
    check_plain("Dispatcher.combine", rows=rows)
    rows = rows.to(sent.in_graph.dtype)
    y_TD = combine(rows, sent.weights, state.tensors, state.real_rows, channel.name, state.num_rows)
    return state.layout.unflatten(y_TD, state.shape)


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


def _fit(ids_TK: Tensor, weights_TK: Tensor) -> bool:
    """Return whether ids and weights fit each other. If they do not, the operator refuses them when it runs."""
    # Imported here because this module imports sympy, which an eager layer never needs.
    from torch.fx.experimental.symbolic_shapes import guard_or_true  # noqa: PLC0415

    fit = ids_TK.dim() == weights_TK.dim() == 2 and ids_TK.shape[1] == weights_TK.shape[1]
    return fit and weights_TK.is_floating_point() and guard_or_true(ids_TK.shape[0] == weights_TK.shape[0])


def refuse_tracing(verb: str) -> None:
    """Refuse a traced call of ``plan``, or a traced call that uses a Dispatched of an eager call.

    Raises:
        StateError: The call is being traced.
    """
    if torch.compiler.is_compiling():
        refuse_compiled(f"Dispatcher.{verb}: compile both verbs of a layer or none, and pass the plan in.")


def refuse_compiled(message: str) -> NoReturn:
    """Refuse a call that cannot be compiled, or recorded for selective checkpointing.

    Without ``fullgraph``, Dynamo gives up a frame that raises while it is traced, and traces the functions that the
    frame calls one by one. After a break of the graph, the error is raised when the call runs.

    Raises:
        StateError: Always. While torch.compile traces with ``fullgraph``, it is ``Unsupported`` with the same message.
    """
    if torch.compiler.is_compiling():
        torch._dynamo.graph_break(msg=message)
    raise StateError(message)
