"""``strict``: a backend that has the constraints of the vendors' kernels, and checks that the dispatcher meets them."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import final

from torch import Tensor

from moe_dispatch.backends import (
    Arrived,
    Backend,
    BackendContext,
    BackendOptions,
    Communicator,
    Constraints,
    MoEShape,
    Route,
    Sizes,
    load_backend,
)
from moe_dispatch.backends.wire import Encoded
from moe_dispatch.types import Capacity
from moe_dispatch_testing.host_syncs import allow_host_syncs

ROW_MULTIPLE = 64
HIDDEN_MULTIPLE = 16


@final
class StrictOptions(BackendOptions):
    """Options of ``strict``.

    Attributes:
        inner: Name of the backend that moves the rows.
        max_rows: Largest number of rows of a rank.
    """

    name = "strict"

    inner: str = "alltoall"
    max_rows: int = 256

    @property
    def inner_options(self) -> BackendOptions:
        """Return the default options of the backend that moves the rows."""
        return load_backend(self.inner)()

    def constraints(self, shape: MoEShape) -> Constraints:
        return dataclasses.replace(
            self.inner_options.constraints(shape),
            carries="gather",  # a route of another class than the inner one's
            row_multiple=ROW_MULTIPLE,
            equal_rows=True,
            max_rows=self.max_rows,
            hidden_multiple=HIDDEN_MULTIPLE,
            compilable=False,
            exchanges_counts=False,
        )

    def capacity(self, shape: MoEShape) -> Capacity:
        return self.inner_options.capacity(shape)

    def open(self, context: BackendContext) -> Backend:
        return Strict(context, self.inner_options.open(context), max_rows=self.max_rows)


class StrictError(AssertionError):
    """The dispatcher broke a constraint of the strict backend."""


@final
class Strict(Backend):
    """Wraps another backend, and raises if its input breaks a rule of the vendors' kernels.

    The number of rows must be a multiple of 64, equal on all ranks, and at most ``max_rows``. The hidden size must be a
    multiple of 16. Where this backend raises, the vendors' libraries abort, hang, or compute wrong numbers.

    Cost: the cost of the inner backend, and one all-reduce of two integers per dispatch.
    """

    def __init__(self, context: BackendContext, inner: Backend, *, max_rows: int) -> None:
        super().__init__(context)
        self.inner = inner
        self.max_rows = max_rows

    def close(self) -> None:
        self.inner.close()

    def dispatch(self, rows_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor, sizes: Sizes) -> Arrived:
        comm = self.context.communicator
        _check(comm, self.max_rows, rows_TD, ids_TK, weights_TK)
        if sizes.padded_rows != len(rows_TD):
            raise StrictError(
                f"strict: the number of rows must be {sizes.padded_rows}, as all ranks agreed, got {len(rows_TD)}"
            )
        arrived = self.inner.dispatch(rows_TD, ids_TK, weights_TK, sizes)
        route = StrictRoute(inner=arrived.route, communicator=comm, max_rows=self.max_rows)
        return dataclasses.replace(arrived, route=route)


@final
@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class StrictRoute(Route):
    """Wraps the route of the inner backend, and checks rows that are sent again."""

    inner: Route
    communicator: Communicator
    max_rows: int

    def send(self, rows_TD: Tensor) -> Tensor | Encoded:
        _check(self.communicator, self.max_rows, rows_TD)
        return self.inner.send(rows_TD)

    def combine(self, rows_RD: Tensor, weights_R: Tensor | None) -> Tensor:
        return self.inner.combine(rows_RD, weights_R)

    def dispatch_backward(self, grad_RD: Tensor, grad_R: Tensor | None) -> tuple[Tensor, Tensor | None]:
        return self.inner.dispatch_backward(grad_RD, grad_R)

    def combine_backward(
        self, grad_TD: Tensor, rows_RD: Tensor | None, weights_R: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        return self.inner.combine_backward(grad_TD, rows_RD, weights_R)


@allow_host_syncs()  # the checks stand for a library that would abort, so their reads do not count
def _check(communicator: Communicator, max_rows: int, rows_TD: Tensor, *tables_TK: Tensor) -> None:
    count, hidden = rows_TD.shape
    # The exchange comes first, so that no rank waits in it for a rank that has already raised.
    most, negated_least = communicator.max([count, -count], label="strict")
    if most != -negated_least:
        raise StrictError(f"strict: rows must be equal on all ranks, got {-negated_least} to {most}")
    if count % ROW_MULTIPLE or count > max_rows:
        raise StrictError(f"strict: rows must be a multiple of {ROW_MULTIPLE}, at most {max_rows}, got {count}")
    if hidden % HIDDEN_MULTIPLE:
        raise StrictError(f"strict: hidden must be a multiple of {HIDDEN_MULTIPLE}, got {hidden}")
    for table_TK in tables_TK:
        if len(table_TK) != count:
            raise StrictError(f"strict: ids and weights must have {count} rows, got {len(table_TK)}")
    if any(not tensor.is_contiguous() for tensor in (rows_TD, *tables_TK)):
        raise StrictError("strict: rows, ids and weights must be contiguous")
    if tables_TK and _has_duplicates(tables_TK[0]):
        raise StrictError("strict: no row may name an expert twice")


def _has_duplicates(ids_TK: Tensor) -> bool:
    ordered = ids_TK.sort(1).values
    return bool(((ordered.diff(dim=1) == 0) & (ordered[:, 1:] >= 0)).any())
