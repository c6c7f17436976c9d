"""Buffers of a vendor library that are made for a number of rows, and replaced when ranks agree on more rows."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, final

from moe_dispatch.errors import StateError
from moe_dispatch.permutation import round_up

# Number of rows of the smallest buffer. The libraries round smaller numbers up to this.
_SMALLEST_ROWS = 512


@final
class PooledBuffer:
    """One buffer of a pool. It cannot be used any more after the pool is closed."""

    def __init__(self, name: str, buffer: Any) -> None:
        self._name = name
        self._buffer = buffer

    @property
    def buffer(self) -> Any:
        """The buffer.

        Raises:
            StateError: The pool is closed, so this call (often a backward) came too late.
        """
        if self._buffer is None:
            raise StateError(
                f"Backend {self._name!r}: its buffers must be open, got a call after close(). "
                "Close the dispatcher after the last backward."
            )
        return self._buffer

    def clear(self) -> None:
        """Drop the buffer, and call its ``destroy`` if it has one."""
        buffer, self._buffer = self._buffer, None
        if hasattr(buffer, "destroy"):
            buffer.destroy()


@final
class BufferPool:
    """The buffers of one channel. The last buffer is the largest, and the only one that new calls use.

    To make or destroy a buffer is collective, so all ranks must do it together: ``reserve`` gets a number of rows that
    all ranks agreed on, and ``close`` is called on all ranks. Earlier buffers stay until ``close``, because dispatches
    under way refer to them. Sizes are powers of two, so all earlier buffers together are smaller than the last one.

    Args:
        name: Name of the backend, for errors.
        make: Function that makes a buffer for a number of rows per rank.
        most_rows: Largest number of rows that a rank can bring, if there is one. No buffer is made for more.
        multiple: Number of which all sizes are multiples.
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
        """Make a larger buffer if the last one has no room for ``rows`` rows per rank. Collective if it does."""
        if rows > self._rows:
            bucket = max(_SMALLEST_ROWS, 1 << (rows - 1).bit_length())
            if self._most_rows is not None:
                bucket = min(bucket, max(rows, self._most_rows))
            bucket = round_up(bucket, self._multiple)
            self._buffers.append(PooledBuffer(self._name, self._make(bucket)))
            self._rows = bucket

    @property
    def rows(self) -> int:
        """Number of rows per rank that the last buffer has room for."""
        return self._rows

    @property
    def current(self) -> PooledBuffer:
        """The last buffer, which new calls use."""
        return self._buffers[-1]

    def close(self) -> None:
        """Destroy all buffers, even if destroying one of them raises. Collective. A second call does nothing."""
        self.closed = True
        with ExitStack() as stack:
            for pooled in self._buffers:
                stack.callback(pooled.clear)
