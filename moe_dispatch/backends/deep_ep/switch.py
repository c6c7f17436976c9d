"""A setting of the whole process that is changed while a library is called."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, final

from moe_dispatch.errors import ConfigError


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
