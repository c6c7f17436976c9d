"""The ids of one micro-batch on one rank, cut out of a table.

Dimensions: ``T`` rows of this rank, ``L`` MoE layers of the cut, ``K`` top_k, ``B`` sequences of the micro-batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, final

import torch
from torch import Tensor

from moe_dispatch.errors import InputError
from moe_dispatch.layouts import Layout
from moe_dispatch.replay.encoding import NOWHERE, UNKNOWN, ids_of

if TYPE_CHECKING:
    from moe_dispatch.replay.table import RoutingTable, SequenceId


@final
class Cut:
    """The ids of the rows of one micro-batch on one rank. ``RoutingTable.cut`` makes it.

    A lookup names the layer. It changes nothing and may be repeated, so a recomputed forward gets the same ids, in any
    order of layers and micro-batches.

    Attributes:
        stored_TLK: The ids as the table stores them, on the device of the cut.
        layers: Numbers of the MoE layers of the cut, L of them.
        step: Number of the training step, for ``RoutingTable.check_used``.
        table: The table that it was cut out of.
    """

    def __init__(
        self, table: RoutingTable, stored_TLK: Tensor, layers: tuple[int, ...], rows_T: Tensor, step: int
    ) -> None:
        self.stored_TLK = stored_TLK
        self.layers = layers
        self.step = step
        self.table = table
        self._rows_T = rows_T
        self._counted: set[int] = set()

    def routing_for(self, layer: int) -> Tensor:
        """Return the expert ids of this rank's rows in one MoE layer, int64 (T, K), for ``replayed``.

        An id is -1 for a slot that goes nowhere, such as in a row of padding, and -2 for an unknown slot.

        Raises:
            InputError: The cut does not have this layer.

        Cost: one conversion of (T, K) on the device; no host sync. The first lookup counts the entries as used.
        """
        if layer not in self.layers:
            raise InputError(
                f"Cut.routing_for: layer must be one of the layers of the cut, {span(self.layers)}, got {layer}. Count "
                "the MoE layers of the whole model from 0, without dense layers."
            )
        if layer not in self._counted and not torch.compiler.is_compiling():
            self._counted.add(layer)
            self.table._uses.count(self.table, self._rows_T, (layer,), self.step)
        return ids_of(self.stored_TLK[:, self.layers.index(layer)])

    def check_slots(self) -> None:
        """Refuse a table in which some entry names experts in some slots only. A model's router needs one for each.

        Raises:
            InputError: The table has such an entry.

        The error is raised on this rank alone. Cost: one pass over the table, whenever it has changed.
        """
        table = self.table
        if table.slots_checked:
            return
        partial_NL = (table.stored_NLK == NOWHERE - UNKNOWN).any(2)
        for row, column in partial_NL.nonzero()[:1].tolist():
            name, position = table.key_of(row)
            raise InputError(
                f"RoutingReplay: a known entry must name an expert in each of {table.top_k} slots, got "
                f"{ids_of(table.stored_NLK[row, column]).tolist()} for sequence {name!r}, position {position}, layer "
                f"{table.layers[column]}, and {int(partial_NL.sum())} entries of this kind. Leave these entries "
                "unknown: -1 in all slots."
            )
        table.slots_checked = True


def table_rows(
    table: RoutingTable,
    layout: Layout,
    sequences: Sequence[SequenceId | None],
    like: Tensor | Sequence[int] | None,
) -> Tensor:
    """Return the row of the table for each row of this rank, int64 (T,) on the CPU.

    The table has two rows behind its entries: ``table.unknown_row``, for rows of a sequence named None, and
    ``table.padding_row``, for rows that hold no token.

    Raises:
        LayoutError: The layout does not fit the shape.
        InputError: The sequences do not fit the layout or the table, or ``like`` is missing.
    """
    shape = like.shape if isinstance(like, Tensor) else like
    if shape is None:
        rows = layout.num_rows()
        if rows is None:
            raise InputError(
                "RoutingTable.cut: like must be given for a layout that does not know its rows, got None and "
                f"{layout}. Pass the hidden states, or their shape."
            )
        shape = (rows, 1)
    layout.check(layout.rows_of(shape))
    if len(sequences) != layout.num_sequences(shape):
        raise InputError(
            f"RoutingTable.cut: sequences must name each sequence of the layout, got {len(sequences)} names and "
            f"{layout.num_sequences(shape)} sequences. Pass one name per sequence, None for one that was not recorded."
        )
    named = [name for name in sequences if name is not None]
    for name in named:
        if name not in table.lengths:
            raise InputError(
                f"RoutingTable.cut: every sequence must be in the table, got {name!r}, and a table of "
                f"{len(table.lengths)} sequences. Add it to the table, or pass None to let the router choose."
            )
    if len({*named}) != len(named):
        twice = next(name for name in named if named.count(name) > 1)
        raise InputError(
            f"RoutingTable.cut: a micro-batch must name a sequence once, got {twice!r} {named.count(twice)} times. "
            "Give each sample a name of its own."
        )
    sequence_T, position_T = layout.positions(shape).cpu().unbind()
    # The last place is for rows of padding, whose sequence is -1.
    starts = [-1 if name is None else table.rows_of(name).start for name in sequences]
    lengths = [0 if name is None else table.lengths[name] for name in sequences]
    starts_B = torch.tensor([*starts, -1], device="cpu")
    lengths_B = torch.tensor([*lengths, 0], device="cpu")
    start_T, length_T = starts_B[sequence_T], lengths_B[sequence_T]
    is_known = start_T >= 0
    for row in (is_known & (position_T >= length_T)).nonzero()[:1, 0].tolist():
        sequence = int(sequence_T[row])
        longest = int(position_T[sequence_T == sequence].max()) + 1
        raise InputError(
            f"RoutingTable.cut: a sequence must not be longer than in the table, got {longest} positions of sequence "
            f"{sequences[sequence]!r}, which has {int(length_T[row])} in the table. Record the whole sequence; engines "
            "leave out the last position, for which the table has last_missing=True."
        )
    elsewhere = torch.where(sequence_T < 0, table.padding_row, table.unknown_row)
    return torch.where(is_known, start_T + position_T, elsewhere)


def gathered(stored: Tensor, rows_T: Tensor, columns: Sequence[int], device: torch.device | None) -> Tensor:
    """Gather rows and columns of a table into one host buffer: (T, L, K). It is pinned if it goes to a GPU."""
    first, count = columns[0] if columns else 0, len(columns)
    if tuple(columns) == tuple(range(first, first + count)):
        part = stored[:, first : first + count]
    else:
        part = stored.index_select(1, torch.tensor(columns, device="cpu"))
    pinned = device is not None and device.type == "cuda"
    buffer = torch.empty((len(rows_T), *part.shape[1:]), dtype=stored.dtype, device="cpu", pin_memory=pinned)
    return torch.index_select(part, 0, rows_T, out=buffer)


def span(numbers: Sequence[int]) -> str:
    """Write numbers for an error message: "0..3" if they follow each other."""
    if len(numbers) > 1 and list(numbers) == list(range(numbers[0], numbers[-1] + 1)):
        return f"{numbers[0]}..{numbers[-1]}"
    return ", ".join(map(str, numbers)) or "none"
