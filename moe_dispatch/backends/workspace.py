"""Reused byte buffers for what lives only during one call."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import final

import torch
from torch import Tensor

_WORTH_KEEPING = 1 << 20  # below this the C allocator reuses memory by itself


@final
class Workspace:
    """A free list of byte buffers on the CPU.

    Fresh memory of tens of megabytes costs more than the copy that fills it (the kernel clears every page), so send and
    receive buffers are kept. On a GPU the caching allocator does the same job with stream safety, so there every buffer
    is fresh. Buffers are taken per use, never per call site: two calls in flight get two buffers.
    """

    def __init__(self) -> None:
        self._free: list[Tensor] = []
        self._lock = threading.Lock()

    def take(self, nbytes: int, device: torch.device) -> Tensor:
        """uint8 (nbytes,), contents undefined. Pass it, or any view's base, to ``give`` when done."""
        if device.type != "cpu" or nbytes < _WORTH_KEEPING:
            return torch.empty(nbytes, dtype=torch.uint8, device=device)
        with self._lock:
            fitting = [i for i, b in enumerate(self._free) if b.numel() >= nbytes]
            if fitting:
                best = min(fitting, key=lambda i: self._free[i].numel())
                return self._free.pop(best)[:nbytes]
            if self._free:  # the largest is too small: replace it rather than keep both
                self._free.pop(max(range(len(self._free)), key=lambda i: self._free[i].numel()))
        # An eighth of slack, so that slowly changing sizes do not allocate every time.
        return torch.empty(nbytes + nbytes // 8, dtype=torch.uint8)[:nbytes]

    def give(self, buffer: Tensor) -> None:
        """Return a buffer from ``take``; its contents may change from now on."""
        if buffer.device.type == "cpu" and buffer.numel() >= _WORTH_KEEPING:
            base = buffer if buffer._base is None else buffer._base
            with self._lock:
                self._free.append(base)

    @contextmanager
    def lease(self, nbytes: int, device: torch.device) -> Iterator[Tensor]:
        """``take`` and, at the end of the block, ``give``."""
        buffer = self.take(nbytes, device)
        try:
            yield buffer
        finally:
            self.give(buffer)

    def clear(self) -> None:
        """Drop all free buffers."""
        with self._lock:
            self._free.clear()
