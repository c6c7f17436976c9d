"""What happens before a backend gets rows: a dense map becomes ids, an expert named twice is merged, rows are cut."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from moe_dispatch import Routing, build_dispatcher
from moe_dispatch.errors import InputError
from moe_dispatch.permutation import merge_slots
from tests.dispatchers.layer import random_rows, small_config

EXPERTS, SLOTS = 5, 3


@st.composite
def maps(draw: Any) -> Tensor:
    """Bool (T, E) with at most SLOTS True per row."""
    chosen = draw(st.lists(st.sets(st.integers(0, EXPERTS - 1), max_size=SLOTS), max_size=6))
    routing_map = torch.zeros(len(chosen), EXPERTS, dtype=torch.bool)
    for row, experts in enumerate(chosen):
        routing_map[row, list(experts)] = True
    return routing_map


@settings(max_examples=60, deadline=None, derandomize=True)
@given(maps())
def test_ids_ascend_and_missing_slots_go_nowhere(routing_map: Tensor) -> None:
    probs = torch.arange(1.0, routing_map.numel() + 1).view(-1, EXPERTS)
    routing = Routing.from_map(routing_map, probs, top_k=SLOTS)
    assert routing.topk_ids.dtype == torch.int64
    assert routing.topk_ids.shape == routing.topk_weights.shape == (len(routing_map), SLOTS)
    for row, chosen in enumerate(routing_map):
        experts = chosen.nonzero().flatten().tolist()
        assert routing.topk_ids[row].tolist() == experts + [-1] * (SLOTS - len(experts))
        weights = [float(probs[row, expert]) for expert in experts]
        assert routing.topk_weights[row].tolist() == weights + [0.0] * (SLOTS - len(experts))


def test_gradient_reaches_what_the_map_selects_and_nothing_else() -> None:
    routing_map = torch.tensor([[True, False, True, False, False], [False] * 5])
    probs = torch.rand(2, EXPERTS, requires_grad=True)
    Routing.from_map(routing_map, probs, top_k=SLOTS).topk_weights.sum().backward()
    assert probs.grad is not None
    assert torch.equal(probs.grad, routing_map.float())


def test_probs_outside_the_map_may_be_nan() -> None:
    routing_map = torch.tensor([[True, False, False, False, False]])
    probs = torch.where(routing_map, 0.5, float("nan"))
    assert Routing.from_map(routing_map, probs, top_k=SLOTS).topk_weights.tolist() == [[0.5, 0.0, 0.0]]


def test_a_map_gives_the_layer_of_its_ids() -> None:
    dispatcher = build_dispatcher(small_config("local", num_experts=EXPERTS, top_k=SLOTS))
    routing_map = torch.rand(6, EXPERTS).argsort(1) < 2
    probs = torch.rand(6, EXPERTS)
    sent = dispatcher.dispatch(random_rows(6), Routing.from_map(routing_map, probs, top_k=SLOTS))
    expected = random_rows(6) * (probs * routing_map).sum(1, keepdim=True)
    torch.testing.assert_close(dispatcher.combine(sent.rows, sent), expected)


WRONG: dict[str, tuple[Tensor, Tensor, int, str]] = {
    "shapes": (torch.ones(2, 5) > 0, torch.ones(2, 4), 2, r"bool \(T, E\) and probs the same shape, got .*\(2, 4\)"),
    "no bools": (torch.ones(2, 5), torch.ones(2, 5), 2, r"routing_map must be bool \(T, E\).*got torch.float32"),
    "3-D": (torch.ones(2, 5, 1) > 0, torch.ones(2, 5, 1), 2, r"must be bool \(T, E\)"),
    "top_k 0": (torch.ones(2, 5) > 2, torch.ones(2, 5), 0, r"top_k must lie in 1\.\.5, got 0"),
    "top_k 6": (torch.ones(2, 5) > 2, torch.ones(2, 5), 6, r"top_k must lie in 1\.\.5, got 6"),
    "too many": (torch.ones(2, 5) > 0, torch.ones(2, 5), 3, r"a row selects 5 experts, top_k is 3. Pass top_k=5"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_maps(name: str) -> None:
    routing_map, probs, top_k, text = WRONG[name]
    with pytest.raises(InputError, match=f"Routing.from_map: .*{text}"):
        Routing.from_map(routing_map, probs, top_k=top_k)


MERGED_SLOTS = 4
ROWS = st.lists(st.lists(st.integers(-1, 3), min_size=MERGED_SLOTS, max_size=MERGED_SLOTS), max_size=5)


def _tensors(ids: list[list[int]]) -> tuple[Tensor, Tensor]:
    ids_TK = torch.tensor(ids, dtype=torch.int64).view(-1, MERGED_SLOTS)
    weights_TK = torch.arange(1.0, ids_TK.numel() + 1).view(-1, MERGED_SLOTS)
    return ids_TK, torch.where(ids_TK < 0, float("nan"), weights_TK)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(ROWS)
def test_an_expert_named_twice_gets_one_slot_and_the_sum_of_its_weights(ids: list[list[int]]) -> None:
    ids_TK, weights_TK = _tensors(ids)
    merged_ids, merged_weights = (merged.tolist() for merged in merge_slots(ids_TK, weights_TK, asks=True))
    for row, slots in enumerate(ids):
        for k, expert in enumerate(slots):
            if expert < 0:
                assert merged_ids[row][k] == -1
            elif expert in slots[:k]:
                assert [merged_ids[row][k], merged_weights[row][k]] == [-1, 0]
            else:
                total = sum(float(weights_TK[row, other]) for other in range(MERGED_SLOTS) if slots[other] == expert)
                assert [merged_ids[row][k], merged_weights[row][k]] == [expert, total]


@settings(max_examples=60, deadline=None, derandomize=True)
@given(ROWS)
def test_each_merged_slot_gets_the_gradient_of_its_expert(ids: list[list[int]]) -> None:
    ids_TK, weights_TK = _tensors(ids)
    merged_ids, merged_weights = merge_slots(ids_TK, weights_TK.requires_grad_(), asks=True)
    # A gradient that names the expert, so that it shows where it arrives.
    (grad,) = torch.autograd.grad(merged_weights, weights_TK, torch.where(merged_ids < 0, 0.0, merged_ids + 10.0))
    for row, slots in enumerate(ids):
        for k, expert in enumerate(slots):
            if expert >= 0:
                assert grad[row, k] == expert + 10


def test_ids_without_duplicates_are_left_alone() -> None:
    ids_TK, weights_TK = _tensors([[3, 1, -1, -1], [0, 1, 2, 3]])
    merged_ids, merged_weights = merge_slots(ids_TK, weights_TK, asks=True)
    assert merged_ids is ids_TK
    assert merged_weights is weights_TK
