"""Parts of a layout under context and sequence parallelism, against slicing each sequence by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from moe_dispatch.layouts import (
    BSHD,
    THD,
    Layout,
    Masked,
    Rows,
    shard_for_context_parallel,
    unshard_from_context_parallel,
)
from tests.layouts.written_batches import Batch, assemble, batches, build, on_device, zigzag

FORMS = ("BSHD", "SBHD", "THD")


def sequence_parallel(form: str, x: Tensor, index: int, size: int) -> Tensor:
    """A contiguous part along the dimension that Megatron divides, by slicing."""
    dim = 1 if form == "BSHD" else 0
    part = x.shape[dim] // size
    return x.narrow(dim, index * part, part)


def written_positions(batch: Batch) -> list[Tensor]:
    """(owned, 2) for each sequence: its number and the position, or -1 twice."""
    return [
        torch.tensor([[i, p] if p < real else [-1, -1] for p in range(rows)]).view(rows, 2)
        for i, (real, rows) in enumerate(zip(batch.lengths, batch.owned, strict=False))
    ]


def check_part(layout: Layout, x: Tensor) -> None:
    """The layout says of each row of ``x`` whether it holds a token, and takes rows out of ``x`` and back."""
    tokens = layout.flatten(x)[:, 0]
    rows, is_token = len(tokens), tokens >= 0
    layout.check(rows, values=True)
    valid, real = layout.valid_T(rows, "cpu"), layout.real_rows(rows)
    assert layout.num_rows(x.shape) == rows
    assert layout.num_rows() in (None, rows)
    assert valid is not None
    assert torch.equal(valid, is_token)
    assert layout.num_real(rows) == int(is_token.sum())
    if real is None:
        assert is_token.all()
    else:
        assert torch.equal(real, is_token.nonzero()[:, 0])
    back = layout.unflatten(layout.flatten(x).expand(-1, 2), x.shape)
    assert torch.equal(back, x.expand(*x.shape[:-1], 2))


def check_on_device(make: Callable[[], Layout], x: Tensor, positions: Tensor) -> None:
    """A layout with lengths on a device knows its rows, its mask and its positions without a look at them."""
    with on_device():
        layout = make()
        rows = layout.num_rows(x.shape)
        assert rows is not None
        assert not layout.on_host
        layout.check(rows)
        assert layout.num_real(rows) is None
        valid, found = layout.valid_T(rows), layout.positions(x.shape)
    assert valid is not None
    assert torch.equal(valid, x.reshape(-1) >= 0)
    assert found.dtype == torch.int64
    assert torch.equal(found.t(), positions.reshape(-1, 2))


@given(st.data(), st.sampled_from(FORMS), st.sampled_from([torch.int32, torch.int64]))
def test_context_parallel_then_sequence_parallel(data: Any, form: str, dtype: torch.dtype) -> None:
    """Also the whole batch, as the only part."""
    cp, tp = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 3))
    batch = data.draw(batches(equal=form != "THD", multiple=2 * cp * tp))
    layout = build(form, batch, dtype)
    assert layout.num_real(None) == batch.num_real
    for cp_rank in range(cp):
        x, positions = (
            assemble(form, [zigzag(one, cp_rank, cp) if cp > 1 else one for one in sequences])
            for sequences in (batch.sequences(), written_positions(batch))
        )
        part = layout.shard(cp_rank, cp, "zigzag")
        check_part(part, x)
        for tp_rank in range(tp):
            own_x, own_positions = (sequence_parallel(form, whole, tp_rank, tp) for whole in (x, positions))
            own = part.shard(tp_rank, tp)
            check_part(own, own_x)
            assert torch.equal(own.positions(own_x.shape).t(), own_positions.reshape(-1, 2))
        check_on_device(
            lambda cp_rank=cp_rank: build(form, batch).shard(cp_rank, cp, "zigzag").shard(tp - 1, tp),  # type: ignore[misc]
            own_x,
            own_positions,
        )


def test_packed_parts_may_cut_through_sequences() -> None:
    layout = THD([0, 3, 4, 6], [0, 4, 5, 8])
    masks = [layout.shard(index, 4).valid_T(2).tolist() for index in range(4)]  # type: ignore[union-attr]
    assert masks == [[True, True], [True, False], [True, True], [True, False]]


def test_parts_of_masks_and_rows() -> None:
    layout = Masked(torch.tensor([1, 0, 0, 1, 1, 1]).bool())
    parts = [layout.shard(index, 3) for index in range(3)]
    assert [part.valid_T(2).tolist() for part in parts] == [[True, False], [False, True], [True, True]]  # type: ignore[union-attr]
    assert [part.num_real(2) for part in parts] == [1, 1, 2]
    assert [Rows(3).shard(index, 3).num_real(2) for index in range(3)] == [2, 1, 0]


@pytest.mark.parametrize("layout", [BSHD([2]), THD([0, 2]), Rows()])
def test_one_rank_holds_the_whole(layout: Layout) -> None:
    assert layout.shard(0, 1) is layout


@given(st.data(), st.sampled_from(FORMS), st.sampled_from(["zigzag", "contiguous"]), st.integers(1, 3))
def test_dividing_and_joining_a_tensor(data: Any, form: str, kind: Any, size: int) -> None:
    batch = data.draw(batches(equal=form != "THD", multiple=2 * size))
    layout, x = build(form, batch), assemble(form, batch.sequences())
    parts = [shard_for_context_parallel(x, layout, index, size, kind) for index in range(size)]
    for index, part in enumerate(parts):
        if kind == "zigzag" and size > 1:
            assert torch.equal(part, assemble(form, [zigzag(sequence, index, size) for sequence in batch.sequences()]))
        else:
            assert torch.equal(part, sequence_parallel(form, x, index, size))
        check_part(layout.shard(index, size, kind), part)
    with on_device():
        layout = build(form, batch)  # whose lengths are not read
        parts = [shard_for_context_parallel(x, layout, index, size, kind) for index in range(size)]
        joined = unshard_from_context_parallel(parts, layout, kind)
    assert torch.equal(joined, x)


@pytest.mark.parametrize("shape", [(8, 3), (1, 8, 3), (8, 1, 3)])
def test_packed_tensors_keep_their_form(shape: tuple[int, ...]) -> None:
    x, layout = torch.randn(shape), THD([0, 4, 8])
    parts = [shard_for_context_parallel(x, layout, index, 2) for index in range(2)]
    assert parts[0].shape == tuple(4 if length == 8 else length for length in shape)
    assert torch.equal(unshard_from_context_parallel(parts, layout), x)


def test_gradients_of_dividing_and_joining() -> None:
    layout = BSHD(torch.tensor([3, 4]))
    x = torch.randn(2, 4, 2, dtype=torch.float64, requires_grad=True)
    torch.autograd.gradcheck(lambda x: shard_for_context_parallel(x, layout, 1, 2), x)
    torch.autograd.gradgradcheck(lambda x: shard_for_context_parallel(x, layout, 1, 2).square(), x)
    parts = torch.randn(2, 2, 2, 2, dtype=torch.float64, requires_grad=True)
    torch.autograd.gradcheck(lambda parts: unshard_from_context_parallel(list(parts), layout), parts)
