"""The sequence and the position of every row, against batches that are written out token by token."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from moe_dispatch.errors import LayoutError
from moe_dispatch.layouts import BSHD, SBHD, THD, Layout, Masked, Rows
from tests.layouts.written_batches import Batch, assemble, batches, build, on_device, zigzag

FORMS = ("BSHD", "SBHD", "THD")


def written_positions(batch: Batch) -> list[Tensor]:
    """(owned, 2) for each sequence: its number and the position, or -1 twice."""
    return [
        torch.tensor([[i, p] if p < real else [-1, -1] for p in range(rows)]).view(rows, 2)
        for i, (real, rows) in enumerate(zip(batch.lengths, batch.owned, strict=False))
    ]


@given(st.data(), st.sampled_from(FORMS), st.integers(1, 3), st.integers(1, 3))
def test_positions_of_every_part(data: Any, form: str, cp: int, tp: int) -> None:
    batch = data.draw(batches(equal=form != "THD", multiple=2 * cp * tp))
    for cp_rank in range(cp):
        parts = [zigzag(one, cp_rank, cp) if cp > 1 else one for one in written_positions(batch)]
        x = assemble(form, parts)
        layout = build(form, batch).shard(cp_rank, cp, "zigzag")
        dim = 1 if form == "BSHD" else 0
        for tp_rank in range(tp):
            part = x.narrow(dim, tp_rank * (x.shape[dim] // tp), x.shape[dim] // tp)
            found = layout.shard(tp_rank, tp).positions(part.shape)
            assert found.dtype == torch.int64
            assert torch.equal(found.t(), part.reshape(-1, 2))


@pytest.mark.parametrize(
    ("layout", "shape", "sequences", "positions"),
    [
        (BSHD(), (2, 3, 1), [0, 0, 0, 1, 1, 1], [0, 1, 2, 0, 1, 2]),
        (SBHD(), (3, 2, 1), [0, 1, 0, 1, 0, 1], [0, 0, 1, 1, 2, 2]),
        (BSHD().shard(1, 2, "zigzag"), (1, 4, 1), [0, 0, 0, 0], [2, 3, 4, 5]),
        (THD([0, 1, 3]), (3, 1, 4), [0, 1, 1], [0, 0, 1]),
        (THD([0, 2, 3], [0, 3, 3 + 1]), (1, 4, 4), [0, 0, -1, 1], [0, 1, -1, 0]),
        (Rows(), (4, 1), [0, 0, 0, 0], [0, 1, 2, 3]),
        (Rows(3), (2, 2, 1), [0, 0, 1, -1], [0, 1, 0, -1]),
        (Rows().shard(1, 2), (2, 1), [0, 0], [2, 3]),
        (Masked(torch.tensor([0, 1, 1, 1, 0, 1]).bool()), (2, 3, 1), [-1, 0, 0, 1, -1, 1], [-1, 0, 1, 0, -1, 1]),
        (Masked(torch.tensor([0, 1, 1, 1]).bool()).shard(1, 2), (2, 1), [0, 0], [1, 2]),
        (THD([0]), (0, 1), [], []),
        (Masked(torch.zeros(0).bool()), (0, 3, 1), [], []),
    ],
)
def test_positions_written_out(
    layout: Layout, shape: tuple[int, ...], sequences: list[int], positions: list[int]
) -> None:
    assert layout.positions(shape).tolist() == [sequences, positions]
    assert layout.num_sequences(shape) >= len(set(sequences) - {-1})


@pytest.mark.parametrize(
    ("layout", "shape", "count"),
    [
        (BSHD([0, 0]), (2, 4, 1), 2),
        (SBHD().shard(0, 2), (2, 5, 1), 5),
        (THD([0, 0, 0]), (0, 1), 2),
        (Masked(torch.zeros(6).bool()), (2, 3, 1), 2),
        (Masked(torch.zeros(6).bool()), (6, 1), 1),
    ],
)
def test_sequences_without_tokens_count(layout: Layout, shape: tuple[int, ...], count: int) -> None:
    assert layout.num_sequences(shape) == count


def test_positions_on_a_device_are_not_read() -> None:
    batch = Batch(lengths=[3, 8], owned=[4, 8])
    with on_device():
        found = build("THD", batch).shard(1, 2, "zigzag").positions((6, 1))
    assert found.tolist() == [[0, 0, 1, 1, 1, 1], [1, 2, 2, 3, 4, 5]]


def test_positions_of_another_shape() -> None:
    with pytest.raises(LayoutError, match=r"BSHD: x must hold one sequence per length, got \[B, S, D\] = \(3, "):
        BSHD([1, 2]).positions((3, 4, 1))
