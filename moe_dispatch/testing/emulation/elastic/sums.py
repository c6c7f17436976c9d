"""How v2 adds up rows, and picks weights."""

from __future__ import annotations

import torch
from torch import Tensor

from moe_dispatch.testing.emulation.elastic.routes import masters


def reduced(rows: Tensor, valid: Tensor, biases: list[Tensor]) -> Tensor:
    """bfloat16 (T, D): the biases, then the rows of (T, N, D) in the order of dim 1, where ``valid`` (T, N) says so.

    The kernel adds up to two rows without a bias in bfloat16, and all else in float32, rounded once
    (deep_ep/include/deep_ep/impls/combine_utils.cuh:67-70 of v2). Two rows give the same number either way.
    """
    total = torch.zeros(rows.shape[0], rows.shape[2])
    for addend in [*biases, *torch.where(valid[:, :, None], rows, 0).unbind(1)]:
        total += addend.float()
    return total.bfloat16()


def combined_weights(received: Tensor, owner: Tensor) -> Tensor:
    """float32 (T, K): for each choice the weight that its rank sent; nothing is added up.

    ``received`` (T, K, K) holds at [t, m] the weights sent by the rank whose master choice m is.
    Source: deep_ep/include/deep_ep/impls/combine_reduce_epilogue.cuh:128-139 of v2.
    """
    if owner.numel() == 0:
        return torch.zeros(owner.shape)
    leads = masters(owner)
    is_master_of = (owner[:, :, None] == owner[:, None, :]) & leads[:, None, :]
    master = is_master_of.int().argmax(2)
    by_choice = received.gather(1, master[:, :, None].expand_as(received)).diagonal(dim1=1, dim2=2)
    return torch.where(owner >= 0, by_choice, 0.0)
