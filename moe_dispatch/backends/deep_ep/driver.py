"""What v1 and v2 have in common: rows arrive rank-major, each once per rank, and sums travel the same way back."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor

from moe_dispatch.backends.deep_ep.pool import PooledBuffer

# bfloat16 (T, D), or float8_e4m3fn (T, D) with its float32 scales (T, D/128).
Payload = Tensor | tuple[Tensor, Tensor]


@final
@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Handle:
    """The library's own handle of one dispatch, opaque, and the buffer that it belongs to."""

    pooled: PooledBuffer
    raw: Any

    @property
    def buffer(self) -> Any:
        """The buffer; StateError once it is closed."""
        return self.pooled.buffer


@final
@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class RankMajorRows:
    """The rows that one dispatch brought to this rank.

    Attributes:
        payload: (S, D), by source rank, then source row.
        ids_SK: local expert ids, -1 for experts of other ranks and for none.
        weights_SK: float32.
        counts: rows per local expert, on the host; empty where nobody waited for them.
        handle: of this dispatch, for combine and the backwards.
        wait: makes the current stream wait for the payload.
        num_received: () or (1,), on the device, how many rows arrived; ids behind them are anything. None where they
            are -1, or where nothing is behind them.
    """

    payload: Payload
    ids_SK: Tensor
    weights_SK: Tensor
    counts: Sequence[int]
    handle: Handle
    wait: Callable[[], None]
    num_received: Tensor | None = None

    @property
    def known_ids_SK(self) -> Tensor:
        """``ids_SK`` with -1 behind the rows that arrived. To be asked for after ``wait``. No host sync."""
        if self.num_received is None:
            return self.ids_SK
        at_S = torch.arange(len(self.ids_SK), device=self.ids_SK.device)
        return torch.where((at_S < self.num_received).unsqueeze(1), self.ids_SK, -1)


def arrived() -> None:
    """Wait for nothing: the ``wait`` of rows that are complete."""


class RankMajorDriver(ABC):
    """Drives one of the two buffer classes. Nothing here is differentiable."""

    @property
    @abstractmethod
    def buffers(self) -> str:
        """What its buffers take, for the log."""

    @abstractmethod
    def reserve(self, rows: int) -> None:
        """Have room for so many rows per rank; the same number on all ranks."""

    @abstractmethod
    def send(
        self,
        payload: Payload,
        ids_TK: Tensor,
        weights_TK: Tensor,
        *,
        asynchronously: bool,
        worst_rows: int | None = None,
    ) -> RankMajorRows:
        """Each row once to each rank that owns one of its experts.

        Args:
            payload: (T, D).
            ids_TK: int64.
            weights_TK: float32.
            asynchronously: return before the payload is there; see ``RankMajorRows.wait``.
            worst_rows: S, the most rows that all ranks may send to one: deliver so many, whatever arrives, and wait for
                no count. None: read on the host how many there are.
        """

    @abstractmethod
    def send_again(self, payload: Payload, handle: Handle) -> Payload:
        """Other rows the same way, without counts or a host sync."""

    @abstractmethod
    def combine(self, rows_SD: Tensor, values_SK: Tensor | None, handle: Handle) -> tuple[Tensor, Tensor | None]:
        """bfloat16 (S, D) back to their source, added in float32 and rounded once: (T, D); float32 values likewise."""

    @abstractmethod
    def close(self) -> None:
        """Destroy the buffers. Collective."""
