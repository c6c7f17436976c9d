"""Optional packages and folders of this one: whether they are there, how to install them, how to import them whole."""

from __future__ import annotations

import ctypes
import os
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any, final

from moe_dispatch.errors import ConfigError

_importing = threading.RLock()


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Usable:
    """Says that something can run on this machine.

    Attributes:
        version: Its version.
        features: Names of optional abilities that it has here.
    """

    version: str
    features: tuple[str, ...] = ()


@final
@dataclass(frozen=True, slots=True)
class Rejected:
    """Says that something cannot run on this machine.

    Attributes:
        reason: Why not, in one sentence without a full stop.
    """

    reason: str


def how_to_install(extra: str, checkout: Path = Path(__file__).parents[1]) -> str:
    """Return a sentence with the command that installs the packages of an extra.

    Args:
        extra: Name of the extra in ``pyproject.toml``.
        checkout: Folder that holds the package: a checkout, or ``site-packages`` if it was installed from a wheel.
    """
    if (checkout / "pyproject.toml").is_file():
        return f"In {checkout}, run: pip install -e '.[{extra}]'."
    # No index is asked for moe-dispatch, because it is installed: pip only installs what its metadata lists.
    return f"Run: pip install 'moe-dispatch[{extra}]'."


def loaded_nccl() -> tuple[int, int, int] | None:
    """Return the version of the NCCL that this process has loaded; None if none is loaded, or it cannot be asked.

    ``torch.cuda.nccl.version()`` is the version that torch was compiled with. It stays the same if another NCCL is
    installed. Builds of torch that link NCCL statically may export its function from ``libtorch_cuda.so``.
    """
    for name in ("libnccl.so.2", "libtorch_cuda.so"):
        with suppress(OSError, AttributeError):  # not loaded, or without the function
            number = ctypes.c_int()
            # RTLD_NOLOAD finds a library only if the process has loaded it. Not every system has it.
            if ctypes.CDLL(name, mode=os.RTLD_NOLOAD).ncclGetVersion(ctypes.byref(number)) == 0:
                return number.value // 10000, number.value // 100 % 100, number.value % 100
    return None


def has_code(package: str) -> bool:
    """Return whether a folder of this package is there with its code. A deleted one may have left its bytecode."""
    spec = find_spec(package)
    return spec is not None and spec.origin is not None


def require_plug_in(package: str, what: str) -> None:
    """Raise ConfigError if a folder of this package is not there.

    Args:
        package: Name of the folder as a package.
        what: Sentences that say what needs it and that it may be left out.
    """
    if not has_code(package):
        raise ConfigError(f"{package} is not installed. {what}, or install the whole package.")


def import_whole(name: str, package: str) -> ModuleType:
    """Import a module that needs an optional package.

    Args:
        name: Module to import.
        package: Top-level package that this import may load. If the import fails, every part of the package that it
            loaded is removed from ``sys.modules``. A later import then starts anew.

    Raises:
        Exception: Whatever the import raises.
    """
    with _importing:  # a failed import must not remove what another thread has just loaded
        before = set(sys.modules)
        try:
            return import_module(name)
        except BaseException:
            for other in set(sys.modules) - before:
                if other.partition(".")[0] == package:
                    del sys.modules[other]
            raise


def imported_on_use(
    namespace: dict[str, Any], **modules: str
) -> tuple[Callable[[str], object], Callable[[], list[str]]]:
    """Return ``__getattr__`` and ``__dir__`` of a package that imports some of its names on first use.

    Args:
        namespace: The ``globals()`` of the package.
        **modules: The module of each of these names.
    """

    def get(name: str) -> object:
        if name not in modules:
            raise AttributeError(f"module {namespace['__name__']!r} has no attribute {name!r}")
        value = namespace[name] = getattr(import_module(modules[name]), name)
        return value

    return get, lambda: sorted({*namespace, *modules})
