"""Index arithmetic of the one-rank reorder against a plain Python one."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import pytest
import torch
from hypothesis import assume, given, settings

from moe_dispatch.permutation import SlotIndex, group_slots, round_up
from tests.backends.tables import EXAMPLE, Table, static_index, tables

NAN = float("nan")
CPU = torch.device("cpu")
COUNTS = {"counts", "real_L", "padded_L", "needed"}
FIXED = settings(max_examples=40, deadline=None, derandomize=True)


@FIXED
@given(tables())
def test_index_equals_the_plain_one(table: Table) -> None:
    index, grouped, top_k = table.index, table.grouped(), table.top_k
    real = [at for at, pair in enumerate(grouped) if pair is not None]
    flat = [pair[0] * top_k + pair[1] for pair in grouped if pair is not None]
    position = {pair: at for at, pair in enumerate(grouped) if pair is not None}
    in_rows = sorted(position)
    assert (index.num_rows, index.top_k, index.num_grouped) == (len(table.keys), top_k, len(grouped))
    assert index.slot_N.tolist() == flat
    assert index.source_R.tolist() == [0 if pair is None else pair[0] for pair in grouped]
    assert index.byrow_N.tolist() == [position[pair] for pair in in_rows]
    assert index.cu_S.tolist() == [sum(pair[0] < s for pair in in_rows) for s in range(len(table.keys) + 1)]
    if table.multiple == 1:
        assert index.position_N is None
        assert index.padding is None
    else:
        assert index.position_N is not None
        assert index.padding is not None
        assert index.position_N.tolist() == real
        assert index.padding.tolist() == [at for at, pair in enumerate(grouped) if pair is None]


@pytest.mark.parametrize("slack", [None, 0, 5])
@FIXED
@given(tables())
def test_values_to_grouped_and_back(slack: int | None, table: Table) -> None:
    """By the index whose size follows the keys, and by one of fixed size with slack behind the rows."""
    assume(table.keys or slack is None)
    index = table.index if slack is None else static_index(table, slack=slack)
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


@pytest.mark.parametrize("fixed_size", [False, True])
@FIXED
@given(tables())
def test_index_from_its_tensors(fixed_size: bool, table: Table) -> None:
    """It has the tables of the index and no counts. No table shares memory with another."""
    assume(table.keys or not fixed_size)
    index = static_index(table, slack=2) if fixed_size else table.index
    given_tensors = index.tensors()
    addresses = [tensor.untyped_storage().data_ptr() for tensor in given_tensors if tensor.numel()]
    assert len({*addresses}) == len(addresses)
    remaining = iter(given_tensors)
    again = SlotIndex.from_tables(
        lambda _: next(remaining),
        index.num_rows,
        index.top_k,
        index.pad_multiple,
        new_size=lambda: -1,  # sizes of given tables are not used
        buffer_rows=-1 if fixed_size else None,
    )
    assert next(remaining, None) is None
    assert again.fixed_size == index.fixed_size == fixed_size
    for field in dataclasses.fields(SlotIndex):
        found, expected = getattr(again, field.name), getattr(index, field.name)
        if field.name in COUNTS:
            assert found is None
        else:
            assert found is expected or (isinstance(found, int) and found == expected), field.name


def blank_table(length: int) -> torch.Tensor:
    return torch.empty(length, dtype=torch.int64)


@pytest.mark.parametrize("pad_multiple", [1, 4])
@pytest.mark.parametrize("kind", ["of some rows", "of 5 rows", "of fixed size"])
def test_blank_index_has_the_shapes(kind: str, pad_multiple: int) -> None:
    """``new_size`` is called once for each size that the keys or the number of rows decide."""
    table = Table([[0, 1], [1, 2], [-1, 2], [2, 0], [2, 3]], 2, 4, pad_multiple)
    made, num_rows, fixed = table.index, None if kind == "of some rows" else 5, {}
    sizes = [6] * (num_rows is None) + [9] + [16, 7] * (pad_multiple > 1)
    if kind == "of fixed size":
        made, sizes = static_index(table, slack=3), []
        fixed = {"num_keys": 4, "buffer_rows": made.num_grouped}
    blank = SlotIndex.from_tables(
        lambda length: torch.empty(length, dtype=torch.int64),
        num_rows,
        2,
        pad_multiple,
        new_size=lambda: sizes.pop(0),
        **fixed,
    )
    assert not sizes
    assert [tensor.shape for tensor in blank.tensors()] == [tensor.shape for tensor in made.tensors()]
    assert (blank.num_rows, blank.num_grouped, blank.fixed_size) == (5, made.num_grouped, bool(fixed))


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
