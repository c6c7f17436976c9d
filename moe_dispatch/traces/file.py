"""Traces as safetensors: the one module that imports it.

Of a file: metadata, all strings, and per rank r the tensors ``rank{r}.ids``, ``.weights``, ``.calls``, ``.shapes`` and
``.layouts`` of ``columns``.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moe_dispatch.errors import TraceError

FORMAT = 1
_FORMAT_KEY = "moe_dispatch_trace"


def safetensors_of(where: str) -> Any:
    """The package's part for torch.

    Raises:
        TraceError: it is not installed, or numpy, which it writes with.
    """
    try:
        import numpy  # noqa: F401, PLC0415 - here, because otherwise it is missed when all steps are done
        import safetensors.torch  # noqa: PLC0415 - optional, loaded on use
    except ImportError as error:
        raise TraceError(f"{where}: {error.name} is missing. Install moe-dispatch[trace] and numpy.") from error
    return safetensors.torch


def pack(tensors: dict[str, Tensor]) -> Tensor:
    """Tensors of any dtypes as one uint8 vector; ``unpack`` is the reverse."""
    data = safetensors_of("Trace.record").save(tensors)
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def unpack(data: Tensor) -> dict[str, Tensor]:
    """What ``pack`` was given."""
    tensors: dict[str, Tensor] = safetensors_of("Trace.record").load(bytes(data.numpy()))
    return tensors


def check_writable(path: Path) -> None:
    """Make the directory of a file, and see that a file can be made in it.

    Raises:
        TraceError: it cannot.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path.parent):
            pass
    except OSError as error:
        raise TraceError(
            f"Trace.record: {path} must be in a directory that can be written, got {error.strerror}. Use another path."
        ) from error
    if path.is_dir():
        raise TraceError(f"Trace.record: {path} must be a file, got a directory. Name a file in it.")


def write(path: Path, tensors: dict[str, Tensor], metadata: dict[str, str]) -> None:
    """Write the file whole or not at all.

    Raises:
        TraceError: it cannot be written.
    """
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        # Not its save_file, which gives files that nobody else may read.
        partial.write_bytes(safetensors_of("Trace.record").save(tensors, {_FORMAT_KEY: str(FORMAT), **metadata}))
        partial.replace(path)
    except Exception as error:  # the package's own kinds of errors, for a full disk say
        partial.unlink(missing_ok=True)
        raise TraceError(f"Trace.record: {path} cannot be written: {error}. Use another path.") from error


def read(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Tensors and metadata of a trace.

    Raises:
        TraceError: there is no such file, or it is no trace of this format.
    """
    package = safetensors_of("Trace.load")
    if not path.is_file():
        raise TraceError(f"Trace.load: {path} must be a file, got nothing there. Check the path.")
    try:
        with package.safe_open(path, framework="pt") as file:
            metadata: dict[str, str] = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - it is no mapping
    except Exception as error:
        raise TraceError(
            f"Trace.load: {path} must be a whole safetensors file, got one that cannot be read: {error}. Record it "
            "again, or copy it again."
        ) from error
    found = metadata.get(_FORMAT_KEY)
    if found != str(FORMAT):
        told = "a safetensors file that is no trace" if found is None else f"format {found}"
        raise TraceError(
            f"Trace.load: {path} must be a trace of format {FORMAT}, got {told}. Use one written by Trace.record of "
            "this version."
        )
    return tensors, metadata
