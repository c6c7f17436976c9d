"""Read and write trace files. This is the only module that imports safetensors.

A file has metadata, which are strings. For each rank r it has the tensors ``rank{r}.ids``, ``rank{r}.weights``,
``rank{r}.calls``, ``rank{r}.shapes`` and ``rank{r}.layouts``. The module ``columns`` describes these tensors.
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
    """Return the module ``safetensors.torch``. Raise TraceError if it or numpy, which it needs, is not installed."""
    try:
        import numpy  # noqa: F401, PLC0415 - otherwise a missing numpy would show only after all steps
        import safetensors.torch  # noqa: PLC0415 - optional, loaded on use
    except ImportError as error:
        raise TraceError(f"{where}: {error.name} must be installed, got none. {how_to_install('trace')}") from error
    return safetensors.torch


def pack(tensors: dict[str, Tensor]) -> Tensor:
    """Convert tensors to one uint8 vector."""
    data = safetensors_of("Trace.record").save(tensors)
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def unpack(data: Tensor) -> dict[str, Tensor]:
    """Convert a result of ``pack`` back to the tensors."""
    tensors: dict[str, Tensor] = safetensors_of("Trace.record").load(bytes(data.numpy()))
    return tensors


def check_writable(path: Path) -> None:
    """Create the directory of a file. Raise TraceError if no file can be created in it."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path.parent):
            pass
    except OSError as error:
        raise TraceError(
            f"Trace.record: {path} must be in a directory that can be written, got {error.strerror}. Use another path."
        ) from error
    if path.is_dir():
        raise TraceError(f"Trace.record: {path} must be a file, got a directory. Name a file in this directory.")


def write(path: Path, tensors: dict[str, Tensor], metadata: dict[str, str]) -> None:
    """Write a file. If this fails, raise TraceError and leave no file."""
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        # save_file is not used, because it makes files that only the owner may read.
        partial.write_bytes(safetensors_of("Trace.record").save(tensors, {_FORMAT_KEY: str(FORMAT), **metadata}))
        partial.replace(path)
    except Exception as error:  # safetensors has exceptions of its own, for example for a full disk
        partial.unlink(missing_ok=True)
        raise TraceError(f"Trace.record: {path} cannot be written: {error}. Use another path.") from error


def read(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return the tensors and the metadata of a file. Raise TraceError if it is not a trace of this format."""
    package = safetensors_of("Trace.load")
    if not path.is_file():
        raise TraceError(f"Trace.load: {path} must be an existing file, got {_kind(path)}. Check the path.")
    try:
        with package.safe_open(path, framework="pt") as file:
            metadata: dict[str, str] = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - file is no mapping
    except Exception as error:
        raise TraceError(
            f"Trace.load: {path} must be a complete safetensors file, got an error: {error}. Record the trace again, "
            "or copy the file again."
        ) from error
    found = metadata.get(_FORMAT_KEY)
    if found != str(FORMAT):
        told = "another safetensors file" if found is None else f"format {found}"
        raise TraceError(
            f"Trace.load: {path} must be a trace of format {FORMAT}, got {told}. Use a file that "
            "Trace.record of this version wrote."
        )
    return tensors, metadata


def _kind(path: Path) -> str:
    return "a directory" if path.is_dir() else "no file"
