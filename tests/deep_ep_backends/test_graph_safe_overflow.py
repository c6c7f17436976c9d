"""HybridEP with a finite capacity: what it drops, that it says so, and that more room mends it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from moe_dispatch import Dispatcher, DispatcherConfig, Routing, build_dispatcher
from moe_dispatch.errors import CapacityError
from moe_dispatch.types import Capacity
from tests.deep_ep_backends.static_layer import PER_EXPERT, first_expert, one_layer
from tests.deep_ep_backends.vendors import HYBRID, RAGGED, config, on_dispatchers, rank_of
from tests.dispatchers.layer import Group, on_ranks, random_routing

OLD = {**HYBRID, "emulate": "hybridep-34152ae"}
RELEASES = {"hybrid": HYBRID, "ragged": RAGGED, "old": OLD}
MOST, SLOTS = 8, 16  # rows per rank, and slots: the balanced load, capacity_factor 1.0
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
    settings: dict[str, Any] = {
        "graph_safe": True,
        "max_tokens_per_rank": MOST,
        "capacity_factor": 1.0,
        "on_overflow": "drop_by_position",
    }
    return config(backend, **{**settings, **fields})


def capacity_of(dispatcher: Dispatcher) -> Capacity:
    capacity = dispatcher.plan(like=torch.ones(MOST, 256)).sizes.capacity
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
        ("old", "at capacity"),
        ("old", "nothing left for the next expert"),
    ],
)
def test_exactly_the_last_places_are_dropped(release: str, case: str) -> None:
    ids_PTK = torch.tensor(CASES[case])

    def body(dispatcher: Dispatcher, rank: int) -> None:
        capacity = capacity_of(dispatcher)
        assert capacity.rows == capacity.buffer_rows == SLOTS
        kept_PTK = kept_slots(ids_PTK, capacity, 1)
        terms_TK = torch.where(kept_PTK[rank], PER_EXPERT[ids_PTK[rank].clamp(min=0)], 0)
        x, weights = torch.ones(MOST, 256, requires_grad=True), torch.ones(MOST, 2, requires_grad=True)
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
            expert_sum(dispatcher, torch.ones(MOST, 256), ids_PTK[rank], torch.ones(MOST, 2))
        if case == "at capacity":
            assert not dispatcher.check().overflowed
        else:
            text = r"must need at most 16 rows of a rank's experts, got 17 \(capacity_factor 1.063\). Call grow\(\)"
            with pytest.raises(CapacityError, match=text):
                dispatcher.check()

    on_dispatchers(body, overflowing(HYBRID, on_overflow="raise"))


@pytest.mark.parametrize(
    ("release", "pad_multiple", "factor"),
    [
        ("hybrid", 1, 0.5),
        ("hybrid", 4, 0.25),
        ("hybrid", 16, 0.5),
        ("ragged", 4, 0.25),
        ("old", 1, 0.5),
    ],
)
def test_random_routings_are_reported_where_rows_were_dropped_and_only_there(
    release: str, pad_multiple: int, factor: float
) -> None:
    generator, seen = torch.Generator().manual_seed(pad_multiple), set()
    for _ in range(25):
        ids = torch.rand(MOST, 8, generator=generator).argsort(1)[:, :2]
        ids = torch.where(torch.rand(MOST, 2, generator=generator) < torch.rand(1, generator=generator), ids, -1)
        dispatcher = build_dispatcher(overflowing(RELEASES[release], capacity_factor=factor, pad_multiple=pad_multiple))
        capacity = capacity_of(dispatcher)
        kept, sent = kept_slots(ids.unsqueeze(0), capacity, pad_multiple), int((ids >= 0).sum())
        arrived = dispatcher.dispatch(torch.ones(MOST, 256), Routing(ids, torch.ones(MOST, 2)))
        assert int(arrived.real_tokens_per_expert.sum()) == int(kept.sum())
        needed, dropped = dispatcher.check(), sent > int(kept.sum())
        assert needed.overflowed == (needed.rows > capacity.rows) == dropped
        assert needed.rows <= sent
        seen.add(dropped)
        dispatcher.close()
    assert seen == ({False, True} if pad_multiple < 16 else {False})


def test_padding_that_is_not_there_leaves_room_for_more_rows() -> None:
    """The buffer has room for the padding of every expert; where there is less, more rows arrive."""

    def body(dispatcher: Dispatcher, rank: int) -> None:
        assert capacity_of(dispatcher).buffer_rows == 64
        ids = torch.tensor([[0, 1]] * MOST)
        y = expert_sum(dispatcher, torch.ones(MOST, 256), ids, torch.ones(MOST, 2))
        assert torch.equal(y, torch.full((MOST, 256), 3.0))
        needed = dispatcher.check()
        assert (needed.rows, needed.overflowed) == (SLOTS, False)  # 32 rows did fit

    on_dispatchers(body, overflowing(HYBRID, pad_multiple=16))


# It is not told how much was dropped, so it grows by the headroom from what it knows was too little: one more than
# there was room for, or with padding than what had arrived.
@pytest.mark.parametrize(
    ("release", "pad_multiple", "factor", "rooms"),
    [("hybrid", 1, 1.5, [24, 29, 32]), ("ragged", 4, 0.5, [8, 24]), ("old", 4, 0.5, [8, 24])],
)
def test_a_step_that_overflowed_is_run_until_it_gives_what_room_from_the_start_does(
    release: str, pad_multiple: int, factor: float, rooms: list[int]
) -> None:
    def body(group: Group) -> None:
        rank, runs = rank_of(group), []
        backend, fields = RELEASES[release], {"pad_multiple": pad_multiple}
        roomy = build_dispatcher(overflowing(backend, capacity_factor="worst", on_overflow=None, **fields), group)
        tight = build_dispatcher(overflowing(backend, capacity_factor=factor, on_overflow="raise", **fields), group)
        x = torch.randn(MOST, 256, generator=torch.Generator().manual_seed(rank))
        routing = Routing(torch.tensor([[0, 1], [2, 3]] * (MOST // 2)), random_routing(MOST, rank).topk_weights)

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
