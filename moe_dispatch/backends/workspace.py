"""Reused memory: for what lives only during one call, and for results, which callers keep as long as they like."""

from __future__ import annotations

import math
import threading
from typing import final

import torch
from torch import Tensor

_WORTH_KEEPING = 1 << 20  # below this the C allocator reuses memory by itself


@final
class Workspace:
    """Memory on the CPU that is kept for the next call.

    Fresh memory of tens of megabytes costs more than the copy that fills it (the kernel clears every page), so send and
    receive buffers are kept, and so is the memory of results. On a GPU the caching allocator does the same job with
    stream safety, so there all memory is fresh. Buffers are taken per use, never per call site: two calls in flight get
    two buffers. What is kept is bare storage, because a tensor made under ``torch.inference_mode`` could not be written
    in training.
    """

    def __init__(self) -> None:
        self._free: list[torch.UntypedStorage] = []
        self._lent: list[torch.UntypedStorage] = []
        self._lock = threading.Lock()

    def take(self, shape: int | tuple[int, int], device: torch.device) -> Tensor:
        """uint8 of this shape, contents undefined. Pass it, or any view of it, to ``give`` when done."""
        nbytes = shape if isinstance(shape, int) else shape[0] * shape[1]
        if nbytes < _WORTH_KEEPING or device.type != "cpu":
            return torch.empty(shape, dtype=torch.uint8, device=device)
        flat = torch.empty(0, dtype=torch.uint8, device="cpu").set_(self._storage(nbytes), 0, (nbytes,), (1,))
        return flat.view(shape)

    def _storage(self, nbytes: int) -> torch.UntypedStorage:
        """The smallest free one that is large enough, or a new one."""
        with self._lock:
            sizes = {i: storage.nbytes() for i, storage in enumerate(self._free)}
            fitting = [i for i, size in sizes.items() if size >= nbytes]
            if fitting:
                return self._free.pop(min(fitting, key=sizes.__getitem__))
            if sizes:  # the largest is too small: replace it rather than keep both
                self._free.pop(max(sizes, key=sizes.__getitem__))
        return _new_storage(nbytes)

    def give(self, buffer: Tensor) -> None:
        """Return a buffer from ``take``; its contents may change from now on."""
        if buffer.numel() >= _WORTH_KEEPING and buffer.device.type == "cpu":
            with self._lock:
                self._free.append(buffer.untyped_storage())

    def lend(self, *shape: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Memory for a result, contents undefined. It comes back by itself, once nothing refers to it any more.

        Always fresh where ``torch.use_deterministic_algorithms`` fills fresh memory, to show what is never written.
        """
        nbytes = math.prod(shape) * dtype.itemsize
        if nbytes < _WORTH_KEEPING or device.type != "cpu" or torch.are_deterministic_algorithms_enabled():
            return torch.empty(shape, dtype=dtype, device=device)
        with self._lock:
            storage = self._returned(nbytes)
            if storage is None:
                storage = _new_storage(nbytes)
                self._lent.append(storage)
            strides = tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))
            # No view: autograd forbids to write to a view that one of its functions gives out.
            return torch.empty(0, dtype=dtype, device="cpu").set_(storage, 0, shape, strides)

    def _returned(self, nbytes: int) -> torch.UntypedStorage | None:
        """The smallest that is back and of fitting size; one that has become a little too small is given up."""
        back = sorted((each for each in self._lent if _is_back(each)), key=torch.UntypedStorage.nbytes)
        fitting = [each for each in back if nbytes <= each.nbytes() <= 2 * nbytes]
        if fitting:
            return fitting[0]
        outgrown = [each for each in back if nbytes <= 2 * each.nbytes() < 2 * nbytes]
        self._lent = [each for each in self._lent if not any(each is last for last in outgrown[-1:])]
        return None


def _new_storage(nbytes: int) -> torch.UntypedStorage:
    """With a sixteenth of slack, so that slowly changing sizes do not allocate every time."""
    return torch.UntypedStorage(nbytes + nbytes // 16, device="cpu")


def _is_back(storage: torch.UntypedStorage) -> bool:
    """Whether only the workspace holds it: no tensor, no view, no autograd graph, and no other process."""
    return int(torch._C._storage_Use_Count(storage._cdata)) == 1 and not storage.is_shared()
