"""Backends with a bug each, around ``alltoall``; command lines name them by their path."""

from __future__ import annotations

from typing import Any, final

from torch import Tensor

from moe_dispatch.backends import Arrived, Backend, BackendOptions, Constraints, MoEShape, Rejected, Sizes, Usable
from moe_dispatch.backends.alltoall.backend import AllToAll


class Planted(Backend):
    """Right, so far."""

    name = "planted"

    def __init__(self, context: Any, options: BackendOptions) -> None:
        super().__init__(context, options)
        self.inner = AllToAll(context, AllToAll.Options())

    @classmethod
    def constraints(cls, shape: MoEShape, options: BackendOptions) -> Constraints:
        return AllToAll.constraints(shape, AllToAll.Options())

    def dispatch(self, rows_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor, sizes: Sizes) -> Arrived:
        return self.inner.dispatch(rows_TD, ids_TK, weights_TK, sizes)

    def combine(self, rows_RD: Tensor, weights_R: Tensor, state: Any, *, weighted: bool) -> Tensor:
        return self.inner.combine(rows_RD, weights_R, state, weighted=weighted)

    def dispatch_again(self, rows_TD: Tensor, state: Any) -> Tensor:
        return self.inner.dispatch_again(rows_TD, state)

    def refuse(self, code: int, device: Any) -> None:
        self.inner.refuse(code, device)


@final
class Halved(Planted):
    """Combine loses half."""

    name = "halved"

    def combine(self, rows_RD: Tensor, weights_R: Tensor, state: Any, *, weighted: bool) -> Tensor:
        return super().combine(rows_RD, weights_R, state, weighted=weighted) * 0.5


@final
class Raising(Planted):
    """Dispatch raises, on every rank."""

    name = "raising"

    def dispatch(self, rows_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor, sizes: Sizes) -> Arrived:
        raise ArithmeticError("planted in dispatch")


@final
class Absent(Planted):
    """It cannot be used."""

    name = "absent"

    @classmethod
    def probe(cls, options: BackendOptions) -> Usable | Rejected:
        return Rejected("it was planted so")
