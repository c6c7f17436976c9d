"""Both verbs, and their backwards, as operators of ``torch.ops.moe_dispatch``: what ``torch.compile`` can trace.

Each body runs the code of the eager path. Only tensors and numbers go in and out: a channel goes by its name, the state
of a dispatch as the tensors that its backend makes of it. Rows go in and come out as the model has them: cutting,
padding and trimming are inside, and so is the settling of sizes where no plan did it. So the only sizes that tracing
cannot know are that of the rows the experts see, and some of the state.

What is wrong with a call is refused when it runs, by the bodies, with the errors of the eager path; the fake kernels,
which tracing calls, refuse nothing.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.library import CustomOpDef, custom_op, get_ctx

from moe_dispatch.backends.base import Arrived, Sizes
from moe_dispatch.backends.capacity import Capacity
from moe_dispatch.backends.rank_major import profiler_range
from moe_dispatch.backends.traceable import Traceable
from moe_dispatch.dispatchers.channel import Channel, named_channel
from moe_dispatch.dispatchers.planning import agrees_on_rows, draft_plan, exchange_mark, refuse_dispatch, settle_plan
from moe_dispatch.dispatchers.recorder import refuse_recording
from moe_dispatch.dispatchers.requirements import check_combine, check_dtype, check_tensors, check_values
from moe_dispatch.dispatchers.rows import pad_rows, put_rows, take_rows
from moe_dispatch.errors import ConfigError, StateError
from moe_dispatch.layouts import Rows
from moe_dispatch.types import Routing

NAMESPACE = "moe_dispatch"
# What each operator runs, by its name; for those who want to watch the inside of one.
BODIES: dict[str, Callable[..., Any]] = {}


def _operator(schema: str) -> Callable[[Callable[..., Any]], CustomOpDef]:
    """Register a function under its own name."""

    def register(body: Callable[..., Any]) -> CustomOpDef:
        BODIES[body.__name__] = body
        return custom_op(f"{NAMESPACE}::{body.__name__}", body, mutates_args=(), schema=schema)

    return register


@_operator(
    "(Tensor rows, Tensor ids, Tensor weights, Tensor? real_rows, Tensor? valid, str channel, "
    "SymInt? padded_rows, SymInt? group_max_rows, SymInt? fitting_rows, "
    "SymInt? buffer_rows, SymInt? pair_rows) -> Tensor[]"
)
def dispatch(
    rows: Tensor,
    ids: Tensor,
    weights: Tensor,
    real_rows: Tensor | None,
    valid: Tensor | None,
    channel: str,
    padded_rows: int | None,
    group_max_rows: int | None,
    fitting_rows: int | None,
    buffer_rows: int | None,
    pair_rows: int | None,
) -> list[Tensor]:
    """Send rows to their experts.

    Args:
        rows: (T, D), as the model has them.
        ids: int64 (T, K), no expert twice in a row.
        weights: (T, K), in the accumulation dtype.
        real_rows: int64, the rows to send; None for all.
        valid: bool (T,), which rows are tokens, where others are not cut; None for all.
        channel: name of the channel.
        padded_rows: of the plan's sizes; with ``group_max_rows`` None where sizes are to be settled here.
        group_max_rows: likewise.
        fitting_rows: ``rows`` of the capacity; None where sizes follow the routing.
        buffer_rows: of the capacity.
        pair_rows: of the capacity.

    Returns:
        (R, D) expert-major rows, (R,) their weights, int64 (L,) real rows per expert, and the backend's state.
    """
    link = named_channel(channel)
    if link.recorder is not None:
        refuse_recording("torch.compile or selective checkpointing")
    capacity = _capacity_from(fitting_rows, buffer_rows, pair_rows)
    with torch.no_grad(), profiler_range("dispatch"):
        backend = traceable(link)
        given = Sizes(padded_rows=padded_rows, group_max_rows=group_max_rows, capacity=capacity)
        sizes = _settled(link, rows, Routing(ids, weights), real_rows, valid=valid, given=given)
        if capacity is not None:
            link.prepare_counters(rows.device)
        if valid is not None:
            ids = torch.where(valid.unsqueeze(1), ids, -1)
            link.meter.record_masked(valid)
        count = rows.shape[0] if real_rows is None else real_rows.shape[0]
        padded = _foreseen_rows(link, count) if capacity is not None else sizes.padded_rows
        padded = link.needs.padded(count) if padded is None else padded
        arrived = link.backend.dispatch(
            _bring(rows, real_rows, padded),
            _bring(ids, real_rows, padded, -1),
            _bring(weights, real_rows, padded),
            sizes,
        )
        link.meter.record(arrived, padded=padded - count, cut=rows.shape[0] - count)
        if arrived.demand is not None:
            link.high_water.record(arrived.demand)
    state = backend.flatten(arrived.state)
    return _own(arrived.rows, arrived.weights, arrived.real_tokens_per_expert, *state)


@dispatch.register_fake
def _(
    rows: Tensor,
    ids: Tensor,
    weights: Tensor,
    real_rows: Tensor | None,
    valid: Tensor | None,
    channel: str,
    padded_rows: int | None,
    group_max_rows: int | None,
    fitting_rows: int | None,
    buffer_rows: int | None,
    pair_rows: int | None,
) -> list[Tensor]:
    link = named_channel(channel)
    new_size = cast(Callable[[], int], get_ctx().new_dynamic_size)
    if padded_rows is None:
        padded_rows = _foreseen_rows(link, rows.shape[0] if real_rows is None else real_rows.shape[0])
    if not isinstance(link.backend, Traceable):  # the body says so
        size = new_size()
        return [
            rows.new_empty(size, link.shape.hidden_size),
            weights.new_empty(size),
            ids.new_empty(link.shape.num_local_experts),
        ]
    arrived: Arrived = link.backend.blank(
        rows, weights, padded_rows, new_size, _capacity_from(fitting_rows, buffer_rows, pair_rows)
    )
    return [arrived.rows, arrived.weights, arrived.real_tokens_per_expert, *link.backend.flatten(arrived.state)]


@_operator("(Tensor rows, Tensor[] state, Tensor? real_rows, str channel, SymInt num_grouped) -> Tensor")
def dispatch_again(
    rows: Tensor, state: Sequence[Tensor], real_rows: Tensor | None, channel: str, num_grouped: int
) -> Tensor:
    """Send other rows, (T, D), the way of a dispatch that gave ``num_grouped``; its state and ``real_rows``."""
    link = named_channel(channel)
    with torch.no_grad(), profiler_range("dispatch"):
        route = traceable(link).restore(state)
        check_dtype("Dispatcher.dispatch", "x", rows, link.config, link.needs)
        padded = traceable(link).rows_brought(route)
        (sent,) = _own(link.backend.dispatch_again(_bring(rows, real_rows, padded), route))
    return sent


@dispatch_again.register_fake
def _(rows: Tensor, state: Sequence[Tensor], real_rows: Tensor | None, channel: str, num_grouped: int) -> Tensor:
    return rows.new_empty(num_grouped, rows.shape[1])


@_operator(
    "(Tensor grad_rows, Tensor? grad_weights, Tensor[] state, Tensor? real_rows, str channel, SymInt[] rows_shape, "
    "SymInt[] weights_shape) -> Tensor[]"
)
def dispatch_backward(
    grad_rows: Tensor,
    grad_weights: Tensor | None,
    state: Sequence[Tensor],
    real_rows: Tensor | None,
    channel: str,
    rows_shape: Sequence[int],
    weights_shape: Sequence[int],
) -> list[Tensor]:
    """Gradients of dispatched rows, (T, D), and where ``grad_weights`` is given of weights, (T, K): the two shapes."""
    backend = traceable(named_channel(channel))
    with torch.no_grad():
        found = backend.dispatch_backward(grad_rows, grad_weights, backend.restore(state))
        return _own(*(_home(grad, real_rows, rows_shape[0]) for grad in found if grad is not None))


@dispatch_backward.register_fake
def _(
    grad_rows: Tensor,
    grad_weights: Tensor | None,
    state: Sequence[Tensor],
    real_rows: Tensor | None,
    channel: str,
    rows_shape: Sequence[int],
    weights_shape: Sequence[int],
) -> list[Tensor]:
    rows = grad_rows.new_empty(rows_shape)
    return [rows] if grad_weights is None else [rows, grad_weights.new_empty(weights_shape)]


@_operator("(Tensor rows, Tensor weights, Tensor[] state, Tensor? real_rows, str channel, SymInt num_rows) -> Tensor")
def combine(
    rows: Tensor, weights: Tensor, state: Sequence[Tensor], real_rows: Tensor | None, channel: str, num_rows: int
) -> Tensor:
    """Bring expert rows, (R, D), home: (T, D), weighted by the dispatch's weights where the config says so."""
    link = named_channel(channel)
    with torch.no_grad(), profiler_range("combine"):
        route = traceable(link).restore(state)
        check_combine(rows, weights.unsqueeze(1).expand(-1, link.shape.hidden_size), link.config, link.needs)
        y_TD = link.backend.combine(rows, weights, route, weighted=_weighted(link))
        (home,) = _own(_home(y_TD, real_rows, num_rows))
    return home


@combine.register_fake
def _(
    rows: Tensor, weights: Tensor, state: Sequence[Tensor], real_rows: Tensor | None, channel: str, num_rows: int
) -> Tensor:
    return rows.new_empty(num_rows, rows.shape[1])


@_operator(
    "(Tensor grad, Tensor? rows, Tensor weights, Tensor[] state, Tensor? real_rows, str channel, SymInt num_grouped) "
    "-> Tensor[]"
)
def combine_backward(
    grad: Tensor,
    rows: Tensor | None,
    weights: Tensor,
    state: Sequence[Tensor],
    real_rows: Tensor | None,
    channel: str,
    num_grouped: int,
) -> list[Tensor]:
    """Gradients of expert rows, (num_grouped, D), and where ``rows``, what was combined, is given, of their weights."""
    link = named_channel(channel)
    backend = traceable(link)
    with torch.no_grad():
        route = backend.restore(state)
        grad = _bring(grad, real_rows, backend.rows_brought(route))
        found = backend.combine_backward(grad, rows, weights, route, weighted=_weighted(link))
        return _own(*(tensor for tensor in found if tensor is not None))


@combine_backward.register_fake
def _(
    grad: Tensor,
    rows: Tensor | None,
    weights: Tensor,
    state: Sequence[Tensor],
    real_rows: Tensor | None,
    channel: str,
    num_grouped: int,
) -> list[Tensor]:
    grad_rows = grad.new_empty(num_grouped, grad.shape[1])
    return [grad_rows] if rows is None else [grad_rows, torch.empty_like(weights)]


def _keep_dispatch(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    rows, _, weights, real_rows, _, ctx.channel, *_ = inputs
    ctx.shapes = list(rows.shape), list(weights.shape)
    ctx.save_for_backward(real_rows, *output[3:])


def _dispatch_gradients(ctx: Any, grads: list[Tensor]) -> tuple[Any, ...]:
    real_rows, *state = ctx.saved_tensors
    # Always with the gradient of the weights: what travels must not depend on what one rank needs.
    grad_rows, grad_weights = dispatch_backward(*grads[:2], state, real_rows, ctx.channel, *ctx.shapes)
    return grad_rows, None, grad_weights, *[None] * 8


def _keep_again(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    rows, state, real_rows, ctx.channel, _ = inputs
    ctx.shape = list(rows.shape)
    ctx.save_for_backward(real_rows, *state)


def _again_gradients(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    real_rows, *state = ctx.saved_tensors
    (grad_rows,) = dispatch_backward(grad, None, state, real_rows, ctx.channel, ctx.shape, [])
    return grad_rows, [None] * len(state), None, None, None


def _keep_combine(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    rows, weights, state, real_rows, ctx.channel, _ = inputs
    ctx.num_grouped = rows.shape[0]
    wants_dots = _weighted(named_channel(ctx.channel)) and ctx.needs_input_grad[1]
    ctx.save_for_backward(rows if wants_dots else None, weights, real_rows, *state)


def _combine_gradients(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    rows, weights, real_rows, *state = ctx.saved_tensors
    found = combine_backward(grad, rows, weights, state, real_rows, ctx.channel, ctx.num_grouped)
    return found[0], None if rows is None else found[1], [None] * len(state), None, None, None


dispatch.register_autograd(_dispatch_gradients, setup_context=_keep_dispatch)
dispatch_again.register_autograd(_again_gradients, setup_context=_keep_again)
combine.register_autograd(_combine_gradients, setup_context=_keep_combine)


def _once_only(ctx: Any, *grads: Any) -> Any:
    raise StateError(
        "Dispatcher: double backward is not supported, got a backward with create_graph=True. "
        "Use create_graph=False, or keep gradient penalties out of the MoE layer."
    )


dispatch_backward.register_autograd(_once_only)
combine_backward.register_autograd(_once_only)


def traceable(link: Channel) -> Traceable:
    """The channel's backend, which operators can run.

    Raises:
        ConfigError: they cannot, because its state is more than tensors.
    """
    if not link.needs.compilable or not isinstance(link.backend, Traceable):
        raise ConfigError(
            f"Dispatcher: torch.compile needs a backend whose state is tensors, got {link.backend_name!r}. Keep both "
            "verbs out of the compiled region with torch.compiler.disable and compile the experts alone, or use "
            'backend "alltoall".'
        )
    return link.backend


def _settled(
    link: Channel, rows: Tensor, routing: Routing, real_rows: Tensor | None, *, valid: Tensor | None, given: Sizes
) -> Sizes:
    """The sizes of a call: those of its plan, or settled now; peers hear where this rank refuses the call."""
    settled = (given.padded_rows, given.group_max_rows) != (None, None)
    try:
        check_tensors(rows, routing, link.config, link.needs)
        if link.config.debug:
            check_values(routing, valid, link.config.num_experts)
        draft = draft_plan(link, Rows(), rows if real_rows is None else real_rows.unsqueeze(1))
    except Exception as error:
        refuse_dispatch(lambda: link, error, rows.device, settled=settled)
        raise
    if link.config.debug and (settled or not agrees_on_rows(link)):
        exchange_mark(link)
    if settled:
        return given
    # With the room that was traced: a recomputation may come after the dispatcher has grown.
    return dataclasses.replace(settle_plan(link, draft).sizes, capacity=given.capacity)


def _capacity_from(rows: int | None, buffer_rows: int | None, pair_rows: int | None) -> Capacity | None:
    if rows is None or buffer_rows is None:
        return None
    return Capacity(rows=rows, buffer_rows=buffer_rows, pair_rows=pair_rows)


def _foreseen_rows(link: Channel, brought: int) -> int | None:
    """How many rows, padded, go to the backend, where tracing can tell without a plan.

    Graph-safe, always as many as there may be, so that no shape depends on T.
    """
    if link.needs.equal_rows or link.config.graph_safe:
        largest = link.config.max_tokens_per_rank
        return link.needs.padded(largest) if link.row_counts == "static" and largest is not None else None
    return brought if link.needs.row_multiple == 1 else None


def _weighted(link: Channel) -> bool:
    return link.config.weights == "combine"


def _bring(tensor: Tensor, real_rows: Tensor | None, padded: int, value: float = 0) -> Tensor:
    """What goes to the backend: the real rows, padded."""
    return pad_rows(tensor if real_rows is None else take_rows(tensor, real_rows), padded, value)


def _home(tensor: Tensor, real_rows: Tensor | None, num_rows: int) -> Tensor:
    """The way back: trimmed, and zero where rows were cut."""
    tensor = tensor[: num_rows if real_rows is None else real_rows.shape[0]]
    return tensor if real_rows is None else put_rows(tensor, real_rows, num_rows)


def _own(*tensors: Tensor) -> list[Tensor]:
    """The tensors as fake kernels say they are: contiguous, from the start of memory that is theirs alone."""

    def own(tensor: Tensor) -> Tensor:
        as_told = tensor.is_contiguous() and tensor.storage_offset() == 0
        return tensor if as_told else tensor.clone(memory_format=torch.contiguous_format)

    return list(map(own, tensors))
