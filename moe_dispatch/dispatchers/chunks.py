"""A layer call in chunks: parts of the rows go through dispatch, experts and combine one after the other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from moe_dispatch.dispatchers import checks
from moe_dispatch.dispatchers.agreement import settle, tell_peers
from moe_dispatch.dispatchers.operators import refuse_compiled
from moe_dispatch.layouts import Layout, Masked, Rows
from moe_dispatch.types import Dispatched, Plan, Routing

if TYPE_CHECKING:
    from moe_dispatch.dispatchers.dispatcher import Dispatcher

Chunk = tuple[Tensor, Routing, Plan]


def run_in_chunks(
    dispatcher: Dispatcher,
    run_experts: Callable[[Dispatched], Tensor],
    x: Tensor,
    routing: Routing,
    plan: Plan | Layout | None = None,
) -> Tensor:
    """Run a whole layer, ``combine(run_experts(dispatch(x)))``, in chunks of at most ``chunk_tokens`` rows. Collective.

    Every rank runs ``C = ceil(largest / chunk_tokens)`` chunks, where ``largest`` is the largest number of real rows of
    any rank. The ranks agree on C with the plan, so one plan serves all layers of a micro-batch. Each rank divides its
    own real rows evenly. A rank with fewer rows than chunks, or without any, takes part in every chunk.

    With ``alltoall``, the output and the gradients of x and of the routing weights have the bits of the call without
    chunks if an expert computes a row without looking at the others. A GEMM may not: its kernel can depend on the
    number of rows. Gradients of experts are added chunk by chunk, so their last bits differ.
    All this holds if nothing is dropped: a finite capacity is per chunk, of ``chunk_tokens`` rows, so chunks can drop
    rows that one dispatch keeps.

    With ``row_counts="assume"``, every rank must bring the same number of real rows, on every backend. Otherwise ranks
    run different numbers of chunks, and wait for each other or fail.

    Let N be ``chunk_tokens``, P the number of ranks, and L the experts of a rank. At most ``N * P * min(K, L)`` rows of
    a chunk arrive at a rank, or ``N * K`` with ``balance="exact"`` and bound 1.0, before experts are padded. With
    ``chunk_recompute``, one chunk's rows and the activations of its experts exist at a time, in forward and backward.
    Otherwise up to two chunks exist in the forward, and gradients keep them all.

    Args:
        dispatcher: Dispatcher of the layer. Without ``chunk_tokens`` in its config, the call is a single dispatch.
        run_experts: Applies this rank's experts to ``sent.rows``, and returns (R, D). Called once for each chunk, and
            with ``chunk_recompute`` once more in the backward.
        x: As in ``Dispatcher.dispatch``.
        routing: As in ``Dispatcher.dispatch``.
        plan: As in ``Dispatcher.dispatch``.

    Returns:
        The output in the shape of x.

    Raises:
        InputError: As ``Dispatcher.dispatch``. An invalid id is told to the peers where the call agrees on sizes, and
            on ``alltoall``.
        LayoutError: As ``Dispatcher.dispatch``.
        StateError: As ``Dispatcher.dispatch``; also in a compiled region.
        PeerError: Another rank refused its call.

    Cost: C dispatches and combines, and without a plan that of ``plan``, with two more host syncs to check ids if the
    ranks agree on sizes but exchange no counts. With ``chunk_recompute``, C more of both in
    the backward. Metrics count each dispatch.
    """
    if dispatcher.config.chunk_tokens is None:
        sent = dispatcher.dispatch(x, routing, plan)
        return dispatcher.combine(run_experts(sent), sent)
    if torch.compiler.is_compiling():
        refuse_compiled(
            "Dispatcher.forward: chunk_tokens does not work in a compiled region. Compile the experts alone, or set "
            "chunk_tokens=None."
        )
    chunks, layout, real_rows = _cut(dispatcher, x, routing, plan)
    channel = dispatcher._lease.shared
    recorder, channel.recorder = channel.recorder, None  # a trace holds the whole call
    try:
        y = torch.cat(_run(dispatcher, run_experts, chunks))
    finally:
        channel.recorder = recorder
    if recorder is not None:
        recorder.note(dispatcher._lease, dispatcher.name, x, routing, layout)
    if real_rows is not None:
        y = y.new_zeros(layout.rows_of(x.shape), y.shape[1]).index_copy(0, real_rows, y)
    return layout.unflatten(y, x)


def _run(dispatcher: Dispatcher, run_experts: Callable[[Dispatched], Tensor], chunks: Sequence[Chunk]) -> list[Tensor]:
    """Return the output of each chunk."""
    if dispatcher.config.chunk_recompute:

        def run(x_ND: Tensor, routing: Routing, plan: Plan) -> Tensor:
            sent = dispatcher.dispatch(x_ND, routing, plan)
            return dispatcher.combine(run_experts(sent), sent)

        return [checkpoint(run, *chunk, use_reentrant=False) for chunk in chunks]
    outputs, coming = [], dispatcher.dispatch(*chunks[0], async_op=True)
    for following in [*chunks[1:], None]:
        sent = coming.wait()
        if following is not None:  # its rows travel while the experts work
            coming = dispatcher.dispatch(*following, async_op=True)
        outputs.append(dispatcher.combine(run_experts(sent), sent))
        del sent
    return outputs


def _cut(
    dispatcher: Dispatcher, x: Tensor, routing: Routing, plan: Plan | Layout | None
) -> tuple[list[Chunk], Layout, Tensor | None]:
    """Settle the number of chunks, and divide the rows. Collective without a plan, if the ranks agree on sizes.

    The divided tensors come from ``split``, whose backward puts the gradients of all chunks together at once.

    Returns:
        The arguments of each dispatch; the layout of x; and the indices of the rows that are divided, int64, or None
        for all.
    """
    try:
        channel, has_sizes = dispatcher._lease.enter(), isinstance(plan, Plan)
        try:
            layout = dispatcher._layout_in(plan, x)
            if channel.recorder is not None:
                channel.recorder.check(x, layout)
            x_TD = layout.flatten(x)
            checks.check_call(channel, x, x_TD, routing, plan)
            if isinstance(plan, Plan) and channel.config.debug:
                layout.check(len(x_TD), values=True)
            whole = plan if isinstance(plan, Plan) else checks.draft_plan(channel, layout, x)
            real_rows, valid_T = (None, None) if layout.all_real else checks.rows_to_send(channel, whole, x_TD)
            ids, weights = routing.topk_ids, routing.topk_weights
            if real_rows is not None:
                channel.meter.rows["cut"] += len(x_TD) - len(real_rows)
                x_TD, ids, weights = (each.index_select(0, real_rows) for each in (x_TD, ids, weights))
            if not has_sizes and channel.agrees_on_rows and not channel.needs.exchanges_counts:
                sent_ids = ids if valid_T is None else ids[valid_T]
                if (problem := checks.problem_of_ids(sent_ids, channel.config.num_experts)) is not None:
                    raise problem  # here, because the dispatch of a chunk has sizes and could not tell the peers
        except Exception as error:
            tell_peers(channel, error, in_dispatch=True, x=x, has_sizes=has_sizes)
            raise
        if not has_sizes:
            whole = settle(channel, whole)
    except Exception as error:
        dispatcher._name_in(error)
        raise
    cuts = [len(x_TD) * number // whole.num_chunks for number in range(whole.num_chunks + 1)]
    counts = [end - begin for begin, end in pairwise(cuts)]
    parts = zip(x_TD.split(counts), ids.split(counts), weights.split(counts), strict=True)
    masks = [None] * len(counts) if valid_T is None else valid_T.split(counts)
    chunks: list[Chunk] = []
    for (x_ND, ids_NK, weights_NK), valid_N in zip(parts, masks, strict=True):
        its_layout = Rows() if valid_N is None else Masked(valid_N)
        its_plan = Plan(
            layout=its_layout,
            num_rows=len(x_ND),
            # The lengths were on another device than x, where the mask is.
            real_rows=its_layout.real_rows(len(x_ND)) if checks.cuts_rows(channel, its_layout) else None,
            valid_T=valid_N,
            num_sent=len(x_ND),
            sizes=whole.sizes,
            owner=whole.owner,
        )
        # The first chunk brings the drift of the whole routing into the metrics.
        chunks.append((x_ND, Routing(ids_NK, weights_NK, None if chunks else routing.drift), its_plan))
    return chunks, layout, real_rows
