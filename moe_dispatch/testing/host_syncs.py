"""Refusing host syncs on a machine without a GPU: reads of tensors, and shapes that depend on their values."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, final

from torch.utils._python_dispatch import TorchDispatchMode

from moe_dispatch.testing.operators import is_opaque, run_in_sight, waits_for_host
from moe_dispatch.testing.reads import HostRead, intercept_reads, read_here


class HostSyncError(AssertionError):
    """The host read a tensor's values, or an operator needed them to know a shape; the text names it and the line."""


@contextmanager
def refuse_host_syncs() -> Iterator[list[HostRead]]:
    """Inside, whatever would make a GPU wait for the host raises HostSyncError, in every thread, forward and backward.

    That is: reads of a tensor by Python (those that ``count_host_syncs`` counts); operators that torch marks as giving
    a value or a shape that depends on data (``_local_scalar_dense``, ``equal``, ``nonzero``, ``masked_select``,
    ``unique``, ``bincount``, ...); ``repeat_interleave`` without ``output_size``; boolean masks as an index; copies
    between the CPU and another device. Python bodies of registered operators are looked into.

    Enter it once, around the ranks. Threads that are started inside are watched in full; in older ones only reads by
    Python are. What is found is also raised at the end, so that no ``except`` hides it. Not seen: what C++, Triton and
    compiled code do inside one operator, and a CPU tensor that only on a GPU would have had to be copied;
    ``trace_static(..., device="meta")`` sees that copy.

    Yields:
        What was found so far.

    Raises:
        HostSyncError: at the operation, and once more at the end; also for an operator of this library that cannot be
        looked into. RuntimeError: a second one inside.

    Cost: tens of microseconds per operator of any kind.
    """
    watch = _Watch()
    with intercept_reads(watch.refuse):
        try:
            with _in_new_threads(watch), _Refuse(watch):
                yield watch.found
        except HostSyncError:
            raise
        except Exception as error:
            if watch.found:
                raise HostSyncError(_told(watch.found)) from error
            raise
        finally:
            watch.closed = True
    if watch.found:
        raise HostSyncError(_told(watch.found))


@contextmanager
def allow_host_syncs() -> Iterator[None]:
    """Inside, this thread alone may read tensors in spite of ``refuse_host_syncs``: for a harness that checks results.

    Also a decorator. Threads started inside are not allowed to. Without ``refuse_host_syncs`` it does nothing.
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
    """What all threads of one ``refuse_host_syncs`` share."""

    def __init__(self) -> None:
        self.found: list[HostRead] = []
        self.closed = False  # a thread may outlive the block

    @property
    def on(self) -> bool:
        return not (self.closed or _is_allowed())

    def refuse(self, method: str) -> None:
        if self.on:
            self.found.append(read_here(method))
            raise HostSyncError(_told(self.found[-1:]))


def _told(found: list[HostRead]) -> str:
    reads = "".join(f"\n  {read.method} at {read.place}, in thread {read.thread}" for read in found)
    return (
        "refuse_host_syncs: no value of a tensor may be read by the host and no shape may depend on one, got:"
        f"{reads}\nCompute it on the device with a static shape, or read it outside the block."
    )


@contextmanager
def _in_new_threads(watch: _Watch) -> Iterator[None]:
    """Modes belong to one thread: every thread started inside enters one of its own."""
    original = threading.Thread.start

    def start(self: threading.Thread) -> None:
        run = self.run

        def watched() -> None:
            with _Refuse(watch):
                run()

        self.run = watched  # type: ignore[method-assign]
        original(self)

    threading.Thread.start = start  # type: ignore[method-assign]
    try:
        yield
    finally:
        threading.Thread.start = original  # type: ignore[method-assign]


@final
class _Refuse(TorchDispatchMode):
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
