"""Buffers of a vendor library that is sized for a number of rows: they grow when ranks agree on more."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, final

from moe_dispatch.errors import StateError
from moe_dispatch.permutation import round_up

# The smallest buffer: these libraries round anything less up to this.
_SMALLEST_ROWS = 512


@final
class PooledBuffer:
    """One buffer of a pool, for those that must not use it once the pool is closed."""

    def __init__(self, name: str, buffer: Any) -> None:
        self._name = name
        self._buffer = buffer

    @property
    def buffer(self) -> Any:
        """The buffer.

        Raises:
            StateError: the pool is closed, for a backward that came too late.
        """
        if self._buffer is None:
            raise StateError(
                f"Backend {self._name!r}: its buffers must be open, got a call after close(). "
                "Close the dispatcher after the last backward."
            )
        return self._buffer

    def clear(self) -> None:
        """Let go of the buffer, and destroy it where it has to be told."""
        buffer, self._buffer = self._buffer, None
        if hasattr(buffer, "destroy"):
            buffer.destroy()


@final
class BufferPool:
    """The buffers of one channel; the last one is the largest and in use.

    Making and destroying a buffer are collective, so both happen only by decisions that all ranks share: ``reserve`` is
    told what they agreed on, and ``close`` is called on all of them. Outgrown buffers stay until then, because
    dispatches under way refer to them; sizes are powers of two, so they are less than what the last one takes.

    Args:
        name: of the backend, for errors.
        make: a buffer for so many rows per rank.
        most_rows: what a rank can bring at most; no buffer is larger.
        multiple: sizes are multiples of this.
    """

    def __init__(self, name: str, make: Callable[[int], Any], *, most_rows: int | None, multiple: int = 1) -> None:
        self._name = name
        self._make = make
        self._most_rows = most_rows
        self._multiple = multiple
        self._buffers: list[PooledBuffer] = []
        self._rows = 0
        self.closed = False

    def reserve(self, rows: int) -> None:
        """Have a buffer for so many rows per rank. Collective where it grows."""
        if rows > self._rows:
            bucket = max(_SMALLEST_ROWS, 1 << (rows - 1).bit_length())
            if self._most_rows is not None:
                bucket = min(bucket, max(rows, self._most_rows))
            bucket = round_up(bucket, self._multiple)
            self._buffers.append(PooledBuffer(self._name, self._make(bucket)))
            self._rows = bucket

    @property
    def rows(self) -> int:
        """Rows per rank that the buffer in use takes."""
        return self._rows

    @property
    def current(self) -> PooledBuffer:
        """The buffer in use."""
        return self._buffers[-1]

    def close(self) -> None:
        """Destroy all buffers, also if one refuses; the second time does nothing. Collective."""
        self.closed = True
        with ExitStack() as stack:
            for pooled in self._buffers:
                stack.callback(pooled.clear)
