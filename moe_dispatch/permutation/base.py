"""The contract of the one-rank reorder: what every implementation offers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

import torch
from torch import Tensor, dtype

from moe_dispatch.permutation.index import SlotIndex
from moe_dispatch.probing import Rejected, Usable


def accumulation_dtype(*dtypes: dtype) -> dtype:
    """Return the dtype in which sums are accumulated: float64 if one of these is, else float32."""
    return torch.float64 if torch.float64 in dtypes else torch.float32


class Permutation(ABC):
    """Moves rows to where a ``SlotIndex`` says. All implementations share the index, which torch makes.

    S rows before grouping, K slots per row, R grouped rows with padding, N slots that have a key, D hidden.

    Rows may be strided, and there may be no rows at all. Grouped rows that are padding are never read, whatever they
    hold. Sums are accumulated in ``accumulation_dtype`` and rounded once. There is no host sync on a GPU. There are no
    gradients: the caller does autograd.
    """

    name: ClassVar[str]

    @classmethod
    @abstractmethod
    def probe(cls, device_type: str) -> Usable | Rejected:
        """Tell whether it can move rows on devices of this type. Never raises."""

    @abstractmethod
    def gather(self, rows: Tensor, source: Tensor, out: Tensor) -> None:
        """Copy ``out[i] = rows[source[i]]``.

        Args:
            rows: (S, D), any dtype, including uint8 packets.
            source: int64 (n,), each in ``[0, S)``.
            out: (n, D), of the same dtype; if rows are floating, of any floating dtype.
        """

    @abstractmethod
    def expand(self, rows_SD: Tensor, index: SlotIndex, dtype: dtype) -> Tensor:
        """Copy each row to all its grouped positions.

        Args:
            rows_SD: (S, D), of any floating dtype.
            index: The grouped positions.
            dtype: The dtype of the result.

        Returns:
            (R, D), zero on padding.
        """

    @abstractmethod
    def expand_weighted(
        self, rows_SD: Tensor, index: SlotIndex, weights_R: Tensor | None, partners_RD: Tensor | None, dtype: dtype
    ) -> tuple[Tensor, Tensor | None]:
        """Compute the backward of ``reduce``: the gradients of the grouped rows and of their weights.

        Args:
            rows_SD: (S, D), the incoming gradient of each row.
            index: The index of the reduce.
            weights_R: (R,), or None for weights of 1. On padding it may hold anything.
            partners_RD: (R, D), the rows that ``reduce`` was given; None if the gradient of the weights is not wanted.
                On padding it may hold anything.
            dtype: The dtype of the gradient of the grouped rows.

        Returns:
            The gradient of the grouped rows, (R, D), and the gradient of the weights in their dtype, (R,), or None.
            Both are zero on padding.
        """

    @abstractmethod
    def reduce(self, rows_RD: Tensor, index: SlotIndex, weights_R: Tensor | None, out: Tensor) -> None:
        """Sum into ``out[s]`` the grouped rows of row s, in slot order, each times its weight.

        Args:
            rows_RD: (R, D).
            index: The grouped positions of each row.
            weights_R: (R,) in the accumulation dtype, or None for weights of 1. On padding it may hold anything.
            out: (S, D), any floating dtype.
        """

    @abstractmethod
    def sum_bags(self, rows: Tensor, members_N: Tensor, cu_S: Tensor, weights_N: Tensor | None, out: Tensor) -> None:
        """Sum into ``out[s]`` the terms ``rows[members_N[i]] * weights_N[i]``, for i from ``cu_S[s]`` to ``cu_S[s+1]``.

        The terms are added in that order and without atomics, so every run gives the same bits. Columns of ``rows``
        beyond those of ``out`` are ignored.
        """
