"""The one-rank reorder against a plain Python one: index arithmetic, and the passes over rows in both directions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from moe_dispatch.backends.permutation import (
    SlotIndex,
    accumulation_dtype,
    expand,
    expand_weighted,
    group_slots,
    reduce,
    round_up,
    rows,
    sum_bags,
)

NAN = float("nan")


@dataclass(frozen=True)
class Table:
    """Keys of (row, slot) pairs as lists; a key outside ``0..num_keys-1`` is none."""

    keys: list[list[int]]
    top_k: int
    num_keys: int
    multiple: int

    @property
    def tensor(self) -> Tensor:
        return torch.tensor(self.keys, dtype=torch.int64).view(-1, self.top_k)

    @property
    def counts(self) -> list[int]:
        return [sum(row.count(key) for row in self.keys) for key in range(self.num_keys)]

    @property
    def has_no_key(self) -> Tensor:
        return (self.tensor < 0) | (self.tensor >= self.num_keys)

    @property
    def index(self) -> SlotIndex:
        return group_slots(self.tensor, self.counts, self.multiple)

    def grouped(self) -> list[tuple[int, int] | None]:
        """(row, slot) at each grouped position, None for padding."""
        out: list[tuple[int, int] | None] = []
        for key in range(self.num_keys):
            out += [(s, k) for s, row in enumerate(self.keys) for k, other in enumerate(row) if other == key]
            out += [None] * (-len(out) % self.multiple if self.counts[key] else 0)
        return out


@st.composite
def tables(draw: Callable[..., int]) -> Table:
    top_k, num_keys, num_rows = draw(st.integers(1, 4)), draw(st.integers(1, 5)), draw(st.integers(0, 9))
    key = st.integers(-7, num_keys + 3)
    keys = draw(st.lists(st.lists(key, min_size=top_k, max_size=top_k), min_size=num_rows, max_size=num_rows))
    return Table(keys, top_k, num_keys, draw(st.sampled_from([1, 2, 3, 16])))  # type: ignore[arg-type]


EXAMPLE = Table([[1, 0], [-1, 1], [-3, 4], [2, 1]], 2, 4, 4)
FIXED = settings(max_examples=120, deadline=None, derandomize=True)


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
        assert index.place_N is None
        assert index.padding is None
    else:
        assert index.place_N is not None
        assert index.padding is not None
        assert index.place_N.tolist() == real
        assert index.padding.tolist() == [at for at, pair in enumerate(grouped) if pair is None]


@pytest.mark.parametrize("dtype", [torch.int16, torch.int32, torch.int64])
def test_index_takes_keys_as_they_travel(dtype: torch.dtype) -> None:
    index = group_slots(EXAMPLE.tensor.to(dtype), EXAMPLE.counts, EXAMPLE.multiple)
    assert index.slot_N.tolist() == EXAMPLE.index.slot_N.tolist()
    assert index.slot_N.dtype == torch.int64


def test_index_takes_keys_of_any_strides() -> None:
    index = group_slots(EXAMPLE.tensor.t().contiguous().t(), EXAMPLE.counts, EXAMPLE.multiple)
    assert index.slot_N.tolist() == EXAMPLE.index.slot_N.tolist()


@FIXED
@given(tables())
def test_values_to_grouped_and_back(table: Table) -> None:
    grouped = table.grouped()
    values_SK = torch.arange(1.0, table.tensor.numel() + 1).view(-1, table.top_k)
    values_SK = torch.where(table.has_no_key, NAN, values_SK)  # pairs without a key must not be read
    values_R = table.index.to_grouped(values_SK)
    assert values_R.tolist() == [0 if pair is None else float(values_SK[pair]) for pair in grouped]
    poisoned_R = torch.tensor([NAN if pair is None else float(v) for pair, v in zip(grouped, values_R, strict=True)])
    back_SK = table.index.to_slots(poisoned_R)
    assert torch.equal(back_SK, torch.where(table.has_no_key, 0, values_SK))
    assert torch.equal(table.index.in_row_order(values_SK), values_SK[~table.has_no_key])


def _rows(count: int, width: int = 6, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(count, width, generator=torch.Generator().manual_seed(seed)).to(dtype)


def _poisoned(table: Table, values_RD: Tensor) -> Tensor:
    is_padding = torch.tensor([pair is None for pair in table.grouped()], dtype=torch.bool)
    return values_RD.masked_fill(is_padding.view(-1, *[1] * (values_RD.dim() - 1)), NAN)


@FIXED
@given(tables())
def test_expand_copies_rows_and_clears_padding(table: Table) -> None:
    rows_SD = _rows(len(table.keys))
    out = expand(rows_SD, table.index, torch.float32)
    assert out.tolist() == [[0.0] * 6 if pair is None else rows_SD[pair[0]].tolist() for pair in table.grouped()]


@FIXED
@given(tables(), st.booleans())
def test_reduce_sums_in_slot_order_and_never_reads_padding(table: Table, weighted: bool) -> None:
    index, num_grouped = table.index, len(table.grouped())
    rows_RD = _poisoned(table, _rows(num_grouped, dtype=torch.float64))
    weights_R = _poisoned(table, _rows(num_grouped, 1, torch.float64, seed=1)).squeeze(1)
    out = torch.full((len(table.keys), 6), NAN, dtype=torch.float64)
    reduce(rows_RD, index, weights_R if weighted else None, out)
    expected = torch.zeros(len(table.keys), 6, dtype=torch.float64)
    for at, pair in enumerate(table.grouped()):
        if pair is not None:
            expected[pair[0]] += rows_RD[at] * (weights_R[at] if weighted else 1)
    torch.testing.assert_close(out, expected, rtol=1e-14, atol=1e-14)


@FIXED
@given(tables(), st.booleans())
def test_expand_weighted_is_the_backward_of_reduce(table: Table, wants_dots: bool) -> None:
    num_grouped = len(table.grouped())
    grad_SD = _rows(len(table.keys), dtype=torch.float64)
    partners_RD = _poisoned(table, _rows(num_grouped, dtype=torch.float64, seed=1))
    weights_R = _poisoned(table, _rows(num_grouped, 1, torch.float64, seed=2)).squeeze(1)
    partners = partners_RD if wants_dots else None
    grad_RD, dots_R = expand_weighted(grad_SD, table.index, weights_R, partners, torch.float64)
    for at, pair in enumerate(table.grouped()):
        if pair is None:
            assert not grad_RD[at].any()
            assert dots_R is None or dots_R[at] == 0
            continue
        torch.testing.assert_close(grad_RD[at], grad_SD[pair[0]] * weights_R[at], rtol=1e-14, atol=1e-14)
        if dots_R is not None:
            torch.testing.assert_close(dots_R[at], grad_SD[pair[0]] @ partners_RD[at], rtol=1e-12, atol=1e-12)
    assert (dots_R is not None) == wants_dots


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of one or two rows, so that every seam between them is passed."""
    monkeypatch.setattr(rows, "_BLOCK_BYTES", {"cpu": 4 * 6 * 2})


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("blocks", ["one", "many"])
def test_sums_are_rounded_once(dtype: torch.dtype, weighted: bool, blocks: str, request: pytest.FixtureRequest) -> None:
    """Within half a unit in the last place of the exact sum, and a hair for float32 accumulation."""
    if blocks == "many":
        request.getfixturevalue("small_blocks")
    generator = torch.Generator().manual_seed(0)
    keys = torch.rand(40, 16, generator=generator).argsort(1)[:, :8]
    keys[::7] = -1
    counts = torch.bincount(keys[keys >= 0], minlength=16).tolist()
    index = group_slots(keys, counts, 4)
    rows_RD = _rows(index.num_grouped, dtype=dtype)
    weights_R = torch.rand(index.num_grouped, generator=generator).to(accumulation_dtype(dtype))
    out = torch.empty(40, 6, dtype=dtype)
    reduce(rows_RD, index, weights_R if weighted else None, out)
    terms_RD = rows_RD.double() * (weights_R.double().unsqueeze(1) if weighted else 1)
    exact, magnitude = torch.zeros(2, 40, 6, dtype=torch.float64)
    exact.index_add_(0, index.source_R[index.place_N], terms_RD[index.place_N])
    magnitude.index_add_(0, index.source_R[index.place_N], terms_RD[index.place_N].abs())
    half_ulp = torch.finfo(dtype).eps / 2 * exact.abs()
    accumulation = 16 * torch.finfo(accumulation_dtype(dtype)).eps * magnitude
    # A sum may round into the next binade, where the unit doubles.
    assert ((out.double() - exact).abs() <= half_ulp * 1.01 + accumulation).all()


@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sums_into_a_wider_dtype_are_not_rounded(dtype: torch.dtype, weighted: bool) -> None:
    index = EXAMPLE.index
    rows_RD = _rows(index.num_grouped, dtype=dtype)
    weights_R = torch.rand(index.num_grouped, generator=torch.Generator().manual_seed(1)) if weighted else None
    out, expected = torch.empty(4, 6), torch.empty(4, 6)
    reduce(rows_RD, index, weights_R, out)
    reduce(rows_RD.float(), index, weights_R, expected)
    torch.testing.assert_close(out, expected, rtol=1e-6, atol=1e-6)


def test_blocks_change_no_bit(small_blocks: None) -> None:
    index = EXAMPLE.index
    rows_RD, weights_R = _rows(index.num_grouped), torch.rand(index.num_grouped)
    grad_SD = _rows(4, seed=3)

    def passes() -> list[Tensor]:
        out = torch.empty(4, 6)
        reduce(rows_RD, index, weights_R, out)
        grads = expand_weighted(grad_SD, index, weights_R, rows_RD, torch.float32)
        assert grads[1] is not None
        return [out, grads[0], grads[1], expand(grad_SD.bfloat16(), index, torch.float32)]

    small = passes()
    rows._BLOCK_BYTES["cpu"] = 2 << 20
    assert all(map(torch.equal, small, passes()))


def test_strided_rows_of_another_dtype() -> None:
    """As they lie in packets: behind each row its slots, and the row in the wire's dtype."""
    index = EXAMPLE.index
    packets = _rows(4, 9, torch.bfloat16)
    assert torch.equal(
        expand(packets[:, :6], index, torch.float32), expand(packets[:, :6].float().contiguous(), index, torch.float32)
    )
    wide = torch.full((4, 9), 7.0, dtype=torch.bfloat16)
    reduce(_rows(index.num_grouped), index, None, wide[:, :6])
    narrow = torch.empty(4, 6)
    reduce(_rows(index.num_grouped), index, None, narrow)
    assert torch.equal(wide[:, :6], narrow.bfloat16())
    assert (wide[:, 6:] == 7).all()


def test_sum_bags_ignores_columns_behind_the_row() -> None:
    rows_SD = _rows(4, 9)
    rows_SD[:, 6:] = NAN
    out = torch.empty(2, 6)
    sum_bags(rows_SD, torch.tensor([3, 0, 1]), torch.tensor([0, 2, 3]), None, out)
    torch.testing.assert_close(out, torch.stack((rows_SD[3, :6] + rows_SD[0, :6], rows_SD[1, :6])))


@pytest.mark.parametrize("rows_dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("weights_dtype", [torch.float64, torch.float32])
def test_experts_may_return_another_dtype_than_the_weights(rows_dtype: torch.dtype, weights_dtype: torch.dtype) -> None:
    index = EXAMPLE.index
    partners_RD, weights_R = _rows(index.num_grouped, dtype=rows_dtype), torch.rand(index.num_grouped).to(weights_dtype)
    grad_RD, dots_R = expand_weighted(_rows(4, dtype=rows_dtype), index, weights_R, partners_RD, rows_dtype)
    assert dots_R is not None
    assert (grad_RD.dtype, dots_R.dtype) == (rows_dtype, weights_dtype)


@pytest.mark.parametrize(("value", "multiple", "expected"), [(0, 16, 0), (1, 16, 16), (16, 16, 16), (17, 16, 32)])
def test_round_up(value: int, multiple: int, expected: int) -> None:
    assert round_up(value, multiple) == expected
