"""Packed rows as a padded batch and back."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moe_dispatch.errors import LayoutError
from moe_dispatch.layouts import BSHD, bshd_to_thd, thd_to_bshd
from tests.layouts.written_batches import Batch, assemble, batches, on_device, running_sums


@given(batches(equal=False), st.integers(0, 2), st.booleans())
def test_sequences_keep_their_tokens_and_come_back(batch: Batch, more: int, gaps: bool) -> None:
    if not gaps:
        batch = Batch(lengths=batch.lengths, owned=batch.lengths)
    cu, padded = running_sums(batch.lengths), running_sums(batch.owned) if gaps else None
    longest = max(batch.lengths) + more
    x = assemble("THD", batch.sequences())
    padded_x = torch.where(x < 0, torch.nan, x)  # what lies in gaps must never be read
    x_BS = thd_to_bshd(padded_x, cu, max_seqlen=longest, cu_seqlens_padded=padded)
    assert x_BS.shape == (len(batch.lengths), longest, 1)
    for row, start, length in zip(x_BS[..., 0], cu, batch.lengths, strict=False):
        assert row.tolist() == list(range(start, start + length)) + [0] * (longest - length)
    mask = BSHD(batch.lengths).valid_T(x_BS.shape[0] * longest)
    assert mask is not None
    poisoned = torch.where(mask.view(x_BS.shape), x_BS, torch.nan)
    back = bshd_to_thd(poisoned, cu, cu_seqlens_padded=padded)
    assert torch.equal(back, x.clamp(min=0))


def test_the_longest_sequence_is_the_default() -> None:
    assert thd_to_bshd(torch.zeros(5, 2, 3), [0, 1, 5]).shape == (2, 4, 2, 3)
    assert thd_to_bshd(torch.zeros(0, 2), [0]).shape == (0, 0, 2)
    assert torch.equal(thd_to_bshd(torch.zeros(0, 2), [0, 0, 0], max_seqlen=3), torch.zeros(2, 3, 2))


def test_gradients() -> None:
    cu, padded = [0, 3, 3, 5], [0, 4, 5, 7]
    x = torch.randn(7, 2, dtype=torch.float64, requires_grad=True)
    x_BS = torch.randn(3, 4, 2, dtype=torch.float64, requires_grad=True)
    torch.autograd.gradcheck(lambda x: thd_to_bshd(x, cu, max_seqlen=4, cu_seqlens_padded=padded), x)
    torch.autograd.gradcheck(lambda x: bshd_to_thd(x, cu, cu_seqlens_padded=padded), x_BS)
    rows, grad = torch.randn(5, 2, requires_grad=True), torch.full((2, 4, 2), torch.nan)
    grad[0, :1], grad[1, :4] = 1, 1
    thd_to_bshd(rows, [0, 1, 5]).backward(grad)  # gradients of padding are never read
    assert torch.equal(rows.grad, torch.ones(5, 2))  # type: ignore[arg-type]


def test_offsets_on_a_device_are_not_read() -> None:
    x = torch.randn(5, 2)
    expected = thd_to_bshd(x, [0, 1, 5])
    with on_device():
        x_BS = thd_to_bshd(x, torch.tensor([0, 1, 5]), max_seqlen=4)
        back = bshd_to_thd(x_BS, torch.tensor([0, 1, 5]), num_rows=5)
        with pytest.raises(LayoutError, match="thd_to_bshd: give max_seqlen, because cu_seqlens are on"):
            thd_to_bshd(x, torch.tensor([0, 1, 5]))
        with pytest.raises(LayoutError, match="bshd_to_thd: give num_rows, because cu_seqlens are on"):
            bshd_to_thd(x_BS, torch.tensor([0, 1, 5]))
    assert torch.equal(x_BS, expected)
    assert torch.equal(back, x)
