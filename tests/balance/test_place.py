"""Dispatcher.place: results with and without it, what it refuses, and what it costs where it is not used."""

from __future__ import annotations

import copy
import re
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from moe_dispatch import Dispatched, Dispatcher, Routing, build_dispatcher
from moe_dispatch.backends import Arrived, Constraints, MoEShape
from moe_dispatch.backends.allgather import AllGatherOptions
from moe_dispatch.balance import ExactPlacement, ExpertPlacement
from moe_dispatch.balance.slot_table import SlotTable
from moe_dispatch.dispatchers import autograd
from moe_dispatch.dispatchers.metrics import Meter
from moe_dispatch.errors import ConfigError, InputError, PeerError
from moe_dispatch_testing import Scenario, count_collectives
from tests.dispatchers.layer import NUM_EXPERTS, Group, on_ranks, random_routing, random_rows, small_config

OWN = ExpertPlacement.contiguous(NUM_EXPERTS, 2, spare=1)
COPIES = ExpertPlacement(NUM_EXPERTS, ((7, 1, 2, 3, 4), (5, 6, 7, 0, 4)))
UNEVEN = ExpertPlacement(NUM_EXPERTS, ((7, 1, 2, -1, -1), (5, 6, 3, 0, 4)))


def scaled_layer(dispatcher: Dispatcher, x: Tensor, routing: Routing) -> tuple[Tensor, Dispatched]:
    """Apply experts that scale a row by different factors, so the same rows give the same bits anywhere."""
    sent = dispatcher.dispatch(x, routing)
    assert isinstance(sent, Dispatched)
    rank, local = dispatcher._channel.communicator.rank, len(sent.tokens_per_expert)
    experts = torch.arange(rank * local, (rank + 1) * local)
    if sent.placement is not None:
        placement = sent.placement.read() if isinstance(sent.placement, ExactPlacement) else sent.placement
        experts = torch.tensor(placement.slots[rank])
    factors_R = torch.repeat_interleave(1.3 + experts / 7, sent.tokens_per_expert)
    factors_R = torch.nn.functional.pad(factors_R, (0, len(sent.rows) - len(factors_R))).to(x.dtype)
    return dispatcher.combine(torch.tanh(sent.rows * factors_R.unsqueeze(1)), sent), sent


def _results(dispatcher: Dispatcher, rank: int, seed: int) -> list[Tensor]:
    x, routing = random_rows(30 + rank, seed=seed + rank).requires_grad_(), random_routing(30 + rank, seed=seed + rank)
    weights = routing.topk_weights.requires_grad_()
    y, _ = scaled_layer(dispatcher, x, Routing(routing.topk_ids, weights))
    y.backward(random_rows(30 + rank, seed=seed + 5))
    assert x.grad is not None
    assert weights.grad is not None
    return [y.detach(), x.grad, weights.grad]


@pytest.mark.parametrize("spare", [0, 1, 3])
def test_exact_reduction_gives_the_same_bits(spare: int) -> None:
    backend = {"name": "alltoall", "reduction": "exact"}

    def body(group: Group) -> bool:
        plain = build_dispatcher(small_config(backend), group)
        placed = build_dispatcher(small_config(backend, spare_experts_per_rank=spare), group)
        same = []
        for seed in range(4):
            drawn = Scenario(name="", spare=spare, seed=seed).placement(4)
            placed.place(ExpertPlacement(8, ((1, 0), (3, 2), (5, 7), (6, 4))) if drawn is None else drawn)
            pairs = zip(_results(plain, group.rank(), seed), _results(placed, group.rank(), seed), strict=True)
            same += [torch.equal(one, other) for one, other in pairs]
        return all(same)

    assert all(on_ranks(body, 4))


@pytest.mark.parametrize("backend", ["alltoall", "allgather"])
def test_results_are_equal_up_to_rounding(backend: str) -> None:
    def body(group: Group) -> None:
        plain = build_dispatcher(small_config(backend), group)
        placed = build_dispatcher(small_config(backend, spare_experts_per_rank=1), group)
        for placement in (OWN, COPIES, UNEVEN):
            placed.place(placement)
            pairs = zip(_results(plain, group.rank(), 0), _results(placed, group.rank(), 0), strict=True)
            for one, other in pairs:
                torch.testing.assert_close(other, one, rtol=0, atol=2e-6 * float(one.abs().max()))

    on_ranks(body, 2)


def test_counts_are_those_of_slots_and_metrics_those_of_experts() -> None:
    ids = torch.tensor([[4, 7], [4, 0], [4, 1], [4, -1]])

    def body(group: Group) -> tuple[list[int], list[int], list[int], list[float | None]]:
        dispatcher = build_dispatcher(small_config(spare_experts_per_rank=1), group)
        assert dispatcher.placement == OWN
        dispatcher.place(COPIES)
        sent = dispatcher.dispatch(random_rows(4), Routing(ids, torch.ones(4, 2)))
        assert isinstance(sent, Dispatched)
        assert sent.placement == dispatcher.placement == COPIES
        mine, everyone = dispatcher.metrics(), dispatcher.metrics(gather=True)
        assert mine.rank_imbalance is None
        told = [everyone.imbalance, everyone.rank_imbalance]
        return sent.real_tokens_per_expert.tolist(), mine.real_tokens_per_expert.tolist(), _counts(everyone), told

    first, second = on_ranks(body, 2)
    assert (first[0], second[0]) == ([1, 2, 0, 0, 4], [0, 0, 1, 2, 4])  # each rank has its own copies of 4 and 7
    assert (first[1], second[1]) == ([0, 2, 0, 0, 4, 0, 0, 1], [2, 0, 0, 0, 4, 0, 0, 1])
    assert first[2] == second[2] == [2, 2, 0, 0, 8, 0, 0, 2]
    assert first[3] == second[3] == [8 / (14 / 8), 1.0]


def _counts(metrics: Any) -> list[int]:
    counts: list[int] = metrics.real_tokens_per_expert.tolist()
    return counts


def test_metrics_add_up_across_a_placement() -> None:
    """Rows before the first placement and after it count for the same experts."""

    def body(group: Group) -> list[int]:
        dispatcher = build_dispatcher(small_config(top_k=1), group)
        routing = Routing(torch.tensor([[0], [5]]), torch.ones(2, 1))
        dispatcher.dispatch(random_rows(2), routing)
        dispatcher.place(ExpertPlacement(NUM_EXPERTS, ((5, 6, 7, 4), (3, 2, 1, 0))))
        dispatcher.dispatch(random_rows(2), routing)
        assert sum(_counts(dispatcher.metrics())) == 4
        return _counts(dispatcher.metrics(gather=True))

    assert on_ranks(body, 2) == [[4, 0, 0, 0, 0, 4, 0, 0]] * 2


@pytest.mark.parametrize("fields", [{}, {"balance": "least_loaded"}, {"graph_safe": True, "max_tokens_per_rank": 40}])
def test_self_test(fields: dict[str, Any]) -> None:
    def body(group: Group) -> None:
        dispatcher = build_dispatcher(small_config(spare_experts_per_rank=1, **fields), group)
        if "balance" not in fields:
            dispatcher.place(COPIES)
        dispatcher.self_test()
        assert dispatcher.metrics().real_tokens_per_expert.sum() > 0

    on_ranks(body, 2)


def test_tables_on_another_device_than_the_rows() -> None:
    """The counters of the metrics are on the device of the rows, here ``meta``."""
    meter = Meter(2, 3)
    meter.placed = True
    meter.prepare(torch.device("meta"))
    table = SlotTable.make(ExpertPlacement(3, ((0, 2), (1, -1))), 0, ranks_per_node=2, device=torch.device("cpu"))
    counts = torch.zeros(2, dtype=torch.int64, device="meta")
    arrived = Arrived(
        rows=torch.empty(0, 1, device="meta"),
        weights=torch.empty(0, device="meta"),
        tokens_per_expert=counts,
        real_tokens_per_expert=counts,
        tokens_per_expert_list=None,
        route=None,  # type: ignore[arg-type]
    )
    departed: Any = SimpleNamespace(
        valid_T=None, experts_L=table.experts_L, placement=None, outcome=counts.sum(), layer=-1, recomputed=False
    )
    meter.record(arrived, departed)  # torch refuses an index on another device
    assert meter.rows["dispatches"] == 1


def test_a_copied_module_keeps_the_placement() -> None:
    def body(group: Group) -> None:
        dispatcher = build_dispatcher(small_config(spare_experts_per_rank=1), group)
        dispatcher.place(COPIES)
        other = copy.deepcopy(dispatcher)
        assert other.placement == COPIES
        dispatcher.place(OWN)
        assert other.placement == COPIES
        sent = other.dispatch(random_rows(1), Routing(torch.tensor([[4, 7]]), torch.ones(1, 2)))
        assert isinstance(sent, Dispatched)
        assert sent.real_tokens_per_expert.sum() == 2

    on_ranks(body, 2)


def test_graph_safe_tables_change_in_place() -> None:
    def body(group: Group) -> None:
        config = small_config(spare_experts_per_rank=1, graph_safe=True, max_tokens_per_rank=8)
        dispatcher = build_dispatcher(config, group)
        before = dispatcher._lease.table
        dispatcher.place(COPIES)
        assert dispatcher._lease.table is before
        assert before is not None
        assert before.experts_L.tolist() == list(COPIES.slots[dispatcher._channel.communicator.rank])

    on_ranks(body, 2)


def test_without_a_placement_nothing_is_added(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(autograd, "slots_of", None)  # a call would raise

    def body(group: Group) -> tuple[int, int]:
        dispatcher = build_dispatcher(small_config(), group)
        assert dispatcher._lease.table is None
        assert dispatcher.placement is None
        with count_collectives() as seen:
            _results(dispatcher, group.rank(), 0)
        return len(seen.calls), seen.nbytes

    first, second = on_ranks(body, 2)
    assert first[0] == second[0] == 5  # counts, rows, sums, and the gradients of both


THREE_SPARE = ExpertPlacement.contiguous(8, 2, spare=3)


@pytest.mark.parametrize(
    ("placements", "told"),
    [
        ((None, None), [r"ConfigError: Dispatcher\.place: placement must be an ExpertPlacement, got NoneType"] * 2),
        ([ExpertPlacement.contiguous(6, 2, spare=2)] * 2, [r"ConfigError: .* must have num_experts \(8\), got 6"] * 2),
        ([ExpertPlacement.contiguous(8, 4, spare=3)] * 2, [r"ConfigError: .* ep_size \(2\) ranks, got 4"] * 2),
        ([THREE_SPARE] * 2, [r"every rank must have 5 expert slots .*, got 7. Set spare_experts_per_rank to 3"] * 2),
        (
            (COPIES, THREE_SPARE),  # wrong on one rank
            [
                r"PeerError: rank 1 refused: Dispatcher.place: every rank must have 5 expert slots",
                r"ConfigError: Dispatcher.place: every rank must have 5 expert slots",
            ],
        ),
        (
            (COPIES, UNEVEN),
            [
                r"InputError: Ranks disagree on the expert slots of rank 0: rank 0 has \[7, 1, 2, 3, 4\], rank 1 has "
                r"\[7, 1, 2, -1, -1\]. Make the same call on every rank."
            ]
            * 2,
        ),
    ],
)
def test_placements_that_do_not_fit_are_refused_on_all_ranks(placements: Any, told: list[str]) -> None:
    def body(group: Group) -> str:
        dispatcher = build_dispatcher(small_config(spare_experts_per_rank=1), group)
        with pytest.raises((ConfigError, InputError, PeerError)) as caught:
            dispatcher.place(placements[group.rank()])
        assert dispatcher.placement == OWN
        return f"{caught.type.__name__}: {caught.value}"

    for pattern, text in zip(told, on_ranks(body, 2), strict=True):
        assert re.search(pattern, text), text


def test_a_rank_without_experts_needs_a_backend_that_allows_it(monkeypatch: pytest.MonkeyPatch) -> None:
    alone = ExpertPlacement(4, ((0, 1, 2, 3), (-1, -1, -1, -1)))

    needs = AllGatherOptions.constraints

    def needs_rows(options: AllGatherOptions, shape: MoEShape) -> Constraints:
        return replace(needs(options, shape), idle_ranks=False)

    monkeypatch.setattr(AllGatherOptions, "constraints", needs_rows)

    def body(group: Group) -> None:
        build_dispatcher(small_config("alltoall", num_experts=4, spare_experts_per_rank=2), group).place(alone)
        dispatcher = build_dispatcher(small_config("allgather", num_experts=4, spare_experts_per_rank=2), group)
        told = r"Dispatcher\.place: backend 'allgather' needs an expert on every rank, got none on rank 1"
        with pytest.raises(ConfigError, match=told):
            dispatcher.place(alone)

    on_ranks(body, 2)


def test_a_placement_of_an_evaluation_is_replaced_in_training() -> None:
    """Tensors that inference mode makes cannot be written to outside of it."""
    dispatcher = build_dispatcher(small_config("local", graph_safe=True, max_tokens_per_rank=8))
    first, second = (ExpertPlacement(NUM_EXPERTS, (tuple(order),)) for order in (range(7, -1, -1), (7, *range(7))))
    with torch.inference_mode():
        dispatcher.place(first)
    table = dispatcher._lease.table
    dispatcher.place(second)
    assert dispatcher._lease.table is table
    sent = dispatcher.dispatch(random_rows(1), Routing(torch.tensor([[7, 2]]), torch.ones(1, 2)))
    assert isinstance(sent, Dispatched)
    assert sent.real_tokens_per_expert.tolist() == [1, 0, 0, 1, 0, 0, 0, 0]
