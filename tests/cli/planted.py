"""Backends with a bug each, around ``alltoall``; command lines name their options by path."""

from __future__ import annotations

import dataclasses
from typing import ClassVar, final

import torch
from torch import Tensor

from moe_dispatch.backends import (
    Arrived,
    Backend,
    BackendContext,
    BackendOptions,
    Constraints,
    MoEShape,
    Rejected,
    Sizes,
    Usable,
)
from moe_dispatch.backends.alltoall.options import AllToAllOptions
from moe_dispatch.types import Capacity


class Planted(BackendOptions):
    """Right, so far."""

    name = "planted"
    scale: ClassVar[float] = 1.0
    most_rows: ClassVar[int] = 2**31

    def constraints(self, shape: MoEShape) -> Constraints:
        return dataclasses.replace(AllToAllOptions().constraints(shape), compilable=False)

    def capacity(self, shape: MoEShape) -> Capacity:
        return AllToAllOptions().capacity(shape)

    def open(self, context: BackendContext) -> Backend:
        return PlantedBackend(context, self.scale, self.most_rows)


class PlantedBackend(Backend):
    """Scales weights, and hands everything on to ``alltoall`` unless there are too many rows."""

    def __init__(self, context: BackendContext, scale: float = 1.0, most_rows: int = 2**31) -> None:
        super().__init__(context)
        self.inner, self.scale, self.most_rows = AllToAllOptions().open(context), scale, most_rows

    def dispatch(self, rows_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor, sizes: Sizes) -> Arrived:
        if len(rows_TD) > self.most_rows:
            raise ArithmeticError("planted in dispatch")
        return self.inner.dispatch(rows_TD, ids_TK, self.scale * weights_TK, sizes)

    def refuse(self, device: torch.device) -> None:
        self.inner.refuse(device)


@final
class Halved(Planted):
    """Combine loses half."""

    name = "halved"
    scale = 0.5


@final
class Raising(Planted):
    """Dispatch raises if there are more than 8 tokens."""

    name = "raising"
    most_rows = 8


@final
class Absent(Planted):
    """It cannot be used."""

    name = "absent"

    def probe(self) -> Usable | Rejected:
        return Rejected("it was planted so")
