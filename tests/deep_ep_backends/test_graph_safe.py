"""The vendor backends without a host sync: the same numbers, whatever stands where nothing may be read; overflows."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from moe_dispatch import Dispatched, Dispatcher, DispatcherConfig, Routing, build_dispatcher
from moe_dispatch.errors import CapacityError, ConfigError
from moe_dispatch.types import Capacity
from moe_dispatch_testing.emulation import memory
from moe_dispatch_testing.rank_context import padding_rows, poison, poison_gradient
from tests.deep_ep_backends.conftest import Wrap
from tests.deep_ep_backends.vendors import HYBRID, RAGGED, V1, V2, V25, buffer_class, config, on_dispatchers
from tests.dispatchers.layer import Group, on_ranks, outcomes, raises_everywhere, random_routing, random_rows, rank_of

PER_EXPERT = torch.tensor([2.0**expert for expert in range(8)])


def _with_nan(rows: Tensor, padding_R: Tensor) -> Tensor:
    """Rows or weights, and their gradients, with NaN in padding and behind the last expert's rows."""
    flat = rows if rows.dim() == 2 else rows.unsqueeze(1)
    return poison(poison_gradient(flat, padding_R), padding_R).view_as(rows)


def poisoned(sent: Dispatched) -> Dispatched:
    """What was dispatched, with NaN in weights and gradients that nobody may read."""
    rows, weights = (_with_nan(part, padding_rows(sent)) for part in (sent.rows, sent.weights))
    return dataclasses.replace(sent, in_graph=rows, weights=weights)


def experts(sent: Dispatched, function: Callable[[Tensor], Tensor] = torch.tanh) -> Tensor:
    """Each expert's function of its rows, times a power of two of its own; NaN where nothing may be read."""
    first = first_expert(sent)
    counts = sent.tokens_per_expert
    factor = PER_EXPERT[first : first + len(counts)].repeat_interleave(counts)
    factor = torch.nn.functional.pad(factor, (0, len(sent.rows) - len(factor)), value=1.0)
    return _with_nan(function(sent.rows) * factor.unsqueeze(1), padding_rows(sent))


def first_expert(sent: Dispatched) -> int:
    """The first of the experts of the rank that this was dispatched to."""
    rank: int = sent.state.lease.channel.communicator.rank
    return rank * len(sent.tokens_per_expert)


def one_layer(dispatcher: Dispatcher, x: Tensor, routing: Routing) -> dict[str, Tensor]:
    """Everything that a layer computes: outputs and gradients, with rows sent again, twice combined and interleaved."""
    x, weights = x.clone().requires_grad_(), routing.topk_weights.clone().requires_grad_()
    again = x.detach().neg().requires_grad_()
    first = poisoned(dispatcher.dispatch(x, Routing(routing.topk_ids, weights)))
    other = poisoned(dispatcher.dispatch(x, Routing(routing.topk_ids.flip(1).roll(1, 0), weights)))
    repeated = poisoned(dispatcher.dispatch(again, again=first))
    results = {
        "second call": dispatcher.combine(experts(other), other),
        "first call": dispatcher.combine(experts(first), first),
        "combined twice": dispatcher.combine(experts(first, torch.sin), first),
        "again": dispatcher.combine(experts(repeated), repeated),
    }
    scale = torch.linspace(-1, 1, x.shape[1])
    sum((y * scale).sum() * (i + 1) for i, y in enumerate(results.values())).backward()  # type: ignore[union-attr]
    for name, leaf in {"x": x, "weights": weights, "again": again}.items():
        assert leaf.grad is not None
        results[f"gradient of {name}"] = leaf.grad
    for name, sent in {"first": first, "second": other}.items():
        results[f"counts of the {name} call"] = sent.tokens_per_expert
        results[f"real counts of the {name} call"] = sent.real_tokens_per_expert
    return {name: value.detach() for name, value in results.items()}


MOST = 12
VARIANTS: dict[str, dict[str, Any]] = {
    "v1": V1,
    "v2": V2,
    "v2.5": V25,
    "expanding": {**V25, "expand": True, "deterministic": False},
    "hybrid": HYBRID,
    "ragged": RAGGED,
    "fused": {**HYBRID, "fuse_permute": True},
}


def routing_of(rows: int, seed: int) -> Routing:
    """Random, with slots that go nowhere, and weights of 0."""
    routing = random_routing(rows, seed)
    ids, weights = routing.topk_ids.clone(), routing.topk_weights.clone()
    ids[2::5, 0], weights[1::4, 1] = -1, 0
    return Routing(ids, weights)


def pair(backend: dict[str, Any], group: Group, **fields: Any) -> tuple[Dispatcher, Dispatcher]:
    """The eager and the graph-safe dispatcher."""
    fields = {"max_tokens_per_rank": MOST, **fields}
    return (
        build_dispatcher(config(backend, **fields), group),
        build_dispatcher(config(backend, graph_safe=True, **fields), group),
    )


@pytest.mark.parametrize("backend", [V2, V25], ids=["v2", "v2.5"])
def test_what_stands_in_fresh_memory_may_look_like_ids(backend: dict[str, Any], wrap: Wrap) -> None:
    """The library writes no ids behind the rows that arrived; the emulation's own fill would be told from ids."""

    def stale(original: Any, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        made: Tensor = original(shape, dtype)
        return made.zero_() if dtype == torch.int64 else made

    wrap(memory, "uninitialised", stale)

    def body(group: Group) -> None:
        eager, static = pair(backend, group)
        rank = rank_of(group)
        x, routing = random_rows(5 * rank, 256, rank), routing_of(5 * rank, rank)
        expected, found = one_layer(eager, x, routing), one_layer(static, x, routing)
        for name, value in expected.items():
            assert torch.equal(found[name], value), name
        sent = static.dispatch(x, routing, async_op=True).wait()  # sorted only where it is waited for
        assert torch.equal(sent.real_tokens_per_expert, expected["real counts of the first call"])
        eager.close()
        static.close()

    on_ranks(body, 2)


@pytest.mark.parametrize("backend", VARIANTS.values(), ids=VARIANTS)
def test_shapes_are_fixed_and_the_library_is_told_not_to_wait(backend: dict[str, Any], wrap: Wrap) -> None:
    """Whether it waits is seen in no result: so this looks at what it is called with, also in backwards and repeats."""
    calls: list[dict[str, Any]] = []

    def spied(original: Any, *args: Any, **given: Any) -> Any:
        calls.append(given)
        return original(*args, **given)

    wrap(buffer_class(backend), "dispatch_with_permute" if backend["name"] == "hybridep" else "dispatch", spied)

    def body(group: Group) -> None:
        fields: dict[str, Any] = {"graph_safe": True, "max_tokens_per_rank": MOST, "pad_multiple": 16}
        static = build_dispatcher(config(backend, **fields), group)
        capacity = static.plan(like=random_rows(1, 256, 0)).sizes.capacity
        assert capacity is not None
        assert capacity.rows == 2 * MOST * 2
        for rows in (0, 5, 12):
            sent = static.dispatch(random_rows(rows, 256, 0), routing_of(rows, 0))
            assert sent.rows.shape == (capacity.buffer_rows, 256)
            assert sent.weights.shape == (capacity.buffer_rows,)
            assert sent.tokens_per_expert_list is None
        needed = static.required_capacity()
        assert (needed.pair_rows, needed.overflowed) == (0, False)
        ids = routing_of(12, 0).topk_ids  # of both ranks, in the fullest call
        assert needed.rows == 2 * max(int((ids[ids >= 0] // 4 == rank).sum()) for rank in range(2))
        one_layer(static, random_rows(5, 256, 0), routing_of(5, 0))
        for given in calls:
            is_new = given.get("handle") is None
            if backend["name"] == "hybridep":
                assert given["non_blocking"]
                assert given["num_permuted_tokens"] == capacity.buffer_rows
            elif backend is V1:
                assert given.get("num_worst_tokens", 0) == (2 * MOST if is_new else 0)
            else:
                assert not is_new or given["do_cpu_sync"] is False
        static.close()

    on_ranks(body, 2)
    assert len(calls) == 2 * (3 + 7)


FINITE: dict[str, Any] = {"graph_safe": {"capacity_factor": 1.0, "on_overflow": "raise"}}


@pytest.mark.parametrize(
    ("backend", "fields", "text"),
    [
        ({**V2, "expand": True}, {}, "it sorts expanded rows; the option deterministic=False turns this sort off"),
        ({**V2, "ranks_per_node": 1}, {}, "it sorts rows across nodes; the option deterministic=False turns this"),
        (V1, {"graph_safe": {"on_overflow": "raise"}}, "its library cannot drop rows. Write graph_safe=True"),
        (V2, FINITE, "its library cannot drop rows. Write graph_safe=True"),
        (HYBRID, {"graph_safe": {**FINITE["graph_safe"], "on_overflow": "drop"}}, "it drops rows by position. Use"),
        (VARIANTS["fused"], FINITE, "the fused combine hangs if all rows of a token were dropped, got 1.0. Leave"),
    ],
)
def test_what_cannot_be_is_refused_with_what_would_work(
    backend: dict[str, Any], fields: dict[str, Any], text: str
) -> None:
    settings = {"max_tokens_per_rank": MOST, "graph_safe": True, **fields}
    results = outcomes(lambda group: build_dispatcher(config(backend, **settings), group), 2)
    raises_everywhere(results, ConfigError, text)


RELEASES = {"hybrid": HYBRID, "ragged": RAGGED}
ROWS, SLOTS = 8, 16  # rows per rank, and slots: the balanced load, capacity_factor 1.0
# Of two ranks with experts 0..3 and 4..7; each row is (experts of all rows of rank 0, of rank 1).
EVEN = [[0, 4], [1, 5], [2, 6], [3, 7]] * 2
CASES = {
    "at capacity": (EVEN, EVEN),
    "one above": (EVEN, [[0, 3], *EVEN[1:]]),
    "one above in an empty expert": ([[0, 4]] * 8, [[0, 4]] * 7 + [[0, 3]]),
    "far above": ([[0, 1], [2, 3]] * 4, [[3, 1], [1, 2]] * 4),
    "nothing left for the next expert": ([[2, 7]] * 8, [[2, 3]] * 8),
    "skewed onto the last expert": ([[7, 6]] * 8, [[7, 5]] * 8),
}


def kept_slots(ids_PTK: Tensor, capacity: Capacity, pad_multiple: int) -> Tensor:
    """bool (P, T, K): by the definition, expert by expert, row by row; padding takes room before the next expert."""
    kept = torch.zeros_like(ids_PTK, dtype=torch.bool)
    local = 8 // len(ids_PTK)
    for rank in range(len(ids_PTK)):
        start = 0
        for expert in range(rank * local, (rank + 1) * local):
            mine = (ids_PTK == expert).nonzero()
            for place, slot in enumerate(mine.tolist()):
                kept[tuple(slot)] = start + place < capacity.buffer_rows
            start += -(-len(mine) // pad_multiple) * pad_multiple
    return kept


def overflowing(backend: dict[str, Any], **fields: Any) -> DispatcherConfig:
    room = {"capacity_factor": fields.pop("capacity_factor", 1.0), "on_overflow": "drop_by_position"}
    settings: dict[str, Any] = {"graph_safe": room, "max_tokens_per_rank": ROWS}
    return config(backend, **{**settings, **fields})


def capacity_of(dispatcher: Dispatcher) -> Capacity:
    capacity = dispatcher.plan(like=torch.ones(ROWS, 256)).sizes.capacity
    assert capacity is not None
    return capacity


def expert_sum(dispatcher: Dispatcher, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    """A layer of experts that multiply by powers of two, so that a sum tells which slots are in it."""
    sent = dispatcher.dispatch(x, Routing(ids, weights))
    factor = PER_EXPERT[first_expert(sent) :][: len(sent.tokens_per_expert)].repeat_interleave(sent.tokens_per_expert)
    rows = sent.rows.clone()
    rows[: len(factor)] *= factor.unsqueeze(1)
    return dispatcher.combine(rows, sent)


@pytest.mark.parametrize(
    ("release", "case"),
    [
        *(("hybrid", case) for case in CASES),
        ("ragged", "one above in an empty expert"),
        ("ragged", "far above"),
    ],
)
def test_exactly_the_last_places_are_dropped(release: str, case: str) -> None:
    ids_PTK = torch.tensor(CASES[case])

    def body(dispatcher: Dispatcher, rank: int) -> None:
        capacity = capacity_of(dispatcher)
        assert capacity.rows == capacity.buffer_rows == SLOTS
        kept_PTK = kept_slots(ids_PTK, capacity, 1)
        terms_TK = torch.where(kept_PTK[rank], PER_EXPERT[ids_PTK[rank].clamp(min=0)], 0)
        x, weights = torch.ones(ROWS, 256, requires_grad=True), torch.ones(ROWS, 2, requires_grad=True)
        y = expert_sum(dispatcher, x, ids_PTK[rank], weights)
        assert torch.equal(y, terms_TK.sum(1, keepdim=True).expand(-1, 256))
        y.sum().backward()
        assert x.grad is not None
        assert weights.grad is not None
        assert torch.equal(x.grad, y)
        assert torch.equal(weights.grad, 256 * terms_TK)
        needed, dropped = dispatcher.check(), int(((ids_PTK >= 0) & ~kept_PTK).sum())
        assert needed.overflowed == (dropped > 0) == (case != "at capacity")
        real = dispatcher.metrics(gather=True).real_tokens_per_expert
        assert int(real.sum()) == int(kept_PTK.sum())
        assert needed.rows == (SLOTS + 1 if dropped else SLOTS)

    on_dispatchers(body, overflowing(RELEASES[release]))


@pytest.mark.parametrize("case", ["at capacity", "one above", "far above"])
def test_raise_tells_all_ranks_alike(case: str) -> None:
    ids_PTK = torch.tensor(CASES[case])

    def body(dispatcher: Dispatcher, rank: int) -> None:
        for _ in range(2):  # a maximum: the second time changes nothing
            expert_sum(dispatcher, torch.ones(ROWS, 256), ids_PTK[rank], torch.ones(ROWS, 2))
        if case == "at capacity":
            assert not dispatcher.check().overflowed
        else:
            text = r"at most 16 rows of a rank's experts, got 17 \(graph_safe.capacity_factor 1.063\). Call grow\(\)"
            with pytest.raises(CapacityError, match=text):
                dispatcher.check()

    on_dispatchers(body, overflowing(HYBRID, graph_safe={"capacity_factor": 1.0, "on_overflow": "raise"}))


@pytest.mark.parametrize(
    ("release", "pad_multiple", "factor"),
    [
        ("hybrid", 4, 0.25),
        ("hybrid", 16, 0.5),
        ("ragged", 4, 0.25),
        ("hybrid", 1, 0.5),
    ],
)
def test_random_routings_are_reported_where_rows_were_dropped_and_only_there(
    release: str, pad_multiple: int, factor: float
) -> None:
    generator, seen = torch.Generator().manual_seed(pad_multiple), set()
    for _ in range(25):
        ids = torch.rand(ROWS, 8, generator=generator).argsort(1)[:, :2]
        ids = torch.where(torch.rand(ROWS, 2, generator=generator) < torch.rand(1, generator=generator), ids, -1)
        dispatcher = build_dispatcher(overflowing(RELEASES[release], capacity_factor=factor, pad_multiple=pad_multiple))
        capacity = capacity_of(dispatcher)
        kept, sent = kept_slots(ids.unsqueeze(0), capacity, pad_multiple), int((ids >= 0).sum())
        arrived = dispatcher.dispatch(torch.ones(ROWS, 256), Routing(ids, torch.ones(ROWS, 2)))
        assert int(arrived.real_tokens_per_expert.sum()) == int(kept.sum())
        needed, dropped = dispatcher.check(), sent > int(kept.sum())
        assert needed.overflowed == (needed.rows > capacity.rows) == dropped
        assert needed.rows <= sent
        seen.add(dropped)
        dispatcher.close()
    assert seen == ({False, True} if pad_multiple < 16 else {False})


# It is not told how much was dropped, so it grows by the headroom from what it knows was too little: one more than
# there was room for, or with padding than what had arrived.
@pytest.mark.parametrize(
    ("release", "pad_multiple", "factor", "rooms"),
    [("hybrid", 1, 1.5, [24, 29, 32]), ("ragged", 4, 0.5, [8, 24])],
)
def test_a_step_that_overflowed_is_run_until_it_gives_what_room_from_the_start_does(
    release: str, pad_multiple: int, factor: float, rooms: list[int]
) -> None:
    def body(group: Group) -> None:
        rank, runs = rank_of(group), []
        backend, fields = RELEASES[release], {"pad_multiple": pad_multiple}
        roomy = build_dispatcher(overflowing(backend, graph_safe=True, **fields), group)
        tight = build_dispatcher(
            overflowing(backend, graph_safe={"capacity_factor": factor, "on_overflow": "raise"}, **fields), group
        )
        x = torch.randn(ROWS, 256, generator=torch.Generator().manual_seed(rank))
        routing = Routing(torch.tensor([[0, 1], [2, 3]] * (ROWS // 2)), random_routing(ROWS, rank).topk_weights)

        def step() -> dict[str, Tensor]:
            runs.append(capacity_of(tight).rows)
            return one_layer(tight, x, routing)

        expected, found = one_layer(roomy, x, routing), tight.retry_on_overflow(step)
        for name, value in expected.items():
            assert torch.equal(found[name], value), name
        assert not tight.check().overflowed
        assert not roomy.check().overflowed
        assert runs == rooms
        roomy.close()
        tight.close()

    on_ranks(body, 2)
