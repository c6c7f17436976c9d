"""How a row looks on the wire: its numbers, and behind them, in the same buffer, its slots' weights and expert ids."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import final

import torch
from torch import Tensor

from moe_dispatch.backends.base import WireDtype
from moe_dispatch.permutation import round_up

FLOAT8_BLOCK = 128  # columns that share one float32 scale
_FLOAT8_MAX = torch.finfo(torch.float8_e4m3fn).max


@final
@dataclass(frozen=True, slots=True)
class RowFormat:
    """A row of D numbers as bytes; made by ``row_format``.

    Attributes:
        dtype: what the model computes in.
        hidden: D.
        wire: what travels: None (the same), "bfloat16", or "float8_e4m3fn" with one float32 scale per 128 columns
            (absolute maximum / 448, or 1 for a block of zeros), as DeepEP's fp8 dispatch takes them.
        wire_dtype: the dtype whose numbers travel.
        nbytes: bytes of a row.
    """

    dtype: torch.dtype
    hidden: int
    wire: WireDtype | None
    wire_dtype: torch.dtype
    nbytes: int

    def write(self, rows_TD: Tensor, out: Tensor) -> None:
        """Encode rows into uint8 (T, nbytes) of any row stride."""
        if self.wire != "float8_e4m3fn":
            out.view(self.wire_dtype).copy_(rows_TD)
            return
        numbers, scales = to_float8(rows_TD)
        out[:, : self.hidden].copy_(numbers.view(torch.uint8))
        out[:, self.hidden :].view(torch.float32).copy_(scales)

    def read(self, rows: Tensor) -> Tensor:
        """Decode uint8 (T, nbytes) to (T, D): a view in the wire's dtype, or new rows in the model's where float8."""
        if self.wire != "float8_e4m3fn":
            return rows.view(self.wire_dtype)
        scales = rows[:, self.hidden :].view(torch.float32)
        return from_float8(rows[:, : self.hidden].view(torch.float8_e4m3fn), scales, self.dtype)

    def encode(self, rows_TD: Tensor) -> Tensor:
        """uint8 (T, nbytes); a view where the row travels as it is."""
        if self.wire is None and rows_TD.shape[0]:  # no rows may have any strides, which view refuses
            return rows_TD.contiguous().view(torch.uint8)
        out = torch.empty(rows_TD.shape[0], self.nbytes, dtype=torch.uint8, device=rows_TD.device)
        self.write(rows_TD, out)
        return out

    def round_trip(self, rows_TD: Tensor) -> Tensor:
        """What the receiver of ``rows_TD`` computes with, in the model's dtype."""
        if self.wire is None:
            return rows_TD
        return self.read(self.encode(rows_TD)).to(self.dtype)


def to_float8(rows_TD: Tensor) -> tuple[Tensor, Tensor]:
    """Rows as float8_e4m3fn (T, D) and one float32 scale per 128 columns, (T, D/128)."""
    blocks = rows_TD.reshape(rows_TD.shape[0], rows_TD.shape[1] // FLOAT8_BLOCK, FLOAT8_BLOCK).float()
    scales = blocks.abs().amax(-1) / _FLOAT8_MAX
    scales = torch.where(scales > 0, scales, 1)
    return (blocks / scales.unsqueeze(-1)).to(torch.float8_e4m3fn).view(rows_TD.shape), scales


def from_float8(numbers_TD: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """The reverse of ``to_float8``, in ``dtype``."""
    blocks = numbers_TD.float().view(*scales.shape, FLOAT8_BLOCK)
    return (blocks * scales.unsqueeze(-1)).view(numbers_TD.shape).to(dtype)


@cache
def row_format(dtype: torch.dtype, hidden: int, wire: WireDtype | None = None) -> RowFormat:
    """The format of rows of ``hidden`` numbers of ``dtype`` that travel as ``wire``."""
    if wire == "float8_e4m3fn":
        return RowFormat(dtype, hidden, wire, torch.float8_e4m3fn, hidden + 4 * (hidden // FLOAT8_BLOCK))
    wire_dtype = dtype if wire is None else torch.bfloat16
    return RowFormat(dtype, hidden, wire, wire_dtype, hidden * wire_dtype.itemsize)


@final
@dataclass(frozen=True, slots=True)
class Packet:
    """A row with its slots as bytes: ``[row | K weights | note | K ids]``, each part aligned; made by ``packet``.

    Attributes:
        row: format of the row.
        top_k: K.
        weight_dtype: float32, float64 for float64 models; None where weights do not travel.
        id_dtype: None where ids do not travel.
        weights_at: byte where the weights begin.
        note_at: byte of one int32 for the backend's own use; ``ids_at`` where there is none.
        ids_at: byte where the ids begin.
        stride: bytes from one packet to the next.
        widths: bytes of each part, and of what lies between them: row, gap, weights, note, ids, gap.
    """

    row: RowFormat
    top_k: int
    weight_dtype: torch.dtype | None
    id_dtype: torch.dtype | None
    weights_at: int
    note_at: int
    ids_at: int
    stride: int
    widths: tuple[int, ...]

    def pack(self, rows_TD: Tensor, weights_TK: Tensor, ids_TK: Tensor) -> Tensor:
        """uint8 (T, stride), one packet a row."""
        assert self.weight_dtype is not None
        assert self.id_dtype is not None
        packets = torch.empty(rows_TD.shape[0], self.stride, dtype=torch.uint8, device=rows_TD.device)
        rows, _, weights, _, ids, _ = packets.split_with_sizes(self.widths, 1)  # sooner than three slices
        self.row.write(rows_TD, rows)
        weights.view(self.weight_dtype).copy_(weights_TK)
        ids.view(self.id_dtype).copy_(ids_TK)
        return packets

    def unpack(self, packets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Rows as ``RowFormat.read`` gives them, (T, D); weights and ids, (T, K), strided views."""
        assert self.weight_dtype is not None
        assert self.id_dtype is not None
        rows, _, weights, _, ids, _ = packets.split_with_sizes(self.widths, 1)
        return self.row.read(rows), weights.view(self.weight_dtype), ids.view(self.id_dtype)

    def rows(self, packets: Tensor) -> Tensor:
        """The bytes of the rows, uint8 (T, row.nbytes), a strided view; the packets themselves where all is row."""
        return packets if self.row.nbytes == self.stride else packets[:, : self.row.nbytes]

    def weights(self, packets: Tensor) -> Tensor:
        """The weights, (T, K), a strided view."""
        assert self.weight_dtype is not None
        return packets[:, self.weights_at : self.note_at].view(self.weight_dtype)

    def notes(self, packets: Tensor) -> Tensor:
        """int32 (T, 1), a strided view."""
        return packets[:, self.note_at : self.ids_at].view(torch.int32)

    def ids(self, packets: Tensor) -> Tensor:
        """The expert ids, (T, K), a strided view."""
        assert self.id_dtype is not None
        return packets[:, self.ids_at : self.ids_at + self.top_k * self.id_dtype.itemsize].view(self.id_dtype)


@cache
def packet(
    row: RowFormat,
    top_k: int,
    weight_dtype: torch.dtype | None,
    id_dtype: torch.dtype | None = None,
    *,
    note: bool = False,
) -> Packet:
    """The format of packets whose rows, weights and ids can each be viewed in their own dtype."""
    weight_bytes, id_bytes = (0 if dtype is None else dtype.itemsize for dtype in (weight_dtype, id_dtype))
    weights_at = round_up(row.nbytes, weight_bytes or 1)
    note_at = weights_at + top_k * weight_bytes  # weights are of 4 or 8 bytes, so this suits an int32
    ids_at = note_at + 4 * note
    unit = max(weight_bytes, id_bytes, row.wire_dtype.itemsize)
    stride = round_up(ids_at + top_k * id_bytes, unit)
    edges = (0, row.nbytes, weights_at, note_at, ids_at, ids_at + top_k * id_bytes, stride)
    widths = tuple(end - begin for begin, end in pairwise(edges))
    return Packet(row, top_k, weight_dtype, id_dtype, weights_at, note_at, ids_at, stride, widths)


def id_dtype_for(num_experts: int) -> torch.dtype:
    """The narrowest dtype for expert ids, -1, and differences of two of them."""
    return torch.int16 if 2 * num_experts <= torch.iinfo(torch.int16).max else torch.int32
