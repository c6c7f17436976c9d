"""The verbs by the backend: what a Dispatcher does once a call is checked and its sizes are settled, untraced."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast, final

import torch
from torch import Tensor

from moe_dispatch.backends.base import Arrived
from moe_dispatch.dispatchers.channel import Lease
from moe_dispatch.dispatchers.planning import cuts_rows
from moe_dispatch.dispatchers.requirements import check_again, check_combine, check_dtype, check_gradients
from moe_dispatch.dispatchers.rows import Home, anchor, merge_duplicates, pad_rows, take_rows, tie
from moe_dispatch.errors import StateError
from moe_dispatch.permutation import accumulation_dtype
from moe_dispatch.types import Dispatched, InFlight, Plan, Routing


@final
@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class State:
    """What ties a Dispatched to its dispatcher: the lease it came from, the way home, and the backend's state."""

    lease: Lease
    home: Home
    backend: Any


def send(
    lease: Lease, x: Tensor, x_TD: Tensor, routing: Routing, plan: Plan, *, async_op: bool, name: str
) -> Dispatched | InFlight:
    """``Dispatcher.dispatch``: cut or mask rows that are no tokens, merge, pad, and start the backend.

    Args:
        lease: the dispatcher's.
        x: as the model gave it.
        x_TD: its rows.
        routing: of those rows.
        plan: settled.
        async_op: return before the rows have arrived.
        name: the dispatcher's, for who records.
    """
    channel, layout, num_rows = lease.channel, plan.layout, x_TD.shape[0]
    graph_safe, size = channel.config.graph_safe, channel.communicator.size
    recorder = channel.recorder
    note = None if recorder is None else recorder.note(lease, name, x, routing, layout)
    ids_TK, weights_TK = routing.topk_ids, anchor(routing.topk_weights.to(accumulation_dtype(x.dtype)), size)
    if graph_safe:
        channel.prepare_counters(x.device)
    real_rows, valid_T = plan.real_rows, plan.valid_T
    cuts = cuts_rows(channel, layout)
    if plan.num_rows is None and cuts:
        real_rows = layout.real_rows(num_rows)
    if real_rows is not None:
        real_rows = real_rows.to(x.device, non_blocking=True)
        x_TD, weights_TK = take_rows(x_TD, real_rows), take_rows(weights_TK, real_rows)
        ids_TK = ids_TK.index_select(0, real_rows)
    elif not cuts and valid_T is None:
        valid_T = layout.valid_T(num_rows, x.device)
    if valid_T is not None:
        ids_TK = torch.where(valid_T.unsqueeze(1), ids_TK, -1)
        channel.meter.record_masked(valid_T)
    count = x_TD.shape[0]
    padded = plan.sizes.padded_rows
    if padded is None:
        padded = channel.needs.padded(count)
    ids_TK, weights_TK = merge_duplicates(ids_TK, weights_TK, asks=not graph_safe)
    ids_TK, weights_TK = pad_rows(ids_TK, padded, -1), pad_rows(weights_TK, padded, 0)
    x_TD = pad_rows(x_TD, padded, 0)
    finish = channel.backend.dispatch_async(x_TD, ids_TK, weights_TK, plan.sizes)
    home = Home(layout=layout, shape=x.shape, num_rows=num_rows, real_rows=real_rows, count=count, padded=padded)
    if recorder is not None and note is not None:  # no rank refused: its peers keep this call too
        recorder.keep(note)

    def complete() -> Dispatched:
        arrived = finish()
        channel.meter.record(arrived, padded=padded - count, cut=num_rows - count)
        if arrived.demand is not None:
            channel.high_water.record(arrived.demand)
        return _dispatched(lease, arrived, home)

    return InFlight(finish=_waiting(lease, complete)) if async_op else complete()


def _waiting(lease: Lease, complete: Callable[[], Dispatched]) -> Callable[[], Dispatched]:
    """``complete``, once, and only while the dispatcher is open."""
    waiting = [complete]  # emptied, so that an InFlight that is kept does not keep what was sent

    def wait() -> Dispatched:
        _ = lease.channel  # raises where closed
        if not waiting:
            raise StateError("Dispatcher.dispatch: wait() must be called once, got a second call. Keep its result.")
        return waiting.pop()()

    return wait


def _dispatched(lease: Lease, arrived: Arrived, home: Home) -> Dispatched:
    _outlive(lease, arrived.rows)
    return Dispatched(
        rows=arrived.rows,
        tokens_per_expert=arrived.tokens_per_expert,
        real_tokens_per_expert=arrived.real_tokens_per_expert,
        tokens_per_expert_list=arrived.tokens_per_expert_list,
        weights=arrived.weights,
        pad_multiple=lease.channel.shape.pad_multiple,
        state=State(lease=lease, home=home, backend=arrived.state),
    )


def _outlive(lease: Lease, rows: Tensor) -> None:
    """Keep the channel open for the backward of these rows, also where the dispatcher is dropped before."""
    if rows.grad_fn is not None:
        cast(dict[str, Any], rows.grad_fn.metadata)["moe_dispatch"] = lease


def send_again(x: Tensor, again: Dispatched) -> Dispatched:
    """``Dispatcher.dispatch(again=...)``.

    Raises:
        InputError: x is not like what was sent the first time.
    """
    state: State = again.state
    lease, home = state.lease, state.home
    channel, x_TD = lease.channel, home.layout.flatten(x)
    check_again(x_TD, home.num_rows, again.rows.device, channel.config)
    check_dtype("Dispatcher.dispatch", "x", x_TD, channel.config, channel.needs)
    check_gradients("Dispatcher.dispatch", (x_TD,), channel.config, channel.needs)
    if home.real_rows is not None:
        x_TD = take_rows(x_TD, home.real_rows)
    x_TD = anchor(pad_rows(x_TD, home.padded, 0), channel.communicator.size)
    rows = channel.backend.dispatch_again(x_TD, state.backend)
    _outlive(lease, rows)
    return Dispatched(
        rows=rows,
        tokens_per_expert=again.tokens_per_expert,
        real_tokens_per_expert=again.real_tokens_per_expert,
        tokens_per_expert_list=again.tokens_per_expert_list,
        weights=tie(again.weights, rows),
        pad_multiple=again.pad_multiple,
        state=state,
    )


def combine(rows: Tensor, sent: Dispatched) -> Tensor:
    """``Dispatcher.combine``.

    Raises:
        InputError: rows that are not like ``sent.rows``.
    """
    state: State = sent.state
    channel = state.lease.channel
    check_combine(rows, sent.rows, channel.config, channel.needs)
    weights_R = anchor(sent.weights, channel.communicator.size)
    y_TD = channel.backend.combine(rows, weights_R, state.backend, weighted=channel.config.weights == "combine")
    return state.home.restore(y_TD)
