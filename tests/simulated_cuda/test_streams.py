"""Layers on streams: which orders the caller must make, and which this package makes.

The plugin fails a test in which two streams use one memory without an order.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from moe_dispatch import Dispatcher, Routing
from moe_dispatch.communication import Communicator
from moe_dispatch.errors import StateError
from tests.simulated_cuda.device import recorded
from tests.simulated_cuda.layer import dispatcher_of, inputs
from tests.simulated_cuda.ranks import NcclRanks

RANKS = NcclRanks()
BACKENDS = ("local", "alltoall", "allgather")
MODES: dict[str, dict[str, Any]] = {"eager": {}, "graph-safe": {"graph_safe": True, "max_tokens_per_rank": 32}}
# Each backend, each mode, and both modes of the one whose exchanges differ most between them.
SOME_MODES = pytest.mark.parametrize(
    ("backend", "mode"),
    [("local", "graph-safe"), ("alltoall", "eager"), ("alltoall", "graph-safe"), ("allgather", "eager")],
)


def step(dispatcher: Dispatcher, x: Tensor, routing: Routing) -> None:
    sent = dispatcher.dispatch(x, routing)
    y = dispatcher.combine(sent.rows * 2, sent)
    torch.autograd.grad(y, (x, routing.topk_weights), torch.ones_like(y))


def on_ranks(backend: str, mode: str, body: Callable[[Dispatcher], None], *, warm: bool = True) -> None:
    """Run ``body`` with a dispatcher, which has run once if ``warm``, on two ranks, or on one for ``local``."""

    def run(group: dist.ProcessGroup) -> None:
        dispatcher = dispatcher_of(backend, group, **MODES[mode])
        if warm:
            step(dispatcher, *inputs())
        torch.cuda.synchronize()
        body(dispatcher)
        torch.cuda.synchronize()
        dispatcher.close()

    RANKS.run(run, 1 if backend == "local" else 2)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_two_micro_batches_on_two_streams(backend: str, mode: str) -> None:
    """Neither of which is the stream on which the dispatcher ran first."""

    def body(dispatcher: Dispatcher) -> None:
        batches, streams = [inputs(), inputs()], [torch.cuda.Stream(), torch.cuda.Stream()]
        for batch, stream in zip(batches, streams, strict=True):
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                step(dispatcher, *batch)
        for stream in streams:
            torch.cuda.current_stream().wait_stream(stream)

    on_ranks(backend, mode, body)


@SOME_MODES
def test_rows_are_awaited_on_the_stream_of_the_dispatch(backend: str, mode: str) -> None:
    def body(dispatcher: Dispatcher) -> None:
        flight = dispatcher.dispatch(*inputs(), async_op=True)
        with (
            torch.cuda.stream(torch.cuda.Stream()),
            pytest.raises(StateError, match="wait\\(\\) must run on the stream of"),
        ):
            flight.wait()
        sent = flight.wait()
        dispatcher.combine(sent.rows * 2, sent)

    on_ranks(backend, mode, body)


@SOME_MODES
def test_counters_wait_for_the_last_dispatch(backend: str, mode: str) -> None:
    """They are made on one stream, updated on another, and read and reset on a third. Nobody else orders the three."""

    def body(dispatcher: Dispatcher) -> None:
        streams, batches = [torch.cuda.Stream(), torch.cuda.Stream()], [inputs(), inputs()]
        for stream in streams:
            stream.wait_stream(torch.cuda.current_stream())
        with torch.no_grad(), torch.cuda.stream(streams[0]):
            flight = dispatcher.dispatch(*batches[0], async_op=True)
        with torch.no_grad(), torch.cuda.stream(streams[1]):
            dispatcher.dispatch(*batches[1])
        with torch.no_grad(), torch.cuda.stream(streams[0]):
            flight.wait()
        assert dispatcher.metrics().dispatches == 2
        if mode == "graph-safe":
            assert dispatcher.check().invalid_ids == 0
            dispatcher._channel.meter.forget_invalid_ids()

    on_ranks(backend, mode, body, warm=False)


@pytest.mark.expects_races
def test_an_exchange_without_a_wait_is_noticed() -> None:
    all_to_all = Communicator.all_to_all

    def started(*arguments: Any, **options: Any) -> Any:
        return SimpleNamespace(wait=lambda: None, kept=all_to_all(*arguments, **options))

    with patch.object(Communicator, "all_to_all", started), recorded() as records:
        on_ranks("alltoall", "eager", lambda dispatcher: None)
    assert any(record.kind == "race" for record in records)
