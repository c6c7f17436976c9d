"""The one-rank reorder in plain torch: it runs on any device and is the reference for every other implementation.

On the CPU each pass works in blocks that stay in the cache. It writes to memory that the process already has if it can:
the system clears the pages of fresh memory, which takes several times as long as the copy itself.

A bag is the list of rows that are added up to one output row. With ``members_N`` = [2, 0, 3] and ``cu_S`` = [0, 2, 3]
there are two bags: ``out[0] = rows[2] * weights[0] + rows[0] * weights[1]`` and ``out[1] = rows[3] * weights[2]``.

``sum_by_rows``, ``sum_by_columns`` and ``sum_statically`` each compute ``Permutation.sum_bags``. They call
``torch.embedding_bag``, which gathers, multiplies and adds in one operation. If its rounding is not the rounding that
``Permutation`` promises, they first widen the rows: they convert them to the accumulation dtype.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from typing import final

import torch
from torch import Tensor

from moe_dispatch.permutation.base import Permutation
from moe_dispatch.permutation.index import SlotIndex, accumulation_dtype, front, running_total
from moe_dispatch.seams.plug_ins import Rejected, Usable

_WORDS = (torch.int64, torch.int32, torch.int16)
# Largest size of a block, counted in float32. On the CPU a block takes a share of one core's L2 cache, so it is read
# back before it is evicted. On a GPU the size limits temporary memory: a pass holds at most three blocks.
CPU_BLOCK_BYTES = 2 << 20
_GPU_BLOCK_BYTES = 256 << 20
_CONVERTED_BYTES = 24 << 20  # largest size of the rows that ``sum_statically`` has widened at a time
_TAIL_BAGS = 256  # number of bags that ``_with_tail`` appends


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
        spare = index.filled_R is not None  # an index of fixed size needs a spare row
        buffer = self._empty(index.num_grouped + spare, rows_SD.shape[1], dtype=dtype, device=rows_SD.device)
        out = buffer[: index.num_grouped] if spare else buffer
        if rows_SD.dtype == dtype:
            self.gather(rows_SD, index.source_R, out)
        else:  # ``gather`` makes a temporary copy to convert the rows: blocks keep the copy small
            for block in row_blocks(out):
                self.gather(rows_SD, index.source_R[block], out[block])
        return clear_padding(buffer, index) if spare or index.padding is not None else buffer

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
        length = index.num_grouped + (index.filled_R is not None)
        buffer = self._empty(length, rows_SD.shape[1], dtype=dtype, device=device)
        out, all_dots, dots = buffer[: index.num_grouped], None, None
        if partners_RD is not None:
            all_dots = self._empty(length, dtype=accumulate, device=device)
            dots = all_dots[: index.num_grouped]
        blocks = row_blocks(out)
        most = blocks[0].stop if blocks else 0
        # All blocks share three scratch buffers. To allocate them anew for each block may take longer than the
        # arithmetic.
        narrow = self._empty(most, out.shape[1], dtype=rows_SD.dtype, device=device)
        wide, products = self._empty(2, most, out.shape[1], dtype=accumulate, device=device).unbind()
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
        if length > index.num_grouped or index.padding is not None:
            buffer = clear_padding(buffer, index)
            all_dots = None if all_dots is None else clear_padding(all_dots, index)
        return buffer, None if all_dots is None else all_dots.to(weights_R.dtype)

    def weigh(
        self,
        rows_RD: Tensor,
        weights_R: Tensor,
        is_real: Callable[[], Tensor],
        dtype: torch.dtype,
        *,
        partners_RD: Tensor | None = None,
        clears: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        accumulate, device = accumulation_dtype(rows_RD.dtype, dtype), rows_RD.device
        out, dots_R = self._empty(*rows_RD.shape, dtype=dtype, device=device), None
        if partners_RD is not None:
            dots_R = self._empty(len(out), dtype=accumulate, device=device)
        for block in row_blocks(out):
            wide = rows_RD[block].to(accumulate)
            if dots_R is not None and partners_RD is not None:
                torch.linalg.vecdot(wide, partners_RD[block].to(accumulate), out=dots_R[block])
            out[block].copy_(wide * weights_R[block].to(accumulate).unsqueeze(1))
        if clears or dots_R is not None:
            # Padding may hold NaN, so its products are replaced by 0, not multiplied by 0.
            is_real_R = is_real()
            if dots_R is not None:
                dots_R = torch.where(is_real_R, dots_R, 0).to(weights_R.dtype)
            if clears:
                out.masked_fill_(~is_real_R.unsqueeze(1), 0)
        return out, dots_R

    def reduce(
        self,
        rows_RD: Tensor,
        index: SlotIndex,
        weights_R: Tensor | None,
        out: Tensor,
        values: tuple[Tensor, Tensor] | None = None,
    ) -> None:
        weights_N = None if weights_R is None else weights_R.index_select(0, index.byrow_N)
        if rows_RD.requires_grad:  # embedding_bag would prepare a backward, which is not needed
            rows_RD = rows_RD.detach()
        self.sum_bags(rows_RD, index.byrow_N, index.cu_S, weights_N, out)
        if values is not None:
            values[1].copy_(index.to_slots(values[0]))

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
    return buffer if index.filled_R is None else buffer.resize_(index.num_grouped, *buffer.shape[1:])


def as_words(rows: Tensor, out: Tensor) -> tuple[Tensor, Tensor]:
    """View both tensors as the widest integers that the sizes and strides of their rows allow.

    A GPU thread copies one number, so wide numbers are copied faster than bytes. For example, contiguous bfloat16 rows
    of 64 numbers become rows of 16 int64 numbers.
    """
    for word in _WORDS:
        if rows.itemsize <= word.itemsize and consists_of(rows, word.itemsize) and consists_of(out, word.itemsize):
            return rows.view(word), out.view(word)
    return rows, out


def consists_of(rows: Tensor, nbytes: int) -> bool:
    """Return whether every row is a whole number of aligned words of ``nbytes`` bytes."""
    size = rows.itemsize
    return (
        rows.stride(1) == 1
        and rows.shape[1] * size % nbytes == 0
        and rows.stride(0) * size % nbytes == 0
        and rows.storage_offset() * size % nbytes == 0
    )


def row_blocks(out: Tensor) -> list[slice]:
    """Cut the rows of ``out`` into blocks of the size that suits its device."""
    nbytes = CPU_BLOCK_BYTES if out.is_cpu else _GPU_BLOCK_BYTES
    if 4 * out.numel() <= nbytes:
        return [slice(0, out.shape[0])] if out.shape[0] else []
    return _blocks(out.shape[0], out.shape[1], nbytes)


def _blocks(length: int, width: int, nbytes: int) -> list[slice]:
    """Cut ``range(length)`` into slices of at most ``nbytes``; each index stands for ``width`` float32 numbers."""
    size = max(1, nbytes // (4 * max(1, width)))
    return [slice(begin, min(begin + size, length)) for begin in range(0, length, size)]


def sum_by_rows(rows: Tensor, members_N: Tensor, cu_S: Tensor, weights_N: Tensor | None, out: Tensor) -> None:
    """Sum in blocks of bags, for tensors on the CPU.

    The host reads where each block begins in ``members_N``. On a GPU this would be a host sync.
    """
    if 4 * out.numel() <= CPU_BLOCK_BYTES:
        _sum_block(rows, members_N, cu_S, weights_N, out)
        return
    blocks = row_blocks(out)
    edges = cu_S[torch.tensor([0, *(block.stop for block in blocks)], device="cpu")].tolist()
    for block, begin, end in zip(blocks, edges, edges[1:], strict=False):
        weights = None if weights_N is None else weights_N[begin:end]
        offsets = cu_S[block.start : block.stop + 1] - begin
        _sum_block(rows, members_N[begin:end], offsets, weights, out[block])


def _sum_block(rows: Tensor, members: Tensor, offsets: Tensor, weights: Tensor | None, out: Tensor) -> None:
    """Sum the bags of one block. This is the first of three ways that gives the promised rounding.

    1. Call ``embedding_bag`` on the rows as they are.
    2. Cut the weights into parts. This is for bfloat16 rows and sums with float32 weights: ``embedding_bag`` wants
       bfloat16 weights too. So each weight is written as the exact sum of three bfloat16 numbers, and its row is listed
       three times: member 7 of weight w becomes the members [7, 7, 7] of weights [high, middle, low]. Some routers
       produce weights that are bfloat16 numbers; then each row is listed once. An infinite row times a part that is 0
       is NaN, so sums that hold a NaN are computed again in the third way. Looking for a NaN takes 3% of the time.
    3. Widen the rows. Float16 needs this way: its range is too small for the parts of a weight.
    """
    if _fits_bag(rows.dtype, None if weights is None else weights.dtype, out.dtype):
        bag(rows, members, offsets, weights, out)
        return
    if weights is not None and rows.dtype == out.dtype == torch.bfloat16:
        high = weights.bfloat16()
        if weights.equal(high.float()):
            bag(rows, members, offsets, high, out)
            return
        rest = weights - high
        middle = rest.bfloat16()
        parts = torch.stack((high, middle, (rest - middle).bfloat16()), 1)  # 24 mantissa bits, 8 in each part
        bag(rows, torch.stack((members, members, members), 1).view(-1), offsets * 3, parts.view(-1), out)
        if not math.isnan(out.sum().item()):
            return
    wide = rows[:, : out.shape[1]].index_select(0, members).to(accumulation_dtype(rows.dtype, out.dtype))
    bag(wide, torch.arange(len(wide), device=wide.device), offsets, weights, out)


def sum_by_columns(rows: Tensor, members_N: Tensor, cu_S: Tensor, weights_N: Tensor | None, out: Tensor) -> None:
    """Sum in blocks of columns, for tensors on a GPU.

    Blocks of columns need no edges of bags on the host, so there is no host sync. Each column is summed by itself, so
    the blocks change no bit of the sums.
    """
    if (
        _fits_bag(rows.dtype, None if weights_N is None else weights_N.dtype, out.dtype) and rows.is_contiguous()
    ):  # embedding_bag would copy all strided rows
        bag(rows, members_N, cu_S, weights_N, out)
        return
    in_order = torch.arange(members_N.shape[0], device=members_N.device)
    for block in _blocks(out.shape[1], members_N.shape[0], CPU_BLOCK_BYTES if out.is_cpu else _GPU_BLOCK_BYTES):
        wide = rows[:, block].index_select(0, members_N).to(accumulation_dtype(rows.dtype, out.dtype))
        bag(wide, in_order, cu_S, weights_N, out[:, block])


def sum_statically(rows: Tensor, members_N: Tensor, cu_S: Tensor, weights_N: Tensor | None, out: Tensor) -> None:
    """Sum when only the device knows the number of members: no shape depends on the values of ``cu_S``.

    ``members_N`` has a fixed length: N is S times the size of the largest possible bag. The entries from ``cu_S[-1]``
    on belong to no bag. They are not summed, but they must be valid row numbers.
    """
    in_parts = rows.dtype == out.dtype == torch.bfloat16
    if rows.stride(1) == 1 and (
        in_parts or _fits_bag(rows.dtype, None if weights_N is None else weights_N.dtype, out.dtype)
    ):
        _sum_windows(rows, members_N, cu_S, weights_N, out)
        return
    # Widen all rows, some columns at a time, so that each number is converted once. Widening the members of each window
    # would convert a row again for each window that lists it, and would convert the unused entries of the window.
    for columns in _blocks(out.shape[1], len(rows), _CONVERTED_BYTES):
        wide = rows[:, columns].to(accumulation_dtype(rows.dtype, out.dtype)).contiguous()
        _sum_windows(wide, members_N, cu_S, weights_N, out[:, columns])


def _sum_windows(rows: Tensor, members_N: Tensor, cu_S: Tensor, weights_N: Tensor | None, out: Tensor) -> None:
    """Sum in blocks of bags. Each block reads a window of ``members_N`` in which its bags fit at their largest.

    If a bag has at most 8 members, a block of 100 bags reads the 800 entries from ``cu_S[block.start]`` on.
    """
    count, bags = len(members_N), len(cu_S) - 1
    for block in row_blocks(out):
        members, edges, weights = members_N, cu_S, weights_N
        if block.stop - block.start < bags:
            begin = cu_S[block.start]
            most = (block.stop - block.start) * (count // bags)
            at = (torch.arange(most, device=cu_S.device) + begin).clamp_(max=count - 1)
            members, edges = members_N.index_select(0, at), cu_S[block.start : block.stop + 1] - begin
            weights = None if weights_N is None else weights_N.index_select(0, at)
        if weights is not None and rows.dtype == torch.bfloat16:
            members, edges, weights = in_bfloat16_parts(members, edges, weights)
        if not (rows.is_cpu and rows.dtype in (torch.float32, torch.bfloat16)):
            edges = _with_tail(edges, len(members))
        bag(rows, members, edges, weights, out[block])


def _with_tail(edges: Tensor, num_members: int) -> Tensor:
    """Append bags for the members behind the last edge; ``bag`` discards the sums of these bags.

    Without them, embedding_bag would add these members to the last bag: except in its fast path on the CPU, it ignores
    the last edge. There are many such bags because a GPU adds the members of one bag one after another.
    """
    steps = torch.arange(1, _TAIL_BAGS + 1, device=edges.device) * -(-num_members // _TAIL_BAGS)
    return torch.cat([edges, (edges[-1] + steps).clamp(max=num_members)])


def in_bfloat16_parts(members_N: Tensor, cu_S: Tensor, weights_N: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Replace each float32 weight by one to three bfloat16 weights that add up to it exactly.

    The parts of a weight are the leading, the middle and the last 8 bits of its mantissa. The row of the weight is
    listed once for each part that is not 0, because 0 times an infinite row would be NaN. It is listed at least once.
    All parts have the sign of the weight, so the infinite terms of a row have one sign and do not add up to NaN.

    For example, 0.5 is a bfloat16 number, and 0.1 needs three parts. So the members [5, 2] with the edges [0, 2] and
    the weights [0.5, 0.1] become the members [5, 2, 2, 2, 0, 0] with the edges [0, 4].

    Returns:
        Members int64 (3N,), edges (S+1,) and weights bfloat16 (3N,). Entries behind the last edge are 0.
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
    """Cut float32 numbers to the 8 mantissa bits of bfloat16, which rounds them towards zero."""
    return (values.view(torch.int32) & -(1 << 16)).view(torch.float32)


def bag(rows: Tensor, members: Tensor, offsets: Tensor, weights: Tensor | None, out: Tensor) -> None:
    """Gather, multiply and sum in one fused operation. Bags and columns beyond those of ``out`` are discarded."""
    if weights is not None and weights.dtype != rows.dtype:
        weights = weights.to(rows.dtype)  # embedding_bag wants one dtype for both
    sums = torch.embedding_bag(rows, members, offsets, False, 0, False, weights, True)[0]
    out.copy_(sums if sums.shape == out.shape else sums[: out.shape[0], : out.shape[1]])


@cache
def _fits_bag(rows: torch.dtype, weights: torch.dtype | None, out: torch.dtype) -> bool:
    """Return whether embedding_bag accumulates and rounds as ``Permutation`` promises, from dtypes.

    It accumulates 16-bit rows in float32, and it rounds sums and weights to the dtype of the rows.
    """
    in_bfloat16 = weights in (None, torch.bfloat16) and rows == out == torch.bfloat16
    return in_bfloat16 or rows == (torch.float64 if torch.float64 in (rows, out) else torch.float32)
