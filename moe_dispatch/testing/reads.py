"""Reads of tensors by Python, seen by patching the whole process: on a CPU most of them are no operators of torch."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor


@final
@dataclass(frozen=True, slots=True)
class HostRead:
    """One read of a tensor's values by Python: the method, the thread, and the file and line that asked."""

    method: str
    thread: str
    place: str


@contextmanager
def count_host_syncs() -> Iterator[list[HostRead]]:
    """Record every read of tensor values by Python, in all threads: on a GPU each of them would wait for the device.

    Counted are ``item``, ``tolist``, ``cpu``, ``to("cpu")``, ``numpy``, ``bool()``, ``int()``, ``float()``,
    ``complex()`` and use as an index. Enter it once, around the threads; a second one inside raises RuntimeError.
    """
    reads: list[HostRead] = []
    with intercept_reads(lambda method: reads.append(read_here(method))):
        yield reads


@contextmanager
def intercept_reads(hook: Callable[[str], object]) -> Iterator[None]:
    """Call ``hook(method)`` before every read of a tensor by Python, in all threads; what it raises, the read raises.

    Raises:
        RuntimeError: one is open already.
    """
    if not _patching.acquire(blocking=False):
        raise RuntimeError(
            "count_host_syncs, refuse_host_syncs: each patches the whole process, so only one may be open at a time."
        )
    try:
        for name, reads in _READS.items():
            setattr(Tensor, name, _intercepted(name, reads, hook))
        yield
    finally:
        for name in _READS:
            delattr(Tensor, name)  # Tensor inherits them all
        _patching.release()


def read_here(method: str) -> HostRead:
    """A read by this thread, at the innermost line outside torch and outside what watches it."""
    frame: Any = sys._getframe(1)
    while frame.f_back and frame.f_code.co_filename.startswith(_WATCHERS):
        frame = frame.f_back
    return HostRead(method, threading.current_thread().name, f"{frame.f_code.co_filename}:{frame.f_lineno}")


_WATCHERS = (
    str(Path(torch.__file__).parent),
    *(str(Path(__file__).with_name(name)) for name in ("reads.py", "operators.py", "host_syncs.py", "counting.py")),
)
_patching = threading.Lock()


def _always(*args: Any, **kwargs: Any) -> bool:
    return True


def _names_the_cpu(_: Tensor, *args: Any, **kwargs: Any) -> bool:
    """By name only: on a CPU ``x.to(y.device)`` is the same value, and leaves nothing."""
    return any(isinstance(value, str) and value.startswith("cpu") for value in (*args[:1], kwargs.get("device")))


# What a read comes down to, and which calls of it are reads: ``__array__``, ``repr``, ``in`` and ``torch.tensor`` of a
# list of tensors end here too. Others (``torch.equal``, a slice by a tensor, ...) are operators a dispatch mode sees.
_VALUES = ("item", "tolist", "cpu", "numpy", "__bool__", "__int__", "__float__", "__complex__", "__index__")
_READS: dict[str, Callable[..., bool]] = {**dict.fromkeys(_VALUES, _always), "to": _names_the_cpu}


def _intercepted(name: str, reads: Callable[..., bool], hook: Callable[[str], object]) -> Callable[..., Any]:
    original = getattr(Tensor, name)

    def intercepted(*args: Any, **kwargs: Any) -> Any:
        if reads(*args, **kwargs):
            hook(name)
        return original(*args, **kwargs)

    return intercepted
