"""What v1 and v2 have in common: rows arrive rank-major, each once per rank, and sums travel the same way back."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, final

from torch import Tensor

from moe_dispatch.backends.vendor.pool import Slot

# bfloat16 (T, D), or float8_e4m3fn (T, D) with its float32 scales (T, D/128).
Payload = Tensor | tuple[Tensor, Tensor]


@final
@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Way:
    """The way of one dispatch: the buffer it went through, and the library's own handle."""

    slot: Slot
    handle: Any

    @property
    def buffer(self) -> Any:
        """The buffer; StateError once it is closed."""
        return self.slot.buffer


@final
@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Delivery:
    """What a dispatch delivered.

    Attributes:
        payload: (S, D), by source rank, then source row.
        ids_SK: local expert ids, -1 for experts of other ranks and for none.
        weights_SK: float32.
        counts: rows per local expert, on the host.
        way: for what follows it.
        wait: makes the current stream wait for the payload.
    """

    payload: Payload
    ids_SK: Tensor
    weights_SK: Tensor
    counts: Sequence[int]
    way: Way
    wait: Callable[[], None]


def arrived() -> None:
    """Nothing to wait for: the ``wait`` of a delivery that is complete."""


class Transport(ABC):
    """One of the two buffer classes, raw: nothing here is differentiable."""

    @property
    @abstractmethod
    def buffers(self) -> str:
        """What its buffers take, for the log."""

    @abstractmethod
    def reserve(self, rows: int) -> None:
        """Have room for so many rows per rank; the same number on all ranks."""

    @abstractmethod
    def send(self, payload: Payload, ids_TK: Tensor, weights_TK: Tensor, *, asynchronously: bool) -> Delivery:
        """Each row once to each rank that owns one of its experts. Ids int64, weights float32."""

    @abstractmethod
    def send_again(self, payload: Payload, way: Way) -> Payload:
        """Other rows the same way, without counts or a host sync."""

    @abstractmethod
    def sum_at_home(self, rows_SD: Tensor, values_SK: Tensor | None, way: Way) -> tuple[Tensor, Tensor | None]:
        """bfloat16 (S, D) back to their source, added in float32 and rounded once: (T, D); float32 values likewise."""

    @abstractmethod
    def close(self) -> None:
        """Destroy the buffers. Collective."""
