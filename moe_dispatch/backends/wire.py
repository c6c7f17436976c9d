"""The byte format in which rows travel: the numbers of a row, then the weights and expert ids of its slots."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise
from typing import final

import torch
from torch import Tensor

from moe_dispatch._recipes import RECIPES, Quantised, Recipe, quantise_into, widen
from moe_dispatch.backends.base import MoEShape, WireDtype
from moe_dispatch.permutation import round_up


@final
@dataclass(frozen=True, slots=True)
class PacketFormat:
    """The byte format of a row with its slots: ``[row | K weights | note | K ids]``.

    ``row_format`` makes the format of a bare row, and ``packet_format`` adds the slots. Each part is aligned to the
    size of its numbers. The note is one int32 for the backend's own use. For example, a packet of 5 bfloat16 numbers, 2
    float32 weights, a note and 2 int16 ids has these bytes: row 0-9, gap 10-11, weights 12-19, note 20-23, ids 24-27.
    So its stride is 28.

    A quantised row is followed by its scales. With "float8_e4m3fn", a row of 256 numbers has 256 bytes of numbers and 8
    bytes of scales, one float32 for 128 columns, as DeepEP's fp8 dispatch takes them. With "mxfp8" it has 8 bytes of
    scales too, one e8m0 for 32 columns.

    Attributes:
        dtype: Dtype in which the model computes.
        hidden: D.
        wire: Name of the dtype in which rows travel; None if it is ``dtype``.
        wire_dtype: Dtype of the numbers that travel.
        recipe: How rows are quantised; None if they are not.
        nbytes: Number of bytes of a row, scales included.
        stride: Number of bytes from one packet to the next.
        top_k: K; 0 for a bare row.
        weight_dtype: Dtype of the weights: float32, or float64 for float64 models; not used if weights do not travel.
        id_dtype: Dtype of the ids; not used if ids do not travel.
        widths: Numbers of bytes of the row, a gap, the weights, the note, the ids and a gap.
    """

    dtype: torch.dtype
    hidden: int
    wire: WireDtype | None
    wire_dtype: torch.dtype
    recipe: Recipe | None
    nbytes: int
    stride: int
    top_k: int = 0
    weight_dtype: torch.dtype = torch.float32
    id_dtype: torch.dtype = torch.int32
    widths: tuple[int, ...] = ()

    def write(self, rows_TD: Tensor, out: Tensor) -> None:
        """Encode rows into ``out``, uint8 (T, nbytes) of any row stride."""
        if self.recipe is None:
            out.view(self.wire_dtype).copy_(rows_TD)
        else:
            quantise_into(rows_TD, self.recipe, self.split(out))

    def read(self, packets: Tensor) -> Tensor:
        """Return the rows of uint8 packets as a view (T, D) in ``wire_dtype``. They must not be quantised."""
        assert self.recipe is None
        rows = packets if packets.shape[1] == self.nbytes else packets[:, : self.nbytes]
        return rows.view(self.wire_dtype)

    def split(self, packets: Tensor) -> Quantised:
        """Return strided views of the quantised rows of uint8 packets."""
        assert self.recipe is not None
        values, scales = packets[:, : self.hidden], packets[:, self.hidden : self.nbytes]
        return Quantised(values.view(self.wire_dtype), scales.view(self.recipe.scale_dtype))

    def received(self, packets: Tensor) -> Tensor | Quantised:
        """Return views of the rows of uint8 packets, quantised or not."""
        return self.read(packets) if self.recipe is None else self.split(packets)

    def encode(self, rows_TD: Tensor) -> Tensor:
        """Encode bare rows as uint8 (T, nbytes). The result is a view if contiguous rows travel unchanged."""
        # With 0 rows, and with one column of any stride, ``view`` could refuse the strides.
        if self.wire is None and rows_TD.shape[0] and rows_TD.stride(-1) == 1:
            return rows_TD.contiguous().view(torch.uint8)
        out = torch.empty(rows_TD.shape[0], self.nbytes, dtype=torch.uint8, device=rows_TD.device)
        self.write(rows_TD, out)
        return out

    def carried(self, rows_TD: Tensor) -> Tensor | Quantised:
        """Return the rows as their receiver gets them."""
        return rows_TD if self.wire is None else self.received(self.encode(rows_TD))

    def round_trip(self, rows_TD: Tensor) -> Tensor:
        """Return the rows as their receiver gets them, widened to the model's dtype."""
        return widen(self.carried(rows_TD), self.dtype).to(self.dtype)

    def pack(self, rows_TD: Tensor, weights_TK: Tensor, ids_TK: Tensor) -> Tensor:
        """Write one packet per row, uint8 (T, stride)."""
        packets = torch.empty(rows_TD.shape[0], self.stride, dtype=torch.uint8, device=rows_TD.device)
        rows, _, weights, _, ids, _ = packets.split_with_sizes(self.widths, 1)  # faster than three slices
        self.write(rows_TD, rows)
        weights.view(self.weight_dtype).copy_(weights_TK)
        ids.view(self.id_dtype).copy_(ids_TK)
        return packets

    def unpack(self, packets: Tensor) -> tuple[Tensor | Quantised, Tensor, Tensor]:
        """Return the rows as ``received`` does, and strided views of weights and ids, each (T, K)."""
        rows, _, weights, _, ids, _ = packets.split_with_sizes(self.widths, 1)
        received = rows.view(self.wire_dtype) if self.recipe is None else self.split(rows)
        return received, weights.view(self.weight_dtype), ids.view(self.id_dtype)

    def weights(self, packets: Tensor) -> Tensor:
        """Return a strided view of the weights, (T, K)."""
        return packets.split_with_sizes(self.widths, 1)[2].view(self.weight_dtype)

    def notes(self, packets: Tensor) -> Tensor:
        """Return a strided view of the notes, int32 (T, 1)."""
        return packets.split_with_sizes(self.widths, 1)[3].view(torch.int32)

    def ids(self, packets: Tensor) -> Tensor:
        """Return a strided view of the expert ids, (T, K)."""
        return packets.split_with_sizes(self.widths, 1)[4].view(self.id_dtype)


@cache
def row_format(dtype: torch.dtype, hidden: int, wire: WireDtype | None = None) -> PacketFormat:
    """Return the format of bare rows of ``hidden`` numbers of ``dtype`` that travel as ``wire``."""
    recipe = RECIPES.get(wire)
    if recipe is not None:
        nbytes = hidden + recipe.scale_bytes(hidden)
        return PacketFormat(dtype, hidden, wire, torch.float8_e4m3fn, recipe, nbytes, nbytes)
    wire_dtype = dtype if wire is None else torch.bfloat16
    nbytes = hidden * wire_dtype.itemsize
    return PacketFormat(dtype, hidden, wire, wire_dtype, None, nbytes, nbytes)


@cache
def packet_format(
    row: PacketFormat,
    top_k: int,
    weight_dtype: torch.dtype | None,
    id_dtype: torch.dtype | None = None,
    note: bool = False,
) -> PacketFormat:
    """Return the format of a row with its slots, aligned so that each part can be viewed in its own dtype."""
    weight_bytes, id_bytes = (0 if dtype is None else dtype.itemsize for dtype in (weight_dtype, id_dtype))
    weights_at = round_up(row.nbytes, weight_bytes or 1)
    note_at = weights_at + top_k * weight_bytes  # aligned for an int32, because a weight has 4 or 8 bytes
    ids_at = note_at + 4 * note
    ids_end = ids_at + top_k * id_bytes
    stride = round_up(ids_end, max(weight_bytes, id_bytes, row.wire_dtype.itemsize))
    edges = (0, row.nbytes, weights_at, note_at, ids_at, ids_end, stride)
    widths = tuple(end - begin for begin, end in pairwise(edges))
    found = replace(row, stride=stride, top_k=top_k, widths=widths)
    return replace(found, weight_dtype=weight_dtype or row.weight_dtype, id_dtype=id_dtype or row.id_dtype)


@cache
def dispatch_format(
    shape: MoEShape, row_dtype: torch.dtype, weight_dtype: torch.dtype, *, note: bool = False
) -> PacketFormat:
    """Return the format of the packets of a dispatch: rows with the weights and ids of their slots."""
    row = row_format(row_dtype, shape.hidden_size, shape.wire_dtype)
    return packet_format(row, shape.top_k, weight_dtype, id_dtype_for(shape.num_experts), note=note)


def id_dtype_for(num_experts: int) -> torch.dtype:
    """Return the narrowest dtype that holds expert ids, -1, and the difference of any two ids."""
    return torch.int16 if 2 * num_experts <= torch.iinfo(torch.int16).max else torch.int32
