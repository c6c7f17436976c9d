"""What the dispatcher does to rows beside the backend: merge an expert named twice, cut rows and put them back."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from moe_dispatch.dispatchers.autograd import pad, trim
from moe_dispatch.permutation import merge_slots

SLOTS = 4
ROWS = st.lists(st.lists(st.integers(-1, 3), min_size=SLOTS, max_size=SLOTS), max_size=5)


def _tensors(ids: list[list[int]]) -> tuple[Tensor, Tensor]:
    ids_TK = torch.tensor(ids, dtype=torch.int64).view(-1, SLOTS)
    weights_TK = torch.arange(1.0, ids_TK.numel() + 1).view(-1, SLOTS)
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
                total = sum(float(weights_TK[row, other]) for other in range(SLOTS) if slots[other] == expert)
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


@pytest.mark.parametrize("padding", [0, 2])
def test_rows_taken_are_put_back_and_their_gradients_too(padding: int) -> None:
    rows_TD, chosen = torch.randn(6, 3, requires_grad=True), torch.tensor([0, 2, 5])
    taken = pad(rows_TD, chosen, 3 + padding)
    back = trim(taken, chosen, 6)
    keep = torch.tensor([1.0, 0, 1, 0, 0, 1]).unsqueeze(1)
    assert torch.equal(taken[:3], rows_TD[chosen])
    assert torch.equal(taken[3:], torch.zeros(padding, 3))
    assert torch.equal(back, rows_TD * keep)
    back.backward(torch.full((6, 3), 2.0))
    assert rows_TD.grad is not None
    assert torch.equal(rows_TD.grad, (2 * keep).expand(6, 3))


@pytest.mark.parametrize(("rows", "padded"), [(3, 3), (3, 8), (0, 4), (0, 0)])
def test_padding_is_appended_and_trimmed(rows: int, padded: int) -> None:
    tensor = torch.randn(rows, 2)
    out = pad(tensor, None, padded, -1)
    assert torch.equal(out, torch.cat((tensor, torch.full((padded - rows, 2), -1.0))))
    assert torch.equal(trim(out, None, rows), tensor)
