"""Index arithmetic of the one-rank reorder against a plain Python one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import assume, given, settings

from moe_dispatch.permutation import group_slots, round_up
from tests.backends.tables import EXAMPLE, Table, static_index, tables

NAN = float("nan")
CPU = torch.device("cpu")
FIXED = settings(max_examples=40, deadline=None, derandomize=True)


@pytest.mark.parametrize("slack", [None, 0, 5])
@FIXED
@given(tables())
def test_values_to_grouped_and_back(slack: int | None, table: Table) -> None:
    """By the index whose size follows the keys, and by one of fixed size with slack behind the rows."""
    assume(table.keys or slack is None)
    index = table.index if slack is None else static_index(table, slack)
    addresses = [tensor.untyped_storage().data_ptr() for tensor in index.tensors() if tensor.numel()]
    assert len({*addresses}) == len(addresses), "an operator must not return the same memory twice"
    grouped: list[tuple[int, int] | None] = table.grouped()
    grouped += [None] * (index.num_grouped - len(grouped))
    values_SK = torch.arange(1.0, table.tensor.numel() + 1).view(-1, table.top_k)
    values_SK = torch.where(table.has_no_key, NAN, values_SK)  # pairs without a key must not be read
    values_R = index.to_grouped(values_SK)
    assert values_R.tolist() == [0 if pair is None else float(values_SK[pair]) for pair in grouped]
    poisoned_R = torch.tensor([NAN if pair is None else float(v) for pair, v in zip(grouped, values_R, strict=True)])
    assert torch.equal(index.to_slots(poisoned_R), torch.where(table.has_no_key, 0, values_SK))
    if slack is None:
        assert torch.equal(index.in_row_order(values_SK), values_SK[~table.has_no_key])


@FIXED
@given(tables())
def test_counts_of_keys(table: Table) -> None:
    padded = [round_up(count, table.multiple) for count in table.counts]
    for given_L in (None, torch.tensor(table.counts)):
        index = group_slots(table.tensor, table.counts, table.multiple, real_L=given_L)
        real_L, padded_L, on_the_host = index.tokens_per_key(CPU)
        assert (real_L.tolist(), padded_L.tolist(), on_the_host) == (table.counts, padded, tuple(padded))
        assert (padded_L is real_L) == (table.multiple == 1)
        assert given_L is None or real_L is given_L


@pytest.fixture
def another_default_device() -> Iterator[None]:
    torch.set_default_device("meta")
    yield
    torch.set_default_device(None)


def test_index_lies_where_its_keys_lie(another_default_device: None) -> None:
    keys_SK = torch.tensor(EXAMPLE.keys, device="cpu")
    index = group_slots(keys_SK, EXAMPLE.counts, EXAMPLE.multiple)
    assert index.position_N is not None
    assert {index.source_R.device.type, index.position_N.device.type, index.cu_S.device.type} == {"cpu"}
    assert index.slot_N.tolist() == [1, 0, 3, 7, 6]
    assert index.to_slots(index.to_grouped(keys_SK.double())).tolist() == [[1, 0], [0, 1], [0, 0], [2, 1]]


@pytest.mark.parametrize(("value", "multiple", "expected"), [(0, 16, 0), (1, 16, 16), (16, 16, 16), (17, 16, 32)])
def test_round_up(value: int, multiple: int, expected: int) -> None:
    assert round_up(value, multiple) == expected
