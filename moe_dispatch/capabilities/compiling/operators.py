"""Both verbs as operators of torch, for ``torch.compile`` and selective checkpointing.

``torch.compile`` traces operators through their fake kernels. Selective checkpointing saves the results of operators.
An operator runs the functions of ``dispatchers.autograd`` that an eager call runs. A backend's route travels as a list
of tensors, and rows are passed in the model's shapes: an operator settles sizes, cuts, pads and trims rows inside. So
tracing knows all sizes except the number of rows that the experts get and some sizes of the route.

An operator checks its arguments when it runs, with the errors of the eager call. Fake kernels only check that the
channel is open. What an operator takes and returns has names in a record, such as ``DispatchArguments`` and
``DispatchResults``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, cast, final

import torch
from torch import Tensor
from torch.library import get_ctx

from moe_dispatch.backends.base import Route
from moe_dispatch.backends.wire import Encoded, row_format, wire_format
from moe_dispatch.capabilities.compiling.registration import operator
from moe_dispatch.capabilities.compiling.routes import Tables, load_form
from moe_dispatch.dispatched import Dispatched
from moe_dispatch.dispatchers import checks
from moe_dispatch.dispatchers.agreement import tell_peers, text_of
from moe_dispatch.dispatchers.autograd import Request, double_backward, finish, pad, start, trim
from moe_dispatch.dispatchers.channel import Channel, open_by_name, profiler_range
from moe_dispatch.errors import ConfigError, StateError
from moe_dispatch.layouts import Rows
from moe_dispatch.seams.slots import load_slot_options
from moe_dispatch.types import Capacity, Plan, Routing, Sizes


@final
class Numbers(NamedTuple):
    """The integers of a dispatch, for an argument of its operator. -1 stands for None.

    Attributes:
        padded_rows: As in ``Sizes``. If it and ``group_max_rows`` are None, the operator settles the sizes.
        group_max_rows: As in ``Sizes``.
        capacity_rows: ``rows`` of the capacity; None without a capacity.
        buffer_rows: As in ``Capacity``.
        pair_rows: As in ``Capacity``.
        layer: Number of the layer for the meter; -1 in compiled code.
    """

    padded_rows: int
    group_max_rows: int
    capacity_rows: int
    buffer_rows: int
    pair_rows: int
    layer: int

    @classmethod
    def of(cls, sizes: Sizes, capacity: Capacity | None, layer: int) -> Numbers:
        """Return the integers of sizes, a capacity that takes the place of theirs, and a layer."""
        room = (None,) * 3 if capacity is None else (capacity.rows, capacity.buffer_rows, capacity.pair_rows)
        found = [-1 if number is None else number for number in (sizes.padded_rows, sizes.group_max_rows, *room)]
        return cls._make((*found, layer))

    @property
    def sizes(self) -> Sizes:
        """The sizes, with their capacity."""
        padded_rows, group_max_rows, rows, buffer_rows, pair_rows = (None if each < 0 else each for each in self[:-1])
        capacity = None
        if rows is not None and buffer_rows is not None:
            capacity = Capacity(rows=rows, buffer_rows=buffer_rows, pair_rows=pair_rows)
        return Sizes(padded_rows=padded_rows, group_max_rows=group_max_rows, capacity=capacity)


@final
class DispatchArguments(NamedTuple):
    """What the operator ``dispatch`` takes.

    Attributes:
        rows: (T, D), rows of the model.
        ids: int64 (T, K). No row names an expert twice.
        weights: (T, K), in the accumulation dtype.
        real_rows: int64, the indices of the rows to send; None sends all rows.
        valid: bool (T,), whether each row is a token. None if all rows are tokens, or if the other rows are cut out.
        table: The tensors of the expert slots; empty if every rank holds its own experts only.
        channel: Name of the channel.
        grad_enabled: Whether the call records gradients.
        numbers: A ``Numbers``.
        anchor: Tensor that ``anchor_for`` gives, so that the backward runs on every rank; None without peers.
    """

    rows: Tensor
    ids: Tensor
    weights: Tensor
    real_rows: Tensor | None
    valid: Tensor | None
    table: Sequence[Tensor]
    channel: str
    grad_enabled: bool
    numbers: Sequence[int]
    anchor: Tensor | None


@final
class DispatchResults(NamedTuple):
    """What the operator ``dispatch`` returns.

    Attributes:
        rows: The rows grouped by expert, (R, D); the stand-in of rows that stay as they travelled.
        weights: (R,), the weights of these rows.
        real_tokens_per_expert: int64 (L,).
        parts: The parts of rows that stay as they travelled, as uint8; otherwise empty.
        route: The tensors of the route.
    """

    rows: Tensor
    weights: Tensor
    real_tokens_per_expert: Tensor
    parts: Sequence[Tensor]
    route: Sequence[Tensor]

    def flat(self) -> list[Tensor]:
        """Return all tensors as a list, for ``named``."""
        return [self.rows, self.weights, self.real_tokens_per_expert, *self.parts, *self.route]

    @classmethod
    def named(cls, flat: Sequence[Tensor], *, quantised: bool) -> DispatchResults:
        """Return the results from the list of them."""
        rows, weights, real_L, *others = flat
        num_parts = 2 if quantised else 0
        return cls(rows, weights, real_L, others[:num_parts], others[num_parts:])


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
    """Send rows to their experts. Takes ``DispatchArguments`` and returns ``DispatchResults``, flat."""
    link = named_channel(channel, "")
    if not link.needs.compilable:
        raise ConfigError(
            f"Dispatcher: torch.compile needs a backend whose state is tensors, got {link.backend_name!r}. Keep both "
            'verbs out of the compiled region with torch.compiler.disable, or use backend "alltoall".'
        )
    for observer in link.observers:
        observer.traced()
    form, given = load_form(link.backend), Numbers(*numbers)
    with torch.no_grad(), profiler_range("dispatch"):
        plan = _checked_plan(link, rows, Routing(ids, weights), real_rows, valid, given.sizes)
        call = Request(
            x_TD=rows,
            ids_TK=ids,
            weights_TK=weights,
            plan=plan,
            real_rows=real_rows,
            valid_T=valid,
            slots=load_slot_options().restored(table) if table else None,
            grad_enabled=grad_enabled,
            layer=given.layer,
        )
        arrived = finish(start(link, call))
    rows_RD, *parts = _flat_rows(link, arrived.rows, rows.dtype)
    weights_R, real_L, *route = _own(arrived.weights, arrived.real_tokens_per_expert, *form.tensors(arrived.route))
    return DispatchResults(rows_RD, weights_R, real_L, parts, route).flat()


def _checked_plan(
    link: Channel, rows: Tensor, routing: Routing, real_rows: Tensor | None, valid: Tensor | None, sizes: Sizes
) -> Plan:
    """Check the arguments of ``dispatch``, and return a plan with the given sizes, or the draft of one.

    If this rank refuses the call, its peers are told.
    """
    if sizes.capacity is not None:
        # The traced capacity is used, because a recomputation may run after the dispatcher has grown.
        rows_sent = _foreseen_rows(link, None)
        sizes = dataclasses.replace(sizes, padded_rows=rows_sent, group_max_rows=rows_sent)
    has_sizes = sizes.padded_rows is not None or sizes.group_max_rows is not None
    try:
        checks.check_tensors(rows, routing, link.config, link.needs)
        if link.config.debug:
            checks.check_values(routing, valid, link.config.num_experts)
        plan = checks.draft_plan(link, Rows(), rows if real_rows is None else real_rows.unsqueeze(1))
    except Exception as error:
        tell_peers(link, error, in_dispatch=True, x=rows, has_sizes=has_sizes)
        raise
    return dataclasses.replace(plan, sizes=sizes, settled=True) if has_sizes else plan


@dispatch.register_fake
def _(*arguments: Any) -> list[Tensor]:
    given = DispatchArguments(*arguments)
    rows, weights, real_rows, link = given.rows, given.weights, given.real_rows, named_channel(given.channel, "")
    new_size, sizes = cast(Callable[[], int], get_ctx().new_dynamic_size), Numbers(*given.numbers).sizes
    padded = sizes.padded_rows
    if padded is None:
        padded = _foreseen_rows(link, rows.shape[0] if real_rows is None else real_rows.shape[0])
    real_L, route = given.ids.new_empty(link.shape.num_local_experts), list[Tensor]()
    if link.needs.compilable:
        form = load_form(link.backend)
        made = form.route(Tables(new_size, weights), padded, sizes.capacity)
        grouped, route = form.num_grouped(made), form.tensors(made)
    else:  # the operator raises when it runs
        grouped = new_size()
    rows_RD, *parts = _unfilled(link, rows, grouped)
    return DispatchResults(rows_RD, weights.new_empty(grouped), real_L, parts, route).flat()


@final
class AgainArguments(NamedTuple):
    """What the operator ``dispatch_again`` takes.

    Attributes:
        rows: (T, D), other rows of the model.
        weights: (R,), the weights of the earlier dispatch.
        route: Its route.
        real_rows: As in ``DispatchArguments``.
        channel: Name of the channel.
        num_rows: T of the earlier dispatch.
        num_grouped: R.
        anchor: As in ``DispatchArguments``.
    """

    rows: Tensor
    weights: Tensor
    route: Sequence[Tensor]
    real_rows: Tensor | None
    channel: str
    num_rows: int
    num_grouped: int
    anchor: Tensor | None


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
    """Send other rows along the route of an earlier dispatch. Takes ``AgainArguments``.

    Returns the weights of the earlier dispatch, so that their gradient comes through here: a rank whose experts detach
    their outputs must not leave out this backward, or run it before that of combine. Then the rows, or their
    stand-in and their parts, as ``dispatch`` does.
    """
    with torch.no_grad(), profiler_range("dispatch"):
        link, taken, padded = _restored(channel, route)
        checks.check_again(rows, num_rows, rows.device, link)
        link.trail.follow(text_of("dispatch again", (rows.dtype, True)), rows.device, dispatcher=None)
        return [weights.clone(), *_flat_rows(link, taken.send(pad(rows, real_rows, padded)), rows.dtype)]


@dispatch_again.register_fake
def _(*arguments: Any) -> list[Tensor]:
    given = AgainArguments(*arguments)
    return [torch.empty_like(given.weights), *_unfilled(named_channel(given.channel), given.rows, given.num_grouped)]


def _flat_rows(link: Channel, rows: Tensor | Encoded, dtype: torch.dtype) -> list[Tensor]:
    """Return rows that arrived as results of an operator: the rows, or their stand-in and their parts as uint8.

    An operator has no float8 results, because autograd would give them gradients of their own dtype.
    """
    if not (isinstance(rows, Tensor) or link.shape.quantised):
        rows = rows.decoded(dtype)
    return _own(rows) if isinstance(rows, Tensor) else [rows.stand_in(dtype), *_own(*rows.tensors())]


def _unfilled(link: Channel, rows: Tensor, grouped: int) -> list[Tensor]:
    """Return tensors like those of ``_flat_rows``, for tracing."""
    hidden = link.shape.hidden_size
    if not link.shape.quantised:
        return [rows.new_empty(grouped, hidden)]
    widths = row_format(rows.dtype, hidden, link.shape.wire_dtype).part_bytes()
    parts = (rows.new_empty(grouped, width, dtype=torch.uint8) for width in widths)
    return [rows.new_empty_strided((grouped, hidden), (0, 0)), *parts]


def with_parts(link: Channel, sent: Dispatched, parts: Sequence[Tensor]) -> Dispatched:
    """Return the result of a dispatch with the parts of its rows, from the results of an operator."""
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
        link, taken, _ = _restored(channel, route)
        link.trail.follow("dispatch.backward", grad_rows.device, dispatcher=None)
        found = taken.dispatch_backward(grad_rows, grad_weights)
        grads = _own(*(trim(grad, real_rows, rows_shape[0]) for grad in found if grad is not None))
        return grads if anchor is None else [*grads, anchor.new_empty(0)]


@dispatch_backward.register_fake
def _(
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
    grads = [grad_rows.new_empty(rows_shape)]
    grads += [] if grad_weights is None else [grad_weights.new_empty(weights_shape)]
    return grads if anchor is None else [*grads, anchor.new_empty(0)]


@final
class CombineArguments(NamedTuple):
    """What the operator ``combine`` takes.

    Attributes:
        rows: (R, D), the outputs of the experts.
        weights: (R,), the weights of the dispatch.
        route: Its route.
        real_rows: As in ``DispatchArguments``.
        channel: Name of the channel.
        num_rows: T.
    """

    rows: Tensor
    weights: Tensor
    route: Sequence[Tensor]
    real_rows: Tensor | None
    channel: str
    num_rows: int


@operator
def combine(
    rows: Tensor, weights: Tensor, route: Sequence[Tensor], real_rows: Tensor | None, channel: str, num_rows: int
) -> Tensor:
    """Bring expert rows, (R, D), back to (T, D), weighted with the weights of the dispatch if the config says so."""
    with torch.no_grad(), profiler_range("combine"):
        link, taken, _ = _restored(channel, route)
        checks.check_combine(rows, rows.new_empty(()).expand(weights.shape[0], link.shape.hidden_size), link)
        link.trail.follow("combine", rows.device, dispatcher=None)
        y_TD = taken.combine(rows, weights if link.config.weights == "combine" else None)
        (y_TD,) = _own(trim(y_TD, real_rows, num_rows))
    return y_TD


@combine.register_fake
def _(*arguments: Any) -> Tensor:
    given = CombineArguments(*arguments)
    return given.rows.new_empty(given.num_rows, given.rows.shape[1])


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
        link, taken, padded = _restored(channel, route)
        applied = weights if link.config.weights == "combine" else None
        link.trail.follow("combine.backward", grad.device, dispatcher=None)
        grad_rows, dots = taken.combine_backward(pad(grad, real_rows, padded), rows, applied)
        return _own(grad_rows, torch.zeros_like(weights) if dots is None else dots)


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
    return [grad.new_empty(num_grouped, grad.shape[1]), torch.empty_like(weights)]


def _gradients(arguments: type[NamedTuple], **found: Any) -> tuple[Any, ...]:
    """Return the gradients of the arguments of an operator in their order: those that were found, and None."""
    return tuple(found.get(name) for name in arguments._fields)


def _keep_dispatch(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    given = DispatchArguments(*inputs)
    results = DispatchResults.named(output, quantised=named_channel(given.channel).shape.quantised)
    ctx.channel, ctx.num_tables = given.channel, len(given.table)
    ctx.shapes = list(given.rows.shape), list(given.weights.shape)
    ctx.save_for_backward(given.anchor, given.real_rows, *results.route)


def _dispatch_gradients(ctx: Any, grads: list[Tensor]) -> tuple[Any, ...]:
    anchor, real_rows, *route = ctx.saved_tensors
    edge, weights, *_ = grads
    # Always compute the gradient of the weights: all ranks must exchange it, even if this rank does not need it.
    rows, weights, *of_anchor = dispatch_backward(
        edge, weights, route, real_rows, ctx.channel, *ctx.shapes, anchor, None
    )
    anchor = of_anchor[0] if of_anchor else None
    return _gradients(DispatchArguments, rows=rows, weights=weights, table=[None] * ctx.num_tables, anchor=anchor)


def _keep_again(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    given = AgainArguments(*inputs)
    ctx.channel, ctx.shape = given.channel, list(given.rows.shape)
    ctx.save_for_backward(given.anchor, given.real_rows, *given.route)


def _again_gradients(ctx: Any, grads: list[Tensor]) -> tuple[Any, ...]:
    anchor, real_rows, *route = ctx.saved_tensors
    weights, edge, *_ = grads
    rows, *of_anchor = dispatch_backward(edge, None, route, real_rows, ctx.channel, ctx.shape, [], anchor, weights)
    anchor = of_anchor[0] if of_anchor else None
    return _gradients(AgainArguments, rows=rows, weights=weights, route=[None] * len(route), anchor=anchor)


def _keep_combine(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    given = CombineArguments(*inputs)
    ctx.channel, ctx.num_grouped = given.channel, given.rows.shape[0]
    wants_dots = named_channel(ctx.channel).config.weights == "combine" and ctx.needs_input_grad[1]
    ctx.save_for_backward(given.rows if wants_dots else None, given.weights, given.real_rows, *given.route)


def _combine_gradients(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    kept, weights, real_rows, *route = ctx.saved_tensors
    rows, weights = combine_backward(grad, kept, weights, route, real_rows, ctx.channel, ctx.num_grouped)
    return _gradients(CombineArguments, rows=rows, weights=weights, route=[None] * len(route))


dispatch.register_autograd(_dispatch_gradients, setup_context=_keep_dispatch)
dispatch_again.register_autograd(_again_gradients, setup_context=_keep_again)
combine.register_autograd(_combine_gradients, setup_context=_keep_combine)


def _once_only(verb: str, ctx: Any, *grads: Any) -> Any:
    raise double_backward(verb)


dispatch_backward.register_autograd(partial(_once_only, "dispatch"))
combine_backward.register_autograd(partial(_once_only, "combine"))


def named_channel(name: str, verb: str = "combine") -> Channel:
    """Return the open channel of this name. Operators take names, because they cannot take process groups.

    Args:
        name: Name of the channel.
        verb: What is called, if it belongs to an earlier dispatch. A dispatch opens a channel that was released.

    Raises:
        StateError: The channel was closed, was never opened in this process, or was released since the dispatch.
    """
    channel = open_by_name.get(name)
    if channel is None or not channel.users:
        raise StateError(
            f"moe_dispatch operators: channel {name!r} is not open. Keep the dispatcher open while code that was "
            "compiled with it, or a backward of it, still runs."
        )
    if channel.waken is not None:
        channel.waken("", verb)
    channel.announce("")  # which dispatcher calls is not known here
    return channel


def _restored(channel: str, tensors: Sequence[Tensor]) -> tuple[Channel, Route, int]:
    """Return the channel, the route, and the number of rows that went to the backend, with padding."""
    link = named_channel(channel)
    form = load_form(link.backend)
    route = form.restored(tensors)
    return link, route, form.num_rows(route)


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
