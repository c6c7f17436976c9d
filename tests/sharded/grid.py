"""Where a rank stands among tensor, context and data parallelism, in Megatron's order, and who its peers are.

Source: megatron-core 0.19.2, parallel_state.RankGenerator with order "tp-cp-ep-dp-pp", the default.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Literal, final

import torch.distributed as dist

Ranks = tuple[tuple[int, ...], ...]  # of several groups
Axis = Literal["tp", "cp", "dp"]


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """The coordinates of one rank."""

    tp: int
    cp: int
    dp: int


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Grid:
    """How many ranks along each axis; tensor-parallel ranks are neighbours."""

    tp: int
    cp: int
    dp: int

    @property
    def size(self) -> int:
        return self.tp * self.cp * self.dp

    def place(self, rank: int) -> Place:
        return Place(tp=rank % self.tp, cp=rank // self.tp % self.cp, dp=rank // (self.tp * self.cp))

    def groups(self, axis: Axis) -> Ranks:
        """The ranks that differ along one axis only."""
        step = {"tp": 1, "cp": self.tp, "dp": self.tp * self.cp}[axis]
        first = [rank for rank in range(self.size) if getattr(self.place(rank), axis) == 0]
        return tuple(tuple(rank + index * step for index in range(getattr(self, axis))) for rank in first)

    def expert_groups(self, *, ep: int, etp: int = 1) -> Ranks:
        """Neighbours, as Megatron lays experts out: shards of an expert side by side, then experts."""
        return tuple(tuple(range(rank, rank + ep * etp)) for rank in range(0, self.size, ep * etp))


@functools.cache
def group_of(rank: int, groups: Ranks, purpose: str) -> dist.ProcessGroup:
    """Make all of the groups, which every process must, and return the one that holds ``rank``.

    Made once in a process for each ``purpose``: connecting takes longer than what small models exchange.
    """
    made = [dist.new_group(list(ranks)) for ranks in groups]
    mine: dist.ProcessGroup = made[[rank in ranks for ranks in groups].index(True)]
    return mine
