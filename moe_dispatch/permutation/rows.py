"""The one-rank reorder in plain torch: it runs on any device and is the reference for every other implementation.

On the CPU each pass works in blocks that stay in the cache. It writes to memory that the process already has if it can:
the system clears the pages of fresh memory, which takes several times as long as the copy itself.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import final

import torch
from torch import Tensor

from moe_dispatch.permutation.bags import row_blocks, sum_by_columns, sum_by_rows, sum_statically
from moe_dispatch.permutation.base import Permutation, accumulation_dtype
from moe_dispatch.permutation.index import SlotIndex
from moe_dispatch.probing import Rejected, Usable

_WORDS = (torch.int64, torch.int32, torch.int16)


@final
class TorchPermutation(Permutation):
    """The reorder in torch, on any device.

    Args:
        empty: Function that allocates grouped rows and scratch. It takes the arguments of ``torch.empty``.
        fixed_size: Whether all indices have a fixed size. If so, sums read no values from the device.
    """

    name = "torch"

    def __init__(self, empty: Callable[..., Tensor] = torch.empty, *, fixed_size: bool = False) -> None:
        self._empty = empty
        self._fixed_size = fixed_size

    @classmethod
    def probe(cls, device_type: str) -> Usable | Rejected:
        return Usable(version=torch.__version__)

    def gather(self, rows: Tensor, source: Tensor, out: Tensor) -> None:
        if rows.dtype == out.dtype and rows.device.type != "cpu":
            rows, out = as_words(rows, out)
        if rows.dtype == out.dtype and out.is_contiguous():
            torch.index_select(rows, 0, source, out=out)
        else:
            out.copy_(rows.index_select(0, source))

    def expand(self, rows_SD: Tensor, index: SlotIndex, dtype: torch.dtype) -> Tensor:
        buffer, out = self._grouped(index, rows_SD.shape[1], dtype=dtype, device=rows_SD.device)
        if rows_SD.dtype == dtype:
            self.gather(rows_SD, index.source_R, out)
        else:  # ``gather`` makes a temporary copy to convert the rows: blocks keep the copy small
            for block in row_blocks(out):
                self.gather(rows_SD, index.source_R[block], out[block])
        return clear_padding(buffer, index)

    def expand_weighted(
        self,
        rows_SD: Tensor,
        index: SlotIndex,
        weights_R: Tensor | None,
        partners_RD: Tensor | None,
        dtype: torch.dtype,
    ) -> tuple[Tensor, Tensor | None]:
        if weights_R is None:
            return self.expand(rows_SD, index, dtype), None
        accumulate, device = accumulation_dtype(dtype), rows_SD.device
        weights = weights_R.to(accumulate).unsqueeze(1)
        buffer, out = self._grouped(index, rows_SD.shape[1], dtype=dtype, device=device)
        all_dots, dots = None, None
        if partners_RD is not None:
            all_dots, dots = self._grouped(index, dtype=accumulate, device=device)
        blocks = row_blocks(out)
        most = blocks[0].stop if blocks else 0
        # All blocks share three scratch buffers. To allocate them anew for each block may take longer than the
        # arithmetic.
        narrow, wide, products = (
            self._empty(most, out.shape[1], dtype=each, device=device)
            for each in (rows_SD.dtype, accumulate, accumulate)
        )
        for block in blocks:
            count = block.stop - block.start
            gradient = torch.index_select(rows_SD, 0, index.source_R[block], out=narrow[:count])
            if gradient.dtype != accumulate:
                gradient = wide[:count].copy_(gradient)
            if dots is not None and partners_RD is not None:
                product, partners = products[:count], partners_RD[block]
                partners = partners if partners.dtype == accumulate else product.copy_(partners)
                torch.sum(torch.mul(gradient, partners, out=product), 1, out=dots[block])
            if dtype == accumulate:
                torch.mul(gradient, weights[block], out=out[block])
            else:
                out[block].copy_(gradient.mul_(weights[block]))
        rows_RD = clear_padding(buffer, index)
        return rows_RD, None if all_dots is None else clear_padding(all_dots, index).to(weights_R.dtype)

    def _grouped(
        self, index: SlotIndex, *width: int, dtype: torch.dtype, device: torch.device
    ) -> tuple[Tensor, Tensor]:
        """Allocate a buffer for grouped rows. Return the buffer and a view of its R rows.

        If the index has a fixed size, the buffer has a spare row behind the R rows.
        """
        buffer = self._empty(index.num_grouped + index.fixed_size, *width, dtype=dtype, device=device)
        return buffer, buffer[: index.num_grouped] if index.fixed_size else buffer

    def reduce(self, rows_RD: Tensor, index: SlotIndex, weights_R: Tensor | None, out: Tensor) -> None:
        weights_N = None if weights_R is None else weights_R.index_select(0, index.byrow_N)
        if rows_RD.requires_grad:  # embedding_bag would prepare a backward, which is not needed
            rows_RD = rows_RD.detach()
        self.sum_bags(rows_RD, index.byrow_N, index.cu_S, weights_N, out)

    def sum_bags(self, rows: Tensor, members_N: Tensor, cu_S: Tensor, weights_N: Tensor | None, out: Tensor) -> None:
        if self._fixed_size:
            sum_statically(rows, members_N, cu_S, weights_N, out)
        elif members_N.shape[0] == 0 or out.numel() == 0:
            out.zero_()
        elif out.is_cpu:
            sum_by_rows(rows, members_N, cu_S, weights_N, out)
        else:
            sum_by_columns(rows, members_N, cu_S, weights_N, out)


def clear_padding(buffer: Tensor, index: SlotIndex) -> Tensor:
    """Set the padding of grouped rows to zero. Remove the spare row if the index has a fixed size.

    ``resize_`` removes the row in place. A view without the row would not do: the caller may write to the result, and
    autograd forbids writing to a view that an autograd function returned.
    """
    if index.padding is not None:
        buffer.index_fill_(0, index.padding, 0)
    return buffer.resize_(index.num_grouped, *buffer.shape[1:]) if index.fixed_size else buffer


def as_words(rows: Tensor, out: Tensor) -> tuple[Tensor, Tensor]:
    """View both tensors as the widest integers that the sizes and strides of their rows allow.

    A GPU thread copies one number, so wide numbers are copied faster than bytes. For example, contiguous bfloat16 rows
    of 64 numbers become rows of 16 int64 numbers.
    """
    for word in _WORDS:
        if all(_consists_of(tensor, word.itemsize) for tensor in (rows, out)):
            return rows.view(word), out.view(word)
    return rows, out


def _consists_of(rows: Tensor, nbytes: int) -> bool:
    """Return whether every row is a whole number of aligned words of ``nbytes`` bytes."""
    size = rows.element_size()
    counts = (rows.shape[1], rows.stride(0), rows.storage_offset())
    return rows.stride(1) == 1 and size <= nbytes and all(count * size % nbytes == 0 for count in counts)
