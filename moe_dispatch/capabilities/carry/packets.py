"""Columns that travel in the packets of a backend, behind each row."""

from __future__ import annotations

from typing import final

from torch import Tensor

from moe_dispatch.backends.wire import Encoded, PacketFormat, WireFormat, packet_format
from moe_dispatch.permutation import Permutation


@final
class RowWithColumns(WireFormat):
    """A row of another format, with columns behind it.

    Args:
        row: Format of the row.
        columns_TC: uint8 (Tp, C), the columns of the rows of this dispatch.

    Attributes:
        arrived_SC: uint8 (S, C), the columns of the rows that arrived; None before.
    """

    def __init__(self, row: WireFormat, columns_TC: Tensor) -> None:
        super().__init__(row.dtype, row.hidden)
        self.row, self.columns_TC = row, columns_TC
        self.numbers = row.numbers
        self.nbytes = row.nbytes + columns_TC.shape[1]
        self.arrived_SC: Tensor | None = None

    def encode(self, rows_TD: Tensor, out: Tensor) -> None:
        self.row.encode(rows_TD, out[:, : self.row.nbytes])
        out[:, self.row.nbytes :].copy_(self.columns_TC)

    def scatter(
        self, permutation: Permutation, rows_TD: Tensor, tables: tuple[Tensor, Tensor, Tensor], out: Tensor
    ) -> None:
        self.row.scatter(permutation, rows_TD, tables, out[:, : self.row.nbytes])
        permutation.scatter(self.columns_TC, *tables, out[:, self.row.nbytes :])

    def decode(self, packets: Tensor) -> Tensor | Encoded:
        rows, columns = packets.split_with_sizes([self.row.nbytes, self.columns_TC.shape[1]], 1)
        self.arrived_SC = columns  # a view, so the memory of the packets is not lent again before it is read
        return self.row.decode(rows)

    def in_packet(self, form: PacketFormat) -> PacketFormat:
        """Return a format of packets with the slots of another, and these rows."""
        # Formats are cached by their row, but this row is of one dispatch.
        return packet_format.__wrapped__(self, form.top_k, form.weight_dtype, form.id_dtype, note=form.widths[3] > 0)
