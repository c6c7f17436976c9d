"""What was needed, making room for it, running a step again until it fits, and the counters that tell it."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._C._distributed_c10d import HashStore
from torch.utils.checkpoint import checkpoint

from moe_dispatch import Dispatcher, Routing, build_dispatcher
from moe_dispatch.backends import Arrived, MoEShape
from moe_dispatch.backends.capacity import balanced_pair_rows, balanced_rows
from moe_dispatch.dispatchers.metrics import Meter
from moe_dispatch.errors import CapacityError, ConfigError, InputError, StateError
from moe_dispatch_testing.ranks import thread_group
from tests.dispatchers.dropping import Load, collected, expect_same, expected, load, run_layer, safe_config
from tests.dispatchers.layer import (
    Group,
    expert_weights,
    on_ranks,
    outcomes_on,
    raises_everywhere,
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


def loads(size: int, kind: str = "skewed") -> Load:
    return load(TOKENS[:size], kind)


@pytest.mark.parametrize("kind", ["skewed", "holes"])
@pytest.mark.parametrize(("backend", "size"), BACKENDS)
def test_required_factors_are_enough_as_a_config(backend: str, size: int, kind: str) -> None:
    mine = loads(size, kind)

    def body(group: Group) -> Any:
        dispatcher = build_dispatcher(small_room(backend, size), group)
        run_layer(dispatcher, mine, WEIGHTS, group)
        required = dispatcher.required_capacity()
        options = {"pair_rows": required.pair_factor} if backend == "alltoall" else {}
        again = dispatcher.config.replace(
            backend={"name": backend, **options}, capacity_factor=required.capacity_factor, on_overflow="raise"
        )
        dispatcher = build_dispatcher(again, group)
        run_layer(dispatcher, mine, WEIGHTS, group)
        capacity = dispatcher._channel.capacity
        return required, dispatcher.check().overflowed, capacity

    rows, pair_rows = mine.demand()
    for required, overflowed, capacity in on_ranks(body, size):
        assert (required.rows, required.overflowed, overflowed) == (rows, True, False)
        assert required.pair_rows == (pair_rows if backend == "alltoall" else 0)
        assert capacity.rows in (rows, rows + 1)  # by rounding one more


def test_factors_survive_rounding() -> None:
    """A quotient that is rounded, times what it was divided by, is rounded once more."""
    exact = 0
    for most in range(1, 300):
        sized = MoEShape(num_experts=60, top_k=3, hidden_size=8, ep_size=4, pad_multiple=1, max_tokens_per_rank=most)
        for balanced in (balanced_rows(sized), balanced_pair_rows(sized)):
            for rows in range(1, 4 * most, 1 + most // 9):
                got = math.ceil(rows / balanced * balanced)
                assert rows <= got <= rows + 1
                exact += got == rows
    assert exact > 5_000


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


@pytest.mark.parametrize("headroom", [1, 1.125, 1000])
@pytest.mark.parametrize(("backend", "size"), BACKENDS)
def test_after_growing_the_same_data_fit(backend: str, size: int, headroom: float) -> None:
    mine = loads(size)

    def body(group: Group) -> Any:
        dispatcher = build_dispatcher(small_room(backend, size), group)
        plan = dispatcher.plan(like=random_rows(1))
        run_layer(dispatcher, mine, WEIGHTS, group)
        first = dispatcher.grow(headroom=headroom)
        capacity = dispatcher._channel.capacity
        second = dispatcher.grow(headroom=headroom)
        assert dispatcher._channel.capacity == capacity
        with pytest.raises(StateError, match=r"the capacity has grown since the plan was made"):
            dispatcher.dispatch(random_rows(1), random_routing(1), plan)
        result = run_layer(dispatcher, mine, WEIGHTS, group)
        return result, first.overflowed, second.overflowed, dispatcher.check().overflowed, capacity

    results = on_ranks(body, size)
    expect_same(collected([result[0] for result in results]), expected(mine, set(mine.slots()), WEIGHTS))
    rows, pair_rows = mine.demand()
    for _, first, second, third, capacity in results:
        assert (first, second, third) == (True, False, False)
        assert capacity.rows == min(math.ceil(rows * headroom), size * 8 * 2)
        wanted = min(math.ceil(pair_rows * headroom), 8) if backend == "alltoall" else None
        assert capacity.pair_rows == wanted


def test_without_an_overflow_nothing_changes(caplog: pytest.LogCaptureFixture) -> None:
    dispatcher = build_dispatcher(safe_config("local", rows=16))
    plan = dispatcher.plan(like=random_rows(8))
    dispatcher.dispatch(random_rows(8), random_routing(8), plan)
    assert not dispatcher.grow().overflowed
    dispatcher.dispatch(random_rows(8), random_routing(8), plan)
    assert caplog.text == ""


def test_growing_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    """By rank 0, with what was needed and what there is now."""
    mine = loads(4)
    rows, pair_rows = mine.demand()

    def body(group: Group) -> None:
        dispatcher = build_dispatcher(small_room("alltoall", 4), group)
        run_layer(dispatcher, mine, WEIGHTS, group)
        dispatcher.grow(headroom=1)

    on_ranks(body, 4)
    (told,) = caplog.messages
    assert "a dispatch must need at most 2 rows of a rank's experts and 1 rows to each rank, got " in told
    assert re.search(rf"Growing it to Capacity\(rows={rows}, .*pair_rows={pair_rows}\)", told)


@pytest.mark.parametrize("headroom", [0.999, 0, -1, 1025, math.nan, math.inf])
def test_headroom_out_of_range(headroom: float) -> None:
    dispatcher = build_dispatcher(safe_config("local"))
    with pytest.raises(InputError, match=r"Dispatcher.grow: headroom must lie in 1..1024, got "):
        dispatcher.grow(headroom=headroom)


def test_growing_beyond_what_offs_can_count(monkeypatch: pytest.MonkeyPatch) -> None:
    dispatcher = build_dispatcher(safe_config("local", max_tokens_per_rank=(1 << 31) - 1, rows=2))
    monkeypatch.setattr(Meter, "needs", lambda self: [1 << 31, 0, 0])
    before = dispatcher._channel.capacity
    with pytest.raises(ConfigError, match=r"buffer must have at most 2147483647 rows, .*got 2147483648"):
        dispatcher.grow(headroom=1)
    assert dispatcher._channel.capacity == before


CALLS: dict[str, Callable[[Dispatcher], Any]] = {
    "check": lambda dispatcher: dispatcher.check(),
    "required_capacity": lambda dispatcher: dispatcher.required_capacity(),
    "grow": lambda dispatcher: dispatcher.grow(),
    "retry_on_overflow": lambda dispatcher: dispatcher.retry_on_overflow(lambda: None),
}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize(("backend", "size"), BACKENDS)
def test_an_eager_dispatcher(backend: str, size: int, call: str) -> None:
    results = outcomes_on(lambda group: CALLS[call](build_dispatcher(small_config(backend), group)), size)
    raises_everywhere(results, StateError, "without graph_safe, sizes follow the routing", "nothing overflows")


@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize(("backend", "size"), BACKENDS)
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
    dispatcher = build_dispatcher(safe_config("local", rows=9))
    for inference, tokens in zip(modes, (3, 5), strict=True):
        with torch.inference_mode(inference):
            dispatcher.dispatch(random_rows(tokens), random_routing(tokens))
        assert dispatcher.required_capacity().rows == 2 * tokens
    assert dispatcher.check().overflowed


def test_layers_that_share_a_channel_share_the_mark_and_the_room() -> None:
    first, second = (build_dispatcher(safe_config("local", rows=9)) for _ in range(2))
    first.dispatch(random_rows(6), random_routing(6))
    assert second.check().rows == 12
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
        return dispatcher.plan(like=random_rows(8)).sizes.capacity

    first, second = on_ranks(body, 2)
    assert first == second
    assert first.rows > 12


def test_the_first_call_is_refused_while_it_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before anything is allocated that would belong to the graph."""
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(StateError, match=r"run a call of each layer once before a CUDA graph captures it"):
        Meter(2, 2).prepare(torch.device("cuda"))


def test_counters_stay_where_they_are() -> None:
    """A graph writes to the tensors that it was captured with."""
    meter, device = Meter(2, 2), torch.device("cpu")
    meter.prepare(device)
    before, (by_expert, _) = meter._counters[device], meter._layers[-1, device]
    arrived = Arrived(
        rows=torch.empty(4, 1),
        weights=torch.empty(4),
        tokens_per_expert=torch.tensor([2, 2]),
        real_tokens_per_expert=torch.tensor([1, 2]),
        tokens_per_expert_list=None,
        route=None,  # type: ignore[arg-type]
        demand=torch.tensor([4, 1]),
    )
    valid_T = torch.tensor([True, False])
    departed: Any = SimpleNamespace(
        valid_T=valid_T, experts_L=None, placement=None, outcome=torch.tensor(2), layer=-1, recomputed=False
    )
    meter.record(arrived, departed)
    assert [tensor.tolist() for tensor in (*before, by_expert)] == [[1, 0], 1, [4, 1, 2], 0, [1, 2, 0]]
    assert (meter.tokens(), meter.masked, meter.needs()) == (([1, 2], 1, {}), 1, [4, 1, 2])
    meter.forget_invalid_ids()
    assert before[2].tolist() == meter.needs() == [4, 1, 0]
