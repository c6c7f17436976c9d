"""Trace files: safetensors, which no other module imports.

A file holds metadata, all strings, and for each rank r the tensors ``rank{r}.ids``, ``.weights``, ``.calls``,
``.shapes`` and ``.layouts``, which ``columns`` explains.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moe_dispatch.errors import TraceError
from moe_dispatch.probing import how_to_install

FORMAT = 1
_FORMAT_KEY = "moe_dispatch_trace"


def safetensors_of(where: str) -> Any:
    """Return ``safetensors.torch``, or raise TraceError if it or numpy, which it needs to write, is not installed."""
    try:
        import numpy  # noqa: F401, PLC0415 - else it would be missed only after all steps
        import safetensors.torch  # noqa: PLC0415 - optional, loaded on use
    except ImportError as error:
        raise TraceError(f"{where}: {error.name} must be installed, got none. {how_to_install('trace')}") from error
    return safetensors.torch


def pack(tensors: dict[str, Tensor]) -> Tensor:
    """Return tensors of any dtypes as one uint8 vector."""
    data = safetensors_of("Trace.record").save(tensors)
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def unpack(data: Tensor) -> dict[str, Tensor]:
    """Return the tensors that ``pack`` was given."""
    tensors: dict[str, Tensor] = safetensors_of("Trace.record").load(bytes(data.numpy()))
    return tensors


def check_writable(path: Path) -> None:
    """Create the directory of a file, or raise TraceError if no file can be created in it."""
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
    """Write the whole file, or raise TraceError and leave no file."""
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        # Not with save_file, whose files only their owner may read.
        partial.write_bytes(safetensors_of("Trace.record").save(tensors, {_FORMAT_KEY: str(FORMAT), **metadata}))
        partial.replace(path)
    except Exception as error:  # the package has its own exceptions, for a full disk for example
        partial.unlink(missing_ok=True)
        raise TraceError(f"Trace.record: {path} cannot be written: {error}. Use another path.") from error


def read(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return the tensors and the metadata of a trace, or raise TraceError if the file is no trace of this format."""
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
