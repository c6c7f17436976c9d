"""At capacity and above: what is dropped and who hears of it, what was needed, making room, running a step again."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._C._distributed_c10d import HashStore
from torch.utils.checkpoint import checkpoint

from moe_dispatch import Dispatcher, DispatcherConfig, Routing, build_dispatcher
from moe_dispatch.dispatchers.meter import Meter
from moe_dispatch.errors import CapacityError, ConfigError, InputError, StateError
from moe_dispatch_testing import run_processes
from moe_dispatch_testing.ranks import thread_group
from tests.dispatchers.dropping import Load, apply_poisoned, expect_same, expected, load, run_layer, safe_config
from tests.dispatchers.layer import (
    NUM_EXPERTS,
    TOP_K,
    Group,
    expert_weights,
    local_part,
    on_ranks,
    raises_everywhere,
    random_routing,
    random_rows,
    small_config,
)

WEIGHTS = expert_weights(dtype=torch.float64)
TOKENS = (8, 5, 0, 3)
BACKENDS = [("local", 1), ("allgather", 4), ("alltoall", 4)]
SMALL: dict[str, Any] = {"rows": 2, "pair_rows": 1}


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
            backend={"name": backend, **options},
            graph_safe={"capacity_factor": required.capacity_factor, "on_overflow": "raise"},
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
    expect_same([result[0] for result in results], expected(mine, set(mine.slots()), WEIGHTS))
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


@pytest.mark.parametrize("backend", ["local", "alltoall"])
def test_factors_of_the_text_are_enough(backend: str) -> None:
    """They are rounded up: 0.6664 told as 0.666 would give four rows too few."""
    room = {"rows": 6000, **({"pair_rows": 3000} if backend == "alltoall" else {})}
    dispatcher = build_dispatcher(safe_config(backend, max_tokens_per_rank=5000, on_overflow="raise", **room))
    dispatcher.dispatch(random_rows(3332), random_routing(3332))
    with pytest.raises(CapacityError) as caught:
        dispatcher.check()
    assert "got 6664 (graph_safe.capacity_factor 0.667)" in str(caught.value)
    assert (" and 3332 (backend.pair_rows 0.667)" in str(caught.value)) == (backend == "alltoall")


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
    most: dict[str, Any] = {
        "max_tokens_per_rank": (1 << 31) - 1,
        "hidden_size": 1,
        "on_overflow": "raise",
    }
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


ROWS = 8
SEED = 3


class Model:
    """Two layers with dropout between them; the second sends what the first gave rows that are not 0, to two experts.

    So it needs little while the first drops, and twice as much as the first once that drops nothing.
    """

    def __init__(self, configs: Sequence[DispatcherConfig], group: Group, *, dropout: float) -> None:
        rank = 0 if group is None else group.rank()
        self.dropout = dropout
        self.layers = [build_dispatcher(config, group) for config in configs]
        self.experts = [local_part(expert_weights(seed=seed), group) for seed in (1, 2)]
        self.x = random_rows(ROWS, seed=rank).requires_grad_()
        self.weights = torch.linspace(0.1, 0.9, ROWS * 2).view(ROWS, 2).requires_grad_()
        self.runs = 0

    def step(self) -> Tensor:
        """Forward and backward, from scratch each time."""
        self.runs += 1
        for leaf in self.leaves:
            leaf.grad = None
        ids = torch.arange(ROWS).unsqueeze(1) + torch.tensor([0, 4])
        y = self.layer(0, self.x, torch.where(torch.tensor([True, False]), ids, -1))
        arrived = (y.detach() != 0).any(1, keepdim=True)
        y = torch.nn.functional.dropout(y, self.dropout)
        y = self.layer(1, y, torch.where(arrived, ids % 8, -1))
        y.square().sum().backward()
        return y.detach()

    def layer(self, at: int, x: Tensor, ids: Tensor) -> Tensor:
        sent = self.layers[at].dispatch(x, Routing(ids, self.weights))
        return self.layers[at].combine(apply_poisoned(sent, self.experts[at]), sent)

    @property
    def leaves(self) -> list[Tensor]:
        return [self.x, self.weights, *self.experts]

    def outcome(self, run: Callable[[], Tensor]) -> list[Tensor]:
        """y, the gradients, and where there is dropout the state of the generator afterwards."""
        if self.dropout:  # it belongs to the process, which ranks that are threads share
            torch.manual_seed(SEED)
        y = run()
        grads = [torch.empty(0) if leaf.grad is None else leaf.grad for leaf in self.leaves]
        return [y, *grads, *([torch.get_rng_state()] if self.dropout else [])]


def retried(config: DispatcherConfig, group: Group, *, headroom: float, dropout: float, apart: bool = False) -> int:
    """Run a model of small room, compare it in every bit with one of enough, and say how often the step ran."""
    configs = [config, config.replace(pad_multiple=4) if apart else config]
    worst = [with_worst_room(config) for config in configs]
    model, roomy = (Model(which, group, dropout=dropout) for which in (configs, worst))
    retry = model.outcome(lambda: model.layers[0].retry_on_overflow(model.step, model.layers[1], headroom=headroom))
    assert not any(layer.check().overflowed for layer in model.layers)
    again = model.outcome(model.step)  # with the room that it has now from the start
    for mine, same, theirs in zip(retry, again, roomy.outcome(roomy.step), strict=True):
        assert torch.equal(mine, theirs)
        assert torch.equal(mine, same)
    return model.runs - 1


def with_worst_room(config: DispatcherConfig) -> DispatcherConfig:
    return config.replace(backend=config.backend_name, graph_safe=True)


def config_of(backend: str, size: int, *, rows: int = 1, on_overflow: str = "drop") -> DispatcherConfig:
    pair_rows = {"pair_rows": 1} if backend == "alltoall" and rows == 1 else {}
    return safe_config(backend, size=size, rows=rows, on_overflow=on_overflow, **pair_rows)


# The first run shows what the first layer needs, 8 rows; the second what the second layer needs, 16.
AS_NEEDED, TWICE, FIRST_FITS, ALL_FIT = (1, 1.0, 3), (1, 2.0, 2), (8, 1.0, 2), (16, 1.0, 1)


@pytest.mark.parametrize(
    ("backend", "size", "rows", "headroom", "runs", "on_overflow"),
    [
        ("local", 1, *AS_NEEDED, "raise"),
        ("local", 1, *ALL_FIT, "drop"),
        ("allgather", 1, *TWICE, "drop"),
        ("alltoall", 1, *FIRST_FITS, "raise"),
        ("allgather", 4, *AS_NEEDED, "drop"),
        ("alltoall", 4, *AS_NEEDED, "raise"),
        ("alltoall", 4, *TWICE, "drop"),
    ],
)
def test_a_retried_step_has_the_bits_of_one_that_fits(
    backend: str, size: int, rows: int, headroom: float, runs: int, on_overflow: str
) -> None:
    config = config_of(backend, size, rows=rows, on_overflow=on_overflow)
    dropout = 0.3 if size == 1 else 0.0
    assert on_ranks(lambda group: retried(config, group, headroom=headroom, dropout=dropout), size) == [runs] * size


@pytest.mark.parametrize(("backend", "size"), [("local", 1), ("allgather", 4), ("alltoall", 4)])
def test_channels_that_a_step_uses(backend: str, size: int) -> None:
    config = config_of(backend, size)
    assert on_ranks(lambda group: retried(config, group, headroom=1, dropout=0, apart=True), size) == [3] * size


def test_a_channel_that_is_not_named_still_drops() -> None:
    """The control of the test before: the second layer's channel overflows, and the result shows it."""
    config = config_of("local", 1)
    model = Model([config, config.replace(pad_multiple=4)], None, dropout=0)
    model.layers[0].retry_on_overflow(model.step)
    assert model.layers[1].check().overflowed


def test_without_putting_the_generator_back_the_bits_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "set_rng_state", lambda state: None)
    with pytest.raises(AssertionError):
        retried(config_of("local", 1), None, headroom=1, dropout=0.3)


def test_an_error_of_the_step_comes_through() -> None:
    dispatcher = build_dispatcher(config_of("local", 1))
    with pytest.raises(ZeroDivisionError):
        dispatcher.retry_on_overflow(lambda: 1 / 0)


def retried_in_a_process(rank: int) -> int:
    group = torch.distributed.group.WORLD
    return retried(config_of("alltoall", 2), group, headroom=1, dropout=0.3)


@pytest.mark.slow
def test_dropout_on_two_ranks() -> None:
    """Each rank is a process, with a generator of its own."""
    assert run_processes(retried_in_a_process, 2) == [3, 3]


OF_RANKS = {1: (8,), 4: (8, 5, 0, 3), 8: (8, 1, 0, 6, 8, 2, 0, 3)}
HOW_FAR = {"at": lambda needed: needed, "one above": lambda needed: needed - 1, "far above": lambda needed: needed // 3}


def room(demand: tuple[int, int], bound: str, how_far: str) -> dict[str, int]:
    rows, pair_rows = (max(HOW_FAR[how_far](needed), 1) for needed in demand)
    return {**({} if bound == "pair" else {"rows": rows}), **({} if bound == "rows" else {"pair_rows": pair_rows})}


def kept_counts(mine: Load, kept: set[Any]) -> list[int]:
    return [sum(slot[2] == expert for slot in kept) for expert in range(8)]


def run_all(config: DispatcherConfig, mine: Load) -> list[Any]:
    """What each rank came to, and what it was told at the end."""

    def body(group: Group) -> tuple[Any, Any]:
        dispatcher = build_dispatcher(config, group)
        result = run_layer(dispatcher, mine, WEIGHTS, group)
        try:
            return result, dispatcher.check()
        except CapacityError as error:
            return result, error

    return on_ranks(body, mine.size)


def run_dropping(backend: str, mine: Load, room: dict[str, Any], **fields: Any) -> None:
    """Dispatch with so much room, and hold everything against the reference."""
    results = run_all(safe_config(backend, size=mine.size, **room, **fields), mine)
    rows, pair_rows = mine.demand()
    kept = mine.kept(room.get("rows", rows), room.get("pair_rows"))
    assert torch.cat([result["real"] for result, _ in results]).tolist() == kept_counts(mine, kept)
    expect_same([result for result, _ in results], expected(mine, kept, WEIGHTS))
    for _, needed in results:
        assert (needed.rows, needed.overflowed) == (rows, len(kept) < len(mine.slots()))
        assert needed.pair_rows == (pair_rows if backend == "alltoall" else 0)


# A backend, the ranks, which of its two bounds are finite, how much is missing, and what is routed.
DROPS = [
    ("local", 1, "rows", "at", "skewed"),
    ("local", 1, "rows", "one above", "ties"),
    ("local", 1, "rows", "far above", "holes"),
    ("alltoall", 1, "both", "one above", "signs"),
    ("allgather", 4, "rows", "at", "holes"),
    ("allgather", 4, "rows", "one above", "close"),
    ("allgather", 4, "rows", "far above", "skewed"),
    ("alltoall", 4, "rows", "far above", "skewed"),
    ("alltoall", 4, "pair", "at", "skewed"),
    ("alltoall", 4, "pair", "one above", "ties"),
    ("alltoall", 4, "pair", "far above", "holes"),
    ("alltoall", 4, "both", "one above", "skewed"),
    ("alltoall", 4, "both", "one above", "signs"),
    ("alltoall", 4, "both", "far above", "holes"),
    ("alltoall", 8, "both", "far above", "skewed"),
]


@pytest.mark.parametrize(("backend", "size", "bound", "how_far", "kind"), DROPS)
def test_the_lightest_are_dropped(backend: str, size: int, bound: str, how_far: str, kind: str) -> None:
    mine = load(OF_RANKS[size], kind)
    run_dropping(backend, mine, room(mine.demand(), bound, how_far), pad_multiple=4 if kind == "holes" else 1)


@pytest.mark.parametrize("wire_dtype", ["bfloat16", "float8_e4m3fn"])
def test_who_is_dropped_does_not_depend_on_the_wire(wire_dtype: str) -> None:
    """Weights travel whole, whatever rows travel in."""
    mine, hidden = load(OF_RANKS[4]), 128
    config = safe_config("alltoall", size=4, rows=9, pair_rows=4, wire=wire_dtype, hidden_size=hidden)

    def body(group: Group) -> Tensor:
        rank = group.rank()
        dispatcher = build_dispatcher(config, group)
        sent = dispatcher.dispatch(random_rows(OF_RANKS[4][rank], hidden), Routing(mine.ids[rank], mine.weights[rank]))
        dispatcher.close()
        return sent.real_tokens_per_expert

    assert torch.cat(on_ranks(body, 4)).tolist() == kept_counts(mine, mine.kept(9, 4))


@pytest.mark.parametrize(
    ("backend", "size", "bound", "how_far"),
    [
        ("local", 1, "rows", "one above"),
        ("allgather", 4, "rows", "one above"),
        ("alltoall", 4, "pair", "one above"),
        ("alltoall", 4, "both", "at"),
        ("alltoall", 4, "both", "far above"),
    ],
)
def test_raise_is_heard_on_all_ranks_alike(backend: str, size: int, bound: str, how_far: str) -> None:
    """``load`` overflows the first ranks only, and on allgather and alltoall the others must hear of it."""
    mine = load(OF_RANKS[size])
    fits = room(mine.demand(), bound, how_far)
    told = [told for _, told in run_all(safe_config(backend, size=size, on_overflow="raise", **fits), mine)]
    if how_far == "at":
        assert [required.overflowed for required in told] == [False] * size
        return
    rows, pair_rows = mine.demand()
    let_through = size * fits.get("pair_rows", 8) * min(TOP_K, NUM_EXPERTS // size)
    texts = [f"at most {min(fits['rows'], let_through)} rows"] if "rows" in fits else []
    texts += (
        [f"and {fits['pair_rows']} rows to each rank", f" and {pair_rows} (backend.pair_rows "]
        if bound != "rows"
        else []
    )
    raises_everywhere(
        told, CapacityError, f"got {rows} (graph_safe.capacity_factor ", *texts, "Results since then lack rows."
    )
    assert len(set(map(str, told))) == 1


def test_one_rank_overflows_alone() -> None:
    """Only rank 2 has tokens, all for the experts of rank 3."""
    nothing = torch.empty(0, 2, dtype=torch.int64)
    ids, weights = torch.tensor([[6, 7]] * 8), torch.arange(16).view(8, 2) / 64
    mine = Load((nothing, nothing, ids, nothing), (nothing.float(), nothing.float(), weights, nothing.float()))
    assert mine.demand() == (16, 8)
    for backend in ("allgather", "alltoall"):
        run_dropping(backend, mine, {"rows": 5})
    run_dropping("alltoall", mine, {"pair_rows": 3})


def test_equal_weights_are_dropped_from_the_end() -> None:
    """So many that a sort which is not stable would show."""
    ids = torch.tensor([[0, 1], [1, 0], [0, 1]]).repeat(50, 1)
    mine = Load((ids, ids), (torch.full((150, 2), 0.5),) * 2)
    assert mine.kept(350) == set(list(mine.slots())[:350])
    assert mine.kept(600, 100) == {slot for slot in mine.slots() if slot[1] < 100}
    for backend in ("allgather", "alltoall"):
        run_dropping(backend, mine, {"rows": 350}, max_tokens_per_rank=150)
    run_dropping("alltoall", mine, {"pair_rows": 100}, max_tokens_per_rank=150)


def test_a_weight_that_is_no_number_is_seen_rather_than_dropped() -> None:
    ids, weights = torch.tensor([[0, 1], [2, 3]]), torch.tensor([[0.5, 0.75], [float("nan"), 0.25]])
    y = run_layer(build_dispatcher(safe_config("local", rows=1)), Load((ids,), (weights,)), WEIGHTS, None)["y"]
    assert y[1].isnan().all()
    assert not y[0].any()
