"""Host syncs, counted or refused on a machine without a GPU: reads of tensors, and shapes that depend on their values.

Reads by Python are seen by patching ``Tensor`` for the whole process, because on a CPU most of them are no operators of
torch. Operators are seen by a dispatch mode in each thread.
"""

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
from torch.utils._python_dispatch import TorchDispatchMode

from moe_dispatch.testing.operators import is_opaque, run_in_sight, waits_for_host


@final
@dataclass(frozen=True, slots=True)
class HostRead:
    """One read of a tensor's values by Python: the method, the thread, and the file and line of the caller."""

    method: str
    thread: str
    place: str


@contextmanager
def count_host_syncs() -> Iterator[list[HostRead]]:
    """Record every read of tensor values by Python, in all threads. On a GPU each would wait for the device.

    It sees ``item``, ``tolist``, ``cpu``, ``to("cpu")``, ``numpy``, ``bool()``, ``int()``, ``float()``, ``complex()``
    and use as an index. Enter it once, around the threads; a second one inside raises RuntimeError.
    """
    reads: list[HostRead] = []
    with _intercept_reads(lambda method: reads.append(_read_here(method))):
        yield reads


class HostSyncError(AssertionError):
    """The host read values of a tensor, or an operator needed them for a shape. The text names operation and line."""


@contextmanager
def refuse_host_syncs() -> Iterator[list[HostRead]]:
    """Raise HostSyncError for every operation inside that would make the host wait for a GPU.

    All threads are watched, forward and backward. The operations are: reads of a tensor by Python, as counted by
    ``count_host_syncs``; operators whose result or shape depends on data according to torch (``_local_scalar_dense``,
    ``equal``, ``nonzero``, ``masked_select``, ``unique``, ``bincount``, ...); ``repeat_interleave`` without
    ``output_size``; boolean masks as an index; copies between the CPU and another device. Operators that the Python
    body of a registered operator calls are watched too.

    Enter it once, around the ranks. In threads started before, only reads by Python are seen. The error is raised again
    at the end, so that no ``except`` hides it. Two things are not seen: what C++, Triton and compiled code do inside
    one operator, and a tensor on the CPU that would be copied if the code ran on a GPU, which
    ``trace_static(..., device="meta")`` sees.

    Yields:
        The list of operations found so far.

    Raises:
        HostSyncError: At the operation, and again at the end. Also for an operator of this library without a Python
            body, because nothing can watch what it does.
        RuntimeError: A second ``refuse_host_syncs`` or ``count_host_syncs`` is open.

    Cost: tens of microseconds per operator of any kind.
    """
    watch = _Watch()
    with _intercept_reads(watch.refuse):
        try:
            with _in_new_threads(watch), _RefusingMode(watch):
                yield watch.found
        except HostSyncError:
            raise
        except Exception as error:
            if watch.found:
                raise HostSyncError(_error_text(watch.found)) from error
            raise
        finally:
            watch.closed = True
    if watch.found:
        raise HostSyncError(_error_text(watch.found))


@contextmanager
def allow_host_syncs() -> Iterator[None]:
    """Let this thread read tensors inside ``refuse_host_syncs``, for a harness that checks results.

    It is also a decorator. It does not cover threads started inside, and does nothing without ``refuse_host_syncs``.
    """
    before = _is_allowed()
    _here.allowed = True
    try:
        yield
    finally:
        _here.allowed = before


_here = threading.local()


def _is_allowed() -> bool:
    return getattr(_here, "allowed", False)


@final
class _Watch:
    """State that all threads of one ``refuse_host_syncs`` share."""

    def __init__(self) -> None:
        self.found: list[HostRead] = []
        self.closed = False  # a thread may outlive the block

    @property
    def on(self) -> bool:
        return not (self.closed or _is_allowed())

    def refuse(self, method: str) -> None:
        if self.on:
            self.found.append(_read_here(method))
            raise HostSyncError(_error_text(self.found[-1:]))


def _error_text(found: list[HostRead]) -> str:
    reads = "".join(f"\n  {read.method} at {read.place}, in thread {read.thread}" for read in found)
    return (
        "refuse_host_syncs: no value of a tensor may be read by the host and no shape may depend on one, got:"
        f"{reads}\nCompute it on the device with a static shape, or read it outside the block."
    )


@contextmanager
def _in_new_threads(watch: _Watch) -> Iterator[None]:
    """Make every thread that is started inside enter its own dispatch mode, because a mode belongs to one thread."""
    original = threading.Thread.start

    def start(self: threading.Thread) -> None:
        run = self.run

        def watched() -> None:
            with _RefusingMode(watch):
                run()

        self.run = watched  # type: ignore[method-assign]
        original(self)

    threading.Thread.start = start  # type: ignore[method-assign]
    try:
        yield
    finally:
        threading.Thread.start = original  # type: ignore[method-assign]


@final
class _RefusingMode(TorchDispatchMode):
    def __init__(self, watch: _Watch) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.watch = watch

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not self.watch.on:
            return func(*args, **kwargs)
        if is_opaque(func, args, kwargs):
            self.watch.refuse(f"{func.name()}, which has no Python body to look into,")
        if waits_for_host(func, args, kwargs):
            self.watch.refuse(func.name())
        return run_in_sight(self, func, args, kwargs)


@contextmanager
def _intercept_reads(hook: Callable[[str], object]) -> Iterator[None]:
    """Call ``hook(method)`` before every read of a tensor by Python, in all threads. If it raises, the read raises.

    Raises:
        RuntimeError: Another one is open.
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


def _read_here(method: str) -> HostRead:
    """Describe a read by this thread, at the innermost line outside torch and outside the modules that watch it."""
    frame: Any = sys._getframe(1)
    while frame.f_back and frame.f_code.co_filename.startswith(_WATCHERS):
        frame = frame.f_back
    return HostRead(method, threading.current_thread().name, f"{frame.f_code.co_filename}:{frame.f_lineno}")


_WATCHERS = (
    str(Path(torch.__file__).parent),
    *(str(Path(__file__).with_name(name)) for name in ("host_syncs.py", "operators.py", "counting.py")),
)
_patching = threading.Lock()


def _always(*args: Any, **kwargs: Any) -> bool:
    return True


def _names_the_cpu(_: Tensor, *args: Any, **kwargs: Any) -> bool:
    """Return whether a call of ``to`` names the CPU by a string: on a CPU ``x.to(y.device)`` looks like no copy."""
    return any(isinstance(value, str) and value.startswith("cpu") for value in (*args[:1], kwargs.get("device")))


# Methods that read values, each with a test of its arguments. ``__array__``, ``repr``, ``in`` and ``torch.tensor`` of a
# list of tensors call one of them. Other reads (``torch.equal``, a slice by a tensor, ...) are operators of torch.
_VALUES = ("item", "tolist", "cpu", "numpy", "__bool__", "__int__", "__float__", "__complex__", "__index__")
_READS: dict[str, Callable[..., bool]] = {**dict.fromkeys(_VALUES, _always), "to": _names_the_cpu}


def _intercepted(name: str, reads: Callable[..., bool], hook: Callable[[str], object]) -> Callable[..., Any]:
    original = getattr(Tensor, name)

    def intercepted(*args: Any, **kwargs: Any) -> Any:
        if reads(*args, **kwargs):
            hook(name)
        return original(*args, **kwargs)

    return intercepted
