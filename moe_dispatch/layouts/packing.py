"""Packed rows as a padded batch and back, for layers whose kernels reject packed input."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from moe_dispatch.errors import LayoutError
from moe_dispatch.layouts.base import is_host
from moe_dispatch.layouts.gather import gather_rows
from moe_dispatch.layouts.thd import THD, locate

CuSeqlens = Tensor | Sequence[int]


def thd_to_bshd(
    x: Tensor, cu_seqlens: CuSeqlens, *, max_seqlen: int | None = None, cu_seqlens_padded: CuSeqlens | None = None
) -> Tensor:
    """Packed sequences as a batch padded with zeros at the end of each.

    Args:
        x: (T, ...), sequences one after another.
        cu_seqlens: int32 or int64 (B+1,), or a list: where sequences begin and end.
        max_seqlen: S of the result; the longest sequence when omitted, which needs ``cu_seqlens`` on the host.
        cu_seqlens_padded: where sequences begin and end with the gaps behind them, if there are any; rows in gaps are
            dropped.

    Returns:
        (B, S, ...), differentiable. ``BSHD(lengths)`` with the differences of ``cu_seqlens`` is its layout.

    Raises:
        LayoutError: ``cu_seqlens`` are malformed, do not end at T, or hold a sequence longer than ``max_seqlen``; or
            ``max_seqlen`` is missing and only a device knows it. Values on a device are not checked.

    Cost: one gather each way; no host sync.
    """
    layout = THD(cu_seqlens, cu_seqlens_padded, max_seqlen)
    layout.check(len(x))
    to_batch, to_packed = _indices(layout, len(x), _longest(layout), x.device)
    return gather_rows(x, to_batch.flatten(), to_packed).view(*to_batch.shape, *x.shape[1:])


def bshd_to_thd(
    x: Tensor, cu_seqlens: CuSeqlens, *, num_rows: int | None = None, cu_seqlens_padded: CuSeqlens | None = None
) -> Tensor:
    """The inverse of ``thd_to_bshd``: real positions of a padded batch, one sequence after another.

    Args:
        x: (B, S, ...); positions past a sequence's end are dropped and may hold anything.
        cu_seqlens: int32 or int64 (B+1,), or a list.
        num_rows: T of the result; the last of the cu_seqlens when omitted, which needs them on the host.
        cu_seqlens_padded: as ``thd_to_bshd`` takes it; gaps become zero.

    Returns:
        (T, ...), differentiable.

    Raises:
        LayoutError: ``cu_seqlens`` are malformed, do not describe B sequences of at most S, or do not end at
            ``num_rows``; or ``num_rows`` is missing and only a device knows it. Values on a device are not checked.

    Cost: one gather each way; no host sync.
    """
    if x.dim() < 2:
        raise LayoutError(f"bshd_to_thd: x must be (B, S, ...), got shape {tuple(x.shape)}. Keep the batch dimension.")
    layout = THD(cu_seqlens, cu_seqlens_padded, x.shape[1])
    rows = layout.known_rows() if num_rows is None else num_rows
    if rows is None:
        raise LayoutError(
            f"bshd_to_thd: num_rows must be given while cu_seqlens are on a device, got cu_seqlens on "
            f"{layout.owned.device}. Pass the T that the batch came from."
        )
    if len(layout.real) != len(x) + 1:
        raise LayoutError(
            f"bshd_to_thd: cu_seqlens must have B+1 entries, got {len(layout.real)} for B = {len(x)}. Pass those of "
            "this batch."
        )
    layout.check(rows)
    to_batch, to_packed = _indices(layout, rows, x.shape[1], x.device)
    return gather_rows(x.flatten(0, 1), to_packed, to_batch.flatten())


def _longest(layout: THD) -> int:
    if layout.max_seqlen is not None:
        return layout.max_seqlen
    if not is_host(layout.real):
        raise LayoutError(
            f"thd_to_bshd: max_seqlen must be given while cu_seqlens are on a device, got cu_seqlens on "
            f"{layout.real.device}. Pass the longest sequence, or a bound on it."
        )
    lengths = layout.real.diff()
    return int(lengths.max()) if len(lengths) else 0


def _indices(layout: THD, num_rows: int, max_seqlen: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """The packed row at each (B, S), and the position b * S + s of each of the (T,) packed rows; -1 for none."""
    lengths_B, starts_B = layout.real.diff(), layout.owned[:-1].to(torch.int64)
    positions_S = torch.arange(max_seqlen, device=starts_B.device)
    to_batch_BS = torch.where(positions_S < lengths_B[:, None], starts_B[:, None] + positions_S, -1)
    sequence_T, offset_T = locate(layout.owned, torch.arange(num_rows, device=starts_B.device))
    to_packed_T = torch.where(offset_T < lengths_B[sequence_T], sequence_T * max_seqlen + offset_T, -1)
    return to_batch_BS.to(device, non_blocking=True), to_packed_T.to(device, non_blocking=True)
