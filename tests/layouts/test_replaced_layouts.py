"""Layouts after ``dataclasses.replace``, copies and pickles, as tools for training make them of arguments."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch

from moe_dispatch.layouts import BSHD, SBHD, THD, Layout, Masked, Rows

LAYOUTS: list[Layout] = [
    BSHD(),
    BSHD([2, 1]),
    SBHD([2, 1]),
    THD([0, 2, 3]),
    THD([0, 2, 3], [0, 4, 8], 9),
    THD(torch.tensor([0, 2, 3], device="meta")),
    Rows(),
    Rows(3),
    Rows(torch.tensor(3, device="meta")),
    Masked(torch.tensor([True, False])),
    BSHD([2, 1]).shard(0, 2),
    THD([0, 2, 4], [0, 4, 8]).shard(1, 2, "zigzag").shard(0, 2),
]


def with_all_fields(layout: Any) -> Any:
    return dataclasses.replace(
        layout, **{field.name: getattr(layout, field.name) for field in dataclasses.fields(layout)}
    )


@pytest.mark.parametrize(
    "change",
    [with_all_fields, dataclasses.replace, copy.copy, copy.deepcopy, lambda layout: pickle.loads(pickle.dumps(layout))],
    ids=["all fields", "replace", "copy", "deepcopy", "pickle"],
)
@pytest.mark.parametrize("layout", LAYOUTS, ids=repr)
def test_a_copy_describes_the_same_rows(layout: Layout, change: Callable[[Layout], Layout]) -> None:
    changed = change(layout)
    assert repr(changed) == repr(layout)
    assert (changed.known_rows(), changed.num_real(8)) == (layout.known_rows(), layout.num_real(8))
    if layout.on_host and not layout.all_real:
        whole, again = layout.valid_T(2), changed.valid_T(2)
        assert whole is not None
        assert again is not None
        assert torch.equal(again, whole)


def test_a_replaced_field_counts() -> None:
    assert dataclasses.replace(THD([0, 2, 3]), cu_seqlens=[0, 5]).known_rows() == 5
    assert dataclasses.replace(Rows(3), count=2).num_real(8) == 2
    assert dataclasses.replace(BSHD([2, 1]), lengths=None).all_real
