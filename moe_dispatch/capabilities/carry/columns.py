"""One dispatch with data that travels with its rows: its checks, its columns, and what arrived.

Dimensions: ``T`` rows of this rank, ``Tp`` the same with padding, ``C`` bytes of the columns of a row, ``S`` rows that
arrived, ``R`` rows of this rank's experts.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from itertools import accumulate, pairwise
from typing import final

import torch
from torch import Tensor

from moe_dispatch.backends.base import Constraints, MoEShape
from moe_dispatch.backends.capacity import worst_rows
from moe_dispatch.backends.rank_major import RankMajorRoute
from moe_dispatch.backends.wire import PacketFormat
from moe_dispatch.capabilities.carry.gathered import Everyone, gather, gathered_bytes, source_of_rows
from moe_dispatch.capabilities.carry.packets import RowWithColumns
from moe_dispatch.dispatched import Dispatched, check_plain
from moe_dispatch.dispatchers import autograd
from moe_dispatch.dispatchers.channel import Channel, Lease
from moe_dispatch.dispatchers.dispatcher import Dispatcher
from moe_dispatch.errors import InputError
from moe_dispatch.permutation import SlotIndex
from moe_dispatch.permutation.strides import dense
from moe_dispatch.seams.call import Call
from moe_dispatch.seams.tracing import refuse_traced
from moe_dispatch.types import Sizes

_DTYPES = (torch.int32, torch.int64)


def with_columns(dispatcher: Dispatcher, call: Call, carry: Mapping[str, Tensor], again: Dispatched | None) -> Call:
    """Return the dispatch with the columns of ``carry``. Whether they fit is checked with the rest of the call.

    Raises:
        StateError: The call is compiled.
        InputError: ``again`` is given, whose data arrives again.
    """
    if dispatcher._lease.enter_unless_traced() is None:
        refuse_traced(
            "Dispatcher.dispatch: carry works neither in a compiled region nor under a policy of selective "
            "checkpointing. Wrap both verbs in torch.compiler.disable, or leave the policy out."
        )
    if again is not None:
        error = InputError(
            "Dispatcher.dispatch: again=sent brings what its dispatch carried, as carried. Leave carry out."
        )
        dispatcher._lease.name_in(error)
        raise error
    return dataclasses.replace(call, columns=CarriedColumns(dispatcher._lease, call.x, carry))


@final
class CarriedColumns:
    """The columns of one dispatch, on their way and where they arrive.

    Args:
        lease: Lease of the dispatcher.
        x: The hidden states of the dispatch.
        carry: One integer for each token of ``x``, by name.

    Attributes:
        dtypes: The dtype of what is carried, by name.
        problem: InputError if a tensor does not fit ``x``, or the backend delivers rows in no fixed order; else None.
    """

    def __init__(self, lease: Lease, x: Tensor, carry: Mapping[str, Tensor]) -> None:
        self._channel = lease.channel
        self.dtypes: dict[str, torch.dtype] = {}
        self.problem: Exception | None = None
        try:
            self._refuse_wrong(lease, x, carry)
            # In an order of its own, because dicts of two ranks may have different ones.
            self._carry = dict(sorted(carry.items()))
            self.dtypes = {name: values.dtype for name, values in self._carry.items()}
        except Exception as error:
            self.problem = error
        self._row: RowWithColumns | None = None
        self._everyone: Everyone | None = None
        self._columns_TC = torch.empty(0, dtype=torch.uint8)

    def check(self) -> None:
        """Raise the problem, if there is one."""
        if self.problem is not None:
            raise self.problem

    @staticmethod
    def _refuse_wrong(lease: Lease, x: Tensor, carry: Mapping[str, Tensor]) -> None:
        channel = lease.channel
        drops = channel.needs.graph_safe is not None and channel.needs.graph_safe.drop_order == "weight"
        room = None if channel.capacity is None else channel.capacity.rows
        if channel.needs.carries == "gather" and drops and room is not None and room < worst_rows(channel.shape):
            raise InputError(
                f"Dispatcher.dispatch: backend {channel.backend_name!r} drops the rows of the smallest weights, and "
                "then cannot carry data. Leave carry out, or capacity_factor."
            )
        needs = channel.needs  # ranks must agree before they gather, and counts are exchanged later
        if needs.carries == "no" or (needs.carries == "gather" and needs.exchanges_counts):
            raise InputError(
                f"Dispatcher.dispatch: backend {channel.backend_name!r} delivers rows in no fixed order with its "
                "options, so it cannot carry data. Leave carry or the option out, such as deterministic=False."
            )
        if not isinstance(carry, Mapping) or not carry:
            raise InputError(
                'Dispatcher.dispatch: carry must be a dict of tensors by name, such as {"adapter": ids}, got '
                f"{type(carry).__name__}{' without entries' * isinstance(carry, Mapping)}."
            )
        if not isinstance(x, Tensor):
            check_plain("Dispatcher.dispatch", x=x)
        for name, values in carry.items():
            if not isinstance(name, str):
                raise InputError(f"Dispatcher.dispatch: names in carry must be text, got {name!r}.")
            if type(values) is not Tensor:
                check_plain("Dispatcher.dispatch", **{f"carry[{name!r}]": values})
            if values.dtype not in _DTYPES or values.shape != x.shape[:-1] or values.device != x.device:
                raise InputError(
                    f"Dispatcher.dispatch: carry[{name!r}] must be int32 or int64 {tuple(x.shape[:-1])} on {x.device}, "
                    f"one number for each token of x, got {str(values.dtype).removeprefix('torch.')} "
                    f"{tuple(values.shape)} on {values.device}."
                )

    def text(self) -> str:
        """Return the names and dtypes, which must be equal on all ranks, for ``facts_of``."""
        return ", ".join(f"{name} ({str(dtype).removeprefix('torch.')})" for name, dtype in self.dtypes.items())

    def depart(self, channel: Channel, sizes: Sizes, ids_TK: Tensor, real_rows: Tensor | None) -> Sizes:
        """Prepare the columns of the padded rows that the backend gets next. Collective if it has no packets.

        Returns:
            The sizes, with ``Sizes.columns`` if the backend carries them.
        """
        count = len(ids_TK)
        parts = [dense(values.reshape(-1, 1)).view(torch.uint8) for values in self._carry.values()]
        columns = torch.cat(parts, 1)
        self._carry.clear()
        self._columns_TC = autograd.pad(columns, real_rows, count, 255)
        if channel.needs.carries == "packets":
            return dataclasses.replace(sizes, columns=self)
        self._everyone = gather(channel, sizes, ids_TK, self._columns_TC)
        return sizes

    def added_to(self, form: PacketFormat) -> PacketFormat:
        """Return a format of packets with these columns. A backend that packs rows calls it."""
        self._row = RowWithColumns(form.row, self._columns_TC)
        return self._row.in_packet(form)

    def attach(self, sent: Dispatched) -> Dispatched:
        """Return the result of the dispatch with what its rows carried."""
        everyone, route, row = self._everyone, sent.state.route, self._row
        if everyone is not None:
            columns_SC = everyone.columns_SC
            source_R = source_of_rows(self._channel, everyone, sent)
        else:  # without packets, rows stay where they are
            arrived_SC = self._columns_TC if row is None else row.arrived_SC
            assert arrived_SC is not None
            assert isinstance(route, RankMajorRoute)
            columns_SC = arrived_SC
            source_R = _filled(route.index)
        return dataclasses.replace(sent, carried=self._split(columns_SC, source_R))

    def _split(self, columns_SC: Tensor, source_R: Tensor) -> dict[str, Tensor]:
        """Return the columns of expert rows by name, -1 where no row is copied."""
        widths = [dtype.itemsize for dtype in self.dtypes.values()]
        ends = accumulate(widths, initial=0)
        columns_RC = columns_SC  # without a row that arrived, there is none to copy
        if len(columns_SC):
            columns_RC = columns_SC.index_select(0, source_R.clamp(min=0))
            columns_RC.masked_fill_((source_R < 0).unsqueeze(1), 255)  # the bytes of -1
        return {
            name: columns_RC[:, begin:end].clone(memory_format=torch.contiguous_format).view(dtype).view(-1)
            for (name, dtype), (begin, end) in zip(self.dtypes.items(), pairwise(ends), strict=True)
        }


def carried_bytes(shape: MoEShape, needs: Constraints, sizes: Sizes) -> int:
    """Return the bytes that carrying ``shape.column_bytes`` for each row adds to a graph-safe dispatch of ``sizes``.

    Those of wider packets are among the packets.
    """
    assert sizes.capacity is not None
    # The columns as they are sorted and as they are split by name, the row of each, and whether it is padding.
    own = sizes.capacity.buffer_rows * (2 * shape.column_bytes + 9)
    return own if needs.carries == "packets" else own + gathered_bytes(shape, sizes)


def _filled(index: SlotIndex) -> Tensor:
    """Return ``source_R`` of an index with -1 on padding."""
    if index.filled_R is not None:
        return index.filled_R
    return index.source_R if index.padding is None else index.source_R.index_fill(0, index.padding, -1)
