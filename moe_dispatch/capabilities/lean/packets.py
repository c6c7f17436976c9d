"""Rows as they arrived at a rank, each token once, and the way in which they are copied to the experts of the rank.

S rows arrived, and R rows go to experts. A token that goes to 3 experts of this rank is 1 of S rows and 3 of R.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, final

import torch
from torch import Tensor

from moe_dispatch.backends.base import Route
from moe_dispatch.backends.rank_major import RankMajorRoute, grouped
from moe_dispatch.backends.wire import Encoded, wire_format
from moe_dispatch.dispatched import Dispatched
from moe_dispatch.errors import StateError
from moe_dispatch.permutation import Permutation, SlotIndex, round_up

AT_ONCE_BYTES = 4 << 20  # fewer bytes of copies are made for all experts at once


@final
@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Copies:
    """How rows that arrived are copied to experts.

    Attributes:
        route: Route of the dispatch; None if what arrived are copies.
        part: Which of the R rows are wanted; None for all.
    """

    route: Route | None
    part: slice | None = None

    @property
    def are_made_here(self) -> bool:
        """Whether this package copies the rows. If not, a vendor's library delivers them as copies."""
        return isinstance(self.route, RankMajorRoute)

    def of(self, arrived: Tensor | Encoded, dtype: torch.dtype) -> Tensor:
        """Return the copies in ``dtype``, zero on padding. Slack of graph-safe mode may hold anything.

        Cost: a pass over the copies; none if a vendor's library has made them.
        """
        route, part = self.route, self.part
        if not isinstance(route, RankMajorRoute):
            assert isinstance(arrived, Tensor)
            return (arrived if part is None else arrived[part]).to(dtype)
        if part is None:
            copied: Tensor = grouped(route, arrived, dtype)
            return copied
        rows_SD = arrived if isinstance(arrived, Tensor) else arrived.decoded(dtype)
        rows = rows_SD.index_select(0, route.index.source_R[part]).to(dtype)
        if route.index.padding is not None:
            is_padding_R = torch.zeros(route.index.num_grouped, dtype=torch.bool, device=rows.device)
            rows.masked_fill_(is_padding_R.index_fill_(0, route.index.padding, True)[part].unsqueeze(1), 0)
        return rows

    def by_expert(self, arrived: Tensor | Encoded) -> list[slice] | None:
        """Return the real rows of each expert among the wanted ones, if copies are best made for one expert at a time.

        On a CPU, the copies of one expert stay in the cache until they are multiplied, and no memory is needed for all
        of them. A GPU would wait for many small launches, and graph-safe mode does not know the counts. Few copies are
        made at once, because a call for each expert would take longer.
        """
        route = self.route
        if not (isinstance(route, RankMajorRoute) and isinstance(arrived, Tensor) and arrived.is_cpu):
            return None
        counts, multiple = route.index.counts, route.index.pad_multiple
        if counts is None or self.num_copies * arrived.shape[1] * arrived.element_size() < AT_ONCE_BYTES:
            return None
        part = self.part or slice(0, route.index.num_grouped)
        begins = accumulate((round_up(count, multiple) for count in counts), initial=-part.start)
        found = [slice(begin, begin + count) for begin, count in zip(begins, counts, strict=False)]
        return [each for each in found if each.start >= 0 and each.stop <= part.stop - part.start]

    def of_expert(self, arrived: Tensor, rows: slice, dtype: torch.dtype) -> Tensor:
        """Return the copies of one expert, whose rows ``by_expert`` gave."""
        assert isinstance(self.route, RankMajorRoute)
        first = 0 if self.part is None else self.part.start
        source = self.route.index.source_R[first + rows.start : first + rows.stop]
        return arrived.index_select(0, source).to(dtype)

    @property
    def num_copies(self) -> int:
        """Number of copies that are wanted."""
        assert isinstance(self.route, RankMajorRoute)
        return self.route.index.num_grouped if self.part is None else self.part.stop - self.part.start

    def num_arrived(self, num_grouped: int) -> int:
        """Return the number of rows that arrived, S; R if a vendor's library delivers copies."""
        return self.route.index.num_rows if isinstance(self.route, RankMajorRoute) else num_grouped


# FSDP2 maps over the dataclasses among the arguments of a module, which may be a Dispatched, and casts their tensors. A
# class without this mark is left as it is.
del Copies.__dataclass_fields__


@final
class Packets:
    """The rows that arrived with one dispatch, in the place of the rows of experts. An ``Encoded``.

    Args:
        rows_SD: The rows, encoded or not.
        copies: How they are copied to experts.
        wire: Format of the rows, if they are encoded.
    """

    __slots__ = ("_kept", "_version", "_wire", "copies", "rows_SD")

    def __init__(self, rows_SD: Tensor | Encoded, copies: Copies, wire: str | None) -> None:
        # A backend of one rank hands over the x of the model, which may be part of a graph.
        self.rows_SD = rows_SD.detach() if isinstance(rows_SD, Tensor) else rows_SD
        self.copies = copies
        self._wire = wire
        self._version = _versions(self.tensors())
        self._kept: tuple[Tensor, Tensor] | None = None

    def rows(self, in_graph: Tensor) -> Tensor:
        """Return the rows of experts, (R, D), as a function of their place in the graph. They are kept."""
        kept = self._kept
        if kept is None or kept[0] is not in_graph or kept[1].is_inference() > torch.is_inference_mode_enabled():
            kept = self._kept = in_graph, _Copied.apply(in_graph, self)  # type: ignore[no-untyped-call]
        return kept[1]

    def copied(self, dtype: torch.dtype) -> Tensor:
        """Return the rows of experts in ``dtype``, without a graph."""
        self.check()
        return self.copies.of(self.rows_SD, dtype)

    def check(self) -> None:
        """Raise StateError if the rows have been changed in place since they arrived."""
        if self._version is not None and self._version != _versions(self.tensors()):
            raise StateError(
                "Dispatched.rows: the rows that arrived must stay as they are until experts have read them, got rows "
                "that were changed in place. On one rank they are x itself: do not write to x before the experts ran."
            )

    def of_part(self, part: slice) -> Packets:
        """Return the packets for some of the R rows."""
        first = 0 if self.copies.part is None else self.copies.part.start
        whole = slice(first + part.start, first + part.stop)
        return Packets(self.rows_SD, Copies(route=self.copies.route, part=whole), self._wire)

    def saved(self) -> tuple[Any, list[Tensor]]:
        """Return what ``restored`` needs: a value to keep, and tensors to save."""
        return (self.copies, None if isinstance(self.rows_SD, Tensor) else self._wire), self.tensors()

    # The rest is what ``Encoded`` asks for.

    def decoded(self, dtype: torch.dtype) -> Tensor:
        return self.copied(dtype)

    def tensors(self) -> list[Tensor]:
        return [self.rows_SD] if isinstance(self.rows_SD, Tensor) else self.rows_SD.tensors()

    def stand_in(self, dtype: torch.dtype) -> Tensor:
        """Return one NaN in memory, at which all strides of 0 point."""
        (first, *_), route = self.tensors(), self.copies.route
        assert isinstance(route, RankMajorRoute)
        return without_memory(first, route.index.num_grouped, route.context.shape.hidden_size, dtype)

    def added_to(self, sent: Dispatched, wire: str | None) -> Dispatched:
        return dataclasses.replace(sent, packets=self)

    def expand(
        self, permutation: Permutation, index: SlotIndex, dtype: torch.dtype, *, as_sent: bool
    ) -> Tensor | Encoded:
        raise NotImplementedError  # rows that arrived are copied once

    def expand_weighted(self, permutation: Permutation, *given: Any, as_sent: bool) -> tuple[Tensor, Tensor | None]:
        raise NotImplementedError

    def gradient(self, dtype: torch.dtype) -> Tensor:
        raise NotImplementedError


def deliver(route: RankMajorRoute, rows_SD: Tensor | Encoded) -> Packets:
    """Return the rows of a dispatch as they arrived."""
    return Packets(rows_SD, Copies(route=route), route.context.shape.wire_dtype)


def restored(kept: tuple[Copies, str | None], tensors: Sequence[Tensor]) -> tuple[Copies, Tensor | Encoded]:
    """Return how rows are copied and what arrived, from ``Packets.saved``."""
    copies, wire = kept
    return copies, tensors[0] if wire is None else wire_format(wire).restored(tensors)


def without_memory(like: Tensor, rows: int, columns: int, dtype: torch.dtype) -> Tensor:
    """Return a tensor for a place in the graph: one NaN, at which all strides of 0 point."""
    found = torch.empty_strided((rows, columns), (0, 0), dtype=dtype, device=like.device)
    found[:1, :1].fill_(float("nan"))
    return found


def _versions(tensors: Sequence[Tensor]) -> list[int] | None:
    """Return how often each tensor was changed in place; None where torch does not count that."""
    return None if any(tensor.is_inference() for tensor in tensors) else [tensor._version for tensor in tensors]


class _Copied(torch.autograd.Function):
    """The rows of experts as a function of their place in the graph, which gets the gradient unchanged."""

    @staticmethod
    def forward(ctx: Any, in_graph: Tensor, packets: Packets) -> Tensor:
        return packets.copied(in_graph.dtype).data  # no view, so experts may change it in place

    @staticmethod
    def backward(ctx: Any, grad_RD: Tensor) -> Any:
        return grad_RD, None
