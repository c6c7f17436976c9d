"""Read and write traces, and the routing tables of ``moe_dispatch.replay``. Only this module imports safetensors.

A file has metadata, which are strings. A trace has the tensors ``rank{r}.ids``, ``rank{r}.weights``,
``rank{r}.calls``, ``rank{r}.shapes`` and ``rank{r}.layouts`` of each rank r. The module ``columns`` describes these
tensors.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor

from moe_dispatch.errors import MoEDispatchError, TraceError
from moe_dispatch.versions import how_to_install, newer_format

FORMAT = 1


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Kind:
    """A kind of file, for its metadata and its errors.

    Attributes:
        key: Key of the format in the metadata.
        noun: What the file is, such as "a trace".
        writer: Name of the function that writes it.
        reader: Name of the function that reads it.
    """

    key: str
    noun: str
    writer: str
    reader: str


TRACE = Kind(key="moe_dispatch_trace", noun="a trace", writer="Trace.record", reader="Trace.load")


def safetensors_of(where: str) -> Any:
    """Return the module ``safetensors.torch``. Raise TraceError if it or numpy, which it needs, is not installed."""
    try:
        import numpy  # noqa: F401, PLC0415 - otherwise a missing numpy would show only after all steps
        import safetensors.torch  # noqa: PLC0415 - optional, loaded on use
    except ImportError as error:
        raise TraceError(f"{where}: {error.name} is not installed. {how_to_install('trace')}") from error
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


def write(path: Path, tensors: dict[str, Tensor], metadata: dict[str, str], kind: Kind = TRACE) -> None:
    """Write a file. If this fails, raise TraceError and leave no file."""
    package = safetensors_of(kind.writer)
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        # save_file is not used, because it makes files that only the owner may read.
        partial.write_bytes(package.save(tensors, {kind.key: str(FORMAT), **metadata}))
        partial.replace(path)
    except Exception as error:  # safetensors has exceptions of its own, for example for a full disk
        with suppress(OSError):  # the folder itself may be gone
            partial.unlink(missing_ok=True)
        raise TraceError(f"{kind.writer}: {path} cannot be written: {error}. Use another path.") from error


@contextmanager
def opened(path: Path, kind: Kind = TRACE) -> Iterator[tuple[Any, dict[str, str]]]:
    """Open a file, and return it with its metadata. Its tensors are read only on request.

    Raises:
        TraceError: The file is missing or damaged, or is not of this kind and format.
    """
    package = safetensors_of(kind.reader)
    if not path.is_file():
        found = "a directory" if path.is_dir() else "no file"
        raise TraceError(f"{kind.reader}: {path} must be an existing file, got {found}. Check the path.")
    try:
        with package.safe_open(path, framework="pt") as file:
            metadata: dict[str, str] = file.metadata() or {}
            if (form := metadata.get(kind.key)) != str(FORMAT):
                told = "another safetensors file" if form is None else f"format {form}"
                way_out = f"got {told}. Use a file that {kind.writer} of this version wrote."
                raise TraceError(
                    f"{kind.reader}: {path} must be {kind.noun} of format {FORMAT}, "
                    + (newer_format(form, FORMAT) or way_out)
                )
            yield file, metadata
    except MoEDispatchError:
        raise
    except Exception as error:
        raise TraceError(
            f"{kind.reader}: {path} must be a complete safetensors file, got an error: {error}. Record {kind.noun} "
            "again, or copy the file again."
        ) from error


def read(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return the tensors and the metadata of a trace. Raise TraceError if the file is not a trace of this format."""
    with opened(path) as (file, metadata):
        return {name: file.get_tensor(name) for name in file.keys()}, metadata  # noqa: SIM118 - file is no mapping
