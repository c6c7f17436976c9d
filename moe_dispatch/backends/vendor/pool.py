"""Buffers of a vendor library that is sized for a number of rows: they grow when ranks agree on more."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, final

from moe_dispatch.errors import StateError

# The smallest buffer: these libraries round anything less up to this.
_SMALLEST_ROWS = 512


@final
class BufferPool:
    """The buffers of one channel; the last one is the largest and in use.

    Making and destroying a buffer are collective, so both happen only by decisions that all ranks share: ``reserve`` is
    told what they agreed on, and ``close`` is called on all of them. Outgrown buffers stay until then, because
    dispatches under way refer to them; sizes are powers of two, so they are less than what the last one takes.
    """

    def __init__(self, name: str, make: Callable[[int], Any], *, most_rows: int | None) -> None:
        self._name = name
        self._make = make
        self._most_rows = most_rows
        self._buffers: list[Any] = []
        self._rows = 0
        self._closed = False

    def reserve(self, rows: int) -> None:
        """Have a buffer for so many rows per rank. Collective where it grows."""
        if rows > self._rows:
            bucket = max(_SMALLEST_ROWS, 1 << (rows - 1).bit_length())
            self._rows = bucket if self._most_rows is None else min(bucket, max(rows, self._most_rows))
            self._buffers.append(self._make(self._rows))

    @property
    def rows(self) -> int:
        """Rows per rank that the buffer in use takes."""
        return self._rows

    @property
    def current(self) -> Any:
        """The buffer in use.

        Raises:
            StateError: the pool is closed, for a backward that came too late.
        """
        self.check_open()
        return self._buffers[-1]

    def check_open(self) -> None:
        """Refuse to touch buffers that are gone.

        Raises:
            StateError: the pool is closed.
        """
        if self._closed:
            raise StateError(
                f"Backend {self._name!r}: its buffers must be open, got a call after close(). "
                "Close the dispatcher after the last backward."
            )

    def close(self) -> None:
        """Destroy all buffers; the second time does nothing. Collective."""
        self._closed = True
        while self._buffers:
            buffer = self._buffers.pop(0)
            if hasattr(buffer, "destroy"):
                buffer.destroy()
