"""Dispatcher.place: results with and without it, what it refuses, and what it costs where it is not used."""

from __future__ import annotations

import copy
import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from moe_dispatch import Dispatched, Dispatcher, Routing, build_dispatcher
from moe_dispatch.backends.allgather import AllGatherOptions
from moe_dispatch.balance import ExactPlacement, ExpertPlacement
from moe_dispatch.errors import ConfigError, InputError, PeerError
from tests.dispatchers.layer import NUM_EXPERTS, Group, on_ranks, random_rows, small_config

OWN = ExpertPlacement.contiguous(NUM_EXPERTS, 2, spare=1)
COPIES = ExpertPlacement(NUM_EXPERTS, ((7, 1, 2, 3, 4), (5, 6, 7, 0, 4)))
UNEVEN = ExpertPlacement(NUM_EXPERTS, ((7, 1, 2, -1, -1), (5, 6, 3, 0, 4)))


def scaled_layer(dispatcher: Dispatcher, rank: int, x: Tensor, routing: Routing) -> tuple[Tensor, Dispatched]:
    """Apply experts that scale a row by different factors, so the same rows give the same bits anywhere."""
    sent = dispatcher.dispatch(x, routing)
    assert isinstance(sent, Dispatched)
    local = len(sent.tokens_per_expert)
    experts = torch.arange(rank * local, (rank + 1) * local)
    if sent.placement is not None:
        placement = sent.placement.read() if isinstance(sent.placement, ExactPlacement) else sent.placement
        assert isinstance(placement, ExpertPlacement)
        experts = torch.tensor(placement.slots[rank])
    factors_R = torch.repeat_interleave(1.3 + experts / 7, sent.tokens_per_expert)
    factors_R = torch.nn.functional.pad(factors_R, (0, len(sent.rows) - len(factors_R))).to(x.dtype)
    return dispatcher.combine(torch.tanh(sent.rows * factors_R.unsqueeze(1)), sent), sent


def test_counts_are_those_of_slots_and_metrics_those_of_experts() -> None:
    ids = torch.tensor([[4, 7], [4, 0], [4, 1], [4, -1]])

    def body(group: Group) -> tuple[list[list[int]], list[float | None]]:
        dispatcher = build_dispatcher(small_config(balance="manual", pad_multiple=4), group)
        assert dispatcher.placement == OWN
        dispatcher.place(COPIES)
        sent = dispatcher.dispatch(random_rows(4), Routing(ids, torch.ones(4, 2)))
        assert isinstance(sent, Dispatched)
        assert sent.placement == dispatcher.placement == COPIES
        mine, everyone = dispatcher.metrics(), dispatcher.metrics(gather=True)
        assert mine.rank_imbalance is None
        assert (mine.rows_padded["expert"], everyone.rows_padded["expert"]) == (3 + 2, 10)
        told = [everyone.imbalance, everyone.rank_imbalance]
        return [counts.real_tokens_per_expert.tolist() for counts in (sent, mine, everyone)], told

    whole, told = [2, 2, 0, 0, 8, 0, 0, 2], [8 / (14 / 8), 1.0]
    assert on_ranks(body, 2) == [  # each rank has its own copies of 4 and 7
        ([[1, 2, 0, 0, 4], [0, 2, 0, 0, 4, 0, 0, 1], whole], told),
        ([[0, 0, 1, 2, 4], [2, 0, 0, 0, 4, 0, 0, 1], whole], told),
    ]


def test_metrics_add_up_across_a_placement() -> None:
    """Rows before the first placement and after it count for the same experts."""

    def body(group: Group) -> list[int]:
        dispatcher = build_dispatcher(small_config(top_k=1), group)
        routing = Routing(torch.tensor([[0], [5]]), torch.ones(2, 1))
        dispatcher.dispatch(random_rows(2), routing)
        dispatcher.place(ExpertPlacement(NUM_EXPERTS, ((5, 6, 7, 4), (3, 2, 1, 0))))
        dispatcher.dispatch(random_rows(2), routing)
        assert dispatcher.metrics().real_tokens_per_expert.sum() == 4
        counts: list[int] = dispatcher.metrics(gather=True).real_tokens_per_expert.tolist()
        return counts

    assert on_ranks(body, 2) == [[4, 0, 0, 0, 0, 4, 0, 0]] * 2


@pytest.mark.parametrize("fields", [{}, {"balance": "least_loaded"}, {"graph_safe": True, "max_tokens_per_rank": 40}])
def test_self_test(fields: dict[str, Any]) -> None:
    def body(group: Group) -> None:
        dispatcher = build_dispatcher(small_config(**{"balance": "manual", **fields}), group)
        if "balance" not in fields:
            dispatcher.place(COPIES)
        dispatcher.self_test()
        assert dispatcher.metrics().real_tokens_per_expert.sum() > 0

    on_ranks(body, 2)


def test_a_copied_module_keeps_the_placement() -> None:
    def body(group: Group) -> None:
        dispatcher = build_dispatcher(small_config(balance="manual"), group)
        dispatcher.place(COPIES)
        other = copy.deepcopy(dispatcher)
        assert other.placement == COPIES
        dispatcher.place(OWN)
        assert other.placement == COPIES
        sent = other.dispatch(random_rows(1), Routing(torch.tensor([[4, 7]]), torch.ones(1, 2)))
        assert isinstance(sent, Dispatched)
        assert sent.real_tokens_per_expert.sum() == 2

    on_ranks(body, 2)


THREE_SPARE = ExpertPlacement.contiguous(8, 2, spare=3)


WRONG_SLOTS = r"Error: Dispatcher.place: every rank must have 5 expert slots"
DISAGREE = (
    r"InputError: Ranks disagree on the expert slots of rank 0: rank 0 has \[7, .*, 4\], rank 1 has \[7, 1, 2, -1"
)


@pytest.mark.parametrize(
    ("placements", "told"),
    [
        ((None, None), [r"ConfigError: Dispatcher\.place: placement must be an ExpertPlacement, got NoneType"] * 2),
        ([ExpertPlacement.contiguous(6, 2, spare=2)] * 2, [r"ConfigError: .* must have num_experts \(8\), got 6"] * 2),
        ([ExpertPlacement.contiguous(8, 4, spare=3)] * 2, [r"ConfigError: .* ep_size \(2\) ranks, got 4"] * 2),
        ([THREE_SPARE] * 2, [WRONG_SLOTS + r" .*, got 7. Set balance.spare_experts_per_rank to 3"] * 2),
        ((COPIES, THREE_SPARE), [r"PeerError: rank 1 refused: .*every rank must have 5", "Config" + WRONG_SLOTS]),
        ((COPIES, UNEVEN), [DISAGREE] * 2),
    ],
)
def test_placements_that_do_not_fit_are_refused_on_all_ranks(placements: Any, told: list[str]) -> None:
    def body(group: Group) -> str:
        dispatcher = build_dispatcher(small_config(balance="manual"), group)
        with pytest.raises((ConfigError, InputError, PeerError)) as caught:
            dispatcher.place(placements[group.rank()])
        assert dispatcher.placement == OWN
        return f"{caught.type.__name__}: {caught.value}"

    for pattern, text in zip(told, on_ranks(body, 2), strict=True):
        assert re.search(pattern, text), text


def test_a_rank_without_experts_needs_a_backend_that_allows_it(monkeypatch: pytest.MonkeyPatch) -> None:
    alone, needs = ExpertPlacement(4, ((0, 1, 2, 3), (-1, -1, -1, -1))), AllGatherOptions.constraints
    monkeypatch.setattr(AllGatherOptions, "constraints", lambda *given: replace(needs(*given), idle_ranks=False))

    def body(group: Group) -> None:
        build_dispatcher(
            small_config("alltoall", num_experts=4, balance={"name": "manual", "spare_experts_per_rank": 2}), group
        ).place(alone)
        dispatcher = build_dispatcher(
            small_config("allgather", num_experts=4, balance={"name": "manual", "spare_experts_per_rank": 2}), group
        )
        with pytest.raises(ConfigError, match=r"backend 'allgather' needs an expert on every rank, got none on rank 1"):
            dispatcher.place(alone)

    on_ranks(body, 2)


def test_metrics_of_a_placement_are_on_the_device_of_the_rows() -> None:
    """Here ``meta``. torch refuses an index on another device."""
    dispatcher = build_dispatcher(small_config("local", graph_safe=True, max_tokens_per_rank=8))
    dispatcher.place(ExpertPlacement(NUM_EXPERTS, (tuple(range(7, -1, -1)),)))
    with torch.device("meta"):
        sent = dispatcher.dispatch(torch.ones(3, 16), Routing(torch.zeros(3, 2, dtype=torch.int64), torch.ones(3, 2)))
    assert isinstance(sent, Dispatched)
    assert sent.real_tokens_per_expert.device.type == "meta"


def _tables(dispatcher: Dispatcher) -> list[int]:
    """Return where the tables are in memory, which a captured graph reads."""
    slots = dispatcher._lease.slots
    assert slots is not None
    return [table.data_ptr() for table in slots.tensors()]


def test_a_placement_of_an_evaluation_is_replaced_in_training() -> None:
    """Tensors that inference mode makes cannot be written to outside of it."""
    dispatcher = build_dispatcher(small_config("local", graph_safe=True, max_tokens_per_rank=8))
    first, second = (ExpertPlacement(NUM_EXPERTS, (tuple(order),)) for order in (range(7, -1, -1), (7, *range(7))))
    with torch.inference_mode():
        dispatcher.place(first)
    captured = _tables(dispatcher)
    dispatcher.place(second)
    assert _tables(dispatcher) == captured
    sent = dispatcher.dispatch(random_rows(1), Routing(torch.tensor([[7, 2]]), torch.ones(1, 2)))
    assert isinstance(sent, Dispatched)
    assert sent.real_tokens_per_expert.tolist() == [1, 0, 0, 1, 0, 0, 0, 0]
