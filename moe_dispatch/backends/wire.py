"""Wire formats, which write rows into the bytes that travel and read them again; and packets of a row with its slots.

A format is one class with ``encode`` and ``decode``. The two here leave rows in a dtype of torch: their own, or
bfloat16. The formats of 8 bits are those of ``moe_dispatch.quantised``, which is imported when a config asks for them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol, final

import torch
from torch import Tensor

from moe_dispatch.permutation.index import round_up
from moe_dispatch.permutation.strides import dense
from moe_dispatch.seams.options import Options
from moe_dispatch.seams.plug_ins import load_plug_in

if TYPE_CHECKING:
    from moe_dispatch.backends.base import Constraints, MoEShape
    from moe_dispatch.dispatched import Dispatched
    from moe_dispatch.permutation import Permutation, SlotIndex

__all__ = ["Encoded", "WireFormat", "WireOptions"]

# For editors, which offer these names; names of other formats are as good.
WireDtype = Literal["bfloat16", "float8_e4m3fn", "mxfp8"]
ALL_WIRES: frozenset[WireDtype] = frozenset({"bfloat16", "float8_e4m3fn", "mxfp8"})


class Encoded(Protocol):
    """Rows that arrived and are still encoded, because their format can do better than to decode them at once.

    For example, it decodes rows while it copies them to their experts, or hands them to experts as they travelled.
    """

    def decoded(self, dtype: torch.dtype) -> Tensor:
        """Return the rows in ``dtype``."""
        ...

    def expand(
        self, permutation: Permutation, index: SlotIndex, dtype: torch.dtype, *, as_sent: bool
    ) -> Tensor | Encoded:
        """Copy the rows to their experts, as ``Permutation.expand`` does: in ``dtype``, or as they travelled."""
        ...

    def expand_weighted(self, permutation: Permutation, *given: Any, as_sent: bool) -> tuple[Tensor, Tensor | None]:
        """Do what ``Permutation.expand_weighted`` does with the rows in its ``dtype``.

        Args:
            permutation: Implementation for the device of the rows.
            *given: The arguments of ``Permutation.expand_weighted`` behind the rows.
            as_sent: Whether gradients without weights are those that ``gradient`` returns.
        """
        ...

    def gradient(self, dtype: torch.dtype) -> Tensor:
        """Return gradient rows in ``dtype`` for autograd."""
        ...

    def stand_in(self, dtype: torch.dtype) -> Tensor:
        """Return a tensor of ``dtype`` that takes the place of the rows in the autograd graph."""
        ...

    def added_to(self, sent: Dispatched, wire: str | None) -> Dispatched:
        """Return the result of a dispatch with these rows; ``sent`` has only their stand-in."""
        ...

    def tensors(self) -> list[Tensor]:
        """Return the rows as uint8 tensors, for ``WireFormat.restored``."""
        ...


class WireFormat(ABC):
    """A format in which rows travel.

    Experimental: a format of another package is a subclass that defines ``nbytes``, ``encode`` and ``decode``, and an
    entry point of the group ``moe_dispatch.wire_formats`` whose name is the ``wire`` of a config. Backends that move
    bytes carry it (``WireSupport.other_formats``). Both methods run with gradients off: the gradient of a format is the
    identity.

    Args:
        dtype: Dtype of the model's rows.
        hidden: D.

    Attributes:
        hidden_multiple: The number of columns of a row must be a multiple of this.
        tolerance: Largest difference that ``Dispatcher.self_test`` accepts, for rows of numbers from 0 to 1.
        numbers: Dtype of the numbers of an encoded row. Rows in packets are aligned to its size.
        is_view: Whether ``decode`` only views rows as ``numbers``, which callers then do themselves.
        nbytes: Number of bytes of an encoded row.
    """

    hidden_multiple: ClassVar[int] = 1
    tolerance: ClassVar[float] = 0.0
    is_view: ClassVar[bool] = False
    numbers: torch.dtype = torch.uint8
    nbytes: int

    def __init__(self, dtype: torch.dtype, hidden: int) -> None:
        self.dtype = dtype
        self.hidden = hidden

    @abstractmethod
    def encode(self, rows_TD: Tensor, out: Tensor) -> None:
        """Write rows to ``out``, uint8 (T, nbytes). The rows of a packet have a stride, because slots follow each."""

    @abstractmethod
    def decode(self, packets: Tensor) -> Tensor | Encoded:
        """Return the rows of uint8 (T, nbytes), whose rows may have a stride.

        The result may be a view. It has any floating dtype, because who reads it converts it. Or it is an ``Encoded``.
        """

    def encoded(self, rows_TD: Tensor) -> Tensor:
        """Encode bare rows as uint8 (T, nbytes), which may be a view."""
        out = torch.empty(rows_TD.shape[0], self.nbytes, dtype=torch.uint8, device=rows_TD.device)
        self.encode(rows_TD, out)
        return out

    def scatter(
        self, permutation: Permutation, rows_TD: Tensor, tables: tuple[Tensor, Tensor, Tensor], out: Tensor
    ) -> None:
        """Encode each row, and write it to all its packets.

        Args:
            permutation: Implementation for the device of the rows.
            rows_TD: The rows.
            tables: ``source_B``, ``member_B`` and ``cu_S`` of ``Permutation.scatter``.
            out: uint8 (B, nbytes), the rows of the packets, with a stride.
        """
        permutation.scatter(self.encoded(rows_TD), *tables, out)

    def carried(self, rows_TD: Tensor) -> Tensor | Encoded:
        """Return rows that do not travel as their receiver would get them."""
        return self.decode(self.encoded(rows_TD))

    @final
    def round_trip(self, rows_TD: Tensor) -> Tensor:
        """Return rows as their receiver gets them, in the model's dtype."""
        carried = self.carried(rows_TD)
        return carried.to(self.dtype) if isinstance(carried, Tensor) else carried.decoded(self.dtype)

    def part_bytes(self) -> Sequence[int]:
        """Return the bytes of a row in each of ``Encoded.tensors``. Needed only for rows that stay encoded."""
        raise NotImplementedError

    @classmethod
    def restored(cls, parts: Sequence[Tensor]) -> Encoded:
        """Return rows from their ``Encoded.tensors``, which may have any dtype. Needed as ``part_bytes`` is."""
        raise NotImplementedError


class _InDtype(WireFormat):
    """Rows travel as numbers of a dtype of torch."""

    is_view = True

    def __init__(self, dtype: torch.dtype, hidden: int, numbers: torch.dtype) -> None:
        super().__init__(dtype, hidden)
        self.numbers = numbers
        self.nbytes = hidden * numbers.itemsize

    @final
    def encode(self, rows_TD: Tensor, out: Tensor) -> None:
        out.view(self.numbers).copy_(rows_TD)

    @final
    def decode(self, packets: Tensor) -> Tensor:
        return packets.view(self.numbers)

    @final
    def encoded(self, rows_TD: Tensor) -> Tensor:
        if rows_TD.dtype == self.numbers:
            return dense(rows_TD).view(torch.uint8)
        return super().encoded(rows_TD)

    @final
    def scatter(
        self, permutation: Permutation, rows_TD: Tensor, tables: tuple[Tensor, Tensor, Tensor], out: Tensor
    ) -> None:
        if rows_TD.is_cpu:  # one pass converts, and another copies, which is faster there
            super().scatter(permutation, rows_TD, tables, out)
        else:
            permutation.scatter(rows_TD, *tables, out.view(self.numbers))


@final
class InBFloat16(_InDtype):
    """Rows travel as bfloat16. So do the sums that come back, if rows travel in any other dtype than their own."""

    tolerance = 8 * torch.finfo(torch.bfloat16).eps

    def __init__(self, dtype: torch.dtype, hidden: int) -> None:
        super().__init__(dtype, hidden, torch.bfloat16)


@final
class InOwnDtype(_InDtype):
    """Rows travel as they are."""

    def __init__(self, dtype: torch.dtype, hidden: int) -> None:
        super().__init__(dtype, hidden, dtype)

    def carried(self, rows_TD: Tensor) -> Tensor:
        return rows_TD


_FORMATS: dict[str | None, type[WireFormat]] = {None: InOwnDtype, "bfloat16": InBFloat16}


def wire_format(name: str | None) -> type[WireFormat]:
    """Return the format of a ``wire``.

    Raises:
        ConfigError: There is no such format, or the plug-in is not installed.
    """
    found = _FORMATS.get(name)  # no cached function, because a traced call comes here
    if found is None:
        loaded: type[WireFormat] = _quantised("formats").load_format(name)
        found = _FORMATS[name] = loaded
    return found


@cache
def row_format(dtype: torch.dtype, hidden: int, wire: str | None = None) -> WireFormat:
    """Return the format of rows of ``hidden`` numbers of ``dtype`` that travel as ``wire``."""
    return wire_format(wire)(dtype, hidden)


@cache
def back_wire(wire: str | None) -> str | None:
    """Return the ``wire`` of combined rows if rows are sent as ``wire``: at least bfloat16."""
    return None if wire is None else "bfloat16"


@final
@dataclass(frozen=True, slots=True)
class PacketFormat:
    """The byte format of a row with its slots: ``[row | K weights | note | K ids]``.

    Each part is aligned to the size of its numbers. The note is one int32 for the backend's own use. For example, a
    packet of 5 bfloat16 numbers, 2 float32 weights, a note and 2 int16 ids has these bytes: row 0-9, gap 10-11, weights
    12-19, note 20-23, ids 24-27, gap 28-31. Every packet begins at a multiple of 32 bytes, and of 16 numbers of the
    row, because a GPU copies rows faster if they begin so.

    Attributes:
        row: Format of the row.
        stride: Number of bytes from one packet to the next.
        top_k: K.
        weight_dtype: Dtype of the weights: float32, or float64 for float64 models; not used if weights do not travel.
        id_dtype: Dtype of the ids; not used if ids do not travel.
        widths: Numbers of bytes of the row, a gap, the weights, the note, the ids and a gap.
    """

    row: WireFormat
    stride: int
    top_k: int
    weight_dtype: torch.dtype
    id_dtype: torch.dtype
    widths: tuple[int, ...]

    def pack(self, rows_TD: Tensor, weights_TK: Tensor, ids_TK: Tensor) -> Tensor:
        """Write one packet per row, uint8 (T, stride)."""
        packets = torch.empty(rows_TD.shape[0], self.stride, dtype=torch.uint8, device=rows_TD.device)
        rows, _, weights, _, ids, _ = packets.split_with_sizes(self.widths, 1)  # faster than three slices
        self.row.encode(rows_TD, rows)
        weights.view(self.weight_dtype).copy_(weights_TK)
        ids.view(self.id_dtype).copy_(ids_TK)
        return packets

    def scatter(
        self,
        permutation: Permutation,
        rows_TD: Tensor,
        slots: tuple[Tensor, Tensor],
        tables: tuple[Tensor, Tensor, Tensor],
        out: Tensor,
        notes_P: Tensor | None = None,
    ) -> None:
        """Write rows with their slots to all their packets. Each row is read once.

        Args:
            permutation: One with ``pack_slots``.
            rows_TD: The rows.
            slots: Weights and ids, each (T, K).
            tables: As in ``WireFormat.scatter``. Where ``source_B`` is negative, a packet gets ids of -1.
            out: uint8 (B, stride), the packets.
            notes_P: int64 (P,), notes for the first of each B / P packets; None if there are none.
        """
        rows, _, weights, notes, ids, _ = out.split_with_sizes(self.widths, 1)
        self.row.scatter(permutation, rows_TD, tables, rows)
        of_notes = None if notes_P is None else (notes_P, notes.view(torch.int32))
        permutation.pack_slots(*slots, tables[0], (weights.view(self.weight_dtype), ids.view(self.id_dtype)), of_notes)

    def unpack(self, packets: Tensor) -> tuple[Tensor | Encoded, Tensor, Tensor]:
        """Return the rows as ``WireFormat.decode`` does, and strided views of weights and ids, each (T, K)."""
        rows, _, weights, _, ids, _ = packets.split_with_sizes(self.widths, 1)
        decoded = rows.view(self.row.numbers) if self.row.is_view else self.row.decode(rows)
        return decoded, weights.view(self.weight_dtype), ids.view(self.id_dtype)

    def rows(self, packets: Tensor) -> Tensor:
        """Return a strided view of the rows, (T, D), which must not be encoded otherwise than in a dtype of torch."""
        return packets.split_with_sizes(self.widths, 1)[0].view(self.row.numbers)

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
def packet_format(
    row: WireFormat,
    top_k: int,
    weight_dtype: torch.dtype | None,
    id_dtype: torch.dtype | None = None,
    note: bool = False,
    columns: int = 0,
) -> PacketFormat:
    """Return the format of a row with its slots, aligned so that each part can be viewed in its own dtype.

    Without slots, packets are bare rows. Behind the row is room for ``columns`` bytes.
    """
    weight_bytes, id_bytes = (0 if dtype is None else dtype.itemsize for dtype in (weight_dtype, id_dtype))
    weights_at = round_up(row.nbytes + columns, weight_bytes or 1)
    note_at = weights_at + top_k * weight_bytes  # aligned for an int32, because a weight has 4 or 8 bytes
    ids_at = note_at + 4 * note
    ids_end = ids_at + top_k * id_bytes
    stride = round_up(ids_end, max(32, 16 * row.numbers.itemsize)) if weight_bytes or id_bytes else ids_end
    edges = (0, row.nbytes, weights_at, note_at, ids_at, ids_end, stride)
    widths = tuple(end - begin for begin, end in pairwise(edges))
    return PacketFormat(row, stride, top_k, weight_dtype or torch.float32, id_dtype or torch.int32, widths)


@cache
def dispatch_format(
    shape: MoEShape, row_dtype: torch.dtype, weight_dtype: torch.dtype, *, note: bool = False
) -> PacketFormat:
    """Return the format of the packets of a dispatch: rows with the weights and ids of their slots."""
    row = row_format(row_dtype, shape.hidden_size, shape.wire_dtype)
    slots = (shape.top_k, weight_dtype, id_dtype_for(shape.num_experts))
    return packet_format(row, *slots, note=note, columns=shape.column_bytes)


def id_dtype_for(num_experts: int) -> torch.dtype:
    """Return the narrowest dtype that holds expert ids, -1, and the difference of any two ids."""
    return torch.int16 if 2 * num_experts <= torch.iinfo(torch.int16).max else torch.int32


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class WireSupport:
    """The wire formats that a backend carries, for ``Constraints.wire``.

    Attributes:
        dtypes: Supported values of ``wire.dtype`` besides None.
        other_formats: Whether rows travel as bytes that the backend does not look into, so that formats of other
            packages are supported too.
        gradients: Whether gradient rows of combine can travel as ``MoEShape.grad_wire_dtype``; or must, if rows of
            dispatch do, because the route fixes the dtype of both.
        delivers: Whether the backend can deliver rows as they travelled. If so, it does so if ``MoEShape.quantised``.
    """

    dtypes: frozenset[WireDtype] = frozenset()
    other_formats: bool = False
    gradients: Literal["no", "can", "must"] = "no"
    delivers: bool = False

    def carries(self, wire: str | None) -> bool:
        """Return whether rows can travel in the format of a ``wire``."""
        return wire is None or wire in self.dtypes or (self.other_formats and wire != "bfloat16")


class WireOptions(Options):
    """The options of ``wire="bfloat16"``. Those of other formats derive from them.

    Attributes:
        dtype: Name of the format in which rows travel between ranks.
    """

    dtype: str

    @property
    def of_gradients(self) -> str | None:
        """Name of the 8-bit format of the gradient rows of combine; None for at least bfloat16."""
        return None

    @property
    def delivers_quantised(self) -> bool:
        """Whether experts get rows as they travelled."""
        return False

    def check_backend(self, where: str, needs: Constraints) -> None:
        """Raise ConfigError if a backend cannot do what the options ask. The error begins with ``where``."""


def load_wire_options(name: str) -> type[WireOptions]:
    """Return the options class of a format.

    Raises:
        ConfigError: The plug-in is not installed.
    """
    if name == "bfloat16":
        return WireOptions
    options: type[WireOptions] = _quantised("options").QuantisedOptions
    return options


def _quantised(module: str) -> Any:
    what = 'Every wire but "bfloat16" needs it. Leave wire out'
    return load_plug_in(f"moe_dispatch.capabilities.quantised.{module}", what)
