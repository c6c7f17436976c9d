"""The interface that the drivers of v1 and v2 share.

Each row is sent once to each rank that needs it. Rows arrive rank-major, that is ordered by source rank. Combine sends
one sum per arrived row back the same way.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from moe_dispatch.backends.base import Arrived
from moe_dispatch.backends.deep_ep.buffers import Handle

# Rows as the library takes them: bfloat16 (T, D), or float8_e4m3fn (T, D) with its float32 scales (T, D/128).
Payload = Tensor | tuple[Tensor, Tensor]


@final
@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class RankMajorRows:
    """The rows that one dispatch brought to this rank.

    Attributes:
        payload: (S, D), ordered by source rank, then by row of the source rank.
        ids_SK: Local expert ids; -1 for experts of other ranks and for slots without an expert.
        weights_SK: float32 (S, K).
        counts: Number of rows of each local expert, on the host; empty if the host did not wait for the counts.
        handle: Handle of this dispatch, for combine and the backwards.
        num_received: Number of rows that arrived, () or (1,), on the device. Ids behind these rows may be anything.
            None if those ids are -1, or if all S rows arrived.
    """

    payload: Payload
    ids_SK: Tensor
    weights_SK: Tensor
    counts: Sequence[int]
    handle: Handle
    num_received: Tensor | None = None

    @property
    def known_ids_SK(self) -> Tensor:
        """``ids_SK`` with -1 behind the rows that arrived. No host sync."""
        if self.num_received is None:
            return self.ids_SK
        at_S = torch.arange(len(self.ids_SK), device=self.ids_SK.device)
        return torch.where((at_S < self.num_received).unsqueeze(1), self.ids_SK, -1)


class RankMajorDriver(ABC):
    """Base of the drivers, each of which calls one buffer class. No method is differentiable.

    Attributes:
        buffers: Description of the buffers, for the log.
    """

    buffers: str

    @abstractmethod
    def reserve(self, rows: int) -> None:
        """Make room for ``rows`` rows per rank. All ranks pass the same number."""

    @abstractmethod
    def send(
        self, payload: Payload, ids_TK: Tensor, weights_TK: Tensor, *, asynchronously: bool, worst_rows: int | None
    ) -> Callable[[], RankMajorRows | Arrived]:
        """Send each row once to each rank that owns at least one of its experts.

        Args:
            payload: The rows, (T, D).
            ids_TK: int64 (T, K), global expert ids.
            weights_TK: float32 (T, K).
            asynchronously: Whether to return before the payload has arrived.
            worst_rows: Largest number of rows that all ranks together can send to one rank. The result then has S =
                ``worst_rows``, however many rows arrive, and the host waits for no count. None: the host reads the
                number of rows that arrive, which is S.

        Returns:
            A function that makes the current stream wait for the payload, and returns the rows. It is called once. If
            the library itself delivers expert-major rows, the result is complete but for the dtypes.
        """

    @abstractmethod
    def send_again(self, payload: Payload, handle: Handle) -> Payload:
        """Send other rows the way of an earlier dispatch, without an exchange of counts or a host sync."""

    @abstractmethod
    def combine(self, rows_SD: Tensor, values_SK: Tensor | None, handle: Handle) -> tuple[Tensor, Tensor | None]:
        """Send rows back to the ranks that they came from, and add the rows that belong to one source row.

        Args:
            rows_SD: bfloat16 (S, D). They are added in float32 and rounded once.
            values_SK: float32 (S, K), values that are sent back and added like the rows; None for no values.
            handle: Handle of the dispatch.

        Returns:
            The summed rows, (T, D), and the summed values, (T, K), or None.
        """

    @abstractmethod
    def close(self) -> None:
        """Destroy the buffers. Collective."""
