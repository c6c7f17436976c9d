"""``strict``: a backend that wants everything a vendor's kernels want, and checks that it gets it."""

from __future__ import annotations

import dataclasses
from typing import Any, final

from torch import Tensor

from moe_dispatch.backends import (
    Arrived,
    Backend,
    BackendContext,
    BackendOptions,
    Constraints,
    MoEShape,
    Sizes,
    load_backend,
)
from moe_dispatch.backends.capacity import Capacity
from moe_dispatch.testing.host_syncs import allow_host_syncs

ROW_MULTIPLE = 64
HIDDEN_MULTIPLE = 16


@final
class StrictOptions(BackendOptions):
    """Options of ``strict``.

    Attributes:
        inner: name of the backend that does the work.
        max_rows: most rows it takes from a rank.
    """

    inner: str = "alltoall"
    max_rows: int = 256


class StrictError(AssertionError):
    """The dispatcher gave the strict backend something that its constraints do not allow."""


@final
class Strict(Backend):
    """Rows a multiple of 64 and equal on all ranks, hidden a multiple of 16, at most ``max_rows`` rows; else it raises.

    The real libraries abort, hang, or give wrong numbers instead. It moves no row itself: another backend does.

    Cost: that of the inner backend, and one all-reduce of two integers per dispatch.
    """

    name = "strict"
    Options = StrictOptions

    def __init__(self, context: BackendContext, options: BackendOptions) -> None:
        super().__init__(context, options)
        assert isinstance(options, StrictOptions)
        self.max_rows = options.max_rows
        cls = load_backend(options.inner)
        self.inner = cls(context, cls.Options())

    @classmethod
    def constraints(cls, shape: MoEShape, options: BackendOptions) -> Constraints:
        assert isinstance(options, StrictOptions)
        inner = load_backend(options.inner)
        return dataclasses.replace(
            inner.constraints(shape, inner.Options()),
            row_multiple=ROW_MULTIPLE,
            equal_rows=True,
            max_rows=options.max_rows,
            hidden_multiple=HIDDEN_MULTIPLE,
            compilable=False,
            exchanges_counts=False,
        )

    @classmethod
    def capacity(cls, shape: MoEShape, options: BackendOptions) -> Capacity:
        assert isinstance(options, StrictOptions)
        inner = load_backend(options.inner)
        return inner.capacity(shape, inner.Options())

    def open(self) -> None:
        self.inner.open()

    def close(self) -> None:
        self.inner.close()

    def dispatch(self, rows_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor, sizes: Sizes) -> Arrived:
        self._check(rows_TD, ids_TK, weights_TK)
        if sizes.padded_rows != len(rows_TD):
            raise StrictError(f"strict: {len(rows_TD)} rows must be those agreed on, {sizes.padded_rows}")
        return self.inner.dispatch(rows_TD, ids_TK, weights_TK, sizes)

    def dispatch_again(self, rows_TD: Tensor, state: Any) -> Tensor:
        self._check(rows_TD)
        return self.inner.dispatch_again(rows_TD, state)

    def combine(self, rows_RD: Tensor, weights_R: Tensor, state: Any, *, weighted: bool) -> Tensor:
        return self.inner.combine(rows_RD, weights_R, state, weighted=weighted)

    @allow_host_syncs()  # it stands for a library that would abort
    def _check(self, rows_TD: Tensor, *tables_TK: Tensor) -> None:
        count, hidden = rows_TD.shape
        # The agreement comes first, so that every rank raises, and none waits for a rank that already has.
        most, negated_least = self.context.communicator.max([count, -count], label="strict")
        if most != -negated_least:
            raise StrictError(f"strict: rows must be equal on all ranks, got {-negated_least} to {most}")
        if count % ROW_MULTIPLE or count > self.max_rows:
            raise StrictError(
                f"strict: rows must be a multiple of {ROW_MULTIPLE}, at most {self.max_rows}, got {count}"
            )
        if hidden % HIDDEN_MULTIPLE:
            raise StrictError(f"strict: hidden must be a multiple of {HIDDEN_MULTIPLE}, got {hidden}")
        for table_TK in tables_TK:
            if len(table_TK) != count:
                raise StrictError(f"strict: ids and weights must have {count} rows, got {len(table_TK)}")
        if any(not tensor.is_contiguous() for tensor in (rows_TD, *tables_TK)):
            raise StrictError("strict: rows, ids and weights must be contiguous")
        if tables_TK and _names_twice(tables_TK[0]):
            raise StrictError("strict: no row may name an expert twice")


def _names_twice(ids_TK: Tensor) -> bool:
    ordered = ids_TK.sort(1).values
    return bool(((ordered.diff(dim=1) == 0) & (ordered[:, 1:] >= 0)).any())
