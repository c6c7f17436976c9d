"""Buffers of a vendor library: made for a number of rows, and replaced when ranks agree on more rows."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, final

from moe_dispatch.errors import ConfigError, StateError
from moe_dispatch.permutation import round_up

# Number of rows of the smallest buffer. The libraries round smaller numbers up to this.
_SMALLEST_ROWS = 512


@final
class PooledBuffer:
    """One buffer of a pool. It cannot be used any more after the pool is closed."""

    def __init__(self, name: str, buffer: Any) -> None:
        self._name, self._buffer = name, buffer

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

    Attributes:
        rows: Number of rows per rank that the last buffer has room for.
        closed: Whether ``close`` was called.
    """

    def __init__(self, name: str, make: Callable[[int], Any], *, most_rows: int | None, multiple: int = 1) -> None:
        self._name, self._make, self._most_rows, self._multiple = name, make, most_rows, multiple
        self._buffers: list[PooledBuffer] = []
        self.rows = 0
        self.closed = False

    def reserve(self, rows: int) -> None:
        """Make a larger buffer if the last one has no room for ``rows`` rows per rank. Collective if it does."""
        if rows > self.rows:
            bucket = max(_SMALLEST_ROWS, 1 << (rows - 1).bit_length())
            if self._most_rows is not None:
                bucket = min(bucket, max(rows, self._most_rows))
            bucket = round_up(bucket, self._multiple)
            self._buffers.append(PooledBuffer(self._name, self._make(bucket)))
            self.rows = bucket

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


@final
@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Handle:
    """The opaque handle that the library returned for one dispatch, and the buffer that the handle belongs to."""

    pooled: PooledBuffer
    raw: Any

    @property
    def buffer(self) -> Any:
        """The buffer. Raises StateError after the pool was closed."""
        return self.pooled.buffer


@final
class ProcessSwitch:
    """A setting that all threads of a process share.

    Ranks may be threads. The first thread that enters ``at`` changes the setting; the last that leaves restores it.
    """

    def __init__(self, name: str, read: Callable[[], Any], write: Callable[[Any], None]) -> None:
        self._name, self._read, self._write = name, read, write
        self._lock = threading.Lock()
        self._inside = 0
        self._before: Any = None
        self._value: Any = None

    @contextmanager
    def at(self, value: Any) -> Iterator[None]:
        """Give the setting a value inside the ``with`` block.

        Raises:
            ConfigError: Another thread is inside such a block with another value.
        """
        with self._lock:
            if not self._inside:
                self._before, self._value = self._read(), value
                self._write(value)
            elif value != self._value:
                raise ConfigError(
                    f"{self._name} must have one value in all threads, got {value!r} while it is {self._value!r}. "
                    "Open these dispatchers one after the other."
                )
            self._inside += 1
        try:
            yield
        finally:
            with self._lock:
                self._inside -= 1
                if not self._inside:
                    self._write(self._before)
