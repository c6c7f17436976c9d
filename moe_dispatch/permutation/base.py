"""The contract that every implementation of the one-rank reorder fulfils."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar, Protocol

import torch
from torch import Tensor, dtype

from moe_dispatch.permutation import tables
from moe_dispatch.permutation.index import SlotIndex
from moe_dispatch.probing import Rejected, Usable


def accumulation_dtype(*dtypes: dtype) -> dtype:
    """Return the dtype in which sums are accumulated: float64 if any of ``dtypes`` is float64, else float32."""
    return torch.float64 if torch.float64 in dtypes else torch.float32


class Tables(Protocol):
    """The functions of ``tables``, which documents them, and of every other module that makes tables."""

    def merge_slots(self, ids_TK: Tensor, weights_TK: Tensor, *, asks: bool) -> tuple[Tensor, Tensor]: ...

    def valid_ids(
        self, ids: Tensor, num_experts: int, mark: int | None = None, *, asks: bool
    ) -> tuple[Tensor, Tensor]: ...

    def count_owners(
        self, ids_TK: Tensor, num_local_experts: int, width: int, length: int, *, graph_safe: bool
    ) -> tuple[Tensor, Tensor]: ...

    def group_slots(
        self,
        keys_SK: Tensor,
        counts: Sequence[int],
        pad_multiple: int = 1,
        *,
        entries_per_key: int = 1,
        real_L: Tensor | None = None,
    ) -> SlotIndex: ...

    def group_statically(
        self,
        keys_SK: Tensor,
        num_keys: int,
        *,
        rows: int,
        buffer_rows: int,
        pad_multiple: int,
        weights_SK: Tensor | None,
    ) -> SlotIndex: ...


class Permutation(ABC):
    """An implementation of the one-rank reorder: it makes a ``SlotIndex``, and copies and adds rows as the index says.

    The functions of ``tables`` make the index. It is the same for all implementations.

    Dimensions: S rows before grouping, K slots per row, R grouped rows with padding, N slots that have a key, D hidden.

    Every implementation keeps these promises:

    - Rows may be strided, and there may be no rows at all.
    - Grouped rows that are padding are never read. They may hold anything.
    - Sums are accumulated in ``accumulation_dtype`` and rounded once.
    - No method waits for a GPU.
    - No method takes part in autograd. The caller computes gradients with the methods below.

    Attributes:
        name: Name in a config.
        tables: The module that makes tables: ``tables`` with operators of torch, or ``triton_tables`` with kernels.
    """

    name: ClassVar[str]
    tables: Tables = tables

    @classmethod
    @abstractmethod
    def probe(cls, device_type: str) -> Usable | Rejected:
        """Return whether this implementation can move rows on devices of this type. Never raises."""

    @abstractmethod
    def gather(self, rows: Tensor, source: Tensor, out: Tensor) -> None:
        """Copy ``out[i] = rows[source[i]]``.

        Args:
            rows: (S, D), any dtype, including uint8 packets.
            source: int64 (n,), row numbers in ``[0, S)``.
            out: (n, D). It has the dtype of ``rows``, or any floating dtype if the rows are floating.
        """

    @abstractmethod
    def expand(self, rows_SD: Tensor, index: SlotIndex, dtype: dtype) -> Tensor:
        """Copy each row to all its grouped positions.

        Args:
            rows_SD: (S, D), of any floating dtype.
            index: The index that holds the grouped positions of each row.
            dtype: Dtype of the result.

        Returns:
            (R, D), zero on padding.
        """

    @abstractmethod
    def expand_weighted(
        self, rows_SD: Tensor, index: SlotIndex, weights_R: Tensor | None, partners_RD: Tensor | None, dtype: dtype
    ) -> tuple[Tensor, Tensor | None]:
        """Compute the backward of ``reduce``: the gradients of the grouped rows and of their weights.

        Let the grouped row i be a copy of row s. Its gradient is ``rows_SD[s] * weights_R[i]``. The gradient of its
        weight is the dot product of ``rows_SD[s]`` and ``partners_RD[i]``.

        Args:
            rows_SD: (S, D), the incoming gradient of each row.
            index: The index that ``reduce`` was given.
            weights_R: (R,), or None for weights of 1. On padding it may hold anything.
            partners_RD: (R, D), the rows that ``reduce`` was given; None if the gradient of the weights is not wanted.
                On padding it may hold anything.
            dtype: Dtype of the gradient of the grouped rows.

        Returns:
            The gradient of the grouped rows, (R, D), and the gradient of the weights in their dtype, (R,). The second
            is None without ``weights_R`` or ``partners_RD``. Both are zero on padding.
        """

    @abstractmethod
    def reduce(self, rows_RD: Tensor, index: SlotIndex, weights_R: Tensor | None, out: Tensor) -> None:
        """Write to ``out[s]`` the weighted sum of the grouped rows that are copies of row s, added in slot order.

        Args:
            rows_RD: (R, D).
            index: The index that holds the grouped positions of each row.
            weights_R: (R,) in the accumulation dtype, or None for weights of 1. On padding it may hold anything.
            out: (S, D), any floating dtype.
        """

    @abstractmethod
    def sum_bags(self, rows: Tensor, members_N: Tensor, cu_S: Tensor, weights_N: Tensor | None, out: Tensor) -> None:
        """Write to ``out[s]`` the sum of ``rows[members_N[i]] * weights_N[i]`` over i in ``range(cu_S[s], cu_S[s+1])``.

        The terms are added in the order of i and without atomics, so every run gives the same bits. If ``rows`` has
        more columns than ``out``, the last ones are ignored.
        """
