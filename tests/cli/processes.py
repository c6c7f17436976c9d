"""Processes that a command starts, seen from outside."""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path


def members(group: int) -> list[int]:
    """Processes of a process group, zombies left out."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, _, group_id = stat.read_text().rpartition(")")[2].split()[:3]
            if int(group_id) == group and state != "Z":
                found.append(int(stat.parent.name))
    return found


def wait_for(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    """Until it holds."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.05)


@contextlib.contextmanager
def hearing_interrupts() -> Iterator[None]:
    """Processes started inside hear Ctrl-C, also where tests run in a shell's background, whose jobs ignore it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
