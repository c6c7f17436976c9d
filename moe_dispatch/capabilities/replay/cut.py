"""A cut of a routing table: which row of the table each row of a rank is, and the lookups of a forward.

Dimensions: ``L`` MoE layers of the cut, ``K`` top_k, ``T`` rows of this rank.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, final

import torch
from torch import Tensor

from moe_dispatch.capabilities.replay.entries import ids_of
from moe_dispatch.errors import InputError
from moe_dispatch.layouts import Layout

if TYPE_CHECKING:
    from moe_dispatch.capabilities.replay.table import RoutingTable

SequenceId = int | str
"""The name of a sequence in a table: a number, or a string such as the uid of a sample."""


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
                f"Cut.routing_for: layer {layer} is not in the cut, which has {span(self.layers)}. "
                "Count the MoE layers of the whole model from 0, without dense layers."
            )
        if layer not in self._counted and not torch.compiler.is_compiling():
            self._counted.add(layer)
            self.table._uses.count(self._rows_T, self.table._columns((layer,)), self.step)
        return ids_of(self.stored_TLK[:, self.layers.index(layer)])


def rows_of_rank(
    table: RoutingTable,
    layout: Layout,
    sequences: Sequence[SequenceId | None],
    like: Tensor | Sequence[int] | None,
) -> Tensor:
    """Return the row of the table for each row of this rank, int64 (T,) on the CPU.

    Context parallelism and sequence parallelism are part of the layout: ``positions`` of a sharded layout tells
    which token of which sequence each row of this rank is, in the order of the shard. For example, zigzag context
    parallelism of 8 tokens gives rank 0 of 2 the positions 0, 1, 6 and 7.

    The table has two rows behind its entries: ``unknown_row``, for rows of a sequence named None, and
    ``padding_row``, for rows that hold no token.
    """
    shape = like.shape if isinstance(like, Tensor) else like
    if shape is None:
        rows = layout.num_rows()
        if rows is None:
            raise InputError(
                f"RoutingTable.cut: {layout} does not know its number of rows. Pass the hidden states as like=, or "
                "their shape."
            )
        shape = (rows, 1)
    layout.check(layout.rows_of(shape))
    if len(sequences) != layout.num_sequences(shape):
        raise InputError(
            f"RoutingTable.cut: sequences must name each sequence of the layout, got {len(sequences)} names and "
            f"{layout.num_sequences(shape)} sequences. Pass one name per sequence, None for one that was not "
            "recorded."
        )
    for name, count in Counter(name for name in sequences if name is not None).items():
        if name not in table.lengths:
            raise InputError(
                f"RoutingTable.cut: sequence {name!r} is not in the table of {len(table.lengths)} sequences. Add it "
                "to the table, or pass None to let the router choose."
            )
        if count > 1:
            raise InputError(
                f"RoutingTable.cut: the micro-batch names sequence {name!r} {count} times. Give each sample a name "
                "of its own."
            )
    sequence_T, position_T = layout.positions(shape).cpu().unbind()
    start_T = table._starts_of(sequences)[sequence_T]
    lengths = [0 if name is None else table.lengths[name] for name in sequences]
    length_T = torch.tensor([*lengths, 0], device="cpu")[sequence_T]  # the last one is for padding, sequence -1
    is_known = start_T >= 0
    for row in (is_known & (position_T >= length_T)).nonzero()[:1, 0].tolist():
        sequence = int(sequence_T[row])
        longest = int(position_T[sequence_T == sequence].max()) + 1
        raise InputError(
            f"RoutingTable.cut: a sequence must not be longer than in the table, got {longest} positions of "
            f"sequence {sequences[sequence]!r}, which has {int(length_T[row])} in the table. Record the whole "
            "sequence; engines leave out the last position, for which the table has last_missing=True."
        )
    elsewhere = torch.where(sequence_T < 0, table.padding_row, table.unknown_row)
    return torch.where(is_known, start_T + position_T, elsewhere)


def check_known(table: RoutingTable, rows_T: Tensor, columns: list[int]) -> None:
    """Raise InputError if an entry of these rows and columns of the table is unknown."""
    unknown_TL = table._stored[rows_T.unsqueeze(1), torch.tensor(columns, device="cpu"), 0] == 0
    for row, column in unknown_TL.nonzero()[:1].tolist():
        at = columns[column]
        is_named = rows_T[row] != table.unknown_row
        first = table.key_of(rows_T[row], at) if is_named else f"a sequence named None, layer {table.layers[at]}"
        raise InputError(
            f'RoutingTable.cut: under fallback="error" every entry must be known, got {int(unknown_TL.sum())} of '
            f"{unknown_TL.numel()} unknown. The first is {first}. "
            'Use fallback="router", or record these tokens.'
        )


def span(numbers: Sequence[int]) -> str:
    """Write numbers for an error message: "0..3" if they follow each other."""
    if len(numbers) > 1 and list(numbers) == list(range(numbers[0], numbers[-1] + 1)):
        return f"{numbers[0]}..{numbers[-1]}"
    return ", ".join(map(str, numbers)) or "none"
