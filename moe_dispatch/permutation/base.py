"""What every implementation of the one-rank reorder offers: passes over rows, outside autograd."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

from torch import Tensor, dtype

from moe_dispatch.permutation.index import SlotIndex
from moe_dispatch.probing import Rejected, Usable


class Permutation(ABC):
    """Moves rows where a ``SlotIndex`` says. The index is made by torch and shared by all implementations.

    S rows before grouping, K slots per row, R grouped rows with padding, N real ones, D hidden. Rows may be strided,
    and there may be none of them. Grouped rows that are padding are never read, whatever they hold. Sums are
    accumulated in ``max(float32, dtype)`` and rounded once. No host sync on a GPU. No gradients: autograd is the
    caller's.
    """

    name: ClassVar[str]

    @classmethod
    @abstractmethod
    def probe(cls, device_type: str) -> Usable | Rejected:
        """Whether it can move rows on devices of this type. Never raises."""

    @abstractmethod
    def gather(self, rows: Tensor, source: Tensor, out: Tensor) -> None:
        """``out[i] = rows[source[i]]``.

        Args:
            rows: (S, D), any dtype, uint8 packets too.
            source: int64 (n,), each in ``[0, S)``.
            out: (n, D), of the same dtype or, for floating rows, another floating one.
        """

    @abstractmethod
    def expand(self, rows_SD: Tensor, index: SlotIndex, dtype: dtype) -> Tensor:
        """Copy each row to all its grouped positions.

        Args:
            rows_SD: (S, D), of any floating dtype.
            index: where they go.
            dtype: of the result.

        Returns:
            (R, D), zero on padding.
        """

    @abstractmethod
    def expand_weighted(
        self, rows_SD: Tensor, index: SlotIndex, weights_R: Tensor | None, partners_RD: Tensor | None, dtype: dtype
    ) -> tuple[Tensor, Tensor | None]:
        """The backward of ``reduce``: each row times the weight of its grouped position, and the gradient of weights.

        Args:
            rows_SD: (S, D), the incoming gradient by row.
            index: of the reduce.
            weights_R: (R,), or None for weights of 1.
            partners_RD: (R, D), what ``reduce`` was given; None when the gradient of the weights is not wanted. On
                padding it and the weights may hold anything.
            dtype: of the result.

        Returns:
            (R, D) gradient of the grouped rows, zero on padding, and (R,) gradient of the weights in their dtype, zero
            on padding, or None.
        """

    @abstractmethod
    def reduce(self, rows_RD: Tensor, index: SlotIndex, weights_R: Tensor | None, out: Tensor) -> None:
        """``out[s]`` = the sum of the grouped rows of row s, in slot order, each times its weight.

        Args:
            rows_RD: (R, D).
            index: which rows to sum.
            weights_R: (R,) in the accumulation dtype, or None for weights of 1. On padding it may hold anything.
            out: (S, D), any floating dtype.
        """

    @abstractmethod
    def sum_bags(self, rows: Tensor, members_N: Tensor, cu_S: Tensor, weights_N: Tensor | None, out: Tensor) -> None:
        """``out[s]`` = sum over ``i`` in ``cu_S[s]:cu_S[s+1]`` of ``rows[members_N[i]] * weights_N[i]``, in that order.

        A gather: no atomics, so the same bits in every run. Columns of ``rows`` beyond those of ``out`` are ignored.
        """
