"""Sums of rows in torch where the number of terms is known to the device only."""

from __future__ import annotations

from typing import final

import torch
from torch import Tensor

from moe_dispatch.permutation.bags import bag, dtype_of_sums, fits_bag
from moe_dispatch.permutation.blocks import blocks_of, row_blocks
from moe_dispatch.permutation.index import SlotIndex, running_total
from moe_dispatch.permutation.rows import TorchPermutation
from moe_dispatch.permutation.static_index import front

_TAIL_BAGS = 256
_CONVERTED_BYTES = 24 << 20


@final
class StaticTorchPermutation(TorchPermutation):
    """``TorchPermutation`` for a ``StaticIndex``: its sums end where ``cu_S`` says, read by nobody but the device."""

    @staticmethod
    def reduce(rows_RD: Tensor, index: SlotIndex, weights_R: Tensor | None, out: Tensor) -> None:
        """As ``Permutation.reduce``."""
        weights_N = None if weights_R is None else weights_R.index_select(0, index.byrow_N)
        StaticTorchPermutation.sum_bags(rows_RD, index.byrow_N, index.cu_S, weights_N, out)

    @staticmethod
    def sum_bags(rows: Tensor, members_N: Tensor, cu_S: Tensor, weights_N: Tensor | None, out: Tensor) -> None:
        """As ``Permutation.sum_bags``, in blocks of bags; N is S times the most members that a bag can have.

        Members behind the last edge are not summed, and must be valid all the same.
        """
        if _goes_directly(rows, weights_N, out):
            _sum_blocks(rows, members_N, cu_S, weights_N, out)
            return
        # Converted by columns, once each: windows of members would be converted again and again, with all that is dead.
        for columns in blocks_of(out.shape[1], len(rows), limit=_CONVERTED_BYTES):
            wide = rows[:, columns].to(dtype_of_sums(rows, out)).contiguous()
            _sum_blocks(wide, members_N, cu_S, weights_N, out[:, columns])


def _goes_directly(rows: Tensor, weights_N: Tensor | None, out: Tensor) -> bool:
    in_parts = rows.dtype == out.dtype == torch.bfloat16
    return rows.stride(1) == 1 and (in_parts or fits_bag(rows, weights_N, out))


def _sum_blocks(rows: Tensor, members_N: Tensor, cu_S: Tensor, weights_N: Tensor | None, out: Tensor) -> None:
    for block in row_blocks(out):
        members, edges, weights = _window(members_N, cu_S, weights_N, block)
        if weights is not None and rows.dtype == torch.bfloat16:
            members, edges, weights = in_bfloat16_parts(members, edges, weights)
        out[block].copy_(_bags(rows, members, edges, weights)[:, : out.shape[1]])


def _window(
    members_N: Tensor, cu_S: Tensor, weights_N: Tensor | None, block: slice
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Members of some bags, their edges and weights; as many as there can be, since only the device knows how many."""
    count, bags = len(members_N), len(cu_S) - 1
    if block.stop - block.start == bags:
        return members_N, cu_S, weights_N
    begin = cu_S[block.start]
    most = (block.stop - block.start) * (count // bags)
    at = (torch.arange(most, device=cu_S.device) + begin).clamp_(max=count - 1)
    weights = None if weights_N is None else weights_N.index_select(0, at)
    return members_N.index_select(0, at), cu_S[block.start : block.stop + 1] - begin, weights


def _bags(rows: Tensor, members_N: Tensor, cu_S: Tensor, weights_N: Tensor | None) -> Tensor:
    if rows.device.type == "cpu" and rows.dtype in (torch.float32, torch.bfloat16):
        return bag(rows, members_N, cu_S, weights_N)  # the fast path, for rows without strides of their own
    # Elsewhere the last bag reaches to the last member, whatever its edge says. So bags of nobody take the tail: many,
    # because a GPU adds up one bag in sequence.
    count = len(members_N)
    steps = torch.arange(1, _TAIL_BAGS + 1, device=cu_S.device) * -(-count // _TAIL_BAGS)
    edges = torch.cat([cu_S, (cu_S[-1] + steps).clamp(max=count)])
    return bag(rows, members_N, edges, weights_N)[: len(cu_S) - 1]


def in_bfloat16_parts(members_N: Tensor, cu_S: Tensor, weights_N: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The same sums with bfloat16 weights: each is cut into its leading, middle and last 8 bits, which add up exactly.

    A row is listed once for each part that is not 0, and at least once: 0 times an infinite row would be NaN. All parts
    have the sign of their weight, so infinite terms agree.

    Returns:
        Members int64 (3N,), edges (S+1,), weights bfloat16 (3N,).
    """
    high_N = _cut(weights_N.float())
    rest_N = torch.where(weights_N.isfinite(), weights_N.float() - high_N, 0)
    middle_N = _cut(rest_N)
    parts = torch.stack([high_N, middle_N, rest_N - middle_N], 1)
    kept = parts != 0
    kept[:, 0] = True
    edges = running_total(kept.sum(1)).index_select(0, cu_S)
    members = members_N.repeat_interleave(3)
    return front(members, kept.view(-1)), edges, front(parts.view(-1), kept.view(-1)).bfloat16()


def _cut(values: Tensor) -> Tensor:
    """float32 numbers cut, not rounded, to the 8 bits of a bfloat16 mantissa."""
    return (values.view(torch.int32) & -(1 << 16)).view(torch.float32)
