"""The contract that every implementation of the one-rank reorder fulfils."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import ClassVar

from torch import Tensor, dtype

from moe_dispatch.permutation import index as tables
from moe_dispatch.permutation.index import SlotIndex
from moe_dispatch.seams.plug_ins import Rejected, Usable


class Permutation(ABC):
    """An implementation of the one-rank reorder: it makes a ``SlotIndex``, and copies and adds rows as the index says.

    The index is the same for all implementations. Five functions make it: those of ``index``, or kernels of the same
    names.

    Dimensions: S rows before grouping, K slots per row, R grouped rows with padding, N slots that have a key, D hidden.

    Every implementation keeps these promises:

    - Rows may be strided, and there may be no rows at all.
    - Grouped rows that are padding are never read. They may hold anything.
    - Sums are accumulated in ``accumulation_dtype`` and rounded once.
    - No method waits for a GPU.
    - No method takes part in autograd. The caller computes gradients with the methods below.

    Attributes:
        name: Name in a config.
        send_places: Kernels that give rows their places among the packets of ``alltoall``; None if operators of torch
            do it.
        pack_slots: Kernel that writes weights and ids into packets, beside ``send_places``.
    """

    name: ClassVar[str]
    merge_slots: Callable[..., tuple[Tensor, Tensor]] = staticmethod(tables.merge_slots)
    valid_ids: Callable[..., tuple[Tensor, Tensor]] = staticmethod(tables.valid_ids)
    count_owners: Callable[..., tuple[Tensor, Tensor]] = staticmethod(tables.count_owners)
    group_slots: Callable[..., SlotIndex] = staticmethod(tables.group_slots)
    group_statically: Callable[..., SlotIndex] = staticmethod(tables.group_statically)
    to_grouped: Callable[[SlotIndex, Tensor], Tensor] = staticmethod(SlotIndex.to_grouped)
    send_places: Callable[..., tuple[Tensor, ...]] | None = None
    pack_slots: Callable[..., None]

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

    def scatter(self, rows: Tensor, source_B: Tensor, member_B: Tensor, cu_S: Tensor, out: Tensor) -> None:
        """Copy each row to all its places: ``out[b] = rows[source_B[b]]``. An implementation may read either table.

        Args:
            rows: (S, D), as in ``gather``.
            source_B: int64 (B,), as in ``gather``. It may be negative if ``send_places`` made it.
            member_B: int64, the places of each row, ordered by row.
            cu_S: int64 (S+1,), where the places of each row begin in ``member_B``.
            out: (B, D), as in ``gather``. Places of no row may hold anything.
        """
        self.gather(rows, source_B, out)

    @abstractmethod
    def expand(self, rows_SD: Tensor, index: SlotIndex, dtype: dtype) -> Tensor:
        """Copy each row to all its grouped positions.

        Args:
            rows_SD: (S, D), of any floating dtype, or uint8.
            index: The index that holds the grouped positions of each row.
            dtype: Dtype of the result.

        Returns:
            (R, D), zero on padding. Slack of an index of fixed size may hold anything.
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
            is None without ``weights_R`` or ``partners_RD``. Both are zero on padding. Slack may hold anything.
        """

    @abstractmethod
    def weigh(
        self,
        rows_RD: Tensor,
        weights_R: Tensor,
        is_real: Callable[[], Tensor],
        dtype: dtype,
        *,
        partners_RD: Tensor | None = None,
        clears: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Multiply grouped rows by their weights, for libraries that copy and sum the rows themselves.

        Args:
            rows_RD: (R, D).
            weights_R: (R,); on padding they are 0.
            is_real: Function that returns flags of the rows, bool (R,), False on padding. Called at most once.
            dtype: Dtype of the products. They are computed in ``accumulation_dtype``, and rounded once.
            partners_RD: (R, D), if the dot products of both rows are wanted: with gradients as rows and with the rows
                of the forward as partners, they are the gradients of the weights. On padding they may hold anything.
            clears: Whether products must be 0 on padding. If not, they may hold anything there. Rows may in any case.

        Returns:
            The products, (R, D), and the dot products in the dtype of the weights, (R,), which are 0 on padding; None
            without partners.
        """

    @abstractmethod
    def reduce(
        self,
        rows_RD: Tensor,
        index: SlotIndex,
        weights_R: Tensor | None,
        out: Tensor,
        values: tuple[Tensor, Tensor] | None = None,
    ) -> None:
        """Write to ``out[s]`` the weighted sum of the grouped rows that are copies of row s, added in slot order.

        Args:
            rows_RD: (R, D).
            index: The index that holds the grouped positions of each row.
            weights_R: (R,) in the accumulation dtype, or None for weights of 1. On padding it may hold anything.
            out: (S, D), any floating dtype.
            values: One value per grouped row, (R,), and what gets them, (S, K) with a stride of rows: the value at the
                slot of its row, and 0 at slots without a key. None if no values are to be moved.
        """

    @abstractmethod
    def sum_bags(self, rows: Tensor, members_N: Tensor, cu_S: Tensor, weights_N: Tensor | None, out: Tensor) -> None:
        """Write to ``out[s]`` the sum of ``rows[members_N[i]] * weights_N[i]`` over i in ``range(cu_S[s], cu_S[s+1])``.

        The terms are added in the order of i and without atomics, so every run gives the same bits. If ``rows`` has
        more columns than ``out``, the last ones are ignored.
        """
