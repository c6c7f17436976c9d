"""Finding ``deep_ep``: the installed one, or on request the emulation. The one module that imports either.

Three variants install the import name ``deep_ep``: v1 has ``Buffer`` only, v2 ``ElasticBuffer`` too, the branch
hybrid-ep ``HybridEPBuffer``. They are told apart by these attributes, never by a version string.
"""

from __future__ import annotations

import inspect
import logging
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from types import ModuleType
from typing import Any, final

import torch

from moe_dispatch.communication import Communicator
from moe_dispatch.errors import ConfigError
from moe_dispatch.probing import Rejected, Usable, import_whole

logger = logging.getLogger("moe_dispatch")

PACKAGE = "deep_ep"
# The kernels of all three variants are built for Hopper and later.
CAPABILITY = (9, 0)


@final
@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Library:
    """A ``deep_ep`` that can be driven.

    Attributes:
        module: the package.
        version: as it says of itself, or the name of the emulated release.
        emulated: it is the emulation, on CPU tensors.
    """

    module: ModuleType
    version: str
    emulated: bool

    @property
    def device(self) -> str:
        """The device type of the tensors it takes."""
        return "cpu" if self.emulated else "cuda"


def find_library(release: str | None) -> Library | Rejected:
    """The emulation of ``release``, or for None the installed library, or why there is none to use. Never raises."""
    return _installed() if release is None else _emulated(release)


@cache
def _emulated(release: str) -> Library:
    # Imported on use: the emulation is of no concern to anyone who does not ask for it.
    emulation = import_module("moe_dispatch.testing.emulation")
    return Library(module=emulation.emulated_deep_ep(release), version=release, emulated=True)


def _installed() -> Library | Rejected:
    if PACKAGE not in sys.modules and find_spec(PACKAGE) is None:
        return Rejected(f"no module named {PACKAGE!r} is installed")
    if not torch.cuda.is_available():
        return Rejected("torch sees no CUDA device")
    capability = torch.cuda.get_device_capability()
    if capability < CAPABILITY:
        return Rejected(
            f"its kernels need compute capability {_dotted(CAPABILITY)}, this device has {_dotted(capability)}"
        )
    try:
        module = import_whole(PACKAGE, PACKAGE)
    except (Exception, SystemExit) as error:  # v2 asserts on what it finds of NCCL and CUDA while it is imported
        return Rejected(f"importing {PACKAGE!r} raised {type(error).__name__}: {str(error).strip() or 'no text'}")
    return Library(module=module, version=_version(module), emulated=False)


def _version(module: ModuleType) -> str:
    try:
        return str(getattr(module, "__version__", None) or version(PACKAGE))
    except PackageNotFoundError:
        return "of unknown version"


def _dotted(capability: tuple[int, int]) -> str:
    return ".".join(map(str, capability))


def openable(backend: str, found: Library | Rejected, communicator: Communicator) -> Library:
    """The library that ``probe`` found usable, if it can be opened for these ranks.

    Raises:
        ConfigError: a real one takes no single rank without a process group.
    """
    assert isinstance(found, Library)
    if communicator.group is None and not found.emulated:
        raise ConfigError(f"Backend {backend!r}: it needs a process group, also for one rank, got None. Pass group=.")
    return found


def report_open(backend: str, library: Library, communicator: Communicator, details: str) -> None:
    """Log what a channel was opened with; an emulation is announced once per process, by the first rank."""
    if communicator.rank:
        return
    if library.emulated:
        _announce(backend, library.version)
    logger.info("backend %r: deep_ep %s, %d ranks, %s.", backend, library.version, communicator.size, details)


@cache
def _announce(backend: str, release: str) -> None:
    logger.warning("backend %r runs on the emulation of deep_ep %s: for tests, not for speed.", backend, release)


def probed(probe: Callable[[], Usable | Rejected]) -> Usable | Rejected:
    """What a probe finds; rejected where it stumbles: a malformed variable, a class that lacks a method."""
    try:
        return probe()
    except ConfigError as error:
        return Rejected(str(error).rstrip("."))
    except Exception as error:
        return Rejected(f"asking deep_ep what it needs raised {type(error).__name__}: {error}".rstrip("."))


def parameters(function: Callable[..., Any]) -> frozenset[str]:
    """Names of a function's parameters: what an installed version understands."""
    return frozenset(inspect.signature(function).parameters)
