"""Count or refuse host syncs on a machine without a GPU.

A host sync is a read of tensor values by Python, or an operator that needs tensor values for the shape of its result.
Reads by Python are found by patching ``Tensor`` for the whole process, because most of them call no operator of torch
on a CPU. Operators are found by a dispatch mode in each thread.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from moe_dispatch.communication import HostCopy
from moe_dispatch_testing.operators import is_opaque, run_in_sight, waits_for_host


@final
@dataclass(frozen=True, slots=True)
class HostRead:
    """One read of a tensor's values by Python: the method, the thread, and the file and line of the caller."""

    method: str
    thread: str
    place: str


@contextmanager
def count_host_syncs() -> Iterator[list[HostRead]]:
    """Record every read of tensor values by Python, in all threads. On a GPU each read would wait for the device.

    The reads are ``item``, ``tolist``, ``cpu``, ``to("cpu")``, ``numpy``, ``bool()``, ``int()``, ``float()``,
    ``complex()`` and use as an index. A ``HostCopy`` of ``moe_dispatch.communication`` does not count, because it
    has arrived before it is read. Enter the context once, around all threads.

    Yields:
        The list of reads found so far.

    Raises:
        RuntimeError: A second ``count_host_syncs`` or ``refuse_host_syncs`` is open.
    """
    reads: list[HostRead] = []

    def record(method: str, tensor: Tensor) -> None:
        if sys._getframe(2).f_code is not HostCopy.read.__code__:
            reads.append(_read_here(method))

    with _intercept_reads(record):
        yield reads


class HostSyncError(AssertionError):
    """The host read tensor values, or an operator needed them for a shape. The text names the operation and line."""


@contextmanager
def refuse_host_syncs() -> Iterator[list[HostRead]]:
    """Raise HostSyncError for every operation inside that would make the host wait for a GPU.

    All threads are watched, in the forward and in the backward. The operations are:

    - reads of a tensor by Python, as ``count_host_syncs`` counts them
    - operators whose result or shape depends on data according to torch (``_local_scalar_dense``, ``equal``,
      ``nonzero``, ``masked_select``, ``unique``, ``bincount``, ...)
    - ``repeat_interleave`` without ``output_size``
    - a boolean mask as an index
    - copies between the CPU and another device

    If a registered operator has a Python body, the operators that the body calls are watched too.

    Enter the context once, around the ranks. In a thread that was started before, only reads by Python are found. The
    error is raised again at the end, so that no ``except`` hides it.

    Two things are not found. The first is what C++, Triton and compiled code do inside one operator. The second is a
    CPU tensor that would be copied if the code ran on a GPU; ``trace_static(..., device="meta")`` finds it.

    Yields:
        The list of operations found so far.

    Raises:
        HostSyncError: At the operation, and again at the end. An operator of this library that has no Python body
            raises it too, because nothing can watch what such an operator does.
        RuntimeError: A second ``refuse_host_syncs`` or ``count_host_syncs`` is open.

    Cost: tens of microseconds per operator of any kind.
    """
    watch = _Watch()
    with _intercept_reads(lambda method, _: watch.refuse(method)):
        try:
            with in_new_threads(lambda: _RefusingMode(watch)), _RefusingMode(watch):
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
    """Let this thread read tensors inside ``refuse_host_syncs``, for test code that checks results.

    It also works as a decorator. Threads that are started inside are still watched. Without ``refuse_host_syncs`` it
    has no effect.
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
        "refuse_host_syncs: the host must not read tensor values, and no shape may depend on them, got:"
        f"{reads}\nCompute the value on the device with a static shape, or read it outside the block."
    )


@contextmanager
def in_new_threads(enter: Callable[[], AbstractContextManager[object]]) -> Iterator[None]:
    """Run every thread that is started inside under a context of its own, because a mode belongs to one thread."""
    original = threading.Thread.start

    def start(self: threading.Thread) -> None:
        run = self.run

        def watched() -> None:
            with enter():
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
def _intercept_reads(hook: Callable[[str, Tensor], object]) -> Iterator[None]:
    """Call ``hook(method, tensor)`` before Python reads a tensor, in all threads. A hook that raises stops the read.

    Raises:
        RuntimeError: The reads are already intercepted.
    """
    if not _patching.acquire(blocking=False):
        raise RuntimeError(
            "count_host_syncs, refuse_host_syncs: each patches the whole process, so only one may be open at a time. "
            "Leave the first one before you enter the second."
        )
    try:
        for name, reads in _READS.items():
            setattr(Tensor, name, _intercepted(name, reads, hook))
        yield
    finally:
        for name in _READS:
            delattr(Tensor, name)  # Tensor then inherits the original method again
        _patching.release()


def _read_here(method: str) -> HostRead:
    """Describe a read by this thread. Its line is the innermost one outside torch and outside the watching modules."""
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
    """Return whether a call of ``to`` names the CPU by a string.

    A call such as ``x.to(y.device)`` is not counted, because on a machine without a GPU the device is always the CPU.
    """
    return any(isinstance(value, str) and value.startswith("cpu") for value in (*args[:1], kwargs.get("device")))


# Methods that may read values, each with a function that says by the arguments whether a call does. ``__array__``,
# ``repr``, ``in`` and ``torch.tensor`` of a list of tensors call one of these methods. Other reads (``torch.equal``, a
# slice by a tensor, ...) are operators of torch.
_VALUES = ("item", "tolist", "cpu", "numpy", "__bool__", "__int__", "__float__", "__complex__", "__index__")
_READS: dict[str, Callable[..., bool]] = {**dict.fromkeys(_VALUES, _always), "to": _names_the_cpu}


def _intercepted(name: str, reads: Callable[..., bool], hook: Callable[[str, Tensor], object]) -> Callable[..., Any]:
    original = getattr(Tensor, name)

    def intercepted(*args: Any, **kwargs: Any) -> Any:
        if reads(*args, **kwargs):
            hook(name, args[0])
        return original(*args, **kwargs)

    return intercepted
