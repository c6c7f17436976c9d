"""The base of the backends that call a buffer class of ``deep_ep``: its buffers, and settings of the process."""

from __future__ import annotations

import os
import threading
from abc import abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, final

import torch

from moe_dispatch.backends.base import Backend, BackendContext
from moe_dispatch.errors import ConfigError, StateError
from moe_dispatch.permutation import round_up
from moe_dispatch.types import Sizes

# Number of rows of the smallest buffer. The libraries round smaller numbers up to this.
_SMALLEST_ROWS = 512
# Attributes of buffers that have their bytes: two of v1, two of v2.
_SIZES = ("num_nvl_bytes", "num_rdma_bytes", "num_bytes", "num_lb_bytes")


@final
@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Handle:
    """The library's handle of one dispatch.

    Attributes:
        place: Number of the buffer that made the handle, in the order of making.
        raw: The handle, which only the library reads.
    """

    place: int
    raw: Any


class LibraryBackend(Backend):
    """Base of the backends over ``deep_ep``. It holds the buffers of one channel.

    The last buffer is the largest, and the only one that new calls use. To make or destroy a buffer is collective:
    ``reserve`` gets a number of rows that all ranks agreed on, and ``close`` is called on all ranks. Earlier buffers
    stay until ``close``, because dispatches under way refer to them. Sizes are powers of two, so all earlier buffers
    together are smaller than the last one.

    Args:
        context: The objects that the backend is built with.
        multiple: Number of which all sizes are multiples.

    Attributes:
        name: Name of the backend, for errors.
        details: Description of the buffers, for the log.
        rows: Number of rows per rank that the last buffer has room for.
    """

    collective_close = True
    name: ClassVar[str]
    details: str

    def __init__(self, context: BackendContext, *, multiple: int = 1) -> None:
        super().__init__(context)
        self._multiple = multiple
        self._buffers: list[Any] = []
        self.rows = 0

    @abstractmethod
    def make(self, rows: int) -> Any:
        """Make a buffer for ``rows`` rows per rank. Collective."""

    def reserve(self, sizes: Sizes) -> None:
        """Make a larger buffer if the last one has no room for these sizes. Collective if it does."""
        if sizes.group_max_rows is None or max(sizes.group_max_rows, 1) <= self.rows:
            return
        rows, most_rows = max(sizes.group_max_rows, 1), self.context.most_rows
        bucket = max(_SMALLEST_ROWS, 1 << (rows - 1).bit_length())
        if most_rows is not None:
            bucket = min(bucket, max(rows, most_rows))
        bucket = round_up(bucket, self._multiple)
        with unfilled():
            self._buffers.append(self.make(bucket))
        self.rows = bucket

    def buffer(self, place: int = -1) -> Any:
        """Return a buffer, by default the last one.

        Raises:
            StateError: The backend is closed, so this call (often a backward) came too late.
        """
        if not self._buffers:
            raise StateError(
                f"Backend {self.name!r}: its buffers must be open, got a call after close(). "
                "Close the dispatcher after the last backward."
            )
        return self._buffers[place]

    @property
    def place(self) -> int:
        """Number of the last buffer."""
        return len(self._buffers) - 1

    def memory_held(self) -> int:
        """Return the bytes of all buffers, as the library tells them, beside those of the workspace."""
        return super().memory_held() + sum(map(self.bytes_of, self._buffers))

    def bytes_of(self, buffer: Any) -> int:
        """Return the bytes of one buffer on this rank."""
        return sum(int(getattr(buffer, name, 0) or 0) for name in _SIZES)

    def close(self) -> None:
        """Destroy all buffers, even if destroying one of them raises. Collective. A second call does nothing."""
        with ExitStack() as stack:
            while self._buffers:
                buffer = self._buffers.pop(0)
                if hasattr(buffer, "destroy"):
                    stack.callback(buffer.destroy)


@final
class ProcessSwitch:
    """A setting that all threads of a process share.

    Ranks may be threads. The first thread that enters ``at`` changes the setting; the last that leaves restores it.
    """

    def __init__(self, name: str, read: Callable[[], Any], write: Callable[[Any], None]) -> None:
        self.name, self._read, self._write = name, read, write
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
                    f"{self.name} must have one value in all threads, got {value!r} while it is {self._value!r}. "
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


def environment_switch(name: str) -> ProcessSwitch:
    """Return the switch of an environment variable, which is not set if its value is None."""

    def write(value: str | None) -> None:
        os.environ.pop(name, None)
        if value is not None:
            os.environ[name] = value

    return ProcessSwitch(name, partial(os.environ.get, name), write)


_torch_deterministic: Any = torch.utils.deterministic  # type checkers do not see that this module has properties
_filling = ProcessSwitch(
    "torch.utils.deterministic.fill_uninitialized_memory",
    lambda: _torch_deterministic.fill_uninitialized_memory,
    lambda value: setattr(_torch_deterministic, "fill_uninitialized_memory", value),
)


def unfilled() -> AbstractContextManager[None]:
    """Keep torch from filling fresh memory inside a ``with`` block. Every call of the library needs this.

    In deterministic mode torch fills fresh memory on the current stream. The libraries allocate results for kernels on
    their own stream, which does not wait for the fill, so the fill may overwrite what a kernel has written.
    """
    return _filling.at(False)
