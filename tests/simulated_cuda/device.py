"""The door to the stand-ins for NVIDIA's libraries: what was asked of the simulated devices, and by which line."""

from __future__ import annotations

import ctypes
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

# Before the first call of CUDA: the number of devices, and where Triton finds the driver that it links.
LIBRARIES = Path(torch.__file__).parents[1] / "nvidia" / "cu13" / "lib"
_PACKAGE = Path(__file__).parents[2] / "moe_dispatch"


@dataclass(frozen=True, kw_only=True, slots=True)
class Record:
    """One thing that the host asked of a device.

    Attributes:
        kind: "kernel", "copy", "copy-pageable", "memset", "sync", "nccl", "graph", "race", "error", ...
        detail: Name of the kernel, the two kinds of memory of a copy, the call that waited, ...
        amount: Bytes, or blocks of a kernel.
        device: Number of the device.
        capture: Number of the capture that the stream took part in, 0 outside.
        place: Operator of torch and lines of moe_dispatch, innermost first.
    """

    kind: str
    detail: str
    amount: int
    device: int
    capture: int
    place: str


def is_simulated() -> bool:
    """Return whether torch runs on the stand-ins. It does not import CUDA."""
    return hasattr(_library_or_none(), "simulated_record")


@cache
def _library_or_none() -> Any:
    path = LIBRARIES / "libcudart.so.13"
    return ctypes.CDLL(str(path)) if path.exists() else None


@cache
def _library() -> Any:
    library = _library_or_none()
    library.simulated_set_place.argtypes = [ctypes.c_char_p]
    library.simulated_write_records.argtypes = [ctypes.c_char_p]
    library.simulated_operation.argtypes = [ctypes.c_char_p, ctypes.c_char_p, ctypes.c_longlong, ctypes.c_void_p]
    library.simulated_access.argtypes = [
        ctypes.c_void_p,
        ctypes.c_size_t,
        ctypes.c_int,
        ctypes.c_void_p,
        ctypes.c_char_p,
    ]
    return library


@contextmanager
def recorded() -> Iterator[list[Record]]:
    """Collect what all threads ask of the devices. The list is complete when the block ends. Blocks may be nested."""
    _collect()
    found: list[Record] = []
    _open.append(found)
    _library().simulated_record(1)
    try:
        yield found
    finally:
        _collect()
        _open[:] = [each for each in _open if each is not found]
        _library().simulated_record(len(_open))


_open: list[list[Record]] = []


def _collect() -> None:
    """Move the records of the stand-ins to all open lists."""
    with tempfile.NamedTemporaryFile("r") as file:
        _library().simulated_write_records(file.name.encode())
        records = [_parsed(line.rstrip("\n").split("\t")) for line in file]
    for found in _open:
        found += records


def _parsed(fields: list[str]) -> Record:
    _, kind, detail, amount, _, device, capture, place = fields
    return Record(kind=kind, detail=detail, amount=int(amount), device=int(device), capture=int(capture), place=place)


@contextmanager
def watched_streams() -> Iterator[None]:
    """Look for accesses to one memory from two streams without an order; each gives a record of kind "race".

    An order is a ``wait_stream``, an event that the other stream waits for, or a wait of the host.
    """
    _library().simulated_watch_streams(1)
    try:
        yield
    finally:
        _library().simulated_watch_streams(0)


@contextmanager
def placed(operator: str) -> Iterator[None]:
    """Name the operator and the lines of moe_dispatch that run in this thread, for the records."""
    _library().simulated_set_place(f"{operator} {caller()}".encode())
    try:
        yield
    finally:
        _library().simulated_set_place(b"")


def caller(most: int = 3) -> str:
    """Return the innermost lines of moe_dispatch on the stack of this thread."""
    lines: list[str] = []
    frame: Any = sys._getframe(1)
    while frame is not None and len(lines) < most:
        name = _name_in_package(frame.f_code.co_filename)
        if name is not None:
            lines.append(f"{name}:{frame.f_lineno}")
        frame = frame.f_back
    return " < ".join(lines) or "no line of moe_dispatch"


@cache
def _name_in_package(path: str) -> str | None:
    """Return a file's path inside moe_dispatch, None for other files."""
    file = Path(path)
    return str(file.relative_to(_PACKAGE)) if file.is_relative_to(_PACKAGE) else None


def note_sync(what: str) -> None:
    """Record a sync that the stand-ins cannot see, because Python computes the operator that waits."""
    _library().simulated_operation(b"sync", what.encode(), 0, None)


def note_access(tensor: torch.Tensor, what: str, *, writes: bool) -> None:
    """Record that the current stream reads or writes the memory of a tensor on a simulated device."""
    if not tensor.numel() or not tensor.untyped_storage().nbytes():
        return
    extent = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    _library().simulated_access(
        tensor.data_ptr(),
        extent * tensor.element_size(),
        int(writes),
        torch._C._cuda_getCurrentRawStream(tensor.device.index),
        what.encode(),
    )
