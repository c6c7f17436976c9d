"""Graph-safe ``alltoall``: every rank sends every rank the same number of rows, whatever the routing.

Rows that a pair of ranks does not need travel with ids of -1. Counts travel in the same buffers, so the host never
reads one: the first row of each pair carries a note, the number of slots its sender had for that rank, including those
for which there was no room.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from moe_dispatch.backends.wire import Packet
from moe_dispatch.permutation import Permutation, front, running_total


@final
@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class SendTable:
    """Which rows stand in which of the P * pair_rows places of a send buffer.

    Attributes:
        source_S: int64, the row that stands in each place, by destination rank, then row; row 0 where there is none.
        is_used_S: bool.
        member_N: int64 (P * T,), the used places in the order of their rows, then anything.
        cu_T: int64 (T+1,), where the places of each row begin in ``member_N``.
        busiest: int64 (), the most rows that this rank had for one rank.
        wanted_P: int64, the slots that this rank had for each.
    """

    source_S: Tensor
    is_used_S: Tensor
    member_N: Tensor
    cu_T: Tensor
    busiest: Tensor
    wanted_P: Tensor

    def fill(self, outgoing: Tensor, packets: Tensor, form: Packet, permutation: Permutation) -> None:
        """Put packets, uint8 (T, stride) with T at least 1, into their places, (P * pair_rows, stride)."""
        permutation.gather(packets, self.source_S, outgoing)
        form.ids(outgoing).masked_fill_(~self.is_used_S.unsqueeze(1), -1)
        pair_rows = len(self.source_S) // len(self.wanted_P)
        form.notes(outgoing)[::pair_rows, 0] = self.wanted_P.int()


def wanted_here(received: Tensor, form: Packet, pair_rows: int) -> Tensor:
    """int64 (): slots that all senders had for this rank, with those they had no room for."""
    return form.notes(received)[::pair_rows, 0].sum()


def send_table(
    members_PT: Tensor, owner_TK: Tensor, weights_TK: Tensor, pair_rows: int, *, may_overflow: bool
) -> SendTable:
    """Give each (row, destination) pair a place.

    Args:
        members_PT: bool, which ranks own at least one expert of which row.
        owner_TK: int64, 1 + the rank of each slot's expert, 0 for slots that go nowhere.
        weights_TK: floating.
        pair_rows: places to each rank. Of more rows, those of the least weight there (the largest of a row's slots)
            stay behind; of equal ones the last.
        may_overflow: whether there can be more.

    Cost: single passes over P * T, a stable sort of P * T with ``may_overflow``; no host sync.
    """
    size, count = members_PT.shape
    kept_PT = _heaviest(members_PT, owner_TK, weights_TK, pair_rows) if may_overflow else members_PT
    nowhere = size * pair_rows
    at_PT = kept_PT.cumsum(1) - 1 + torch.arange(0, nowhere, pair_rows, device=owner_TK.device).unsqueeze(1)
    at_PT = torch.where(kept_PT, at_PT, nowhere)
    row_PT = torch.arange(count, device=owner_TK.device).expand(size, count)
    source_S = torch.full((nowhere + 1,), -1, dtype=torch.int64, device=owner_TK.device)
    source_S = source_S.index_copy_(0, at_PT.reshape(-1), row_PT.reshape(-1))[:nowhere]
    kept_TP = kept_PT.t()
    wanted_P = torch.zeros(size + 1, dtype=torch.int64, device=owner_TK.device)
    wanted_P.scatter_add_(0, owner_TK.reshape(-1), torch.ones_like(owner_TK).reshape(-1))
    return SendTable(
        source_S=source_S.clamp(min=0),
        is_used_S=source_S >= 0,
        member_N=front(at_PT.t().reshape(-1), kept_TP.reshape(-1)),
        cu_T=running_total(kept_TP.sum(1)),
        busiest=members_PT.sum(1).amax(),
        wanted_P=wanted_P[1:],
    )


def _heaviest(members_PT: Tensor, owner_TK: Tensor, weights_TK: Tensor, pair_rows: int) -> Tensor:
    size, count = members_PT.shape
    heaviest_TP = weights_TK.new_full((count, size + 1), float("-inf"))
    known_TK = torch.where(weights_TK.isnan(), float("inf"), weights_TK)  # a NaN is to be seen, not dropped
    heaviest_TP.scatter_reduce_(1, owner_TK, known_TK, "amax")
    lightness_PT = torch.where(members_PT, -heaviest_TP[:, 1:].t(), float("nan"))  # what is no member sorts last
    order = lightness_PT.sort(dim=1, stable=True).indices[:, :pair_rows]
    return torch.zeros_like(members_PT).scatter_(1, order, True) & members_PT


def send_table_bytes(size: int, rows: int, pair_rows: int) -> int:
    """Bytes of the tables of a ``SendTable`` that live until the backward: source_S, member_N and cu_T."""
    return 8 * (size * pair_rows + (size * rows + 1) + rows + 1)
