"""A rank in several groups that finds a mistake: the ranks of all its groups hear of it."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from moe_dispatch import Routing
from moe_dispatch.errors import InputError, MoEDispatchError, PeerError
from moe_dispatch_testing.ranks import thread_group
from tests.dispatchers.layer import on_ranks, outcomes, raises_everywhere, random_rows
from tests.recompute.layer import Layer, called, layer_config, tokens

SAFE: dict[str, Any] = {"graph_safe": True, "max_tokens_per_rank": 12}
# The ranks of each layer of a checkpointed call, in the order of the call.
TWO, THREE, NESTED = [(0, 1), (1, 2)], [(0, 1), (1, 2), (2, 3)], [(0, 1), (0, 1, 2, 3), (2, 3)]


def layers_of(
    rank: int, members: Sequence[tuple[int, ...]], stores: list[HashStore], fields: dict[str, Any]
) -> list[Layer]:
    """The layers of a rank, each with a group of its own."""
    found = []
    for number, (ranks, store) in enumerate(zip(members, stores, strict=True)):
        if rank in ranks:
            group = thread_group(store, ranks.index(rank), len(ranks), timedelta(seconds=20))
            found.append(Layer(layer_config(**fields), group, name=f"layers.{number}"))
    return found


@pytest.mark.parametrize("how", ["kept", "reentrant"])
@pytest.mark.parametrize(
    ("members", "on"),
    [(members, on) for members in (TWO, THREE, NESTED, THREE[::-1]) for on in range(1 + max(map(max, members)))],
    ids=str,
)
def test_all_groups_hear_of_a_mistake_on_one_rank(members: Sequence[tuple[int, ...]], on: int, how: str) -> None:
    size = 1 + max(map(max, members))
    stores = [HashStore() for _ in members]

    def body(world: dist.ProcessGroup) -> None:
        rank = world.rank()
        layers = layers_of(rank, members, stores, {})
        for layer in layers:
            layer.noise, layer.quiet = 3.0 * (rank == on), 1
        y = random_rows(5 + rank, seed=rank).requires_grad_()
        for layer in layers:
            y = called(how, layer, y)
        try:
            y.square().sum().backward()
        finally:
            for layer in layers:
                layer.dispatcher.close()

    raised = outcomes(body, size)
    raises_everywhere(raised, MoEDispatchError, "must choose the experts of its forward")
    for rank, error in enumerate(raised):
        assert isinstance(error, InputError if rank == on else PeerError)


def test_groups_without_a_mistake_go_on() -> None:
    stores = [HashStore() for _ in THREE]

    def body(world: dist.ProcessGroup) -> int:
        layers, x = layers_of(world.rank(), THREE, stores, {}), tokens(world)
        for _ in range(2):
            y = x
            for layer in layers:
                y = called("kept", layer, y)
            y.square().sum().backward()
        counts = [layer.dispatcher.metrics().collectives["recompute"] for layer in layers]
        for layer in layers:
            layer.dispatcher.close()
        return sum(counts)

    # In each step, a dispatch is asked about once, and its group exchanges twice at the end.
    assert on_ranks(body, 4) == [6, 12, 12, 6]


def test_retry_on_overflow_asks_all_groups() -> None:
    """One rank has a mistake in two groups. Both are asked which ranks have it, before any rank raises."""
    stores = [HashStore() for _ in TWO]

    def body(world: dist.ProcessGroup) -> None:
        layers, x = layers_of(world.rank(), TWO, stores, SAFE), tokens(world)

        def step() -> None:
            for layer in layers:
                ids = layer.route(x).topk_ids + 100 * (world.rank() == 1)
                sent = layer.dispatcher.dispatch(x, Routing(ids, torch.ones(ids.shape)))
                layer.dispatcher.combine(sent.rows, sent).sum().backward()

        first, *others = [layer.dispatcher for layer in layers]
        try:
            first.retry_on_overflow(step, *others, group=world)
        finally:
            for layer in layers:
                layer.dispatcher.close()

    raised = outcomes(body, 3)
    raises_everywhere(raised, MoEDispatchError, "Dispatcher.retry_on_overflow: topk_ids must lie in -1..7")
