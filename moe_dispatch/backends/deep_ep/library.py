"""The search for ``deep_ep``: the installed package, or on request the emulation. The one module that imports either.

Three variants of the library have the import name ``deep_ep``. v1 has ``Buffer``, v2 also has ``ElasticBuffer``, and
the branch hybrid-ep has ``HybridEPBuffer``. The variants are told apart by these attributes, never by a version string.
Other libraries have this import name and the class of v1 too: UCCL-EP, which also has ``initialize_uccl``, and
ROCm/DeepEP, which needs a torch for ROCm.
"""

from __future__ import annotations

import inspect
import logging
import re
import subprocess
import sys
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any, final

import torch

from moe_dispatch.backends.base import Backend, BackendContext, BackendOptions, MoEShape
from moe_dispatch.backends.deep_ep.buffers import LibraryBackend
from moe_dispatch.backends.footprint import expert_major
from moe_dispatch.backends.volume import SentBytes, Volume
from moe_dispatch.backends.wire import row_format
from moe_dispatch.errors import ConfigError
from moe_dispatch.seams.extension_points import declared, load_declared, takes
from moe_dispatch.seams.plug_ins import Rejected, Usable, import_whole
from moe_dispatch.types import Sizes

logger = logging.getLogger("moe_dispatch")

PACKAGE = "deep_ep"
UCCL, ROCM = "UCCL-EP", "ROCm DeepEP"
EMULATIONS = "moe_dispatch.emulations"
"""Group of entry points to functions that take the name of a release and return a module in place of the library."""
# The kernels of all three variants are built for Hopper and later.
CAPABILITY = (9, 0)


@final
@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Library:
    """A variant of ``deep_ep`` that a driver can call.

    Attributes:
        module: The imported package.
        version: Version of the package, or name of the emulated release.
        emulated: Whether it is the emulation, which takes CPU tensors.
        accelerator: Device type of the machine's accelerator.
        is_rocm: Whether it is built for ROCm.
    """

    module: ModuleType
    version: str
    emulated: bool
    accelerator: str = "cuda"
    is_rocm: bool = False

    @property
    def device(self) -> str:
        """Device type of the tensors that the library takes."""
        return "cpu" if self.emulated else self.accelerator

    @property
    def name(self) -> str:
        """What the library is called: ``deep_ep``, or by whom it is if it only has this import name."""
        if hasattr(self.module, "initialize_uccl"):
            return UCCL
        return ROCM if self.is_rocm else PACKAGE

    @property
    def named(self) -> str:
        """Its name and version, for errors and the log."""
        return f"{self.name} {self.version}"


def find_library(release: str | None) -> Library | Rejected:
    """Return the emulation of ``release``, or the installed library for None, or why it is unusable. Never raises."""
    return _installed() if release is None else _emulated(release)


@cache
def _emulated(release: str) -> Library | Rejected:
    found = declared(EMULATIONS).get(PACKAGE)
    if found is None:
        return Rejected(
            f"no package has an entry point {PACKAGE!r} in the group {EMULATIONS!r}; install moe-dispatch anew"
        )
    must_be = "a function of a release that returns a module"
    try:
        make = load_declared(found, "Emulation", must_be=must_be, fits=lambda each: takes(each, release), others=())
    except ConfigError as error:
        return Rejected(str(error).rstrip("."))
    return Library(module=make(release), version=release, emulated=True, is_rocm=release.startswith("rocm-"))


def _installed() -> Library | Rejected:
    if PACKAGE not in sys.modules and find_spec(PACKAGE) is None:
        return Rejected(f"no module named {PACKAGE!r} is installed")
    accelerator, is_rocm = _accelerator(), torch.version.hip is not None
    if accelerator is None:
        return Rejected("torch sees no accelerator")
    if accelerator == "cuda" and not is_rocm:
        capability = torch.cuda.get_device_capability()
        if capability < CAPABILITY:
            return Rejected(
                f"its kernels need compute capability {_dotted(CAPABILITY)}, this device has {_dotted(capability)}"
            )
    try:
        module = import_whole(PACKAGE, PACKAGE)
    except (Exception, SystemExit) as error:  # while it is imported, v2 checks NCCL and CUDA by assertions
        return Rejected(f"importing {PACKAGE!r} raised {type(error).__name__}: {str(error).strip() or 'no text'}")
    return Library(module=module, version=_version(module), emulated=False, accelerator=accelerator, is_rocm=is_rocm)


def _accelerator() -> str | None:
    """Return the type of device that torch sees, "cuda" also for ROCm; None if it sees the CPU only."""
    if torch.cuda.is_available():
        return "cuda"
    found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return None if found is None else found.type


def _version(module: ModuleType) -> str:
    try:
        return str(getattr(module, "__version__", None) or version(PACKAGE))
    except PackageNotFoundError:
        return "of unknown version"


def _dotted(capability: tuple[int, int]) -> str:
    return ".".join(map(str, capability))


@cache
def lacking_nvcc(version: str, nvcc: Path, least: tuple[int, int] = (0, 0)) -> str | None:
    """Return why a version of the library cannot compile its kernels with the nvcc at this path, or None."""
    if not nvcc.is_file():
        return f"deep_ep {version} compiles its kernels with {nvcc}, which is missing; set CUDA_HOME to a CUDA toolkit"
    if least > (0, 0):
        told = subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=False).stdout
        found = re.search(r"release (\d+)\.(\d+)", told)
        if found is not None and (int(found[1]), int(found[2])) < least:
            return f"deep_ep {version} needs nvcc {_dotted(least)} or later, got {found[1]}.{found[2]} ({nvcc})"
    return None


class LibraryOptions(BackendOptions):
    """Base of the options of the backends over ``deep_ep``, with all that is the same for both."""

    @property
    @abstractmethod
    def release(self) -> str | None:
        """Name of the release to emulate; None for the installed library."""

    @abstractmethod
    def lacking(self, library: Library) -> str | None:
        """Return why this backend cannot use a library, or None."""

    @abstractmethod
    def features(self, library: Library) -> tuple[str, ...]:
        """Return the features of the library for ``probe``."""

    @abstractmethod
    def open_with(self, library: Library, context: BackendContext) -> LibraryBackend:
        """Open the backend with the library that ``probe`` found usable."""

    @final
    def wire_bytes(self, shape: MoEShape, volume: Volume, dtype: torch.dtype) -> SentBytes:
        """Count the rows only, each sent once to each rank that needs it. The library may send other data too."""
        wires = [shape.wire_dtype or "bfloat16", "bfloat16", shape.grad_wire_dtype or "bfloat16"]
        there, back, gradient = (row_format(dtype, shape.hidden_size, wire) for wire in wires)
        return SentBytes(
            sent={
                "dispatch": volume.pairs_out * there.nbytes,
                "combine": volume.pairs_in * back.nbytes,
                "combine.backward": volume.pairs_out * gradient.nbytes,
                "dispatch.backward": volume.pairs_in * back.nbytes,
            },
            payload_only=True,
            once_per_node=True,
            row_dtypes=(there.numbers, back.numbers),
        )

    def footprint(self, shape: MoEShape, sizes: Sizes, rows: int, dtype: torch.dtype) -> dict[str, int]:
        return expert_major(shape, sizes, rows, values=4 * rows * shape.top_k)

    @final
    def library(self) -> Library | Rejected:
        """Return the library to call, or why there is none."""
        found = find_library(self.release)
        reason = None if isinstance(found, Rejected) else self.lacking(found)
        return found if reason is None else Rejected(reason)

    @final
    def probe(self) -> Usable | Rejected:
        """Never raises. Reading features raises if an environment variable is malformed or a class lacks a method."""
        try:
            found = self.library()
            if isinstance(found, Rejected):
                return found
            more = ("emulated",) if found.emulated else ()
            version = found.version if found.name == PACKAGE else found.named
            return Usable(version=version, features=(*self.features(found), *more))
        except ConfigError as error:
            return Rejected(str(error).rstrip("."))
        except Exception as error:
            return Rejected(f"reading the constraints of deep_ep raised {type(error).__name__}: {error}".rstrip("."))

    @final
    def open(self, context: BackendContext) -> Backend:
        library, communicator = self.library(), context.communicator
        assert isinstance(library, Library)
        if communicator.group is None and not library.emulated:
            raise ConfigError(f"Backend {self.name!r} needs a process group, even for one rank, got None. Pass group=.")
        if communicator.dry_run:
            raise ConfigError(
                f"Backend {self.name!r} needs ranks to exchange rows with, got a dry run on torch's fake process group."
                ' Use backend="alltoall" there.'
            )
        inside = communicator.library_group
        bound = None if inside is None or library.emulated else inside.bound_device_id
        current = None if bound is None else torch.get_device_module(bound).current_device()
        if bound is not None and bound.index != current:
            raise ConfigError(
                f"Backend {self.name!r}: {library.name} runs on the current device, which must be that of the group, "
                f"{bound}, got {bound.type}:{current}. Call torch.{bound.type}.set_device before."
            )
        backend = self.open_with(library, context)
        if communicator.rank == 0:
            if library.emulated:
                release = f"{library.named}: for tests, not for speed"
                warn_once(f"backend {self.name!r} runs on the emulation of {release}.")
            told = (self.name, library.named, communicator.size, backend.details)
            logger.info("backend %r: %s, %d ranks, %s.", *told)
        return backend


@cache
def warn_once(text: str) -> None:
    """Log a warning, once in this process."""
    logger.warning(text)


def parameters(function: Callable[..., Any]) -> frozenset[str]:
    """Return the names of a function's parameters. They tell what an installed version can do."""
    return frozenset(inspect.signature(function).parameters)
