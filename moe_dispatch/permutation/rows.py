"""Moving the rows of a one-rank reorder: the plain torch implementation, and the reference for every other.

Each function is one pass over its rows, documented at the method of ``Permutation`` that it is. On the CPU the passes
run in blocks that stay in the cache, and write into memory the caller already has: clearing the pages of fresh memory
costs several times the copy itself.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from moe_dispatch.permutation.bags import sum_bags
from moe_dispatch.permutation.base import Permutation
from moe_dispatch.permutation.blocks import accumulation_dtype, row_blocks
from moe_dispatch.permutation.index import SlotIndex
from moe_dispatch.probing import Rejected, Usable

Empty = Callable[..., Tensor]  # sizes, ``dtype`` and ``device``, as torch.empty takes them
_WORDS = (torch.int64, torch.int32, torch.int16)


def gather(rows: Tensor, source: Tensor, out: Tensor) -> None:
    """``out[i] = rows[source[i]]``, converting where the dtypes differ."""
    if rows.dtype == out.dtype and rows.device.type != "cpu":
        rows, out = as_words(rows, out)
    if rows.dtype == out.dtype and out.is_contiguous():
        torch.index_select(rows, 0, source, out=out)
    else:
        out.copy_(rows.index_select(0, source))


def expand(rows_SD: Tensor, index: SlotIndex, dtype: torch.dtype, empty: Empty = torch.empty) -> Tensor:
    """Copy each row to all its grouped positions: (R, D), zero on padding, in memory from ``empty``."""
    buffer, out = _grouped(index, rows_SD.shape[1], dtype=dtype, device=rows_SD.device, empty=empty)
    if rows_SD.dtype == dtype:
        gather(rows_SD, index.source_R, out)
    else:  # converted on the way, so in blocks
        for block in row_blocks(out):
            gather(rows_SD, index.source_R[block], out[block])
    return _trimmed(buffer, index)


def expand_weighted(
    rows_SD: Tensor,
    index: SlotIndex,
    weights_R: Tensor | None,
    partners_RD: Tensor | None,
    dtype: torch.dtype,
    empty: Empty = torch.empty,
) -> tuple[Tensor, Tensor | None]:
    """The backward of ``reduce``: gradients of the grouped rows and, where partners are given, of their weights."""
    if weights_R is None:
        return expand(rows_SD, index, dtype, empty), None
    accumulate = accumulation_dtype(dtype)
    weights = weights_R.to(accumulate).unsqueeze(1)
    grouped = partial(_grouped, index, device=rows_SD.device, empty=empty)
    buffer, out = grouped(rows_SD.shape[1], dtype=dtype)
    all_dots, dots = (None, None) if partners_RD is None else grouped(dtype=accumulate)
    blocks = row_blocks(out)
    most = blocks[0].stop if blocks else 0
    # The same scratch in every block: fresh temporaries of this size may each cost more than what is computed in them.
    narrow, wide, products = (
        out.new_empty(most, out.shape[1], dtype=each) for each in (rows_SD.dtype, *[accumulate] * 2)
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
    return _trimmed(buffer, index), None if all_dots is None else _trimmed(all_dots, index).to(weights_R.dtype)


def _grouped(
    index: SlotIndex, *width: int, dtype: torch.dtype, device: torch.device, empty: Empty
) -> tuple[Tensor, Tensor]:
    """Memory for grouped rows with what the index needs to spare, and the (R, ...) of it that are rows."""
    buffer = empty(index.num_grouped + index.spare, *width, dtype=dtype, device=device)
    return buffer, buffer[: index.num_grouped] if index.spare else buffer


def reduce(rows_RD: Tensor, index: SlotIndex, weights_R: Tensor | None, out: Tensor) -> None:
    """``out[s]`` = the sum of the grouped rows of row s, in slot order, each times its weight."""
    weights_N = None if weights_R is None else weights_R.index_select(0, index.byrow_N)
    # Rows that require grad would make embedding_bag prepare its own backward.
    sum_bags(rows_RD.detach(), index.byrow_N, index.cu_S, weights_N, out)


def as_words(rows: Tensor, out: Tensor) -> tuple[Tensor, Tensor]:
    """Both as the widest integers that their row bytes and strides allow: a GPU copies bytes one thread each."""
    for word in _WORDS:
        if all(_is_made_of(tensor, word.itemsize) for tensor in (rows, out)):
            return rows.view(word), out.view(word)
    return rows, out


def _is_made_of(rows: Tensor, nbytes: int) -> bool:
    size = rows.element_size()
    counts = (rows.shape[1], rows.stride(0), rows.storage_offset())
    return rows.stride(1) == 1 and size <= nbytes and all(count * size % nbytes == 0 for count in counts)


def _trimmed(buffer: Tensor, index: SlotIndex) -> Tensor:
    """The rows, zero on padding: cut off in place, because what is given out must be no view; it may be written to."""
    _clear_padding(buffer, index)
    return buffer.resize_(index.num_grouped, *buffer.shape[1:]) if index.spare else buffer


def _clear_padding(buffer: Tensor, index: SlotIndex) -> Tensor:
    return buffer if index.padding is None else buffer.index_fill_(0, index.padding, 0)


class TorchPermutation(Permutation):
    """The functions of this module, on any device.

    Args:
        empty: gives memory for grouped rows, as ``torch.empty`` does.
    """

    name = "torch"
    gather = staticmethod(gather)
    reduce = staticmethod(reduce)
    sum_bags = staticmethod(sum_bags)

    def __init__(self, empty: Empty = torch.empty) -> None:
        self._empty = empty

    def expand(self, rows_SD: Tensor, index: SlotIndex, dtype: torch.dtype) -> Tensor:
        return expand(rows_SD, index, dtype, self._empty)

    def expand_weighted(
        self,
        rows_SD: Tensor,
        index: SlotIndex,
        weights_R: Tensor | None,
        partners_RD: Tensor | None,
        dtype: torch.dtype,
    ) -> tuple[Tensor, Tensor | None]:
        return expand_weighted(rows_SD, index, weights_R, partners_RD, dtype, self._empty)

    @classmethod
    def probe(cls, device_type: str) -> Usable | Rejected:
        return Usable(version=torch.__version__)
