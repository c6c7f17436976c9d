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
    ``complex()``, use as an index, and tensors in a list that becomes a tensor. Enter it once, around the threads; a
    second one inside raises RuntimeError.
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
        for owner, name, reads in _READS:
            setattr(owner, name, _intercepted(getattr(owner, name), name, reads, hook))
        yield
    finally:
        for (owner, name, _), own in zip(_READS, _OWN, strict=True):
            if own is None:
                delattr(owner, name)
            else:
                setattr(owner, name, own)
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


def _lists_tensors(*args: Any, **kwargs: Any) -> bool:
    """Whether numbers would be read out of tensors in a list, one by one."""
    lists = [value for value in (*args, *kwargs.values()) if isinstance(value, (list, tuple))]
    return any(isinstance(entry, Tensor) or _lists_tensors(entry) for entries in lists for entry in entries)


# Where a read is looked up, its name, and which calls of it are reads. ``__array__``, ``__repr__``, ``__format__`` and
# ``in`` come down to these; the others (``torch.equal``, slices by a tensor ...) are operators a dispatch mode sees.
_VALUES = ("item", "tolist", "cpu", "numpy", "__bool__", "__int__", "__float__", "__complex__", "__index__")
_READS: tuple[tuple[Any, str, Callable[..., bool]], ...] = (
    *((Tensor, name, _always) for name in _VALUES),
    (Tensor, "to", _names_the_cpu),
    (Tensor, "new_tensor", _lists_tensors),
    (torch, "tensor", _lists_tensors),
    (torch, "as_tensor", _lists_tensors),
    (torch, "asarray", _lists_tensors),
)
_OWN = [vars(owner).get(name) for owner, name, _ in _READS]  # None where Tensor inherits it


def _intercepted(
    original: Callable[..., Any], name: str, reads: Callable[..., bool], hook: Callable[[str], object]
) -> Callable[..., Any]:
    def intercepted(*args: Any, **kwargs: Any) -> Any:
        if reads(*args, **kwargs):
            hook(name)
        return original(*args, **kwargs)

    return intercepted
