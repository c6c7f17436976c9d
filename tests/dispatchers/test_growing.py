"""What was needed, making room for it, running a step again until it fits, and the counters that tell it."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest
import torch
from torch._C._distributed_c10d import HashStore
from torch.utils.checkpoint import checkpoint

from moe_dispatch import Dispatcher, Routing, build_dispatcher
from moe_dispatch.backends import MoEShape
from moe_dispatch.backends.capacity import balanced_pair_rows, balanced_rows
from moe_dispatch.dispatchers.metrics import Meter
from moe_dispatch.errors import CapacityError, ConfigError, InputError, StateError
from moe_dispatch_testing.ranks import thread_group
from tests.dispatchers.dropping import Load, collected, expect_same, expected, load, run_layer, safe_config
from tests.dispatchers.layer import (
    Group,
    expert_weights,
    on_ranks,
    random_routing,
    random_rows,
    small_config,
)

WEIGHTS = expert_weights(dtype=torch.float64)
TOKENS = (8, 5, 0, 3)
BACKENDS = [("local", 1), ("allgather", 4), ("alltoall", 4)]
SMALL = {"rows": 2, "pair_rows": 1}


def small_room(backend: str, size: int, **fields: Any) -> Any:
    room = SMALL if backend == "alltoall" else {"rows": 2}
    return safe_config(backend, size=size, **room, **fields)


def room_of(dispatcher: Dispatcher) -> Any:
    return dispatcher.plan(like=random_rows(1, dispatcher.config.hidden_size)).sizes.capacity


def loads(size: int, kind: str = "skewed") -> Load:
    return load(TOKENS[:size], kind)


@pytest.mark.parametrize(
    ("backend", "size", "kind", "headroom"),
    [
        ("local", 1, "holes", 1),
        ("allgather", 4, "skewed", 1000),
        ("alltoall", 4, "skewed", 1.125),
        ("alltoall", 4, "holes", 1000),
    ],
)
def test_required_factors_are_enough_and_so_is_growing(
    backend: str, size: int, kind: str, headroom: float, caplog: pytest.LogCaptureFixture
) -> None:
    """Rank 0 tells once what was needed, and what there is now."""
    mine, x = loads(size, kind), random_rows(1)

    def body(group: Group) -> Any:
        dispatcher = build_dispatcher(small_room(backend, size), group)
        plan = dispatcher.plan(like=x)
        run_layer(dispatcher, mine, WEIGHTS, group)
        required = dispatcher.required_capacity()
        options = {"pair_rows": required.pair_factor} if backend == "alltoall" else {}
        again = dispatcher.config.replace(
            backend={"name": backend, **options}, capacity_factor=required.capacity_factor, on_overflow="raise"
        )
        by_factors = build_dispatcher(again, group)
        run_layer(by_factors, mine, WEIGHTS, group)
        assert not by_factors.check().overflowed
        assert dispatcher.grow(headroom=headroom).overflowed
        grown = room_of(dispatcher)
        assert not dispatcher.grow(headroom=headroom).overflowed
        assert room_of(dispatcher) == grown
        with pytest.raises(StateError, match=r"the capacity has grown since the plan was made"):
            dispatcher.dispatch(x, random_routing(1), plan)
        result = run_layer(dispatcher, mine, WEIGHTS, group)
        assert not dispatcher.check().overflowed
        return result, required, room_of(by_factors), grown

    results = on_ranks(body, size)
    expect_same(collected([result[0] for result in results]), expected(mine, set(mine.slots()), WEIGHTS))
    (rows, pair_rows), has_pairs = mine.demand(), backend == "alltoall"
    for _, required, by_factors, grown in results:
        assert (required.rows, required.overflowed) == (rows, True)
        assert required.pair_rows == (pair_rows if has_pairs else 0)
        assert by_factors.rows in (rows, rows + 1)  # by rounding one more
        assert grown.rows == min(math.ceil(rows * headroom), size * 8 * 2)
        assert grown.pair_rows == (min(math.ceil(pair_rows * headroom), 8) if has_pairs else None)
    (told,) = caplog.messages
    assert "a dispatch must need at most 2 rows of a rank's experts" in told
    assert re.search(rf"Growing it to Capacity\(rows={grown.rows}, .*pair_rows={grown.pair_rows}\)", told)


def test_factors_survive_rounding() -> None:
    """A quotient that is rounded, times what it was divided by, is rounded once more."""
    exact = 0
    for most in range(1, 300, 7):
        sized = MoEShape(num_experts=60, top_k=3, hidden_size=8, ep_size=4, pad_multiple=1, max_tokens_per_rank=most)
        for balanced in (balanced_rows(sized), balanced_pair_rows(sized)):
            for rows in range(1, 4 * most, 1 + most // 9):
                got = math.ceil(rows / balanced * balanced)
                assert rows <= got <= rows + 1
                exact += got == rows
    assert exact > 700


@pytest.mark.parametrize("backend", ["local", "alltoall"])
def test_factors_of_the_text_are_enough(backend: str) -> None:
    """They are rounded up: 0.6664 told as 0.666 would give four rows too few."""
    room = {"rows": 6000, **({"pair_rows": 3000} if backend == "alltoall" else {})}
    dispatcher = build_dispatcher(safe_config(backend, max_tokens_per_rank=5000, on_overflow="raise", **room))
    dispatcher.dispatch(random_rows(3332), random_routing(3332))
    with pytest.raises(CapacityError) as caught:
        dispatcher.check()
    assert "got 6664 (capacity_factor 0.667)" in str(caught.value)
    assert (" and 3332 (pair_rows 0.667)" in str(caught.value)) == (backend == "alltoall")


def test_without_an_overflow_nothing_changes(caplog: pytest.LogCaptureFixture) -> None:
    dispatcher = build_dispatcher(safe_config("local", rows=16))
    plan = dispatcher.plan(like=random_rows(8))
    dispatcher.dispatch(random_rows(8), random_routing(8), plan)
    assert not dispatcher.grow().overflowed
    dispatcher.dispatch(random_rows(8), random_routing(8), plan)
    assert caplog.text == ""


def test_headroom_out_of_range() -> None:
    dispatcher = build_dispatcher(safe_config("local"))
    for headroom in (0.999, 0, -1, 1025, math.nan, math.inf):
        with pytest.raises(InputError, match=r"Dispatcher.grow: headroom must lie in 1..1024, got "):
            dispatcher.grow(headroom=headroom)


def test_growing_beyond_what_offs_can_count() -> None:
    most: dict[str, Any] = {"max_tokens_per_rank": (1 << 31) - 1, "hidden_size": 1, "on_overflow": "raise"}
    dispatcher, count = build_dispatcher(safe_config("local", rows=2, **most)), 1 << 20
    x = torch.ones(count, 1)
    dispatcher.dispatch(x, Routing(torch.tensor([[0, 1]]).repeat(count, 1), torch.ones(count, 2)))
    with pytest.raises(ConfigError, match=r"buffer must have at most 2147483647 rows, .*got 2147483648"):
        dispatcher.grow(headroom=1024)
    assert room_of(dispatcher).rows == 2


@pytest.mark.parametrize(("backend", "size"), BACKENDS)
def test_an_eager_dispatcher(backend: str, size: int) -> None:
    def body(group: Group) -> None:
        d = build_dispatcher(small_config(backend), group)
        for call in (d.check, d.required_capacity, d.grow, lambda: d.retry_on_overflow(lambda: None)):
            with pytest.raises(StateError, match=r"without graph_safe, sizes follow the routing.*nothing over"):
                call()

    on_ranks(body, size)


@pytest.mark.parametrize(
    ("backend", "size", "use_reentrant"),
    [("local", 1, True), ("local", 1, False), ("allgather", 4, True), ("alltoall", 4, False)],
)
def test_the_mark_counts_a_dispatch_once(backend: str, size: int, use_reentrant: bool) -> None:
    """Neither a recomputation nor a second step raises it, and a smaller one does not lower it."""
    mine = loads(size)

    def body(group: Group) -> list[tuple[int, int]]:
        dispatcher, rank = build_dispatcher(small_room(backend, size), group), 0 if group is None else group.rank()
        marks = []

        def layer(x: torch.Tensor) -> torch.Tensor:
            sent = dispatcher.dispatch(x, Routing(mine.ids[rank], mine.weights[rank]))
            return dispatcher.combine(sent.rows, sent)

        for _ in range(2):
            y = checkpoint(layer, random_rows(len(mine.ids[rank])).requires_grad_(), use_reentrant=use_reentrant)
            marks.append(dispatcher.required_capacity())
            y.sum().backward()
            marks.append(dispatcher.required_capacity())
        dispatcher.dispatch(random_rows(1), Routing(torch.tensor([[0, -1]]), torch.ones(1, 2)))
        return [(mark.rows, mark.pair_rows) for mark in [*marks, dispatcher.required_capacity()]]

    rows, pair_rows = mine.demand()
    assert on_ranks(body, size) == [[(rows, pair_rows if backend == "alltoall" else 0)] * 5] * size


@pytest.mark.parametrize("modes", [(True, False), (False, True)])
def test_the_mark_is_raised_in_evaluation_and_in_training(modes: tuple[bool, bool]) -> None:
    """Layers that share a channel share the mark, and the room."""
    first, second = (build_dispatcher(safe_config("local", rows=9)) for _ in range(2))
    for inference, tokens in zip(modes, (3, 6), strict=True):
        with torch.inference_mode(inference):
            first.dispatch(random_rows(tokens), random_routing(tokens))
        assert second.required_capacity().rows == 2 * tokens
    assert second.check().overflowed
    second.grow(headroom=1)
    assert not first.check().overflowed
    sent = first.dispatch(random_rows(6), random_routing(6))
    assert int(sent.real_tokens_per_expert.sum()) == 12


def test_a_step_of_two_expert_parallel_groups_is_rerun_by_both() -> None:
    """Rank 0 overflows; rank 1, a group of its own, does not. Each step ends in an all-reduce of both."""

    def body(world: Group) -> tuple[list[float], float]:
        # Without a group of its own, the threads would share counters.
        own = thread_group(HashStore(), 0, 1)
        dispatcher = build_dispatcher(safe_config("local", rows=8, on_overflow="raise"), own)
        routing, totals = random_routing(8), list[float]()
        ids = routing.topk_ids if world.rank() == 0 else torch.full_like(routing.topk_ids, -1)

        def step() -> float:
            sent = dispatcher.dispatch(random_rows(8), Routing(ids, routing.topk_weights))
            total = dispatcher.combine(sent.rows, sent).sum()
            world.allreduce([total]).wait()
            totals.append(float(total))
            return totals[-1]

        return totals, dispatcher.retry_on_overflow(step, group=world, headroom=1)

    first, second = on_ranks(body, 2)
    assert first == second
    totals, last = first
    assert len(totals) == 2
    assert totals[0] != totals[1] == last


def test_the_largest_headroom_counts() -> None:
    def body(group: Group) -> Any:
        dispatcher = build_dispatcher(safe_config("alltoall", size=2, rows=6), group)
        dispatcher.dispatch(random_rows(8), random_routing(8, group.rank()))
        dispatcher.grow(headroom=1 + group.rank())
        return room_of(dispatcher)

    first, second = on_ranks(body, 2)
    assert first == second
    assert first.rows > 12


def test_the_first_call_is_refused_while_it_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before anything is allocated that would belong to the graph."""
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(StateError, match=r"run a call of each layer once before a CUDA graph captures it"):
        Meter(2, 2).prepare(torch.device("cuda"))
