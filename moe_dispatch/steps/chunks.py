"""A layer call in chunks: parts of the rows go through dispatch, experts and combine one after the other.

Let N be ``chunks.tokens``, P the number of ranks, and L the experts of a rank. At most ``N * P * min(K, L)`` rows of a
chunk arrive at a rank, or ``N * K`` with ``balance="exact"`` and bound 1.0, before experts are padded. Each chunk
writes its output into that of the call, and with ``chunks.recompute`` its gradient into that of x. So beside these two
tensors, a call with recomputation needs the memory of one dispatch of N rows, forward and backward, and some integers
for each row. If padding is cut out of x, it also keeps a copy of the rows that are left. Without recomputation, two
chunks exist at a time in the forward, and gradients keep them all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from moe_dispatch.dispatched import Dispatched, InFlight
from moe_dispatch.dispatchers import checks
from moe_dispatch.dispatchers.agreement import facts_of, settle, tell_peers
from moe_dispatch.errors import InputError
from moe_dispatch.layouts import Layout, Masked, Rows
from moe_dispatch.seams.call import Call
from moe_dispatch.seams.calls import load_carry
from moe_dispatch.seams.tracing import refuse_traced
from moe_dispatch.types import Plan, Routing

if TYPE_CHECKING:
    from moe_dispatch.config import DispatcherConfig
    from moe_dispatch.dispatchers.channel import Channel
    from moe_dispatch.dispatchers.dispatcher import Dispatcher

Chunk = tuple[Tensor, Routing, Plan, Mapping[str, Tensor] | None]
Parts = Sequence[slice | Tensor]  # the rows of x in each chunk: int64 indices if padding is cut out


def run_in_chunks(
    dispatcher: Dispatcher,
    run_experts: Callable[[Dispatched], Tensor],
    x: Tensor,
    routing: Routing,
    plan: Plan | Layout | None = None,
    *,
    carry: Mapping[str, Tensor] | None = None,
) -> Tensor:
    """Run a whole layer, ``combine(run_experts(dispatch(x)))``, in chunks of ``chunks.tokens`` rows. Collective.

    Every rank runs ``C = ceil(largest / chunks.tokens)`` chunks, where ``largest`` is the largest number of real rows
    of any rank. The ranks agree on C with the plan, so one plan serves all layers of a micro-batch. Each rank divides
    its own real rows evenly. A rank with fewer rows than chunks, or without any, takes part in every chunk. With
    ``row_counts="assume"``, every rank must bring the same number of real rows, on every backend.

    With ``alltoall``, the output and the gradients of x and of the routing weights have the bits of the call without
    chunks if nothing is dropped, and an expert computes a row without looking at the others. A GEMM may not: its kernel
    can depend on the number of rows. A finite capacity is per chunk, of ``chunks.tokens`` rows. Gradients of experts
    are added chunk by chunk, so their last bits differ.

    Args:
        dispatcher: Dispatcher of the layer. Without ``chunks`` in its config, the call is a single dispatch.
        run_experts: Applies this rank's experts to ``sent.rows``, and returns (R, D). Called once for each chunk, and
            with ``chunks.recompute`` once more in the backward.
        x: As in ``Dispatcher.dispatch``.
        routing: As in ``Dispatcher.dispatch``.
        plan: As in ``Dispatcher.dispatch``.
        carry: As in ``Dispatcher.dispatch``.

    Returns:
        The output in the shape of x.

    Raises:
        InputError: ``run_experts`` cannot be called.
        StateError: The call is in a compiled region. Other errors are those of ``Dispatcher.dispatch``; an invalid id
            is told to the peers where the call agrees on sizes, and on ``alltoall``.

    Cost: C dispatches and combines, and without a plan that of ``plan``, with two more host syncs to check ids if the
    ranks agree on sizes but exchange no counts. With ``chunks.recompute``, C more exchanges of rows in the backward.
    Metrics count each dispatch. ``moe_dispatch/steps/chunks.py`` states the memory.
    """
    if not callable(run_experts):
        raise InputError(
            "run_in_chunks: pass run_in_chunks(dispatcher, run_experts, x, routing), got "
            f"{type(run_experts).__name__} for run_experts, which must be a function of sent."
        )
    if dispatcher.config.chunks is not None:
        return _run_chunks(dispatcher, run_experts, x, routing, plan, carry)
    sent = dispatcher.dispatch(x, routing, plan, carry=carry)
    return dispatcher.combine(run_experts(sent), sent)


def _run_chunks(
    dispatcher: Dispatcher,
    run_experts: Callable[[Dispatched], Tensor],
    x: Tensor,
    routing: Routing,
    plan: Plan | Layout | None,
    carry: Mapping[str, Tensor] | None,
) -> Tensor:
    if torch.compiler.is_compiling():
        refuse_traced(
            "Dispatcher.forward: chunks do not work in a compiled region. Compile the experts alone, or set "
            "chunks=None."
        )
    x_TD, whole, real_rows, valid_T = _settle(dispatcher, x, routing, plan, carry)
    count = len(x_TD) if real_rows is None else len(real_rows)
    cuts = pairwise(count * number // whole.num_chunks for number in range(whole.num_chunks + 1))
    parts = [slice(*cut) if real_rows is None else real_rows[slice(*cut)] for cut in cuts]
    lease, y = dispatcher._lease, None
    channel = lease.channel
    with ExitStack() as stack:
        for observer in channel.observers:
            stack.enter_context(observer.whole(lease, x, routing, whole.layout))
        outputs = _outputs(dispatcher, run_experts, _chunks(channel, x_TD, routing, whole, parts, valid_T, carry))
        for part in parts:
            y = _Put.apply(y, next(outputs), part, x.shape)  # type: ignore[no-untyped-call]
    assert isinstance(y, Tensor)
    return y


def _outputs(
    dispatcher: Dispatcher, run_experts: Callable[[Dispatched], Tensor], chunks: Iterator[Chunk]
) -> Iterator[Tensor]:
    """Yield the output of each chunk, and keep none of them."""

    def run(x_ND: Tensor, routing: Routing, plan: Plan, carry: Mapping[str, Tensor] | None) -> Tensor:
        sent = dispatcher.dispatch(x_ND, routing, plan, carry=carry)
        return dispatcher.combine(run_experts(sent), sent)

    if _recomputes(dispatcher.config):
        from moe_dispatch.recompute import keep_routes  # noqa: PLC0415 - other chunks never need it

        context_fn = partial(keep_routes, only_added=True)
        for chunk in chunks:
            yield checkpoint(run, *chunk, use_reentrant=False, context_fn=context_fn)
        return

    def start(x_ND: Tensor, routing: Routing, plan: Plan, carry: Mapping[str, Tensor] | None) -> InFlight:
        return dispatcher.dispatch(x_ND, routing, plan, carry=carry, async_op=True)

    coming: InFlight | None = start(*next(chunks))
    while coming is not None:
        sent, following = coming.wait(), next(chunks, None)
        # The rows of the next chunk travel while the experts work.
        coming = None if following is None else start(*following)
        yield dispatcher.combine(run_experts(sent), sent)
        del sent


def _recomputes(config: DispatcherConfig) -> bool:
    assert config.chunk_options is not None
    return config.chunk_options.recompute


def _settle(
    dispatcher: Dispatcher,
    x: Tensor,
    routing: Routing,
    plan: Plan | Layout | None,
    carry: Mapping[str, Tensor] | None,
) -> tuple[Tensor, Plan, Tensor | None, Tensor | None]:
    """Check the call and settle the number of chunks. Collective without a plan, if the ranks agree on sizes.

    Returns:
        The rows of x; the plan; the indices of the rows to divide, int64, or None for all; and whether each row is a
        token, bool, or None if all rows to divide are.
    """
    try:
        channel, has_sizes = dispatcher._lease.enter(), isinstance(plan, Plan)
        try:
            columns = None if carry is None else load_carry().CarriedColumns(dispatcher._lease, x, carry)
            call = Call(x=x, routing=routing, plan=plan, columns=columns)
            checked = checks.check_call(channel, call, dispatcher._layout_in)
            x_TD, whole, real_rows, valid_T = checked.x_TD, checked.plan, checked.real_rows, checked.valid_T
            if real_rows is not None:
                channel.meter.count_rows(cut=len(x_TD) - len(real_rows))
            if not has_sizes and channel.agrees_on_rows and not channel.needs.exchanges_counts:
                sent = real_rows if valid_T is None else valid_T
                ids = routing.topk_ids if sent is None else routing.topk_ids[sent]
                if (problem := checks.problem_of_ids(ids, channel.config.num_experts)) is not None:
                    raise problem  # here, because the dispatch of a chunk has sizes and could not tell the peers
        except Exception as error:
            tell_peers(channel, error, in_dispatch=True, x=x, has_sizes=has_sizes)
            raise
        if not has_sizes:  # the dispatches of the chunks have sizes, so what must be equal is compared here
            carried = "" if columns is None else columns.text()
            facts = facts_of(x_TD.dtype, torch.is_grad_enabled(), carried=carried)
            whole = settle(channel, whole, facts=facts, lease=dispatcher._lease)
        return x_TD, whole, real_rows, valid_T
    except Exception as error:
        dispatcher._lease.name_in(error)
        raise


def _chunks(
    channel: Channel,
    x_TD: Tensor,
    routing: Routing,
    whole: Plan,
    parts: Parts,
    valid_T: Tensor | None,
    carry: Mapping[str, Tensor] | None,
) -> Iterator[Chunk]:
    """Yield the arguments of each dispatch."""
    rows, drift = _rows_of(x_TD, parts, in_chain=_recomputes(channel.config)), routing.drift
    slots = (_rows_of(each_TK, parts, in_chain=False) for each_TK in (routing.topk_ids, routing.topk_weights))
    for part, x_ND, ids_NK, weights_NK in zip(parts, rows, *slots, strict=True):
        valid_N = None if valid_T is None else valid_T[part]
        layout = Rows() if valid_N is None else Masked(valid_N)
        plan = Plan(
            layout=layout,
            num_rows=len(x_ND),
            # The lengths were on another device than x, where the mask is.
            real_rows=layout.real_rows(len(x_ND)) if checks.cuts_rows(channel, layout) else None,
            valid_T=valid_N,
            num_sent=len(x_ND),
            sizes=whole.sizes,
            owner=whole.owner,
        )
        # The first chunk brings the drift of the whole routing into the metrics.
        carried = None if carry is None else {name: values.reshape(-1)[part] for name, values in carry.items()}
        yield x_ND, Routing(ids_NK, weights_NK, drift), plan, carried
        drift = None


def _rows_of(x_TD: Tensor, parts: Parts, *, in_chain: bool) -> Iterator[Tensor]:
    """Yield the rows of each chunk.

    In a chain, the gradient of x is one tensor from the first gradient of a chunk on. Otherwise it is made at the end,
    when the activations of all chunks are gone.
    """
    if in_chain:
        for part in parts:  # one after the other, because the backward runs what was made last first
            x_ND, x_TD = _Take.apply(x_TD, part)  # type: ignore[no-untyped-call]
            yield x_ND
        return
    indices = [part for part in parts if isinstance(part, Tensor)]
    if indices:
        x_TD = x_TD.index_select(0, torch.cat(indices))
    yield from x_TD.split([len(part) if isinstance(part, Tensor) else part.stop - part.start for part in parts])


class _Take(torch.autograd.Function):
    """Take the rows of a chunk. The second result stands for x in the next call, so gradients form a chain.

    In the backward of the chain, each chunk writes its gradient into the tensor that the chunk after it passes on.
    """

    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, part: slice | Tensor) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        ctx.part, ctx.shape = part, x_TD.shape
        return x_TD[part].detach(), x_TD.detach()

    @staticmethod
    def backward(ctx: Any, grad_ND: Tensor | None, grad_TD: Tensor | None) -> tuple[Tensor | None, None]:
        if grad_ND is None:
            return grad_TD, None
        if grad_TD is None:
            grad_TD = grad_ND.new_zeros(ctx.shape)
        grad_TD[ctx.part] = grad_ND
        return grad_TD, None


class _Put(torch.autograd.Function):
    """Write the output of a chunk into the output of the call, in place. The first chunk makes that tensor."""

    @staticmethod
    def forward(ctx: Any, y: Tensor | None, y_ND: Tensor, part: slice | Tensor, shape: torch.Size) -> Tensor:
        ctx.part = part
        if y is None:
            y = y_ND.new_zeros(shape)
        else:
            ctx.mark_dirty(y)
        y.view(-1, y_ND.shape[1])[part] = y_ND
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor, None, None]:
        grad_ND = grad.reshape(-1, grad.shape[-1])[ctx.part]
        return grad if ctx.needs_input_grad[0] else None, grad_ND, None, None
