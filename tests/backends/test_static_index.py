"""The index of fixed sizes against the one whose sizes follow the routing, and against plain Python."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from moe_dispatch.permutation.index import SlotIndex, front, heaviest
from tests.backends.tables import Table, static_index, tables

NAN, INF = float("nan"), float("inf")
FIXED = settings(max_examples=40, deadline=None, derandomize=True)


@pytest.mark.parametrize(("dtype", "slack"), [(torch.int16, 0), (torch.int32, 5), (torch.int64, 5)])
@FIXED
@given(tables())
def test_static_index_begins_with_the_eager_one(dtype: torch.dtype, slack: int, table: Table) -> None:
    assume(table.keys)
    eager, index = table.index, static_index(table, dtype=dtype, slack=slack)
    real, padded = sum(table.counts), len(table.grouped())
    assert (index.num_rows, index.top_k, index.num_grouped) == (eager.num_rows, eager.top_k, max(padded + slack, 1))
    slack = index.num_grouped - padded
    assert index.slot_N[:real].tolist() == eager.slot_N.tolist()
    assert index.byrow_N[:real].tolist() == eager.byrow_N.tolist()
    assert index.cu_S.tolist() == eager.cu_S.tolist()
    assert index.source_R.tolist() == eager.source_R.tolist() + [0] * slack
    assert index.source_or_none().tolist() == eager.source_or_none().tolist() + [-1] * slack
    real_L, padded_L, on_the_host = index.tokens_per_key(index.cu_S.device)
    assert real_L.tolist() == table.counts
    assert int(padded_L.sum()) == padded
    assert on_the_host is None
    assert needed(index) == real
    assert index.position_N is not None
    place = list(range(real)) if eager.position_N is None else eager.position_N.tolist()
    assert index.position_N.tolist() == place + [index.num_grouped] * (table.tensor.numel() - real)
    expect_valid(index)


def needed(index: SlotIndex) -> int:
    assert index.needed is not None
    return int(index.needed)


def expect_valid(index: SlotIndex) -> None:
    """What stands behind the real entries may be read by anyone who reads a whole buffer."""
    assert index.source_R.min() >= 0
    assert index.source_R.max() < index.num_rows
    assert sorted(index.slot_N.tolist()) == list(range(index.num_rows * index.top_k))
    assert index.byrow_N.min() >= 0
    assert index.byrow_N.max() < index.num_grouped
    assert index.padding is None or set(index.padding.tolist()) <= set(range(index.num_grouped + 1))


@st.composite
def weighted(draw: Any) -> tuple[Table, Tensor, int]:
    table = draw(tables())
    assume(table.keys)
    value = st.sampled_from([0.0, 0.25, 0.5, 0.75, -0.5, INF, -INF, NAN])
    weights = draw(st.lists(value, min_size=table.tensor.numel(), max_size=table.tensor.numel()))
    return table, torch.tensor(weights), draw(st.integers(1, 12))


def kept_by_hand(weights: list[float], is_real: list[bool], room: int) -> list[bool]:
    lightness = [-INF if math.isnan(weight) else -weight for weight in weights]
    kept = sorted((at for at, real in enumerate(is_real) if real), key=lambda at: lightness[at])[:room]
    return [at in kept for at in range(len(weights))]


@FIXED
@given(weighted())
def test_the_heaviest_are_kept_and_what_is_dropped_has_no_key(case: tuple[Table, Tensor, int]) -> None:
    """Of equal ones the first. The index is that of a table without the dropped pairs, and tells of more."""
    table, weights_N, room = case
    is_real_N = ~table.has_no_key.view(-1)
    kept = kept_by_hand(weights_N.tolist(), is_real_N.tolist(), room)
    assert heaviest(weights_N, is_real_N, room).tolist() == kept
    left = torch.where(torch.tensor(kept), table.tensor.view(-1), -1).view(-1, table.top_k)
    shorter = Table(left.tolist(), table.top_k, table.num_keys, table.multiple)
    index = static_index(table, weights=weights_N.view(-1, table.top_k), rows=room)
    wanted = static_index(shorter, rows=room)
    for name in ("slot_N", "position_N", "byrow_N", "cu_S", "filled_R", "real_L", "padded_L"):
        assert getattr(index, name).tolist() == getattr(wanted, name).tolist(), name
    assert needed(index) == sum(table.counts)


@FIXED
@given(st.lists(st.tuples(st.integers(-9, 9), st.booleans()), min_size=1, max_size=20))
def test_front(pairs: list[tuple[int, bool]]) -> None:
    values, kept = (torch.tensor(column) for column in zip(*pairs, strict=True))
    wanted = [value for value, keep in pairs if keep]
    assert front(values, kept).tolist() == wanted + [0] * (len(pairs) - len(wanted))
