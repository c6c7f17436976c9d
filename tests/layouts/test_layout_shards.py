"""Parts of a layout under context and sequence parallelism, against slicing each sequence by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from moe_dispatch.errors import LayoutError
from moe_dispatch.layouts import (
    BSHD,
    SBHD,
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


def check_part(layout: Layout, x: Tensor) -> None:
    tokens = layout.flatten(x)[:, 0]
    layout.check(len(tokens), values=True)
    valid = layout.valid_T(len(tokens))
    assert layout.num_rows(x.shape) == len(tokens)
    assert layout.num_rows() in (None, len(tokens))
    assert valid is not None
    assert torch.equal(valid, tokens >= 0)
    assert layout.num_real(len(tokens)) == int((tokens >= 0).sum())
    assert torch.equal(layout.unflatten(layout.flatten(x), x), x)


@given(st.data(), st.sampled_from(FORMS), st.integers(1, 3), st.integers(1, 3))
def test_context_parallel_then_sequence_parallel(data: Any, form: str, cp: int, tp: int) -> None:
    batch = data.draw(batches(equal=form != "THD", multiple=2 * cp * tp))
    layout = build(form, batch)
    for cp_rank in range(cp):
        x = assemble(form, [zigzag(sequence, cp_rank, cp) if cp > 1 else sequence for sequence in batch.sequences()])
        part = layout.shard(cp_rank, cp, "zigzag")
        check_part(part, x)
        for tp_rank in range(tp):
            check_part(part.shard(tp_rank, tp), sequence_parallel(form, x, tp_rank, tp))


@given(st.data(), st.sampled_from(FORMS), st.integers(2, 4))
def test_contiguous_parts(data: Any, form: str, size: int) -> None:
    batch = data.draw(batches(equal=form != "THD", multiple=size))
    x = assemble(form, batch.sequences())
    for index in range(size):
        check_part(build(form, batch).shard(index, size), sequence_parallel(form, x, index, size))


def test_packed_parts_may_cut_through_sequences() -> None:
    layout = THD([0, 3, 4, 6], [0, 4, 5, 8])
    masks = [layout.shard(index, 4).valid_T(2).tolist() for index in range(4)]  # type: ignore[union-attr]
    assert masks == [[True, True], [True, False], [True, True], [True, False]]


def test_parts_of_a_mask() -> None:
    layout = Masked(torch.tensor([1, 0, 0, 1, 1, 1]).bool())
    assert [layout.shard(index, 3).valid_T(2).tolist() for index in range(3)] == [  # type: ignore[union-attr]
        [True, False],
        [False, True],
        [True, True],
    ]
    assert [layout.shard(index, 3).num_real(2) for index in range(3)] == [1, 1, 2]


def test_parts_of_rows() -> None:
    assert [Rows(3).shard(index, 3).num_real(2) for index in range(3)] == [2, 1, 0]


@pytest.mark.parametrize("layout", [BSHD([2]), THD([0, 2]), Rows()])
def test_one_rank_holds_the_whole(layout: Layout) -> None:
    assert layout.shard(0, 1) is layout


@given(st.data(), st.sampled_from(FORMS))
def test_parts_of_lengths_on_a_device_are_not_read(data: Any, form: str) -> None:
    batch = data.draw(batches(equal=form != "THD", multiple=8))
    x = assemble(form, [zigzag(sequence, 1, 2) for sequence in batch.sequences()])
    local = sequence_parallel(form, x, 1, 2)
    with on_device():
        layout = build(form, batch).shard(1, 2, "zigzag").shard(1, 2)
        rows = layout.num_rows(local.shape)
        assert rows is not None
        layout.check(rows)
        valid = layout.valid_T(rows)
    assert valid is not None
    assert torch.equal(valid, local.reshape(-1) >= 0)


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
    assert torch.equal(unshard_from_context_parallel(parts, layout, kind), x)


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


def test_dividing_lengths_on_a_device_does_not_read_them() -> None:
    batch = Batch(lengths=[3, 8], owned=[4, 8])
    x = assemble("THD", batch.sequences())
    with on_device():
        layout = build("THD", batch)
        parts = [shard_for_context_parallel(x, layout, index, 2) for index in range(2)]
        joined = unshard_from_context_parallel(parts, layout)
    assert torch.equal(joined, x)


def test_dividing_refuses_what_does_not_divide() -> None:
    with pytest.raises(LayoutError, match=r"S \(6\) must be divisible by 4 to be split zigzag over 2 ranks"):
        shard_for_context_parallel(torch.zeros(1, 6, 2), BSHD(), 0, 2)
    with pytest.raises(LayoutError, match=r"the rows of sequence 1 \(6\) must be divisible by 4"):
        shard_for_context_parallel(torch.zeros(14, 2), THD([0, 8, 14]), 0, 2)
    with pytest.raises(LayoutError, match=r"the rows \(14\) must be divisible by 4"):
        shard_for_context_parallel(torch.zeros(14, 2), THD([0, 8, 14]), 0, 4, "contiguous")
    with pytest.raises(LayoutError, match="must not decrease"):
        shard_for_context_parallel(torch.zeros(8, 2), THD([0, 12, 8]), 0, 2)


@pytest.mark.parametrize("shapes", [[], [(2, 2, 3), (2, 4, 3)]])
def test_joining_refuses_parts_of_different_shapes(shapes: list[tuple[int, ...]]) -> None:
    with pytest.raises(LayoutError, match="shards must be tensors of one shape, got shapes"):
        unshard_from_context_parallel([torch.zeros(shape) for shape in shapes], SBHD())
