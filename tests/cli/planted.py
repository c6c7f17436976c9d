"""Backends with a bug each, around ``alltoall``; command lines name their options by path."""

from __future__ import annotations

import dataclasses
from typing import final

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

    def constraints(self, shape: MoEShape) -> Constraints:
        return dataclasses.replace(AllToAllOptions().constraints(shape), compilable=False)

    def capacity(self, shape: MoEShape) -> Capacity:
        return AllToAllOptions().capacity(shape)

    def open(self, context: BackendContext) -> Backend:
        return PlantedBackend(context)


class PlantedBackend(Backend):
    """Hands everything on to ``alltoall``."""

    def __init__(self, context: BackendContext) -> None:
        super().__init__(context)
        self.inner = AllToAllOptions().open(context)

    def dispatch(self, rows_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor, sizes: Sizes) -> Arrived:
        return self.inner.dispatch(rows_TD, ids_TK, weights_TK, sizes)

    def refuse(self, device: torch.device) -> None:
        self.inner.refuse(device)


@final
class Halved(Planted):
    """Combine loses half."""

    name = "halved"

    def open(self, context: BackendContext) -> Backend:
        return HalvedBackend(context)


@final
class HalvedBackend(PlantedBackend):
    """Halves the weights of the rows."""

    def dispatch(self, rows_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor, sizes: Sizes) -> Arrived:
        return super().dispatch(rows_TD, ids_TK, 0.5 * weights_TK, sizes)


@final
class Raising(Planted):
    """Dispatch raises if there are more than 8 tokens."""

    name = "raising"

    def open(self, context: BackendContext) -> Backend:
        return RaisingBackend(context)


@final
class RaisingBackend(PlantedBackend):
    """Refuses large dispatches."""

    def dispatch(self, rows_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor, sizes: Sizes) -> Arrived:
        if len(rows_TD) > 8:
            raise ArithmeticError("planted in dispatch")
        return super().dispatch(rows_TD, ids_TK, weights_TK, sizes)


@final
class Absent(Planted):
    """It cannot be used."""

    name = "absent"

    def probe(self) -> Usable | Rejected:
        return Rejected("it was planted so")
