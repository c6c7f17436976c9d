"""Memory that calls reuse: buffers of one call, and results that callers keep as long as they like."""

from __future__ import annotations

import math
import threading
import time
from bisect import bisect_left, bisect_right, insort
from typing import final

import torch
from torch import Tensor

_WORTH_KEEPING = 1 << 20  # the C allocator itself reuses smaller memory
_SECONDS = 60.0  # between looks for unused memory; so rarely, fresh pages cost nothing if it is needed again


@final
class Workspace:
    """A pool of CPU memory for later calls.

    The system clears every page of fresh memory. For tens of megabytes this takes longer than the copy that fills the
    memory. So the pool keeps the memory of send buffers, receive buffers, results and scratch. On a GPU it gives fresh
    memory: torch's caching allocator already reuses memory there, and is safe with streams.

    Memory is reused when nothing refers to it, so two calls in flight get two buffers. The pool keeps bare storages,
    because a tensor made under ``torch.inference_mode`` cannot be written to in training.

    The pool is never larger than twice the largest sum of its memory that was in use at one time. Memory that was
    neither lent nor in use for a minute is given back to the system by a call in the next one.
    """

    def __init__(self) -> None:
        self._lent: list[torch.UntypedStorage] = []
        self._lock = threading.Lock()
        self._most = 0  # bytes that were in use at one time
        self._needed = set[int]()  # storages that were lent, or in use, since the last look
        self._next_look = 0.0

    @property
    def nbytes(self) -> int:
        """Bytes of the memory in the pool, in use or not."""
        with self._lock:
            return sum(storage.nbytes() for storage in self._lent)

    def lend(self, *shape: int, device: torch.device, dtype: torch.dtype = torch.uint8) -> Tensor:
        """Return memory with undefined contents. It is reused when nothing refers to it.

        Under ``torch.use_deterministic_algorithms`` the memory is always fresh: torch then fills it with NaN, which
        shows elements that are never written.
        """
        nbytes = math.prod(shape) * dtype.itemsize
        if nbytes < _WORTH_KEEPING or device.type != "cpu" or torch.are_deterministic_algorithms_enabled():
            return torch.empty(shape, dtype=dtype, device=device)
        with self._lock:
            storage = self._returned(nbytes)
            if storage is None:
                # A sixteenth more, so that slowly changing sizes do not allocate every time.
                nbytes += nbytes // 16
                self._make_room(nbytes)
                storage = torch.UntypedStorage(nbytes, device="cpu")
                insort(self._lent, storage, key=_SIZE)
            self._needed.add(storage._cdata)
            if time.monotonic() >= self._next_look:
                self._give_back(storage._cdata)
            # No view, because autograd forbids writing to a view that an autograd function returned.
            strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
            return torch.empty(0, dtype=dtype, device="cpu").set_(storage, 0, shape, strides)

    def _returned(self, nbytes: int) -> torch.UntypedStorage | None:
        """Return the smallest storage that is no longer in use and fits, or None if there is none.

        A storage fits if it has at least ``nbytes`` and at most twice as many. If none fits, the largest storage that
        is too small, but has at least half of ``nbytes``, leaves the pool: the new storage takes its place.
        """
        fits = bisect_left(self._lent, nbytes, key=_SIZE)
        for storage in self._lent[fits : bisect_right(self._lent, 2 * nbytes, key=_SIZE)]:
            if _is_back(storage):
                return storage
        for place in range(fits - 1, bisect_left(self._lent, nbytes / 2, key=_SIZE) - 1, -1):
            if _is_back(self._lent[place]):
                del self._lent[place]
                break
        return None

    def _make_room(self, nbytes: int) -> None:
        """Drop memory that is not in use, the largest first, until the pool may have ``nbytes`` more."""
        free = [storage for storage in self._lent if _is_back(storage)]
        whole = nbytes + sum(map(_SIZE, self._lent))
        self._most = max(self._most, whole - sum(map(_SIZE, free)))
        dropped = set[int]()
        while whole > 2 * self._most:
            largest = free.pop()
            whole -= largest.nbytes()
            dropped.add(largest._cdata)
        if dropped:
            self._lent = [storage for storage in self._lent if storage._cdata not in dropped]

    def _give_back(self, lent: int) -> None:
        """Drop memory that was neither lent nor in use since the last look. ``lent`` is lent now."""
        in_use = {storage._cdata for storage in self._lent if not _is_back(storage)}
        self._lent = [storage for storage in self._lent if storage._cdata in self._needed or storage._cdata in in_use]
        self._needed, self._next_look = in_use | {lent}, time.monotonic() + _SECONDS


_SIZE = torch.UntypedStorage.nbytes  # key by which the lists of a pool are sorted


def _is_back(storage: torch.UntypedStorage) -> bool:
    """Return whether only the workspace holds the storage: no tensor, view, autograd graph or other process does."""
    return int(torch._C._storage_Use_Count(storage._cdata)) == 1 and not storage.is_shared()
