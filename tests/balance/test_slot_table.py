"""The table of a rank: which copies it uses, and how rows take turns."""

from __future__ import annotations

import pytest
import torch

from moe_dispatch.balance import ExpertPlacement
from moe_dispatch.capabilities.balance.slot_table import SlotTable, copies_used, slots_of

CPU = torch.device("cpu")
# Expert 0 is on ranks 0, 1, 2 and 3, expert 1 on ranks 0 and 3, expert 2 on rank 2.
PLACED = ExpertPlacement(3, ((0, 1), (0, -1), (2, 0), (0, 1)))


@pytest.mark.parametrize(
    ("expert", "rank", "ranks_per_node", "used"),
    [
        (0, 2, 4, (5,)),  # a copy on the rank itself
        (1, 1, 2, (1,)),  # a copy on its node
        (1, 2, 2, (7,)),
        (1, 1, 4, (7, 1)),  # all copies; ranks begin with different ones
        (1, 2, 4, (1, 7)),
        (1, 2, 1, (1, 7)),  # no copy on its node
        (2, 0, 2, (4,)),
    ],
)
def test_copies_that_a_rank_uses(expert: int, rank: int, ranks_per_node: int, used: tuple[int, ...]) -> None:
    assert copies_used(PLACED, expert, rank, ranks_per_node) == used


def test_rows_take_turns() -> None:
    table = SlotTable.make(PLACED, 1, ranks_per_node=4, device=CPU)
    ids = torch.tensor([[1, 0], [2, 1], [-1, 1], [1, -1]])
    assert slots_of(ids, table.copies_EC).tolist() == [[7, 2], [4, 1], [-1, 7], [1, -1]]
    assert table.experts_L.tolist() == [0, 3]
    assert slots_of(torch.empty(0, 2, dtype=torch.int64), table.copies_EC).shape == (0, 2)


def test_a_table_without_copies_is_one_lookup() -> None:
    table = SlotTable.make(ExpertPlacement(4, ((3, 1), (0, 2))), 0, ranks_per_node=2, device=CPU)
    assert table.copies_EC.shape == (4, 2)
    assert slots_of(torch.tensor([[0, 3], [-1, 2]]), table.copies_EC).tolist() == [[2, 0], [-1, 3]]


def test_copies_are_evenly_loaded() -> None:
    """Each rank divides the rows of an expert into parts that differ by one row at most."""
    placement = ExpertPlacement(2, ((0, -1), (0, -1), (0, -1), (1, -1)))
    ids = torch.tensor([[0, 1]] * 100 + [[1, 0]] * 100)[torch.randperm(200, generator=torch.manual_seed(0))]
    for rank, parts in ((3, [66, 67, 67]), (0, [200, 0, 0])):
        table = SlotTable.make(placement, rank, ranks_per_node=4, device=CPU)
        slots = slots_of(ids, table.copies_EC)
        assert sorted(int((slots == slot).sum()) for slot in (0, 2, 4)) == sorted(parts)
        assert int((slots == 6).sum()) == 200


def test_update_keeps_the_tensors() -> None:
    """A captured graph reads the tensors that it was captured with."""
    first = SlotTable.make(PLACED, 1, ranks_per_node=4, device=CPU, most_copies=4)
    moved = ExpertPlacement(3, ((1, 2), (1, 0), (-1, 2), (0, -1)))
    second = SlotTable.make(moved, 1, ranks_per_node=4, device=CPU, most_copies=4)
    tensors = first.copies_EC, first.experts_L
    assert first.update(second)
    assert torch.equal(tensors[0], second.copies_EC)
    assert tensors[1].tolist() == [1, 0]
    assert not first.update(SlotTable.make(PLACED, 1, ranks_per_node=4, device=CPU, most_copies=2))
